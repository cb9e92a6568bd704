"""Batches: what is trained in them, what they are called, and that workers change neither."""

import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from femtolib.data.loader import collate, make_loader
from femtolib.data.sampler import EMPTY, Slot, StatefulDistributedSampler
from femtolib.data.token_dataset import Row, TokenDataset
from femtolib.errors import FemtoError

EOS = 9


def _row(*documents: list[int]) -> Row:
    """A row of whole documents."""
    numbers = [number for number, document in enumerate(documents) for _ in document]
    return Row(np.array([token for document in documents for token in document]), np.array(numbers, np.int32))


def _batch(*rows: Row | None, seq_len: int, document_mask: bool = False, positions: range | None = None):
    places = positions or range(len(rows))
    slots = [Slot(EMPTY if row is None else 70 + place, place) for row, place in zip(rows, places, strict=True)]
    return collate(rows, slots, seq_len=seq_len, eos_id=EOS, document_mask=document_mask)


# ── Inputs and labels ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_labels_are_the_next_tokens():
    batch = _batch(_row([1, 2, 3, EOS], [4, 5, EOS]), seq_len=6)
    assert batch.input_ids.tolist() == [[1, 2, 3, EOS, 4, 5]]
    assert batch.labels.tolist() == [[2, 3, EOS, 4, 5, EOS]]
    assert batch.trained_tokens == 6
    assert batch.position_ids is None and batch.document_ids is None


def test_a_document_mask_trains_no_token_across_documents():  # functionary#265
    batch = _batch(_row([1, 2, 3, EOS], [4, 5, EOS]), seq_len=6, document_mask=True)
    assert batch.labels.tolist() == [[2, 3, EOS, -100, 5, EOS]]
    assert batch.trained_tokens == 5
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize("document_mask", [False, True])
def test_padding_is_known_by_its_place_and_not_by_its_id(document_mask):  # trl#976
    """EOS inside a row and at its end is trained, though padding has the same id."""
    batch = _batch(_row([1, EOS, 2, EOS]), None, seq_len=6, document_mask=document_mask)
    assert batch.input_ids.tolist() == [[1, EOS, 2, EOS, EOS, EOS], [EOS] * 6]
    assert batch.labels.tolist() == [[EOS, 2, EOS, -100, -100, -100], [-100] * 6]
    assert batch.rows == [70] and batch.trained_tokens == 3
    if document_mask:
        assert batch.document_ids.tolist() == [[0, 0, 0, 0, -1, -1], [-1] * 6]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_a_row_of_one_token_trains_nothing():
    batch = _batch(_row([EOS]), seq_len=2, document_mask=True)
    assert batch.labels.tolist() == [[-100, -100]] and batch.trained_tokens == 0 and batch.rows == [70]


def test_batches_move_as_a_whole():
    batch = _batch(_row([1, 2, EOS]), seq_len=2, document_mask=True)
    moved = batch.to("meta")
    tensors = (moved.input_ids, moved.labels, moved.position_ids, moved.document_ids)
    assert all(tensor.is_meta and tensor.dtype == torch.int64 and tensor.shape == (1, 2) for tensor in tensors)
    assert (moved.rows, moved.trained_tokens, moved.digest) == (batch.rows, batch.trained_tokens, batch.digest)


# ── The digest ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_digest_can_be_recomputed_from_its_published_format(document_mask):
    rows = [_row([1, 2, 3, EOS], [4, 5, EOS]), _row([2**31 - 1, EOS]), None]
    batch = _batch(*rows, seq_len=6, document_mask=document_mask, positions=range(5, 8))
    total = 0
    for place in range(2):
        content = struct.pack("<q", 5 + place) + struct.pack("<6i", *batch.input_ids[place].tolist())
        content += struct.pack("<6i", *batch.labels[place].tolist())
        if document_mask:
            content += struct.pack("<6i", *batch.document_ids[place].tolist())
        total += struct.unpack("<Q", hashlib.sha256(content).digest()[:8])[0]
    assert batch.digest == total % 2**64


