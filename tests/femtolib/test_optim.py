"""Optimizers against loops written out here, what weight decay touches, clipping, state that goes by name, and master
weights against the same steps made by hand."""

import copy
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

from femtolib.checkpoint import CheckpointWriter, load_tensors, tensor_shapes
from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import (
    LossScale,
    build_optimizer,
    clip_gradients,
    compute_copy,
    copy_weights,
    hand_over_gradients,
    make_room_for_state,
    set_learning_rate,
    training_tensors,
)
from femtolib.parallel.world import World
from femtolib.sections import OptimizerSection
from femtolib.weights import initialize_weights


@pytest.fixture(autouse=True)
def _one_thread():
    """A small model is slower on two, most of all where other tests run beside it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def decoder(tiny_llama):
    """`decoder(tied=False, …)`: a small model whose initial weights depend on nothing else."""

    def decoder(tied: bool = False, parameters: torch.dtype = torch.float32, computes: torch.dtype | None = None):
        config = ModelConfig.from_dict(tiny_llama | {"tie_word_embeddings": tied}, "", inline=True)
        with torch.device("meta"):
            model = Decoder(config, computes or parameters).to(parameters)
        model.to_empty(device="cpu")
        model.tie_weights()
        initialize_weights(model, seed=0)
        return model

    return decoder


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Updates on random ids that depend on the step alone."""
    for step in steps:
        ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(step))
        logits = model(ids[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten()).backward()
        set_learning_rate(optimizer, 1e-3 * (step + 1))
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ── Updates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        self.vector = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))


def gradients(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {"matrix": random.normal(size=(4, 3)), "vector": random.normal(size=3)}


def rate(step: int) -> float:
    return 0.1 / (step + 1)


def sgd(value, gradient, state, step, decay):
    """Decoupled weight decay: Loshchilov & Hutter 2019, algorithm 1."""
    state["m"] = 0.9 * state["m"] + gradient
    return value - rate(step) * state["m"] - rate(step) * decay * value


def adamw(value, gradient, state, step, decay):
    """The same, algorithm 2."""
    state["m"] = 0.8 * state["m"] + 0.2 * gradient
    state["v"] = 0.95 * state["v"] + 0.05 * gradient**2
    m, v = state["m"] / (1 - 0.8 ** (step + 1)), state["v"] / (1 - 0.95 ** (step + 1))
    return value - rate(step) * m / (np.sqrt(v) + 1e-6) - rate(step) * decay * value


@pytest.mark.parametrize(
    ("rule", "section"),
    [
        (sgd, {"name": "sgd", "momentum": 0.9, "weight_decay": 0.3}),
        (adamw, {"name": "adamw", "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}),
    ],
)
def test_updates_are_those_of_the_papers_with_decay_apart_from_the_gradient(rule, section):
    model = TwoParameters()
    optimizer = build_optimizer(model, OptimizerSection(**section))
    expected = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    states = {name: {"m": 0.0, "v": 0.0} for name in expected}
    for step in range(8):
        set_learning_rate(optimizer, rate(step))
        for name, gradient in gradients(step).items():
            getattr(model, name).grad = torch.from_numpy(gradient)
            decay = 0.3 if name == "matrix" else 0.0
            expected[name] = rule(expected[name], gradient, states[name], step, decay)
        optimizer.step()
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(model, name).detach().numpy(), value, rtol=1e-13, atol=1e-15)


def test_a_weight_without_a_gradient_is_left_alone():
    for section in ({"name": "sgd", "momentum": 0.9}, {"name": "adamw"}):
        model = TwoParameters()
        optimizer = build_optimizer(model, OptimizerSection(**section, weight_decay=0.5))
        before = weights(model)
        model.vector.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
        assert torch.equal(model.matrix, before["matrix"]) and not torch.equal(model.vector, before["vector"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("section", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}], ids=["adamw", "sgd"])
def test_weight_decay_shrinks_matrices_by_exactly_its_part_once_and_leaves_norms(decoder, section, tied):
    # minGPT#23, Fast-LLM#542: norm gains and biases shrank under weight decay.
    model = decoder(tied, torch.float64)
    optimizer = build_optimizer(model, OptimizerSection(**section, lr=0.1, weight_decay=0.1))
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = weights(model)
    assert ("lm_head.weight" in after) != tied and len(after) == 21 - tied
    for key, value in after.items():
        if value.ndim == 1:
            assert torch.equal(value, before[key]), key
        else:
            torch.testing.assert_close(value, before[key] * (1 - 0.01), rtol=4e-16, atol=0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(after)


def test_a_frozen_parameter_is_not_optimized(decoder):
    model = decoder()
    model.lm_head.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerSection())
    assert all(p is not model.lm_head.weight for group in optimizer.param_groups for p in group["params"])
    before = weights(model)
    train(model, optimizer, range(1))
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_float32_weights_move_where_bfloat16_would_round_every_update_away(decoder):
    # torchtune#2254: 1.0 - 1e-5 is 1.0 in bfloat16, and norm weights never moved.
    model = decoder(computes=torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerSection(lr=1e-5))
    for step in range(4):
        ids = torch.randint(0, 320, (4, 33), generator=torch.Generator().manual_seed(step))
        logits = model(ids[:, :-1])
        assert logits.dtype == torch.bfloat16
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter != 1).all(), name
            assert (parameter.detach().bfloat16() == 1).float().mean() > 0.9, name


# ── Clipping ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def set_gradients(model: nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).mul(scale).to(parameter.dtype)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 0.01, 1e9])
def test_the_norm_is_that_of_all_gradients_before_clipping(decoder, tied, dtype, max_norm):
    model = decoder(tied, dtype)
    before = set_gradients(model)
    norm = clip_gradients(model, max_norm)
    expected = math.sqrt(math.fsum(gradient.double().square().sum().item() for gradient in before.values()))
    assert isinstance(norm, float) and norm == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-14)
    for name, parameter in model.named_parameters():
        factor = max_norm / expected if max_norm == 0.01 else 1.0
        torch.testing.assert_close(parameter.grad, before[name] * factor, rtol=1e-6 if factor != 1 else 0, atol=0)


