"""The device a process computes on, and what it is asked to do with numbers and memory there."""

import ctypes
import os
import platform
import resource
from pathlib import Path

import torch

from femtolib.errors import FemtoError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Dense peak of the tensor cores in FLOP/s for bfloat16, from NVIDIA's data sheets. CPUs are left out: no data sheet
# gives a figure that a thread could be held against.
_BFLOAT16_PEAK = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}


def choose_device(name: str) -> torch.device:
    """`auto` means cuda where there is one; raises FemtoError where cuda is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FemtoError("device: cuda was asked for and torch sees none; use device=auto or device=cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def prepare_process(device: torch.device, *, threads: int | None, deterministic: bool) -> None:
    """Set threads, determinism and the allocator for this process. Call it before the first tensor is made."""
    if threads:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with this alone
    if device.type == "cpu":
        _keep_large_blocks()


def _keep_large_blocks() -> None:
    """Have glibc keep what large tensors free, instead of handing it back to the kernel and asking again.

    By default every large tensor is mapped and unmapped, and each page faults anew at every step: 0.45 to 0.6 of 3.5
    CPU seconds in a step of a 37M-parameter model. The price is 20 to 40 % more resident memory.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: what CUDA allocated, or on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if platform.system() == "Linux":
        # Not getrusage: what a large process starts by vfork and exec, inherits that one's peak there.
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device could reach at best in `dtype`, or None where that is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _BFLOAT16_PEAK.items() if key in name), None)
