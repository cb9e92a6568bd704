"""Whether the recipe computes what it says: against an independent loop in float64, over every split of the global
batch, and through transformers. Rows are taken from what the run wrote down, never from femto's own classes."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

SEQUENCE = 48
STEPS = 20
SPLITS = {
    10: 1,
    5: 2,
    4: 3,
    2: 5,
    1: 10,
}  # micro_batch_size: micro-batches a step; with 4 two rows of the last are empty
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-3, "momentum": 0.0}


@pytest.fixture
def config(tiny_llama, uneven_tokens) -> dict:
    """Ten rows a step in float64, one document a row, the longest with eighty times the tokens of the shortest."""
    return {
        "device": "cpu",
        "threads": 1,
        "dtype": "float64",
        "param_dtype": "float64",
        "model": tiny_llama,
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": SEQUENCE},
        "global_batch_size": 10,
        "micro_batch_size": 10,
        "max_steps": STEPS,
        "optimizer": SGD,
        "log": {"samples": True},
    }


@pytest.fixture
def judged(run, reference):
    """`judged(config)`: a run, the reference's run on the rows that it saw, and how far the two are apart."""

    def judged(config: dict) -> SimpleNamespace:
        untrained = {key: value for key, value in config.items() if key != "epochs"} | {"max_steps": 0}
        initial = run(untrained)
        assert initial.exit_code == 0, initial
        result = run(config)
        assert result.exit_code == 0, result
        data = config["data"]
        rows = reference.read_rows(Path(data["train"]), data["rows"], data["seq_len"])
        batches = [[rows[i] for i in step] for step in reference.delivered(result.output)]
        weights = reference.read_weights(initial.output)
        trace = reference.train(weights, config, batches, total=len(batches))
        backwards = reference.train(weights, config, [batch[::-1] for batch in batches], total=len(batches))
        return SimpleNamespace(run=result, weights=weights, rows=rows, batches=batches, trace=trace, control=backwards)

    return judged


# ── One global batch, however it is split ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD},
        {"optimizer": ADAMW, "schedule": {"warmup_steps": 5, "min_lr_ratio": 0.1}, "data": {"tail": "pad"}},
    ],
    ids=["sgd", "adamw"],
)
def test_every_split_of_the_global_batch_is_the_same_training(run, judged, reference, changed, config, changes):
    # transformers#35203 and torchtune#1875: micro-batch means averaged; here the counts in a batch differ 48-fold.
    config = changed(config, changes)
    whole = judged(config)
    trace, control = whole.trace, whole.control
    counts = whole.run.column("trained_tokens")
    assert len(counts) == STEPS and counts == [
        sum(label != -100 for row in batch for label in row.labels) for batch in whole.batches
    ]
    assert reference.distance(whole.run.column("loss"), trace.losses) <= 1e-10
    assert reference.distance(whole.run.column("grad_norm"), trace.grad_norms) <= 1e-10
    assert reference.distance(whole.run.column("lr"), trace.lrs) <= 1e-15
    assert reference.weight_distance(reference.read_weights(whole.run.output), trace.weights) <= 1e-10

    digests = [reference.batch_digest(batch, masked=True) for batch in whole.batches]
    assert whole.run.column("batch_digest") == digests
    assert whole.run.column("ledger") == reference.ledger(digests)

    # Rounding alone: the reference against itself with the rows of every batch in reverse order.
    rounding = [
        reference.distance(control.losses, trace.losses),
        reference.distance(control.grad_norms, trace.grad_norms),
        reference.weight_distance(control.weights, trace.weights),
    ]
    bounds = [max(1e-12, 10 * value) for value in rounding]
    print("\nlargest relative difference over 20 steps   losses    grad norms  weights")
    print("reversed rows (control)                   " + "  ".join(f"{value:.1e}" for value in rounding))
    final = reference.read_weights(whole.run.output)
    for size, micro_batches in SPLITS.items():
        if size == 10:
            continue
        split = run(changed(config, {"micro_batch_size": size}))
        assert split.exit_code == 0, split
        apart = [
            reference.distance(split.column("loss"), whole.run.column("loss")),
            reference.distance(split.column("grad_norm"), whole.run.column("grad_norm")),
            reference.weight_distance(reference.read_weights(split.output), final),
        ]
        print(
            f"{micro_batches:2} micro-batches of {size}                       " + "  ".join(f"{x:.1e}" for x in apart)
        )
        assert all(value <= bound for value, bound in zip(apart, bounds, strict=True)), (size, apart, rounding)
        for key in ("batch_digest", "ledger", "trained_tokens", "consumed_rows", "lr", "epoch"):
            assert split.column(key) == whole.run.column(key), (size, key)
        samples = [json.loads(line) for line in (split.output / "samples-rank0.jsonl").read_text().splitlines()]
        assert all(len(line["rows"]) <= size for line in samples)
        assert reference.delivered(split.output) == reference.delivered(whole.run.output)


