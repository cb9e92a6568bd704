"""What a user is told in a line instead of a traceback. Everything a user can cause ends in a FemtoError: a wrong
key, a missing file, a full disk. What cannot happen is an assert."""


class FemtoError(Exception):
    """A fault to show as it is, one line each: what, where (file:line, key, rank), the value seen, what to do.

    Ends a command with `exit_code`: 2, the user's input is wrong. `agreed`: every rank of the run raises it, so that
    one of them is enough to show it.
    """

    exit_code = 2

    def __init__(self, *faults: str, agreed: bool = False):
        super().__init__("\n".join(faults))
        self.faults = list(faults)
        self.agreed = agreed


class RunFailed(FemtoError):
    """A fault that no check of the input could have foreseen: a full disk, a loss that is not finite. Exit code 1."""

    exit_code = 1
