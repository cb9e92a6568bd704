"""What a run writes down: metrics.jsonl, the batch ledger, and the trackers (TensorBoard, Weights & Biases).

metrics.jsonl holds one JSON object a line in full precision, in the order in which things happened, and belongs to the
state of a run: a resume cuts it back to the checkpoint's step, so that it reads as if the run had never stopped. The
ledger chains the digests of all global batches; two runs saw the same data in the same order exactly if their ledgers
agree, on whatever devices they ran.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel.world import local_part
from femtolib.sections import LogSection

LEDGER_START = "0" * 16


def next_ledger(previous: str, step: int, batch_digest: str) -> str:
    """The ledger after `step`: first 16 hex digits of sha256("previous step digest"), the whole history in one word."""
    return hashlib.sha256(f"{previous} {step} {batch_digest}".encode("ascii")).hexdigest()[:16]


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """First 16 hex digits of sha256 over names and bytes, in the order given; of sharded tensors, this rank's part."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(local_part(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


class JsonLines:
    """A file of one JSON object a line, each with the step it belongs to, that a resume cuts back.

    `resumed_from` is the step whose checkpoint is continued: lines past it, and a torn last one, are removed. None is a
    run from its start, which replaces what an earlier run without a checkpoint left. `muted`: touch no file, for the
    ranks that leave the writing to another.
    """

    def __init__(self, path: Path, resumed_from: int | None, *, muted: bool = False):
        if muted:
            path, resumed_from = Path(os.devnull), None
        kept = 0
        if resumed_from is not None:
            for line, record in _read_lines(path):
                if _step_of(record) > resumed_from:
                    break
                kept += len(line)
        self._path, self._muted = path, muted
        self._file = path.open("a", encoding="utf-8")
        if not muted:
            self._file.truncate(kept)

    def write(self, **record: Any) -> None:
        """Add a line and hand it to the system; raises RunFailed where that fails (a full disk)."""
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise RunFailed(f"{self._path}: could not be written: {error.strerror}") from None

    def sync(self) -> None:
        """Onto the disk: a checkpoint that is published must find its lines there, even after a power cut."""
        if not self._muted:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def open_samples(output_dir: Path, step: int, *, rank: int = 0, world_size: int = 1) -> JsonLines:
    """The file that takes down which rows this rank used. What ranks wrote that a smaller run no longer has, is cut
    back to `step` by rank 0, as the others cut their own."""
    if rank == 0:
        for path in output_dir.glob("samples-rank*.jsonl"):
            number = path.stem.removeprefix("samples-rank")
            if number.isdigit() and int(number) >= world_size:
                JsonLines(path, step).close()
    return JsonLines(output_dir / f"samples-rank{rank}.jsonl", step)


def verify_ledger(path: Path, step: int, ledger: str) -> None:
    """Check that the train lines of `path` up to `step` chain to a checkpoint's `ledger`; raises FemtoError if not.

    The chain begins where the run that wrote the file began. Nothing to check where there is no file: a checkpoint may
    be continued in a new folder, and there the chain begins with the first line after it.
    """
    last, previous = None, None  # step and ledger of the line before; the first line says where the file begins
    for number, (_, record) in enumerate(_read_lines(path), 1):
        if last is None:
            last = _step_of(record) - (record.get("event") != "start")
            previous = LEDGER_START if last == 0 else None
        if record.get("event") != "train" or record["step"] > step:
            continue
        if record["step"] != last + 1:
            raise FemtoError(f"{path}:{number}: step {record['step']} follows step {last}; {_MOVE_AWAY}")
        if previous is not None and record["ledger"] != next_ledger(previous, record["step"], record["batch_digest"]):
            raise FemtoError(f"{path}:{number}: the ledger breaks at step {record['step']}; {_MOVE_AWAY}")
        last, previous = record["step"], record["ledger"]
    if last is not None and (last != step or previous not in (None, ledger)):
        raise FemtoError(
            f"{path}: ends at step {last} with ledger {previous}, the checkpoint at {step} with {ledger}; {_MOVE_AWAY}"
        )


_MOVE_AWAY = "it was edited or is another run's: move it away to continue without it"


def last_event(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty where there is none."""
    return next((record for _, record in reversed(_read_lines(path))), {})


def began_at(path: Path) -> int | None:
    """The step of the checkpoint with which the run of metrics.jsonl began; None: with none, or there is no run."""
    starts = (record["resumed_from"] for _, record in _read_lines(path) if record.get("event") == "start")
    return next(starts, None)


def was_logged(path: Path, event: str, step: int | None = None) -> bool:
    """Whether metrics.jsonl has a line of this event, at this step if one is given."""
    steps = [record["step"] for _, record in _read_lines(path) if record.get("event") == event]
    return bool(steps) if step is None else step in steps


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Whole lines with what they say; a torn last one is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            whole = isinstance(_step_of(record), int)
            if record.get("event") == "train":
                whole = whole and (record["ledger"] + record["batch_digest"]).isascii()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if whole and line.endswith(b"\n"):
            records.append((line, record))
        elif number < len(lines):
            raise FemtoError(f"{path}:{number}: not a line that femto wrote; {_MOVE_AWAY}")
    return records


def _step_of(record: dict[str, Any]) -> int:
    return (record["resumed_from"] or 0) if record.get("event") == "start" else record["step"]


class Trackers:
    """TensorBoard and Weights & Biases, as `section` asks for them; both read their keys from the environment. `muted`:
    neither, for the ranks that leave it to another. FemtoError where W&B does not start."""

    def __init__(
        self, section: LogSection, output_dir: Path, config: dict[str, Any], step: int, *, muted: bool = False
    ):
        self._tensorboard = self._wandb = None
        if muted:
            return
        if section.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(output_dir / "tensorboard", purge_step=step + 1)
        if section.wandb_project:
            import wandb

            id_file = output_dir / "wandb_run_id"  # a resume goes on in the same W&B run
            run_id = id_file.read_text() if id_file.exists() else secrets.token_hex(8)
            id_file.write_text(run_id)
            try:
                self._wandb = wandb.init(
                    project=section.wandb_project, id=run_id, resume="allow", dir=output_dir, config=config
                )
            except wandb.Error as error:  # no login, no network
                reason = str(error).strip().partition("\n")[0].rstrip(".")
                remedy = "run `wandb login`, or set WANDB_MODE=offline, or leave the key out"
                raise FemtoError(f"log.wandb_project: W&B does not start: {reason}; {remedy}") from None

    def log(self, step: int, prefix: str, values: dict[str, Any]) -> None:
        """Numbers of `values` under `prefix/name`; what is no number is left out."""
        numbers = {
            f"{prefix}/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float) and name != "step"
        }
        if self._tensorboard:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()
