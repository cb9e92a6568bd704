"""Whether data parallel training with our own sum of gradients is the training of one process: against the
single-device recipe and the independent loop, in float64, over ranks, micro-batches and ways to send; and whether
computing in a smaller dtype keeps what the masters are for."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader

RECIPE = "data_parallel_pretrain"
SEQUENCE = 48
STEPS = 20
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-3, "momentum": 0.0}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def config(tiny_llama, uneven_tokens) -> dict:
    """Ten rows a step in float64, two a micro-batch, one document a row, some without a token and one with eighty."""
    return {
        "device": "cpu",
        "threads": 1,
        "dtype": "float64",
        "param_dtype": "float64",
        "model": tiny_llama | {"hidden_size": 32, "intermediate_size": 64},
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": SEQUENCE},
        "global_batch_size": 10,
        "micro_batch_size": 2,
        "max_steps": STEPS,
        "optimizer": SGD,
        "log": {"samples": True, "digests": True},
    }


@pytest.fixture(scope="module")
def small(changed, config) -> dict:
    """The same with a smaller model and short rows, AdamW with warmup, and fewer steps."""
    changes = {"model": SMALL, "data": {"seq_len": 16}, "optimizer": ADAMW, "schedule": {"warmup_steps": 3}}
    return changed(config, changes | {"global_batch_size": 8, "micro_batch_size": 1, "max_steps": 6})


@pytest.fixture(scope="module")
def on_ranks(run_ranks):
    """`on_ranks(count, config)`: a run that ends well on every rank, says nothing but what rank 0 has to say, and had
    the same weights and optimizer state on every rank after each step."""

    def on_ranks(count: int, *arguments, **more):
        result = run_ranks(count, *arguments, **{"recipe": RECIPE, **more})
        assert result.exit_codes == [0] * count and result.stderr == "", result
        assert all(out == "" for out, _ in result.screens[1:]), result
        for line in result.lines("train"):
            for key in ("parameters_digest", "optimizer_digest"):
                assert len(line[key]) == count and len(set(line[key])) == 1, (key, line)
        return result

    return on_ranks


def assert_same_batches(ours, theirs) -> None:
    """All that does not hang on rounding, line by line."""
    for key in ("step", "epoch", "consumed_rows", "trained_tokens", "lr", "batch_digest", "ledger"):
        assert ours.column(key) == theirs.column(key), key


def assert_bit_equal(ours, theirs) -> None:
    assert_same_batches(ours, theirs)
    for key in ("loss", "grad_norm"):
        assert ours.column(key) == theirs.column(key), key
    for key in ("parameters_digest", "optimizer_digest"):
        assert [line[0] for line in ours.column(key)] == [line[0] for line in theirs.column(key)], key
    assert (ours.output / "model/model.safetensors").read_bytes() == (
        theirs.output / "model/model.safetensors"
    ).read_bytes()


def apart(reference, ours, theirs) -> list[float]:
    """The largest relative differences of losses, gradient norms and final weights."""
    columns = [reference.distance(ours.column(key), theirs.column(key)) for key in ("loss", "grad_norm")]
    return [*columns, reference.weight_distance(*map(reference.read_weights, (ours.output, theirs.output)))]


def show(name: str, figures: list[float]) -> None:
    print(f"{name:52}" + "  ".join(f"{value:.1e}" for value in figures))


# ── The same training on every number of ranks ────────────────────────────────────────────────────────────────────────


def keep_weights(rank: int, folder: str) -> None:
    """Rank 0 keeps what the optimizer has made of the weights in every step."""
    from pathlib import Path

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = iter(range(1, 1000))

    def hook(optimizer, *_) -> None:
        weights = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
        torch.save(weights, Path(folder) / f"{next(steps)}.pt")

    if rank == 0:
        register_optimizer_step_post_hook(hook)


def kept(folder: Path) -> list[list[torch.Tensor]]:
    return [torch.load(folder / f"{step}.pt") for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def judged(run, reference, tmp_path_factory):
    """`judged(config)`: the single-device run with its weights after every step, the reference's run on its rows,
    forwards and with the rows of every batch in reverse order, and its initial weights."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def judged(config: dict) -> SimpleNamespace:
        initial = run(config, "max_steps=0")
        assert initial.exit_code == 0, initial
        steps: list[list[torch.Tensor]] = []

        def hook(optimizer, *_) -> None:
            steps.append([weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]])

        handle = register_optimizer_step_post_hook(hook)
        result = run(config)
        handle.remove()
        assert result.exit_code == 0, result
        # Once a plain torch.optim.SGD was made in this process, a step of femto's, which calls its, calls hooks twice.
        times, left = divmod(len(steps), STEPS)
        assert times in (1, 2) and not left
        steps = steps[times - 1 :: times]
        data = config["data"]
        rows = reference.read_rows(Path(data["train"]), data["rows"], data["seq_len"])
        batches = [[rows[i] for i in step] for step in reference.delivered(result.output)]
        weights = reference.read_weights(initial.output)
        trace = reference.train(weights, config, batches, total=len(batches))
        control = reference.train(weights, config, [batch[::-1] for batch in batches], total=len(batches))
        return SimpleNamespace(run=result, steps=steps, weights=weights, batches=batches, trace=trace, control=control)

    return judged


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_every_number_of_ranks_is_the_same_training(judged, on_ranks, reference, changed, config, name, tmp_path):
    adamw = {"optimizer": ADAMW, "schedule": {"warmup_steps": 5, "min_lr_ratio": 0.1}, "data": {"tail": "pad"}}
    config = changed(config, adamw if name == "adamw" else {"optimizer": SGD})
    whole = judged(config)
    trace, control = whole.trace, whole.control
    digests = [reference.batch_digest(batch, masked=True) for batch in whole.batches]

    # Rounding alone: the reference against itself with the rows of every batch in reverse order.
    rounding = [
        reference.distance(control.losses, trace.losses),
        reference.distance(control.grad_norms, trace.grad_norms),
        reference.weight_distance(control.weights, trace.weights),
    ]
    bounds = [max(1e-12, 10 * value if value > 1e-13 else 0) for value in rounding]
    bounds[2] = 1e-12 if name == "sgd" else 1e-10
    print(f"\n{name}, largest relative difference over {STEPS} steps      losses   grad norms  weights  after any step")
    show("reversed rows (control)", rounding)
    for count in (
        (1, 2, 4) if name == "sgd" else (2, 4)
    ):  # 5, 3 and 2 micro-batches a step: of 4 ranks the last has no row in its second
        folder = tmp_path / str(count)
        folder.mkdir()
        result = on_ranks(count, config, plant=(keep_weights, str(folder)))
        figures = apart(reference, result, whole.run)
        after_steps = [
            float((ours - theirs).abs().max() / theirs.abs().max())
            for step, others in zip(kept(folder), whole.steps, strict=True)
            for ours, theirs in zip(step, others, strict=True)
        ]
        show(f"{count} rank(s)", [*figures, max(after_steps)])
        assert all(value <= bound for value, bound in zip(figures, bounds, strict=True)), (count, figures, rounding)
        assert max(after_steps) <= bounds[2], (count, max(after_steps))
        assert reference.distance(result.column("loss"), trace.losses) <= 1e-10, count
        assert reference.distance(result.column("grad_norm"), trace.grad_norms) <= 1e-10, count
        weights = reference.read_weights(result.output)
        assert reference.weight_distance(weights, trace.weights) <= 1e-10, count
        assert_same_batches(result, whole.run)
        assert result.column("batch_digest") == digests and result.column("ledger") == reference.ledger(digests)
        assert reference.delivered(result.output) == reference.delivered(whole.run.output), count
        (start,) = result.lines("start")
        assert (start["recipe"], start["world_size"]) == (RECIPE, count)
        assert start["parallel"] == {"dp_replicate": count, "dp_shard": 1, "cp": 1, "tp": 1}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_same_order_of_addition_is_the_same_to_the_bit(run, on_ranks, changed, small, dtype):
    # Two ranks add two gradients, one process those of two micro-batches: of the same rows, in the same order.
    two = changed(small, {"dtype": dtype, "param_dtype": dtype, "micro_batch_size": 4})
    whole = run(two)
    assert whole.exit_code == 0, whole
    assert_bit_equal(on_ranks(2, two), whole)


