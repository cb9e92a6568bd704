"""Which positions of a row see which, and what computes it: decided here, once a batch, for all layers.

A token sees itself and what comes before it, in its own document where documents are kept apart. With context
parallelism a rank asks for a part of a row (parallel/context.py) and is answered from the whole of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from femtolib.parallel.context import SequenceCut

# Of a masked call on a CPU. Of 128 to 4,096, this costs least on rows of 4,096: few keys are computed in vain, and each
# call has enough to do.
_QUERIES = 512

# (queries, keys, values) → what each query has gathered; all [batch, heads, sequence, head_dim], of which keys and
# values may have fewer heads (arXiv:2305.13245).
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plan_attention(
    document_ids: torch.Tensor | None,
    cut: SequenceCut | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Attend:
    """How the rows of a batch attend, computing in `dtype` on `device`.

    `document_ids` [batch, sequence], of whole rows and on the CPU, so that nobody waits for a device; None: a row is
    one text, and torch's causal kernel computes it, on a CPU of a part of each row, too. Else CUDA has FlexAttention,
    which skips blocks that nobody sees (unverified on a GPU); a CPU has a mask of numbers and several calls, each over
    the keys up to its last query: a single one would compute a row's upper half, too, at twice the cost.
    """
    if document_ids is not None and not (document_ids > 0).any():  # padding comes last, where no document sees it
        document_ids = None
    if document_ids is None and (cut is None or cut.size == 1):
        return causal_attention
    cut = cut or SequenceCut(document_ids.shape[1])
    if document_ids is not None:
        document_ids = document_ids.to(device, non_blocking=True)
    if device.type == "cuda":
        return BlockAttention(block_mask(document_ids, cut, device), cut)
    if document_ids is None:
        return CausalAttention(cut)
    return MaskedAttention(document_mask(document_ids, cut, dtype), cut)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# What scaled_dot_product_attention calls on a CPU.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CausalAttention:
    """A part of each row, on a CPU."""

    cut: SequenceCut

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = self.cut.gather(k, v)
        chunks = zip(q.chunk(2, 2), self.cut.chunks, strict=True)
        return torch.cat([_CausalChunk.apply(part, k[:, :, :last], v[:, :, :last]) for part, (_, last) in chunks], 2)


class _CausalChunk(torch.autograd.Function):
    """Queries that come last among the keys: one call over the keys before theirs, which need no mask, and one of the
    causal kernel over their own, joined by the logarithms of what their weights add up to, as in ring attention (Liu et
    al. 2023, arXiv:2310.01889). A mask costs a fifth more. The calls are private: nothing public gives the logarithms
    with a gradient (torch 2.13)."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # else it is wrong, without a word
        before = k.shape[2] - q.shape[2]
        mixed, log_sum = _flash(q, k[:, :, before:], v[:, :, before:], is_causal=True)
        if before:
            mixed_before, log_sum_before = _flash(q, k[:, :, :before], v[:, :, :before])
            share = torch.sigmoid(log_sum_before - log_sum).unsqueeze(-1)
            mixed = torch.lerp(mixed.to(share.dtype), mixed_before.to(share.dtype), share).to(q.dtype)
            log_sum = torch.logaddexp(log_sum, log_sum_before)
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, mixed, log_sum = ctx.saved_tensors
        gradient = gradient.contiguous()
        before = k.shape[2] - q.shape[2]
        own = _flash_backward(gradient, q, k[:, :, before:], v[:, :, before:], mixed, log_sum, 0.0, True)
        if not before:
            return own
        others = _flash_backward(gradient, q, k[:, :, :before], v[:, :, :before], mixed, log_sum, 0.0, False)
        return others[0] + own[0], torch.cat((others[1], own[1]), 2), torch.cat((others[2], own[2]), 2)


@dataclass(frozen=True)
class MaskedAttention:
    """mask [batch, 1, queries, keys]: what is added to the scores, 0 or −inf.

    Of the dtype of the queries, made once and sliced: torch makes numbers of a mask of truth values at every call, and
    keeps them for the backward pass, layer by layer.
    """

    mask: torch.Tensor
    cut: SequenceCut

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = self.cut.gather(k, v)
        mixed, done = [], 0
        for first, last in self.cut.chunks:
            for start in range(first, last, _QUERIES):
                stop = min(start + _QUERIES, last)
                queries = slice(done, done := done + stop - start)
                seen = k[:, :, :stop], v[:, :, :stop]
                mask = self.mask[:, :, queries, :stop]
                mixed.append(F.scaled_dot_product_attention(q[:, :, queries], *seen, attn_mask=mask, enable_gqa=True))
        return torch.cat(mixed, 2)


@dataclass(frozen=True)
class BlockAttention:
    mask: BlockMask
    cut: SequenceCut

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = self.cut.gather(k, v)
        return _flex_attention()(q, k, v, block_mask=self.mask, enable_gqa=True)


@functools.cache
def _flex_attention() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # not compiled, it makes all scores


def document_mask(document_ids: torch.Tensor, cut: SequenceCut, dtype: torch.dtype) -> torch.Tensor:
    """[batch, 1, queries, keys] of 0 and −inf."""
    same = cut.take(document_ids)[:, :, None] == document_ids[:, None, :]
    places = cut.places(document_ids.device)
    seen = same & (places[:, None] >= torch.arange(cut.length, device=places.device))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf).unsqueeze(1)


def block_mask(document_ids: torch.Tensor | None, cut: SequenceCut, device: torch.device) -> BlockMask:
    """The same for FlexAttention (Dong et al. 2024, arXiv:2412.05496)."""
    places = cut.places(device)
    queries = None if document_ids is None else cut.take(document_ids)

    def sees(batch, head, query, key):
        not_ahead = places[query] >= key
        return not_ahead if queries is None else not_ahead & (queries[batch, query] == document_ids[batch, key])

    rows = None if document_ids is None else len(document_ids)
    return create_block_mask(sees, rows, None, len(places), cut.length, device=device)
