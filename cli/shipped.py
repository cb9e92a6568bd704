"""Recipes and configs by name: those that femto ships, and a user's own files.

The shipped ones are found through importlib.resources, so the same names work from a wheel, from an editable install
and in any directory. Recipes are parsed here at most, never imported.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from importlib.resources import files
from itertools import islice
from pathlib import Path

from femtolib.errors import FemtoError


def recipes() -> dict[str, Path]:
    """The shipped recipes: name (`single_device_pretrain`) → file."""
    return {path.stem: path for path in sorted(Path(str(files("femto.recipes"))).glob("[!_]*.py"))}


def configs() -> dict[str, Path]:
    """The shipped configs: name (`llama_small`, `tiny/pretrain`) → file."""
    folder = Path(str(files("femto.configs")))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a shipped name or as a path to a `.py` file; FemtoError if there is none."""
    shipped, path = recipes(), Path(name)
    if name in shipped:
        return shipped[name]
    if path.suffix == ".py" and path.is_file():
        return path
    beside = [str(path.with_name(other.name)) for other in path.parent.glob("*.py")] if _is_path(name) else []
    raise FemtoError(f"there is no recipe {name!r}{nearest(name, [*shipped, *beside])}")


def find_config(name: str) -> Path:
    """The file of a config given as a path or as a shipped name; FemtoError if there is none.

    A file that is here comes first; where there is none, `configs/NAME.yaml` and `NAME.yaml` mean the shipped NAME.
    """
    shipped, path = configs(), Path(name)
    if path.exists() and not path.is_dir():  # a pipe will do
        return path
    bare = name.removeprefix("configs/").removesuffix(".yaml")
    if bare in shipped:
        return shipped[bare]
    beside = [str(path.with_name(other.name)) for other in path.parent.glob("*.yaml")] if _is_path(name) else []
    raise FemtoError(f"there is no config {name!r}{nearest(name, [*shipped, *beside])}")


def configs_of(recipe: str) -> list[str]:
    """Names of the shipped configs whose first line runs `recipe`, and of the one that its docstring names."""
    own = config_of(recipes()[recipe]) if recipe in recipes() else None
    return [name for name, path in configs().items() if name == own or recipe_of(path) == recipe]


def recipe_of(config: Path) -> str | None:
    """The recipe in a config's first line, `# femto run [options] RECIPE --config configs/NAME.yaml`."""
    with config.open(encoding="utf-8") as lines:
        command = re.match(r"# femto run (?:.* )?(\S+) --config ", lines.readline())
    return command and command[1]


def config_of(recipe: Path) -> str | None:
    """The shipped config in the command of a recipe's docstring, `femto run RECIPE --config configs/NAME.yaml`."""
    command = re.search(r"--config configs/(\S+)\.yaml", _docstring(recipe))
    return command and command[1]


def about(config: Path) -> str:
    """The second line of a config, where that is a comment: what the run is, and what it costs."""
    with config.open(encoding="utf-8") as lines:
        second = [*islice(lines, 2)][-1]
    return second[2:].rstrip() if second.startswith("# ") else ""


def summary(recipe: Path) -> str:
    """The first sentence of a recipe's docstring, on one line, without importing the recipe."""
    return " ".join(_docstring(recipe).split("\n\n")[0].split()).split(". ")[0].removesuffix(".")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error line about an unknown `name`: the nearest of `names`, or all of them where none is near."""
    names = list(names)
    close = [match for asked in (name, Path(name).stem) for match in difflib.get_close_matches(asked, names, 1)]
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(names)}" if names else ""


def _docstring(recipe: Path) -> str:
    return ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8")), clean=False) or ""


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".py", ".yaml"))
