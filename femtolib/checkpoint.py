"""Training state on disk: written whole or not at all, by any number of ranks, read without running anything from it.

A checkpoint is a folder `step_00000050`: tensors in torch.distributed.checkpoint's format (so that a later run may lay
them out over any number of devices), all else in `state.json`, and `manifest.json` with the size and digest of every
file. It is written under a temporary name beside its place, forced to disk and renamed when every rank is done: a
folder of that name is complete. DCP writes; it does not read: its metadata is a pickle, which here is read through an
unpickler that knows DCP's classes alone, and the tensors' bytes are copied from where they lie, without unpickling.
"""

import atexit
import collections
import copy
import hashlib
import json
import math
import mmap
import os
import pickle
import re
import shutil
import struct
import threading
import time
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel.world import World, local_part
from femtolib.publish import new_folder_beside, publish, remove, remove_leftovers, sync, writing

FORMAT, VERSION = "femto-checkpoint", 1
# DCP says so at every save of a single process; it is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_STEP_NAME = re.compile(r"step_(\d{8,})")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointWriter:
    """Writes the checkpoints of a run, each rank its own shards, of replicas one; keeps the `keep_last` highest steps
    (None: all). Every rank makes one, in the same order as other groups are made, and calls the same methods.

    A save that fails on any rank leaves no folder, and the same RunFailed is raised on all ranks, at once by a save
    that waits, else by the next `save` or `close`: `failed` says earlier that it will be, but on each rank in its own
    time.
    """

    def __init__(self, folder: Path, *, keep_last: int | None, world: World):
        self._folder, self._keep_last = folder, keep_last
        # The same ranks over a group that no other thread uses: two threads' collectives on one group meet each other.
        self._world = copy.copy(world)
        self._world.patient = world.new_group()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: collections.deque[dict[str, Any]] = collections.deque()

    def save(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], *, wait: bool) -> None:
        """Write `folder`/step_N, over an older one of that step, once the save before is done; raises RunFailed.

        `tensors`: plain ones, which are the same on every rank, and DTensors of any layout. `state`: what JSON holds.
        Without `wait` it returns when this rank's shards are copied to the CPU, and a thread does the rest.
        """
        started = time.perf_counter()
        self.close()
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        text = json.dumps({"format": FORMAT, "version": VERSION, "step": step} | state, indent=1)
        if wait:
            self._write(step, tensors, parts, text)
            seconds = time.perf_counter() - started
            self._finished.append({"step": step, "seconds_blocked": seconds, "seconds_total": seconds})
            return

        parts = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        blocked = time.perf_counter() - started

        def write(tensors: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> None:
            try:
                self._write(step, tensors, parts, text)
                total = time.perf_counter() - started
                self._finished.append({"step": step, "seconds_blocked": blocked, "seconds_total": total})
            except BaseException as error:
                self._error = error

        # A daemon: a rank that ends with a fault of its own must not wait for ever for ranks that wait for it. But an
        # interpreter that ends while such a thread is in torch's code aborts, with an exit code of its own.
        if self._thread is None:
            atexit.register(self._wait_at_exit)
        self._thread = threading.Thread(target=write, args=(tensors, parts), name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, as far as this rank knows yet."""
        return self._error is not None

    def finished(self) -> list[dict[str, Any]]:
        """The saves done since last asked: step, seconds_blocked (training stood still), seconds_total."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Wait for the save in the background; raises RunFailed if it failed."""
        if self._thread:
            self._thread.join()
        if self._error:
            raise copy.copy(self._error)  # the error itself would keep the frames that it goes through, and their locks

    def _wait_at_exit(self) -> None:
        self._thread.join(timeout=30)

    def _write(self, step: int, tensors: dict[str, torch.Tensor], parts: dict[str, torch.Tensor], state: str) -> None:
        world, path = self._world, self._folder / f"step_{step:08d}"

        def begin() -> Path:
            with writing(path):
                return new_folder_beside(path)

        def write_shards() -> dict[str, dict[str, Any]]:
            try:
                dcp.save(
                    tensors,
                    storage_writer=_Writer(partial, sync_files=False),
                    planner=_Planner(parts),
                    process_group=world.patient,
                    no_dist=world.size == 1,
                )
            except CheckpointException as error:  # on every rank; the one whose disk it was has it to say
                if world.rank in error.failures:
                    reason = _reason(error.failures[world.rank][0])
                    raise RunFailed(f"{path}: could not be written: {reason}; nothing was kept of it") from None
                return {}
            with writing(path):
                return _onto_disk(partial.glob(f"__{world.rank}_*"))

        def finish() -> None:
            with writing(path):
                (partial / "state.json").write_text(state, encoding="utf-8")
                files = {name: about for of_rank in written for name, about in of_rank.items()}
                files |= _onto_disk([partial / ".metadata", partial / "state.json"])
                _write_json(partial / "manifest.json", {"files": files})
                sync(partial / "manifest.json")
                publish(partial, path)
            try:
                self._prune()
            except OSError as error:
                raise RunFailed(f"{self._folder}: an older checkpoint stays: {error.strerror}") from None

        partial = world.from_first(begin)
        try:
            written = world.together(write_shards)
            world.from_first(finish)
        finally:
            if world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all but the highest steps, and what a cut-off save or removal left."""
        remove_leftovers(self._folder)
        if self._keep_last is not None:
            for path in list_checkpoints(self._folder)[: -self._keep_last]:
                remove(path)


class _Planner(dcp.DefaultSavePlanner):
    """Plans by the tensors, and takes what is written from `parts`, this rank's part of each, or a copy of it."""

    def __init__(self, parts: dict[str, torch.Tensor]):
        super().__init__()
        self._parts = parts

    def lookup_object(self, index: Any) -> torch.Tensor:
        part = self._parts[index.fqn].contiguous()  # as `_stored` reads it
        if part.is_cpu and part.numel():  # in a storage of its own size: DCP copies another, and keeps all copies
            part = torch.frombuffer(part.view(-1).view(torch.uint8).numpy(), dtype=part.dtype).view(part.shape)
        return part


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # put in words here: between ranks DCP's exceptions lose what caused them
            raise RunFailed(_reason(error)) from None


def _onto_disk(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Force files to disk; their entries in the manifest."""
    entries = {}
    for path in paths:
        sync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return entries


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, lowest step first; other names, and folders without a manifest, are passed over.

    A folder with a manifest was whole when it was published. What has damaged it since is for `read_state` to say: to
    pass it over would be to train on from an older one without a word.
    """
    return [path for _, path in _numbered(folder) if (path / "manifest.json").is_file()]


def without_manifest(folder: Path) -> list[tuple[int, Path]]:
    """The folders in `folder` that have a checkpoint's name and no manifest, with their steps, lowest first."""
    return [(step, path) for step, path in _numbered(folder) if not (path / "manifest.json").is_file()]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(match[1]), path) for path in folder.glob("*") if (match := _STEP_NAME.fullmatch(path.name)))


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
    return {name: about.size for name, about in _read_metadata(path).state_dict_metadata.items()}


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` (plain, or DTensors of any layout) in place, each process reading what its own shards need; raises
    FemtoError where names or shapes are not exactly those of the checkpoint."""
    metadata = _read_metadata(path)
    shapes = {name: about.size for name, about in metadata.state_dict_metadata.items()}
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
    for name, tensor in tensors.items():
        offsets = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            [chunk] = tensor.__create_chunk_list__()
            offsets = chunk.offsets
        _fill(path, metadata, name, local_part(tensor), offsets)


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors of these names, one after the other, in the dtype in which they are stored; one is in memory at
    a time. Raises FemtoError for a name that the checkpoint lacks."""
    metadata = _read_metadata(path)
    for name in names:
        if name not in metadata.state_dict_metadata:
            raise FemtoError(f"{path}: has no tensor {name!r}")
        about = metadata.state_dict_metadata[name]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        _fill(path, metadata, name, whole, (0,) * whole.ndim)
        yield name, whole
        del whole


@torch.no_grad()
def _fill(path: Path, metadata: Metadata, name: str, piece: torch.Tensor, offsets: Sequence[int]) -> None:
    """Fill `piece`, which lies at `offsets` in the tensor `name`, from those chunks on disk that overlap it."""
    try:
        about = metadata.state_dict_metadata[name]
        for chunk in about.chunks:
            low = [max(mine, theirs) for mine, theirs in zip(offsets, chunk.offsets, strict=True)]
            high = [
                min(mine + size, theirs + its_size)
                for mine, size, theirs, its_size in zip(offsets, piece.shape, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(first < end for first, end in zip(low, high, strict=True)):
                info = metadata.storage_data[dcp.metadata.MetadataIndex(name, chunk.offsets)]
                stored = _stored(path / info.relative_path, info, chunk.sizes, about.properties.dtype)
                here, there = (
                    tuple(
                        slice(first - start, end - start) for first, end, start in zip(low, high, starts, strict=True)
                    )
                    for starts in (offsets, chunk.offsets)
                )
                piece[here].copy_(stored[there])
    except Exception as error:  # hostile metadata may raise anything where they are looked into
        raise FemtoError(f"{path}: {name!r} could not be read: {_reason(error)}") from None


def _stored(file: Path, info: Any, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at `info`, mapped from the file, not read: what `torch.save` wrote there is a zip archive whose member
    `data/0` holds the elements in order, not compressed."""
    before = info.offset % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), before + info.length, access=mmap.ACCESS_COPY, offset=info.offset - before)
    member = zipfile.ZipFile(mapped).getinfo("archive/data/0")  # what stands before an archive is passed over
    elements = math.prod(sizes)
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != elements * dtype.itemsize:
        raise ValueError(f"{file.name} does not hold its elements")
    name_length, extra_length = struct.unpack_from("<HH", mapped, member.header_offset + 26)
    start = member.header_offset + 30 + name_length + extra_length
    return torch.frombuffer(mapped, dtype=dtype, count=elements, offset=start).view(sizes)


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
        if (module, name) == ("builtins", "getattr"):  # with which Python 3.11.0 to 3.11.3 pickle a member of an Enum
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint of femto does")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    """DCP's account of the tensors and of where their chunks lie; raises FemtoError for anything else."""
    file = path / ".metadata"
    try:
        with file.open("rb") as opened:
            metadata = _MetadataUnpickler(opened).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"holds a {type(metadata).__name__}, not a checkpoint's metadata")
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(about, TensorStorageMetadata) or not isinstance(about.size, torch.Size):
                raise ValueError(f"holds {name!r}, which is no tensor")
            if sum(math.prod(chunk.sizes) for chunk in about.chunks) != math.prod(about.size):
                raise ValueError(f"holds {name!r} in part, or twice")
        for info in metadata.storage_data.values():
            _stay_inside(path, info.relative_path)
            if info.transform_descriptors:
                raise ValueError(f"wants {info.transform_descriptors!r}, which no checkpoint of femto does")
    except Exception as error:  # a hostile pickle may raise anything, here or where it is looked into
        raise FemtoError(f"{file}: refused: {_reason(error)}") from None
    return metadata


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
    absent = {"state.json", ".metadata", *(file.name for file in path.glob("*.distcp"))} - set(files)
    return f"its manifest does not list {min(absent)}" if absent else None


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
    """The operating system's word inside what torch wraps around it."""
    cause: BaseException | None = error
    while cause is not None:  # torch's archive writer raises anew while it closes, with the true cause as its context
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__