def test_the_digest_notices_any_change():
    one, two = _row([1, 2, EOS]), _row([3, 4, EOS])
    other_label = Row(np.array([1, 2, EOS]), np.array([0, 0, 1], np.int32))
    digests = [
        _batch(one, two, seq_len=2, document_mask=True).digest,
        _batch(two, one, seq_len=2, document_mask=True).digest,
        _batch(one, one, seq_len=2, document_mask=True).digest,
        _batch(other_label, two, seq_len=2, document_mask=True).digest,
        _batch(one, two, seq_len=2).digest,
        _batch(one, None, seq_len=2, document_mask=True).digest,
        _batch(None, None, seq_len=2, document_mask=True).digest,
    ]
    assert len(set(digests)) == len(digests) and digests[-1] == 0


# ── The loader ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def dataset(tagged_tokens) -> TokenDataset:
    return TokenDataset([tagged_tokens], rows="stream", seq_len=32)


def _sampler(dataset, micro_batch_size=2, consumed=0, **settings) -> StatefulDistributedSampler:
    sampler = StatefulDistributedSampler(
        len(dataset), global_batch_size=10, micro_batch_size=micro_batch_size, **{"steps": 6, **settings}
    )
    sampler.load_state_dict({"consumed_rows": consumed, "rows": len(dataset), "seed": 0})
    return sampler


def _content(loader) -> list[tuple]:
    return [
        (batch.input_ids.tolist(), batch.labels.tolist(), batch.rows, batch.trained_tokens, batch.digest)
        for batch in loader
    ]


def test_batches_hold_the_rows_that_they_name(dataset):
    for batch in make_loader(dataset, _sampler(dataset), document_mask=False):
        expected = np.stack([dataset[row].tokens for row in batch.rows])
        assert batch.input_ids.tolist() == expected[:, :-1].tolist()
        assert batch.labels.tolist() == expected[:, 1:].tolist()


