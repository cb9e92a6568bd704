"""Whether a token sees what it should and nothing else: against scores written out, for whole rows and for the parts
that ranks have of them. Ranks are played one after another; that they meet is tested with the layouts."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from femtolib import attention
from femtolib.attention import CausalAttention, MaskedAttention, block_mask, causal_attention, plan_attention
from femtolib.parallel.context import SequenceCut

CPU = torch.device("cpu")
SEQUENCE = 16
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7, [0] * 12 + [-1] * 4])  # the second is padded


class Part(SequenceCut):
    """The part of one rank, at which whole keys and values have arrived."""

    def gather(self, k, v):
        return k, v


def written_out(q, k, v, documents=None):
    """Attention as its definition has it, [batch, heads, sequence, dim]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    for row in range(len(q)):
        for query in range(q.shape[2]):
            for key in range(k.shape[2]):
                if key > query or (documents is not None and documents[row, query] != documents[row, key]):
                    scores[row, :, query, key] = -math.inf
    return scores.softmax(-1) @ v


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, SEQUENCE, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize(("ranks", "queries"), [(1, 512), (2, 512), (4, 512), (1, 3), (2, 3)])
def test_each_rank_gets_its_part_of_what_attention_is(qkv, monkeypatch, documents, ranks, queries):
    monkeypatch.setattr(attention, "_QUERIES", queries)
    q, k, v = qkv
    whole = written_out(q, k, v, documents)
    seen = []
    for rank in range(ranks):
        part = Part(SEQUENCE, rank, ranks)
        attend = plan_attention(documents, part, device=CPU, dtype=q.dtype)
        places = part.places(CPU)
        torch.testing.assert_close(attend(q[:, :, places], k, v), whole[:, :, places], rtol=1e-12, atol=1e-13)
        seen += places.tolist()
    assert sorted(seen) == list(range(SEQUENCE))


def gradients(attend, *qkv):
    qkv = [x.detach().requires_grad_() for x in qkv]
    mixed = attend(*qkv)
    mixed.backward(torch.arange(mixed.numel()).view_as(mixed).cos().to(mixed.dtype))
    return [mixed.detach(), *(x.grad for x in qkv)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_a_row_has_the_gradients_of_what_is_written_out(qkv, rank):
    q, k, v = qkv
    part = Part(SEQUENCE, rank, 2)
    q = q[:, :, part.places(CPU)]
    placed = lambda q: torch.zeros(2, 4, SEQUENCE, 8, dtype=q.dtype).index_copy(2, part.places(CPU), q)  # noqa: E731
    expected = gradients(lambda q, k, v: written_out(placed(q), k, v)[:, :, part.places(CPU)], q, k, v)
    attend = plan_attention(None, part, device=CPU, dtype=q.dtype)
    for qkv in ((q, k, v), [x.mT.contiguous().mT for x in (q, k, v)]):  # the kernel wants numbers side by side
        for mine, theirs in zip(gradients(attend, *qkv), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    narrow = gradients(plan_attention(None, part, device=CPU, dtype=torch.bfloat16), *(x.bfloat16() for x in (q, k, v)))
    for mine, theirs in zip(narrow, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_block_mask_says_the_same_as_numbers(qkv, documents, ranks):
    q, k, v = (x.float() for x in qkv)
    whole = written_out(q, k, v, documents)
    for rank in range(ranks):
        part = Part(SEQUENCE, rank, ranks)
        blocks = block_mask(documents, part, CPU)
        rows = None if documents is None else len(documents)
        places = part.places(CPU)
        allowed = create_mask(blocks.mask_mod, rows, None, len(places), SEQUENCE, device="cpu")
        same = torch.zeros(1, SEQUENCE) if documents is None else documents
        assert torch.equal(allowed, attention.document_mask(same, part, q.dtype) == 0)
        mixed = flex_attention(q[:, :, places], k, v, block_mask=blocks, enable_gqa=True)
        torch.testing.assert_close(mixed, whole[:, :, places], rtol=1e-5, atol=1e-6)


def test_the_cheapest_kernel_that_is_right_is_taken():
    whole = SequenceCut(SEQUENCE)
    plan = {"device": CPU, "dtype": torch.float32}
    assert plan_attention(None, **plan) is plan_attention(None, whole, **plan) is causal_attention
    alone = torch.tensor([[0] * 9 + [-1] * 7, [-1] * 16])  # one document a row, and an empty row
    assert plan_attention(alone, whole, **plan) is causal_attention
    masked = plan_attention(DOCUMENTS, whole, **plan)
    assert isinstance(masked, MaskedAttention) and masked.mask.dtype == torch.float32
    assert isinstance(plan_attention(alone, Part(SEQUENCE, 1, 2), **plan), CausalAttention)


@pytest.mark.parametrize("length", [1, 5, 6])
def test_any_length_is_cut_where_one_rank_has_all_of_it(length):
    documents = torch.arange(length)[None] // 2
    q, k, v = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
    attend = plan_attention(documents, device=CPU, dtype=q.dtype)
    torch.testing.assert_close(attend(q, k, v), written_out(q, k, v, documents), rtol=1e-12, atol=1e-13)


def test_a_rank_has_a_chunk_and_its_mirror_image():
    chunks = [Part(16, rank, 4).chunks for rank in range(4)]
    assert chunks == [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]
