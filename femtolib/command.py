"""Running a recipe from a command line: `--config C [key=value …]`, `--help`, faults as lines, exit codes.

Exit codes: 0 done, 2 the user's input is wrong, 3 stopped on request with the state saved, 1 anything else. The same
function serves `femto run NAME` and `python FILE`.
"""

import argparse
import contextlib
import errno
import functools
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

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
    launch: Literal["single", "distributed"] = "single",
) -> int:
    """Read the command line `argv`, call `main(config)`, return the exit code; a FemtoError is shown as lines.

    `launch`: a distributed recipe may be one of several ranks that a launcher started.
    """
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
    function = functools.partial(_load_and_call, parser, argv, config_type, main)
    if launch == "distributed":
        return run_as_rank(function, main.__code__.co_filename)
    with _screens():
        return _run(function)


def _load_and_call(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    config_type: type[ConfigModel],
    main: Callable[[ConfigModel], int | None],
) -> int:
    arguments = parser.parse_intermixed_args(argv)
    return main(load_config(config_type, arguments.config, arguments.overrides)) or EXIT_DONE


def _run(function: Callable[[], int], rank: str = "") -> int:
    """The exit code of `function`; what a user can cause is shown as `error:` lines, with the rank where there are
    several, and anything else goes on up."""
    try:
        return function()
    except FemtoError as error:
        return fail(error, rank)
    except KeyboardInterrupt:
        print(f"error: {rank}interrupted; what was not saved before is lost", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _DISK_SAYS_NO:
            raise
        print(f"error: {rank}{error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith("DataLoader worker"):  # killed; torch says it in many lines
            print(f"error: {rank}{str(error).splitlines()[0].rstrip('. ')}; was memory short?", file=sys.stderr)
            return EXIT_FAILED
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        remedy = "a smaller micro_batch_size, data.seq_len or model needs less"
        print(f"error: {rank}out of memory ({show(str(error))}); {remedy}", file=sys.stderr)
        return EXIT_FAILED


def fail(error: FemtoError, rank: str = "") -> int:
    """Show a fault, one `error:` line each, and return its exit code. Of one that all ranks raise, rank 0 shows it."""
    if error.agreed and os.environ.get("RANK", "0") != "0":
        return error.exit_code
    for fault in error.faults:
        print(f"error: {'' if error.agreed else rank}{fault}", file=sys.stderr)
    return error.exit_code


# ── One of several ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def run_as_rank(function: Callable[[], int], recipe: str) -> int:
    """`_run` in a process that may be one of several: whatever it raises is said with its rank, in one piece, and the
    launcher that started it is told how it ended.

    A rank that only lost the others says so in a line: the one that failed has said why. torchrun's agent starts a rank
    anew that ends with anything but 0, so a stopped one ends with 0; `femto run`, which names a folder in
    FEMTO_EXIT_CODES, finds the true code there, and rank by rank who failed of himself.
    """
    from femtolib.parallel.world import leave_process_group, lost_contact

    under_agent = "TORCHELASTIC_RUN_ID" in os.environ
    rank = f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""
    agreed = False

    def attempt() -> int:
        nonlocal agreed
        try:
            return function()
        except FemtoError as error:
            agreed = error.agreed
            raise

    with _screens():
        try:
            code = _run(attempt, rank)
        except Exception as error:
            if lost := lost_contact(error):
                print(f"error: {rank}{_section(error, recipe)}{lost}", file=sys.stderr)
                return EXIT_FAILED
            theirs = error.__traceback__  # from the recipe on: what lies above it is femto's own
            while theirs and theirs.tb_frame.f_code.co_filename != recipe:
                theirs = theirs.tb_next
            lines = traceback.format_exception(type(error), error, theirs or error.__traceback__)
            print(f"{rank}{''.join(lines)}", file=sys.stderr, end="")
            code = EXIT_FAILED
        finally:
            leave_process_group()
    codes = os.environ.get("FEMTO_EXIT_CODES")
    if under_agent and codes:
        with contextlib.suppress(OSError, KeyError):  # left over from another run: nobody reads it
            (Path(codes) / os.environ["RANK"]).write_text(str(code))
    if under_agent and (code == EXIT_STOPPED or (codes and agreed)):
        return EXIT_DONE
    return code


def _section(error: BaseException, recipe: str) -> str:
    """`in 7 Training loop: `, the section of the recipe's file that an error went through, by its ruled comments."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == recipe]
    source = Path(recipe).read_text(encoding="utf-8").splitlines()[: lines[0]] if lines else []
    titles = [match[1] for line in source if (match := re.match(r"\s*# ── (.+?) ─", line))]
    return f"in {titles[-1]}: " if titles else ""


@contextlib.contextmanager
def _screens() -> Iterator[None]:
    with contextlib.redirect_stdout(_Screen(sys.stdout)), contextlib.redirect_stderr(_Screen(sys.stderr)):
        yield


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