def test_one_trained_token_weighs_the_same_in_a_short_row_as_in_a_long_one(judged, reference, write_tokens, changed,
                                                                           config, tmp_path):  # fmt: skip
    tokens = write_tokens(tmp_path / "tokens", [[7], list(range(20, 29))], vocab_size=320)
    changes = {"data": {"train": str(tokens), "shuffle": False}, "global_batch_size": 2, "max_steps": 1}
    for size in (2, 1):
        both = judged(changed(config, {**changes, "micro_batch_size": size}))
        assert both.run.column("trained_tokens") == [10]
        short, long = ([row] for row in both.rows)
        parts = [reference.mean_loss(both.weights, config["model"], rows) for rows in (short, long)]
        expected = (1 * parts[0] + 9 * parts[1]) / 10
        assert both.run.column("loss")[0] == pytest.approx(expected, rel=1e-12)
        assert abs(parts[0] - parts[1]) > 1e-3, "the two rows would not show a mean of means"
        assert reference.weight_distance(reference.read_weights(both.run.output), both.trace.weights) <= 1e-12


def test_the_gradient_norm_of_equal_rows_does_not_depend_on_the_micro_batch(judged, reference, changed, config,
                                                                           tagged_tokens):  # fmt: skip
    # unsloth-zoo#1023: the loss divided by the token count and once more by the number of micro-batches.
    model = {"vocab_size": 13_000, "num_hidden_layers": 1}
    data = {"train": str(tagged_tokens), "rows": "stream", "seq_len": 16}
    changes = {"model": model, "data": data, "global_batch_size": 4, "max_steps": 2, "max_grad_norm": None}
    for size in (4, 1):
        both = judged(changed(config, {**changes, "micro_batch_size": size}))
        assert reference.distance(both.run.column("grad_norm"), both.trace.grad_norms) <= 1e-11
        assert reference.distance(both.run.column("loss"), both.trace.losses) <= 1e-11
        digests = [reference.batch_digest(batch, masked=False) for batch in both.batches]
        assert both.run.column("batch_digest") == digests


def test_a_tied_matrix_is_decayed_and_updated_once(judged, reference, changed, config):
    tied = changed(config, {"model": {"tie_word_embeddings": True}, "optimizer": ADAMW, "max_steps": 5})
    both = judged(tied)
    final = reference.read_weights(both.run.output)
    assert not {"model.embed_tokens.weight", "lm_head.weight"} <= final.keys()
    assert json.loads((both.run.output / "model/config.json").read_text())["tie_word_embeddings"] is True
    assert reference.weight_distance(final, both.trace.weights) <= 1e-11


def test_weight_decay_shrinks_matrices_alone(run, reference, changed, config):
    # An id that never occurs has no gradient, so its embedding shrinks by lr × decay exactly; norms are judged above.
    decayed = changed(config, {"optimizer": ADAMW | {"lr": 0.1, "weight_decay": 0.1}, "max_steps": 1})
    result = run(decayed)
    initial = run(changed(decayed, {"max_steps": 0}))
    seen = {token for row in _rows_of(result, reference, decayed) for token in row.input_ids}
    unseen = [token for token in range(320) if token not in seen]
    assert len(unseen) > 20
    before, after = (reference.read_weights(r.output)["model.embed_tokens.weight"][unseen] for r in (initial, result))
    torch.testing.assert_close(after, before * (1 - 0.01), rtol=1e-15, atol=0)


