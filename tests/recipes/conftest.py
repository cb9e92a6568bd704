"""The independent judge of a training run: a plain PyTorch loop in float64 without a line of femto. It reads rows from
the token files by their published format, computes losses, gradient norms, learning rates and weights from explicit
lists of rows, and digests batches from the published byte format."""

import hashlib
import json
import math
import os
import pickle
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file as load_numpy_file
from safetensors.torch import load_file


@dataclass
class Row:
    """A row of `sequence` places: inputs, their targets (-100: not trained), the document of each (-1: padding), which
    is 0 all along where documents are not kept apart."""

    input_ids: list[int]
    labels: list[int]
    document_ids: list[int]


@dataclass
class Trace:
    """What the loop saw, one entry a step (None: a step without a trained token), and the weights at its end."""

    losses: list[float | None]
    grad_norms: list[float | None]
    lrs: list[float]
    weights: dict[str, torch.Tensor]


def _read_documents(directory: Path) -> list[list[int]]:
    documents = []
    for shard in json.loads((directory / "index.json").read_text())["shards"]:
        arrays = load_numpy_file(directory / shard["file"])
        tokens, starts = arrays["tokens"].tolist(), arrays["document_starts"].tolist()
        documents += [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    return documents


def read_rows(directory: Path, rows: str, sequence: int, apart: bool = False) -> list[Row]:
    """All rows of a token directory, `rows` being "stream" or "padded", of a stream with documents `apart` or not."""
    eos = json.loads((directory / "index.json").read_text())["eos_id"]
    documents = [[(token, number) for token in tokens] for number, tokens in enumerate(_read_documents(directory))]
    if rows == "padded":
        cut = [document[: sequence + 1] for document in documents]
    else:
        stream = [token for document in documents for token in document]
        cut = [stream[i * sequence : i * sequence + sequence + 1] for i in range((len(stream) - 1) // sequence)]
    made = []
    for pairs in cut:
        first = pairs[0][1]
        tokens, numbers = [token for token, _ in pairs], [number - first if apart else 0 for _, number in pairs]
        targets = [
            tokens[i + 1] if numbers[i] == numbers[i + 1] else -100 for i in range(len(tokens) - 1)
        ]  # no token is to tell how another document begins
        padding = sequence - len(tokens[:sequence])
        made.append(
            Row(
                tokens[:sequence] + [eos] * padding,
                targets + [-100] * (sequence - len(targets)),
                numbers[:sequence] + [-1] * padding,
            )
        )
    return made


def delivered(output: Path) -> list[list[int]]:
    """The rows of each step in their order in the global batch, as the ranks themselves wrote them down."""
    steps: dict[int, list[tuple[int, int, list[int]]]] = {}
    for path in output.glob("samples-rank*.jsonl"):
        rank = int(path.stem.removeprefix("samples-rank"))
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).append((line["micro_batch"], rank, line["rows"]))
    return [[row for _, _, rows in sorted(steps[step]) for row in rows] for step in sorted(steps)]


def batch_digest(batch: Sequence[Row], masked: bool) -> str:
    """The digest of a global batch whose rows fill its places from 0 on."""
    total = 0
    for position, row in enumerate(batch):
        numbers = [position.to_bytes(8, "little", signed=True)]
        for values in [row.input_ids, row.labels, *([row.document_ids] if masked else [])]:
            numbers += [value.to_bytes(4, "little", signed=True) for value in values]
        total += int.from_bytes(hashlib.sha256(b"".join(numbers)).digest()[:8], "little")
    return f"{total % 2**64:016x}"


def ledger(digests: Sequence[str]) -> list[str]:
    """The ledger after each step."""
    entries = ["0" * 16]
    for step, digest in enumerate(digests, 1):
        entries.append(hashlib.sha256(f"{entries[-1]} {step} {digest}".encode()).hexdigest()[:16])
    return entries[1:]


def learning_rate(update: int, total: int, lr: float, schedule: dict) -> float:
    """The rate of update `update`, counted from 0, out of `total`."""
    warmup, floor = schedule.get("warmup_steps", 0), schedule.get("min_lr_ratio", 0.0)
    if update < warmup:
        return lr * (update + 1) / warmup
    progress = (update - warmup) / (total - warmup)
    match schedule.get("name", "cosine"):
        case "constant":
            return lr
        case "linear":
            return lr * (1 - (1 - floor) * progress)
        case "cosine":
            return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "wsd":
            decay = schedule["decay_steps"]
            return lr * (1 - (1 - floor) * max(0, update - (total - decay)) / decay)


def logits(
    weights: dict[str, torch.Tensor], model: dict, input_ids: torch.Tensor, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Llama written out, weights by their Hugging Face names; [batch, sequence] → [batch, sequence, vocab].

    Where a row's `document_ids` change, another text begins: positions count from 0, and what was before is not seen.
    """
    heads, groups = model["num_attention_heads"], model["num_key_value_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    batch, sequence = input_ids.shape

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model["rms_norm_eps"]) * weights[name]

    hidden = weights["model.embed_tokens.weight"][input_ids]
    # The rotary tables are float32 whatever the weights are, as in transformers.
    frequencies = 1.0 / model["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    documents = torch.zeros_like(input_ids) if document_ids is None else document_ids
    positions = torch.zeros(batch, sequence)
    for i in range(1, sequence):
        positions[:, i] = torch.where(documents[:, i] == documents[:, i - 1], positions[:, i - 1] + 1, 0)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)  # [batch, 1, sequence, head_dim]
    cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    hidden_keys = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    hidden_keys = (hidden_keys | (documents[:, :, None] != documents[:, None, :])).unsqueeze(1)
    for layer in range(model["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm.weight")
        queries, keys, values = (
            (x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(batch, sequence, -1, head_dim).transpose(1, 2)
            for name in "qkv"
        )
        queries, keys = rotate(queries), rotate(keys)
        keys, values = (x.repeat_interleave(heads // groups, dim=1) for x in (keys, values))
        scores = (queries @ keys.transpose(2, 3) / math.sqrt(head_dim)).masked_fill(hidden_keys, -math.inf)
        mixed = (scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, sequence, heads * head_dim)
        hidden = hidden + mixed @ weights[prefix + "self_attn.o_proj.weight"].T
        x = norm(hidden, prefix + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(hidden, "model.norm.weight") @ head.T


def summed_loss(weights: dict[str, torch.Tensor], model: dict, rows: Sequence[Row]) -> tuple[torch.Tensor, int]:
    """The summed loss of all trained tokens of `rows`, and how many they are."""
    labels = torch.tensor([row.labels for row in rows])
    inputs, documents = (torch.tensor([getattr(row, key) for row in rows]) for key in ("input_ids", "document_ids"))
    scores = logits(weights, model, inputs, documents)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != -100).sum())


def mean_loss(weights: dict[str, torch.Tensor], model: dict, rows: Sequence[Row]) -> float:
    """The mean loss of all trained tokens of `rows`."""
    total, count = summed_loss(weights, model, rows)
    return float(total) / count


def train(weights: dict[str, torch.Tensor], config: dict, batches: Sequence[Sequence[Row]], total: int) -> Trace:
    """Trains on explicit global batches, each in one piece; `config` is the run's, `total` its number of steps."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    settings = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.0}
    settings |= config.get("optimizer", {})
    max_norm = config.get("max_grad_norm", 1.0)
    state: dict[str, list[torch.Tensor]] = {}
    trace = Trace([], [], [], {})
    updates = 0  # the optimizer's own count: a step without a trained token updates nothing
    for step, batch in enumerate(batches):
        lr = learning_rate(step, total, settings["lr"], config.get("schedule", {}))
        trace.lrs.append(lr)
        loss, tokens = summed_loss(weights, config["model"], batch) if batch else (None, 0)
        if tokens == 0:
            trace.losses.append(None)
            trace.grad_norms.append(None)
            continue
        loss = loss / tokens
        gradients = dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))
        norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients.values()))
        trace.losses.append(loss.item())
        trace.grad_norms.append(norm.item())
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))  # as torch's clip_grad_norm_
        updates += 1
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = gradients[name] * scale
                if weight.ndim > 1:
                    weight *= 1 - lr * settings["weight_decay"]
                if settings.get("name") == "sgd":
                    velocity = state.setdefault(name, [torch.zeros_like(weight)])[0]
                    velocity.mul_(settings["momentum"]).add_(gradient)
                    weight -= lr * velocity
                else:
                    first, second = state.setdefault(name, [torch.zeros_like(weight), torch.zeros_like(weight)])
                    beta1, beta2 = settings["betas"]
                    first.mul_(beta1).add_((1 - beta1) * gradient)
                    second.mul_(beta2).add_((1 - beta2) * gradient**2)
                    denominator = (second / (1 - beta2**updates)).sqrt() + settings["eps"]
                    weight -= lr * first / (1 - beta1**updates) / denominator
    trace.weights = {name: weight.detach() for name, weight in weights.items()}
    return trace


