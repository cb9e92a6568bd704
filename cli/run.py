"""Run a recipe with a config.

    femto run [torchrun options] RECIPE --config CONFIG [key=value …]
    femto run RECIPE --help        every key of its config

RECIPE is a name from `femto ls` or a path to your own .py file. CONFIG is a name from `femto ls` or a path to your own
.yaml file. key=value sets a key on top of the config: optimizer.lr=1e-4.

Torchrun's options are for recipes that run on several processes: --nproc-per-node N (without it, one process for each
visible GPU, or one on a CPU), --nnodes N --rdzv-endpoint HOST:PORT (the same command on every node, HOST being one of
them), --max-restarts N, … Ctrl-C or SIGTERM, to any of them, stops all with the state saved; --shutdown-timeout SECONDS
says how long that may take (an hour, where it is not given).

Exit codes: 0 done, 2 the input is wrong, 3 stopped on request with the state saved, 1 anything else.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from femto.parser import Parser
from femto.shipped import configs_of, find_config, find_recipe, nearest, recipes
from femtolib.errors import FemtoError, RunFailed

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from femtolib.config import ConfigModel

LAUNCHES = ("single", "distributed")


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    # Before torch is imported, which reads it once: threads that wait for each other sleep instead of spinning. On a
    # machine with other load that took a small run from 35 CPU seconds to 5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read at import, too: a lost connection is told in a line of ours, not in 30 of the C++ stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    options, name, arguments = split(argv)
    path = find_recipe(name)
    arguments = locate_config(name, arguments)
    recipe = load_recipe(path)
    kind = getattr(recipe, "LAUNCH", "single")
    if kind == "single":
        refuse_options(name, options)
    elif not {"-h", "--help"} & {*arguments} and (config := launch_config(recipe, name, options, arguments)):
        from femto.launch import launch

        os.environ["FEMTO_OPTIONS"] = shlex.join(options)  # for the line that says how to continue
        return launch(config, name, arguments)
    from femtolib.command import run_recipe

    forget_launchers()
    prog = f"femto run {name}"
    return run_recipe(recipe.Config, recipe.main, arguments, doc=recipe.__doc__, prog=prog, launch=kind)


def launch_config(recipe: ModuleType, name: str, options: list[str], arguments: list[str]) -> "LaunchConfig | None":
    """How to start the processes of a distributed recipe; None where it runs in this one, alone.

    The config and the layout are checked first, so that what is wrong with them is said once and at once.
    """
    from femtolib.checks import check_layout, configured_model
    from femtolib.config import load_config
    from femtolib.parallel.mesh import ParallelDims

    parser = Parser(f"femto run {name}", "")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    try:
        known = parser.parse_intermixed_args(arguments)
    except FemtoError as error:
        raise FemtoError(f"{error}; torchrun's options stand before {name}") from None
    if not known.config.is_file():
        raise FemtoError(f"{known.config} is a pipe: {name} reads its config in every process; write it to a file")
    config = load_config(recipe.Config, known.config, known.overrides)
    processes = processes_per_node(config)
    if not options and processes == 1 and not any(name.startswith("PET_") for name in os.environ):  # torchrun's own
        return None
    from femto.launch import parse_options

    settings = parse_options(options, processes)
    refuse_processes(config)
    if settings.min_nodes == settings.max_nodes and hasattr(config, "parallel"):
        dims = ParallelDims.of(config.parallel, settings.max_nodes * settings.nproc_per_node)
        if hasattr(config, "model") and hasattr(config, "data"):
            check_layout(dims, configured_model(config.model), config.data.seq_len)
    return settings


def refuse_processes(config: "ConfigModel") -> None:
    """FemtoError if a launcher is to start processes of a recipe that would start some itself."""
    if (own := getattr(config, "processes", 1)) > 1:
        raise FemtoError(f"processes: {own} is for a run without torchrun's options: leave out the one or the others")


def processes_per_node(config: "ConfigModel") -> int:
    """How many processes a distributed recipe gets on a node where no option says it: one per visible GPU, or one, also
    where that one then starts others (`processes`)."""
    import torch

    alone = getattr(config, "device", None) == "cpu" or getattr(config, "processes", 1) > 1
    return 1 if alone else max(1, torch.cuda.device_count())


def forget_launchers() -> None:
    """Take the variables out of the environment that a launcher leaves to its workers, and they to what they start."""
    torchruns = "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    ours = "FEMTO_(EXIT_CODES|OPTIONS|RESTART_COUNT|RENDEZVOUS)"
    for name in os.environ:
        if re.fullmatch(f"{torchruns}|{ours}", name):
            del os.environ[name]


def split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    """`[torchrun options] RECIPE arguments` in its three parts; FemtoError where there is no RECIPE."""
    script = argv
    if argv and argv[0].startswith("-"):
        with importing_torch():
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
        raise FemtoError(
            f"{name} runs in one process and takes no torchrun options: remove {' '.join(options)} (a recipe that runs "
            "on several has LAUNCH = 'distributed')"
        )


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe and check that it is one: `Config`, `main` and a known LAUNCH.

    A file of the user's own is imported as Python would run it: its folder first on the path, under its own name (so
    that a worker process can find what it defines). An exception in it ends in RunFailed below its traceback.
    """
    shipped = path in recipes().values()
    if shipped:
        with importing_torch():
            module = importlib.import_module(f"femto.recipes.{path.stem}")
    else:
        module = _import_file(path)
    missing = [wanted for wanted in ("Config", "main") if not hasattr(module, wanted)]
    if missing:
        raise FemtoError(f"{path} is not a recipe: it lacks {' and '.join(missing)}; a recipe has Config and main")
    launch = getattr(module, "LAUNCH", "single")
    if launch not in LAUNCHES:
        raise FemtoError(f"{path}: LAUNCH is {launch!r}{nearest(str(launch), LAUNCHES)}")
    return module


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """For the import of torch and of what is ours: the garbage collector does not visit their objects, again and again
    while they are made, which is a fifth of the time that takes, nor later amid training."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def _import_file(path: Path) -> ModuleType:
    file = path.resolve()
    if "." in file.stem:  # a process that it starts would look for a package
        raise FemtoError(f"{path}: a recipe is imported, so its name may have no dot but that of .py; rename it")
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
        raise FemtoError(f"{name} needs --config CONFIG{nearest('', configs_of(name)) or ', a .yaml file'}")
    return located
