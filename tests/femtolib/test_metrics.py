"""Whether metrics.jsonl reads as if the run had never stopped, and whether its ledger finds what was changed in it."""

import hashlib
import json
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from femtolib.errors import FemtoError, RunFailed
from femtolib.metrics import JsonLines, Trackers, last_event, next_ledger, tensors_digest, verify_ledger
from femtolib.sections import LogSection

# ── Writing and cutting back ──────────────────────────────────────────────────────────────────────────────────────────


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path: Path) -> list[dict]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


START = {"event": "start", "resumed_from": None}


def at(step: int, event: str = "validation") -> dict:
    return {"event": event, "step": step}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_lines_are_whole_on_the_disk_as_soon_as_they_are_written_and_in_full_precision(path):
    lines = JsonLines(path, None)
    values = {"loss": 0.1 + 0.2, "tiny": 5e-324, "none": None, "large": 2**63 + 1, "text": "é\n\u2028", "list": [1.5]}
    lines.write(event="validation", step=1, **values)
    assert read_lines(path) == [{"event": "validation", "step": 1, **values}]
    lines.write(step=2)
    lines.sync()
    assert len(path.read_bytes().splitlines()) == 2
    lines.close()


def test_nothing_that_is_no_json_is_written(path):
    lines = JsonLines(path, None)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            lines.write(event="train", step=1, loss=value)
    lines.close()
    assert path.read_bytes() == b""


def test_a_run_from_its_start_replaces_what_one_without_a_checkpoint_left(path):
    path.write_text('{"step": 1}\nnot json\n{"st')
    JsonLines(path, None).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("step", "kept"),
    [(0, 1), (1, 2), (2, 4), (3, 5), (4, 8), (5, 9), (6, 10), (9, 10)],
)
def test_a_resume_keeps_the_lines_up_to_its_step_and_no_other(path, step, kept):
    records = [
        START, at(1), at(2), at(2, "checkpoint"), at(3), at(4), at(4, "checkpoint"), START | {"resumed_from": 4}, at(5),
        at(6),
    ]  # fmt: skip
    write_lines(path, records)
    lines = JsonLines(path, step)
    lines.write(**START | {"resumed_from": step})
    lines.close()
    assert read_lines(path) == [*records[:kept], START | {"resumed_from": step}]


def test_a_start_of_a_later_resume_goes_with_the_lines_after_it(path):
    write_lines(path, [START, at(1), at(2), START | {"resumed_from": 2}, at(3)])
    JsonLines(path, 1).close()
    assert read_lines(path) == [START, at(1)]


@pytest.mark.parametrize(
    "torn",
    ['{"event": "tra', '{"event": "validation", "step": 2}', '{"event": "train", "step": 3}', "\0\0\0\0", "é", "\n",
     '{"a": 1}\n', "5\n", '{"event": "train", "step": 3}\n', '{"event": "validation", "step": "3"}\n'],
)  # fmt: skip
def test_a_torn_last_line_is_removed(path, torn):
    write_lines(path, [START, at(1)])
    with path.open("ab") as file:
        file.write(torn.encode())
    assert last_event(path) == at(1)
    lines = JsonLines(path, 9)
    lines.write(**at(2))
    lines.close()
    assert read_lines(path) == [START, at(1), at(2)]


def test_a_line_torn_inside_a_character_is_removed(path):
    write_lines(path, [at(1)])
    with path.open("ab") as file:
        file.write('{"event": "é'.encode()[:-1])
    JsonLines(path, 9).close()
    assert read_lines(path) == [at(1)]


@pytest.mark.parametrize("broken", ["not json", '{"event": "train"', "5", "null", "[]", "{}", '{"event": "start"}', "",
                                    '{"event": "validation", "step": 1e400}', '{"event": "train", "step": 1}',
                                    '{"event": "train", "step": 1, "ledger": 5, "batch_digest": "a"}',
                                    '{"event": "train", "step": 1, "ledger": "é", "batch_digest": "a"}',
                                    "[" * 100_000, "\0"])  # fmt: skip
def test_a_broken_line_before_the_last_is_refused_with_its_number(path, broken):
    path.write_text(f"{json.dumps(START)}\n{broken}\n{json.dumps(at(2))}\n")
    before = path.read_bytes()
    for act in (lambda: JsonLines(path, 2), lambda: verify_ledger(path, 2, "0" * 16), lambda: last_event(path)):
        with pytest.raises(FemtoError) as caught:
            act()
        [fault] = caught.value.faults
        assert fault.startswith(f"{path}:2: ") and "move it away" in fault
    assert path.read_bytes() == before


