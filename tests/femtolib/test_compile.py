"""Whether compiled parts compute what the others do, once a graph and not once a layer or a step; and what is told."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from femtolib.attention import plan_attention
from femtolib.compile import Compiler
from femtolib.errors import FemtoError
from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import build_optimizer, set_learning_rate, training_tensors
from femtolib.sections import CompileSection, OptimizerSection
from femtolib.weights import initialize_weights

CPU = torch.device("cpu")


def train(section: CompileSection, documents: torch.Tensor | None, optimizer: str) -> tuple[list, dict, list]:
    """Losses, weights and reports of three steps of a model of two layers."""
    keys = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Decoder(ModelConfig.from_dict(keys, "", inline=True), torch.float64).double()
    initialize_weights(model, 0)
    compiler = Compiler(section, CPU)
    compiler.layers(model)
    compute_loss = compiler.loss(summed_cross_entropy)
    optimizer = build_optimizer(model, OptimizerSection(name=optimizer, lr=0.1))
    compiler.step(optimizer)
    losses, reports = [], []
    for step in range(3):
        ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(step))
        attend = plan_attention(documents, device=CPU, dtype=torch.float64)
        loss = compute_loss(model(ids[:, :-1], None, attend), ids[:, 1:])
        loss.backward()
        set_learning_rate(optimizer, 0.01 * (step + 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        reports.append(compiler.report())
    assert list(dict(model.named_parameters())) == list(dict(Decoder(model.config, torch.float64).named_parameters()))
    return losses, dict(model.named_parameters()), reports


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not shutil.which("g++"), reason="code for a CPU is made by g++")
def test_a_compiled_training_is_the_same_from_few_graphs(ranks):
    documents = (torch.arange(16) // 5).expand(2, 16)

    def compare() -> None:
        losses, weights, reports = train(CompileSection(), documents, "adamw")
        assert reports == [None] * 3
        section = CompileSection(model=True, loss=True, optimizer=True)
        compiled_losses, compiled_weights, reports = train(section, documents, "adamw")
        assert compiled_losses[0] == pytest.approx(losses[0], rel=1e-14)  # before an update
        assert compiled_losses == pytest.approx(losses, rel=1e-8)
        for name, weight in weights.items():
            torch.testing.assert_close(compiled_weights[name], weight, rtol=1e-5, atol=1e-7)
        # Equal layers are one graph; the update is compiled in pieces where it cannot be whole.
        for part in ("layer (graphs: 1)", "loss (graphs: 1)", "update ("):
            assert part in reports[0]
        assert reports[1:] == [None, None]

    # Not here: ranks that are forked after a compilation wait for its pool of compilers, which no fork has.
    ranks(1, compare, seconds=380)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="code for a CPU is made by g++")
@pytest.mark.parametrize(("name", "bound"), [("sgd", 1e-14), ("adamw", 1e-6)])
def test_a_compiled_update_of_shards_is_that_of_whole_parameters(ranks, name, bound):
    # Given parts, the compiler took the first step's gradients for constants.
    section = OptimizerSection(name=name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0)

    def train(mesh: DeviceMesh | None) -> list[torch.Tensor]:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, [Shard(0)]) if mesh else tensor

        random = torch.Generator().manual_seed(0)
        model = torch.nn.Linear(4, 6, dtype=torch.float64)
        for key, parameter in list(model.named_parameters()):
            whole = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            setattr(model, key, torch.nn.Parameter(cut(whole)))
        optimizer = build_optimizer(model, section)
        if mesh:
            Compiler(CompileSection(optimizer=True), CPU).step(optimizer)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = cut(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
            set_learning_rate(optimizer, 0.1 * (step + 1))
            optimizer.step()
        trained = training_tensors(model, optimizer)
        return [value.full_tensor() if mesh and value.ndim else value for value in trained.values()]

    def compare() -> list[float]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        pairs = zip(train(mesh), train(None), strict=True)
        return [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]

    for found in ranks(2, compare, seconds=240):
        assert max(found) <= bound, found


def test_a_missing_compiler_is_said_before_any_work(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    Compiler(CompileSection(), CPU)
    with pytest.raises(FemtoError, match="no-such-compiler is not installed"):
        Compiler(CompileSection(loss=True), CPU)


def test_momentum_is_there_before_an_update_is_compiled():
    # Made within it, on two tensor parallel ranks of a model with biases, it ended the run in the compiler.
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    Compiler(CompileSection(optimizer=True), CPU).step(optimizer)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.zeros(3))
    plain = torch.optim.SGD([parameter], lr=0.1)
    Compiler(CompileSection(optimizer=True), CPU).step(plain)
    assert not plain.state