def _rows_of(result, reference, config: dict) -> list:
    data = config["data"]
    rows = reference.read_rows(Path(data["train"]), data["rows"], data["seq_len"])
    return [rows[i] for step in reference.delivered(result.output) for i in step]


# ── Steps, epochs and the order of the rows ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def five_rows(write_tokens, changed, config, tmp_path) -> dict:
    """Five short documents, three rows a step, one row a micro-batch, two epochs."""
    documents = np.random.default_rng(2).integers(0, 319, (5, 9)).tolist()
    tokens = write_tokens(tmp_path / "tokens", documents, vocab_size=320)
    five = changed(
        config, {"data": {"train": str(tokens), "seq_len": 9}, "global_batch_size": 3, "micro_batch_size": 1}
    )
    five["epochs"] = 2
    del five["max_steps"]
    return five


def test_a_padded_tail_trains_the_last_rows_with_their_full_weight(judged, reference, changed, five_rows):
    # transformers#39659: a fixed divisor made the last update of every epoch too small.
    both = judged(changed(five_rows, {"data": {"tail": "pad"}}))
    assert [len(batch) for batch in both.batches] == [3, 2, 3, 2]
    assert both.run.column("epoch") == [0, 0, 1, 1]
    assert both.run.column("consumed_rows") == [3, 5, 8, 10]
    assert reference.distance(both.run.column("loss"), both.trace.losses) <= 1e-11
    assert reference.distance(both.run.column("grad_norm"), both.trace.grad_norms) <= 1e-11
    assert reference.weight_distance(reference.read_weights(both.run.output), both.trace.weights) <= 1e-11
    (start,) = both.run.lines("start")
    assert (start["rows"], start["rows_per_epoch"], start["rows_dropped"], start["steps"]) == (5, 5, 0, 4)
    delivered = reference.delivered(both.run.output)
    assert sorted(delivered[0] + delivered[1]) == sorted(delivered[2] + delivered[3]) == [0, 1, 2, 3, 4]


def test_a_dropped_tail_leaves_no_gradient_to_the_next_epoch(judged, reference, changed, five_rows):
    # transformers#22082: gradients of a tail that had not been applied leaked into the next epoch.
    both = judged(changed(five_rows, {"data": {"tail": "drop"}}))
    assert [len(batch) for batch in both.batches] == [3, 3]
    (start,) = both.run.lines("start")
    assert (start["rows_per_epoch"], start["rows_dropped"], start["steps"]) == (3, 2, 2)
    assert reference.weight_distance(reference.read_weights(both.run.output), both.trace.weights) <= 1e-11


def test_fewer_rows_than_a_global_batch_are_one_padded_update_and_never_none(judged, run, reference, changed,
                                                                            five_rows):  # fmt: skip
    # transformers#14309: no update at all, exit 0.
    few = changed(five_rows, {"global_batch_size": 8, "epochs": 1})
    both = judged(changed(few, {"data": {"tail": "pad"}}))
    assert len(both.batches) == 1 and sorted(reference.delivered(both.run.output)[0]) == [0, 1, 2, 3, 4]
    assert reference.weight_distance(reference.read_weights(both.run.output), both.trace.weights) <= 1e-11
    refused = run(changed(few, {"data": {"tail": "drop"}}))
    assert refused.exit_code == 2 and not refused.output.exists()
    assert "5" in refused.errors[0] and "8" in refused.errors[0]


