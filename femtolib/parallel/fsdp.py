"""Parameters, gradients and optimizer state sharded over ranks with FSDP2 (torch.distributed.fsdp.fully_shard; Zhao et
al. 2023, arXiv:2304.11277), layer by layer, and copied over replicas (HSDP) in the mesh's other dimension.

The model is sharded on the meta device, so that no rank ever holds all of it. Each layer's parameters are gathered for
its forward and its backward pass and dropped after each; gradients are reduced in the dtype that parameters are stored
in, whatever the model computes in.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from femtolib.model import Decoder
from femtolib.parallel.world import World


def shard_model(model: Decoder, mesh: DeviceMesh, *, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> None:
    """Turn the parameters of `model` into shards over `mesh` (dp_replicate, dp_shard_cp). Tie weights before it.

    Layers are gathered in `compute_dtype` and dropped after each pass, except where one rank holds whole parameters
    anyway. Embedding, last norm and head are the root's: kept until the backward pass, which needs the head first, and
    gathered as they are stored, because an embedding's gradient sums many rows, which bfloat16 would round away.
    """
    in_layers = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=param_dtype, cast_forward_inputs=False)
    in_root = MixedPrecisionPolicy(reduce_dtype=param_dtype, cast_forward_inputs=False)
    is_sharded = mesh.size(1) > 1
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=in_layers, reshard_after_forward=is_sharded)
    fully_shard(model, mesh=mesh, mp_policy=in_root, reshard_after_forward=False)


def reduce_gradients(model: FSDPModule, *, is_last: bool, deferred: bool) -> None:
    """Say, before a backward pass, whether its gradients are to be reduced; `is_last`: of the step's micro-batches.

    Between replicas they are reduced once a step, which costs no memory. Within the shards of a copy they are reduced
    after each micro-batch, or, `deferred`, once a step: less traffic, but every rank then holds whole gradients.
    """
    model.set_requires_gradient_sync(is_last or not deferred)
    model.set_requires_all_reduce(is_last)  # after the line above, which sets it, too


def drop_gathered(model: nn.Module) -> None:
    """Leave shards alone in `model`, after forward passes without a backward pass: those kept gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_parameters(model: nn.Module, world: World) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor of each parameter, one after another, gathered from all ranks: all must go through them.

    Who is ready waits for the slowest, however long that one has to write.
    """
    for name, parameter in model.named_parameters():
        world.barrier()
        yield name, parameter.full_tensor()