def test_workers_change_nothing_and_resume_needs_not_as_many(dataset):
    plain = _content(make_loader(dataset, _sampler(dataset), document_mask=True))
    assert len(plain) == 30
    for num_workers, prefetch in ((1, 1), (2, 3)):
        settings = {"document_mask": True, "num_workers": num_workers, "prefetch": prefetch}
        assert _content(make_loader(dataset, _sampler(dataset), **settings)) == plain
        assert _content(make_loader(dataset, _sampler(dataset, consumed=40), **settings)) == plain[20:]
    assert _content(make_loader(dataset, _sampler(dataset, consumed=40), document_mask=True)) == plain[20:]


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_each_layout_adds_up_to_the_same_tokens_and_digest(uneven_tokens, tail):
    dataset = TokenDataset([uneven_tokens], rows="padded", seq_len=48)
    layouts = []
    for dp_size, micro_batch_size in ((1, 10), (1, 1), (1, 3), (2, 2), (3, 4), (4, 1)):
        totals = [[0, 0, 0] for _ in range(6)]  # of each step: trained tokens, digest, rows
        for dp_rank in range(dp_size):
            sampler = _sampler(dataset, micro_batch_size, dp_rank=dp_rank, dp_size=dp_size, tail=tail)
            for number, batch in enumerate(make_loader(dataset, sampler, document_mask=False)):
                total = totals[number // sampler.micro_batches_per_step]
                total[0] += batch.trained_tokens
                total[1] = (total[1] + batch.digest) % 2**64
                total[2] += len(batch.rows)
        layouts.append(totals)
    assert all(totals == layouts[0] for totals in layouts)
    assert [rows for _, _, rows in layouts[0]] == ([10] * 6 if tail == "drop" else [10, 10, 10, 7, 10, 10])


def test_workers_read_so_many_batches_ahead_and_no_more(dataset):
    class Recorder(StatefulDistributedSampler):
        asked = 0

        def __iter__(self):
            for slots in super().__iter__():
                self.asked += 1
                yield slots

    sampler = Recorder(len(dataset), global_batch_size=1, micro_batch_size=1, steps=40)
    batches = iter(make_loader(dataset, sampler, document_mask=False, num_workers=2, prefetch=3))
    for delivered in range(1, 6):
        next(batches)
        assert sampler.asked == delivered + 6
    assert sampler.consumed_rows == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_draws_no_random_number(dataset, num_workers):
    before = torch.get_rng_state()
    list(make_loader(dataset, _sampler(dataset, steps=1), document_mask=False, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fault_in_a_worker_arrives_as_it_is(write_tokens, tmp_path, num_workers):
    directory = write_tokens(tmp_path / "tokens", [[1, 2, 3]] * 40, vocab_size=10, shards=2)
    dataset = TokenDataset([directory], rows="stream", seq_len=4)
    (directory / "tokens-00001.safetensors").unlink()
    sampler = StatefulDistributedSampler(len(dataset), global_batch_size=1, micro_batch_size=1, shuffle=False)
    read = 0
    with pytest.raises(FemtoError) as error:
        for _ in make_loader(dataset, sampler, document_mask=False, num_workers=num_workers):
            read += 1
    assert read == 19  # the rows before the missing shard: the fault waits its turn
    (fault,) = error.value.faults
    assert "tokens-00001.safetensors: cannot be read" in fault and "Traceback" not in fault


def test_any_other_error_in_a_worker_keeps_its_message(dataset):
    class Broken(TokenDataset):
        def __getitem__(self, index):
            raise ValueError("row 3 is upside down")

    dataset.__class__ = Broken
    with pytest.raises(ValueError, match="row 3 is upside down"):
        next(iter(make_loader(dataset, _sampler(dataset), document_mask=False, num_workers=2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_arrive_in_pinned_memory(dataset, num_workers):
    loader = make_loader(dataset, _sampler(dataset), document_mask=True, num_workers=num_workers, pin_memory=True)
    for batch in loader:
        assert batch.input_ids.is_pinned() and batch.document_ids.is_pinned()
        assert batch.to("cuda").labels.is_cuda


# ── Signals ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_PROGRAM = """
import signal, sys, time
from pathlib import Path
from femtolib.data.loader import make_loader
from femtolib.data.sampler import StatefulDistributedSampler
from femtolib.data.token_dataset import TokenDataset

dataset = TokenDataset([Path(sys.argv[1])], rows="stream", seq_len=32)
sampler = StatefulDistributedSampler(len(dataset), global_batch_size=1, micro_batch_size=1, steps=60)
batches = iter(make_loader(dataset, sampler, document_mask=False, num_workers=2))
for number in (signal.SIGTERM, signal.SIGINT):  # only now, or the workers would have it from here
    signal.signal(number, signal.SIG_IGN)
for step, batch in enumerate(batches):
    print(step, flush=True)
    time.sleep(0.02)
    if sys.argv[2] == "raise" and step == 5:
        raise ValueError("step 5")
"""


@pytest.fixture
def program(tagged_tokens):
    """`program("whole")`: a process that reads 60 batches with 2 workers, in a session of its own, past its first."""
    started = []

    def program(mode: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(tagged_tokens), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "0\n"
        return process

    yield program
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _alive(session: int) -> int:
    """How many processes of a session are alive."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, _group, number = stat.read_text().rpartition(")")[2].split()[:4]
            count += int(number) == session and state != "Z"
    return count


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@linux
def test_workers_outlive_signals_to_the_whole_process_group(program):
    process = program("whole")
    assert _alive(process.pid) == 3
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stdout.split()[-1]) == (0, "59"), stderr
    assert stderr == "" and _alive(process.pid) == 0


@linux
@pytest.mark.slow
def test_workers_die_with_a_killed_parent(program):
    process = program("whole")
    process.kill()
    deadline = time.monotonic() + 60
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _alive(process.pid) == 0


@linux
def test_an_error_between_batches_ends_the_process_and_its_workers(program):
    process = program("raise")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1 and stderr.rstrip().endswith("ValueError: step 5")
    assert stderr.count("Traceback") == 1 and _alive(process.pid) == 0