def test_every_epoch_is_another_permutation_and_the_seed_decides_it(run, reference, changed, config, write_tokens,
                                                                    tmp_path):  # fmt: skip
    # pytorch#31771: every epoch in the same order.
    documents = np.random.default_rng(3).integers(0, 319, (16, 8)).tolist()
    tokens = write_tokens(tmp_path / "tokens", documents, vocab_size=320)
    data = {"train": str(tokens), "seq_len": 8}
    sixteen = changed(config, {"data": data, "global_batch_size": 4, "micro_batch_size": 4, "max_steps": 12})

    def order(**changes) -> list[int]:
        steps = reference.delivered(run(changed(sixteen, changes)).output)
        return [row for step in steps for row in step]

    seed7, again, seed8 = order(seed=7), order(seed=7), order(seed=8)
    epochs = [seed7[i : i + 16] for i in (0, 16, 32)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert seed7 == again != seed8
    assert order(data={"shuffle": False}) == 3 * list(range(16))


# ── Rows without a trained token ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def partly_empty(write_tokens, changed, config, tmp_path) -> dict:
    """Six documents in a fixed order, two a step: the second is an EOS alone, and so are both of the second step."""
    random = np.random.default_rng(4)
    documents = [random.integers(0, 319, length).tolist() for length in (8, 0, 0, 0, 5, 7)]
    tokens = write_tokens(tmp_path / "tokens", documents, vocab_size=320)
    changes = {
        "data": {"train": str(tokens), "seq_len": 8, "shuffle": False},
        "optimizer": ADAMW,
        "schedule": {"name": "linear"},
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "max_steps": 3,
        "log": {"digests": True},
    }
    return changed(config, changes)


def test_a_batch_without_a_trained_token_is_a_step_that_updates_nothing(judged, reference, partly_empty):
    # nanochat#618: NaN weights, or a cheerful loss of 0.0.
    both = judged(partly_empty)
    first, empty, last = both.run.lines("train")
    assert (empty["loss"], empty["grad_norm"], empty["trained_tokens"]) == (None, None, 0)
    assert empty["parameters_digest"] == first["parameters_digest"] != last["parameters_digest"]
    assert empty["optimizer_digest"] == first["optimizer_digest"] != last["optimizer_digest"]
    assert [line["step"] for line in (first, empty, last)] == [1, 2, 3]
    assert reference.distance(both.run.column("lr"), [1e-3, 1e-3 * 2 / 3, 1e-3 / 3]) <= 1e-15
    assert reference.distance(both.run.column("loss"), both.trace.losses) <= 1e-11
    assert reference.weight_distance(reference.read_weights(both.run.output), both.trace.weights) <= 1e-11
    assert both.run.lines("start")[0]["rows_without_trained_tokens"] == 3


def test_a_data_set_without_a_trained_token_is_refused(run, write_tokens, changed, partly_empty, tmp_path):
    tokens = write_tokens(tmp_path / "empty", [[], [], []], vocab_size=320)
    refused = run(changed(partly_empty, {"data": {"train": str(tokens)}}))
    assert refused.exit_code == 2 and len(refused.errors) == 1 and not refused.output.exists()
    assert "3 of 3" in refused.errors[0], refused


# ── The learning rate ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1},
        {"name": "linear", "warmup_steps": 4},
        {"name": "constant", "warmup_steps": 4},
        {"name": "wsd", "warmup_steps": 4, "decay_steps": 5, "min_lr_ratio": 0.2},
    ],
    ids=lambda schedule: schedule["name"],
)
def test_learning_rates_follow_the_formula_whatever_the_micro_batch(run, reference, changed, config, schedule):
    # accelerate#963: the schedule advanced once a micro-batch.
    changes = {"optimizer": {"lr": 1e-3}, "schedule": schedule, "max_steps": 12, "global_batch_size": 4}
    expected = [reference.learning_rate(update, 12, 1e-3, schedule) for update in range(12)]
    assert max(expected) == 1e-3 == expected[3]
    seen = [run(changed(config, {**changes, "micro_batch_size": size})).column("lr") for size in (4, 2, 1)]
    assert reference.distance(seen[0], expected) <= 1e-15
    assert seen[0] == seen[1] == seen[2]


