import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FEMTO = str(Path(sys.executable).with_name("femto"))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_help_is_shown(femto, arguments):
    ended = femto(*arguments)
    assert ended.code == 0
    assert all(f"\n  {verb} " in ended.stdout for verb in ("ls", "cp", "run", "validate", "download"))


def test_an_unknown_command_names_the_nearest(femto):
    assert femto("rum") == (2, "", "error: there is no command 'rum'; did you mean 'run'?\n")
    assert "there are: ls, cp, run, validate, export, download" in femto("quantize").error


@pytest.mark.parametrize("command", ["--help", "ls", "cp single_device_pretrain mine.py --force"])
def test_help_ls_and_cp_answer_in_less_than_a_third_of_a_second(command, tmp_path):
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([FEMTO, *command.split()], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_a_terminal_without_unicode_is_shown_what_it_can_show():
    ended = subprocess.run([FEMTO], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "usage: femto COMMAND ?" in ended.stdout


def test_a_reader_that_leaves_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([FEMTO, "ls"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_ctrl_c_ends_a_command_with_one_line(here):
    toy = (here / "toy.py").read_text()
    (here / "slow.py").write_text(toy + "\n\nimport time\n\nprint('here', flush=True)\ntime.sleep(60)\n")
    command = [FEMTO, "run", "slow.py", "--config", "toy.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=50)
    assert time.monotonic() - begin < 30
    assert (process.returncode, stderr) == (1, "error: interrupted\n")
