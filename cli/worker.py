"""One process of a recipe that runs on several. `femto run` starts it, through launch.py:

    python -m femto.worker LAUNCHER RECIPE --config CONFIG [key=value …]

LAUNCHER is the process id of that `femto run`: this process ends with it, however it ends. RECIPE and what follows are
those of `femto run`, which has checked them.
"""

import os
import signal
import sys

from femtolib.stop import end_with_parent, take_stops


def main(launcher: int, name: str, arguments: list[str]) -> int:
    _end_with(launcher)
    if restarts := os.environ.get("FEMTO_RESTART_COUNT"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts  # that of all nodes
    from femto.run import importing_torch, load_recipe  # from here on seconds pass, in which the launcher may be killed
    from femto.shipped import find_recipe
    from femtolib.command import fail, run_recipe
    from femtolib.errors import FemtoError, RunFailed

    try:
        with importing_torch():  # which is most of what a recipe imports
            import femtolib.attention
            import femtolib.checkpoint  # noqa: F401
        recipe = load_recipe(find_recipe(name))
        take_stops()
    except FemtoError as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail(RunFailed("interrupted before there was anything to save"), f"rank {os.environ['RANK']}: ")
    prog = f"femto run {name}"
    return run_recipe(recipe.Config, recipe.main, arguments, doc=recipe.__doc__, prog=prog, launch="distributed")


def _end_with(launcher: int) -> None:
    """A launcher that is killed (SIGKILL, or the machine is short of memory) can tell its workers nothing: they would
    train on, in a session of their own."""
    end_with_parent()
    if os.getppid() != launcher:  # it died first
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