def test_the_horizon_of_the_schedule_is_the_number_of_updates(run, changed, config, write_tokens, tmp_path):
    # speculators#1104: the horizon came from the epoch, so the cosine never reached its end.
    tokens = write_tokens(tmp_path / "tokens", [list(range(300)) for _ in range(14)], vocab_size=320)
    changes = {"data": {"train": str(tokens), "rows": "stream", "seq_len": 4}, "max_steps": 10, "global_batch_size": 1,
               "micro_batch_size": 1, "optimizer": {"lr": 1e-3}, "schedule": {"warmup_steps": 2}}  # fmt: skip
    result = run(changed(config, changes))
    assert result.lines("start")[0]["rows_per_epoch"] > 1000
    rates = result.column("lr")
    assert len(rates) == 10 and rates[9] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 7 / 8)), rel=1e-14)
    assert rates[9] == pytest.approx(3.806e-05, rel=1e-4)


def test_epochs_with_a_padded_tail_log_one_rate_for_each_update(run, reference, changed, five_rows):
    three = changed(five_rows, {"epochs": 3, "data": {"tail": "pad"}, "optimizer": {"lr": 1e-3}})
    expected = [reference.learning_rate(update, 6, 1e-3, {}) for update in range(6)]
    assert reference.distance(run(three).column("lr"), expected) <= 1e-15


# ── Validation, precision, a loss that is not finite ──────────────────────────────────────────────────────────────────


def test_validation_counts_every_row_once_whatever_the_micro_batch(run, reference, changed, config, write_tokens,
                                                                  tmp_path):  # fmt: skip
    # pytorch#25162: rows repeated to fill the last batch.
    random = np.random.default_rng(5)
    documents = [random.integers(0, 319, length).tolist() for length in (1, 1, 2, 30, 47, 3, 1, 12, 5, 1)]
    tokens = write_tokens(tmp_path / "validation", documents, vocab_size=320)
    changes = {"data": {"validation": str(tokens)}, "max_steps": 5, "validate_every": 2}
    rows = reference.read_rows(tokens, "padded", SEQUENCE)
    for size in (1, 4, 10):
        result = run(changed(config, {**changes, "micro_batch_size": size}))
        lines = result.lines("validation")
        assert [line["step"] for line in lines] == [2, 4, 5]
        assert {line["trained_tokens"] for line in lines} == {sum(map(len, documents))}
        expected = reference.mean_loss(reference.read_weights(result.output), config["model"], rows)
        assert lines[-1]["loss"] == pytest.approx(expected, rel=1e-11)
        events = [(line["event"], line["step"]) for line in result.lines("train", "validation")]
        assert events.index(("validation", 2)) == events.index(("train", 2)) + 1

    few = run(changed(config, {**changes, "micro_batch_size": 4, "validation_max_rows": 5}))
    assert few.lines("validation")[-1]["trained_tokens"] == sum(map(len, documents[:5]))
    # Validation leaves the training alone.
    without = run(changed(config, {"max_steps": 5, "micro_batch_size": 4}))
    assert few.column("loss") == without.column("loss")


def test_bfloat16_computes_in_bfloat16_and_stores_in_float32(run, reference, changed, config):
    # torchtune#2254: norm weights never move when an update of less than half a spacing is rounded away.
    half = {"dtype": "bfloat16", "param_dtype": "float32", "export": {"dtype": "bfloat16"}}
    changes = {"optimizer": ADAMW, "schedule": {"name": "constant"}, "max_steps": 50}
    changes |= {"global_batch_size": 4, "micro_batch_size": 4}
    full = run(changed(config, {**changes, "dtype": "float32", "param_dtype": "float32"}))
    ours = run(changed(config, {**changes, **half, "export": {"dtype": None}}))
    assert ours.exit_code == 0, ours
    assert ours.column("loss") != full.column("loss")
    assert reference.distance(ours.column("loss"), full.column("loss")) < 0.02
    final = reference.read_weights(ours.output)
    assert {tensor.dtype for tensor in final.values()} == {torch.float32}
    slow = run(changed(config, {**changes, **half, "optimizer": ADAMW | {"lr": 1e-5}, "export": {"dtype": None}}))
    for weights in (final, reference.read_weights(slow.output)):
        norms = [tensor for name, tensor in weights.items() if "norm" in name]
        assert norms and all((tensor != 1).all() for tensor in norms)

    exported = run(changed(config, {**changes, **half, "max_steps": 2}))
    assert {tensor.dtype for tensor in reference.read_weights(exported.output).values()} == {torch.bfloat16}
    assert "bfloat16" in (exported.output / "model/config.json").read_text()


