"""What the verbs' tests share: the command line in this process, and a recipe small enough to judge `run` by."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

TOY = '''"""A toy. It adds."""

from femtolib.config import ConfigModel


class Config(ConfigModel):
    left: int
    right: int = 1


def main(config: Config) -> int | None:
    print(f"sum {config.left + config.right}")
    return 3 if config.left < 0 else None
'''


class Ended(NamedTuple):
    """How a command ended: its exit code and its screen."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """Its one `error:` line; nothing else stands on stderr."""
        assert self.stderr.startswith("error: ") and self.stderr.count("\n") == 1, self.stderr
        return self.stderr.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def femto(capsys, monkeypatch) -> Callable[..., Ended]:
    """`femto("run", …)`: a command line in this process, whose path is as before afterwards."""
    from femto.main import main

    monkeypatch.setattr(sys, "path", sys.path.copy())

    def femto(*arguments: str) -> Ended:
        code = main(list(map(str, arguments)))
        return Ended(code, *capsys.readouterr())

    return femto


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, the current one, with the toy recipe `toy.py` and its config `toy.yaml` in it."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("left: 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
