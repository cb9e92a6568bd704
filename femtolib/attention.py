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
    one text. Without a mask it is torch's causal kernel. With one, or with a part of each row, CUDA has FlexAttention,
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
    mask = causal_mask(cut, device, dtype) if document_ids is None else document_mask(document_ids, cut, dtype)
    return MaskedAttention(mask, cut)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass(frozen=True)
class MaskedAttention:
    """mask [1 or batch, 1, queries, keys]: what is added to the scores, 0 or −inf.

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


@functools.lru_cache(maxsize=1)
def causal_mask(cut: SequenceCut, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The same for every batch: [1, 1, queries, keys]."""
    return _numbers(_not_ahead(cut, device)[None], dtype)


def document_mask(document_ids: torch.Tensor, cut: SequenceCut, dtype: torch.dtype) -> torch.Tensor:
    same = cut.take(document_ids)[:, :, None] == document_ids[:, None, :]
    return _numbers(same & _not_ahead(cut, document_ids.device), dtype)


def _not_ahead(cut: SequenceCut, device: torch.device) -> torch.Tensor:
    """[queries, keys]: whether the key's place in the row is not after the query's."""
    return cut.places(device)[:, None] >= torch.arange(cut.length, device=device)


def _numbers(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[batch, queries, keys] of truth values → [batch, 1, queries, keys] of 0 and −inf."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, -torch.inf).unsqueeze(1)


def block_mask(document_ids: torch.Tensor | None, cut: SequenceCut, device: torch.device) -> BlockMask:
    """The same for FlexAttention (Dong et al. 2024, arXiv:2412.05496)."""
    places = cut.places(device)
    queries = None if document_ids is None else cut.take(document_ids)

    def sees(batch, head, query, key):
        not_ahead = places[query] >= key
        return not_ahead if queries is None else not_ahead & (queries[batch, query] == document_ids[batch, key])

    rows = None if document_ids is None else len(document_ids)
    return create_block_mask(sees, rows, None, len(places), cut.length, device=device)
