"""What a user gets who installs a wheel: the files in it, where they land, and that the command works from there."""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
INSTALLED = {"cli": "femto", "recipes": "femto/recipes", "configs": "femto/configs", "femtolib": "femtolib"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: a build folder left in the checkout would leak old files into it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in (*INSTALLED, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "dist"), str(folder)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = (folder / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """The environment of a process that finds femto in that wheel, unpacked by pip, and not in this checkout."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    return {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}


def test_the_wheel_holds_every_file_of_the_packages_under_its_installed_name_and_nothing_else(wheel):
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in INSTALLED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_wheel_takes_no_name_in_site_packages_but_femto_and_femtolib(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"femto", "femtolib"}


def test_a_copied_and_edited_recipe_runs_from_the_installed_wheel_in_an_empty_folder(installed, tmp_path):
    def femto(*arguments: str) -> str:
        command = ["femto", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    where = "import femto, femtolib; print(femto.__file__, femtolib.__file__)"
    files = subprocess.run([sys.executable, "-c", where], env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert str(ROOT) not in files.stdout
    assert "llama_small" in femto("ls")
    femto("cp", "single_device_pretrain", "mine.py")
    femto("cp", "tiny/pretrain", "mine.yaml")
    recipe, loss = (tmp_path / "mine.py").read_text(), "micro_loss = compute_loss(logits, batch.labels)\n"
    trained = "(batch.labels != -100)"
    z_loss = f"micro_loss = micro_loss + (logits.logsumexp(-1).square() * {trained}).sum()\n"
    place = recipe.index(loss)
    indent = " " * (place - recipe.rindex("\n", 0, place) - 1)
    (tmp_path / "mine.py").write_text(recipe.replace(loss, f"{loss}{indent}{z_loss}", 1))
    femto("run", "./mine.py", "--config", "mine.yaml", "max_steps=1", "output_dir=output")
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    (first,) = [line["loss"] for line in lines if line["event"] == "train"]
    assert first == pytest.approx(math.log(2048) + math.log(2048) ** 2, rel=0.05)
