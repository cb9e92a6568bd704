"""One process at a time makes a directory, also in the moment when the lock changes hands; a link is followed."""

import threading
from pathlib import Path

import pytest

from femtolib.errors import FemtoError
from femtolib.publish import locked, published


def test_a_lock_got_by_waiting_keeps_others_out(tmp_path, capfd):
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
        while "waiting for another process" not in capfd.readouterr().err:
            assert waiter.is_alive()
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