def test_the_norm_of_many_numbers_is_not_lost_to_rounding():
    # torch's norm for a CPU adds the squares in float32, one after another: 2e-4 off here, less for a shard of them.
    model = torch.nn.Linear(3_000, 2_001, bias=False)
    model.weight.grad = torch.randn(2_001, 3_000, generator=torch.Generator().manual_seed(0))
    expected = model.weight.grad.double().norm().item()
    assert abs(torch.nn.utils.get_total_norm([model.weight.grad]).item() / expected - 1) > 1e-5
    assert clip_gradients(model, None) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_changes_nothing(decoder, value):
    model = decoder()
    before = set_gradients(model)
    model.norm = model.get_parameter("model.norm.weight")
    model.norm.grad[3] = before["model.norm.weight"][3] = value
    assert not math.isfinite(clip_gradients(model, 1.0))
    for name, gradient in before.items():
        assert torch.equal(model.get_parameter(name).grad.nan_to_num(7), gradient.nan_to_num(7))


def test_without_a_gradient_the_norm_is_zero(decoder):
    model = decoder()
    assert clip_gradients(model, 1.0) == 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert clip_gradients(model, 1.0) == 0.0
    assert not any(parameter.grad.any() for parameter in model.parameters())


# ── State by name ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_tensors_are_the_weights_and_their_state_by_name(decoder):
    model = decoder(tied=True)
    optimizer = build_optimizer(model, OptimizerSection())
    names = [name for name, _ in model.named_parameters()]
    assert list(training_tensors(model, optimizer)) == [f"model.{name}" for name in names]
    train(model, optimizer, range(1))
    tensors = training_tensors(model, optimizer)
    expected = {f"model.{name}" for name in names}
    expected |= {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(tensors) == expected and not any("lm_head" in name for name in tensors)
    parameter = model.get_parameter("model.norm.weight")
    assert tensors["model.model.norm.weight"].data_ptr() == parameter.data_ptr()  # the tensor itself, to load into
    assert not tensors["model.model.norm.weight"].requires_grad


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "section",
    [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}, {"name": "sgd", "momentum": 0.0}],
    ids=["adamw", "momentum", "sgd"],
)
@pytest.mark.parametrize("stop", [0, 2])
def test_a_saved_and_loaded_optimizer_goes_on_bit_for_bit(decoder, tmp_path, section, tied, stop):
    section = OptimizerSection(**section)
    whole = decoder(tied)
    train(whole, build_optimizer(whole, section), range(3))

    first = decoder(tied)
    optimizer = build_optimizer(first, section)
    train(first, optimizer, range(stop))
    CheckpointWriter(tmp_path, keep_last=None, world=World()).save(
        stop, training_tensors(first, optimizer), {}, wait=True
    )
    path = tmp_path / f"step_{stop:08d}"

    second = decoder(tied)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.fill_(float("nan"))
    optimizer = build_optimizer(second, section)
    make_room_for_state(second, optimizer, tensor_shapes(path))
    load_tensors(path, training_tensors(second, optimizer))
    train(second, optimizer, range(stop, 3))
    for name, parameter in whole.named_parameters():
        assert torch.equal(second.get_parameter(name), parameter), name


