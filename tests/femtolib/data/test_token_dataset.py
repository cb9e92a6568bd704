"""Rows are what was stored, each token exactly once, wherever the files are cut."""

import pickle

import numpy as np
import pytest

from femtolib.data.token_dataset import TokenDataset
from femtolib.data.token_files import Index, write_index, write_shard
from femtolib.errors import FemtoError

EOS = 0


@pytest.fixture
def store(tmp_path):
    """`store("a", [[[5, 6, EOS]], [[7, EOS]]])`: a token directory of two shards of one document each."""

    def store(name, shards, *, dtype="uint16", eos_id=EOS, tokenizer="0", largest_id=65_535):
        directory = tmp_path / name
        directory.mkdir()
        written = [
            write_shard(
                directory,
                number,
                np.array([token for document in documents for token in document], dtype),
                np.cumsum([0, *map(len, documents)], dtype=np.int64)[:-1],
            )
            for number, documents in enumerate(shards)
        ]
        index = Index(
            dtype=dtype,
            vocab_size=60_000,
            largest_id=largest_id,
            eos_id=eos_id,
            bos_id=None,
            tokens=sum(shard.tokens for shard in written),
            documents=sum(shard.documents for shard in written),
            skipped={"empty": 0, "bad": 0},
            sources=[],
            tokenizer_digest=tokenizer * 64,
            template_digest=None,
            shards=written,
        )
        write_index(directory, index)
        return directory

    return store


def _documents(lengths, first=1):
    """Documents of so many tokens, EOS included, in which no other id comes twice."""
    ids = iter(range(first, first + sum(lengths)))
    return [[*(next(ids) for _ in range(length - 1)), EOS] for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "seq_len", "rows", "left_over"), [([5, 3, 4, 2], 3, 4, 1), ([122], 60, 2, 1), ([5, 4], 4, 2, 0)]
)
def test_a_stream_holds_every_token_once(store, lengths, seq_len, rows, left_over):  # trl#4554
    stream = [token for document in _documents(lengths) for token in document]
    dataset = TokenDataset([store("tokens", [_documents(lengths)])], rows="stream", seq_len=seq_len)
    assert (len(dataset), dataset.tokens, dataset.tokens_left_over) == (rows, len(stream), left_over)
    for row in range(rows):
        tokens = dataset[row].tokens
        assert tokens.dtype == np.int64 and len(tokens) == seq_len + 1
    targets = [token for row in range(rows) for token in dataset[row].tokens[1:]]
    assert targets == stream[1 : len(stream) - left_over]


def test_rows_do_not_depend_on_how_the_stream_is_cut_into_files(store):
    random = np.random.default_rng(0)
    documents = _documents(random.choice([1, 2, 3, 5, 40], 60).tolist())
    number = {}
    for count, document in enumerate(documents):
        number |= {len(number) + place: count for place in range(len(document))}
    stream = [token for document in documents for token in document]
    halves = [store("one", [documents[:7], [], documents[7:9], documents[9:30]]), store("two", [documents[30:]])]
    for seq_len in (1, 4, 33, len(stream) - 1):
        whole = TokenDataset([store(f"whole{seq_len}", [documents])], rows="stream", seq_len=seq_len)
        cut = TokenDataset(halves, rows="stream", seq_len=seq_len)
        assert len(whole) == len(cut) == (len(stream) - 1) // seq_len
        assert (cut.tokens, cut.documents) == (len(stream), len(documents))
        for row in range(len(cut)):
            first = row * seq_len
            expected = [number[first + place] - number[first] for place in range(seq_len + 1)]
            for dataset in (whole, cut):
                assert dataset[row].tokens.tolist() == stream[first : first + seq_len + 1]
                assert dataset[row].document_ids.tolist() == expected


def test_ids_above_65535_survive_beside_narrow_ones(store):
    narrow = store("narrow", [[[65_535, EOS]]])
    wide = store("wide", [[[65_536, 2**31 - 1, EOS]]], dtype="uint32", largest_id=2**31 - 1)
    dataset = TokenDataset([narrow, wide], rows="stream", seq_len=4)
    assert dataset[0].tokens.tolist() == [65_535, EOS, 65_536, 2**31 - 1, EOS]
    assert dataset[0].document_ids.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("rows", ["stream", "padded"])
