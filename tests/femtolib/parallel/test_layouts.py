"""Whether a model cut along all dimensions at once is the model of one process: losses, gradients, norms and weights in
float64, for every layout of 2, 4 and 8 ranks. Recipes show the same over whole runs; here each rank trains both."""

import copy
import ctypes

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from femtolib.attention import plan_attention
from femtolib.data.loader import collate
from femtolib.data.sampler import Slot
from femtolib.data.token_dataset import Row
from femtolib.loss import summed_cross_entropy
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig
from femtolib.optim import build_optimizer, clip_gradients
from femtolib.parallel.context import SequenceCut
from femtolib.parallel.fsdp import reduce_gradients, shard_model
from femtolib.parallel.mesh import Meshes, ParallelDims, build_meshes
from femtolib.parallel.tensor import split_matrices
from femtolib.sections import OptimizerSection
from femtolib.weights import initialize_weights

# dp_replicate, dp_shard, cp, tp
LAYOUTS = {
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(4, 1, 1, 1), (2, 2, 1, 1), (1, 4, 1, 1), (1, 2, 2, 1), (1, 1, 4, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2),
        (1, 1, 1, 4)],
    8: [(1, 8, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (1, 2, 2, 2)],
}  # fmt: skip
SEQUENCE, ROWS, STEPS = 32, 8, 2
CPU = torch.device("cpu")


