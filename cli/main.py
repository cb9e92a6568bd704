"""`femto`: finds the verb, starts it, and turns what went wrong into `error:` lines and an exit code.

Exit codes: 0 done, 2 the user's input is wrong, 1 anything else (and 3 from `run`: stopped with the state saved).
Each verb is a module of its name, imported when it is asked for, so that `--help`, `ls` and `cp` answer at once:
nothing here imports torch or pydantic.
"""

import errno
import importlib
import io
import os
import sys

from femto.shipped import nearest
from femtolib.errors import FemtoError

VERBS = {
    "ls": "list the recipes, and the configs that go with each",
    "cp": "copy a recipe or a config to edit",
    "run": "run a recipe with a config",
    "validate": "check all that can be checked without training, and print the numbers that follow",
    "export": "turn a training checkpoint into a Hugging Face directory",
    "download": "fetch a model from the Hugging Face hub",
}


def main(argv: list[str] | None = None) -> int:
    """Run one `femto` command line (default: the process's own) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that lacks a letter of a text is no reason to stop
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        if sys.stdout:  # None where it was closed from the start
            sys.stdout.flush()  # here, where a reader that has gone away can still be caught
        return code
    except FemtoError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # `femto ls | head -1`, or a full disk: the interpreter's own flush must not meet it again
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"error: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: femto COMMAND …\n\nTraining recipes that you read top to bottom, copy and edit.\n\ncommands:")
        for verb, summary in VERBS.items():
            print(f"  {verb:<10}{summary}")
        print("\n`femto COMMAND --help` says more. `femto ls` is a good start.")
        return 0
    if argv[0] not in VERBS:
        raise FemtoError(f"there is no command {argv[0]!r}{nearest(argv[0], VERBS)}")
    return importlib.import_module(f"femto.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
