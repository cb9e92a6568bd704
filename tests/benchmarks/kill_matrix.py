"""Kill runs of several ranks in every way, give the same command again, and see that nothing shows.

    python tests/benchmarks/kill_matrix.py [--kills 64] [--seed 0] [--ranks 2 4] [--recipe distributed_pretrain]

A kill is a victim (the launcher or a rank) × a signal (SIGKILL, SIGTERM, SIGINT) × a moment (at start, in a step, in a
save, in a validation, while the run finishes). A run saves every 2 of its 24 steps and keeps one checkpoint; it is
killed four times on its way, each time started again by the same command, and must end as the run that nobody killed:
every line of metrics.jsonl that speaks of training and the model equal to the bit. Each kill must end the run within a
minute, with the exit code that it should have, no process left and no checkpoint that is not whole.

What is checked, and when a kill comes, is in `endure`; tests/recipes/test_distributed_kills.py calls it for a few.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from femtolib.checkpoint import read_state
from femtolib.errors import FemtoError

STEPS, SAVE_EVERY, VALIDATE_EVERY = 24, 2, 3
KILLS_A_RUN = 4
MOMENTS = ("start", "step", "save", "validation", "finish")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WATCHDOG = 60  # seconds in which a killed run must have ended
START = 240  # and a run that is not killed must have come to its next line


def overrides(output: Path, ranks: int, asynchronous: bool) -> list[str]:
    """What makes configs/tiny/pretrain.yaml the run that is killed: two micro-batches a step, a model of one layer."""
    return [
        f"output_dir={output}",
        "dtype=float64",
        "param_dtype=float64",
        f"micro_batch_size={4 // ranks}",
        "model.num_hidden_layers=1",
        f"max_steps={STEPS}",
        f"validate_every={VALIDATE_EVERY}",
        f"checkpoint={{every: {SAVE_EVERY}, keep_last: 1, async_save: {str(asynchronous).lower()}}}",
        "optimizer.lr=1e-3",
        "log.every=1000",
    ]


@dataclass(frozen=True)
class Kill:
    """`share` says where in its moment it comes, from 0 to 1; `skip`: how many such moments pass before it."""

    victim: str | int
    signal: signal.Signals
    moment: str
    skip: int
    share: float

    def __str__(self) -> str:
        who = self.victim if self.victim == "launcher" else f"rank {self.victim}"
        return f"{self.signal.name:<7} to {who:<8} {self.moment:<10}"


def shuffled_kills(seed: int | str, ranks: int, *, launcher: bool) -> list[Kill]:
    """Every kill of a run of so many ranks, in an order, each at a place in its moment, that `seed` decides."""
    source = random.Random(f"{seed}/{ranks}")
    victims = [*(["launcher"] if launcher else []), *range(ranks)]
    kills = [Kill(*what, source.randrange(3), source.random()) for what in itertools.product(victims, SIGNALS, MOMENTS)]
    source.shuffle(kills)
    return kills


class Process(Protocol):
    """A run under way."""

    def kill(self, victim: str | int, number: signal.Signals) -> None: ...
    def living(self) -> list[int]: ...
    def exit_code(self) -> int | None: ...  # None: the launcher has not ended
    def screen(self) -> str: ...
    def give_up(self) -> None: ...  # show where it hangs, and end it


@dataclass
class Outcome:
    """What came of a kill. `faults`: what should not have been."""

    kill: Kill
    happened: bool = False
    step: int = 0  # the last one in metrics.jsonl at the signal
    exit_code: int | None = None
    seconds_to_end: float = 0.0
    seconds_to_durable: float | None = None  # from the signal until the state of the step it stopped at is published
    faults: list[str] = field(default_factory=list)


def refer(start: Callable[[], Process], output: Path) -> dict[str, Any]:
    """The trace of a run that nobody kills, and the seconds that it took to its first step."""
    began, process = time.monotonic(), start()
    while process.exit_code() is None and not _last_step(output):
        time.sleep(0.01)
    start_seconds = time.monotonic() - began
    while process.exit_code() is None:
        time.sleep(0.01)
    assert process.exit_code() == 0, process.screen()
    return trace(output) | {"start_seconds": start_seconds, "seconds": time.monotonic() - began}


def endure(start: Callable[[], Process], output: Path, kills: list[Kill], reference: dict[str, Any]) -> list[Outcome]:
    """Run, kill, run again, … to the end; what came of each kill, faults of the finished run with the last one's."""
    start_seconds, outcomes = reference["start_seconds"], []
    for kill in sorted(kills, key=lambda kill: kill.moment == "finish"):  # after which no other moment comes
        outcomes.append(Outcome(kill))
        _run_and_kill(start, output, outcomes[-1], start_seconds)
        if any("hang" in fault for fault in outcomes[-1].faults):
            break
    faults = outcomes[-1].faults
    process = start()
    watch = _Watch(output, faults)
    if not watch.until(lambda: process.exit_code() is not None, START, pause=0.02):
        faults.append(f"hang: the last run: {process.screen()}")
        process.give_up()
    elif process.exit_code():
        faults.append(f"the last run ended with {process.exit_code()}: {process.screen()}")
    else:
        faults += [f"{name} differs from the run that nobody killed" for name in differences(output, reference)]
        if len(left := os.listdir(output / "checkpoints")) != 1:
            faults.append(f"checkpoints holds {left}")
    return outcomes


