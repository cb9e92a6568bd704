"""Training state on disk: written whole or not at all, read without running anything from it.

A checkpoint is a folder `step_00000050`: tensors in torch.distributed.checkpoint's format (so that a later run may lay
them out over any number of devices), all else in `state.json`, and `manifest.json` with the size and digest of every
file. It is written under a temporary name beside its place, forced to disk and renamed: a folder of that name is
complete. DCP's own metadata is a pickle, and its stock loader runs what a crafted one says; here the metadata is read
through an unpickler that knows DCP's classes alone, and nothing but tensors is put in or taken out.
"""

import hashlib
import json
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from femtolib.errors import FemtoError, RunFailed
from femtolib.publish import published, remove, remove_leftovers

FORMAT, VERSION = "femto-checkpoint", 1
# DCP says so at every save and load of a single process; it is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_STEP_NAME = re.compile(r"step_(\d{8,})")


def save_checkpoint(folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write `folder`/step_N, over an older one of that step; raises RunFailed (a full disk) and then leaves nothing."""
    path = folder / f"step_{step:08d}"
    with published(path, replace=True) as partial:
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, sync_files=False), no_dist=True)
        except CheckpointException as error:
            raise RunFailed(f"{path}: could not be written: {_reason(error)}; nothing was kept of it") from None
        _write_json(partial / "state.json", {"format": FORMAT, "version": VERSION, "step": step} | state)
        files = sorted(partial.iterdir())
        manifest = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
        _write_json(partial / "manifest.json", {"files": manifest})
    return path


def prune_checkpoints(folder: Path, keep_last: int | None) -> None:
    """Remove all but the `keep_last` highest steps (None: keep all), and what a cut-off save or removal left."""
    remove_leftovers(folder)
    if keep_last is not None:
        for path in list_checkpoints(folder)[:-keep_last]:
            remove(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, lowest step first; other names, and folders without a manifest, are passed over.

    A folder with a manifest was whole when it was published. What has damaged it since is for `read_state` to say: to
    pass it over would be to train on from an older one without a word.
    """
    steps = {int(match[1]): path for path in folder.glob("step_*") if (match := _STEP_NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps) if (steps[step] / "manifest.json").is_file()]


def read_state(path: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint whose files are all there in their size and digest; raises FemtoError if not.

    A folder with a step in its name must hold that step.
    """
    if reason := _incomplete(path):
        raise FemtoError(f"{path}: not a complete checkpoint: {reason}")
    for name, about in _read_json(path / "manifest.json")["files"].items():
        if _sha256(path / name) != about["sha256"]:
            raise FemtoError(f"{path / name}: damaged (its sha256 is not the manifest's); use an older checkpoint")
    file = path / "state.json"
    state = _read_json(file)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise FemtoError(f"{file}: not a state that femto wrote")
    if (state.get("format"), state.get("version")) != (FORMAT, VERSION):
        found = f"{state.get('format')} version {state.get('version')}"
        raise FemtoError(f"{file}: is {found}; this femto reads {FORMAT} version {VERSION}")
    if (name := _STEP_NAME.fullmatch(path.name)) and int(name[1]) != state["step"]:
        raise FemtoError(f"{path}: holds step {state['step']}: rename it back, or choose another checkpoint")
    return state


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Name → whole shape of every tensor in the checkpoint; raises FemtoError where there is anything but tensors."""
    return {name: about.size for name, about in _Reader(path).read_metadata().state_dict_metadata.items()}


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place, each process reading what its own shards need; raises FemtoError where names or shapes
    are not exactly those of the checkpoint."""
    shapes = tensor_shapes(path)
    faults = [f"{path}: has no tensor {name!r}" for name in tensors if name not in shapes]
    faults += [f"{path}: has {name!r}, which this run lacks" for name in shapes if name not in tensors]
    faults += [
        f"{path}: {name!r} is {list(shapes[name])}, this run's is {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in shapes and shapes[name] != tensor.shape
    ]
    if faults:
        more = [f"{path}: {len(faults)} tensors differ in all"] if len(faults) > 10 else []
        raise FemtoError(*faults[:10], *more)
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(path), planner=_TensorsOnly(), no_dist=True)
    except CheckpointException as error:
        raise FemtoError(f"{path}: could not be read: {_reason(error)}") from None


# ── Reading DCP's format safely ───────────────────────────────────────────────────────────────────────────────────────


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that DCP's metadata of plain tensors is made of, and refuses every other name.

    A pickle may also set attributes of what it names. So the path that DCP notes, where the checkpoint was written, is
    read as the tuple of its parts: pathlib, which all of femto uses, is never in its reach.
    """

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *(("torch", name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "int32", "uint8")),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")):  # the latter from 3.13 on
            return lambda *parts: parts
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint of femto does")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise ValueError(f"holds a {type(metadata).__name__}, not a checkpoint's metadata")
            for name, about in metadata.state_dict_metadata.items():
                if not isinstance(about, TensorStorageMetadata) or not isinstance(about.size, torch.Size):
                    raise ValueError(f"holds {name!r}, which is no tensor")
            for info in metadata.storage_data.values():
                _stay_inside(Path(self.path), info.relative_path)
        except Exception as error:  # a hostile pickle may raise anything, here or where it is looked into
            raise FemtoError(f"{path}: refused: {_reason(error)}") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise FemtoError(f"checkpoint entry {read_item.dest_index.fqn!r} is no tensor: refused")


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _incomplete(path: Path) -> str | None:
    """Why a folder is no complete checkpoint, or None if it is one: every file of its manifest in its full size."""
    if not path.is_dir():
        return "no such folder"
    if not (path / "manifest.json").is_file():
        return "it has no manifest.json"
    try:
        files = _read_json(path / "manifest.json")["files"]
        for name, about in files.items():
            _stay_inside(path, name)
            if not (path / name).is_file():
                return f"{name} is missing"
            if (path / name).stat().st_size != about["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes, the manifest says {about['bytes']}"
            about["sha256"]
    except (KeyError, TypeError, AttributeError):
        return "its manifest.json is not one that femto wrote"
    except FemtoError as error:
        return str(error)
    absent = {"state.json", ".metadata"} - set(files)
    return f"its manifest does not list {absent.pop()}" if absent else None


def _stay_inside(folder: Path, name: str) -> None:
    if Path(name).name != name or name in ("", ".."):
        raise FemtoError(f"{folder}: names a file outside itself: {name!r}")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise FemtoError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise FemtoError(f"{path}: is not JSON") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """The operating system's word inside what DCP wraps around it."""
    inner = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    cause: BaseException | None = inner
    while cause is not None:  # torch's archive writer raises anew while it closes, with the true cause as its context
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
