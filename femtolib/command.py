"""Running a recipe from a command line: `--config C [key=value …]`, `--help`, faults as lines, exit codes.

Exit codes: 0 done, 2 the user's input is wrong, 3 stopped on request with the state saved, 1 anything else. The same
function serves `femto run NAME` and `python FILE`.
"""

import argparse
import contextlib
import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from femtolib.config import ConfigModel, describe_keys, load_config, show
from femtolib.errors import FemtoError

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 3

# What a disk or its owner may say to any write of a run; another OSError is a fault of the program.
_DISK_SAYS_NO = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}


def run_recipe(
    config_type: type[ConfigModel],
    main: Callable[[ConfigModel], int | None],
    argv: list[str] | None = None,
    *,
    doc: str | None = "",
    prog: str | None = None,
) -> int:
    """Read the command line `argv`, call `main(config)`, return the exit code; a FemtoError is shown as lines."""
    for descriptor in range(3):  # one that was closed would be given to a file of the run, and get what is printed
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=inspect.cleandoc(doc or ""),
        epilog="keys of the config:\n" + describe_keys(config_type),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = _refuse
    parser.add_argument("--config", required=True, type=Path, metavar="CONFIG", help="the YAML file of this run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to set on top of it: optimizer.lr=1e-4")
    with contextlib.redirect_stdout(_Screen(sys.stdout)), contextlib.redirect_stderr(_Screen(sys.stderr)):
        try:
            arguments = parser.parse_intermixed_args(argv)
            return main(load_config(config_type, arguments.config, arguments.overrides)) or EXIT_DONE
        except FemtoError as error:
            return fail(error)
        except KeyboardInterrupt:
            print("error: interrupted; what was not saved before is lost", file=sys.stderr)
            return EXIT_FAILED
        except OSError as error:
            if error.errno not in _DISK_SAYS_NO:
                raise
            print(f"error: {error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
            return EXIT_FAILED
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
                raise
            remedy = "a smaller micro_batch_size, data.seq_len or model needs less"
            print(f"error: out of memory ({show(str(error))}); {remedy}", file=sys.stderr)
            return EXIT_FAILED


class _Screen:
    """stdout or stderr of a run that goes on when nobody reads it any more: a Ctrl-C also ends the `tee` behind a pipe,
    a log file's disk may be full, and the state must be saved all the same."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or open(os.devnull, "w")  # noqa: PTH123, SIM115 (None: it was closed from the start)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale that lacks a letter is no reason to stop

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._into_the_void()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._into_the_void()

    def _into_the_void(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _refuse(message: str) -> NoReturn:
    raise FemtoError(f"{message}; --help says more")


def recipe_name(module: str, file: str) -> str:
    """What `femto run` calls a recipe, given its `__name__` and `__file__`: a shipped one by name, another by path."""
    return Path(file).stem if module.startswith("femto.recipes.") else str(Path(file).resolve())


def fail(error: FemtoError) -> int:
    """Show a fault, one `error:` line each, and return its exit code."""
    for fault in error.faults:
        print(f"error: {fault}", file=sys.stderr)
    return error.exit_code