def trace(output: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on its kills."""
    lines = _lines(output)
    trained = ("step", "epoch", "consumed_rows", "loss", "lr", "grad_norm", "batch_digest", "ledger")
    return {
        "training": [[line[key] for key in trained] for line in lines if line["event"] == "train"],
        "validation": [line for line in lines if line["event"] == "validation"],
        "order of events": [(x["event"], x["step"]) for x in lines if x["event"] in ("train", "validation")],
        "end": lines[-1],
        "model": hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "state": read_state(output / "checkpoints" / f"step_{STEPS:08d}")["ledger"],
    }


def differences(output: Path, reference: dict[str, Any]) -> list[str]:
    return [name for name, value in trace(output).items() if value != reference[name]]


def _run_and_kill(start: Callable[[], Process], output: Path, outcome: Outcome, start_seconds: float) -> None:
    kill, faults = outcome.kill, outcome.faults
    before = _last_step(output)  # a resume will cut lines: a step is new when it is later than all of them
    starts = _starts(output)
    process = start()
    watch = _Watch(output, faults)
    every = {"save": SAVE_EVERY, "validation": VALIDATE_EVERY, "finish": STEPS}.get(kill.moment, 1)
    later = [step for step in range(before + 1, STEPS + 1) if step % every == 0]
    moment = kill.moment if later else "start"  # nothing is left but to finish
    if moment == "start":
        watch.until(lambda: process.exit_code() is not None, kill.share * start_seconds)
    else:
        step = later[min(kill.skip, len(later) - 1)]
        watch.until(lambda: _starts(output) > starts or process.exit_code() is not None, START, pause=0.02)
        if not watch.until(lambda: _last_step(output) >= step or process.exit_code() is not None, START):
            faults.append(f"hang: no line of step {step} in {START} s: {process.screen()}")
            return process.give_up()
        if moment == "save":
            name = f"step_{step:08d}"
            watch.until(lambda: bool([*output.glob(f"checkpoints/*{name}*")]) or process.exit_code() is not None, START)
        longest = {"step": 0.05, "save": 0.03, "validation": 0.02, "finish": 0.2}[moment]
        watch.until(lambda: False, kill.share * longest)
    if process.exit_code() is None:
        outcome.happened, outcome.step, signalled = True, _last_step(output), time.monotonic()
        process.kill(kill.victim, kill.signal)
        if not watch.until(lambda: process.exit_code() is not None, WATCHDOG):
            faults.append(f"hang: not ended {WATCHDOG} s after the signal: {process.screen()}")
            return process.give_up()
        outcome.seconds_to_end = time.monotonic() - signalled
        if not watch.until(lambda: not process.living(), 5):
            faults.append(f"processes {process.living()} outlived the run by 5 s")
            process.give_up()
        outcome.seconds_to_end = time.monotonic() - signalled
    outcome.exit_code = code = process.exit_code()
    watch.look()
    for path in watch.folder.glob("step_*"):
        watch.check(path)
    end = next((line for line in reversed(_lines(output)) if line["event"] == "end"), {})
    if outcome.happened and code == 3:
        if end.get("reason") != "stopped" or watch.published.get(end["step"]) is None:
            faults.append(f"exit code 3, but the last end is {end} and what was published {[*watch.published]}")
        else:
            outcome.seconds_to_durable = max(0.0, watch.published[end["step"]] - signalled)
    wanted = {0}  # it came too late
    if outcome.happened and kill.signal == signal.SIGKILL:
        wanted = {-9} if kill.victim == "launcher" else {1}
        wanted |= {0} if end.get("reason") == "completed" else set()
    elif outcome.happened:
        wanted = {3} | ({1, -kill.signal} if moment == "start" else set())
        wanted |= {0} if end.get("reason") == "completed" else set()
    if code not in wanted:
        faults.append(f"exit code {code}, not one of {sorted(wanted)}: {process.screen()}")
    if "Traceback" in process.screen():
        faults.append(f"a traceback: {process.screen()}")


class _Watch:
    """Waits, and meanwhile looks at the checkpoints: each must be whole as soon as it has its name, and none may go
    before a later one is there."""

    def __init__(self, output: Path, faults: list[str]):
        self.folder, self.faults = output / "checkpoints", faults
        self.published: dict[int, float] = {}
        self.look()

    def until(self, reached: Callable[[], bool], seconds: float, pause: float = 0.002) -> bool:
        deadline = time.monotonic() + seconds
        while not (is_reached := reached()) and time.monotonic() < deadline:
            self.look()
            time.sleep(pause)
        return is_reached

    def look(self) -> None:
        now = time.monotonic()
        paths = {int(path.name.removeprefix("step_")): path for path in self.folder.glob("step_*")}
        for step, path in paths.items():
            if step not in self.published:
                self.published[step] = now
                self.check(path)
        # Twice, because a listing made while one comes and another goes may show neither.
        if self.published and not paths and not [*self.folder.glob("step_*")]:
            self.faults.append(f"no checkpoint left of {[*self.published]}")

    def check(self, path: Path) -> None:
        try:
            read_state(path)
        except FemtoError as error:
            if path.exists():  # else a later one has come, and it went while it was read
                self.faults.append(f"not whole: {error}")


def _lines(output: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().split("\n")[:-1]]
    return []


def _last_step(output: Path) -> int:
    return max((line["step"] for line in _lines(output) if line["event"] == "train"), default=0)


def _starts(output: Path) -> int:
    return sum(line["event"] == "start" for line in _lines(output))


# ── Through `femto run` ───────────────────────────────────────────────────────────────────────────────────────────────


class FemtoRun:
    """`femto run --nproc-per-node N RECIPE`, known by a variable in the environment of its processes."""

    def __init__(self, ranks: int, words: list[str], folder: Path, recipe: str):
        self._mark = f"KILL_MATRIX={time.monotonic_ns()}"
        environment = os.environ | dict([self._mark.split("=")]) | {"PYTHONFAULTHANDLER": "1"}
        options = ["--nproc-per-node", str(ranks)]
        command = [Path(sys.executable).with_name("femto"), "run", *options, recipe, *words]
        self._screen = folder / "screen"
        with self._screen.open("wb") as screen:
            self._launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, env=environment, start_new_session=True
            )

    def kill(self, victim: str | int, number: signal.Signals) -> None:
        pid = self._launcher.pid
        if victim != "launcher":
            deadline = time.monotonic() + START  # at start there may be no such rank yet
            while (pid := self._processes().get(f"RANK={victim}")) is None:
                if self._launcher.poll() is not None:
                    return
                assert time.monotonic() < deadline, f"there is no rank {victim}: {self.screen()}"
                time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def living(self) -> list[int]:
        return [*self._processes().values()]

    def exit_code(self) -> int | None:
        return self._launcher.poll()

    def screen(self) -> str:
        return self._screen.read_text(errors="replace")

    def give_up(self) -> None:
        for number in (signal.SIGABRT, signal.SIGKILL):  # Python shows all threads at the first
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1)

    def _processes(self) -> dict[str, int]:
        """Living processes by RANK=…, or by their number where they have none or are a rank's own."""
        found: dict[str, int] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes().decode(errors="replace").split("\0")
                if self._mark in variables and path.with_name("stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    rank = next((text for text in variables if text.startswith("RANK=")), "")
                    found[rank if rank and rank not in found else path.parent.name] = int(path.parent.name)
        return found


def starter(
    ranks: int, asynchronous: bool, output: Path, recipe: str = "distributed_pretrain"
) -> Callable[[], FemtoRun]:
    """What starts the run of this output, again and again by the same command."""
    output.parent.mkdir()
    words = ["--config", "configs/tiny/pretrain.yaml", *overrides(output, ranks, asynchronous)]
    return lambda: FemtoRun(ranks, words, output.parent, recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--recipe", default="distributed_pretrain")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    os.environ["FEMTO_CACHE"] = str(folder / "cache")
    references, decks = {}, {}
    for ranks in arguments.ranks:
        start = starter(ranks, False, folder / f"whole-{ranks}" / "output", arguments.recipe)
        references[ranks] = about = refer(start, folder / f"whole-{ranks}" / "output")
        print(
            f"{ranks} ranks, not killed: first step after {about['start_seconds']:.1f} s, all {about['seconds']:.1f} s"
        )
        for mode in ("sync", "async"):
            decks[mode, ranks] = shuffled_kills(f"{arguments.seed}/{mode}", ranks, launcher=True)
    for mode, ranks in itertools.cycle(sorted(decks, reverse=True)):
        count = min(KILLS_A_RUN, arguments.kills - len(outcomes))
        kills = [decks[mode, ranks].pop() for _ in range(count)]
        if not kills:
            break
        output = folder / f"run-{len(outcomes)}" / "output"
        start = starter(ranks, mode == "async", output, arguments.recipe)
        for outcome in endure(start, output, kills, references[ranks]):
            outcomes.append(outcome)
            durable = "" if outcome.seconds_to_durable is None else f"{outcome.seconds_to_durable:.2f}"
            print(
                f"{len(outcomes):>3} {ranks} ranks {mode:<5} {outcome.kill} "
                f"{'step ' + str(outcome.step) if outcome.happened else 'too late':<8} exit {outcome.exit_code} "
                f"ended {outcome.seconds_to_end:5.2f} s  durable {durable:<5} {'; '.join(outcome.faults) or 'ok'}",
                flush=True,
            )
        if not any(outcome.faults for outcome in outcomes[-count:]):
            shutil.rmtree(output.parent)
    summarize(outcomes, references)


def summarize(outcomes: list[Outcome], references: dict[int, dict[str, Any]]) -> None:
    happened = [outcome for outcome in outcomes if outcome.happened]
    print(f"{len(happened)} kills ({len(outcomes) - len(happened)} came too late)")
    ended = [outcome.seconds_to_end for outcome in happened]
    print(f"seconds to the end of all processes: median {statistics.median(ended):.2f}, most {max(ended):.2f}")
    durable = [o.seconds_to_durable for o in happened if o.seconds_to_durable is not None]
    if durable:
        print(
            f"seconds from SIGTERM or SIGINT to the published state: median {statistics.median(durable):.3f}, "
            f"most {max(durable):.3f}, of {len(durable)}"
        )
    first, *others = references.values()
    for other in others:
        pairs = [(a[3], b[3]) for a, b in zip(first["training"], other["training"], strict=True)]
        print(f"losses of the layouts, not killed: {max(abs(a - b) / abs(a) for a, b in pairs):.1e} relative apart")
    faulty = [outcome for outcome in outcomes if outcome.faults]
    print(f"{len(faulty)} kills with faults")
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
