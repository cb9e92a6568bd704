"""The folder that a run writes: who may write it, what stands in it, and whether and from where to continue.

A run is continued by starting it again. What the new config may change without changing the training is listed here;
anything else is refused, because a resumed run claims to be the run that it continues.
"""

import fcntl
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from femtolib.checkpoint import list_checkpoints, read_state, without_manifest
from femtolib.config import RESOLVED, ConfigModel, dump_config, flatten, show
from femtolib.data.token_files import is_token_directory
from femtolib.errors import FemtoError
from femtolib.metrics import began_at, last_event, was_logged
from femtolib.publish import is_empty, remove_leftovers

# May differ from the saved run: the layout, the machine, what is written and shown, and how long to train. The data are
# compared by digest and the model by its config.json, wherever they lie now.
_FREE = (
    *("output_dir", "resume", "parallel", "micro_batch_size", "device", "threads", "deterministic"),
    *("process_group_timeout", "processes", "activation_checkpointing", "activation_offloading"),
    *("optimizer_in_backward", "loss", "compile", "log", "profile", "checkpoint", "export"),
    *("validate_every", "validation_max_rows", "data.num_workers", "data.prefetch", "data.validation"),
    *("gradient_sync.bucket_mb", "gradient_sync.overlap"),
    *("gradient_sync.find_unused_parameters", "gradient_sync.static_graph"),
    *("max_steps", "epochs", "model", "tokenizer", "data.train"),
    *("data.text_key", "data.text_documents", "data.on_bad_document"),
)
# Never changed, not even by resume=must: the order of the rows, or what the saved state is the state of.
_FIXED = ("seed", "data", "global_batch_size", "param_dtype", "optimizer.name")
# What some recipes alone have, and how the others train: there a key counts as this. Of other keys that one recipe has
# and another has not, nothing is known.
_WITHOUT = {"max_grad_value": None, "gradient_sync.communication_dtype": None, "accumulate_in": "float32"}


@dataclass
class Start:
    """Where a run begins: at step 0, or from a checkpoint with its state. `finished`: nothing is left to do."""

    checkpoint: Path | None = None
    state: dict[str, Any] | None = None
    finished: bool = False
    lock: IO[bytes] | None = None
    mark: str = ""  # what the lock's file says as long as this run has it

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"lock": None}  # what other ranks are sent: the lock stays with the process that took it

    @property
    def step(self) -> int:
        return self.state["step"] if self.state else 0


