"""One process against every kind of layout, by hand: the table of the README, and whether it notices what goes wrong.

    python tests/benchmarks/certificate.py [--dtype float64] [--steps 20]      the table: an hour on two cores
    python tests/benchmarks/certificate.py --faults                            eight planted faults, each to be noticed

A model of two layers, eight heads and four key-value heads, clipped, four of ten labels not trained: SGD or AdamW,
documents kept apart or rows of one document without a mask, head and embedding tied or not, in four ways in which each
two of these meet. Layouts of 1 to 8 micro-batches a step. `femto run parity` does the work; the first of each table is
the control of reversed rows.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from femto.recipes.parity import largest, markdown

FEMTO = [sys.executable, "-m", "femto.main", "run"]
RECIPE = Path(__file__).parents[2] / "recipes/distributed_pretrain.py"
# dp_replicate, dp_shard, cp, tp
LAYOUTS = [
    (1, 2, 1, 1), (1, 3, 1, 1), (1, 4, 1, 1), (1, 8, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 4, 1, 1),
    (1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 1, 2), (1, 1, 1, 4), (1, 2, 2, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2),
    (2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 1, 2),
]  # fmt: skip
OPTIMIZERS = {
    "SGD": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "AdamW": {"optimizer": {"name": "adamw", "lr": 1e-3}, "schedule": {"warmup_steps": 5}},
}
ROWS = {
    "documents apart": {"train": "short.jsonl", "rows": "stream", "document_mask": True},
    "no mask": {"train": "long.jsonl", "rows": "padded", "document_mask": False},
}
WAYS = [  # optimizer, rows, whether the head is the embedding
    ("SGD", "documents apart", True),
    ("SGD", "no mask", False),
    ("AdamW", "documents apart", False),
    ("AdamW", "no mask", True),
]


def config(dtype: str, optimizer: str, rows: str, *, tied: bool) -> dict:
    model = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied}
    return {
        "output_dir": "not written",
        "device": "cpu",
        "threads": 1,
        "dtype": dtype,
        "param_dtype": dtype,
        "tokenizer": "builtin",
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "max_steps": 20,
        "max_grad_norm": 0.5,
        "model": model,
        "data": {"seq_len": 64, **ROWS[rows]},
        **OPTIMIZERS[optimizer],
    }


def write_documents(folder: Path) -> None:
    """short.jsonl: 2.5 tokens with the last, whose next is another document's; long.jsonl: 0.6 of a row."""
    words = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his"]
    pick = random.Random(0)
    for name, count, lengths in (("short", 4000, (1, 2)), ("long", 600, (34, 44))):
        texts = (" ".join(pick.choices(words, k=pick.randint(*lengths))) for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def parity(folder: Path, recipe: str, settings: dict, layouts: list, steps: int, **more) -> tuple[int, str]:
    """Exit code and what `femto run parity` left: parity.md, or where there is none, its screen."""
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    named = [dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True)) for sizes in layouts]
    listed = [{"processes": a * b * c * d, "parallel": named[i]} for i, (a, b, c, d) in enumerate(layouts)]
    (folder / "parity.yaml").write_text(
        yaml.safe_dump(
            {"output_dir": "out", "recipe": recipe, "config": "config.yaml", "steps": steps, "layouts": listed, **more},
            sort_keys=False,
        )
    )
    command = [*FEMTO, "parity", "--config", "parity.yaml"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    report = folder / "out/parity.md"
    return ended.returncode, report.read_text() if report.exists() else ended.stdout + ended.stderr


def certify(dtype: str, steps: int) -> int:
    code, found = 0, {}
    for optimizer, rows, tied in WAYS:
        with tempfile.TemporaryDirectory() as name:
            write_documents(folder := Path(name))
            arguments = ["distributed_pretrain", config(dtype, optimizer, rows, tied=tied), LAYOUTS, steps]
            ended, report = parity(folder, *arguments, control=True, tolerance=1e-12 if dtype == "float64" else 1e-4)
            results = json.loads((folder / "out/parity.json").read_text())["results"] if ended in (0, 1) else []
        shown = report.partition("\n## ")[0] if results else report
        title = f"{optimizer}, {rows}, {'tied' if tied else 'untied'}, {dtype}"
        print(f"\n{title}: exit code {ended}\n\n{shown}", flush=True)
        code = max(code, ended)
        for result in results:
            if result["steps"]:
                found.setdefault(result["layout"], []).append(largest(result))
    table = [["layout", "loss", "gradient norm", "final weights"]]
    for layout, each in found.items():
        most = (f"{max(one[key] for one in each):.1e}" for key in ("loss", "grad_norm", "weights"))
        table.append([layout + (f" ({len(each)} of {len(WAYS)} alone)" if len(each) < len(WAYS) else ""), *most])
    print("", "The largest of all", "", *markdown(table), sep="\n")
    return code


# ── Faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# What is wrong, a layout that shows it, more keys, (pattern, replacement) in the recipe, and what is put at its end.
FAULTS = [
    (
        "the embedding's gradient lost under compile + tp", (1, 1, 1, 2), {"compile": {"model": True}}, None,
        """
        import femtolib.parallel.tensor as _tensor
        _real = _tensor._look_up
        _tensor._look_up = lambda embedding, input_ids: _real(embedding, input_ids).detach()
        """,
    ),
    ("wrong loss scale", (1, 2, 1, 1), {}, (r" \* dims\.averaged", " * dims.averaged * dims.dp_shard"), ""),
    (
        "labels shifted after the cut", (1, 1, 2, 1), {}, None,
        """
        from dataclasses import replace as _replace
        import torch as _torch
        import femtolib.parallel.context as _context
        _take = _context.SequenceCut.take_batch
        def _shifted(cut, batch):
            if cut.size == 1:
                return _take(cut, batch)
            back = batch.labels.roll(1, 1)  # the inputs' own labels, and then shifted within the part
            return _replace(_take(cut, batch), labels=cut.take(back).roll(-1, 1))
        _context.SequenceCut.take_batch = _shifted
        """,
    ),
    (
        "the mask lost at the cut", (1, 1, 2, 1), {}, None,
        """
        _plan = plan_attention
        def plan_attention(document_ids, cut, **more):
            return _plan(document_ids if cut.size == 1 else None, cut, **more)
        """,
    ),
    (
        "a seed of its own on each rank", (2, 1, 1, 1), {},
        (r"initialize_weights\(model, config\.seed\)", "initialize_weights(model, config.seed + world.rank)"), "",
    ),
    (
        "the norm counted once a rank", (1, 1, 1, 2), {}, None,
        """
        _clip = clip_gradients
        def clip_gradients(model, max_norm):
            size = dist.get_world_size()
            return _clip(model, max_norm / size**0.5) * size**0.5
        """,
    ),
    (
        "data sharded by global rank", (1, 1, 2, 1), {},
        (r"dp_rank=meshes\.dp\.get_local_rank\(\),\n(\s+)dp_size=meshes\.dp\.size\(\),",
         r"dp_rank=world.rank,\n\1dp_size=world.size,"), "",
    ),
    (
        "a micro-batch that is not synchronized", (2, 1, 1, 1), {},
        (r"is_last=number == len\(micro_batches\)", "is_last=number == 1"), "",
    ),
]  # fmt: skip


def plant_faults(dtype: str) -> int:
    missed = 0
    source = RECIPE.read_text()
    for name, sizes, keys, change, tail in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            write_documents(Path(folder))
            changed, count = re.subn(*change, source) if change else (source, 1)
            assert count, f"{name}: nothing to change in the recipe"
            lines = [line.removeprefix("        ") for line in tail.splitlines()]
            (Path(folder) / "mine.py").write_text(changed + "\n".join(lines) + "\n")
            # Untied: a head that is the embedding would make up for its lost gradient.
            settings = config(dtype, "SGD", "documents apart", tied=False) | keys
            code, report = parity(Path(folder), "./mine.py", settings, [sizes], 3)
        why = next((line for line in report.splitlines() if line.startswith("- ")), report[-300:])
        print(
            f"{'noticed' if code == 1 else f'MISSED, exit code {code}':10} {name}\n           {why[:200]}", flush=True
        )
        missed += code != 1
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    sys.exit(plant_faults(arguments.dtype) if arguments.faults else certify(arguments.dtype, arguments.steps))
