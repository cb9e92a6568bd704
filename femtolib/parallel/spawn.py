"""Processes without a launcher: a recipe starts its own ranks on this machine and waits for them.

Each is a fresh interpreter in which the recipe's `main` runs again, now as one of several ranks; they meet through a
file. A stop is passed on to all of them, and a rank that fails ends the others. Several nodes, restarts and logs by
rank are a launcher's business (`femto run --nproc-per-node N`, torchrun).
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

import torch.multiprocessing

from femtolib.command import EXIT_DONE, EXIT_FAILED, run_as_rank
from femtolib.config import ConfigModel
from femtolib.errors import FemtoError
from femtolib.stop import end_with_parent, take_stops, withheld_stops

# Seconds in which ranks that have lost one of theirs must have ended: they notice at their next collective.
_GRACE = 30


def must_spawn(processes: int) -> bool:
    """Whether this process has to start `processes` ranks: not if it is one of them already, or if that is one.

    Raises FemtoError where a launcher has started several ranks, each of which would start as many.
    """
    if "FEMTO_RENDEZVOUS" in os.environ or processes == 1:
        return False
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1" and "RANK" in os.environ:
        raise FemtoError(
            f"processes: {processes} starts processes, and a launcher has started {world_size} already: leave "
            "`processes` out, or run without a launcher",
            agreed=True,
        )
    return True


def spawn(main: Callable[[ConfigModel], int | None], config: ConfigModel, processes: int) -> int:
    """Call `main(config)` in so many ranks at once; returns their exit code, of ranks that differ the first to fail.

    `main` must be importable by its module's name. SIGTERM and SIGINT to this process go on to every rank.
    """
    with tempfile.TemporaryDirectory(prefix="femto-") as folder:
        arguments = (os.getpid(), f"{folder}/rendezvous", processes, main, config)
        ranks: list = []

        def pass_on(number: int, _) -> None:
            for rank in ranks:
                if rank.is_alive():
                    os.kill(rank.pid, number)

        resource_tracker.ensure_running()  # which takes the signals when it starts, and a rank would start it
        with withheld_stops():
            before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
            ranks += torch.multiprocessing.spawn(_run, arguments, nprocs=processes, join=False).processes
        try:
            return _wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
            for number, handler in before.items():
                signal.signal(number, handler)


def _wait(ranks: list) -> int:
    failed, deadline = None, None
    while True:
        alive = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for number, rank in enumerate(ranks):  # one that is not alive has an exit code
            if failed is None and rank.exitcode:
                failed, deadline = rank.exitcode, time.monotonic() + _GRACE
                if failed < 0:
                    names = {known.value: known.name for known in signal.Signals}
                    ended_by = names.get(-failed, f"signal {-failed}")
                    print(f"error: rank {number} was ended by {ended_by}", file=sys.stderr)
        if not alive or (deadline and time.monotonic() > deadline):
            break
        left = None if deadline is None else max(0, deadline - time.monotonic())
        wait([ranks[number].sentinel for number in alive], timeout=left)
    return EXIT_DONE if failed is None else max(failed, EXIT_FAILED)


def _run(
    rank: int,
    parent: int,
    rendezvous: str,
    processes: int,
    main: Callable[[ConfigModel], int | None],
    config: ConfigModel,
) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it died first
        os.kill(os.getpid(), signal.SIGKILL)
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes through the parent, and once
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "FEMTO_RENDEZVOUS": rendezvous}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    def function() -> int:
        take_stops()
        return main(config) or EXIT_DONE

    sys.exit(run_as_rank(function, main.__code__.co_filename))
