"""Tensor parallelism: ranks that share each matrix (Shoeybi et al. 2019, arXiv:1909.08053), and, between the matrices,
the tokens of a row (sequence parallelism; Korthikanti et al. 2022, arXiv:2205.05198).

Attention is cut by heads, the feed-forward by its inner width, embedding and head by the vocabulary: the second matrix
of a pair takes what the first leaves on the same rank. Norms and residuals are done on each rank for its tokens alone,
which are gathered before a pair of matrices and summed and scattered after it.
"""

import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from femtolib.model import Decoder

_TOKENS, _WHOLE, _VOCABULARY = Shard(1), Replicate(), Shard(-1)


def split_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """Turn the parameters of `model` into parts over `mesh`. They are new ones: tie weights after it, and shard the
    model over another mesh, were it of size 1: that sums what the ranks' tokens give to the gradients of the norms.

    The model then takes whole rows and gives logits of which each rank has a part of the vocabulary (a DTensor).
    """
    if mesh.size() == 1:
        return
    for layer in model.model.layers:
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(_TOKENS, None, None, None), desired_input_layouts=(_WHOLE, None, None, None)
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=_TOKENS),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(_TOKENS,), desired_input_layouts=(_WHOLE,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=_TOKENS),
        }
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=_TOKENS, output_layouts=_VOCABULARY, use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    embedding = distribute_module(model.model.embed_tokens, mesh, _cut_rows)
    embedding.forward = types.MethodType(_look_up, embedding)
    # What the embedding gives is not there yet, and the gradient of it is lost where the next thing is a compiled layer
    # (torch 2.13); any operation waits for it.
    embedding.register_forward_hook(lambda _module, _inputs, output: output.clone())


def _cut_rows(_name: str, embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    cut = distribute_tensor(embedding.weight, mesh, [Shard(0)])
    embedding.weight = nn.Parameter(cut, requires_grad=embedding.weight.requires_grad)


def _look_up(embedding: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of the rows, [batch, sequence / tp, hidden], whose vectors other ranks have. torch's own plan
    for it makes the gradient of the whole vocabulary on every rank, and then takes a part."""
    mesh, part = embedding.weight.device_mesh, embedding.weight.to_local()
    own = input_ids - mesh.get_local_rank() * len(part)
    is_own = (own >= 0) & (own < len(part))
    found = F.embedding(own.where(is_own, 0), part) * is_own.unsqueeze(-1)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[_TOKENS]).to_local()
