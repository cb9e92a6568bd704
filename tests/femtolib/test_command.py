"""A recipe's command line: what `main` gets, what the screen says, and the exit code of every ending."""

import errno
import os
import subprocess
import sys

import pytest
from pydantic import Field

from femtolib.command import fail, recipe_name, run_recipe
from femtolib.config import ConfigModel
from femtolib.errors import FemtoError, RunFailed


class Inner(ConfigModel):
    lr: float = Field(1e-3, gt=0, description="how far")


class Config(ConfigModel):
    seed: int = Field(0, description="100% of the luck")
    optimizer: Inner = Inner()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(main, *arguments)`: exit code, stdout and stderr; by default of `--config c.yaml`, where seed is 5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("seed: 5\n")

    def run(main=lambda config: None, *arguments: str) -> tuple[int, str, str]:
        code = run_recipe(
            Config, main, list(arguments or ("--config", "c.yaml")), doc="Train.\n\n    femto run x", prog="x"
        )
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (3, 3), (1, 1)])
def test_the_exit_code_is_what_main_returns(run, value, code):
    assert run(lambda config: value) == (code, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "c.yaml", "seed=7", "optimizer.lr=1e-5"],
        ["seed=7", "--config", "c.yaml", "optimizer.lr=1e-5"],
        ["seed=7", "optimizer.lr=1e-5", "--config=c.yaml"],
        ["--config", "c.yaml", "--", "seed=7", "optimizer.lr=1e-5"],
    ],
)
def test_overrides_stand_anywhere(run, arguments):
    seen = []
    assert run(seen.append, *arguments)[0] == 0
    assert seen == [Config(seed=7, optimizer=Inner(lr=1e-5))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=7"], ["--config"]),
        (["--config"], ["--config"]),
        (["--conf", "c.yaml"], ["--config"]),
        (["--config", "c.yaml", "--sed=7"], ["--sed=7"]),
        (["--config", "c.yaml", "-v"], ["-v"]),
        (["--config", "none.yaml"], ["none.yaml"]),
        (["--config", "c.yaml", "sed=7"], ["sed", "seed"]),
        (["--config", "c.yaml", "seed"], ["seed", "key=value"]),
    ],
)
def test_a_wrong_command_line_is_one_error_line_and_code_2(run, arguments, words):
    code, out, err = run(pytest.fail, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words)


def test_every_fault_is_a_line_of_its_own(run):
    code, out, err = run(pytest.fail, "--config", "c.yaml", "seed=x", "optimizer.lr=-1", "sed=1")
    assert code == 2 and out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["error"] * 3


def raises(error: BaseException):
    def main(config):
        raise error

    return main


def test_a_fault_of_the_input_is_code_2_and_one_of_the_run_code_1(run):
    assert run(raises(FemtoError("a", "b"))) == (2, "", "error: a\nerror: b\n")
    assert run(raises(RunFailed("c"))) == (1, "", "error: c\n")


def test_a_full_disk_is_a_line_that_names_the_file(run):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM):
        code, out, err = run(raises(OSError(number, os.strerror(number), "/out/metrics.jsonl")))
        assert (code, out, err) == (1, "", f"error: /out/metrics.jsonl: {os.strerror(number)}\n")
    assert (
        run(raises(OSError(errno.ENOSPC, "No space left on device")))[2] == "error: writing: No space left on device\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.28 TiB for an array"),
        RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB of which 3 B"
        ),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 819200000000 bytes."
        ),
    ],
)
def test_too_little_memory_is_a_line_that_says_what_needs_less(run, error):
    code, out, err = run(raises(error))
    assert code == 1 and out == "" and err.count("\n") == 1 and len(err) < 250
    assert err.startswith("error: out of memory") and "micro_batch_size" in err and str(error)[:30] in err


def test_a_killed_worker_of_the_loader_is_a_line(run):
    code, out, err = run(raises(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")))
    wanted = "error: DataLoader worker (pid 12) is killed by signal: Killed; was memory short?\n"
    assert (code, out, err) == (1, "", wanted)


def test_an_interrupt_is_a_line_and_code_1(run):
    code, out, err = run(raises(KeyboardInterrupt()))
    assert code == 1 and out == "" and err.startswith("error: interrupted") and err.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback(run):
    for error in (
        ZeroDivisionError(),
        AssertionError(),
        FileNotFoundError(errno.ENOENT, "x"),
        KeyError("x"),
        RuntimeError("shape"),
    ):
        with pytest.raises(type(error)):
            run(raises(error))


READERLESS = """
import sys
from pathlib import Path
from femtolib.command import run_recipe
from femtolib.config import ConfigModel

class Config(ConfigModel):
    seed: int = 0

def main(config):
    sys.stdin.readline()  # by now nobody reads what we print
    for number in range(3):
        print("line", number, flush=True)
        print("line", number, file=sys.stderr)
    Path("saved").touch()
    return 3

sys.exit(run_recipe(Config, main))
"""


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path):
    # Ctrl-C ends the `tee` of `femto run … 2>&1 | tee log` first.
    (tmp_path / "c.yaml").write_text("")
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", READERLESS, "--config", "c.yaml"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=writer, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    os.close(reader)
    child.communicate(b"\n", timeout=100)
    assert child.returncode == 3 and (tmp_path / "saved").exists()


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", ">/dev/full 2>&1"])
def test_a_run_goes_on_without_a_screen_and_with_one_on_a_full_disk(tmp_path, streams):
    (tmp_path / "c.yaml").write_text("")
    script = f'exec "$0" -c "$1" --config c.yaml {streams}'
    child = subprocess.run(["sh", "-c", script, sys.executable, READERLESS], cwd=tmp_path, input=b"\n", timeout=100)
    assert child.returncode == 3 and (tmp_path / "saved").exists()


def test_help_says_what_the_recipe_does_and_lists_every_key(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run(pytest.fail, "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "Train.\n\nfemto run x" in out and "--config" in out
    for words in (
        ["seed", "integer", "100% of the luck", "[default 0]"],
        ["optimizer.lr", "number", "how far", "0.001"],
    ):
        assert any(all(word in line for word in words) for line in out.splitlines()), words


def test_a_recipe_is_called_by_name_if_shipped_and_else_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        recipe_name("femto.recipes.single_device_pretrain", "/x/single_device_pretrain.py") == "single_device_pretrain"
    )
    assert recipe_name("mine", "mine.py") == str(tmp_path / "mine.py")
    assert recipe_name("__main__", "/x/mine.py") == "/x/mine.py"


def test_a_fault_is_shown_with_its_code(capsys):
    assert fail(RunFailed("x", "y")) == 1
    assert capsys.readouterr().err == "error: x\nerror: y\n"
