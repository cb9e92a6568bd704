"""Data parallelism: the gradients of a model's copies, added over their ranks while the backward pass goes on.

What torch.nn.parallel.DistributedDataParallel does in C++ (Li et al. 2020, arXiv:2006.15704), in the open. Copies start
equal, because rank 0's parameters are broadcast, and stay equal, because every rank adds the same gradients. A gradient
leaves as soon as it is ready, in a bucket with its neighbours: while one travels, the backward pass works on the next.

A collective is matched by its place in the order, so every rank must start the same ones in the same order. Buckets
therefore leave by number, whichever fills first, and at the end of a pass those that never filled leave, too, with
zeros for what is missing: a rank that skipped a parameter is found out, and no rank waits for it in vain.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from femtolib.errors import FemtoError, RunFailed

# A gradient of this many bytes travels alone and in place: to copy it into a bucket costs more than a message.
_LARGE = 4 * 2**20
# A gradient of this many elements is copied by a call of its own, while it is in the cache; smaller ones share one.
_MIDDLING = 2**16


class GradientSynchronizer:
    """Adds the gradients of `model` over the ranks of `process_group` (None: all ranks).

    Making one broadcasts parameters and buffers from the group's rank 0, after a check that all ranks have the same
    ones (else FemtoError, on all of them; also for an argument that means nothing). From then on `backward()` starts
    the sums, and `finish()`, to be called before the gradients are used, waits for them. Of several micro-batches all
    but the last go inside `no_sync()`. In a group of one nothing is done. Parameters that are frozen now stay out of
    it. Gradients may be views into buckets, which the next pass writes to. A model has one synchronizer, for good.

    What `finish()` leaves is the sum over all ranks: clear it before the next step. A backward pass that adds to it
    would have it summed again, once for each rank.

    bucket_mb: size of a bucket in MiB (0: each gradient alone). overlap: start sums during the backward pass, not all
    after it. mean: divide by the number of ranks. communication_dtype: what gradients are sent in (None: as they are).

    A gradient that no backward pass since the last `finish()` has added to, on some rank, makes `finish()` raise
    RunFailed on all. With find_unused_parameters it counts there as it is, None as zero, and one that is None on all
    ranks stays so. With static_graph each rank may lack those that it lacked in the first pass, and no others.

    `all_reduces` counts the collectives started. On GPUs it is unverified.
    """

    def __init__(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_mb: float = 25,
        overlap: bool = True,
        mean: bool = False,
        communication_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ):
        if not 0 <= bucket_mb < float("inf"):
            raise FemtoError(f"bucket_mb: {bucket_mb} should be a size, 0 or more")
        if communication_dtype is not None and not communication_dtype.is_floating_point:
            raise FemtoError(f"communication_dtype: {communication_dtype} holds no gradients; bfloat16 or float32 does")
        self._group, self._overlap, self._dtype = process_group, overlap, communication_dtype
        self._bucket_bytes = bucket_mb * 2**20
        self._find_unused, self._static = find_unused_parameters, static_graph
        self._operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())
        self._syncing = True
        self._rebuilt = False  # whether buckets are in the order in which gradients become ready
        self._expected: set[int] | None = None  # static_graph: what lacked a gradient in the first pass
        self.all_reduces = 0
        self._size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        if self._size == 1:
            return
        if self._size < 1:
            raise FemtoError(f"rank {dist.get_rank()} is not in the process group that is to add gradients")
        self._ranks = dist.get_process_group_ranks(process_group)
        broadcast_weights(model, process_group)
        # Where the group can add on the CPU, the small sum of flags does not wait for the device.
        adds_on_cpu = "cpu:" in dist.get_backend_config(process_group)
        self._flag_device = "cpu" if adds_on_cpu or not trained else self._parameters[0].device
        # As a rule gradients become ready from the last layer to the first; the first pass says how it really is.
        self._fill_buckets([*reversed(range(len(trained)))])
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_ready, number))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave their gradients on this rank, added to those that are there; the next one
        outside sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish(self) -> None:
        """Start what has not left yet, wait for all sums, and leave them in the parameters' `.grad`.

        Raises RunFailed, the same on all ranks, where a gradient is missing that may not be.
        """
        if self._size == 1:
            return
        lacking = {*range(len(self._parameters))}.difference(self._order, self._touched)
        while len(self._works) < len(self._buckets):
            self._start_next()
        # One more small sum: who lacks which gradient, and who had none at all. It tells all ranks what to think of the
        # zeros they have added.
        if self._expected is None:
            self._expected = lacking
        counts = torch.zeros(3, len(self._parameters), dtype=torch.int32)
        counts[0, [*lacking]] = 1
        counts[1, self._filled] = 1
        counts[2] = self._static and lacking != self._expected
        counts = counts.to(self._flag_device)
        self._all_reduce(counts, dist.ReduceOp.SUM).wait()
        for bucket, (work, alone) in zip(self._buckets, self._works, strict=True):
            work.wait()
            self._hand_back(bucket, alone)
        lacks, nones, changes = counts.tolist()
        ready, filled = [*self._order], self._filled
        self._begin()
        if any(changes) or (any(lacks) and not self._find_unused and not self._static):
            self._refuse(lacking, self._expected)
        for number in filled:
            if nones[number] == self._size:  # no rank's rows touched it: there is nothing to update it by
                self._parameters[number].grad = None
        if not self._rebuilt:
            agreed = [[*dict.fromkeys([*ready, *range(len(lacks))])]]
            dist.broadcast_object_list(agreed, group=self._group, group_src=0)
            self._fill_buckets(agreed[0])
            self._rebuilt = True

    # ── Within a pass ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_ready(self, number: int, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient: start every bucket that is full and next in the order."""
        if number in self._order or (self._order and not self._syncing):  # it may be on its way already
            remedy = "call finish() after the last micro-batch, and put those before it in no_sync()"
            raise RunFailed(
                f"{self._names[number]}: a second backward pass after one that sends its gradients; {remedy}"
            )
        bucket = self._bucket_of[number]
        if bucket.gradients and not bucket.converts and (not self._syncing or parameter.numel() >= _MIDDLING):
            self._move(bucket, [number])  # in no_sync(), so that what follows is added in place
        if not self._syncing:
            self._touched.add(number)
            return
        self._order[number] = None
        bucket.missing -= 1
        if self._overlap and not bucket.missing:
            while len(self._works) < len(self._buckets) and not self._buckets[len(self._works)].missing:
                self._start_next()

    def _start_next(self) -> None:
        """Send the next bucket on its way. What this rank has no gradient for it adds zeros to."""
        bucket = self._buckets[len(self._works)]
        for number in bucket.members:
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=_gradient_dtype(parameter))
                self._filled.append(number)
        tensor, alone = bucket.buffer, None
        if tensor is None:  # a single one, in place
            alone = self._dense(bucket.members[0]).contiguous()
            tensor = _real(alone)
        else:
            self._move(bucket, bucket.members)
        self._works.append((self._all_reduce(tensor, self._operation), alone))

    def _move(self, bucket: "_Bucket", members: list[int]) -> None:
        """Copy gradients into their places in the bucket, and make these the gradients, where the dtype is theirs."""
        if bucket.converts:
            gradients = [_real(self._dense(number)) for number in members]
            torch._foreach_copy_([bucket.places[number] for number in members], gradients)
            return
        places = bucket.gradients
        moving = {number: gradient for number in members if (gradient := self._dense(number)) is not places[number]}
        if moving:
            torch._foreach_copy_([places[number] for number in moving], [*moving.values()])
        for number in moving:
            self._parameters[number].grad = places[number]

    def _dense(self, number: int) -> torch.Tensor:
        gradient = self._parameters[number].grad
        if gradient.is_sparse:
            raise RunFailed(f"{self._names[number]}: its gradient is sparse, which is not synchronized")
        if gradient.is_conj():  # a view that says so of other numbers
            gradient = self._parameters[number].grad = gradient.resolve_conj()
        return gradient

    def _hand_back(self, bucket: "_Bucket", alone: torch.Tensor | None) -> None:
        """Leave the sums in `.grad`, also where somebody has cleared it meanwhile."""
        if alone is not None:
            self._parameters[bucket.members[0]].grad = alone
            return
        for number in bucket.members:
            parameter = self._parameters[number]
            if parameter.grad is None:
                like = torch.empty_like(parameter, dtype=_gradient_dtype(parameter))
                parameter.grad = like if bucket.converts else bucket.gradients[number]
        if bucket.converts:
            gradients = [_real(self._parameters[number].grad) for number in bucket.members]
            torch._foreach_copy_(gradients, [*bucket.places.values()])

    def _all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> dist.Work:
        self.all_reduces += 1
        return dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)

    def _refuse(self, lacking: set[int], expected: set[int]) -> None:
        by_rank: list = [None] * self._size
        dist.all_gather_object(by_rank, lacking ^ expected if self._static else lacking, group=self._group)
        on = dict(zip(self._ranks, by_rank, strict=True))
        names = [
            f"{name} (rank {', '.join(str(rank) for rank, numbers in on.items() if number in numbers)})"
            for number, name in enumerate(self._names)
            if any(number in numbers for numbers in by_rank)
        ]
        shown = ", ".join(names[:10]) + (f", … ({len(names)} in all)" if len(names) > 10 else "")
        if self._static:
            fault = f"static_graph: not as in the first pass is whether there is a gradient for {shown}"
            raise RunFailed(f"{fault}; leave static_graph off", agreed=True)
        remedy = "with find_unused_parameters it counts as zero"
        raise RunFailed(f"no gradient from any row since the last finish(), for {shown}; {remedy}", agreed=True)

    # ── Buckets ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fill_buckets(self, order: list[int]) -> None:
        """Cut `order` into buckets: what becomes ready about the same time travels together."""
        buckets: list[list[int]] = []
        filling: dict[tuple, list[int]] = {}  # by what tensors of one bucket must have in common
        for number in order:
            parameter = self._parameters[number]
            kind = (_gradient_dtype(parameter), parameter.device)
            if self._bytes([number]) >= min(_LARGE, self._bucket_bytes):
                buckets.append([number])
                continue
            if kind in filling and self._bytes([*filling[kind], number]) > self._bucket_bytes:
                buckets.append(filling.pop(kind))
            filling.setdefault(kind, []).append(number)
        buckets += filling.values()
        place = {number: index for index, number in enumerate(order)}
        buckets.sort(key=lambda members: max(place[number] for number in members))  # by when they are full
        self._buckets = [self._bucket(members) for members in buckets]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.members}
        self._begin()

    def _bucket(self, members: list[int]) -> "_Bucket":
        parameters = [self._parameters[number].detach() for number in members]
        own = _gradient_dtype(self._parameters[members[0]])
        converts = self._dtype not in (None, own.to_real())
        if len(members) == 1 and not converts:
            return _Bucket(members)
        sizes = [_real(parameter).numel() for parameter in parameters]
        buffer = torch.empty(sum(sizes), dtype=self._dtype or own.to_real(), device=parameters[0].device)
        places = [
            part.view_as(_real(parameter)) for part, parameter in zip(buffer.split(sizes), parameters, strict=True)
        ]
        gradients = [torch.view_as_complex(place) if own.is_complex else place for place in places]
        return _Bucket(
            members,
            buffer,
            places=dict(zip(members, places, strict=True)),
            gradients=dict(zip(members, gradients, strict=True)),
            converts=converts,
        )

    def _bytes(self, members: list[int]) -> int:
        parameters = [self._parameters[number] for number in members]
        return sum(parameter.numel() * _gradient_dtype(parameter).itemsize for parameter in parameters)

    def _begin(self) -> None:
        """Ready for the next pass."""
        self._order: dict[int, None] = {}  # in which gradients became ready
        self._touched: set[int] = set()  # by backward passes in no_sync()
        self._filled: list[int] = []  # with zeros, for want of a gradient
        self._works: list[tuple[dist.Work, torch.Tensor | None]] = []  # with a gradient that travels in place
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)