def test_an_empty_and_a_missing_file_have_no_last_event(path):
    assert last_event(path) == {}
    path.write_text("")
    assert last_event(path) == {}
    JsonLines(path, 5).close()
    assert path.read_bytes() == b""


def test_samples_have_steps_and_no_events(tmp_path):
    path = tmp_path / "samples-rank0.jsonl"
    write_lines(path, [{"step": step, "micro_batch": m, "rows": [step]} for step in (1, 2, 3) for m in (0, 1)])
    JsonLines(path, 2).close()
    assert [line["step"] for line in read_lines(path)] == [1, 1, 2, 2]


def test_a_full_disk_ends_the_run_by_name_and_the_torn_line_goes_on_resume(path):
    lines = JsonLines(path, None)
    lines.write(**at(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(RunFailed, match=r"metrics\.jsonl.*too large"):
            lines.write(**at(2))
        del lines
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines = JsonLines(path, 1)
    lines.write(**at(2))
    lines.close()
    assert read_lines(path) == [at(1), at(2)]


# ── The ledger ────────────────────────────────────────────────────────────────────────────────────────────────────────


def sha16(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def digest_of(step: int) -> str:
    return f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"


def history(steps: int, first: int = 1, ledger: str = "0" * 16) -> list[dict]:
    """Train lines whose ledger is chained here, by the published rule."""
    lines = []
    for step in range(first, first + steps):
        ledger = sha16(f"{ledger} {step} {digest_of(step)}")
        lines.append({"event": "train", "step": step, "batch_digest": digest_of(step), "ledger": ledger})
    return lines


def test_the_ledger_is_sha256_of_the_one_before_the_step_and_the_digest():
    # printf '0000000000000000 1 00000000000000ff' | sha256sum
    expected = hashlib.sha256(b"0000000000000000 1 00000000000000ff").hexdigest()[:16]
    assert next_ledger("0" * 16, 1, "00000000000000ff") == expected
    ledger = "0" * 16
    for line in history(20):
        ledger = next_ledger(ledger, line["step"], line["batch_digest"])
        assert ledger == line["ledger"]


def test_a_whole_history_passes_wherever_it_was_resumed(path):
    lines = history(6)
    write_lines(path, [START, *lines[:4], at(4, "checkpoint"), START | {"resumed_from": 4}, *lines[4:]])
    for step in range(1, 7):
        verify_ledger(path, step, lines[step - 1]["ledger"])


def test_lines_past_the_checkpoint_are_not_looked_at(path):
    lines = history(6)
    lines[5]["ledger"] = "f" * 16
    del lines[4]
    write_lines(path, [START, *lines])
    verify_ledger(path, 4, lines[3]["ledger"])


def change(key: str, value, place: int = 2) -> object:
    def tamper(lines: list[dict]) -> None:
        lines[place] = lines[place] | {key: value}

    return tamper


def swapped(lines: list[dict]) -> None:
    lines[1], lines[2] = lines[2], lines[1]


def rewritten(lines: list[dict]) -> None:
    """One digest changed and the whole chain after it made to agree."""
    ledger = lines[1]["ledger"]
    lines[2]["batch_digest"] = "0" * 16
    for line in lines[2:]:
        ledger = line["ledger"] = sha16(f"{ledger} {line['step']} {line['batch_digest']}")


@pytest.mark.parametrize(
    "tamper",
    [
        change("batch_digest", "0" * 16), change("ledger", "0" * 16), change("step", 9), change("step", 2),
        change("batch_digest", "0" * 16, 0), change("batch_digest", "0" * 16, 5), swapped, rewritten,
        lambda lines: lines.pop(0), lambda lines: lines.pop(2), lambda lines: lines.pop(), lambda lines: lines.clear(),
        lambda lines: lines.insert(2, lines[2]), lambda lines: lines.__delitem__(slice(0, 3)),
        lambda lines: lines.__delitem__(slice(3, 6)),
    ],
)  # fmt: skip
def test_a_changed_missing_or_doubled_line_is_found(path, tamper):
    lines = history(6)
    ledger = lines[5]["ledger"]
    tamper(lines)
    write_lines(path, [START, *lines, at(6, "checkpoint")])
    with pytest.raises(FemtoError) as caught:
        verify_ledger(path, 6, ledger)
    [fault] = caught.value.faults
    assert fault.startswith(str(path)) and "move it away" in fault


def test_another_runs_file_is_found(path):
    write_lines(path, [START, *history(6)])
    with pytest.raises(FemtoError, match="step 6") as caught:
        verify_ledger(path, 6, "f" * 16)
    assert "f" * 16 in str(caught.value) and history(6)[-1]["ledger"] in str(caught.value)
    with pytest.raises(FemtoError, match="step 6"):
        verify_ledger(path, 8, history(8)[-1]["ledger"])


def test_a_checkpoint_continued_in_a_new_folder_is_verified_from_its_own_lines_on(path):
    whole = history(9)
    verify_ledger(path, 4, whole[3]["ledger"])  # no file yet
    write_lines(path, [START | {"resumed_from": 4}])
    verify_ledger(path, 4, whole[3]["ledger"])  # begun, no step made
    write_lines(path, [START | {"resumed_from": 4}, *whole[4:]])
    verify_ledger(path, 4, whole[3]["ledger"])
    verify_ledger(path, 9, whole[8]["ledger"])
    for broken in (whole[5:], [whole[4], *whole[6:]], [*whole[4:7], whole[7] | {"batch_digest": "0" * 16}, whole[8]]):
        write_lines(path, [START | {"resumed_from": 4}, *broken])
        with pytest.raises(FemtoError):
            verify_ledger(path, 9, whole[8]["ledger"])


# ── Digests of tensors ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_digest_is_sha256_over_names_and_bytes_in_order():
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor(2.5, dtype=torch.bfloat16),
        "step": torch.tensor(3.0),
    }
    expected = hashlib.sha256(b"a" + tensors["a"].numpy().tobytes())
    expected.update(b"b" + (0x4020).to_bytes(2, "little") + b"step" + tensors["step"].numpy().tobytes())
    assert tensors_digest(tensors.items()) == expected.hexdigest()[:16]
    assert tensors_digest(reversed(tensors.items())) != tensors_digest(tensors.items())
    assert tensors_digest([]) == hashlib.sha256().hexdigest()[:16]


def test_a_digest_knows_values_not_memory_layout():
    x = torch.arange(6.0).reshape(2, 3)
    assert tensors_digest([("x", x.T.contiguous().T)]) == tensors_digest([("x", x)])
    assert tensors_digest([("x", x.requires_grad_())]) == tensors_digest([("x", x.detach())])
    other = x.detach().clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(10.0))
    assert tensors_digest([("x", other)]) != tensors_digest([("x", x)])


# ── Trackers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_tracker_nothing_is_imported_or_written(tmp_path):
    before = set(sys.modules)
    trackers = Trackers(LogSection(), tmp_path, {}, 0)
    trackers.log(1, "train", {"loss": 1.0})
    trackers.close()
    assert not list(tmp_path.iterdir())
    assert not {"wandb", "tensorboard"} & (set(sys.modules) - before)


def test_tensorboard_gets_the_numbers_and_nothing_else(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(LogSection(tensorboard=True), tmp_path, {}, 0)
    for step in (10, 20):
        trackers.log(step, "train", {"step": step, "loss": 1.0 / step, "grad_norm": None, "ledger": "abc", "tokens": 5})
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/tokens"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (10, pytest.approx(0.1)),
        (20, pytest.approx(0.05)),
    ]


@pytest.mark.slow
def test_the_real_library_of_weights_and_biases_takes_what_a_run_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = Trackers(LogSection(wandb_project="p"), tmp_path, {"lr": 1}, 0)
    trackers.log(3, "train", {"step": 3, "loss": 2.0, "none": None})
    trackers.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_weights_and_biases_without_a_login_are_refused_in_a_line(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    program = f"""
from pathlib import Path
from femtolib.errors import FemtoError
from femtolib.metrics import Trackers
from femtolib.sections import LogSection
try:
    Trackers(LogSection(wandb_project="p"), Path({str(tmp_path)!r}), {{}}, 0)
except FemtoError as error:
    print(*error.faults, sep="\\n")
"""  # in a process of its own: the library remembers how it was first set up
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    [fault] = ended.stdout.splitlines()
    assert fault.startswith("log.wandb_project: W&B does not start: ") and "WANDB_MODE=offline" in fault, ended


def test_a_resume_goes_on_in_the_same_run_of_weights_and_biases(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    wandb = types.SimpleNamespace(init=lambda **arguments: calls.append(arguments) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    section = LogSection.model_construct(**LogSection().model_dump() | {"wandb_project": "p"})
    for _ in range(2):
        trackers = Trackers(section, tmp_path, {"lr": 1}, 0)
        trackers.log(3, "train", {"step": 3, "loss": 2.0, "none": None})
        trackers.close()
    first, second = (call for call in calls if isinstance(call, dict))
    assert first["id"] == second["id"] and len(first["id"]) == 16
    assert first["resume"] == "allow" and first["project"] == "p"
    assert first["config"] == {"lr": 1} and first["dir"] == tmp_path
    assert [call for call in calls if isinstance(call, tuple)] == [(3, {"train/loss": 2.0})] * 2
    assert calls.count("finish") == 2
