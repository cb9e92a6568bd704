"""CPU seconds of an optimizer step: femto's recipes against bare PyTorch loops on the same shapes.

    python tests/benchmarks/step_cost.py [single] [ddp] [fsdp2] [--rounds 3] [--steps 20]

single: single_device_pretrain on both cores against a plain loop. ddp, fsdp2: distributed_pretrain on two gloo ranks of
one thread and one core each, with dp_replicate 2 against DistributedDataParallel, with dp_shard 2 against fully_shard.
All train a Llama-style decoder of 37.2M parameters (hidden 384, 8 layers, 6 heads, 2 KV heads, vocabulary 32,000) on
4 rows of 512 random ids a step and rank, float32, fused AdamW, clipping. A hook on the optimizer's step reads the
clocks, so everything a loop does is counted. Runs alternate, because the machine's speed drifts; compared is the lower
quartile of CPU milliseconds per step and rank, since other load can only add to it. For two ranks it also says what the
agreements of a step (counts, digest, stop; peak memory) cost.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, SEQUENCE, ROWS = 32000, 384, 8, 6, 2, 1024, 512, 4
WARM = 5
LAYOUTS = {"single": [], "ddp": ["parallel={dp_replicate: 2}"], "fsdp2": ["parallel={dp_shard: 2}"]}
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="layout", help=f"of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for layout in arguments.layouts or LAYOUTS:
        results: dict[str, list[dict]] = {"bare": [], "femto": []}
        for _ in range(arguments.rounds):
            for name in results:
                results[name] += measure(name, layout, arguments.steps)
                print(layout, name, results[name][-1], flush=True)
        summary = {name: {key: quartile(runs, key) for key in runs[0]} for name, runs in results.items()}
        for key in summary["bare"]:
            bare_value, femto_value = summary["bare"][key], summary["femto"][key]
            shown = f"bare {bare_value:>8.1f}  femto {femto_value:>8.1f}  ratio {femto_value / bare_value:.3f}"
            print(f"{layout:<7} {key:<18} {shown}")
        if layout != "single":
            cost = quartile(measure("agreements", layout, 0), "cpu_ms_per_step")
            share = cost / summary["femto"]["cpu_ms_per_step"]
            print(f"{layout:<7} agreements         {cost:.3f} ms, {share:.3%} of a step", flush=True)


def quartile(runs: list[dict], key: str) -> float:
    values = sorted(value for run in runs for value in (run[key] if isinstance(run[key], list) else [run[key]]))
    return values[len(values) // 4]


def measure(name: str, layout: str, steps: int) -> list[dict]:
    """Run a loop in processes of its own; what each rank's meter says."""
    with tempfile.TemporaryDirectory() as folder:
        write_workload(Path(folder), ROWS * (1 if layout == "single" else 2), WARM + steps)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [
            sys.executable,
            *([] if layout == "single" else torchrun),
            __file__,
            name,
            layout,
            str(steps),
            folder,
        ]
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def write_workload(folder: Path, rows_per_step: int, steps: int) -> None:
    """A token directory of random ids and the config that trains on it."""
    import numpy as np
    import yaml
    from tokenizers import Tokenizer, models

    from femtolib.data.token_files import Index, write_index, write_shard
    from femtolib.data.tokenizer import load_tokenizer

    tokens_dir = folder / "tokens"
    tokens_dir.mkdir()
    vocabulary = {"<eos>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")).save(str(tokens_dir / "tokenizer.json"))
    (tokens_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    ids = random_ids((steps + 1) * rows_per_step).reshape(-1).astype(np.uint16)
    write_index(
        tokens_dir,
        Index(
            dtype="uint16",
            vocab_size=VOCABULARY,
            largest_id=VOCABULARY - 1,
            eos_id=0,
            bos_id=None,
            tokens=len(ids),
            documents=1,
            skipped={"empty": 0, "bad": 0},
            sources=[],
            tokenizer_digest=load_tokenizer(tokens_dir).digest,
            template_digest=None,
            shards=[write_shard(tokens_dir, 0, ids, np.zeros(1, np.int64))],
        ),
    )
    config = {
        "output_dir": f"{folder}/out",
        "device": "cpu",
        "model": {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        "data": {"train": str(tokens_dir), "seq_len": SEQUENCE},
        "global_batch_size": rows_per_step,
        "micro_batch_size": ROWS,
        "max_steps": steps,
        "schedule": {"name": "constant"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def random_ids(rows: int):
    """int64 [rows, SEQUENCE + 1]"""
    import numpy as np

    return np.random.default_rng(1337).integers(0, VOCABULARY, (rows, SEQUENCE + 1), dtype=np.int64)


# ── In the processes that are measured ────────────────────────────────────────────────────────────────────────────────


def run(name: str, layout: str, steps: int, folder: Path) -> None:
    os.sched_setaffinity(0, {RANK} if RANKS > 1 else {0, 1})
    import torch

    torch.set_num_threads(2 // RANKS)
    if name == "agreements":
        return agreements()
    meter(steps)
    if name == "bare":
        bare(layout, steps)
    else:
        from femtolib.command import run_recipe

        if layout == "single":
            from femto.recipes import single_device_pretrain as recipe
        else:
            from femto.recipes import distributed_pretrain as recipe
        overrides = [f"threads={2 // RANKS}", *LAYOUTS[layout]]
        run_recipe(recipe.Config, recipe.main, ["--config", str(folder / "config.yaml"), *overrides])


def say(result: dict) -> None:
    os.write(1, f"\n{json.dumps(result)}\n".encode())  # at once, and not to sys.stdout, which most ranks silence


def meter(steps: int) -> None:
    """Read the clocks at each optimizer step, and end the process after the last one with a line of JSON."""
    import resource

    from torch.optim.optimizer import register_optimizer_step_post_hook

    cpu, started = [], time.time()

    def tick(*_: object) -> None:
        cpu.append((time.process_time(), time.time()))
        if len(cpu) == WARM + steps:
            say(
                {
                    "cpu_ms_per_step": [
                        round(1e3 * (b - a), 1) for (a, _), (b, _) in zip(cpu[WARM - 1 :], cpu[WARM:], strict=False)
                    ],
                    "first_step_cpu_s": cpu[0][0],
                    "first_step_wall_s": cpu[0][1] - started,
                    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                }
            )
            os._exit(0)

    register_optimizer_step_post_hook(tick)


def bare(layout: str, steps: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    head = HIDDEN // HEADS

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * head, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(HIDDEN, FEED_FORWARD, bias=False) for _ in range(2))
            self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)
            self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)

        def forward(self, x, cos, sin):
            y = self.norm1(x)
            q, k, v = (m(y).view(*x.shape[:2], -1, head).transpose(1, 2) for m in (self.q, self.k, self.v))
            q, k = (t * cos + torch.cat((-t[..., head // 2 :], t[..., : head // 2]), -1) * sin for t in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(x.shape))
            y = self.norm2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.blocks = (
                nn.Embedding(VOCABULARY, HIDDEN),
                nn.ModuleList(Block() for _ in range(LAYERS)),
            )
            self.norm, self.output = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, VOCABULARY, bias=False)
            frequencies = 500000.0 ** (-torch.arange(0, head, 2) / head)
            angles = torch.outer(torch.arange(SEQUENCE), frequencies).repeat(1, 2)
            self.cos, self.sin = angles.cos(), angles.sin()

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return F.cross_entropy(self.output(self.norm(x).flatten(0, 1)), labels.flatten())

    model = Model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    if layout != "single":
        dist.init_process_group("gloo")
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    rows = torch.from_numpy(random_ids((WARM + steps + 1) * ROWS * RANKS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    for step in range(WARM + steps):
        batch = rows[(step * RANKS + RANK) * ROWS :][:ROWS]
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def agreements(steps: int = 2000) -> None:
    """What the ranks tell each other about a step, alone."""
    import torch

    from femtolib.parallel.world import World

    world = World.join(torch.device("cpu"), 60)
    world.barrier()
    before = time.process_time()
    for _ in range(steps):
        world.sum(2048, 2**63, 0)
        world.max(10**9)
    say({"cpu_ms_per_step": 1e3 * (time.process_time() - before) / steps})
    world.close()


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in ("bare", "femto", "agreements"):
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
