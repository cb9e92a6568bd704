"""Ranks without a launcher: who starts them, how they end together, and what is said of one that fails.

Most tests fork the ranks, so that a main may be written where it is tested and torch is imported already; that fresh
interpreters do the same, and what a signal finds while they import, two launches of a recipe's file show.
"""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.multiprocessing

import femtolib.parallel.world  # noqa: F401 (once here instead of by every rank that is forked)
from femtolib.config import ConfigModel
from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel import spawn as module
from femtolib.parallel.spawn import must_spawn, spawn
from femtolib.stop import StopRequest


class Config(ConfigModel):
    folder: Path


def rank() -> int:
    return int(os.environ["RANK"])


def until(reached: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not reached in {seconds} s"
        time.sleep(0.005)


def hang(config: Config) -> None:
    """Do not end before the test has, and say so if nobody ends this rank."""
    (config.folder / f"hangs-{rank()}").write_text(str(os.getpid()))
    time.sleep(20)
    (config.folder / "outlived").touch()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# ── Who starts ranks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_starts_ranks_unless_it_is_one_of_them_or_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "FEMTO_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    assert must_spawn(2) and not must_spawn(1)
    monkeypatch.setenv("WORLD_SIZE", "4")  # left over in a shell: no launcher
    assert must_spawn(2) and not must_spawn(1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a launcher of one process
    assert must_spawn(2) and not must_spawn(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FEMTO_RENDEZVOUS", "file:///somewhere")  # one of the ranks
    assert not must_spawn(2) and not must_spawn(1)


def test_below_a_launcher_of_several_it_is_refused_with_both_numbers_and_once(monkeypatch):
    monkeypatch.delenv("FEMTO_RENDEZVOUS", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not must_spawn(1)
    with pytest.raises(FemtoError, match=r"processes: 3 .* a launcher has started 4 already") as caught:
        must_spawn(3)
    assert caught.value.exit_code == 2 and caught.value.agreed


# ── How they end ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def forked(monkeypatch, tmp_path, capfd):
    """`forked(main, ranks=2, grace=30)`: exit code and stderr of `spawn` with forked ranks. Fails where one of them, or
    anything that was changed in this process, is left behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FEMTO_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    started = []

    def start(*arguments, **more):
        started.append(torch.multiprocessing.start_processes(*arguments, **more, start_method="fork"))
        return started[-1]

    def state() -> list:
        stops = (signal.SIGTERM, signal.SIGINT)
        return [dict(os.environ), [*map(signal.getsignal, stops)], signal.pthread_sigmask(signal.SIG_BLOCK, [])]

    def forked(main: Callable[[Config], int | None], ranks: int = 2, grace: float = 30) -> tuple[int, str]:
        monkeypatch.setattr(module, "_GRACE", grace)
        before = state()
        code = spawn(main, Config(folder=tmp_path), ranks)
        assert state() == before
        assert all(gone(process.pid) for process in started[-1].processes)
        assert not (tmp_path / "outlived").exists()
        return code, capfd.readouterr().err

    forked.start = start
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)
    return forked


def test_each_rank_knows_its_place_and_where_the_others_are(forked, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FEMTO_RENDEZVOUS")

    def main(config: Config) -> None:
        found = {name: os.environ[name] for name in names} | {"spawns": must_spawn(3)}
        found["masked"] = bool(signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGINT})
        (config.folder / f"{rank()}.json").write_text(json.dumps(found))

    assert forked(main, ranks=3) == (0, "")
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    [place] = {each.pop("FEMTO_RENDEZVOUS") for each in found}
    same = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "spawns": False, "masked": False}
    assert found == [{"RANK": str(number), "LOCAL_RANK": str(number)} | same for number in range(3)]
    assert Path(place).is_absolute() and not Path(place).parent.exists()


@pytest.mark.parametrize("code", [None, 0, 1, 2, 3])
def test_the_exit_code_is_that_of_all_ranks(forked, code):
    assert forked(lambda config: code) == (code or 0, "")


def test_of_ranks_that_differ_the_first_to_fail_decides(forked, tmp_path):
    def main(config: Config) -> int:
        if rank() == 1:
            (config.folder / "pid").write_text(str(os.getpid()))
            return 2
        until(lambda: (config.folder / "pid").exists() and (config.folder / "pid").read_text() != "")
        until(lambda: gone(int((config.folder / "pid").read_text())))  # the parent has seen its end
        return 1 if rank() == 0 else 0

    assert forked(main, ranks=3) == (2, "")


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (FemtoError("this row is empty"), 2, "error: rank 1: this row is empty\n"),
        (FemtoError("one", "two"), 2, "error: rank 1: one\nerror: rank 1: two\n"),
        (RunFailed("the disk is full"), 1, "error: rank 1: the disk is full\n"),
    ],
)
def test_a_fault_of_one_rank_is_shown_once_with_its_rank_and_ends_those_that_hang(
    forked, tmp_path, error, code, stderr
):
    def main(config: Config) -> None:
        if rank() == 1:
            until((config.folder / "hangs-0").exists)
            raise error
        hang(config)

    assert forked(main, grace=0.2) == (code, stderr)
    assert gone(int((tmp_path / "hangs-0").read_text()))


def test_a_fault_of_all_ranks_is_shown_once_without_a_rank(forked):
    def main(config: Config) -> None:
        raise FemtoError("no such file", agreed=True)

    assert forked(main, ranks=3) == (2, "error: no such file\n")


def test_an_exception_of_one_rank_is_shown_with_its_traceback_from_the_recipe_on(forked):
    def main(config: Config) -> None:
        if rank() == 0:
            until((config.folder / "hangs-1").exists)
            print({}["missing"])
        hang(config)

    code, stderr = forked(main, grace=0.2)
    lines = stderr.splitlines()
    assert code == 1 and lines[0] == "rank 0: Traceback (most recent call last):" and lines[-1] == "KeyError: 'missing'"
    assert f'File "{__file__}"' in lines[1] and stderr.count("Traceback") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ends_is_named_with_it(forked, number):
    def main(config: Config) -> None:
        if rank() == 1:
            until((config.folder / "hangs-0").exists)
            faulthandler.disable()  # pytest's own, which has much to say
            os.kill(os.getpid(), number)
        hang(config)

    assert forked(main, grace=0.2) == (1, f"error: rank 1 was ended by {signal.Signals(number).name}\n")


def test_ranks_that_end_in_time_after_another_failed_are_let_to(forked, tmp_path):
    def main(config: Config) -> int:
        if rank() == 1:
            (config.folder / "pid").write_text(str(os.getpid()))
            return 1
        until(lambda: (config.folder / "pid").exists() and (config.folder / "pid").read_text() != "")
        until(lambda: gone(int((config.folder / "pid").read_text())))
        time.sleep(0.1)
        (config.folder / "ended").touch()
        return 1

    assert forked(main) == (1, "") and (tmp_path / "ended").exists()


def test_a_rank_that_failed_before_all_were_started_ends_the_others_too(forked, monkeypatch):
    def main(config: Config) -> int:
        if rank() == 1:
            return 2
        hang(config)

    def slowly(*arguments, **more):
        context = forked.start(*arguments, **more)
        os.waitid(os.P_PID, context.processes[1].pid, os.WEXITED | os.WNOWAIT)
        return context

    monkeypatch.setattr(torch.multiprocessing, "spawn", slowly)
    assert forked(main, grace=0.2) == (2, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_to_every_rank(forked, tmp_path, number):
    def main(config: Config) -> int:
        stop = StopRequest(muted=rank() != 0)
        (config.folder / f"ready-{rank()}").touch()
        if rank() == 0:
            until(lambda: all((config.folder / f"ready-{other}").exists() for other in range(3)))
            os.kill(os.getppid(), number)
        until(lambda: stop.requested)
        (config.folder / f"stopped-{rank()}").touch()
        return 3

    code, stderr = forked(main, ranks=3)
    assert code == 3 and stderr.count("stopping after this step") == 1 and stderr.count("\n") == 2
    assert len([*tmp_path.glob("stopped-*")]) == 3


# ── Fresh interpreters ────────────────────────────────────────────────────────────────────────────────────────────────

MINE = '''"""Ranks that add their numbers, and wait to be stopped."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from femtolib.command import run_recipe
from femtolib.config import ConfigModel
from femtolib.parallel.spawn import must_spawn, spawn
from femtolib.parallel.world import World
from femtolib.stop import StopRequest

LAUNCH = "distributed"


class Config(ConfigModel):
    folder: str
    processes: int = 1


def main(config: Config) -> int:
    if must_spawn(config.processes):
        return spawn(main, config, config.processes)
    world = World.join(torch.device("cpu"), 60)
    stop = StopRequest(muted=world.rank != 0)
    [total] = world.sum(10 ** world.rank)
    print(f"rank {world.rank} of {world.size}, sum {total}", flush=True)
    Path(config.folder, f"ready-{world.rank}").touch()
    while not world.any(stop.requested):
        time.sleep(0.01)
    world.close()
    return 3


if __name__ == "__main__":
    sys.exit(run_recipe(Config, main, doc=__doc__, launch=LAUNCH))
'''


@pytest.fixture
def mine(tmp_path) -> Path:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "c.yaml").write_text(f"folder: {tmp_path}\nprocesses: 2\n")
    (tmp_path / "theirs" / "mine.py").write_text(MINE)
    return tmp_path / "theirs" / "mine.py"


def interpreters(session: int) -> list[int]:
    """The ranks that have been started in a session, whether or not they have come to their main."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and b"--multiprocessing-fork" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_fresh_interpreters_meet_at_a_file_and_are_stopped_through_the_one_that_started_them(start, mine, tmp_path):
    running = start.command(f"femto run {mine} --config {tmp_path / 'c.yaml'}", tmp_path)
    running.wait_until(lambda: all((tmp_path / f"ready-{number}").exists() for number in range(2)))
    assert len(interpreters(running.pid)) == 2
    running.signal(signal.SIGTERM)  # to it alone
    ended = running.result()
    assert ended.exit_code == 3, ended
    assert ended.stdout == "rank 0 of 2, sum 11\n"
    assert ended.stderr.split("\n") == [
        "",
        "stopping after this step; Ctrl-C again stops at once and saves nothing",
        "",
    ]
    until(lambda: not running.processes())


@pytest.fixture
def session() -> Iterator[Callable[..., subprocess.Popen]]:
    """`session(*command)`: a command in a session of its own, as a terminal would start it; ended with the test."""
    with contextlib.ExitStack() as stack:

        def session(*command: object) -> subprocess.Popen:
            process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(functools.partial(end, process))
            return process

        def end(process: subprocess.Popen) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

        yield session


def test_a_ctrl_c_while_the_ranks_import_is_a_line_of_each_and_no_traceback(session, mine, tmp_path):
    process = session(sys.executable, mine, "--config", tmp_path / "c.yaml")
    until(lambda: len(interpreters(process.pid)) == 2)
    ranks = interpreters(process.pid)
    blocked = [line for pid in ranks for line in Path(f"/proc/{pid}/status").read_text().splitlines()
               if line.startswith("SigBlk")]  # fmt: skip
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 1, stderr
    assert sorted(stderr.splitlines()) == [
        f"error: rank {number}: interrupted; what was not saved before is lost" for number in range(2)
    ]
    stops = (1 << signal.SIGTERM - 1) | (1 << signal.SIGINT - 1)
    assert [int(line.split()[1], 16) & stops for line in blocked] == [stops, stops]
