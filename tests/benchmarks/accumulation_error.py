"""What it costs to add up the gradients of micro-batches in bfloat16 instead of float32.

    python tests/benchmarks/accumulation_error.py [--hidden 64] [--layers 2] [--vocabulary 320] [--sequence 32]

A decoder computes in bfloat16 on random ids, and its gradient, of the mean over all tokens, is compared with that of
the same rows in one pass of a float64 model with the same rounded weights. Shown is the norm of the difference, divided
by that of the float64 gradient, for k micro-batches:

same rows: always 64 rows, cut into k pieces. one row each: k rows, so that the passes are alike and only the number of
additions grows. Both contain the rounding of bfloat16 arithmetic itself. sum alone: with one row each, against the sum
in float64 of the very gradients that were added, so without it.
"""

import argparse

import torch

from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import compute_copy
from femtolib.weights import initialize_weights

ROWS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 64), ("layers", 2), ("vocabulary", 320), ("sequence", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    masters, exact = decoder(arguments, torch.bfloat16), decoder(arguments, torch.float64).double()
    with torch.no_grad():
        for parameter, master in zip(exact.parameters(), masters.parameters(), strict=True):
            parameter.copy_(master.bfloat16())
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, arguments.vocabulary, (ROWS, arguments.sequence + 1), generator=generator)

    parameters = sum(parameter.numel() for parameter in masters.parameters())
    print(f"{parameters:,} parameters, {arguments.sequence} tokens a row")
    columns = [f"{what}, {name}" for what in ("same rows", "one row each", "sum alone") for name in DTYPES]
    print(f"| micro-batches | {' | '.join(columns)} |")
    print(f"|{'---:|' * (1 + len(columns))}")
    for count in (1, 2, 4, 8, 16, 32, 64):
        errors = {}
        for what, rows in (("same rows", ids), ("one row each", ids[:count])):
            right = gradient(exact, rows, 1)
            for name, dtype in DTYPES.items():
                found = gradient(compute_copy(masters, torch.bfloat16, dtype), rows, count)
                errors[f"{what}, {name}"] = difference(found, right)
                if what == "one row each":
                    errors[f"sum alone, {name}"] = difference(found, summed_apart(masters, dtype, rows))
        print(f"| {count} | {' | '.join(f'{errors[column]:.2e}' for column in columns)} |", flush=True)


def decoder(arguments: argparse.Namespace, dtype: torch.dtype) -> Decoder:
    """A Llama-style decoder that computes in `dtype`, with float32 weights that depend on its sizes alone."""
    keys = {
        "model_type": "llama",
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 2 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": arguments.sequence,
    }
    model = Decoder(ModelConfig.from_dict(keys, "", inline=True), dtype)
    initialize_weights(model, seed=0)
    return model


def gradient(model: Decoder, ids: torch.Tensor, micro_batches: int, tokens: int | None = None) -> torch.Tensor:
    """The gradient of the mean over `tokens`, by default all of `ids`, added up over so many pieces."""
    model.zero_grad()
    for rows in ids.chunk(micro_batches):
        loss = summed_cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        (loss / (tokens or ids[:, 1:].numel())).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def summed_apart(masters: Decoder, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """The gradients of single rows, as they come out in `dtype`, added in float64."""
    model = compute_copy(masters, torch.bfloat16, dtype)
    return sum(gradient(model, row, 1, ids[:, 1:].numel()) for row in ids.split(1))


def difference(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


if __name__ == "__main__":
    main()