def test_an_id_that_the_tokenizer_does_not_have_is_told_with_its_row(store, rows):
    dataset = TokenDataset([store("one", [[[1, 2, EOS], [3, 9, EOS]]], largest_id=8)], rows=rows, seq_len=2)
    dataset[0]
    with pytest.raises(FemtoError, match=r"one: row 1 has the id 9, above .* 8: .*--deep"):
        dataset[1]


@pytest.mark.parametrize("rows", ["stream", "padded"])
@pytest.mark.parametrize("starts", [[1, 3], [0, 0], [0, -1], [0, 6], [0, 10**15]])
def test_documents_that_do_not_follow_each_other_are_damage(store, rows, starts):
    directory = store("one", [[[1, 2, EOS], [3, 4, EOS]]])
    write_shard(directory, 0, np.array([1, 2, EOS, 3, 4, EOS], np.uint16), np.array(starts, np.int64))
    with pytest.raises(FemtoError, match=r"one: shard 0 has documents that do not follow each other: .*--deep"):
        TokenDataset([directory], rows=rows, seq_len=2)[0]


def test_padded_rows_are_documents(store):
    documents = _documents([1, 2, 5, 6, 9])
    cut = [store("one", [documents[:1], documents[1:3]]), store("two", [documents[3:]])]
    dataset = TokenDataset(cut, rows="padded", seq_len=5)
    assert [dataset[row].tokens.tolist() for row in range(len(dataset))] == [tokens[:6] for tokens in documents]
    assert all(dataset[row].document_ids.tolist() == [0] * len(dataset[row].tokens) for row in range(len(dataset)))
    assert (dataset.truncated, dataset.rows_without_trained_tokens, dataset.tokens_left_over) == (1, 1, 0)


def test_no_row_lies_outside(store):
    dataset = TokenDataset([store("tokens", [_documents([9])])], rows="stream", seq_len=4)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            dataset[index]


def test_what_describes_the_rows_is_known_without_reading_them(store):
    one, two = store("one", [_documents([4])]), store("two", [_documents([4], first=50)])
    dataset = TokenDataset([one, two], rows="stream", seq_len=3)
    assert (dataset.eos_id, dataset.vocab_size, dataset.largest_id) == (EOS, 60_000, 65_535)
    assert dataset.tokenizer_directory == one and dataset.rows_without_trained_tokens is None
    assert dataset.digest == TokenDataset([one, two], rows="padded", seq_len=9).digest
    assert dataset.digest != TokenDataset([two, one], rows="stream", seq_len=3).digest
    copied = one.rename(one.with_name("moved"))
    assert dataset.digest == TokenDataset([copied, two], rows="stream", seq_len=3).digest


def test_a_copy_for_a_worker_is_small_and_reads_the_same(store):
    dataset = TokenDataset([store("tokens", [_documents([20_000, 20_000])])], rows="stream", seq_len=100)
    before = dataset[199]
    content = pickle.dumps(dataset)
    assert len(content) < 4000
    after = pickle.loads(content)[199]
    assert np.array_equal(before.tokens, after.tokens) and np.array_equal(before.document_ids, after.document_ids)


def test_directories_of_two_tokenizers_are_refused(store):
    one, two = store("one", [_documents([4])]), store("two", [_documents([4])], eos_id=5, tokenizer="1")
    with pytest.raises(FemtoError) as error:
        TokenDataset([one, two], rows="stream", seq_len=3)
    tokenizer, eos = error.value.faults
    assert str(two) in tokenizer and "tokenizer_digest" in tokenizer and "eos_id is 5, but 0" in eos


def test_data_that_train_nothing_are_refused(store):
    short = store("short", [_documents([4])])
    with pytest.raises(FemtoError, match=r"short: 4 tokens, but a row of data\.seq_len 4 takes 5"):
        TokenDataset([short], rows="stream", seq_len=4)
    with pytest.raises(FemtoError, match="no documents"):
        TokenDataset([store("empty", [])], rows="padded", seq_len=4)
    with pytest.raises(FemtoError, match="2 of 2 rows have no trained tokens"):  # trl#6668
        TokenDataset([store("bare", [[[EOS], [EOS]]])], rows="padded", seq_len=4)