def read_weights(output: Path) -> dict[str, torch.Tensor]:
    """The tensors of OUTPUT/model."""
    return {
        name: tensor
        for path in sorted((output / "model").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def distance(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """The largest relative difference of two series; infinite where one has a number and the other has none."""
    assert len(ours) == len(theirs)
    if [x is None for x in ours] != [x is None for x in theirs]:
        return math.inf
    return max((abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True) if y is not None), default=0.0)


def weight_distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights, each tensor's relative to its own largest weight."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """The judge's functions: rows, digests, logits, training, distances."""
    return SimpleNamespace(
        read_rows=read_rows,
        delivered=delivered,
        batch_digest=batch_digest,
        ledger=ledger,
        learning_rate=learning_rate,
        logits=logits,
        mean_loss=mean_loss,
        train=train,
        read_weights=read_weights,
        distance=distance,
        weight_distance=weight_distance,
    )


class _Canary:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path) -> SimpleNamespace:
    """`.pickle`: bytes that, loaded by an unrestricted unpickler, make the folder `.path`."""
    path = tmp_path / "canary"
    return SimpleNamespace(path=path, pickle=pickle.dumps(_Canary(path)))


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(bytes)`: a file system of that size, mounted or grown; skips where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(size: int) -> Path:
        options = f"{'remount,' if os.path.ismount(folder) else ''}size={size}"
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")
        return folder

    yield resize
    if os.path.ismount(folder):
        subprocess.run(["umount", folder], check=True)
