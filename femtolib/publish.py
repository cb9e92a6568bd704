"""A directory that is whole or not there: made beside its place under another name, brought to the disk, published by
rename. Whatever ends the making, an error, Ctrl-C or SIGTERM, leaves nothing behind; what a killed process left goes
when the same directory is next made. Token directories, checkpoints and models all come about this way."""

import contextlib
import fcntl
import os
import re
import secrets
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
    directory = directory.resolve()  # a link is followed, not replaced
    path = directory.with_name(f".{directory.name}.lock")
    try:
        if directory.is_mount() or directory == Path.cwd():  # neither can give its place to a folder made beside it
            what = "a mount point" if directory.is_mount() else "the current folder"
            raise FemtoError(f"{directory} is {what}: name a new folder in it")
        while True:  # from the start each time: who had the lock and failed took away what it had made
            made = [parent for parent in path.parents if not parent.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise FemtoError(f"{directory} is being made by another process") from None
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
        with contextlib.suppress(OSError):  # not empty: all went well
            for parent in made:
                parent.rmdir()
        lock.close()


@contextlib.contextmanager
def published(directory: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder that takes the name `directory` when all went well and is removed when not, also at SIGTERM.

    `replace`: an older directory of that name goes once the new one is there; otherwise it is refused, unless empty.
    Raises RunFailed where writing fails (a full disk); the older directory is then as it was.
    """
    directory = directory.resolve()
    with writing(directory):
        if directory.exists() and not replace and not is_empty(directory):
            raise FemtoError(f"{directory} exists already: remove it, or choose another")
        with _terminable():
            partial = new_folder_beside(directory)
            try:
                yield partial
                mode = 0o666 & ~_umask(partial)
                for file in [path for path in partial.rglob("*") if path.is_file()]:
                    file.chmod(mode)  # safetensors makes files that their owner alone may read
                    sync(file)
                publish(partial, directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


# ── The steps of it, for directories that several processes write together ────────────────────────────────────────────


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """What the operating system or safetensors says against the writing of `directory`, as a RunFailed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFailed(f"{directory}: could not be written: {reason}; nothing was kept of it") from None


def new_folder_beside(directory: Path) -> Path:
    """An empty folder in which `directory` is to be made; what a killed process left of the same goes.

    No two have the same name: a process that outlived its run cannot write into the next one's.
    """
    for leftover in directory.parent.glob(".*.partial"):
        if re.fullmatch(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{8}}\.partial", leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = _beside(directory, f"{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    return partial


def sync(path: Path) -> None:
    """Waits until the file is on the disk, so that the rename after it never publishes what a power cut would lose."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, directory: Path) -> None:
    """Give `partial`, whose files are on the disk, the name `directory`; what had it goes after that.

    A kill between the two renames leaves the older one aside, whole, for `remove_leftovers` to put back.
    """
    sync(partial)
    aside = _beside(directory, "replaced")
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    try:
        partial.rename(directory)
    except BaseException:
        if aside.exists() and not directory.exists():
            aside.rename(directory)
        raise
    sync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(directory: Path) -> None:
    """First out of sight in one step, then gone: what bears its name is never half a directory."""
    aside = _beside(directory, "removed")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in `folder` of directories that were being published or removed; put back one
    that had made way for another which never came."""
    for aside in folder.glob(".*.replaced"):
        directory = folder / aside.name.removeprefix(".").removesuffix(".replaced")
        if not directory.exists():
            aside.rename(directory)
    for leftover in [path for what in ("partial", "replaced", "removed") for path in folder.glob(f".*.{what}")]:
        shutil.rmtree(leftover, ignore_errors=True)


def is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _beside(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{what}")


def _umask(folder: Path) -> int:
    """The process's file mode mask, read off a new file: to ask for it is to set it, for other threads too."""
    probe = folder / ".mode"
    probe.touch()
    try:
        return 0o666 & ~probe.stat().st_mode
    finally:
        probe.unlink()


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
