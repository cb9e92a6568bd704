"""CPU seconds of an optimizer step: single_device_pretrain against a bare PyTorch loop on the same shapes.

    python tests/benchmarks/step_cost.py [--rounds 3] [--steps 20] [--threads 2]

Both train a Llama-style decoder of 37.2M parameters (hidden 384, 8 layers, 6 heads, 2 KV heads, vocabulary 32,000) on
4 rows of 512 random ids a step, float32, fused AdamW, clipping. A hook on the optimizer's step reads the clocks, so
everything a loop does is counted. Runs alternate, because the machine's speed drifts; compared is the lower quartile of
CPU milliseconds per step, since other load can only add to it.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["bare", "femto"], help="measure one of the two, in this process")
    arguments = parser.parse_args()
    if arguments.only:
        meter = Meter(arguments.steps)
        (bare if arguments.only == "bare" else femto)(arguments, meter)
    results: dict[str, list[dict]] = {"bare": [], "femto": []}
    for _ in range(arguments.rounds):
        for name in results:
            command = [sys.executable, __file__, "--only", name, "--steps", str(arguments.steps)]
            environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
            output = subprocess.run(
                [*command, "--threads", str(arguments.threads)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                check=True,
            ).stdout
            results[name].append(json.loads(output.splitlines()[-1]))
            print(name, results[name][-1])
    summary = {name: {key: quartile(runs, key) for key in runs[0]} for name, runs in results.items()}
    for key in summary["bare"]:
        bare_value, femto_value = summary["bare"][key], summary["femto"][key]
        print(f"{key:<18} bare {bare_value:>10.1f}  femto {femto_value:>10.1f}  ratio {femto_value / bare_value:.3f}")


def quartile(runs: list[dict], key: str) -> float:
    values = sorted(value for run in runs for value in (run[key] if isinstance(run[key], list) else [run[key]]))
    return values[len(values) // 4]


class Meter:
    """Reads the clocks at each optimizer step, and ends the process after the last one with a line of JSON."""

    def __init__(self, steps: int):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.steps, self.cpu, self.started = steps, [], time.time()
        register_optimizer_step_post_hook(self.tick)

    def tick(self, *_: object) -> None:
        import resource

        self.cpu.append(time.process_time())
        if len(self.cpu) == 1:
            self.first = time.time() - self.started
        if len(self.cpu) == WARM + self.steps:
            result = {
                "cpu_ms_per_step": [1e3 * (b - a) for a, b in zip(self.cpu[WARM - 1 :], self.cpu[WARM:], strict=False)],
                "first_step_cpu_s": self.cpu[0],
                "first_step_wall_s": self.first,
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            print("\n" + json.dumps(result), flush=True)
            os._exit(0)


def bare(arguments: argparse.Namespace, meter: Meter) -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(arguments.threads)
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

    embedding, blocks = nn.Embedding(VOCABULARY, HIDDEN), nn.ModuleList(Block() for _ in range(LAYERS))
    norm, output = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    model = nn.ModuleList([embedding, blocks, norm, output])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    frequencies = 500000.0 ** (-torch.arange(0, head, 2) / head)
    angles = torch.outer(torch.arange(SEQUENCE), frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    rows = torch.from_numpy(random_ids((WARM + arguments.steps + 1) * ROWS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    for step in range(WARM + arguments.steps):
        batch = rows[step * ROWS : (step + 1) * ROWS]
        x = embedding(batch[:, :-1])
        for block in blocks:
            x = block(x, cos, sin)
        loss = F.cross_entropy(output(norm(x).flatten(0, 1)), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def femto(arguments: argparse.Namespace, meter: Meter) -> None:
    import numpy as np
    import yaml
    from tokenizers import Tokenizer, models

    from femto.recipes import single_device_pretrain
    from femtolib.command import run_recipe
    from femtolib.data.token_files import Index, write_index, write_shard
    from femtolib.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokens_dir = Path(folder) / "tokens"
        tokens_dir.mkdir()
        vocabulary = {"<eos>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")).save(str(tokens_dir / "tokenizer.json"))
        (tokens_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
        ids = random_ids((WARM + arguments.steps + 1) * ROWS).reshape(-1).astype(np.uint16)
        shard = write_shard(tokens_dir, 0, ids, np.zeros(1, np.int64))
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
                shards=[shard],
            ),
        )
        config = {
            "output_dir": f"{folder}/out",
            "threads": arguments.threads,
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
            "global_batch_size": ROWS,
            "micro_batch_size": ROWS,
            "max_steps": WARM + arguments.steps,
            "schedule": {"name": "constant"},
        }
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        run_recipe(single_device_pretrain.Config, single_device_pretrain.main, ["--config", str(path)])


def random_ids(rows: int):
    """int64 [rows, SEQUENCE + 1]"""
    import numpy as np

    return np.random.default_rng(1337).integers(0, VOCABULARY, (rows, SEQUENCE + 1), dtype=np.int64)


if __name__ == "__main__":
    main()
