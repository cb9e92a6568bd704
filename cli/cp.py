"""Copy a shipped recipe or config, to read and to edit."""

import os
from pathlib import Path

from femto.parser import Parser
from femto.shipped import config_of, configs, nearest, recipe_of, recipes
from femtolib.errors import FemtoError


def main(argv: list[str]) -> int:
    parser = Parser("femto cp", __doc__)
    parser.add_argument("name", metavar="NAME", help="a recipe or a config, as `femto ls` names it")
    parser.add_argument("dest", metavar="DEST", type=Path, help="a folder, or the name of the copy")
    parser.add_argument("--force", action="store_true", help="replace DEST where it exists")
    arguments = parser.parse_args(argv)

    source = _find(arguments.name, arguments.dest)
    target = arguments.dest / source.name if arguments.dest.is_dir() else arguments.dest
    if target.suffix != source.suffix:
        raise FemtoError(f"{target}: no such folder, and a copy of {source.name} needs a name in {source.suffix}")
    _write(target, source.read_bytes(), force=arguments.force)

    recipe = target if source.suffix == ".py" else recipe_of(source)
    config = config_of(source) or "CONFIG" if source.suffix == ".py" else target
    print(f"{target} is yours to edit; to run it:")
    print(f"    femto run {recipe} --config {config} output_dir=runs/{target.stem}")
    return 0


def _find(name: str, dest: Path) -> Path:
    """The shipped file of this name; the suffix, and the folder `recipes/` or `configs/`, may be left out.

    Where a recipe and a config share the name, the suffix of `dest` tells which is meant.
    """
    by_name = {f"recipes/{name}.py": path for name, path in recipes().items()}
    by_name |= {f"configs/{name}.yaml": path for name, path in configs().items()}
    found = [full for full in by_name if name in _spellings(full)]
    if not found:
        raise FemtoError(f"there is no recipe or config {name!r}{nearest(name, [*recipes(), *configs()])}")
    if len(found) > 1 and dest.suffix:
        found = [full for full in found if full.endswith(dest.suffix)] or found
    if len(found) > 1:
        raise FemtoError(f"{name!r} is a recipe and a config; say {' or '.join(found)}")
    return by_name[found[0]]


def _spellings(full: str) -> set[str]:
    bare = full.partition("/")[2]
    return {full, bare, full.rpartition(".")[0], bare.rpartition(".")[0]}


def _write(target: Path, content: bytes, force: bool) -> None:
    """Write a file whole or not at all; an existing one is replaced only with `force`."""
    if not force and os.path.lexists(target):
        raise FemtoError(f"{target} exists; --force replaces it")
    if not target.parent.is_dir():
        raise FemtoError(f"{target}: there is no folder {target.parent}")
    half = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        half.write_bytes(content)
        half.replace(target)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise FemtoError(f"{target}: {error.strerror}") from None
