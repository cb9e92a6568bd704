"""Optimizers against loops written out here, what weight decay touches, clipping, and state that goes by name."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from femtolib.checkpoint import load_tensors, save_checkpoint, tensor_shapes
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import build_optimizer, clip_gradients, make_room_for_state, set_learning_rate, training_tensors
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
    path = save_checkpoint(tmp_path, stop, training_tensors(first, optimizer), {})

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
