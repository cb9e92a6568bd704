"""How a process comes to its end: by a stop that a signal asks for and that happens at a step's end, when there is a
state worth saving, or with the process that started it."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

_STOPS = (signal.SIGTERM, signal.SIGINT)
STOPPING = "\nstopping after this step; Ctrl-C again stops at once and saves nothing"


class StopRequest:
    """From its making on, SIGTERM and Ctrl-C set `requested` instead of ending the process.

    A second Ctrl-C a second or more after the first raises KeyboardInterrupt: the way out for who will not wait.
    `muted`: say nothing, for all ranks but one. (A stop is agreed on: the recipe asks whether any rank wants it.)
    """

    def __init__(self, *, muted: bool = False) -> None:
        self.requested = False
        self._muted = muted or "FEMTO_EXIT_CODES" in os.environ  # `femto run` says it, which has the signal first
        self._since = 0.0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if not self.requested:
            self.requested = True
            self._since = time.monotonic()
            # Not print(): the signal may have come in the middle of one, which must not be entered twice. And the
            # screen may be gone: a Ctrl-C also ends the `tee` behind a pipe, a closed terminal may be why SIGTERM came.
            if not self._muted:
                with contextlib.suppress(OSError):
                    os.write(2, f"{STOPPING}\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._since >= 1:
            raise KeyboardInterrupt


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


@contextlib.contextmanager
def withheld_stops() -> Iterator[None]:
    """A process started in this block gets SIGTERM and SIGINT when it calls `take_stops`, and not before: amid the
    imports of an interpreter a Ctrl-C would be a traceback of many lines."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_stops() -> None:
    """Get the signals withheld so far, by which this process may end, or KeyboardInterrupt rise, and those to come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
