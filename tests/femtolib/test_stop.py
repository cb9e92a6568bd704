"""A stop by signal, in this process with a clock of its own, and in a process that gets real ones."""

import os
import signal
import subprocess
import sys
import time

import pytest

from femtolib.stop import StopRequest


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_request_and_ends_nothing(capfd, number):
    stop = StopRequest()
    assert not stop.requested
    signal.raise_signal(number)
    assert stop.requested
    assert "stopping after this step" in capfd.readouterr().err
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested and capfd.readouterr().err == ""


def test_a_second_interrupt_ends_at_once_but_not_within_the_first_second(clock):
    # A shell's Ctrl-C and a launcher's forwarded one arrive together: one wish, not two.
    StopRequest()
    signal.raise_signal(signal.SIGINT)
    clock[0] += 0.9
    signal.raise_signal(signal.SIGINT)
    clock[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_after_sigterm_ends_at_once_and_a_second_sigterm_does_not(clock):
    stop = StopRequest()
    signal.raise_signal(signal.SIGTERM)
    clock[0] += 5
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert stop.requested


PROGRAM = """
import os, sys, time
from femtolib.stop import StopRequest
if sys.argv[1] == "closed":
    os.close(2)
stop = StopRequest()
os.write(1, b"ready")
while not stop.requested:
    time.sleep(0.01)
os.write(1, b" saved")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("screen", ["open", "closed", "no reader"])
def test_a_process_saves_its_state_even_where_its_screen_is_gone(number, screen):
    # Ctrl-C also ends the `tee` behind `2>&1 | tee log`.
    reader, writer = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, screen], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert child.stdout.read(5) == b"ready"
    if screen == "no reader":
        os.close(reader)
    child.send_signal(number)
    assert child.communicate(timeout=100)[0] == b" saved"
    assert child.returncode == 0
    if screen != "no reader":
        assert (b"stopping" in os.read(reader, 1000)) == (screen == "open")
        os.close(reader)
