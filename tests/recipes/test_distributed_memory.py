"""No rank ever holds the model: what one of four ranks holds of parameters and optimizer state is at most 0.3 of what
one process holds, from its start to the model that it leaves. Read off malloc's own account of what it has given out.
"""

import ctypes
import json

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="reads glibc's account, of 2.33 on")

RANKS, SHARE = 4, 0.3


def take_down_memory(rank: int, folder: str, command: list[str] | None = None) -> None:
    """Have this rank leave in FOLDER/RANK, a JSON object, by phase the most bytes that malloc had given out beyond
    those before the run, and under `held` those when it comes to its first save, when there are no gradients.

    With `command`, that is what is run, instead of the recipe, as the phase `command`.

    Malloc counts for all threads, and what is no tensor, too. (torch's profiler sees its own thread alone, and misses
    what gloo's threads free.) It is asked five hundred times a second; to fill a tenth of the model takes longer.
    """
    import atexit
    import ctypes
    import importlib
    import json
    import sys
    import threading
    import time
    from pathlib import Path

    import torch

    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    Account = type("Account", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Account

    def in_use():
        account = ask()
        return account.uordblks + account.hblkhd

    recipe = importlib.import_module("femto.recipes.distributed_pretrain")
    for width in (256, 512):  # the first products take 10 MB for good
        torch.nn.Linear(width, 768 - width)(torch.ones(8, width)).sum().backward()
    before, most, phase = in_use(), {}, "start"

    def look():
        current = phase  # two threads look, and one of them changes it
        most[current] = max(most.get(current, 0), in_use() - before)

    def during(owner, name, inside, after):
        function = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            nonlocal phase
            look()
            if inside == "save":
                most.setdefault("held", in_use() - before)
            phase = inside
            try:
                return function(*arguments, **keywords)
            finally:
                look()
                phase = after

        setattr(owner, name, wrapped)

    def watch():
        while True:
            look()
            time.sleep(0.002)

    atexit.register(lambda: (Path(folder) / str(rank)).write_text(json.dumps(most)))
    threading.Thread(target=watch, daemon=True).start()
    if command:
        from femto.main import main

        phase, sys.argv = "command", ["femto", *command]
        sys.exit(main())
    during(recipe, "claim_output", "start", "resume")
    during(recipe, "StopRequest", "resume", "train")
    during(recipe.CheckpointWriter, "save", "save", "train")
    during(recipe.CheckpointWriter, "close", "save", "train")
    during(recipe, "whole_parameters", "export", "export")


@pytest.fixture(scope="module")
def measure(start_ranks, tmp_path_factory):
    """`measure(ranks, config, *overrides)`: the run and, by phase, the bytes of the rank that held most."""

    def measure(ranks: int, config, *overrides: str, command: list[str] | None = None):
        folder = tmp_path_factory.mktemp("memory")
        running = start_ranks(ranks, config, *overrides, plant=(take_down_memory, str(folder), command))
        run = running.result(240)  # the account is slow, and so may the machine be
        assert run.exit_code == 0, run
        by_rank = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
        return run, {phase: max(held[phase] for held in by_rank) for phase in by_rank[0]}

    return measure


@pytest.fixture(scope="module")
def deep(tiny_llama, uneven_tokens) -> dict:
    """A model of 39 MB whose largest tensor is a seventieth of it, on rows so short that activations are nothing."""
    size = {"num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 512}
    return {
        "model": tiny_llama | size,
        "data": {"train": str(uneven_tokens), "seq_len": 4},
        "global_batch_size": 4,
        "max_steps": 2,
        "checkpoint": {"keep_last": 1},
    }


@pytest.fixture(scope="module")
def one(measure, deep) -> dict[str, int]:
    """What one process holds."""
    run, held = measure(1, deep)
    weights = 4 * run.lines("start")[0]["parameters"]
    # What the account is worth: it has the weights, and with them AdamW's two moments, and little else.
    assert weights < held["start"] < 1.05 * weights and 3 * weights < held["held"] < 3.15 * weights
    return held


@pytest.fixture(scope="module")
def four(measure, deep, write_config):
    """A run of four ranks and what each of them held at most."""
    return measure(RANKS, write_config(deep))


def shares(held: dict[str, int], one: dict[str, int]) -> dict[str, float]:
    found = {phase: round(size / one[phase], 3) for phase, size in held.items()}
    print(found)
    return found


def test_a_rank_holds_its_share_from_start_to_export(four, one):
    found = shares(four[1], one)
    assert found.keys() == {"start", "resume", "train", "held", "save", "export"}
    assert all(share <= SHARE for share in found.values()), found


def test_a_resume_and_a_save_in_the_background_hold_a_rank_s_share(four, one, measure):
    run, _ = four
    _, held = measure(
        RANKS, run.output / "config.yaml", "max_steps=4", "checkpoint.async_save=true", "checkpoint.every=1"
    )
    resumed = held["resume"] / one["held"]
    copied = {phase: held[phase] / one["held"] - SHARE for phase in ("save", "export")}
    print(resumed, copied)
    assert resumed <= SHARE and all(copy <= 1 / RANKS for copy in copied.values())


def test_weights_that_are_loaded_come_as_shards(four, one, measure, deep):
    run, _ = four
    _, held = measure(RANKS, deep | {"model": {"path": str(run.output / "model")}})
    assert shares(held, one)["start"] <= SHARE


def test_an_export_holds_a_tensor_at_a_time(four, one, measure, tmp_path):
    run, _ = four
    _, held = measure(1, run.output / "config.yaml", command=["export", str(run.output), str(tmp_path / "model")])
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        run.output / "model" / "model.safetensors"
    ).read_bytes()
    print(held["command"] / one["start"])
    assert held["command"] < 0.1 * one["start"]