def test_room_is_made_for_what_is_a_parameters_alone(decoder):
    model = decoder(parameters=torch.float64)
    optimizer = build_optimizer(model, OptimizerSection())
    shape = model.get_parameter("model.norm.weight").shape
    shapes = {"optimizer.model.norm.weight.exp_avg": shape, "optimizer.nobody.exp_avg": shape, "model.x": shape}
    make_room_for_state(model, optimizer, shapes | {"optimizer.model.norm.weight.step": torch.Size([])})
    state = optimizer.state[model.get_parameter("model.norm.weight")]
    assert len(optimizer.state) == 1 and set(state) == {"exp_avg", "step"}
    assert state["exp_avg"].shape == shape and state["exp_avg"].dtype == torch.float64
    assert state["step"].shape == () and state["step"].dtype == torch.float32


# ── Master weights ────────────────────────────────────────────────────────────────────────────────────────────────────


def token_ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length + 1), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, ids: torch.Tensor, micro_batches: int, scale: float = 1.0) -> None:
    """The gradient of the mean over all tokens, times `scale`, added up over so many micro-batches."""
    for rows in ids.chunk(micro_batches):
        loss = summed_cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        (loss * scale / ids[:, 1:].numel()).backward()


def addresses(tensors) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulates", [torch.float32, None], ids=["float32", "dtype"])
def test_a_compute_copy_is_the_masters_rounded_and_tied_and_frozen_as_they_are(decoder, dtype, accumulates, tied):
    masters = decoder(tied, computes=dtype)
    masters.get_parameter("model.norm.weight").requires_grad_(False)
    before = weights(masters)
    model = compute_copy(masters, dtype, accumulates or dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert [name for name, _ in model.named_parameters()] == list(before)
    assert not addresses(model.parameters()) & addresses(masters.parameters())
    for name, parameter in model.named_parameters():
        assert (
            isinstance(parameter, nn.Parameter) and parameter.is_leaf and torch.equal(parameter, before[name].to(dtype))
        )
        assert parameter.requires_grad == (name != "model.norm.weight"), name
    backward(model, token_ids(2, 16, 0), 2)
    for name, parameter in model.named_parameters():
        if name == "model.norm.weight":
            assert parameter.grad is None
        else:
            assert parameter.grad.dtype == (accumulates or dtype) and parameter.dtype == dtype, name
    assert all(parameter.grad is None for parameter in masters.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(parameter, before[name]) for name, parameter in masters.named_parameters())


@pytest.mark.parametrize("accumulates", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 96.0])
def test_gradients_are_handed_over_in_the_masters_dtype_divided_by_the_scale(decoder, accumulates, scale):
    masters = decoder(tied=True, computes=torch.bfloat16)
    masters.get_parameter("model.norm.weight").requires_grad_(False)
    model = compute_copy(masters, torch.bfloat16, accumulates)
    backward(model, token_ids(2, 16, 0), 1, scale)
    given = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    expected = {name: gradient.double() / scale for name, gradient in given.items()}
    hand_over_gradients(model, masters, divide_by=scale)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert masters.get_parameter("model.norm.weight").grad is None and len(given) == 19
    for name, gradient in expected.items():
        got = masters.get_parameter(name).grad
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got.double(), gradient, rtol=6e-8 if scale != 1 else 0, atol=1e-45)
        # Float32 is moved, not copied: at no time are there two of a large gradient.
        assert (got.data_ptr() == given[name].data_ptr()) == (accumulates == torch.float32), name