def config(tied: bool) -> ModelConfig:
    """Eight heads, four key-value heads, biases."""
    keys = {"model_type": "llama", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    keys |= {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tied}
    return ModelConfig.from_dict(keys, "", inline=True)


def batches(step: int, parts: int, masked: bool):
    """The step's rows in `parts` batches: documents of a few tokens, four of ten not trained, one row empty."""
    random = np.random.default_rng(step)
    made = []
    for part in range(parts):
        rows = []
        for _ in range(ROWS // parts):
            begins = random.random(SEQUENCE + 1) < 0.2
            begins[0] = False
            rows.append(Row(random.integers(0, 64, SEQUENCE + 1), np.cumsum(begins, dtype=np.int32)))
        if part == 0:
            rows[0] = None
        slots = [Slot(row=place, position=place) for place in range(len(rows))]
        batch = collate(rows, slots, seq_len=SEQUENCE, eos_id=63, document_mask=masked)
        batch.labels[torch.from_numpy(random.random(batch.labels.shape) < 0.4)] = -100
        made.append(batch)
    return made


def whole_gradients(model) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def train_both(sizes: tuple[int, ...], tied: bool, masked: bool, micro_batches: int) -> float:
    """The largest relative difference in loss, gradient, norm or weight between this layout and one process."""
    dims = ParallelDims(*sizes)
    meshes = build_meshes(dims, "cpu", 60)
    one = Decoder(config(tied), torch.float64).double()
    initialize_weights(one, 0)
    with torch.device("meta"):
        many = Decoder(config(tied), torch.float64).double()
    split_matrices(many, meshes.tp)
    many.tie_weights()
    shard_model(many, meshes.fsdp, compute_dtype=torch.float64, param_dtype=torch.float64)
    many.to_empty(device="cpu")
    initialize_weights(many, 0)
    optimizers = [build_optimizer(model, OptimizerSection(name="sgd", lr=0.5)) for model in (one, many)]
    cut = SequenceCut.over(meshes.cp, SEQUENCE)
    ranks, rank = meshes.dp.size(), meshes.dp.get_local_rank()
    worst = 0.0
    for step in range(STEPS):
        [batch] = batches(step, 1, masked)
        tokens = int((batch.labels != -100).sum())
        attend = plan_attention(batch.document_ids, device=CPU, dtype=torch.float64)
        loss = summed_cross_entropy(one(batch.input_ids, batch.position_ids, attend), batch.labels) / tokens
        loss.backward()

        rows = torch.arange(ROWS).chunk(micro_batches * ranks)
        total = torch.zeros((), dtype=torch.float64)
        for number in range(micro_batches):
            mine = copy.copy(batch)
            for key in ("input_ids", "labels", "position_ids", "document_ids"):
                if getattr(batch, key) is not None:
                    setattr(mine, key, getattr(batch, key)[rows[number * ranks + rank]])
            reduce_gradients(many, is_last=number == micro_batches - 1, deferred=number % 2 == 1)
            attend = plan_attention(mine.document_ids, cut, device=CPU, dtype=torch.float64)
            part = cut.take_batch(mine)
            summed = summed_cross_entropy(many(part.input_ids, part.position_ids, attend), part.labels)
            (summed * dims.averaged / tokens).backward()
            total += summed.detach()
        dist.all_reduce(total, group=meshes.dp_cp.get_group())
        worst = max(worst, apart(total / tokens, loss.detach()))
        for name, gradient in whole_gradients(many).items():
            worst = max(worst, apart(gradient, dict(one.named_parameters())[name].grad))
        norms = [clip_gradients(model, 0.1) for model in (many, one)]
        worst = max(worst, abs(norms[0] - norms[1]) / norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in many.named_parameters():
        worst = max(worst, apart(parameter.full_tensor(), dict(one.named_parameters())[name]))
    return worst


@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_layout_is_the_model_of_one_process(ranks, count):
    def compare() -> list[tuple]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = []
        for number, sizes in enumerate(LAYOUTS[count]):
            ways = [(False, True), (True, False), (True, True)]
            for tied, masked in ways[:2] if count == 2 else [ways[number % 3]]:
                micro_batches = 1 if count == 8 else 1 + number % 2
                found.append((sizes, tied, masked, train_both(sizes, tied, masked, micro_batches)))
        return found

    for found in ranks(count, compare, seconds=240):
        for *layout, worst in found:
            print(*layout, f"{worst:.1e}")
            assert worst <= 1e-12, layout


# ── What a rank holds ─────────────────────────────────────────────────────────────────────────────────────────────────


def malloc_in_use() -> int:
    """Bytes that glibc has given out, to whichever thread."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    Account = type("Account", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Account
    account = ask()
    return account.uordblks + account.hblkhd


def build(sizes: tuple[int, ...], config: ModelConfig) -> tuple[Decoder, Meshes]:
    meshes = build_meshes(ParallelDims(*sizes), "cpu", 120)
    with torch.device("meta"):
        model = Decoder(config, torch.float32)
    split_matrices(model, meshes.tp)
    model.tie_weights()
    shard_model(model, meshes.fsdp, compute_dtype=torch.float32, param_dtype=torch.float32)
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    return model, meshes


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="reads glibc's account, of 2.33 on")
@pytest.mark.parametrize(("kv_heads", "share"), [(4, 0.35), (8, 0.35)], ids=["gqa", "mha"])
def test_a_quarter_of_a_row_takes_a_third_of_the_memory(ranks, kv_heads, share):
    length = 8192

    def compare() -> float | None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        keys = {"model_type": "llama", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512}
        keys |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
        keys |= {"max_position_embeddings": length}
        config = ModelConfig.from_dict(keys, "", inline=True)
        random = np.random.default_rng(0)
        documents = np.cumsum(random.random(length + 1) < 0.001, dtype=np.int32)
        documents -= documents[0]
        row = Row(random.integers(0, 320, length + 1), documents)
        slots = [Slot(row=0, position=0)]
        batch = collate([row], slots, seq_len=length, eos_id=319, document_mask=True)

        def held(model: Decoder, cut: SequenceCut) -> int:
            before = malloc_in_use()
            part = cut.take_batch(batch)
            attend = plan_attention(batch.document_ids, cut, device=CPU, dtype=torch.float32)
            loss = summed_cross_entropy(model(part.input_ids, part.position_ids, attend), part.labels)
            return malloc_in_use() - before + 0 * int(loss.detach())

        model, meshes = build((1, 1, 4, 1), config)
        many = held(model, SequenceCut.over(meshes.cp, length))
        dist.barrier()
        if dist.get_rank():
            return None
        one = Decoder(config, torch.float32)
        return many / held(one, SequenceCut(length))

    [ratio, *_] = ranks(4, compare, seconds=240)
    print(f"bytes at the end of the forward pass, cp 4 / one process: {ratio:.3f}")
    assert ratio <= share


def test_matrices_over_four_ranks_leave_each_a_quarter_and_logits_are_never_whole(ranks):
    def compare() -> tuple[list[float], int, int]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        keys = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 192}
        keys |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
        config = ModelConfig.from_dict(keys, "", inline=True)
        model, _ = build((1, 1, 1, 4), config)
        optimizer = build_optimizer(model, OptimizerSection(name="adamw", lr=1e-3))
        found = []
        for rows, length in (1, 32), (4, 128):
            ids = torch.randint(0, 4096, (rows, length + 1))
            with Largest() as largest:
                summed_cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
            found.append(largest.elements)
        optimizer.step()
        with Local():
            clip_gradients(model, 0.1)
            optimizer.step()
        whole = sum(parameter.numel() for parameter in Decoder(config, torch.float32).parameters())
        state = [value for entry in optimizer.state.values() for value in entry.values() if value.ndim]
        kinds = [list(model.parameters()), [parameter.grad for parameter in model.parameters()], state]
        held = [sum(tensor.to_local().numel() for tensor in tensors) for tensors in kinds]
        shares = [held[0] / whole, held[1] / whole, held[2] / whole / 2]
        return shares, *found

    for shares, of_few, of_many in ranks(4, compare):
        assert max(shares) <= 0.27, shares
        part = 2 * 4096 * 64 / 4  # FSDP has both in one piece
        assert part <= of_few <= part + 4096, "some tensor was larger than a rank's part of embedding and head"
        part = 4 * 128 * 4096 / 4
        assert part <= of_many <= part + 4096, "some tensor was larger than a rank's part of the logits"


class Local(TorchDispatchMode):
    """Refuses operations on DTensors: each that is new takes as long as a step to find out what is to be sent."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert not any(issubclass(kind, DTensor) for kind in types), function
        return function(*arguments, **(keywords or {}))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # come back with what this rank has of it
        result = function(*arguments, **(keywords or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):  # DTensor asks of whole shapes
                self.elements = max(self.elements, tensor.numel())
        return result