@pytest.fixture
def explosive(changed, config) -> dict:
    """SGD at a rate that drives float32 beyond its range within a few updates; a save after each."""
    changes = {"optimizer": {"lr": 9e5}, "max_grad_norm": None, "schedule": {"name": "constant"}}
    changes |= {"dtype": "float32", "param_dtype": "float32", "checkpoint": {"every": 1}}
    return changed(config, changes)


def assert_stopped(result) -> int:
    """Ended by a number that is not finite, nothing of it logged, saved or published; returns the last step made."""
    assert result.exit_code == 1 and len(result.errors) == 1 and "Traceback" not in result.stderr, result
    assert "nan" in result.errors[0] or "inf" in result.errors[0], result
    trained, saved = result.lines("train"), result.output / "checkpoints"
    assert result.lines()[-1] == {"event": "end", "step": len(trained), "reason": "non_finite"}
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in trained)
    assert not (result.output / "model").exists()
    names = sorted(path.name for path in saved.glob("*"))
    assert names == [f"step_{line['step']:08d}" for line in trained], names
    return len(trained)


def test_a_training_that_explodes_is_stopped_before_the_update_that_spoils_it(run, explosive):
    assert 1 <= assert_stopped(run(explosive)) < STEPS


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "loss nan"), (1e30, "norm inf")], ids=["loss", "norm"])
def test_a_loss_or_a_norm_that_is_not_finite_stops_the_run_before_the_first_update(run, explosive, value, shown):
    made = run({**explosive, "max_steps": 0})
    path = made.output / "model/model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][5:50, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    result = run({**explosive, "model": {"path": str(made.output / "model")}})
    assert assert_stopped(result) == 0 and shown in result.errors[0], result


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("every", [1, None])
def test_weights_that_are_not_finite_are_never_published(run, changed, explosive, uneven_tokens, every, validated):
    # An eps of 0 in float32 makes 0/0 of every embedding that had no gradient: the update itself spoils the weights,
    # after a loss and a gradient norm that were fine.
    changes = {"optimizer": ADAMW | {"eps": 1e-60}, "checkpoint": {"every": every}, "max_steps": 1}
    changes |= {"data": {"validation": str(uneven_tokens)}} if validated else {}
    result = run(changed(explosive, changes))
    assert result.exit_code == 1 and len(result.errors) == 1 and "finite" in result.errors[0], result
    assert "Traceback" not in result.stderr and result.lines()[-1]["reason"] == "non_finite"
    assert not (result.output / "model").exists() and not list((result.output / "checkpoints").glob("*"))


def test_validation_rows_without_a_trained_token_have_no_loss(run, changed, config, write_tokens, tmp_path):
    tokens = write_tokens(tmp_path / "validation", [[], [], [1, 2, 3]], vocab_size=320)
    changes = {"data": {"validation": str(tokens)}, "max_steps": 1, "validation_max_rows": 2}
    result = run(changed(config, changes))
    assert result.exit_code == 0, result
    (line,) = result.lines("validation")
    assert (line["loss"], line["trained_tokens"]) == (None, 0)


# ── The files of a run, and other tools ───────────────────────────────────────────────────────────────────────────────