def test_a_copy_in_bfloat16_is_the_same_to_the_bit_on_two_ranks(on_ranks, changed, small):
    half = {"dtype": "bfloat16", "param_dtype": "float32", "micro_batch_size": 4}
    for accumulate_in in ("float32", "dtype"):
        two = changed(small, half | {"accumulate_in": accumulate_in, "max_steps": 4})
        assert_bit_equal(on_ranks(2, two), on_ranks(1, two))


def test_rows_may_come_in_any_number_of_micro_batches(run, on_ranks, reference, changed, small):
    whole = run(small)
    print("\neight rows a step, largest relative difference         losses   grad norms  weights")
    for count, sizes in [(1, (8, 4, 2, 1)), (2, (8, 4, 2, 1))]:  # with 8, rank 1 has empty rows alone
        for size in sizes:
            result = on_ranks(count, small, f"micro_batch_size={size}")
            figures = apart(reference, result, whole)
            show(f"{count} rank(s), micro-batches of {size}", figures)
            assert_same_batches(result, whole)
            assert reference.delivered(result.output) == reference.delivered(whole.output)
            assert max(figures) <= 1e-12, (count, size, figures)


def test_a_tied_matrix_is_one_matrix_on_every_rank(run, on_ranks, reference, changed, small):
    # NeMo-RL#227: a tied embedding and head drift apart.
    tied = changed(small, {"model": {"tie_word_embeddings": True}})
    result = on_ranks(2, tied)
    assert max(apart(reference, result, run(tied))) <= 1e-12
    assert "lm_head.weight" not in reference.read_weights(result.output)
    half = on_ranks(2, tied, "dtype=bfloat16", "param_dtype=float32")
    assert half.column("loss")[-1] == pytest.approx(result.column("loss")[-1], rel=0.02)
    assert "lm_head.weight" not in reference.read_weights(half.output)


