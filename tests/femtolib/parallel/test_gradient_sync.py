"""Whether the sums are those of torch's DistributedDataParallel and of a plain all-reduce after the fact, whatever the
buckets; that they travel when and how they should; and that ranks which differ say so together instead of hanging."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel.gradient_sync import GradientSynchronizer


class Model(nn.Module):
    """A tied matrix, one used twice, one frozen, a buffer, and layers of which a pass may leave one out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(8))

    def forward(self, ids: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.twice(self.embedding(ids)) + self.shift
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = x + torch.tanh(layer(self.frozen(x)))
        return F.cross_entropy(self.head(self.twice(x)).flatten(0, 1), ids.flatten())


def rows(rank: int, step: int, micro_batch: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reduced(model: nn.Module, operation=dist.ReduceOp.SUM, group=None) -> dict[str, torch.Tensor]:
    """The gradients of a model, each added over the ranks by a call of its own; zero where there is none."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=operation, group=group)
    return gradients(model)


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


OPTIONS = [
    {},
    {"bucket_mb": 0},
    {"bucket_mb": 0.001},  # about two layers
    {"bucket_mb": 0.001, "overlap": False},
]


# ── The same gradients ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [2, 4])
def test_the_gradients_are_those_of_ddp_with_a_layer_skipped_at_random(ranks, count):
    def compare() -> list[float]:
        dist.init_process_group("gloo")
        rank, distances = dist.get_rank(), []
        for options in OPTIONS:
            theirs = nn.parallel.DistributedDataParallel(model(), find_unused_parameters=True)
            ours = model(seed=rank)  # the broadcast makes it rank 0's
            synchronizer = GradientSynchronizer(ours, mean=True, find_unused_parameters=True, **options)
            assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.module.parameters(), strict=True))
            assert torch.equal(ours.shift, theirs.module.shift)
            for step in range(4):
                skip = (rank * (step + 1) + step) % 7
                ours(rows(rank, step), skip).backward()
                synchronizer.finish()
                theirs(rows(rank, step), skip).backward()
                distances.append(apart(gradients(ours), gradients(theirs.module)))
                ours.zero_grad(set_to_none=step % 2 == 0)
                theirs.zero_grad(set_to_none=step % 2 == 0)
        return distances

    assert max(max(distances) for distances in ranks(count, compare)) <= 1e-12


def test_micro_batches_inside_no_sync_are_sent_with_the_last(ranks):
    def compare() -> list[tuple[float, int]]:
        dist.init_process_group("gloo")
        rank, found = dist.get_rank(), []
        for options in [
            *OPTIONS,
            {"find_unused_parameters": True},
            {"find_unused_parameters": True, "bucket_mb": 0.001},
        ]:
            ours = model()
            theirs = copy.deepcopy(ours)
            synchronizer = GradientSynchronizer(ours, **options)
            for step in range(3):
                started = synchronizer.all_reduces
                for micro_batch in range(4):
                    # Touched in one micro-batch only, by this rank or another: it counts all the same.
                    skip = (rank + step + micro_batch) % 7 if "find_unused_parameters" in options else None
                    with contextlib.nullcontext() if micro_batch == 3 else synchronizer.no_sync():
                        ours(rows(rank, step, micro_batch), skip).backward()
                    assert micro_batch == 3 or synchronizer.all_reduces == started
                    theirs(rows(rank, step, micro_batch), skip).backward()
                synchronizer.finish()
                found.append(apart(gradients(ours), reduced(theirs)))
                ours.zero_grad()
                theirs.zero_grad()
        return found

    assert max(max(distances) for distances in ranks(2, compare)) <= 1e-12


def test_a_quarter_of_the_collectives_with_no_sync_and_four_micro_batches(ranks):
    def count() -> tuple[int, int, float]:
        dist.init_process_group("gloo")
        rank, counts, sums = dist.get_rank(), [], []
        for accumulates in (True, False):
            ours = model()
            synchronizer = GradientSynchronizer(ours, bucket_mb=0.001, mean=True)
            for step in range(3):
                ours.zero_grad()
                before = synchronizer.all_reduces
                for micro_batch in range(4):
                    with synchronizer.no_sync() if accumulates and micro_batch < 3 else contextlib.nullcontext():
                        ours(rows(rank, step, micro_batch)).backward()
                    if not accumulates:
                        synchronizer.finish()
                if accumulates:
                    synchronizer.finish()
            counts.append(synchronizer.all_reduces - before)
            sums.append(gradients(ours))
        return *counts, apart(*sums)

    for with_no_sync, without, distance in ranks(2, count):
        assert with_no_sync * 4 == without and with_no_sync > 4
        assert distance <= 1e-12


def test_two_ranks_add_as_one_process_adds_two_micro_batches(ranks):
    def add() -> dict[str, torch.Tensor]:
        dist.init_process_group("gloo")
        ours = model()
        synchronizer = GradientSynchronizer(ours)
        ours(rows(dist.get_rank(), 0)).backward()
        synchronizer.finish()
        return gradients(ours)

    alone = model()
    for rank in range(2):
        alone(rows(rank, 0)).backward()
    for of_rank in ranks(2, add):
        assert all(torch.equal(of_rank[name], gradient) for name, gradient in gradients(alone).items())


def test_complex_parameters_and_gradients_are_added_as_two_reals_an_element(ranks):
    class Turns(nn.Module):
        def __init__(self, seed: int):
            super().__init__()
            torch.manual_seed(seed)
            self.first = nn.Parameter(torch.randn(5, dtype=torch.complex128))
            self.second = nn.Parameter(torch.randn(5, dtype=torch.complex128))
            self.third = nn.Parameter(torch.randn(5, dtype=torch.complex128))
            self.real = nn.Parameter(torch.randn(5, dtype=torch.float64))
            self.register_buffer("kept", torch.randn(3, dtype=torch.complex64))

    def compare() -> float:
        dist.init_process_group("gloo")
        worst = 0.0
        for options in ({}, {"bucket_mb": 0}, {"communication_dtype": torch.float32}):
            ours = Turns(seed=dist.get_rank())
            synchronizer = GradientSynchronizer(ours, **options)
            assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), Turns(0).parameters(), strict=True))
            assert torch.equal(ours.kept, Turns(0).kept)
            theirs = copy.deepcopy(ours)
            for each in (ours, theirs):
                each.zero_grad()
                mixed = (each.first * each.second * (dist.get_rank() + 1j)).abs().sum() + each.real.sum()
                (mixed + (each.third.conj() * (dist.get_rank() + 1j)).real.sum()).backward()
            assert theirs.third.grad.is_conj()
            synchronizer.finish()
            for parameter in theirs.parameters():
                parameter.grad = parameter.grad.resolve_conj()
                dist.all_reduce(torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad)
            distance = apart(gradients(ours), gradients(theirs))
            worst = max(worst, distance * (1e-6 if "communication_dtype" in options else 1))
        return worst

    assert max(ranks(2, compare)) <= 1e-12


def test_parameters_whose_memory_is_in_another_order_are_the_same_on_all_ranks(ranks):
    """gloo broadcasts the wrong numbers of such a tensor without a word (pytorch/pytorch#192920)."""

    class Strided(nn.Module):
        def __init__(self, seed: int):
            super().__init__()
            torch.manual_seed(seed)
            self.turned = nn.Parameter(torch.randn(6, 5, dtype=torch.float64).t())
            self.image = nn.Conv2d(3, 4, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
            self.register_buffer("column", torch.randn(7, 3)[:, 1])

    def compare() -> float:
        dist.init_process_group("gloo")
        rank, worst = dist.get_rank(), 0.0
        for options in ({}, {"bucket_mb": 0}):
            ours, theirs = Strided(seed=rank), Strided(seed=0)
            if rank:
                ours.image.to(memory_format=torch.contiguous_format)
            synchronizer = GradientSynchronizer(ours, **options)
            assert not ours.turned.is_contiguous() and ours.image.weight.is_contiguous() is (rank == 1)
            assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
            assert torch.equal(ours.column, theirs.column)
            for each in (ours, theirs):
                sum((p**2).sum() * (number + rank + 1) for number, p in enumerate(each.parameters())).backward()
            synchronizer.finish()
            wanted = {
                name: 2 * p.detach() * sum(i + r + 1 for r in range(2))
                for i, (name, p) in enumerate(theirs.named_parameters())
            }
            worst = max(worst, apart(gradients(ours), wanted))
        return worst

    assert max(ranks(2, compare)) <= 1e-12


def test_gradients_sent_in_a_narrower_dtype_lose_what_that_loses(ranks):
    def compare() -> dict:
        dist.init_process_group("gloo")
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            for options in ({}, {"bucket_mb": 0}):
                ours = model()
                theirs = copy.deepcopy(ours)
                synchronizer = GradientSynchronizer(ours, communication_dtype=dtype, **options)
                for micro_batch in range(2):
                    with contextlib.nullcontext() if micro_batch else synchronizer.no_sync():
                        ours(rows(dist.get_rank(), 0, micro_batch)).backward()
                    theirs(rows(dist.get_rank(), 0, micro_batch)).backward()
                synchronizer.finish()
                assert all(gradient.dtype == torch.float64 for gradient in gradients(ours).values())
                found[dtype, "bucket_mb" in options] = apart(gradients(ours), reduced(theirs))
        return found

    for found in ranks(2, compare):
        # Each is rounded once before it is added, and the sum once: half a unit in the last place, a few times.
        for (dtype, _), distance in found.items():
            assert torch.finfo(dtype).eps / 100 < distance < 2 * torch.finfo(dtype).eps, found


def test_gradients_kept_in_float32_for_bfloat16_parameters_travel_in_float32(ranks):
    def compare() -> float:
        dist.init_process_group("gloo")
        ours = model().bfloat16()
        for parameter in ours.parameters():
            parameter.grad_dtype = torch.float32
        theirs = copy.deepcopy(ours)
        for parameter in theirs.parameters():
            parameter.grad_dtype = torch.float32
        synchronizer = GradientSynchronizer(ours)
        for micro_batch in range(3):
            with contextlib.nullcontext() if micro_batch == 2 else synchronizer.no_sync():
                ours(rows(dist.get_rank(), 0, micro_batch)).backward()
            theirs(rows(dist.get_rank(), 0, micro_batch)).backward()
        synchronizer.finish()
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
        assert all(gradient.dtype == torch.float32 for gradient in gradients(ours).values())
        return apart(gradients(ours), gradients(theirs))

    assert max(ranks(2, compare)) == 0.0


def test_only_the_ranks_of_the_group_add(ranks):
    def compare() -> tuple[float, float]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group, shard = mesh["dp"].get_group(), mesh["tp"].get_local_rank()
        ours = model(seed=shard)  # peers in tp hold different parts, and see the same rows
        theirs = copy.deepcopy(ours)
        synchronizer = GradientSynchronizer(ours, group)
        assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
        for each in (ours, theirs):
            each(rows(mesh["dp"].get_local_rank(), 0)).backward()
        synchronizer.finish()
        other = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        alone = copy.deepcopy(theirs)
        of_one = GradientSynchronizer(alone, other)
        alone(rows(0, 1)).backward()
        of_one.finish()
        assert of_one.all_reduces == 0
        return apart(gradients(ours), reduced(theirs, group=group))

    assert max(ranks(4, compare)) <= 1e-12


def test_a_process_alone_needs_no_group():
    ours = model()
    synchronizer = GradientSynchronizer(ours)
    with synchronizer.no_sync():
        ours(rows(0, 0), skip=2).backward()
    ours(rows(0, 1), skip=2).backward()
    synchronizer.finish()
    assert ours.layers[2].weight.grad is None and ours.layers[1].weight.grad is not None
    assert synchronizer.all_reduces == 0


# ── When and how they travel ──────────────────────────────────────────────────────────────────────────────────────────


def test_buckets_leave_in_the_order_in_which_they_become_ready_and_in_the_same_order_on_all_ranks(ranks):
    class Backwards(nn.Module):
        """Used in the order in which it is defined, by odd ranks the other way round."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ParameterList(torch.ones(number + 1) for number in range(4))

        def forward(self, forwards: bool) -> torch.Tensor:
            x = torch.ones(())
            for weight in self.layers if forwards else reversed(self.layers):
                x = (x * weight).sum()
            return x

    def watch() -> list[list[int]]:
        dist.init_process_group("gloo")
        real, sent, passes = dist.all_reduce, [], []
        dist.all_reduce = lambda tensor, **more: (sent.append((tensor.numel(), tensor.dtype)), real(tensor, **more))[1]
        ours = Backwards()
        synchronizer = GradientSynchronizer(ours, bucket_mb=0)
        for _ in range(3):
            sent.clear()
            ours(forwards=dist.get_rank() == 1).backward()
            synchronizer.finish()
            passes.append([size for size, dtype in sent if dtype == torch.float32])
            ours.zero_grad()
        return passes

    # Defined 1, 2, 3, 4, so 4 is guessed to be ready first; on rank 0, which counts, it is 1.
    assert ranks(2, watch) == [[[4, 3, 2, 1], [1, 2, 3, 4], [1, 2, 3, 4]]] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_the_sums_start_while_the_backward_pass_goes_on(ranks, overlap):
    def watch() -> tuple[int, int]:
        dist.init_process_group("gloo")
        ours = model()
        synchronizer = GradientSynchronizer(ours, bucket_mb=0, overlap=overlap)
        started = []
        ours.twice.weight.register_post_accumulate_grad_hook(lambda _: started.append(synchronizer.all_reduces))
        for step in range(2):
            before = synchronizer.all_reduces
            ours(rows(0, step)).backward()
            synchronizer.finish()
            ours.zero_grad()
        return started[-1] - before

    for started in ranks(2, watch):
        assert started >= 10 if overlap else started == 0


def test_a_large_gradient_is_added_in_place_and_small_ones_in_their_bucket(ranks):
    def watch() -> tuple[list[tuple[int, bool]], int]:
        dist.init_process_group("gloo")
        real, sent = dist.all_reduce, []
        dist.all_reduce = lambda tensor, **more: (sent.append(tensor), real(tensor, **more))[1]
        ours = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8))  # 4 MiB in the middle
        synchronizer = GradientSynchronizer(ours, overlap=False)  # so that all are seen
        for _ in range(2):
            ours(torch.ones(1, 8)).sum().backward()
            made = ours[1].weight.grad
            sent.clear()
            synchronizer.finish()
            assert ours[1].weight.grad is made
            ours.zero_grad(set_to_none=False)
        floats = [tensor for tensor in sent if tensor.is_floating_point()]
        in_place = [tensor.data_ptr() == made.data_ptr() for tensor in floats]
        small = [p.grad.untyped_storage().data_ptr() for p in ours.parameters() if p is not ours[1].weight]
        return sorted(zip([tensor.numel() for tensor in floats], in_place, strict=True)), len(set(small))

    small, large = 8 * 1024 * 2 + 1024 * 2 + 8, 1024 * 1024
    assert ranks(2, watch) == [([(small, False), (large, True)], 1)] * 2


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as_it_is", "float32"])
def test_a_middling_gradient_moves_into_its_bucket_while_the_pass_goes_on(ranks, dtype):
    def compare() -> tuple[float, bool]:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        theirs = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 8)).double()  # 2**16 each
        ours = copy.deepcopy(theirs)
        synchronizer = GradientSynchronizer(ours, overlap=False, communication_dtype=dtype)
        worst, moved = 0.0, True
        for step in range(3):
            inputs = rows(dist.get_rank(), step).double().repeat(1, 32)
            for model in (ours, theirs):
                model.zero_grad()
                torch.tanh(model(inputs)).sum().backward()
            in_bucket = [p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in ours.parameters()]
            moved &= in_bucket == ([True, False] * 2 + [False] * 2 if dtype is None else [False] * 6)
            synchronizer.finish()
            worst = max(worst, apart(gradients(ours), reduced(theirs)))
        return worst, moved

    for worst, moved in ranks(2, compare):
        assert moved and worst < (1e-14 if dtype is None else 1e-5)


# ── Ranks that differ ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_missing_on_one_rank_is_named_on_all(ranks, micro_batches):
    def skip_one() -> str:
        dist.init_process_group("gloo")
        ours = model()
        synchronizer = GradientSynchronizer(ours, bucket_mb=0.001)
        ours(rows(0, 0)).backward()
        synchronizer.finish()
        ours.zero_grad()
        for micro_batch in range(micro_batches):
            with contextlib.nullcontext() if micro_batch == micro_batches - 1 else synchronizer.no_sync():
                ours(rows(0, 1), skip=4 if dist.get_rank() == 1 else None).backward()
        with pytest.raises(RunFailed) as failed:
            synchronizer.finish()
        assert failed.value.agreed
        return str(failed.value)

    assert set(ranks(4, skip_one)) == {
        "no gradient from any row since the last finish(), for layers.4.weight (rank 1), layers.4.bias (rank 1); "
        "with find_unused_parameters it counts as zero"
    }


@pytest.mark.parametrize(
    "arguments",
    [{"bucket_mb": -1}, {"bucket_mb": math.nan}, {"bucket_mb": math.inf}, {"communication_dtype": torch.int8}],
)
def test_arguments_that_mean_nothing_are_refused(arguments):
    with pytest.raises(FemtoError, match=next(iter(arguments))):
        GradientSynchronizer(model(), **arguments)


def test_a_static_graph_may_lack_what_it_lacked_and_nothing_else(ranks):
    def change() -> str:
        dist.init_process_group("gloo")
        ours = model()
        theirs = copy.deepcopy(ours)
        synchronizer = GradientSynchronizer(ours, static_graph=True, bucket_mb=0.001)
        for step in range(3):
            for each in (ours, theirs):
                each.zero_grad()
                each(rows(dist.get_rank(), step), skip=2 + dist.get_rank()).backward()
            synchronizer.finish()
            assert apart(gradients(ours), reduced(theirs)) <= 1e-12
        ours.zero_grad()
        ours(rows(0, 3), skip=2 if dist.get_rank() == 0 else 5).backward()
        with pytest.raises(RunFailed) as failed:
            synchronizer.finish()
        return str(failed.value)

    (text,) = set(ranks(2, change))
    assert text.startswith("static_graph: not as in the first pass is whether there is a gradient for layers.3.weight")
    assert "layers.5.bias (rank 1)" in text and "layers.2" not in text and "leave static_graph off" in text


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("fewer", "rank 1 has 14 parameters and buffers, rank 0 has 18; not on both: layers.4.bias, layers.4.weight"),
        ("shape", "rank 1 has twice.bias [9] float64 where rank 0 has twice.bias [8] float64"),
        ("dtype", "rank 1 has twice.weight [8, 8] float32 where rank 0 has twice.weight [8, 8] float64"),
        ("order", "rank 1 has twice.weight [8, 8] float64 where rank 0 has embedding.weight [50, 8] float64"),
        ("frozen", "rank 1 has twice.weight [8, 8] float64, frozen where rank 0 has twice.weight [8, 8] float64"),
    ],
)
def test_copies_that_are_none_are_refused_on_all_ranks(ranks, change, wanted):
    def differ() -> str:
        dist.init_process_group("gloo")
        ours = model()
        if dist.get_rank() == 1:
            match change:
                case "fewer":
                    del ours.layers[4:]
                case "shape":
                    ours.twice.bias = nn.Parameter(torch.zeros(9, dtype=torch.float64))
                case "dtype":
                    ours.twice.float()
                case "order":
                    ours._modules["embedding"] = ours._modules.pop("embedding")
                case "frozen":
                    ours.twice.requires_grad_(False)
        with pytest.raises(FemtoError) as refused:
            GradientSynchronizer(ours)
        assert refused.value.agreed
        return str(refused.value)

    (text,) = set(ranks(2, differ))
    assert text.startswith(f"the copies of the model differ: {wanted}"), text


def test_a_pass_that_cannot_be_added_says_so(ranks):
    def fail() -> list[str]:
        dist.init_process_group("gloo")
        texts = []
        ours = model()
        GradientSynchronizer(ours)
        ours(rows(0, 0)).backward()
        with pytest.raises(RunFailed) as failed:
            ours(rows(0, 1)).backward()
        texts.append(str(failed.value))
        ours = model()
        synchronizer = GradientSynchronizer(ours)
        ours(rows(0, 0)).backward()
        with pytest.raises(RunFailed) as failed, synchronizer.no_sync():
            ours(rows(0, 1)).backward()
        texts.append(str(failed.value))
        sparse = nn.Embedding(50, 8, sparse=True)
        GradientSynchronizer(sparse)
        with pytest.raises(RunFailed) as failed:
            sparse(rows(0, 0)).sum().backward()
        return [*texts, str(failed.value)]

    for *twice, sparse in ranks(2, fail):
        assert len(twice) == 2
        assert all("a second backward pass" in text and "finish()" in text and "no_sync()" in text for text in twice)
        assert sparse == "weight: its gradient is sparse, which is not synchronized"


# ── Used otherwise than meant ─────────────────────────────────────────────────────────────────────────────────────────


class Weights(nn.Module):
    """Four weights of two numbers each; a pass uses those that it is asked for."""

    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Parameter(torch.ones(2, dtype=torch.float64)))

    def forward(self, names: str) -> torch.Tensor:
        return sum(getattr(self, name).sum() for name in names)


def test_a_parameter_that_two_passes_use_before_finish_is_refused_and_not_summed_twice(ranks):
    def run() -> str:
        dist.init_process_group("gloo")
        ours = Weights()
        GradientSynchronizer(ours, bucket_mb=33 / 2**20, find_unused_parameters=True)
        ours("da").backward()
        with pytest.raises(RunFailed) as refused:
            ours("a").backward()
        return str(refused.value)

    for text in ranks(2, run):
        assert text.startswith("a: a second backward pass") and "no_sync()" in text


def test_gradients_that_somebody_clears_on_one_rank_meanwhile_are_still_the_sum_on_all(ranks):
    def run() -> list[list[float]]:
        dist.init_process_group("gloo")
        found = []
        for options in ({}, {"bucket_mb": 0}, {"communication_dtype": torch.float32}):
            ours = Weights()
            synchronizer = GradientSynchronizer(ours, find_unused_parameters=True, **options)
            ours("abcd").backward()
            if dist.get_rank() == 1:
                ours.zero_grad()
            synchronizer.finish()
            found.append([parameter.grad.tolist() for parameter in ours.parameters()])
        return found

    one, two = ranks(2, run)
    assert one == two


def test_a_gradient_that_is_left_over_on_one_rank_counts_on_all(ranks):
    def run() -> list[list[float] | None]:
        dist.init_process_group("gloo")
        ours = Weights()
        synchronizer = GradientSynchronizer(ours, find_unused_parameters=True)
        if dist.get_rank() == 0:
            ours.b.grad = torch.full((2,), 3.0, dtype=torch.float64)  # by no backward pass
        ours("a").backward()
        synchronizer.finish()
        return [None if parameter.grad is None else parameter.grad.tolist() for parameter in ours.parameters()]

    assert ranks(2, run) == [[[2.0, 2.0], [3.0, 3.0], None, None]] * 2


def test_zeroed_gradients_are_no_gradients(ranks):
    def run() -> tuple[list, list[str]]:
        dist.init_process_group("gloo")
        rank, texts = dist.get_rank(), []
        fixed = Weights()
        synchronizer = GradientSynchronizer(fixed, static_graph=True)
        grads = []
        for _ in range(3):  # nothing changes from pass to pass
            fixed("abcd" if rank == 0 else "acd").backward()
            synchronizer.finish()
            grads.append(fixed.b.grad.tolist())
            fixed.zero_grad(set_to_none=False)
        strict = Weights()
        synchronizer = GradientSynchronizer(strict)
        strict("abcd").backward()
        synchronizer.finish()
        for names in ("abcd" if rank == 0 else "acd", ""):  # a parameter that is skipped; no pass at all
            strict.zero_grad(set_to_none=False)
            if names:
                strict(names).backward()
            with pytest.raises(RunFailed) as refused:
                synchronizer.finish()
            texts.append(str(refused.value))
        return grads, texts

    for grads, (skipped, none) in ranks(2, run):
        assert grads == [[1.0, 1.0]] * 3
        assert "b (rank 1)" in skipped and "a (rank" not in skipped
        assert "a (rank 0, 1)" in none


def test_ranks_are_named_as_the_world_knows_them_and_strangers_refused(ranks):
    def run() -> str:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        with pytest.raises((FemtoError, RunFailed)) as refused:
            ours = Weights()
            synchronizer = GradientSynchronizer(ours, group)
            ours("abcd" if rank == 1 else "acd").backward()
            synchronizer.finish()
        return str(refused.value)

    stranger, one, two = ranks(3, run)
    assert stranger.startswith("rank 0 is not in the process group") and "b (rank 2)" in one and one == two