def check_output(output_dir: Path, *, data: Iterable[str], sources: Iterable[Path | str | None]) -> None:
    """Check, before any work, that `output_dir` can be written and that a run there overwrites nothing but a run's
    files; raises FemtoError with every fault.

    `data`: paths of the config's data, in whose folders a run must not write. `sources`: a model or tokenizer that it
    reads, which the run's own model must not replace.
    """
    faults = []
    for path in [Path(path).resolve() for path in data]:
        if (
            path.is_dir()
            and not is_token_directory(path)
            and path in (output_dir.resolve(), *output_dir.resolve().parents)
        ):
            faults.append(f"{output_dir} lies in {path}, whose files are data: a resume would read its own metrics")
    for path in [Path(path).resolve() for path in sources if path]:
        if (output_dir / "model").resolve() in (path, *path.parents):
            faults.append(f"the run would replace {path}, which it reads")
    nearest = next(path for path in (output_dir, *output_dir.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        faults.append(f"cannot write {output_dir}: {nearest} is {'read-only' if nearest.is_dir() else 'not a folder'}")
    elif nearest == output_dir:
        config, model = output_dir / "config.yaml", output_dir / "model"
        if config.is_file() and RESOLVED not in config.read_bytes().decode(errors="replace"):
            faults.append(f"{config} was not written by a run, which would replace it")
        if model.exists() and not (model / "config.json").is_file() and not is_empty(model):
            faults.append(f"{model} holds something else than a model")
        for path in (output_dir / name for name in ("checkpoints", "profile", "tensorboard")):
            if path.exists() and not path.is_dir():
                faults.append(f"{path} is not a folder")
        for path in (
            output_dir / name for name in ("config.yaml", ".config.yaml", "metrics.jsonl", "samples-rank0.jsonl")
        ):
            if path.is_dir():
                faults.append(f"{path} is a folder")
    if faults:
        raise FemtoError(*(f"output_dir: {fault}; choose another one" for fault in faults))


def claim_output(
    output_dir: Path,
    resume: str | Path,
    *,
    config: dict[str, Any],
    identity: dict[str, Any],
    steps: int,
    restarted: bool = False,
) -> Start:
    """Take `output_dir` for this process until `start.lock` is closed, and `decide_start`; raises FemtoError where it
    may not be written or another run has it. A folder made for a run that is then refused is removed again.

    `restarted`: by a launcher, after this same run failed. Then `resume` speaks of its first start: it goes on with
    what it has saved itself, if anything.
    """
    made = not os.path.exists(output_dir)  # Path.exists raises where the name is too long
    lock = _lock(output_dir)
    remove_leftovers(output_dir / "checkpoints")  # puts back a checkpoint that a killed save had set aside
    if restarted and (resume == "never" or (isinstance(resume, Path) and list_checkpoints(output_dir / "checkpoints"))):
        resume = "auto"
    try:
        start = decide_start(output_dir, resume, config=config, identity=identity, steps=steps)
    except FemtoError:
        if made:
            (output_dir / ".lock").unlink()
            output_dir.rmdir()
        raise
    mark = secrets.token_hex(8)
    lock.write(mark.encode())
    lock.flush()
    return replace(start, lock=lock, mark=mark)


def check_shared(output_dir: Path, start: Start, seconds: float = 10) -> None:
    """Check that `output_dir` is the folder that rank 0 claimed, on storage that this rank can read and write.

    Network file systems may show another machine's writes late: tried for `seconds`. Raises FemtoError.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = (output_dir / ".lock").read_text()
            if found == start.mark and os.access(output_dir, os.W_OK | os.X_OK):
                return
            reason = "this rank may not write it" if found == start.mark else "this rank sees another folder there"
        except OSError as error:
            reason = f"this rank cannot read it ({error.strerror})"
        if time.monotonic() > deadline:
            raise FemtoError(
                f"output_dir: {output_dir}: {reason}, on {socket.gethostname()}; it must lie on storage that all nodes "
                "share"
            )
        time.sleep(0.2)


def decide_start(
    output_dir: Path, resume: str | Path, *, config: dict[str, Any], identity: dict[str, Any], steps: int
) -> Start:
    """Find the checkpoint to continue, if any, and check that this run is the saved one.

    `resume`: auto, never, must or the path of a checkpoint. `config`: the resolved config; `identity`: what else
    must agree (digest of the data, config.json of the model), as the checkpoint's state has them. `steps`: how many
    this run is to make in all. Raises FemtoError with every difference.
    """
    checkpoints = list_checkpoints(output_dir / "checkpoints")
    exists = bool(checkpoints) or (output_dir / "config.yaml").exists()
    if resume == "never" and exists:
        raise FemtoError(f"resume: never, but {output_dir} holds a run; choose a new output_dir or resume=auto")
    if resume == "must" and not exists:
        raise FemtoError(f"resume: must, but {output_dir} holds no run")
    metrics = output_dir / "metrics.jsonl"
    if isinstance(resume, Path):
        checkpoint = resume
    elif checkpoints:
        checkpoint = checkpoints[-1]
        for step, path in without_manifest(output_dir / "checkpoints"):
            if step > int(checkpoint.name.removeprefix("step_")) and was_logged(metrics, "checkpoint", step):
                raise FemtoError(f"{path}: saved by this run, its manifest.json is gone; remove it to go on without")
    else:
        if was_logged(metrics, "checkpoint"):
            raise FemtoError(
                f"output_dir: {output_dir} holds a run whose checkpoints are gone; a new one would replace its metrics "
                "and model: choose a new output_dir, or remove this one"
            )
        if resume == "auto" and (first := began_at(metrics)) is not None:
            raise FemtoError(
                f"output_dir: {output_dir} holds a run that began with a checkpoint of step {first} and ended before "
                "its first save: name that checkpoint again (resume=PATH), or choose a new output_dir"
            )
        return Start()
    if (checkpoint / "checkpoints").is_dir():
        raise FemtoError(
            f"resume: {checkpoint} is a run's folder; name one of its checkpoints, in {checkpoint}/checkpoints"
        )
    state = read_state(checkpoint)
    if checkpoints and int(checkpoints[-1].name.removeprefix("step_")) > state["step"]:
        raise FemtoError(
            f"resume: {output_dir} holds checkpoints later than {checkpoint.name} (up to {checkpoints[-1].name}); "
            "resume=auto continues the last, or choose a new output_dir"
        )
    for name, kind in (("config", dict), ("steps", int), ("ledger", str), ("sampler", dict)):
        if not isinstance(state.get(name), kind):
            raise FemtoError(f"{checkpoint / 'state.json'}: {name} is {show(state.get(name))}: not a run's state")
    _check_same_run(state, config, identity, steps, must=resume == "must")
    end = last_event(metrics)
    completed = end.get("event") == "end" and end.get("reason") == "completed" and end.get("step") == steps
    finished = state["step"] == steps and completed and (output_dir / "model" / "config.json").exists()
    return Start(checkpoint, state, finished)


def write_config(config: ConfigModel, recipe: str) -> str:
    """Write the resolved config to its output_dir; returns the command that continues the run from there."""
    path = config.output_dir / "config.yaml"
    options = shlex.split(os.environ.get("FEMTO_OPTIONS", ""))  # torchrun's, which `femto run` was given
    command = shlex.join(["femto", "run", *options, recipe, "--config", str(path)])
    again = config.model_copy(update={"resume": "auto"})  # `never`, or a checkpoint's path, is said once
    temporary = path.with_name(".config.yaml")
    temporary.write_text(dump_config(again, command), encoding="utf-8")
    temporary.replace(path)
    return command


def _lock(output_dir: Path, seconds: float = 10) -> IO[bytes]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock = (output_dir / ".lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_nlink:  # else the run that had it was refused, and removed the folder
                return lock
        except BlockingIOError:
            pass
        except OSError as error:
            raise FemtoError(f"output_dir: cannot write {output_dir}: {error.strerror}") from None
        lock.close()
        if time.monotonic() > deadline:
            raise FemtoError(f"output_dir: {output_dir} is in use by another run; choose another one")
        time.sleep(0.2)


def _check_same_run(
    state: dict[str, Any], config: dict[str, Any], identity: dict[str, Any], steps: int, *, must: bool
) -> None:
    faults, changes = [], []
    for name, value in identity.items():
        if (saved := state.get(name)) != value:
            faults += [f"resume: {line}; choose a new output_dir" for line in _differences(name, saved, value)]
    saved, current = _WITHOUT | flatten(state["config"]), _WITHOUT | flatten(config)
    for key in [key for key in saved if key in current and saved[key] != current[key] and not _is_in(key, _FREE)]:
        change = f"{key} was {show(saved[key])} and is now {show(current[key])}"
        if _is_in(key, _FIXED):
            faults.append(f"resume: {change}; change it back, or choose a new output_dir")
        elif must:
            changes.append(change)
        else:
            faults.append(f"resume: {change}; resume=must applies it, or choose a new output_dir")
    if steps < state["steps"]:
        remedy = "a shorter one needs a new output_dir"
        faults.append(f"resume: the run was to make {state['steps']} steps, now {steps}; {remedy}")
    if faults:
        raise FemtoError(*faults)
    for change in changes:
        print(f"resume: {change}")


def _differences(name: str, saved: Any, current: Any) -> list[str]:
    if name == "data":
        return [f"data.train or its tokenizer changed: their digest was {str(saved)[:16]} and is now {current[:16]}"]
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return [f"{name} was {show(saved)} and is now {show(current)}"]
    keys = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    return [f"{name}.{key} was {show(saved.get(key))} and is now {show(current.get(key))}" for key in keys]


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