def test_a_model_that_one_rank_alone_has_changed_is_rank_0s_everywhere(on_ranks, changed, small):
    # The seed makes the same weights everywhere; the broadcast is for where it does not. Masters and copy are two.
    half = changed(small, {"dtype": "bfloat16", "param_dtype": "float32", "max_steps": 3})
    assert_bit_equal(on_ranks(2, half, plant=(starts_from_other_weights, 1)), on_ranks(2, half))


def starts_from_other_weights(rank: int, victim: int) -> None:
    import femto.recipes.data_parallel_pretrain as recipe

    real = recipe.initialize_weights
    if rank == victim:
        recipe.initialize_weights = lambda model, seed: real(model, seed + 1)


# ── Ways to send ──────────────────────────────────────────────────────────────────────────────────────────────────────


def note_reductions(rank: int, folder: str) -> None:
    """Notes the size of each sum of gradients."""
    from pathlib import Path

    import torch.distributed as dist

    real = dist.all_reduce

    def all_reduce(tensor, *arguments, **more):
        if tensor.is_floating_point() and tensor.ndim:
            with (Path(folder) / f"rank{rank}").open("a") as file:
                file.write(f"{tensor.numel()}\n")
        return real(tensor, *arguments, **more)

    dist.all_reduce = all_reduce


