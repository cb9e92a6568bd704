"""What ranks agree on, in real processes over gloo: several checks a launch."""

import contextlib
import datetime
import io
import os
import signal
import sys
import threading
import time

import pytest
import torch

from femtolib.command import fail
from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel.world import World, leave_process_group, lost_contact

CPU = torch.device("cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def raised(function) -> tuple[type, list[str], bool, int]:
    """Type, lines, `agreed` and exit code of the FemtoError that `function()` raises."""
    with pytest.raises(FemtoError) as error:
        function()
    return error.type, error.value.faults, error.value.agreed, error.value.exit_code


def refuse(*lines: str, kind: type[FemtoError] = FemtoError):
    raise kind(*lines)


# ── Agreement ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_numbers_and_results_are_the_same_on_every_rank(ranks):
    def on_a_rank() -> dict:
        world = World.join(CPU, 60)
        called, lock, first = [], threading.Lock(), {"a": 1}
        results = {
            "who": (world.rank, world.size, world.local_rank),
            "sum": world.sum(world.rank, 2**64 - 1, 2**63 + world.rank, -1),
            "max": world.max(10 - world.rank),
            "any": (world.any(world.rank == 2), world.any(False)),
            "together": world.together(lambda: world.rank**2),
            "from_first": world.from_first(lambda: called.append(world.rank) or [world.rank]),
            "called": called,
            "attempt": world.attempt(lambda: lock) is lock,  # stays here, so it may be what cannot be sent
            "not a copy": world.from_first(lambda: first) is first,
            "same": world.check_same({"a": 1, "b": None}),
            "group": world.new_group() is not None,
        }
        world.barrier()
        results["stdout"] = sys.stdout.name
        return results

    results = ranks(3, on_a_rank)
    assert [result.pop("who") for result in results] == [(rank, 3, rank) for rank in range(3)]
    assert [result.pop("called") for result in results] == [[0], [], []]
    assert [result.pop("not a copy") for result in results] == [True, False, False]
    assert [result.pop("stdout") == os.devnull for result in results] == [False, True, True]
    assert results[0] == results[1] == results[2]
    sums = [number % 2**64 for number in results[0].pop("sum")]
    assert sums == [3, 3 * (2**64 - 1) % 2**64, (3 * 2**63 + 3) % 2**64, 2**64 - 3]
    assert results[0] == {
        "max": 10,
        "any": (True, False),
        "together": [0, 1, 4],
        "from_first": [0],
        "attempt": True,
        "same": None,
        "group": True,
    }


def test_a_fault_on_some_ranks_is_raised_on_all_with_their_numbers_and_shown_once(ranks):
    def on_a_rank() -> tuple[dict, list[str]]:
        world = World.join(CPU, 60)
        rank = world.rank
        faults = {
            "one": raised(lambda: world.attempt(lambda: rank == 1 and refuse("no such file", "and no folder"))),
            "two": raised(lambda: world.together(lambda: rank != 1 and refuse("full"))),
            "all": raised(lambda: world.attempt(lambda: refuse("bad"))),
            "first": raised(lambda: world.from_first(lambda: refuse("locked"))),
            "each its own": raised(lambda: world.attempt(lambda: refuse(f"bad {rank}"))),
            "a failed run": raised(
                lambda: world.attempt(lambda: rank and refuse("full", kind=RunFailed if rank == 2 else FemtoError))
            ),
            "not the same": raised(lambda: world.check_same({"a": 1, "seed": rank // 2, "lr": 1e-3 * (rank == 0)})),
        }
        screen = io.StringIO()
        with contextlib.redirect_stderr(screen):
            for _, lines, agreed, _ in faults.values():
                fail(FemtoError(*lines, agreed=agreed), f"rank {rank}: ")
        assert world.sum(1) == [3], "ranks that agreed on a fault are still together"
        return faults, screen.getvalue().splitlines()

    results = ranks(3, on_a_rank)
    faults = results[0][0]
    assert faults == results[1][0] == results[2][0]
    assert faults["one"] == (FemtoError, ["rank 1: no such file", "rank 1: and no folder"], True, 2)
    assert faults["two"] == (FemtoError, ["ranks 0, 2: full"], True, 2)
    assert faults["all"] == (FemtoError, ["bad"], True, 2)
    assert faults["first"][1][0].endswith("locked") and faults["first"][2:] == (True, 2)
    assert faults["each its own"][1] == ["rank 0: bad 0", "rank 1: bad 1", "rank 2: bad 2"]
    assert faults["a failed run"] == (RunFailed, ["ranks 1, 2: full"], True, 1)
    assert faults["not the same"][1] == [
        "seed is not the same on all ranks: 0 on ranks 0, 1; 1 on rank 2",
        "lr is not the same on all ranks: 0.001 on rank 0; 0.0 on ranks 1, 2",
    ]
    screens = [screen for _, screen in results]
    assert screens[0] == [f"error: {line}" for _, lines, _, _ in faults.values() for line in lines]
    assert screens[1:] == [[], []]


# ── Ranks that are late, or gone ──────────────────────────────────────────────────────────────────────────────────────


def test_ranks_wait_for_a_slow_disk_longer_than_for_a_slow_step(ranks):
    def on_a_rank() -> list[str | None]:
        world = World.join(CPU, 1)
        late = world.rank == 1
        for wait in (world.barrier, lambda: world.together(lambda: None)):
            time.sleep(1.3 * late)
            wait()
        told = None
        try:
            time.sleep(2 * late)
            world.sum(1)
        except RuntimeError as error:
            told = lost_contact(error)
        in_background = lost_contact(RuntimeError("Application timeout caused pair closure"))
        assert in_background.startswith("waited longer than process_group_timeout")
        return [told, lost_contact(RuntimeError("a shape is wrong")), lost_contact(ValueError("gloo"))]

    results = ranks(2, on_a_rank, seconds=60)
    assert "waited longer than process_group_timeout" in results[0][0]
    assert results[0][1:] == [None, None]


def test_a_rank_that_dies_is_noticed_at_once_also_by_who_waits_for_its_disk(ranks):
    def on_a_rank() -> str | None:
        world = World.join(CPU, 600)
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            world.barrier()
        assert time.monotonic() - started < 30
        return lost_contact(error.value)

    assert ranks(2, on_a_rank, killed={1}, seconds=60)[0] == "lost contact with another rank, which has ended"


# ── Joining ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_launcher_a_process_is_a_run_of_its_own(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for world in (World(), World.join(CPU, 60)):
        assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
        assert world.sum(2**64 - 1, 5) == [-1, 5] and world.max(3) == 3 and world.any(True) and not world.any(False)
        assert world.together(lambda: "a") == ["a"] and world.from_first(lambda: "a") == "a"
        with pytest.raises(FemtoError, match="bad"):
            world.attempt(lambda: refuse("bad"))
        world.check_same({"a": 1})
        world.barrier()
        world.close()
    assert World.join(CPU, 60).size == 1  # again, in the same process
    leave_process_group()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"RANK": "first"}, "RANK=first"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR=no.such.host.invalid"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"RANK": "2"}, "RANK=2"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused_at_once(monkeypatch, variables, wanted):
    whole = dict(zip(VARIABLES, ("1", "2", "1", "2", "localhost", "29500"), strict=True))
    for name, value in {**whole, **variables}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    kind, (fault,), _, code = raised(lambda: World.join(CPU, 60))
    assert kind is FemtoError and code == 2 and wanted in fault and "unset" in fault


def test_a_first_rank_that_is_not_there_is_told_in_a_line(monkeypatch):
    from femtolib.parallel import world

    monkeypatch.setattr(world, "_GATHERING", datetime.timedelta())
    for name, value in zip(VARIABLES, ("1", "2", "1", "2", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    kind, (fault,), _, code = raised(lambda: World.join(CPU, 1))
    assert kind is RunFailed and code == 1 and "localhost:1" in fault and time.monotonic() - started < 60
