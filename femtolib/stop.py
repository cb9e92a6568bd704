"""A stop that is asked for by a signal and happens at a step's end, when there is a state worth saving."""

import contextlib
import os
import signal
import time


class StopRequest:
    """From its making on, SIGTERM and Ctrl-C set `requested` instead of ending the process.

    A second Ctrl-C a second or more after the first raises KeyboardInterrupt: the way out for who will not wait.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if not self.requested:
            self.requested = True
            self._since = time.monotonic()
            # Not print(): the signal may have come in the middle of one, which must not be entered twice. And the
            # screen may be gone: a Ctrl-C also ends the `tee` behind a pipe, a closed terminal may be why SIGTERM came.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once and saves nothing\n")
        elif number == signal.SIGINT and time.monotonic() - self._since >= 1:
            raise KeyboardInterrupt
