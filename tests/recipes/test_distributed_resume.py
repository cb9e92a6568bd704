"""Whether a run of several ranks that was stopped or killed goes on as if nothing had happened, on as many ranks as
before or on another number, and whether all ranks end together."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest

TIMINGS = {"seconds", "tokens_per_second", "peak_memory_bytes", "mfu"}
STEPS = 14  # 9 an epoch


@pytest.fixture(scope="session")
def config(tiny_llama, uneven_tokens) -> dict:
    """14 steps of AdamW, 9 an epoch, two micro-batches a step on two ranks; validation at every sixth."""
    return {
        "device": "cpu",
        "threads": 1,
        "model": tiny_llama | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        "data": {"train": str(uneven_tokens), "validation": str(uneven_tokens), "rows": "padded", "seq_len": 16},
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "max_steps": STEPS,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
        "validate_every": 6,
        "validation_max_rows": 5,
        "checkpoint": {"async_save": False},
        "log": {"samples": True, "digests": True},
    }


@pytest.fixture(scope="session")
def double(changed, config) -> dict:
    """The same in float64, without the digests of shards, which hang on the layout."""
    return changed(config, {"dtype": "float64", "param_dtype": "float64", "log": {"digests": False}})


@pytest.fixture(scope="module")
def uninterrupted(run, double):
    """The float64 run on a single device that nothing interrupted."""
    result = run(double)
    assert result.exit_code == 0, result
    return result


@pytest.fixture(scope="session")
def whole(run_ranks, config, changed):
    """`whole(count, **changes)`: the run on so many ranks that nothing interrupted; made once."""
    made = {}

    def whole(count: int, **changes):
        key = json.dumps([count, changes])
        if key not in made:
            made[key] = run_ranks(count, changed(config, changes))
            assert made[key].exit_codes == [0] * count, made[key]
        return made[key]

    return whole


def remaining(result) -> list[dict]:
    """The train and validation lines without their timings."""
    lines = result.lines("train", "validation")
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def samples(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("samples-rank*.jsonl")}


def model_bytes(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "model").iterdir()}


def assert_same(ours, theirs) -> None:
    """Bit-equal metrics, digests, samples and final weights."""
    assert remaining(ours) == remaining(theirs)
    assert samples(ours.output) == samples(theirs.output)
    assert model_bytes(ours.output) == model_bytes(theirs.output)


def assert_stopped(result, step: int) -> None:
    """All ranks ended as stopped after `step`, with its checkpoint, and the last line says how to go on."""
    assert set(result.exit_codes) == {3}, result
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr, result
    assert all(out == "" for out, _ in result.screens[1:]), result
    assert result.lines()[-1] == {"event": "end", "step": step, "reason": "stopped"}
    assert [line["step"] for line in result.lines("train")] == list(range(1, step + 1))
    assert checkpoints(result.output)[-1] == f"step_{step:08d}"
    assert not (result.output / "model").exists()
    assert re.fullmatch(r"\s*femto run distributed_pretrain --config \S+/config.yaml", result.stdout.splitlines()[-1])


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of all files below, but for the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# ── What happens to a rank ────────────────────────────────────────────────────────────────────────────────────────────


def signal_after_update(rank: int, ranks: list[int], update: int, number: int) -> None:
    """Sends these ranks a signal as soon as they have made their update of this number, from 1."""
    import signal

    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = [update]

    def hook(*_) -> None:
        left[0] -= 1
        if left[0] == 0 and rank in ranks:
            signal.raise_signal(number)

    register_optimizer_step_post_hook(hook)


def signal_in_validation(rank: int, ranks: list[int], batch: int, number: int) -> None:
    """Sends these ranks a signal in their validation batch of this number, from 1."""
    import signal

    import torch

    import femto.recipes.distributed_pretrain as recipe

    real, left = recipe.summed_cross_entropy, [batch]

    def loss(*arguments):
        if not torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == 0 and rank in ranks:
                signal.raise_signal(number)
        return real(*arguments)

    recipe.summed_cross_entropy = loss


def signal_before_the_first_step(rank: int, ranks: list[int], number: int) -> None:
    import signal

    import femto.recipes.distributed_pretrain as recipe

    real = recipe.make_loader

    def make_loader(*arguments, **more):
        if rank in ranks:
            signal.raise_signal(number)
        return real(*arguments, **more)

    recipe.make_loader = make_loader


def write_slowly(rank: int, seconds: float, ranks: list[int], update: int, number: int) -> None:
    """Rank 0 takes its time to bring its shards to the disk; and a signal, as above."""
    import signal
    import time

    from torch.optim.optimizer import register_optimizer_step_post_hook

    import femtolib.checkpoint as checkpoint

    real, left = checkpoint._onto_disk, [update]

    def onto_disk(paths):
        time.sleep(seconds if rank == 0 else 0)
        return real(paths)

    checkpoint._onto_disk = onto_disk

    def hook(*_) -> None:
        left[0] -= 1
        if left[0] == 0 and rank in ranks:
            signal.raise_signal(number)

    register_optimizer_step_post_hook(hook)


# ── The same layout: bit for bit ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "changes", "stops"),
    [
        (2, {"data": {"num_workers": 0}}, [([1], 4, "SIGTERM"), ([0, 1], 9, "SIGINT")]),
        (2, {"data": {"num_workers": 2}, "checkpoint": {"every": 3, "async_save": True}}, [([0], 7, "SIGINT")]),
        (4, {"parallel": {"dp_replicate": 2}}, [([0, 1, 2, 3], 9, "SIGTERM"), ([2], 11, "SIGTERM")]),
    ],
    ids=["2_ranks", "2_ranks_async_workers", "2_by_2"],
)
def test_a_stopped_run_continues_bit_for_bit(run_ranks, write_config, changed, config, whole, count, changes, stops):
    path = write_config(changed(config, changes))
    before = 0
    for ranks, stop, name in stops:
        plant = (signal_after_update, ranks, stop - before, getattr(signal, name))
        stopped = run_ranks(count, path, plant=plant)
        assert_stopped(stopped, stop)
        before = stop
    finished = run_ranks(count, path)
    assert finished.exit_codes == [0] * count, finished
    assert [line["resumed_from"] for line in finished.lines("start")] == [None, *(stop for _, stop, _ in stops)]
    theirs = whole(count, parallel=changes.get("parallel", {}))
    assert_same(finished, theirs)
    for line in finished.lines("train"):
        assert len(line["parameters_digest"]) == len(line["optimizer_digest"]) == count


# ── Another layout: the same batches, the same losses ─────────────────────────────────────────────────────────────────


def assert_continued(result, theirs, reference, starts: list) -> None:
    """Went on to the end as a run that nothing interrupted, but for rounding."""
    assert set(result.exit_codes) == {0} and result.stderr == "", result
    assert [(line["world_size"], line["resumed_from"]) for line in result.lines("start")] == starts
    for key in ("step", "epoch", "consumed_rows", "trained_tokens", "lr", "batch_digest", "ledger"):
        assert result.column(key) == theirs.column(key), key
    assert reference.delivered(result.output) == reference.delivered(theirs.output)
    for key in ("loss", "grad_norm"):
        assert reference.distance(result.column(key), theirs.column(key)) <= 1e-12, key
    ours, losses = ([line["loss"] for line in r.lines("validation")] for r in (result, theirs))
    assert reference.distance(ours, losses) <= 1e-12
    assert reference.weight_distance(*map(reference.read_weights, (result.output, theirs.output))) <= 1e-10


@pytest.mark.timeout(300)
def test_a_run_continues_on_any_number_of_ranks(run_ranks, write_config, reference, changed, double, uninterrupted):
    # torchtitan#816: a checkpoint of n ranks loaded on fewer, and the other ranks' places in the data vanished.
    path = write_config(double)
    chain = [
        (1, 3, [], 0),
        (4, 5, ["data.num_workers=2"], 0),
        (3, 9, [], 2),  # an epoch's end
        (2, 11, ["data.num_workers=2", "micro_batch_size=2"], 1),
        (1, None, [], 0),
    ]
    before = 0
    for count, stop, overrides, rank in chain:
        plant = stop and (signal_after_update, [rank], stop - before, signal.SIGTERM)
        result = run_ranks(count, path, *overrides, plant=plant)
        if stop:
            assert_stopped(result, stop)
            before = stop
    assert_continued(result, uninterrupted, reference, [(1, None), (4, 3), (3, 5), (2, 9), (1, 11)])


@pytest.mark.timeout(300)
def test_a_run_continues_on_another_recipe_and_layout(run, run_ranks, stop_after, write_config, reference, changed,
                                                      double, uninterrupted):  # fmt: skip
    path = write_config(double)
    with stop_after(4):
        assert run(path).exit_code == 3
    saves = ["checkpoint.every=2", "checkpoint.async_save=true", "checkpoint.keep_last=1"]
    for count, stop, overrides in [(2, 5, []), (4, 7, saves), (4, 11, ["parallel.dp_replicate=2", *saves])]:
        updates = stop - {2: 4}.get(count, 5 if stop == 7 else 7)
        result = run_ranks(count, path, *overrides, plant=(signal_after_update, [1], updates, signal.SIGTERM))
        assert_stopped(result, stop)
    assert checkpoints(result.output) == ["step_00000011"]
    finished = run(path)
    assert finished.exit_code == 0, finished
    finished.exit_codes = [0]
    starts = [(1, None), (2, 4), (4, 5), (4, 7), (1, 11)]
    assert_continued(finished, uninterrupted, reference, starts)


# dp_replicate, dp_shard, cp, tp. A checkpoint of each is read on the next: twelve pairs.
CHAIN = [
    (1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 2),
    (1, 3, 1, 1), (2, 1, 2, 1), (1, 2, 1, 1), (1, 2, 2, 2), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_crosses_layouts_of_every_kind(run_ranks, run, write_config, reference, changed, double):
    config = changed(double, {"data": {"rows": "stream", "document_mask": True}, "model": {"num_hidden_layers": 2}})
    whole = run(config)
    assert whole.exit_code == 0, whole
    path = write_config(config)
    for step, sizes in enumerate(CHAIN):
        parallel = dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))
        last = step == len(CHAIN) - 1
        plant = None if last else (signal_after_update, [0], 1, signal.SIGTERM)
        result = run_ranks(math.prod(sizes), path, f"parallel={json.dumps(parallel)}", plant=plant)
        if not last:
            assert_stopped(result, step + 1)
    starts = [(math.prod(sizes), step or None) for step, sizes in enumerate(CHAIN)]
    assert_continued(result, whole, reference, starts)


@pytest.mark.timeout(300)
def test_what_killed_ranks_wrote_past_the_checkpoint_is_cut(run_ranks, write_config, reference, double, uninterrupted):
    path = write_config(double)
    plant = (signal_after_update, [3], 7, signal.SIGKILL)
    killed = run_ranks(4, path, "checkpoint.every=4", plant=plant)
    assert killed.exit_codes == [1, 1, 1, -signal.SIGKILL], killed
    assert checkpoints(killed.output) == ["step_00000004"] and killed.column("step")[-1] == 6
    lines = {name: len(content.splitlines()) for name, content in samples(killed.output).items()}
    assert lines == {f"samples-rank{rank}.jsonl": 6 for rank in range(4)}
    with (killed.output / "samples-rank3.jsonl").open("a") as file:
        file.write('{"step": 7, "micro')
    finished = run_ranks(2, path)
    assert_continued(finished, uninterrupted, reference, [(4, None), (2, 4)])
    names = {name: json.loads(content.splitlines()[-1])["step"] for name, content in samples(finished.output).items()}
    assert names == {f"samples-rank{rank}.jsonl": STEPS if rank < 2 else 4 for rank in range(4)}


def test_what_makes_a_run_another_one_is_refused_on_all_ranks(run_ranks, write_config, double, write_tokens,
                                                                  tmp_path):  # fmt: skip
    path = write_config(double)
    stopped = run_ranks(2, path, plant=(signal_after_update, [0], 2, signal.SIGTERM))
    assert_stopped(stopped, 2)
    before = tree(stopped.output)
    other = write_tokens(tmp_path / "other", [[1, 2, 3]] * 41, vocab_size=320)
    for override, words in [
        ("seed=1", ["seed was 0 and is now 1"]),
        (f"data.train={other}", ["data.train", "changed"]),
        ("optimizer.lr=2e-3", ["optimizer.lr was 0.001 and is now 0.002", "resume=must"]),
        ("max_steps=8", ["14", "8"]),
        ("resume=never", ["never", str(stopped.output)]),
    ]:
        refused = run_ranks(3, path, override)
        assert refused.exit_codes == [2, 2, 2] and len(refused.errors) == 1, refused
        assert all(word in refused.errors[0] for word in words), refused
        assert "Traceback" not in refused.stderr and tree(stopped.output) == before


@pytest.mark.timeout(300)
def test_a_run_stopped_at_an_epochs_end_makes_the_epochs_that_are_left_and_no_more(run_ranks, write_config, changed,
                                                                                 reference, double):  # fmt: skip
    # meta-pytorch/data#1437: a resume at an epoch's end yielded an empty epoch.
    epochs = changed(double, {"epochs": 2, "schedule": {"name": "constant"}})
    del epochs["max_steps"]
    path = write_config(epochs)
    assert_stopped(run_ranks(2, path, plant=(signal_after_update, [1], 9, signal.SIGTERM)), 9)
    finished = run_ranks(3, path)
    assert finished.exit_codes == [0, 0, 0], finished
    assert finished.column("epoch") == [0] * 9 + [1] * 9
    order = [row for step in reference.delivered(finished.output) for row in step]
    assert len(set(order[:36])) == len(set(order[36:])) == 36 and order[:36] != order[36:]

    before = tree(finished.output)
    again = run_ranks(2, path)
    assert again.exit_codes == [0, 0] and tree(again.output) == before
    assert "finished run of 18 steps" in again.stdout, again
    longer = run_ranks(2, path, "epochs=3")
    assert longer.exit_codes == [0, 0] and longer.column("step") == list(range(1, 28)), longer
    assert longer.column("epoch")[18:] == [2] * 9

    shutil.rmtree(longer.output / "model")
    rewritten = run_ranks(4, path, "epochs=3")
    assert rewritten.exit_codes == [0] * 4 and rewritten.column("step") == list(range(1, 28)), rewritten
    assert (rewritten.output / "model/model.safetensors").exists()


# ── Stops at inconvenient moments ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("ranks", "name"), [([1], "SIGTERM"), ([0, 1], "SIGINT")], ids=["one", "all"])
def test_a_stop_before_the_first_step_is_saved_too(run_ranks, write_config, config, whole, ranks, name):
    path = write_config(config)
    stopped = run_ranks(2, path, plant=(signal_before_the_first_step, ranks, getattr(signal, name)))
    assert_stopped(stopped, 0)
    finished = run_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert_same(finished, whole(2))


def test_a_stop_in_validation_leaves_it_to_the_resume(run_ranks, write_config, reference, config, double, whole,
                                                      uninterrupted):  # fmt: skip
    path = write_config(config)
    stopped = run_ranks(2, path, plant=(signal_in_validation, [1], 2, signal.SIGTERM))
    assert_stopped(stopped, 6)
    assert not stopped.lines("validation")
    # It is stopped once more in the validation that it owes.
    assert_stopped(run_ranks(2, path, plant=(signal_in_validation, [0], 1, signal.SIGINT)), 6)
    finished = run_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert_same(finished, whole(2))

    path = write_config(double)
    at_the_end = run_ranks(4, path, plant=(signal_in_validation, [0], 2 + 2 + 1, signal.SIGTERM))
    assert_stopped(at_the_end, STEPS)
    elsewhere = run_ranks(3, path)
    assert_continued(elsewhere, uninterrupted, reference, [(4, None), (3, STEPS)])


@pytest.mark.timeout(300)
def test_a_stop_while_a_save_is_under_way_keeps_both(run_ranks, write_config, changed, config, whole):
    path = write_config(changed(config, {"checkpoint": {"every": 3, "async_save": True}}))
    stopped = run_ranks(2, path, plant=(write_slowly, 2.0, [1], 4, signal.SIGTERM))
    assert_stopped(stopped, 4)
    assert checkpoints(stopped.output) == ["step_00000003", "step_00000004"]
    saves = stopped.lines("checkpoint")
    assert [line["step"] for line in saves] == [3, 4]
    assert saves[0]["seconds_blocked"] < 1 < 2 <= saves[0]["seconds_total"]
    finished = run_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert_same(finished, whole(2))


def test_the_printed_line_continues_the_run(run_ranks, start, write_config, double, uninterrupted, reference):
    stopped = run_ranks(2, write_config(double), plant=(signal_after_update, [0], 8, signal.SIGINT))
    assert_stopped(stopped, 8)
    finished = start.command(stopped.stdout.splitlines()[-1], stopped.output).result()
    assert finished.exit_code == 0, finished
    finished.exit_codes = [0]
    assert_continued(finished, uninterrupted, reference, [(2, None), (1, 8)])


# ── Kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_in_a_save(rank: int, victim: int, save: int) -> None:
    """Kills this rank while it writes its shards for the save of this number, from 1."""
    import os
    import signal

    import femtolib.checkpoint as checkpoint

    real, left = checkpoint._onto_disk, [save]

    def onto_disk(paths):
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(paths)

    checkpoint._onto_disk = onto_disk


@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_save_leaves_the_one_before(run_ranks, write_config, changed, config, whole, victim,
                                                       in_background):  # fmt: skip
    # Automodel#3254: resume died on the half-written folder, and the next save of that step collided with it.
    saves = {"checkpoint": {"every": 2, "keep_last": 1, "async_save": in_background}}
    path = write_config(changed(config, saves))
    # Rank 0 brings state.json to the disk by a call of its own.
    killed = run_ranks(2, path, plant=(kill_in_a_save, victim, 5 if victim == 0 else 3))
    assert killed.exit_codes[victim] == -signal.SIGKILL and killed.exit_codes[1 - victim] == 1, killed
    assert "rank" in killed.errors[-1] and "Traceback" not in killed.stderr, killed
    assert [name for name in checkpoints(killed.output) if not name.startswith(".")] == ["step_00000004"]
    (killed.output / "checkpoints/step_00000006").mkdir()
    finished = run_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert finished.lines("start")[-1]["resumed_from"] == 4
    assert checkpoints(finished.output) == [f"step_{STEPS:08d}"]
    assert_same(finished, whole(2))
