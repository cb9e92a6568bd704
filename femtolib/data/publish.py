"""A directory that is whole or not there: made beside its place under another name, brought to the disk, published by
rename, while a lock file keeps other processes from making the same one. Whatever ends the making, an error, Ctrl-C or
SIGTERM, leaves nothing behind; what a killed process left goes when the same directory is next made."""

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from femtolib.errors import FemtoError, RunFailed


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool) -> Iterator[None]:
    """Keeps other processes from making the same directory; raises FemtoError where it cannot, or may not wait."""
    path = directory.with_name(f".{directory.name}.lock")
    try:
        made = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            lock = path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise FemtoError(f"output_dir: {directory} is being made by another process") from None
                print(f"waiting for another process that makes {directory}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:  # else its owner removed it when done, and it keeps nobody out
                break
    except OSError as error:
        raise FemtoError(f"{directory}: cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()
        with contextlib.suppress(OSError):  # not empty: all went well
            for parent in made:
                parent.rmdir()


@contextlib.contextmanager
def published(directory: Path) -> Iterator[Path]:
    """A new folder that takes the name `directory` when all went well and is removed when not, also at SIGTERM."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise FemtoError(f"output_dir: {directory} exists already: remove it, or choose another")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        partial.mkdir()
    except OSError as error:
        raise FemtoError(f"{directory}: cannot be written: {error.strerror}") from None
    try:
        with _terminable():
            yield partial
            for file in [path for path in partial.rglob("*") if path.is_file()]:
                _sync(file)
            partial.replace(directory)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{directory}: writing failed, nothing was kept: {getattr(error, 'strerror', error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, unless someone listens to it already."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _sync(path: Path) -> None:
    """Waits until the file is on the disk, so that the rename after it never publishes what a power cut would lose."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
