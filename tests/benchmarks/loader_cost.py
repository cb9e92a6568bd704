"""CPU time that a batch costs before the model sees it, by part and whole: `python tests/benchmarks/loader_cost.py`.

4 rows of 512 + 1 tokens in random order out of 20 million, as one step of the reference model reads them; that step
takes 3.5 CPU seconds, of which all of this may be 1 %. With workers, `this process` is what the training loop pays and
`workers` what happens beside it (their start not counted).
"""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from femtolib.data.loader import collate, make_loader, row_digest
from femtolib.data.sampler import StatefulDistributedSampler
from femtolib.data.token_dataset import TokenDataset
from femtolib.data.token_files import Index, write_index, write_shard

ROWS, SEQ_LEN, STEPS = 4, 512, 2000
STEP_CPU_SECONDS, SHARE = 3.5, 0.01


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = TokenDataset([_write_tokens(Path(folder))], rows="stream", seq_len=SEQ_LEN)

        def sampler() -> StatefulDistributedSampler:
            return StatefulDistributedSampler(
                len(dataset), global_batch_size=ROWS, micro_batch_size=ROWS, steps=STEPS + 200
            )

        micro_batches = list(sampler())
        rows = [[dataset[slot.row] for slot in slots] for slots in micro_batches]
        settings = {"seq_len": SEQ_LEN, "eos_id": dataset.eos_id, "document_mask": False}
        batch = collate(rows[0], micro_batches[0], **settings)
        inputs, labels = batch.input_ids.numpy(), batch.labels.numpy()
        print(f"CPU µs a batch of {ROWS} rows of {SEQ_LEN + 1} tokens, mean of {STEPS}")
        _report("sampler", _cpu(lambda: list(sampler())) / len(rows))
        _report("rows", _cpu(lambda: [[dataset[slot.row] for slot in slots] for slots in micro_batches]) / len(rows))
        made = _cpu(lambda: [collate(*pair, **settings) for pair in zip(rows, micro_batches, strict=True)]) / len(rows)
        _report("collator, digest included", made)
        digest = _cpu(lambda: [row_digest(i, inputs[i % ROWS], labels[i % ROWS], None) for i in range(ROWS * STEPS)])
        _report("  digest", digest / STEPS)
        for document_mask in (False, True):
            for num_workers in (0, 2):
                loader = make_loader(dataset, sampler(), document_mask=document_mask, num_workers=num_workers)
                here, workers = _loop(loader)
                masked = ", document mask" if document_mask else ""
                _report(f"loader, {num_workers} workers{masked}: this process", here)
                if num_workers:
                    _report(f"loader, {num_workers} workers{masked}: workers", workers)
                share = (here + workers) / 1e6 / STEP_CPU_SECONDS
                print(f"{'':<50}{share:8.3%} of a step ({'within' if share < SHARE else 'ABOVE'} {SHARE:.0%})")


def _loop(loader) -> tuple[float, float]:
    """CPU µs a batch of this process and of its workers. The first 100 of STEPS + 200 batches are not counted, the last
    not asked for: the workers would be gone with them."""
    batches = iter(loader)
    for _ in range(100):
        next(batches)
    here, workers = time.process_time(), _workers_cpu()
    for _ in range(STEPS):
        next(batches)
    return (time.process_time() - here) / STEPS * 1e6, (_workers_cpu() - workers) / STEPS * 1e6


def _workers_cpu() -> float:
    """CPU seconds that the living workers have used so far (Linux)."""
    stats = [Path(f"/proc/{worker.pid}/stat").read_text() for worker in multiprocessing.active_children()]
    ticks = sum(int(ticks) for stat in stats for ticks in stat.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu(function) -> float:
    """CPU µs of the second of two calls."""
    function()
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e6


def _report(what: str, microseconds: float) -> None:
    print(f"{what:<50}{microseconds:8.1f}")


def _write_tokens(directory: Path) -> Path:
    random = np.random.default_rng(0)
    shards = []
    for number in range(4):
        lengths = random.integers(50, 2000, 5000)
        tokens = random.integers(1, 2048, lengths.sum()).astype(np.uint16)
        ends = np.cumsum(lengths)
        tokens[ends - 1] = 0
        shards.append(write_shard(directory, number, tokens, (ends - lengths).astype(np.int64)))
    index = Index(
        dtype="uint16",
        vocab_size=2048,
        largest_id=2047,
        eos_id=0,
        bos_id=None,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        skipped={"empty": 0, "bad": 0},
        sources=[],
        tokenizer_digest="0" * 64,
        template_digest=None,
        shards=shards,
    )
    write_index(directory, index)
    return directory


if __name__ == "__main__":
    main()