def test_how_gradients_are_sent_changes_no_bit(on_ranks, small, tmp_path):
    whole = on_ranks(2, small)  # four micro-batches a step
    (start,) = whole.lines("start")
    numbers = {}
    for name, overrides in {
        "each alone": ["gradient_sync.bucket_mb=0"],
        "10 kB": ["gradient_sync.bucket_mb=0.01"],
        "after the backward pass": ["gradient_sync.overlap=false", "gradient_sync.bucket_mb=0.01"],
        "unused": ["gradient_sync.find_unused_parameters=true"],
        "static": ["gradient_sync.static_graph=true", "gradient_sync.bucket_mb=25"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        result = on_ranks(2, small, *overrides, plant=(note_reductions, str(folder)))
        assert_bit_equal(result, whole)
        sizes = [(folder / f"rank{rank}").read_text().split() for rank in range(2)]
        assert sizes[0] == sizes[1], name
        # Once a step, whatever the number of micro-batches: each step sends as many numbers as there are parameters.
        assert sum(map(int, sizes[0])) == 6 * start["parameters"], name
        numbers[name] = len(sizes[0])
    print(f"\nsums of gradients in 6 steps: {numbers}")
    assert numbers["each alone"] == 6 * 12 and numbers["unused"] == numbers["static"] == 6
    assert 6 < numbers["10 kB"] == numbers["after the backward pass"] < 6 * 12


def test_gradients_sent_in_a_smaller_dtype_are_off_by_its_rounding(on_ranks, reference, changed, small):
    sgd = changed(small, {"optimizer": SGD})
    whole = on_ranks(2, sgd)
    print("\ngradients of float64 sent in                          losses   grad norms  weights")
    for dtype, least, most in [("float32", 1e-11, 1e-6), ("bfloat16", 1e-6, 1e-2)]:
        result = on_ranks(2, sgd, f"gradient_sync.communication_dtype={dtype}")
        figures = apart(reference, result, whole)
        show(dtype, figures)
        assert_same_batches(result, whole)
        assert least <= figures[1] <= most and figures[0] <= most and figures[2] <= most, (dtype, figures)


# ── What is done to gradients ─────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_are_clipped_by_norm_and_then_by_value_after_their_sum(run, on_ranks, reference, changed, small):
    plain = {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    clipped = changed(small, {"optimizer": plain, "schedule": {"name": "constant", "warmup_steps": 0}, "max_steps": 1})
    before = reference.read_weights(run(clipped, "max_steps=0").output)
    max_norm, max_value = 0.5, 0.01
    result = on_ranks(2, clipped, f"max_grad_norm={max_norm}", f"max_grad_value={max_value}")
    rows = reference.read_rows(Path(small["data"]["train"]), "padded", small["data"]["seq_len"])
    batch = [rows[i] for i in reference.delivered(result.output)[0]]
    weights = {name: weight.clone().requires_grad_() for name, weight in before.items()}
    scores = reference.logits(weights, clipped["model"], torch.tensor([row.input_ids for row in batch]))
    loss = F.cross_entropy(scores.flatten(0, 1), torch.tensor([row.labels for row in batch]).flatten())
    gradients = torch.autograd.grad(loss, weights.values())
    norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients))
    assert result.column("grad_norm") == pytest.approx([norm.item()], rel=1e-12)  # what it was before
    scaled = [gradient * (max_norm / (norm + 1e-6)) for gradient in gradients]
    cut = sum(int((gradient.abs() > max_value).sum()) for gradient in scaled)
    of = sum(gradient.numel() for gradient in scaled)
    print(f"\n{cut} of {of} elements clipped to {max_value}, after the norm from {norm:.3f} to {max_norm}")
    assert 10 < cut < of / 2 and norm > max_norm
    expected = {
        name: weight - gradient.clamp(-max_value, max_value)
        for (name, weight), gradient in zip(before.items(), scaled, strict=True)
    }
    assert reference.weight_distance(reference.read_weights(result.output), expected) <= 1e-12


def test_the_learning_rate_grows_with_the_batch_where_it_is_told_to(run, run_ranks, reference, changed, small):
    # A batch of 8 rows, and a rate that was found for batches of two.
    scaled = changed(small, {"optimizer": {"lr_reference_batch_size": 2}})
    peak = 1e-3 * 8 / 2
    expected = [reference.learning_rate(update, 6, peak, {"warmup_steps": 3}) for update in range(6)]
    whole = run(scaled)
    by_hand = run(changed(small, {"optimizer": {"lr": peak}}))
    results = [whole, run_ranks(2, scaled, recipe=RECIPE), run_ranks(2, scaled, recipe="distributed_pretrain")]
    for result in results:
        assert result.exit_code == 0, result
        assert max(result.column("lr")) == pytest.approx(peak, rel=1e-15)
        assert reference.distance(result.column("lr"), expected) <= 1e-15
        assert reference.distance(result.column("loss"), by_hand.column("loss")) <= 1e-12
        assert f"peak learning rate: {peak:.3g}, for 8 rows a step instead of 2" in result.stdout


# ── Computing in a smaller dtype ──────────────────────────────────────────────────────────────────────────────────────


def saved_dtypes(output: Path) -> dict[str, torch.dtype]:
    """Of the tensors of the last checkpoint, which is in torch's own format."""
    path = max((output / "checkpoints").glob("step_*"))
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tensor.properties.dtype for name, tensor in metadata.items()}