def broadcast_weights(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of the group's rank 0; FemtoError, on all ranks, where one has others
    than these by name, order, shape or dtype."""
    if not dist.is_initialized():
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mine = [(name, list(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
    by_rank: list = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(by_rank, mine, group=process_group)
    first, faults = by_rank[0], []
    for rank, theirs in zip(dist.get_process_group_ranks(process_group), by_rank, strict=True):
        if len(theirs) != len(first):
            odd = ", ".join(sorted({name for name, *_ in theirs} ^ {name for name, *_ in first})[:5])
            counts = f"{len(theirs)} parameters and buffers, rank 0 has {len(first)}"
            faults.append(f"rank {rank} has {counts}; not on both: {odd}")
        elif theirs != first:
            its, ours = next(pair for pair in zip(theirs, first, strict=True) if pair[0] != pair[1])
            faults.append(f"rank {rank} has {_describe(its)} where rank 0 has {_describe(ours)}")
    if faults:
        raise FemtoError(*(f"the copies of the model differ: {fault}" for fault in faults), agreed=True)
    for name, tensor in tensors.items():
        try:
            values = _real(tensor.detach())
            sent = values.contiguous()  # gloo sends memory as it lies, whatever its order (pytorch/pytorch#192920)
            dist.broadcast(sent, group=process_group, group_src=0)
            if sent is not values:
                values.copy_(sent)
        except RuntimeError as error:
            raise RunFailed(f"{name}: {tensor.dtype} cannot be broadcast: {str(error).splitlines()[0]}") from None


@dataclass
class _Bucket:
    """Parameters, by number, whose gradients travel together, in places of one buffer; without one, a single one in
    place. `converts`: the buffer is of another dtype than the gradients. `missing`: how many are not ready yet."""

    members: list[int]
    buffer: torch.Tensor | None = None
    places: dict[int, torch.Tensor] = None
    gradients: dict[int, torch.Tensor] = None  # the places, as what a parameter's `.grad` may be
    converts: bool = False
    missing: int = 0


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Collectives add real numbers; a complex tensor is two of them an element."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _describe(tensor: tuple) -> str:
    name, shape, dtype, trained = tensor
    return f"{name} {shape} {dtype.removeprefix('torch.')}{'' if trained else ', frozen'}"
