"""Time and CPU seconds of a data-parallel step: GradientSynchronizer against torch's DistributedDataParallel.

    python tests/benchmarks/gradient_sync_cost.py [main] [buckets] [accumulation] [rows] [communication] [--rounds 20]

main: as shipped against DDP with gradient_as_bucket_view and DDP at its defaults, on two shapes: `bench`, the 37.2M
parameters of step_cost.py with 2 rows of 512, and `deep`, 64 layers of width 64 with 577 small parameters. The others
are on `wide`, 36M parameters with 2 rows of 32, where the sums weigh most. buckets: of 0, 1, 25 and 100 MB, with and
without overlap. accumulation: 4 micro-batches, with and without no_sync. rows: 1, 16 and 256 a pass of a small model.
communication: float32 and bfloat16.

Two gloo ranks, one thread each. A step is forward and backward passes, the sums and clearing the gradients. DDP divides
gradients by the number of ranks. Ours adds them, of losses divided by the tokens of all ranks, which gives the same and
is what the recipe does; as `mean` it divides them, too.

All variants live in the same two processes and take turns step by step, each round beginning with another one, so that
the machine's moods meet all of them alike. Shown are medians over the rounds, of times and of the ratios to the first
line in the same round. `exposed` is the share of a step that the sums add: one minus the time of the step without them.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

SHAPES = {  # vocabulary, hidden, layers, heads, KV heads, feed-forward, sequence, rows
    "bench": (32000, 384, 8, 6, 2, 1024, 512, 2),
    "deep": (512, 64, 64, 4, 2, 128, 64, 1),
    "wide": (8192, 512, 8, 8, 4, 1408, 32, 2),
    "small": (2048, 192, 4, 6, 2, 512, 32, 4),
}
DDP_VIEWS, DDP_PLAIN = "DDP, gradient_as_bucket_view", "DDP, defaults"


@dataclass
class Case:
    """Variants by name, each the options of a GradientSynchronizer or a DDP, on a shape."""

    shape: str
    variants: dict[str, dict]
    micro_batches: int = 1
    rows: int | None = None


def cases(names: list[str]) -> dict[str, Case]:
    views, plain = {DDP_VIEWS: {"gradient_as_bucket_view": True}}, {DDP_PLAIN: {}}
    sizes = {
        f"{size} MB{', no overlap' * (not overlap)}": {"bucket_mb": size, "overlap": overlap}
        for size in (0, 1, 25, 100)
        for overlap in (True, False)
    }
    theirs = {f"DDP, {size} MB": {"bucket_cap_mb": size, "gradient_as_bucket_view": True} for size in (1, 25, 100)}
    sync = {"as shipped": {}, "without no_sync": {"no_sync": False}}
    sync |= views | {"DDP, without no_sync": {"gradient_as_bucket_view": True, "no_sync": False}}
    main = {"as shipped": {}, "as shipped, mean": {"mean": True}} | views | plain
    narrow = {"float32": {}, "bfloat16": {"communication_dtype": "bfloat16"}}  # DDP's bfloat16 hook wants NCCL
    every = {
        "main": {f"main, {shape}": Case(shape, main) for shape in ("bench", "deep")},
        "buckets": {"buckets, wide": Case("wide", sizes | theirs)},
        "accumulation": {"4 micro-batches, wide": Case("wide", sync, 4)},
        "rows": {f"{rows} rows, small": Case("small", {"as shipped": {}} | views, rows=rows) for rows in (1, 16, 256)},
        "communication": {"communication, wide": Case("wide", narrow | views)},
    }
    return {title: case for name in names or every for title, case in every[name].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of main, buckets, accumulation, rows, communication; all by default")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure_all(cases(arguments.names), arguments.rounds)
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment, check=True)


def measure_all(cases: dict[str, Case], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from femtolib.device import prepare_process

    prepare_process(torch.device("cpu"), threads=1, deterministic=False)  # large blocks are kept, for all alike
    dist.init_process_group("gloo")
    for title, case in cases.items():
        walls, alone, cpus, counts = measure(case, rounds)
        if dist.get_rank() == 0:
            print(f"\n{title}: {rounds} rounds\n{'':32} wall ms  ratio   CPU ms  ratio  exposed  all-reduces")
            first = next(iter(walls))
            for name in walls:
                exposed = 1 - statistics.median(alone[name]) / statistics.median(walls[name])
                count = "-" if counts[name] is None else str(counts[name])
                times = "".join(
                    f"{statistics.median(values[name]) * 1e3:9.1f}  {ratio(values[name], values[first]):5.3f}"
                    for values in (walls, cpus)
                )
                print(f"{name:<30} {times}  {exposed:7.1%}  {count:>11}", flush=True)
    dist.destroy_process_group()


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measure(case: Case, rounds: int) -> tuple[dict[str, list[float]], ...]:
    """Of each variant, round by round: wall seconds of a step, of one without sums, CPU seconds; all-reduces a step."""
    import torch

    runs = {name: make(case, name, options) for name, options in case.variants.items()}
    walls, alone, cpus, counts = ({name: [] for name in runs} for _ in range(4))
    names = [*runs]
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.distributed.barrier()
            before, wall, cpu = runs[name].reduces(), time.perf_counter(), time.process_time()
            runs[name].step(True)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 2:  # buckets are in order, memory is there
                walls[name].append(wall)
                cpus[name].append(cpu)
                counts[name] = None if before is None else runs[name].reduces() - before
            if number % 4 == 3:
                started = time.perf_counter()
                runs[name].step(False)
                alone[name].append(time.perf_counter() - started)
    return walls, alone, cpus, counts


@dataclass
class Variant:
    step: Callable[[bool], None]
    reduces: Callable[[], int | None]


def make(case: Case, name: str, options: dict) -> Variant:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from femtolib.loss import summed_cross_entropy
    from femtolib.model import Decoder
    from femtolib.model_config import ModelConfig
    from femtolib.parallel.gradient_sync import GradientSynchronizer

    vocabulary, hidden, layers, heads, groups, feed_forward, sequence, rows = SHAPES[case.shape]
    rows = case.rows or rows
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": sequence,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(torch.distributed.get_rank())
    model = Decoder(ModelConfig.from_dict(config, "", inline=True), torch.float32)
    ids = torch.randint(0, vocabulary, (case.micro_batches, rows, sequence))
    accumulates = options.pop("no_sync", True) if (options := dict(options)) else True
    divisor = case.micro_batches * rows * sequence
    if name.startswith("DDP"):
        parallel = DistributedDataParallel(model, **options)
        no_sync, finish, reduces = parallel.no_sync, lambda: None, lambda: None
    else:
        if "communication_dtype" in options:
            options["communication_dtype"] = getattr(torch, options["communication_dtype"])
        divisor *= 1 if options.get("mean") else torch.distributed.get_world_size()
        synchronizer = GradientSynchronizer(model, **options)
        parallel, no_sync, finish = model, synchronizer.no_sync, synchronizer.finish
        reduces = lambda: synchronizer.all_reduces  # noqa: E731

    def step(synced: bool) -> None:
        for number, batch in enumerate(ids, 1):
            sends = synced and (number == len(ids) or not accumulates)
            with contextlib.nullcontext() if sends else no_sync():
                summed_cross_entropy(parallel(batch), batch).div(divisor).backward()
            if sends:
                finish()
        model.zero_grad()

    return Variant(step, reduces)


if __name__ == "__main__":
    main()
