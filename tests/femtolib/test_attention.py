"""Whether a token sees what it should and nothing else: against scores written out, for whole rows and for the parts
that ranks have of them. Ranks are played one after another; that they meet is tested with the layouts."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from femtolib import attention
from femtolib.attention import MaskedAttention, block_mask, causal_attention, plan_attention
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
        numbers = (
            attention.causal_mask(part, CPU, q.dtype)
            if documents is None
            else attention.document_mask(documents, part, q.dtype)
        )
        assert torch.equal(allowed, numbers == 0)
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
    cut = Part(SEQUENCE, 1, 2)
    masks = [plan_attention(None, cut, **plan).mask for _ in range(2)]
    assert masks[0] is masks[1] and masks[0].shape == (1, 1, SEQUENCE // 2, SEQUENCE)


@pytest.mark.parametrize("length", [1, 5, 6])
def test_any_length_is_cut_where_one_rank_has_all_of_it(length):
    documents = torch.arange(length)[None] // 2
    q, k, v = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
    attend = plan_attention(documents, device=CPU, dtype=q.dtype)
    torch.testing.assert_close(attend(q, k, v), written_out(q, k, v, documents), rtol=1e-12, atol=1e-13)


def test_a_rank_has_a_chunk_and_its_mirror_image():
    chunks = [Part(16, rank, 4).chunks for rank in range(4)]
    assert chunks == [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]