def test_smaller_dtypes_train_and_leave_float32(run, on_ranks, reference, changed, small, write_tokens, tmp_path):
    documents = [[(7 * row + 3 * place) % 40 for place in range(20)] for row in range(200)]  # there is much to learn
    single = changed(
        small,
        {
            "dtype": "float32",
            "param_dtype": "float32",
            "data": {"train": str(write_tokens(tmp_path / "tokens", documents, vocab_size=320))},
            "optimizer": {"lr": 1e-2},
            "max_steps": 24,
        },
    )
    whole = run(single)
    losses = whole.column("loss")
    print(f"\nfloat32: loss {losses[0]:.2f} to {losses[-1]:.2f}             relative: losses   grad norms  weights")
    for dtype, accumulate_in in [("bfloat16", "float32"), ("bfloat16", "dtype"), ("float16", "float32")]:
        result = on_ranks(2, single, f"dtype={dtype}", f"accumulate_in={accumulate_in}")
        figures = apart(reference, result, whole)
        show(f"{dtype}, added in {accumulate_in}", figures)
        assert_same_batches(result, whole)
        assert losses[-1] < 0.7 * losses[0] and result.column("loss")[-1] < 0.7 * losses[0]
        assert 1e-6 < figures[0] <= 0.02, (dtype, accumulate_in, figures)  # it is another dtype, and no other training
        saved = saved_dtypes(result.output)
        assert len(saved) == (1 + 3) * 12 and {*saved.values()} == {torch.float32}  # weights, moments, counts
        exported = reference.read_weights(result.output)
        assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
        assert not all(torch.equal(t, t.to(getattr(torch, dtype)).float()) for t in exported.values()), "rounded"
        assert json.loads((result.output / "model/config.json").read_text())["dtype"] == "float32"
        scaled = dtype == "float16"
        assert set(result.column("loss_scale")) == {2.0**16 if scaled else None}
        assert set(result.column("skipped_updates")) == {0 if scaled else None}


def test_masters_keep_updates_that_a_bfloat16_loses(on_ranks, reference, changed, small):
    # torchtune#2254: norm weights in bfloat16 never moved: 1 − 1e-3 rounds to 1.
    tiny = {"optimizer": {"lr": 1e-5}, "schedule": {"name": "constant", "warmup_steps": 0}, "max_steps": 3}
    half = changed(small, tiny | {"dtype": "bfloat16", "param_dtype": "float32"})
    for count in (1, 2):
        weights = reference.read_weights(on_ranks(count, half).output)
        norms = [tensor for name, tensor in weights.items() if "norm" in name]
        assert len(norms) == 3
        for tensor in norms:
            assert (tensor != 1).all() and ((tensor - 1).abs() < 1e-4).all()
            assert (tensor.bfloat16() == 1).all(), "nothing would have been lost"


def overflow(rank: int, victim: int, steps: list[int], value: float) -> None:
    """On this rank a gradient overflows in these passes that send, from 1; the loss scale starts at `value`."""
    import torch

    import femto.recipes.data_parallel_pretrain as recipe

    copy, scale, passes = recipe.compute_copy, recipe.LossScale, [0]

    def compute_copy(*arguments):
        model = copy(*arguments)

        def hook(parameter) -> None:
            passes[0] += 1
            if rank == victim and passes[0] in steps:
                parameter.grad[0] = torch.inf

        next(model.parameters()).register_post_accumulate_grad_hook(hook)
        return model

    recipe.compute_copy = compute_copy
    recipe.LossScale = lambda **state: scale(**({"value": value} | state))


def test_an_overflow_on_one_rank_is_a_step_that_all_skip(on_ranks, changed, small):
    half = changed(small, {"dtype": "float16", "param_dtype": "float32", "micro_batch_size": 4})  # one a rank
    result = on_ranks(2, half, plant=(overflow, 1, [2, 4], 2.0**14))
    assert result.column("skipped_updates") == [0, 1, 1, 2, 2, 2]
    assert result.column("loss_scale") == [2.0**power for power in (14, 13, 13, 12, 12, 12)]
    assert [norm is None for norm in result.column("grad_norm")] == [False, True, False, True, False, False]
    assert all(loss is not None for loss in result.column("loss"))
    for key in ("parameters_digest", "optimizer_digest"):
        column = result.column(key)
        assert [one == two for one, two in itertools.pairwise(column)] == [True, False, True, False, False]
    assert result.column("loss")[:2] == on_ranks(2, half).column("loss")[:2]  # another scale rounds nothing else