def test_where_the_masters_compute_there_is_nothing_to_move_or_to_copy(decoder):
    model = decoder()
    before = weights(model)
    expected = {name: gradient / 2 for name, gradient in set_gradients(model).items()}
    hand_over_gradients(model, model, divide_by=2.0)
    copy_weights(model, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]) and torch.equal(parameter, before[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_copied_back_rounded_into_the_same_tensors(decoder, dtype):
    masters = decoder(tied=True, computes=dtype)
    model = compute_copy(masters, dtype, torch.float32)
    places = addresses(model.parameters())
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.mul_(1.37).add_(0.001)
    changed = weights(masters)
    copy_weights(masters, model)
    assert addresses(model.parameters()) == places and model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, changed[name].to(dtype)), name
        assert parameter.is_leaf and parameter.grad_fn is None and parameter.requires_grad
        assert torch.equal(masters.get_parameter(name), changed[name])


@pytest.mark.parametrize(
    ("dtype", "scale", "accumulates"),
    [
        (torch.bfloat16, 1.0, torch.float32),
        (torch.bfloat16, 1.0, torch.bfloat16),
        (torch.float16, 2.0**10, torch.float32),
    ],
)
def test_mixed_precision_steps_are_those_of_the_paper_made_by_hand(decoder, dtype, scale, accumulates):
    # Micikevicius et al. 2018, figure 1. Each micro-batch's gradient is asked for on its own, from weights rounded for
    # it; sums, norm, clipping and AdamW are written out here.
    masters, pure = decoder(computes=dtype), decoder(computes=dtype)
    model = compute_copy(masters, dtype, accumulates)
    optimizer = build_optimizer(masters, OptimizerSection(betas=[0.8, 0.95], eps=1e-6, weight_decay=0.3))
    states = {name: {"m": 0.0, "v": 0.0} for name, _ in masters.named_parameters()}
    for step in range(3):
        ids, before = token_ids(4, 16, step), weights(masters)
        rounded = {name: value.to(dtype).requires_grad_() for name, value in before.items()}
        sums = {name: torch.zeros(value.shape, dtype=accumulates) for name, value in before.items()}
        for leaf in rounded.values():
            leaf.grad_dtype = accumulates  # a norm's is made in float32, and stays that where it may
        for row in ids.split(1):
            loss = summed_cross_entropy(torch.func.functional_call(pure, rounded, (row[:, :-1],)), row[:, 1:])
            found = torch.autograd.grad(loss * scale / ids[:, 1:].numel(), [*rounded.values()])
            for name, gradient in zip(rounded, found, strict=True):
                sums[name] += gradient
        expected = {name: gradient.double().numpy() / scale for name, gradient in sums.items()}
        norm = math.sqrt(math.fsum(float((gradient**2).sum()) for gradient in expected.values()))

        backward(model, ids, 4, scale)
        hand_over_gradients(model, masters, divide_by=scale)
        assert clip_gradients(masters, 0.5) == pytest.approx(norm, rel=1e-6) and norm > 0.5
        set_learning_rate(optimizer, rate(step))
        optimizer.step()
        copy_weights(masters, model)
        optimizer.zero_grad()
        for name, gradient in expected.items():
            decay = 0.3 if gradient.ndim > 1 else 0.0
            value = adamw(before[name].double().numpy(), gradient * (0.5 / norm), states[name], step, decay)
            found = masters.get_parameter(name).detach()
            np.testing.assert_allclose(found.numpy(), value, rtol=2e-7, atol=1e-6 * rate(step), err_msg=name)
            assert torch.equal(model.get_parameter(name), found.to(dtype))
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_masters_keep_what_bfloat16_parameters_round_away(decoder, lr):
    # torchtune#2254, AReaL#1369, Automodel#3444: 1.0 - 1e-3 is 1.0 in bfloat16, and norm weights never moved.
    masters, exact = decoder(computes=torch.bfloat16), decoder()
    model = compute_copy(masters, torch.bfloat16, torch.float32)
    pure = decoder(parameters=torch.bfloat16)
    section = OptimizerSection(lr=lr)
    losses = {}
    for name, computes, optimized in (("masters", model, masters), ("float32", exact, exact), ("pure", pure, pure)):
        optimizer = build_optimizer(optimized, section)
        losses[name] = []
        for _ in range(50):
            ids = token_ids(2, 16, 0)
            loss = summed_cross_entropy(computes(ids[:, :-1]), ids[:, 1:]) / ids[:, 1:].numel()
            loss.backward()
            hand_over_gradients(computes, optimized)
            optimizer.step()
            copy_weights(optimized, computes)
            optimizer.zero_grad()
            losses[name].append(loss.item())
    norms = [name for name, parameter in masters.named_parameters() if parameter.ndim == 1]
    assert len(norms) == 5
    for name in norms:
        assert (masters.get_parameter(name) != 1).all(), name
        if lr == 1e-5:
            assert torch.equal(pure.get_parameter(name), torch.ones(64, dtype=torch.bfloat16))  # what it guards against
    assert losses["masters"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["pure"][-1] > losses["masters"][-1] + 0.05


def test_float32_accumulation_costs_nothing_with_more_micro_batches_and_bfloat16_does(decoder):
    """One row a micro-batch, so that only the number of additions grows; the reference has the weights that bfloat16
    computes with, and computes in float64. tests/benchmarks/accumulation_error.py shows all numbers between."""
    masters = decoder(computes=torch.bfloat16)
    exact = decoder(parameters=torch.float64)
    with torch.no_grad():
        for parameter, master in zip(exact.parameters(), masters.parameters(), strict=True):
            parameter.copy_(master.bfloat16())

    def gradient(model: nn.Module, rows: torch.Tensor, micro_batches: int) -> torch.Tensor:
        backward(model, rows, micro_batches)
        found = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
        model.zero_grad()
        return found

    ids = token_ids(64, 16, 1)
    errors = {}
    for rows in (1, 64):
        right = gradient(exact, ids[:rows], 1)
        for dtype in (torch.float32, torch.bfloat16):
            found = gradient(compute_copy(masters, torch.bfloat16, dtype), ids[:rows], rows)
            errors[dtype, rows] = float((found - right).norm() / right.norm())
    assert errors[torch.float32, 64] <= 1.2 * errors[torch.float32, 1]
    assert errors[torch.bfloat16, 64] >= 1.5 * errors[torch.bfloat16, 1]
    assert errors[torch.bfloat16, 1] == pytest.approx(errors[torch.float32, 1], rel=1e-3)  # nothing is added yet


# ── The loss scale of float16 ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_loss_scale_is_halved_at_once_and_doubled_after_2000_steps_that_fit():
    scale = LossScale()
    assert asdict(scale) == {"value": 65536.0, "fitting": 0, "skipped": 0}
    scale.update(True)
    scale.update(True)
    assert asdict(scale) == {"value": 16384.0, "fitting": 0, "skipped": 2}
    for _ in range(1999):
        scale.update(False)
    assert scale.value == 16384.0
    kept = copy.deepcopy(scale)
    scale.update(False)
    assert asdict(scale) == {"value": 32768.0, "fitting": 0, "skipped": 2}
    kept.update(True)  # one short of it: counted anew
    assert asdict(kept) == {"value": 8192.0, "fitting": 0, "skipped": 3}


def test_the_loss_scale_goes_the_way_of_torchs_and_through_a_checkpoint():
    ours = LossScale()
    theirs, tracker = torch.tensor(2.0**16), torch.zeros((), dtype=torch.int32)
    overflows = np.random.default_rng(0).random(30_000) < 3e-4
    overflows[:20] = True  # as in the first steps of a run
    values = []
    for overflowed in overflows.tolist():
        ours = LossScale(**asdict(ours)) if len(values) % 777 == 0 else ours
        ours.update(overflowed)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflowed)), 2.0, 0.5, 2000)
        assert (ours.value, ours.fitting) == (theirs.item(), tracker.item())
        values.append(ours.value)
    assert ours.skipped == overflows.sum() and len(set(values)) > 10 and max(values) == 2.0**15
