"""What the library's tests share: trained weights without a hub (the model that the glassllm package carries, as a
Hugging Face directory), what a function takes of memory, and several ranks forked from this process."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def glassllm_directory(tmp_path_factory) -> Path:
    """A trained Llama of 0.85 M parameters (tied, 4 heads over 2 key-value heads, 1,024 ids, 128 positions)."""
    with (resources.files("glassllm") / "weights" / "en.npz").open("rb") as file:
        arrays = dict(np.load(file, allow_pickle=False))
    config = json.loads(str(arrays.pop("__config__")))
    head_dim = config["d_model"] // config["n_heads"]
    # glassllm turns neighbouring elements of a head, Hugging Face files pair element i with i + head_dim / 2.
    halves = np.r_[0:head_dim:2, 1:head_dim:2]

    def rows_in_halves(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(-1, head_dim, matrix.shape[1])[:, halves].reshape(matrix.shape)

    names = {
        "norm1.gamma": "input_layernorm",
        "attn.W_Q": "self_attn.q_proj",
        "attn.W_K": "self_attn.k_proj",
        "attn.W_V": "self_attn.v_proj",
        "attn.W_O": "self_attn.o_proj",
        "norm2.gamma": "post_attention_layernorm",
        "ffn.W1": "mlp.gate_proj",
        "ffn.W3": "mlp.up_proj",
        "ffn.W2": "mlp.down_proj",
    }
    tensors = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for layer in range(config["n_layers"]):
        for theirs, ours in names.items():
            array = arrays[f"blocks.{layer}.{theirs}"].T  # [in, out] → [out, in]
            tensors[f"model.layers.{layer}.{ours}.weight"] = rows_in_halves(array) if theirs[-1] in "QK" else array
    directory = tmp_path_factory.mktemp("glassllm")
    tensors = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "max_position_embeddings": config["max_len"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable], int]:
    """`peak_bytes(function)`: the most bytes of tensors alive at once that `function()` adds in this thread, by the CPU
    allocator's own events."""
    import torch

    def peak_bytes(function: Callable) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        alive = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        return max(alive, default=0)

    return peak_bytes


# ── Several ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list]:
    """`ranks(count, function, *arguments, killed=(), seconds=150)`: what `function(*arguments)` returns on each rank.

    Each rank is a fork of this process (so a local function will do, and torch is imported) with a launcher's variables
    in its environment; the function joins the others by `World.join` or `dist.init_process_group("gloo")`. An exception
    on any rank, and a rank that has not ended in time, fail the test with every rank's traceback. The ranks of `killed`
    must end by SIGKILL, and their result is None.
    """
    # Imported once here instead of at first use by every rank.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    assert torch.distributed.is_available()
    return _run_ranks


def _run_ranks(
    count: int, function: Callable, *arguments: Any, killed: Collection[int] = (), seconds: float = 150
) -> list:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(count):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_run_rank, args=(rank, count, port, theirs, function, arguments))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)

    deadline = time.monotonic() + seconds
    results, faults = [None] * count, []
    try:
        for rank, (end, process) in enumerate(zip(ends, processes, strict=True)):
            try:
                if not end.poll(max(0.0, deadline - time.monotonic())):
                    faults.append(f"rank {rank} did not end in {seconds} s")
                    continue
                results[rank], fault = end.recv()
                if fault:
                    faults.append(f"rank {rank}: {fault}")
                elif rank in killed:
                    faults.append(f"rank {rank} was to be killed and returned {results[rank]!r}")
            except EOFError:
                process.join(5)
                if rank not in killed or process.exitcode != -signal.SIGKILL:
                    faults.append(f"rank {rank} ended with code {process.exitcode} and returned nothing")
        for end in ends:
            with contextlib.suppress(OSError):  # it was killed
                end.send("all have returned")
        for rank, process in enumerate(processes):
            process.join(0 if faults else max(0.0, deadline - time.monotonic()))
            if not faults and process.is_alive():
                faults.append(f"rank {rank} returned and did not end in {seconds} s")
    finally:
        for process in processes:
            process.kill()
            process.join()
    if faults:
        pytest.fail("\n".join(faults))
    return results


def _run_rank(rank: int, count: int, port: int, parent: Connection, function: Callable, arguments: tuple) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        result, fault = function(*arguments), None
    except BaseException:
        result, fault = None, traceback.format_exc()
    parent.send((result, fault))
    if not fault:  # a rank that failed is gone, and the others notice
        parent.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