def test_metrics_have_the_published_keys_and_nothing_else(run, changed, config, uneven_tokens):
    changes = {
        "data": {"validation": str(uneven_tokens)},
        "max_steps": 2,
        "checkpoint": {"every": 1, "async_save": False},
    }
    result = run(changed(config, changes))
    start, *_ = result.lines()
    assert start.keys() == {
        "event", "recipe", "world_size", "parallel", "parameters", "trained_parameters", "rows", "rows_per_epoch",
        "rows_dropped", "rows_without_trained_tokens", "steps", "resumed_from",
    }  # fmt: skip
    assert (start["recipe"], start["world_size"], start["resumed_from"]) == ("single_device_pretrain", 1, None)
    assert start["parameters"] == start["trained_parameters"] == 115_008
    assert (start["rows"], start["rows_per_epoch"], start["rows_dropped"], start["steps"]) == (37, 30, 7, 2)
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
    assert result.lines("end")[0]["reason"] == "completed"


def test_the_digest_of_the_parameters_is_that_of_the_published_weights(run, changed, config, reference):
    result = run(changed(config, {"max_steps": 1, "log": {"digests": True}}))
    weights = reference.read_weights(result.output)
    layer = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    names = ["model.embed_tokens", *(f"model.layers.{i}.{part}" for i in (0, 1) for part in layer)]
    names += ["model.norm", "lm_head"]
    assert {f"{name}.weight" for name in names} == weights.keys()
    digests = set()
    for prefix in ("", "model."):
        sha256 = hashlib.sha256()
        for name in (f"{name}.weight" for name in names):
            sha256.update((prefix + name).encode() + weights[name].numpy().tobytes())
        digests.add(sha256.hexdigest()[:16])
    assert set(result.lines("train")[0]["parameters_digest"]) & digests


