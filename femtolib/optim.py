"""Optimizers as femto means them: weight decay decoupled and on matrices alone, state addressed by parameter name; and
mixed precision with master weights, in which what is optimized and what is computed with are two copies."""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from femtolib.parallel.world import local_part
from femtolib.sections import OptimizerSection


class SGD(torch.optim.Optimizer):
    """SGD with momentum and decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 1): the decay
    is lr·weight_decay of the weight itself, where torch's own adds it to the gradient and so to the momentum."""

    def __init__(self, parameters, lr: float, momentum: float = 0.0, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, change = local_part(parameter), local_part(parameter.grad)
                if group["momentum"]:
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                    change = local_part(state["momentum_buffer"]).mul_(group["momentum"]).add_(change)
                if group["weight_decay"]:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(change * group["lr"])


class AdamW(torch.optim.AdamW):
    """torch's, given what this rank has of parameters, gradients and state: an update of elements sends nothing, but
    DTensor takes up to a tenth of a second for each parameter that is cut along two dimensions to find that out."""

    def _init_group(self, group, *lists):
        """Fills `lists`. (Private in torch 2.13, and the one place where all of them are at hand.)"""
        found = super()._init_group(group, *lists)
        # A compiled update is not the fused one. The compiler knows this method by name, and takes for a constant what
        # is no parameter, gradient or state itself.
        if group["fused"]:
            for tensors in lists:
                tensors[:] = [local_part(tensor) for tensor in tensors]
        return found


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW or SGD over the trained parameters of `model`; those of one dimension (norms, biases) do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return SGD(groups, lr=section.lr, momentum=section.momentum)
    # Fused is the fastest form on a CPU too: 3 times the loop's speed, 10 times foreach's.
    return AdamW(groups, lr=section.lr, betas=tuple(section.betas), eps=section.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # a compiled update has its address
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """The global gradient norm, over all ranks, before clipping; where it is finite and above `max_norm`, gradients are
    scaled to that.

    A norm that is not finite is returned as it is and changes nothing, so that the caller can stop before the update.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(_gradient_norm(gradients))
    if max_norm is not None and math.isfinite(norm):
        scale = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
        if gradients and scale < 1:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], scale)
    return norm


_ROW = 1024


def _gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all of them, whole, in float64.

    Of each 1,024 numbers in their own dtype, float32 at least, and from there in float64: torch's norm for a CPU adds
    up all squares in float32, and of 37 million numbers is off by 2e-3, of a shard of them by less.
    """
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        mesh, copies = None, 1  # of the same numbers, on other ranks
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            sizes = zip(mesh.shape, gradient.placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        numbers = local_part(gradient).flatten()
        whole = len(numbers) // _ROW * _ROW
        for rows in numbers[:whole].view(-1, _ROW), numbers[whole:].view(1, -1):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
            by_mesh[mesh].append(norms.double().square().sum() / copies)
    sums = []
    for mesh, squares in by_mesh.items():
        sums.append(torch.stack(squares).sum())
        for dimension in range(mesh.ndim if mesh else 0):
            if mesh.size(dimension) > 1:
                dist.all_reduce(sums[-1], group=mesh.get_group(dimension))
    return torch.stack(sums).sum().sqrt() if sums else torch.zeros((), dtype=torch.float64)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that training changes, by name: `model.NAME` for each parameter, `optimizer.NAME.KEY` for its state.

    The optimizer's part is empty before the first update. A parameter's state comes by key: the order in which it came
    about is another one after a resume.
    """
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def all_finite(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether no element is infinite or NaN; of sharded tensors, in this rank's shards."""
    return all(bool(local_part(tensor).isfinite().all()) for tensor in tensors.values())


def make_room_for_state(model: nn.Module, optimizer: torch.optim.Optimizer, shapes: dict[str, torch.Size]) -> None:
    """Give a fresh optimizer zeroed state for those of `shapes` (names of `training_tensors`) that are a parameter's.

    State of a parameter's shape is laid out as the parameter is (device, shards); the rest (AdamW's step counts) are
    float32 scalars on its device, as the fused optimizer wants them.
    """
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        for full_name in [full_name for full_name in shapes if full_name.startswith(prefix)]:
            shape = shapes[full_name]
            like = parameter if shape == parameter.shape else torch.zeros(shape, device=parameter.device)
            optimizer.state[parameter][full_name.removeprefix(prefix)] = torch.zeros_like(like, requires_grad=False)


# ── Master weights (Micikevicius et al. 2018, arXiv:1710.03740) ───────────────────────────────────────────────────────
# `masters` is what is optimized and saved, `replica` a copy of it to compute with. Where the two are one, there is
# nothing to hand over or to copy.


def compute_copy(masters: nn.Module, dtype: torch.dtype, accumulation_dtype: torch.dtype) -> nn.Module:
    """A copy of `masters` in `dtype`, tied where they are, whose gradients add up in `accumulation_dtype`."""
    copies = {}
    for parameter in masters.parameters():
        copies[id(parameter)] = nn.Parameter(
            parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad
        )
        copies[id(parameter)].grad_dtype = accumulation_dtype
    return copy.deepcopy(masters, copies)


def hand_over_gradients(replica: nn.Module, masters: nn.Module, *, divide_by: float = 1.0) -> None:
    """Move the gradients of `replica` to `masters`, in their dtype, divided by what the loss was multiplied by."""
    for ours, theirs in zip(replica.parameters(), masters.parameters(), strict=True):
        if ours.grad is not None:
            if ours is not theirs:
                theirs.grad, ours.grad = ours.grad.to(theirs.dtype), None
            if divide_by != 1:
                theirs.grad /= divide_by


def copy_weights(masters: nn.Module, replica: nn.Module) -> None:
    """Give `replica` the weights of `masters`, rounded to its own dtype."""
    if replica is not masters:
        with torch.no_grad():
            torch._foreach_copy_([*replica.parameters()], [*masters.parameters()])


@dataclass
class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in float16: halved at each step whose
    gradients overflow, which is then `skipped`, doubled after 2,000 in a row that do not (as torch.amp.GradScaler)."""

    value: float = 2.0**16
    fitting: int = 0  # steps in a row
    skipped: int = 0  # steps in all

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.value, self.fitting, self.skipped = self.value / 2, 0, self.skipped + 1
            return
        self.fitting += 1
        if self.fitting == 2000:
            self.value, self.fitting = self.value * 2, 0
