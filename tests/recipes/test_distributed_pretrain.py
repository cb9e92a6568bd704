"""Whether many ranks compute what one does: against the single-device recipe and the independent loop, in float64, over
layouts of devices. Which rank read which row is taken from what the ranks wrote down."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

SEQUENCE = 48
STEPS = 20
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-3, "momentum": 0.0}

# Ranks, how they are laid out, and whether gradients are reduced once a step; tests/benchmarks/certificate.py has each
# with both optimizers. Ten rows a step, in one process one a
# micro-batch, on ranks two: on 4 of them three have no row in the second one. On 8 it is one, and six have none there.
LAYOUTS = {
    "sgd": [(2, 1, False), (3, 1, True), (8, 1, True), (4, 2, False)],
    "adamw": [(1, 1, True), (4, 1, True), (2, 2, False), (8, 2, False)],
}


def layout_name(count: int, copies: int, deferred: bool) -> str:
    return f"{count} ranks, {copies} × {count // copies}{', deferred' * deferred}"


@pytest.fixture(scope="module")
def config(tiny_llama, uneven_tokens) -> dict:
    """Ten rows a step in float64, one document a row, some without a token to train and one with eighty."""
    return {
        "device": "cpu",
        "threads": 1,
        "dtype": "float64",
        "param_dtype": "float64",
        "model": tiny_llama,
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": SEQUENCE},
        "global_batch_size": 10,
        "micro_batch_size": 1,
        "max_steps": STEPS,
        "optimizer": SGD,
        "log": {"samples": True},
    }


@pytest.fixture(scope="module")
def judged(run, reference):
    """`judged(config)`: the single-device run, the reference's run on its rows, forwards and with the rows of every
    batch in reverse order, and its initial weights."""

    def judged(config: dict) -> SimpleNamespace:
        untrained = {key: value for key, value in config.items() if key != "epochs"} | {"max_steps": 0}
        initial = run(untrained)
        assert initial.exit_code == 0, initial
        result = run(config)
        assert result.exit_code == 0, result
        data = config["data"]
        apart = data.get("document_mask", False)
        rows = reference.read_rows(Path(data["train"]), data["rows"], data["seq_len"], apart)
        batches = [[rows[i] for i in step] for step in reference.delivered(result.output)]
        weights = reference.read_weights(initial.output)
        trace = reference.train(weights, config, batches, total=len(batches))
        control = reference.train(weights, config, [batch[::-1] for batch in batches], total=len(batches))
        return SimpleNamespace(run=result, weights=weights, batches=batches, trace=trace, control=control)

    return judged


@pytest.fixture(scope="module")
def on_ranks(run_ranks):
    """`on_ranks(count, config)`: a run that ends well on every rank and says nothing but what rank 0 has to say."""

    def on_ranks(count: int, *arguments, **more):
        result = run_ranks(count, *arguments, **more)
        assert result.exit_codes == [0] * count and result.stderr == "", result
        assert all(out == "" for out, _ in result.screens[1:]), result
        return result

    return on_ranks


def assert_same_batches(ours, theirs) -> None:
    """All that does not hang on rounding, line by line."""
    for key in ("step", "epoch", "consumed_rows", "trained_tokens", "lr", "batch_digest", "ledger"):
        assert ours.column(key) == theirs.column(key), key


# ── The same training on every layout ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_every_layout_of_ranks_is_the_same_training(judged, on_ranks, reference, changed, config, name):
    adamw = {"optimizer": ADAMW, "schedule": {"warmup_steps": 5, "min_lr_ratio": 0.1}, "data": {"tail": "pad"}}
    config = changed(config, adamw if name == "adamw" else {"optimizer": SGD})
    sizes = [((copies, count // copies, 1, 1), deferred) for count, copies, deferred in LAYOUTS[name]]
    assert_same_training(changed(config, {"max_steps": 10}), sizes, judged, on_ranks, reference, changed)


# Documents kept apart or not, head and embedding tied or not; dp_replicate, dp_shard, cp, tp.
SHARING = {
    "sgd, documents": [(1, 1, 2, 1), (1, 1, 2, 2), (1, 2, 2, 2)],
    "adamw, tied": [(1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 2, 1)],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHARING)
def test_ranks_that_share_rows_and_matrices_are_the_same_training(judged, on_ranks, reference, changed, config,
                                                                  write_tokens, tmp_path, name):  # fmt: skip
    if name == "sgd, documents":  # 2.5 tokens with their end, which is not to tell how the next begins: 0.4 not trained
        documents = [[id % 319, (7 * id) % 319, (3 * id) % 319][: id % 4] for id in range(400)]
        changes = {"optimizer": SGD, "data": {"rows": "stream", "document_mask": True}, "micro_batch_size": 4}
    else:  # 28.8 of 48 places have a token to predict
        documents = np.random.default_rng(6).integers(0, 319, (60, 28)).tolist()
        changes = {"optimizer": ADAMW, "schedule": {"warmup_steps": 5}, "model": {"tie_word_embeddings": True}}
        changes |= {"data": {"document_mask": False}, "micro_batch_size": 4}
    changes["data"]["train"] = str(write_tokens(tmp_path / "tokens", documents, vocab_size=320))
    sizes = [(sizes, number % 2 == 1) for number, sizes in enumerate(SHARING[name])]
    changes["max_steps"] = 6
    assert_same_training(changed(config, changes), sizes, judged, on_ranks, reference, changed)


def assert_same_training(config, layouts, judged, on_ranks, reference, changed) -> None:
    """Prints a table of how far each layout is from one process, and holds it against the bounds; over few steps, for
    tests/benchmarks/certificate.py makes twenty."""
    whole = judged(config)
    trace, control = whole.trace, whole.control
    digests = [
        reference.batch_digest(batch, masked=config["data"].get("document_mask", True)) for batch in whole.batches
    ]
    final = reference.read_weights(whole.run.output)

    # Rounding alone: the reference against itself with the rows of every batch in reverse order.
    rounding = [
        reference.distance(control.losses, trace.losses),
        reference.distance(control.grad_norms, trace.grad_norms),
        reference.weight_distance(control.weights, trace.weights),
    ]
    bounds = [max(1e-12, 10 * value if value > 1e-13 else 0) for value in rounding]
    bounds[2] = 1e-10
    print(f"\nlargest relative difference over {config['max_steps']} steps    losses   grad norms  weights")
    print("reversed rows (control)                        " + "  ".join(f"{value:.1e}" for value in rounding))
    for sizes, deferred in layouts:
        parallel = dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))
        count = int(np.prod(sizes))
        section = {**parallel, "defer_gradient_reduction": deferred}
        rows = min(max(2, config["micro_batch_size"]), 8 // (sizes[0] * sizes[1]))  # at least two micro-batches
        result = on_ranks(count, changed(config, {"parallel": section, "micro_batch_size": rows}))
        weights = reference.read_weights(result.output)
        apart = [
            reference.distance(result.column("loss"), whole.run.column("loss")),
            reference.distance(result.column("grad_norm"), whole.run.column("grad_norm")),
            reference.weight_distance(weights, final),
        ]
        layout = f"{count} = {' × '.join(map(str, sizes))}{', deferred' * deferred}"
        print(f"{layout:47}" + "  ".join(f"{value:.1e}" for value in apart))
        assert all(value <= bound for value, bound in zip(apart, bounds, strict=True)), (layout, apart, rounding)
        assert reference.distance(result.column("loss"), trace.losses) <= 1e-10, layout
        assert reference.distance(result.column("grad_norm"), trace.grad_norms) <= 1e-10, layout
        assert reference.weight_distance(weights, trace.weights) <= 1e-10, layout
        assert_same_batches(result, whole.run)
        assert result.column("batch_digest") == digests and result.column("ledger") == reference.ledger(digests)
        assert reference.delivered(result.output) == reference.delivered(whole.run.output), layout
        (start,) = result.lines("start")
        assert (start["recipe"], start["world_size"]) == ("distributed_pretrain", count)
        assert start["parallel"] == parallel
        (theirs,) = whole.run.lines("start")
        assert all(start[key] == theirs[key] for key in theirs.keys() - {"recipe", "world_size", "parallel"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_layout_starts_from_the_same_weights(run, on_ranks, reference, changed, config, tied):
    untrained = changed(config, {"model": {"tie_word_embeddings": tied}, "max_steps": 0})
    theirs = run(untrained)
    weights = reference.read_weights(theirs.output)
    assert ("lm_head.weight" in weights) is not tied
    for count, parallel in [(4, {"dp_replicate": 2}), *([] if tied else [(3, {}), (8, {})])]:
        result = on_ranks(count, changed(untrained, {"parallel": parallel}))
        ours = reference.read_weights(result.output)
        assert ours.keys() == weights.keys() and all(torch.equal(ours[name], weights[name]) for name in weights)
        assert not (result.output / "checkpoints").exists() or not list((result.output / "checkpoints").iterdir())
        files = {path.name: path.read_bytes() for path in (result.output / "model").iterdir()}
        assert files == {path.name: path.read_bytes() for path in (theirs.output / "model").iterdir()}


def test_a_tied_matrix_is_one_matrix_on_every_layout(judged, on_ranks, reference, changed, config):
    # NeMo-RL#227: a tied embedding and head drift apart when they are sharded.
    tied = changed(config, {"model": {"tie_word_embeddings": True}, "optimizer": ADAMW, "max_steps": 5})
    whole = judged(tied)
    final = reference.read_weights(whole.run.output)
    for count, parallel in [(2, {}), (4, {"dp_replicate": 2})]:
        result = on_ranks(count, changed(tied, {"parallel": parallel}))
        assert reference.distance(result.column("loss"), whole.run.column("loss")) <= 1e-12
        weights = reference.read_weights(result.output)
        assert "lm_head.weight" not in weights
        assert json.loads((result.output / "model/config.json").read_text())["tie_word_embeddings"] is True
        assert reference.weight_distance(weights, final) <= 1e-12
        assert reference.weight_distance(weights, whole.trace.weights) <= 1e-11


@pytest.mark.parametrize("max_grad_norm", [None, 1e9, 0.01])
def test_gradients_are_clipped_by_the_norm_over_all_ranks(judged, on_ranks, reference, changed, config, max_grad_norm):
    # torchtitan#766: each rank read the norm of its own shards.
    clipped = changed(config, {"max_grad_norm": max_grad_norm, "max_steps": 3})
    whole = judged(clipped)
    for count, parallel in [(2, {}), (2, {"dp_replicate": 2})] if max_grad_norm == 0.01 else [(2, {})]:
        result = on_ranks(count, changed(clipped, {"parallel": parallel}))
        assert reference.distance(result.column("grad_norm"), whole.trace.grad_norms) <= 1e-11
        assert min(result.column("grad_norm")) > 0.1, "nothing would be clipped"
        assert reference.weight_distance(reference.read_weights(result.output), whole.trace.weights) <= 1e-11


def note_reductions(rank: int, folder: str) -> None:
    """Notes each all-reduce of more than a number."""
    from pathlib import Path

    import torch.distributed as dist

    real = dist.all_reduce

    def all_reduce(tensor, *arguments, **more):
        if tensor.is_floating_point() and tensor.ndim:
            with (Path(folder) / f"rank{rank}").open("a") as file:
                file.write(f"{tensor.numel()}\n")
        return real(tensor, *arguments, **more)

    dist.all_reduce = all_reduce


@pytest.mark.parametrize("deferred", [False, True], ids=["after_each", "deferred"])
def test_copies_reduce_their_gradients_once_a_step(on_ranks, changed, config, tmp_path, deferred):
    section = {"dp_replicate": 2, "defer_gradient_reduction": deferred}
    changes = {"parallel": section, "global_batch_size": 8, "max_steps": 3}
    on_ranks(4, changed(config, changes), plant=(note_reductions, str(tmp_path)))  # two micro-batches a step
    groups = config["model"]["num_hidden_layers"] + 1  # each layer, and what lies around them
    for rank in range(4):
        assert len((tmp_path / f"rank{rank}").read_text().split()) == 3 * groups, rank


def test_float32_with_sgd_agrees_to_1e_5(run, on_ranks, reference, changed, config):
    single = changed(config, {"dtype": "float32", "param_dtype": "float32", "max_steps": 10})
    whole = run(single)
    print("\nfloat32, SGD, largest relative difference over 10 steps   losses   grad norms  weights")
    for count, copies, deferred in [(3, 1, True), (4, 2, False)]:
        section = {"dp_replicate": copies, "defer_gradient_reduction": deferred}
        result = on_ranks(count, changed(single, {"parallel": section}))
        assert_same_batches(result, whole)
        apart = [reference.distance(result.column(key), whole.column(key)) for key in ("loss", "grad_norm")]
        apart.append(reference.weight_distance(*map(reference.read_weights, (result.output, whole.output))))
        print(f"{layout_name(count, copies, deferred):60}" + "  ".join(f"{value:.1e}" for value in apart))
        assert max(apart) <= 1e-5, apart


def test_bfloat16_differs_between_layouts_by_rounding_alone(run, on_ranks, reference, changed, config):
    half = {"dtype": "bfloat16", "param_dtype": "float32", "optimizer": ADAMW, "max_steps": 10}
    half = changed(config, half | {"schedule": {"warmup_steps": 5}})
    whole = run(half)
    control = run(changed(half, {"micro_batch_size": 10}))
    columns = ("loss", "grad_norm")
    print("\nbfloat16, AdamW, largest relative difference over 10 steps   losses   grad norms")
    rounding = [reference.distance(control.column(key), whole.column(key)) for key in columns]
    print("one process, other micro-batches (control)                    " + "  ".join(f"{x:.1e}" for x in rounding))
    for count, copies, deferred in [(4, 2, True)]:
        section = {"dp_replicate": copies, "defer_gradient_reduction": deferred}
        result = on_ranks(count, changed(half, {"parallel": section}))
        assert_same_batches(result, whole)
        apart = [reference.distance(result.column(key), whole.column(key)) for key in columns]
        print(f"{layout_name(count, copies, deferred):62}" + "  ".join(f"{value:.1e}" for value in apart))
        assert apart[0] <= 3e-4 and apart[1] <= 1e-2, apart
        weights = reference.read_weights(result.output)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert all((tensor != 1).all() for name, tensor in weights.items() if "norm" in name)


def test_learning_rates_do_not_hang_on_ranks_or_micro_batches(on_ranks, reference, changed, config):
    # accelerate#963: warmup and decay ran as many times too fast as there were processes.
    schedule = {"name": "cosine", "warmup_steps": 4}
    small = {"hidden_size": 16, "num_hidden_layers": 1}
    changes = {"model": small, "optimizer": {"lr": 1e-3}, "schedule": schedule, "max_steps": 12, "global_batch_size": 4}
    expected = [reference.learning_rate(update, 12, 1e-3, schedule) for update in range(12)]
    for count, size in [(1, 4), (1, 1), (2, 2), (2, 1)]:
        rates = on_ranks(count, changed(config, {**changes, "micro_batch_size": size})).column("lr")
        assert max(rates) == rates[3] == 1e-3 and reference.distance(rates, expected) <= 1e-15, (count, size)


# ── Weights that were trained elsewhere ───────────────────────────────────────────────────────────────────────────────


def dirty_memory(rank: int) -> None:
    """Leaves memory behind that is not zero where the allocator takes from next."""
    import torch

    blocks = [torch.full((size,), 1e9) for size in (*range(16, 4096, 16), *[2**power for power in range(12, 22)] * 4)]
    del blocks


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stored_weights_are_the_same_model_on_every_rank(run, on_ranks, reference, changed, config, tied):
    # LlamaFactory#10820: what is in no file was left as memory happened to be on all ranks but the first.
    made = run(changed(config, {"model": {"tie_word_embeddings": tied}, "max_steps": 3}))
    assert made.exit_code == 0, made
    further = {key: value for key, value in config.items() if key != "model"} | {"max_steps": 3}
    further["model"] = {"path": str(made.output / "model")}
    whole = run(further)
    layouts = [(2, {"tp": 2})] if tied else [(2, {}), (4, {"dp_replicate": 2, "tp": 2})]
    for count, parallel in layouts:
        result = on_ranks(count, changed(further, {"parallel": parallel}), plant=(dirty_memory,))
        assert reference.distance(result.column("loss"), whole.column("loss")) <= 1e-12
        assert reference.weight_distance(*map(reference.read_weights, (result.output, whole.output))) <= 1e-12
    untouched = on_ranks(2, {**further, "max_steps": 0}, plant=(dirty_memory,))
    before, after = (reference.read_weights(result.output) for result in (made, untouched))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# ── Rows that do not come out even ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def five_rows(write_tokens, changed, config, tmp_path_factory) -> dict:
    """Five short documents, four rows a step, two a micro-batch, two epochs."""
    documents = np.random.default_rng(2).integers(0, 319, (5, 9)).tolist()
    tokens = write_tokens(tmp_path_factory.mktemp("five") / "tokens", documents, vocab_size=320)
    five = changed(
        config, {"data": {"train": str(tokens), "seq_len": 9}, "global_batch_size": 4, "micro_batch_size": 2}
    )
    five["epochs"] = 2
    del five["max_steps"]
    return five


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_an_epochs_last_rows_are_the_same_steps_on_all_ranks(judged, on_ranks, reference, changed, five_rows, tail):
    # torchtitan#1618: the last batch was there on one rank only.
    five = changed(five_rows, {"data": {"tail": tail}})
    whole = judged(five)
    assert [len(batch) for batch in whole.batches] == ([4, 4] if tail == "drop" else [4, 1, 4, 1])
    for count in (2, 4):
        result = on_ranks(count, five)
        assert_same_batches(result, whole.run)
        assert reference.delivered(result.output) == reference.delivered(whole.run.output)
        assert reference.distance(result.column("loss"), whole.trace.losses) <= 1e-11
        assert reference.distance(result.column("grad_norm"), whole.trace.grad_norms) <= 1e-11
        assert reference.weight_distance(reference.read_weights(result.output), whole.trace.weights) <= 1e-11


def test_validation_is_the_same_on_any_number_of_ranks(run, on_ranks, reference, changed, config, write_tokens,
                                                       tmp_path):  # fmt: skip
    # pytorch#25162: rows repeated to fill the last batch; prime-rl#2515: a rank with fewer left the others alone.
    random = np.random.default_rng(5)
    documents = [random.integers(0, 319, length).tolist() for length in (1, 30, 47, 3, 2, 1, 12, 5, 1, 0)]
    tokens = write_tokens(tmp_path / "validation", documents, vocab_size=320)
    changes = {"data": {"validation": str(tokens)}, "max_steps": 3, "validate_every": 2}
    changes |= {"global_batch_size": 4, "model": {"hidden_size": 32, "num_hidden_layers": 1}}
    rows = reference.read_rows(tokens, "padded", SEQUENCE)
    for count, micro_batch_size, limit in [(2, 1, 1), (4, 1, 3), (4, 2, 1), (2, 3, None)]:
        limited = changed(config, changes | {"micro_batch_size": micro_batch_size, "validation_max_rows": limit})
        ours, theirs = on_ranks(count, limited), run(limited)
        for result in (ours, theirs):
            lines = result.lines("validation")
            assert [line["step"] for line in lines] == [2, 3]
            assert {line["trained_tokens"] for line in lines} == {sum(map(len, documents[:limit]))}, (count, limit)
            expected = reference.mean_loss(reference.read_weights(result.output), limited["model"], rows[:limit])
            assert lines[-1]["loss"] == pytest.approx(expected, rel=1e-12)
        assert [line["loss"] for line in ours.lines("validation")] == pytest.approx(
            [line["loss"] for line in theirs.lines("validation")], rel=1e-12
        )
        assert reference.distance(ours.column("loss"), theirs.column("loss")) <= 1e-12  # it leaves the training alone
    untrained = write_tokens(tmp_path / "untrained", [[], [], [1, 2, 3]], vocab_size=320)
    changes |= {"data": {"validation": str(untrained)}, "validation_max_rows": 2, "max_steps": 1}
    (line,) = on_ranks(2, changed(config, changes)).lines("validation")
    assert (line["loss"], line["trained_tokens"]) == (None, 0)


def test_a_rank_without_a_trained_token_changes_nothing(judged, on_ranks, reference, changed, config, write_tokens,
                                                        tmp_path):  # fmt: skip
    # OLMo-core#657. Two rows a step in a fixed order: rank 1 has none to train in the first, no rank in the second.
    random = np.random.default_rng(4)
    documents = [random.integers(0, 319, length).tolist() for length in (8, 0, 0, 0, 5, 7)]
    changes = {
        "data": {
            "train": str(write_tokens(tmp_path / "tokens", documents, vocab_size=320)), "seq_len": 8, "shuffle": False,
        },
        "optimizer": ADAMW,
        "schedule": {"name": "linear"},
        "global_batch_size": 2,
        "max_steps": 3,
        "log": {"digests": True},
    }  # fmt: skip
    whole = judged(changed(config, changes))
    for count, parallel in [(2, {"dp_replicate": 2}), (3, {})]:
        result = on_ranks(count, changed(config, {**changes, "parallel": parallel}))
        assert_same_batches(result, whole.run)
        first, empty, last = result.lines("train")
        assert (empty["loss"], empty["grad_norm"], empty["trained_tokens"]) == (None, None, 0)
        for key in ("parameters_digest", "optimizer_digest"):
            assert len(first[key]) == count, f"{key} is not a list by rank"
            assert all(one == two for one, two in zip(first[key], empty[key], strict=True)), key
            assert all(one != two for one, two in zip(empty[key], last[key], strict=True)), key
            assert len(set(last[key])) == (1 if parallel else count), "copies are equal and shards are not"
        assert reference.distance(result.column("loss"), whole.trace.losses) <= 1e-11
        assert reference.weight_distance(reference.read_weights(result.output), whole.trace.weights) <= 1e-11


# ── What a run leaves, and how it may be started ──────────────────────────────────────────────────────────────────────


def test_metrics_have_the_published_keys_and_order(on_ranks, changed, config, uneven_tokens):
    saves = {"every": 1, "async_save": False}
    changes = {"data": {"validation": str(uneven_tokens)}, "max_steps": 2, "checkpoint": saves}
    result = on_ranks(2, changed(config, changes))
    start, *_ = result.lines()
    assert start.keys() == {
        "event", "recipe", "world_size", "parallel", "parameters", "trained_parameters", "rows", "rows_per_epoch",
        "rows_dropped", "rows_without_trained_tokens", "steps", "resumed_from",
    }  # fmt: skip
    assert start["parameters"] == start["trained_parameters"] == 115_008
    for line in result.lines("train"):
        assert line.keys() == {
            "event", "step", "epoch", "consumed_rows", "loss", "lr", "grad_norm", "trained_tokens", "batch_digest",
            "ledger", "seconds", "tokens_per_second", "peak_memory_bytes", "mfu",
        }  # fmt: skip
        assert line["tokens_per_second"] == pytest.approx(10 * SEQUENCE / line["seconds"], rel=1e-6)
        assert line["peak_memory_bytes"] > 2**26
    assert [line.keys() for line in result.lines("validation")] == [{"event", "step", "loss", "trained_tokens"}]
    checkpoints = result.lines("checkpoint")
    assert all(line.keys() == {"event", "step", "seconds_blocked", "seconds_total"} for line in checkpoints)
    order = [(line["event"], line["step"]) for line in result.lines()[1:]]
    assert order == [
        ("train", 1), ("checkpoint", 1), ("train", 2), ("validation", 2), ("checkpoint", 2), ("end", 2)
    ]  # fmt: skip
    names = {path.name for path in result.output.iterdir() if not path.name.startswith(".")}
    samples = {f"samples-rank{rank}.jsonl" for rank in range(2)}
    assert names == {"config.yaml", "metrics.jsonl", "checkpoints", "model"} | samples


def test_loader_workers_change_nothing(on_ranks, changed, config):
    short = changed(config, {"max_steps": 4, "micro_batch_size": 4})
    alone, helped = (on_ranks(2, changed(short, {"data": {"num_workers": workers}})) for workers in (0, 2))
    for key in ("loss", "grad_norm", "ledger", "consumed_rows"):
        assert alone.column(key) == helped.column(key)


def test_the_model_of_many_ranks_is_one_that_transformers_loads(on_ranks, reference, changed, config):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = {"dtype": "float32", "param_dtype": "float32", "max_steps": 2, "export": {"max_shard_bytes": 200_000}}
    result = on_ranks(4, changed(config, {**changes, "parallel": {"dp_replicate": 2}}))
    folder = result.output / "model"
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = torch.arange(96).view(2, SEQUENCE)
    with torch.no_grad():
        theirs = model(inputs).logits
    ours = reference.logits(reference.read_weights(result.output), config["model"], inputs)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("w5 w17").input_ids == [5, 17]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_python_torchrun_and_femto_run_start_the_same_training(run_ranks, reference, changed, config, write_config,
                                                                      monkeypatch):  # fmt: skip
    short = changed(config, {"max_steps": 3})
    whole = run_ranks(2, short)
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    file = importlib.util.find_spec("femto.recipes.distributed_pretrain").origin
    femto = Path(sys.executable).with_name("femto")
    launchers = {
        "python": ([sys.executable, file], 1),
        "torchrun": ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file], 2),
        "femto": ([str(femto), "run", "--nproc-per-node", "2", "distributed_pretrain"], 2),
    }
    started = {}
    try:
        for name, (command, _) in launchers.items():
            path = write_config(short)
            with (path.parent / "screen").open("w") as screen:
                process = subprocess.Popen([*command, "--config", str(path)], stdout=screen, stderr=screen)
            started[name] = path.parent, process
        codes = {name: process.wait(200) for name, (_, process) in started.items()}
    finally:
        for folder, process in started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # says where it hangs: PYTHONFAULTHANDLER
                process.wait(20)
            print(folder, (folder / "screen").read_text())
    assert codes == dict.fromkeys(launchers, 0)
    for name, (_, count) in launchers.items():
        lines = [json.loads(line) for line in (started[name][0] / "output/metrics.jsonl").read_text().splitlines()]
        assert lines[0]["world_size"] == count, name
        for key in ("loss", "grad_norm", "ledger"):
            column = [line[key] for line in lines if line["event"] == "train"]
            if key == "ledger" or count == 2:
                assert column == whole.column(key), (name, key)
            assert key == "ledger" or reference.distance(column, whole.column(key)) <= 1e-12, (name, key)


def test_launcher_variables_are_not_needed(on_ranks, run_ranks, changed, config):
    short = changed(config, {"max_steps": 2})
    launched, alone = on_ranks(1, short), run_ranks(1, short, plant=(forget_launcher,))
    assert alone.exit_codes == [0], alone
    for key in ("loss", "ledger"):
        assert alone.column(key) == launched.column(key)


def forget_launcher(rank: int) -> None:
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