def test_the_resolved_config_is_complete_and_runs_again_as_it_is(run, config, changed, tmp_path, reference):
    short = changed(config, {"max_steps": 2})
    first = run(short)
    resolved_path = first.output / "config.yaml"
    resolved = yaml.safe_load(resolved_path.read_text())
    assert resolved["optimizer"]["weight_decay"] == 0.1 and resolved["schedule"]["name"] == "cosine"
    assert resolved["data"]["tail"] == "drop" and resolved["max_grad_norm"] == 1.0 and resolved["resume"] == "auto"
    again = run(resolved_path, f"output_dir={tmp_path / 'again'}")
    assert again.exit_code == 0, again
    assert again.column("loss") == first.column("loss")
    assert reference.weight_distance(reference.read_weights(again.output), reference.read_weights(first.output)) == 0
    finished = run(resolved_path)
    assert finished.exit_code == 0 and len(finished.lines("train")) == 2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_the_model_and_computes_the_same(run, reference, changed, config, uneven_tokens, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = {"dtype": "float32", "param_dtype": "float32", "max_steps": 2, "export": {"max_shard_bytes": 200_000}}
    changes |= {
        "model": {"tie_word_embeddings": tied, "rope_theta": 500_000.0},
        "data": {"validation": str(uneven_tokens)},
    }
    result = run(changed(config, changes))
    assert len(list((result.output / "model").glob("*.safetensors"))) > 1
    model, report = AutoModelForCausalLM.from_pretrained(result.output / "model", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = reference.read_rows(uneven_tokens, "padded", SEQUENCE)
    inputs, labels = (torch.tensor([getattr(row, key) for row in rows]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        theirs = model(inputs).logits
    ours = reference.logits(reference.read_weights(result.output), {**config["model"], **changes["model"]}, inputs)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    assert result.lines("validation")[-1]["loss"] == pytest.approx(float(loss), rel=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(result.output / "model")
    assert tokenizer("w5 w17").input_ids == [5, 17] and tokenizer.eos_token_id == 319


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_saved_by_transformers_trains_on(run, reference, changed, config, tmp_path, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    theirs = LlamaForCausalLM(LlamaConfig(**{**config["model"], "tie_word_embeddings": tied}))
    theirs.save_pretrained(tmp_path / "theirs")
    path = {"path": str(tmp_path / "theirs")}
    base = {key: value for key, value in config.items() if key != "model"}
    base |= {"dtype": "float32", "param_dtype": "float32", "max_steps": 1}
    untouched = run({**base, "model": path, "max_steps": 0})
    assert untouched.exit_code == 0, untouched
    saved, ours = (reference.read_weights(o) for o in (_as_output(tmp_path / "theirs"), untouched.output))
    assert saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in saved)

    result = run({**base, "model": path})
    rows = _rows_of(result, reference, config)
    inputs, labels = (torch.tensor([getattr(row, key) for row in rows]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), labels.flatten())
    assert result.column("loss")[0] == pytest.approx(float(loss), rel=1e-6)

    random = run({**base, "model": {**path, "weights": "random"}, "max_steps": 0})
    inline = run({**base, "model": {**config["model"], "tie_word_embeddings": tied}, "max_steps": 0})
    drawn, drawn_inline = reference.read_weights(random.output), reference.read_weights(inline.output)
    assert all(torch.equal(drawn[name], drawn_inline[name]) for name in drawn)
    assert not torch.equal(drawn["model.embed_tokens.weight"], saved["model.embed_tokens.weight"])


def _as_output(model: Path) -> Path:
    """An output folder whose `model` this is."""
    link = model.parent / "as_output"
    link.mkdir()
    (link / "model").symlink_to(model)
    return link


def test_the_reference_agrees_with_transformers(reference, tiny_llama):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(6)
    model = LlamaForCausalLM(LlamaConfig(**tiny_llama))
    inputs = torch.randint(0, 320, (3, 128))
    with torch.no_grad():
        torch.testing.assert_close(
            reference.logits(dict(model.named_parameters()), tiny_llama, inputs), model(inputs).logits,
            rtol=0, atol=1e-5,
        )  # fmt: skip


def test_launcher_variables_mean_nothing_to_a_single_device_recipe(run, changed, config, monkeypatch):
    # pytorch#73320: a job joins another one by variables that it inherited.
    plain = run(changed(config, {"max_steps": 2}))
    for key, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(key, value)
    launched = run(changed(config, {"max_steps": 2}))
    assert launched.exit_code == 0 and launched.lines("start")[0]["world_size"] == 1
    assert launched.column("ledger") == plain.column("ledger") and launched.column("loss") == plain.column("loss")


def test_loader_workers_change_nothing(run, changed, config):
    short = changed(config, {"max_steps": 6, "micro_batch_size": 4})
    alone, helped = (run(changed(short, {"data": {"num_workers": workers}})) for workers in (0, 2))
    assert helped.exit_code == 0, helped
    for key in ("loss", "grad_norm", "ledger", "consumed_rows"):
        assert alone.column(key) == helped.column(key)


def test_the_profiler_writes_a_trace(run, changed, config):
    result = run(changed(config, {"max_steps": 4, "profile": {"start": 2, "steps": 2}}))
    assert result.exit_code == 0, result
    (trace,) = (result.output / "profile").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("scaled_dot_product" in str(name) for name in names)
    cut_short = run(changed(config, {"max_steps": 3, "profile": {"start": 3, "steps": 5}}))
    assert cut_short.exit_code == 0 and list((cut_short.output / "profile").iterdir()), cut_short


def test_tensorboard_gets_the_losses(run, changed, config):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(changed(config, {"max_steps": 4, "log": {"tensorboard": True, "every": 2}}))
    assert result.exit_code == 0, result
    (file,) = result.output.rglob("events.out.tfevents*")
    events = accumulator.EventAccumulator(str(file.parent)).Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if "loss" in tag]
    seen = {event.step: event.value for event in events.Scalars(tag)}
    assert seen.keys() == {2, 4} and seen[4] == pytest.approx(result.column("loss")[3], rel=1e-6)


def test_a_warmup_longer_than_the_run_is_told(run, changed, config):
    result = run(changed(config, {"max_steps": 2, "schedule": {"warmup_steps": 30}}))
    assert result.exit_code == 0 and "warmup_steps" in result.stdout + result.stderr, result
    assert result.column("lr") == [0.1 * 1 / 30, 0.1 * 2 / 30]
