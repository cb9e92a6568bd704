"""CPU seconds of a step on long rows: two ranks that share each row against one process with two threads, by hand.

    python tests/benchmarks/context_cost.py [--rounds 5] [--steps 3] [--seq-len 4096] [--documents]

Both train the same model on the same rows (four layers of width 512, eight heads, four key-value heads), in turns; a
line a round has the CPU seconds of a step, summed over ranks and threads, and their ratio. What is compared is the
work: who shares a row sends keys and values, and gathers parameters.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from femtolib.attention import plan_attention
from femtolib.data.loader import collate
from femtolib.data.sampler import Slot
from femtolib.data.token_dataset import Row
from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import build_optimizer
from femtolib.parallel.context import SequenceCut
from femtolib.parallel.fsdp import shard_model
from femtolib.parallel.mesh import ParallelDims, build_meshes
from femtolib.sections import OptimizerSection
from femtolib.weights import initialize_weights

KEYS = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024}
KEYS |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}


def train(steps: int, length: int, documents: bool) -> float:
    """CPU seconds of a step, of all ranks, in this process's world."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(2 // ranks)
    config = ModelConfig.from_dict({**KEYS, "max_position_embeddings": length}, "", inline=True)
    cut = SequenceCut(length)
    if ranks == 1:
        model = Decoder(config, torch.float32)
    else:
        dist.init_process_group("gloo")
        meshes = build_meshes(ParallelDims(1, 1, ranks, 1), "cpu", 600)
        with torch.device("meta"):
            model = Decoder(config, torch.float32)
        shard_model(model, meshes.fsdp, compute_dtype=torch.float32, param_dtype=torch.float32)
        model.to_empty(device="cpu")
        cut = SequenceCut.over(meshes.cp, length)
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, OptimizerSection())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2048, (length + 1,), generator=generator).numpy()
    begins = (torch.rand(length + 1, generator=generator) < 1 / 512).cumsum(0)
    row = Row(tokens, (begins - begins[0]).int().numpy())
    batch = collate([row], [Slot(row=0, position=0)], seq_len=length, eos_id=0, document_mask=documents)
    for step in range(steps + 1):
        if step == 1:  # the first one warms up
            started = time.process_time()
        attend = plan_attention(batch.document_ids, cut, device=torch.device("cpu"), dtype=torch.float32)
        part = cut.take_batch(batch)
        loss = summed_cross_entropy(model(part.input_ids, part.position_ids, attend), part.labels)
        (loss * ranks / length).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = torch.tensor((time.process_time() - started) / steps, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(seconds)
    return float(seconds)


def measure(arguments: argparse.Namespace) -> None:
    ratios = []
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin would be counted as work
    for number in range(arguments.rounds):
        seconds = {}
        for ranks in (1, 2) if number % 2 else (2, 1):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
            command = [sys.executable, *launch, str(Path(__file__).resolve()), "--child", *sys.argv[1:]]
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            seconds[ranks] = float(ended.stdout.split()[-1])
        ratios.append(seconds[2] / seconds[1])
        shown = f"one process {seconds[1]:.2f} s, two ranks {seconds[2]:.2f} s: {ratios[-1]:.3f}"
        print(f"round {number + 1}: {shown}", flush=True)
    print(f"CPU seconds of a step, two ranks / one process, median of {len(ratios)}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--documents", action="store_true", help="keep documents of some 512 tokens apart")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child:
        measure(arguments)
    else:
        seconds = train(arguments.steps, arguments.seq_len, arguments.documents)
        if os.environ.get("RANK", "0") == "0":
            print(seconds)