def test_a_loss_scale_too_large_is_halved_until_it_fits(on_ranks, changed, small):
    still = {"optimizer": {"lr": 1e-9}, "max_steps": 14}  # so that the gradients of a step do not hang on those before
    half = changed(small, {"dtype": "float16", "param_dtype": "float32", **still})
    result = on_ranks(2, half, plant=(overflow, 1, [], 2.0**28))
    skipped = result.column("skipped_updates")
    print(f"\nscale from 2^28: skipped {skipped}")
    assert skipped[:3] == [1, 2, 3] and 4 <= skipped[-1] < 14 and skipped[-1] == skipped[-2]
    assert result.column("loss_scale") == [2.0 ** (28 - number) for number in skipped]
    norms, theirs = result.column("grad_norm"), on_ranks(2, half).column("grad_norm")
    assert norms[: skipped[-1]] == [None] * skipped[-1]
    assert norms[skipped[-1] :] == pytest.approx(theirs[skipped[-1] :], rel=0.01)  # the scale is taken out again


# ── Validation ────────────────────────────────────────────────────────────────────────────────────────────────────────


def note_validation(rank: int, folder: str) -> None:
    """Notes how many tokens this rank validates in each of its passes."""
    from pathlib import Path

    import torch

    import femto.recipes.data_parallel_pretrain as recipe

    real = recipe.summed_cross_entropy

    def loss(logits, labels):
        if not torch.is_grad_enabled():
            with (Path(folder) / f"rank{rank}").open("a") as file:
                file.write(f"{int((labels != -100).sum())}\n")
        return real(logits, labels)

    recipe.summed_cross_entropy = loss


def test_each_rank_validates_its_share_and_the_loss_is_one_processs(run, on_ranks, reference, changed, small,
                                                                    write_tokens, tmp_path):  # fmt: skip
    # pytorch#25162: rows repeated to fill the last batch; prime-rl#2515: a rank with fewer left the others alone.
    random = np.random.default_rng(5)
    lengths = (1, 15, 12, 3, 2, 1, 12, 5, 1, 9, 4)
    documents = [random.integers(0, 319, length).tolist() for length in lengths]
    tokens = write_tokens(tmp_path / "validation", documents, vocab_size=320)
    changes = {"data": {"validation": str(tokens)}, "max_steps": 3, "validate_every": 2}
    rows = reference.read_rows(tokens, "padded", 16)
    for count, size, limit in [(2, 1, None), (4, 2, 1)]:
        limited = changed(small, changes | {"micro_batch_size": size, "validation_max_rows": limit})
        folder = tmp_path / f"{count}-{size}-{limit}"
        folder.mkdir()
        ours, theirs = on_ranks(count, limited, plant=(note_validation, str(folder))), run(limited)
        assert [line["step"] for line in ours.lines("validation")] == [2, 3]
        assert {line["trained_tokens"] for line in ours.lines("validation")} == {sum(lengths[:limit])}
        expected = reference.mean_loss(reference.read_weights(ours.output), limited["model"], rows[:limit])
        assert ours.lines("validation")[-1]["loss"] == pytest.approx(expected, rel=1e-12)
        both = ([line["loss"] for line in result.lines("validation")] for result in (ours, theirs))
        assert reference.distance(*both) <= 1e-12
        assert reference.distance(ours.column("loss"), theirs.column("loss")) <= 1e-12  # it leaves the training alone
        shares = [[*map(int, (folder / f"rank{rank}").read_text().split())] for rank in range(count)]
        passes = -(-(limit or 11) // (count * size))
        assert all(len(share) == 2 * passes for share in shares), shares
        # A batch of validation is rows in their order, the first `size` of them rank 0's, and so on.
        of_ranks = [
            sum(length for row, length in enumerate(lengths[:limit]) if row // size % count == rank)
            for rank in range(count)
        ]
        assert [sum(share) for share in shares] == [2 * tokens for tokens in of_ranks]
