"""What a process is told about its device, and what it is asked to do there."""

import os
import subprocess
import sys

import pytest
import torch

from femtolib.device import DTYPES, choose_device, peak_flops, prepare_process
from femtolib.errors import FemtoError

CPU = torch.device("cpu")


def test_auto_is_cuda_where_there_is_one(monkeypatch):
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto").type == ("cuda" if there else "cpu")
        assert choose_device("cpu").type == "cpu"


def test_a_gpu_that_is_not_there_is_refused_by_key(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FemtoError, match=r"device: cuda .* device=cpu"):
        choose_device("cuda")


def test_threads_and_determinism_are_set_and_unset(monkeypatch):
    threads, variable = torch.get_num_threads(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        prepare_process(CPU, threads=1, deterministic=True)
        assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        prepare_process(CPU, threads=None, deterministic=False)
        assert torch.get_num_threads() == 1 and not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        if variable is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


FAULTS = """
import resource, sys, torch
from femtolib.device import prepare_process
torch.set_num_threads(1)
if sys.argv[1] == "prepared":
    prepare_process(torch.device("cpu"), threads=None, deterministic=False)
def step():
    a = torch.ones(10_000_000)  # 40 MB: above 32 MB glibc always maps
    return [a + 1, a * 2, a - 3]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

PEAK = """
import resource, torch
from femtolib.device import peak_memory_bytes
cpu = torch.device("cpu")
before = peak_memory_bytes(cpu)
x = torch.ones(100_000_000)
del x
print(before, peak_memory_bytes(cpu), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def output_of(code: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", code, *arguments]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_memory_that_large_tensors_free_is_kept_for_the_next_ones():
    [plain], [prepared] = output_of(FAULTS, "plain"), output_of(FAULTS, "prepared")
    assert prepared < 0.3 * plain


def test_peak_memory_is_in_bytes_and_counts_what_was_freed():
    before, after, kernel = output_of(PEAK)
    assert after - before > 150e6
    # The kernel's other count may hold the peak of the process that started this one too.
    assert after <= kernel * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu_is_its_data_sheets_in_bfloat16_alone(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda = torch.device("cuda")
    assert peak_flops(cuda, torch.bfloat16) == peak
    assert peak_flops(cuda, torch.float32) is None
    assert peak_flops(CPU, torch.bfloat16) is None


def test_every_dtype_of_a_config_has_its_torch_dtype():
    assert {name: str(dtype) for name, dtype in DTYPES.items()} == {name: f"torch.{name}" for name in DTYPES}
