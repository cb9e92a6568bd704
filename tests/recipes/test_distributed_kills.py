"""A run of several ranks that is killed and started again by the same command ends as the run that nobody killed:
eight seeded kills of the matrix that tests/benchmarks/kill_matrix.py goes through by hand."""

import importlib.util
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    """tests/benchmarks/kill_matrix.py"""
    path = Path(__file__).parents[1] / "benchmarks" / "kill_matrix.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """A run without a launcher, in the words of kill_matrix.Process. Where a rank is killed before any has said a word,
    it ends the others, as a launcher would: who has not met that one yet waits for it. Later they must notice."""

    def __init__(self, running):
        self._running = running
        self._killed_since: float | None = None

    def kill(self, victim: int, number: signal.Signals) -> None:
        self._running.signal(number, victim)

    def living(self) -> list[int]:
        return self._running.processes()

    def exit_code(self) -> int | None:
        codes = set(self._running.exit_codes)
        if -signal.SIGKILL in codes:
            self._killed_since = self._killed_since or time.monotonic()
            if None in codes and time.monotonic() - self._killed_since > 20 and not self._said_anything():
                self._running.signal(signal.SIGKILL)
        return None if None in codes else codes.pop() if len(codes) == 1 and -signal.SIGKILL not in codes else 1

    def _said_anything(self) -> bool:
        return any(path.stat().st_size for path in self._running.folder.glob("std*"))

    def screen(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self._running.folder.glob("std*"))

    def give_up(self) -> None:
        self._running.signal(signal.SIGUSR1)
        time.sleep(1)
        self._running.end()


@pytest.fixture(scope="module")
def starter(matrix, start_ranks) -> Callable:
    """`starter(recipe, ranks, asynchronous, output)`: what starts that run, forked."""
    config = Path("configs/tiny/pretrain.yaml")
    return lambda recipe, ranks, asynchronous, output: (
        lambda: Ranks(start_ranks(ranks, config, *matrix.overrides(output, ranks, asynchronous), recipe=recipe))
    )


@pytest.fixture(scope="module")
def reference(matrix, starter, tmp_path_factory) -> Callable[[str, int], dict]:
    """`reference(recipe, ranks)`: the trace of a run that nobody killed."""
    known = {}

    def reference(recipe: str, ranks: int) -> dict:
        if (recipe, ranks) not in known:
            output = tmp_path_factory.mktemp("whole") / "output"
            known[recipe, ranks] = matrix.refer(starter(recipe, ranks, False, output), output)
        return known[recipe, ranks]

    return reference


def check(outcomes: list) -> None:
    for outcome in outcomes:
        print(outcome.kill, "at step", outcome.step, "in time" if outcome.happened else "too late")
    assert not [fault for outcome in outcomes for fault in outcome.faults]


@pytest.mark.parametrize(
    ("recipe", "ranks", "asynchronous"),
    [("distributed_pretrain", 2, False), ("distributed_pretrain", 4, True), ("data_parallel_pretrain", 2, True)],
)
def test_killed_ranks_change_nothing(matrix, starter, reference, recipe, ranks, asynchronous, tmp_path):
    kills = matrix.shuffled_kills(6, ranks, launcher=False)[:2]
    start = starter(recipe, ranks, asynchronous, tmp_path / "output")
    check(matrix.endure(start, tmp_path / "output", kills, reference(recipe, ranks)))


def test_a_killed_launcher_changes_nothing(matrix, reference, tmp_path):
    output = tmp_path / "run" / "output"
    kills = [
        matrix.Kill("launcher", signal.SIGKILL, "save", skip=1, share=0.1),
        matrix.Kill("launcher", signal.SIGTERM, "step", skip=1, share=0.5),
    ]
    check(matrix.endure(matrix.starter(2, True, output), output, kills, reference("distributed_pretrain", 2)))
