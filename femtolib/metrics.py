"""What a run writes down: metrics.jsonl, the batch ledger, and the trackers (TensorBoard, Weights & Biases).

metrics.jsonl holds one JSON object a line in full precision, in the order in which things happened, and belongs to the
state of a run: a resume cuts it back to the checkpoint's step, so that it reads as if the run had never stopped. The
ledger chains the digests of all global batches; two runs saw the same data in the same order exactly if their ledgers
agree, on whatever devices they ran.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from femtolib.errors import FemtoError
from femtolib.sections import LogSection

LEDGER_START = "0" * 16


def next_ledger(previous: str, step: int, batch_digest: str) -> str:
    """The ledger after `step`: first 16 hex digits of sha256("previous step digest"), the whole history in one word."""
    return hashlib.sha256(f"{previous} {step} {batch_digest}".encode("ascii")).hexdigest()[:16]


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """First 16 hex digits of sha256 over names and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


class JsonLines:
    """A file of one JSON object a line, each with the step it belongs to, that a resume cuts back.

    `resumed_from` is the step whose checkpoint is continued: lines past it, and a torn last one, are removed. None is a
    run from its start, which replaces what an earlier run without a checkpoint left.
    """

    def __init__(self, path: Path, resumed_from: int | None):
        kept = 0
        if resumed_from is not None:
            for line, record in _read_lines(path):
                if _step_of(record) > resumed_from:
                    break
                kept += len(line)
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(kept)

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Onto the disk: a checkpoint that is published must find its lines there, even after a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def verify_ledger(path: Path, step: int, ledger: str) -> None:
    """Check that the train lines of `path` up to `step` chain to a checkpoint's `ledger`; raises FemtoError if not.

    Nothing to check where there are no such lines: a checkpoint may be continued in a new folder.
    """
    previous, last = None, 0
    for number, (_, record) in enumerate(_read_lines(path), 1):
        if record.get("event") != "train" or record["step"] > step:
            continue
        if previous is None:
            previous = LEDGER_START if record["step"] == 1 else None
        elif record["step"] != last + 1:
            raise FemtoError(f"{path}:{number}: step {record['step']} follows step {last}; {_MOVE_AWAY}")
        if previous is not None and record["ledger"] != next_ledger(previous, record["step"], record["batch_digest"]):
            raise FemtoError(f"{path}:{number}: the ledger breaks at step {record['step']}; {_MOVE_AWAY}")
        previous, last = record["ledger"], record["step"]
    if previous is not None and (previous, last) != (ledger, step):
        raise FemtoError(
            f"{path}: ends at step {last} with ledger {previous}, the checkpoint at {step} with {ledger}; {_MOVE_AWAY}"
        )


_MOVE_AWAY = "it was edited or is another run's: move it away to continue without it"


def last_event(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty where there is none."""
    return next((record for _, record in reversed(_read_lines(path))), {})


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Whole lines with what they say; a torn last one is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append((line, json.loads(line)))
            _step_of(records[-1][1])
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):
                return records[: number - 1]
            raise FemtoError(f"{path}:{number}: not a line that femto wrote; {_MOVE_AWAY}") from None
    return records if not lines or lines[-1].endswith(b"\n") else records[:-1]


def _step_of(record: dict[str, Any]) -> int:
    return int((record["resumed_from"] or 0) if record.get("event") == "start" else record["step"])


class Trackers:
    """TensorBoard and Weights & Biases, as far as `section` asks for them; both read their keys from the environment.

    Raises FemtoError where the extra `logging` is not installed.
    """

    def __init__(self, section: LogSection, output_dir: Path, config: dict[str, Any]):
        self._tensorboard = self._wandb = None
        if section.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise FemtoError("log.tensorboard: not installed; pip install 'femto[logging]'") from None
            self._tensorboard = SummaryWriter(output_dir / "tensorboard")
        if section.wandb_project:
            try:
                import wandb
            except ImportError:
                raise FemtoError("log.wandb_project: not installed; pip install 'femto[logging]'") from None
            id_file = output_dir / "wandb_run_id"  # a resume goes on in the same W&B run
            run_id = id_file.read_text() if id_file.exists() else wandb.util.generate_id()
            id_file.write_text(run_id)
            self._wandb = wandb.init(
                project=section.wandb_project, id=run_id, resume="allow", dir=output_dir, config=config
            )

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
