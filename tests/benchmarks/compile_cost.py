"""What torch.compile costs to start and gains a step on a CPU, part by part, by hand.

    python tests/benchmarks/compile_cost.py [--rounds 12] [--dtype float32]

The 37.2M parameters of step_cost.py with 2 rows of 512 and AdamW, one process with one thread. All variants live in it
and take turns step by step, each round beginning with another one; ratios are to the first line in the same round,
medians. `start` is what the first step takes more than a later one: of a part with torch's caches empty, of all three
with the code of each made before, as when a run is started again.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from femtolib.attention import plan_attention
from femtolib.compile import Compiler
from femtolib.device import prepare_process
from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import build_optimizer, clip_gradients
from femtolib.sections import CompileSection, OptimizerSection
from femtolib.weights import initialize_weights

VARIANTS = {
    "as it is": [],
    "model": ["model"],
    "loss": ["loss"],
    "optimizer": ["optimizer"],
    "all three": ["model", "loss", "optimizer"],
}
MODEL = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1024}
MODEL |= {"num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_WAIT_POLICY": "PASSIVE"}
        measure(arguments.rounds, arguments.dtype)


def measure(rounds: int, dtype: str) -> None:
    prepare_process(torch.device("cpu"), threads=1, deterministic=False)
    steps, first, seconds = {}, {}, {name: [] for name in VARIANTS}
    for name, parts in VARIANTS.items():
        steps[name] = make(parts, getattr(torch, dtype))
        started = time.perf_counter()
        steps[name]()
        first[name] = time.perf_counter() - started
    names = [*VARIANTS]
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.process_time()
            steps[name]()
            if number:
                seconds[name].append(time.process_time() - started)
    print(f"{dtype}, {rounds} rounds\n{'':12} start s  CPU s a step  ratio")
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["as it is"], strict=True))
        median = statistics.median(values)
        print(f"{name:<12} {first[name] - median:7.1f}  {median:12.3f}  {ratio:5.3f}")


def make(parts: list[str], dtype: torch.dtype) -> Callable[[], None]:
    device = torch.device("cpu")
    model = Decoder(ModelConfig.from_dict(MODEL, "", inline=True), dtype)
    initialize_weights(model, 0)
    model.to(dtype)
    compiler = Compiler(CompileSection(**dict.fromkeys(parts, True)), device)
    compiler.layers(model)
    compute_loss = compiler.loss(summed_cross_entropy)
    optimizer = build_optimizer(model, OptimizerSection())
    compiler.step(optimizer)
    ids = torch.randint(0, MODEL["vocab_size"], (2, 513))
    attend = plan_attention(None, device=device, dtype=dtype)

    def step() -> None:
        (compute_loss(model(ids[:, :-1], None, attend), ids[:, 1:]) / ids[:, 1:].numel()).backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
