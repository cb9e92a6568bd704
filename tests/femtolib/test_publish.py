"""One process at a time makes a directory, also in the moment when the lock changes hands; a link is followed."""

import io
import sys
import threading
import time
from pathlib import Path

import pytest

from femtolib.errors import FemtoError, RunFailed
from femtolib.publish import locked, published, remove_leftovers


def test_a_lock_got_by_waiting_keeps_others_out(tmp_path, monkeypatch):
    screen = io.StringIO()  # not capfd: what is written while that reads is lost
    monkeypatch.setattr(sys, "stderr", screen)
    directory = tmp_path / "new" / "t"  # `new` is made for the lock, and goes with it where nothing else came to be
    waiting, inside, leave = threading.Event(), threading.Event(), threading.Event()

    def wait():
        waiting.set()
        with locked(directory, wait=True):
            inside.set()
            leave.wait(30)

    waiter = threading.Thread(target=wait)
    with locked(directory, wait=False):
        waiter.start()
        waiting.wait(30)
        while "waiting for another process" not in screen.getvalue():
            assert waiter.is_alive()
            time.sleep(0.01)
    assert inside.wait(30)
    # The lock file that the waiter had opened is gone by now: a lock on it would keep nobody out.
    with pytest.raises(FemtoError, match="being made by another process"), locked(directory, wait=False):
        pass
    leave.set()
    waiter.join()
    assert not list(tmp_path.iterdir())


def test_a_link_to_an_empty_folder_is_followed_and_stays(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    with locked(tmp_path / "link", wait=False), published(tmp_path / "link") as partial:
        (partial / "file").write_text("")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "scratch/file").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"scratch", "link"}


def test_what_cannot_give_its_place_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory, word in ((tmp_path, "the current folder"), (Path("/proc"), "a mount point")):
        with pytest.raises(FemtoError, match=word), locked(directory, wait=False):
            pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), RunFailed), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_directory_is_not_lost_where_another_cannot_take_its_place(tmp_path, monkeypatch, error, raised):
    directory, rename = tmp_path / "model", Path.rename
    directory.mkdir()
    (directory / "file").write_text("old")

    def refuse(self, target):
        if self.name.endswith(".partial"):
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(raised), published(directory, replace=True) as partial:
        (partial / "file").write_text("new")
    assert (directory / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_set_aside_is_kept_until_another_has_its_place(tmp_path, monkeypatch):
    directory, aside = tmp_path / "model", tmp_path / ".model.replaced"  # a kill came between the two renames
    aside.mkdir()
    (aside / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), published(directory, replace=True):
        raise ZeroDivisionError
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(Path, "rename", lambda *_: 1 / 0)
        with published(directory, replace=True):
            pass
    assert [path.name for path in tmp_path.iterdir()] == [aside.name], "the only complete one is gone"
    remove_leftovers(tmp_path)
    assert (directory / "file").read_text() == "old"
    directory.rename(aside)
    with published(directory, replace=True) as partial:
        (partial / "file").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (directory / "file").read_text() == "new"


def test_leftovers_of_another_directory_are_not_taken_for_ones_own(tmp_path):
    other = tmp_path / ".model.v2.0123abcd.partial"
    other.mkdir()
    with published(tmp_path / "model"):
        assert other.exists()
