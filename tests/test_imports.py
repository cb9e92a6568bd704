"""Imports go one way: cli → recipes → femtolib, and inside femtolib there is no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imported(path: Path) -> set[str]:
    """The modules that a file imports, at its top or inside a function; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages(folder: str) -> dict[Path, set[str]]:
    return {path: {name.partition(".")[0] for name in imported(path)} for path in (ROOT / folder).rglob("*.py")}


def test_femtolib_imports_neither_the_command_line_nor_a_recipe_nor_a_test():
    for path, names in packages("femtolib").items():
        assert not names & {"femto", "cli", "recipes", "tests"}, path


def test_recipes_import_neither_the_command_line_nor_each_other():
    for path, names in packages("recipes").items():
        assert not names & {"femto", "cli", "recipes", "tests"}, path


def test_the_command_line_imports_no_recipe_and_goes_by_the_installed_names():
    for path, names in packages("cli").items():
        assert not names & {"cli", "recipes", "tests"}, path
        assert not {name for name in imported(path) if name.startswith(("femto.recipes", "femto.configs"))}, path


def test_there_is_no_circle_within_femtolib():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imported(path)
        for path in (ROOT / "femtolib").rglob("*.py")
    }
    assert "femtolib.errors" in modules
    TopologicalSorter({name: names & set(modules) for name, names in modules.items()}).prepare()
