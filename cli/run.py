"""Run a recipe with a config.

    femto run [torchrun options] RECIPE --config CONFIG [key=value …]
    femto run RECIPE --help        every key of its config

RECIPE is a name from `femto ls` or a path to your own .py file. CONFIG is a name from `femto ls` or a path to your own
.yaml file. key=value sets a key on top of the config: optimizer.lr=1e-4. Torchrun's options are for recipes that run
on several processes.

Exit codes: 0 done, 2 the input is wrong, 3 stopped on request with the state saved, 1 anything else.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from femto.shipped import configs_of, find_config, find_recipe, nearest, recipes
from femtolib.errors import FemtoError, RunFailed

LAUNCHES = ("single", "distributed")


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    # Before torch is imported, which reads it once: threads that wait for each other sleep instead of spinning. On a
    # machine with other load that took a small run from 35 CPU seconds to 5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options, name, arguments = split(argv)
    path = find_recipe(name)
    arguments = locate_config(name, arguments)
    recipe = load_recipe(path)
    if getattr(recipe, "LAUNCH", "single") == "distributed":
        raise FemtoError(f"{name} has LAUNCH = 'distributed', and this version runs recipes in one process only")
    refuse_options(name, options)
    from femtolib.command import run_recipe

    return run_recipe(recipe.Config, recipe.main, arguments, doc=recipe.__doc__, prog=f"femto run {name}")


def split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    """`[torchrun options] RECIPE arguments` in its three parts; FemtoError where there is no RECIPE."""
    script = argv
    if argv and argv[0].startswith("-"):
        from torch.distributed.run import get_args_parser  # the one that knows which options take a value

        parser = get_args_parser()
        parser.error = _refuse
        known = parser.parse_args(argv)
        script = [known.training_script, *known.training_script_args]
    if not script:
        raise FemtoError(f"which recipe? femto run RECIPE --config CONFIG{nearest('', recipes())}")
    return argv[: len(argv) - len(script)], script[0], script[1:]


def _refuse(message: str) -> NoReturn:
    raise FemtoError(f"{message}; only torchrun's options stand before RECIPE: femto run RECIPE --config CONFIG")


def refuse_options(name: str, options: list[str]) -> None:
    """FemtoError if a recipe that runs in one process was given torchrun options."""
    if options:
        raise FemtoError(f"{name} runs in one process and takes no torchrun options: remove {' '.join(options)}")


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe and check that it is one: `Config`, `main` and a known LAUNCH.

    A file of the user's own is imported as Python would run it: its folder first on the path, under its own name (so
    that a worker process can find what it defines). An exception in it ends in RunFailed below its traceback.
    """
    shipped = path in recipes().values()
    module = importlib.import_module(f"femto.recipes.{path.stem}") if shipped else _import_file(path)
    missing = [wanted for wanted in ("Config", "main") if not hasattr(module, wanted)]
    if missing:
        raise FemtoError(f"{path} is not a recipe: it lacks {' and '.join(missing)}; a recipe has Config and main")
    launch = getattr(module, "LAUNCH", "single")
    if launch not in LAUNCHES:
        raise FemtoError(f"{path}: LAUNCH is {launch!r}{nearest(str(launch), LAUNCHES)}")
    return module


def _import_file(path: Path) -> ModuleType:
    file = path.resolve()
    name = file.stem if file.stem not in sys.modules else f"recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except FemtoError:
        raise
    except Exception as error:
        theirs = error.__traceback__  # from the first line of their file on; a syntax error has no such line
        while theirs and theirs.tb_frame.f_code.co_filename != str(file):
            theirs = theirs.tb_next
        traceback.print_exception(type(error), error, theirs)
        raise RunFailed(f"{path} could not be imported; its traceback stands above") from None
    return module


def locate_config(name: str, arguments: list[str]) -> list[str]:
    """The arguments of the recipe `name`, the value of --config replaced by the path of the file that it means."""
    located = list(arguments)
    for place, word in enumerate(arguments):
        if word == "--config" and place + 1 < len(arguments):
            located[place + 1] = str(find_config(arguments[place + 1]))
        elif word.startswith("--config="):
            located[place] = f"--config={find_config(word.removeprefix('--config='))}"
    if located == arguments and not {"--config", "-h", "--help"} & {word.partition("=")[0] for word in arguments}:
        raise FemtoError(f"{name} needs --config CONFIG: {', '.join(configs_of(name)) or 'a path to a .yaml file'}")
    return located
