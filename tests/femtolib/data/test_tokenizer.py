"""A document becomes its own ids and one EOS, whatever the tokenizer's files ask for besides."""

import json

import numpy as np
import pytest
import tokenizers

from femtolib.data.tokenizer import load_tokenizer
from femtolib.errors import FemtoError


def ids(tokenizer, *texts):
    encoded, ends = tokenizer.encode_documents(texts)
    assert encoded.dtype == tokenizer.dtype and ends[-1] == len(encoded)
    return [document.tolist() for document in np.split(encoded, ends[:-1])]


# litgpt#706, TinyLlama#116: documents without a separator, or with two
@pytest.mark.parametrize(("post", "before"), [("", []), ("bos", [0]), ("bos eos", [0])])
def test_every_document_ends_in_one_eos_and_begins_with_the_bos_that_the_post_processor_adds(
    byte_tokenizer, post, before
):
    tokenizer = load_tokenizer(byte_tokenizer(post))
    letters = [tokenizer.backend.token_to_id(letter) for letter in "abc"]
    assert ids(tokenizer, "a", "b", "c") == [[*before, letter, 1] for letter in letters]
    assert tokenizer.bos_id == (0 if before else None)
    assert tokenizer.eos_id == 1


def test_a_template_that_doubles_its_bos_gives_one(byte_tokenizer):
    def double(tokenizer):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|bos|> <|bos|> $A <|eos|> <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
        )

    tokenizer = load_tokenizer(byte_tokenizer(change=double))
    assert ids(tokenizer, "a") == [[0, tokenizer.backend.token_to_id("a"), 1]]


@pytest.mark.parametrize("post", ["", "bos", "bos eos"])
def test_special_token_text_is_text_and_decodes_to_itself(byte_tokenizer, post):
    tokenizer = load_tokenizer(byte_tokenizer(post))
    text = "a<|eos|>b <|im_start|>system<|im_end|><|bos|>"
    (encoded,) = ids(tokenizer, text)
    body = encoded[bool(post) : -1]
    assert min(body) > 3
    assert tokenizer.decode(body) == text


def test_the_control_token_that_a_vocabulary_of_words_finds_in_a_text_is_named(word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer(100, end="plain"))
    encoded = tokenizer.encode_documents(["w1 w2", "w1 <eos> w2", "<eos>", "w3"])
    assert tokenizer.control_tokens_in(*encoded) == {1: "<eos>", 2: "<eos>"}


def test_an_unknown_word_is_no_control_token_though_its_token_is_special(byte_tokenizer, tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<eos>"])
    backend.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json", "<eos>")
    assert ids(tokenizer, "a never") == [[2, 0, 1]]
    assert tokenizer.control_tokens_in(*tokenizer.encode_documents(["a never", "never"])) == {}


def test_truncation_padding_and_dropout_are_switched_off_with_a_notice(byte_tokenizer, capsys):
    def cut(tokenizer):
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        tokenizer.model.dropout = 0.9

    plain, text = load_tokenizer(byte_tokenizer()), "the cat sat on the mat"
    assert capsys.readouterr().err == ""
    odd = load_tokenizer(byte_tokenizer(change=cut))
    notices = capsys.readouterr().err
    assert all(word in notices for word in ("truncation to 4", "padding", "dropout 0.9"))
    assert ids(odd, text, "a") == ids(plain, text, "a")
    assert odd.digest == plain.digest


def test_the_digest_tells_tokenizers_apart(byte_tokenizer):
    digests = [load_tokenizer(byte_tokenizer(post)).digest for post in ("", "bos", "bos eos")]
    assert len(set(digests)) == 3
    assert load_tokenizer(byte_tokenizer("bos")).digest == digests[1]


# LLM-Shearing#65: ids above 65535 wrapped to other words
@pytest.mark.parametrize(
    ("size", "added", "dtype"), [(65_536, 0, "uint16"), (65_537, 0, "uint32"), (65_536, 1, "uint32")]
)
def test_ids_have_two_bytes_only_where_the_largest_possible_one_fits(word_tokenizer, size, added, dtype):
    tokenizer = load_tokenizer(word_tokenizer(size, added))
    last = f"w{size - 2}" if not added else "x0"
    assert tokenizer.dtype == dtype
    assert tokenizer.largest_id == size + added - 1
    assert ids(tokenizer, f"w0 {last}") == [[0, size - 2 if not added else size, size - 1]]


# ── Which token ends a document ───────────────────────────────────────────────────────────────────────────────────────

NAMED_EOS = {
    "tokenizer_config.json": {"eos_token": {"content": "<|eos|>", "special": True}},
    "generation_config.json": {"eos_token_id": [3, 2]},
    "config.json": {"eos_token_id": 2},
}


@pytest.mark.parametrize(("names", "eos_id"), [(3, 1), (2, 3), (1, 2)])
def test_eos_is_the_tokenizer_configs_else_the_generation_configs_else_the_models(byte_tokenizer, names, eos_id):
    files = dict(list(NAMED_EOS.items())[3 - names :])
    assert load_tokenizer(byte_tokenizer(files={"tokenizer_config.json": {"eos_token": None}} | files)).eos_id == eos_id


def test_eos_is_the_key_where_no_file_names_one_and_refused_where_nothing_does(byte_tokenizer):
    directory = byte_tokenizer(files={})
    assert load_tokenizer(directory, "<|im_end|>").eos_id == 3
    with pytest.raises(FemtoError, match="does not say which token ends a document"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("files", "key", "fault"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|eos|>"}}, "<|im_end|>", "leave eos_token out"),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, None, "'</s>' is no token"),
        ({"tokenizer_config.json": {"eos_token": ["<|eos|>"]}}, None, "is no token"),
        ({"generation_config.json": {"eos_token_id": 300}}, None, "300 is no id"),
        ({"config.json": {"eos_token_id": True}}, None, "True is no id"),
        ({"tokenizer_config.json": ["eos_token"]}, None, "not a JSON object"),
        ({}, "</s>", "'</s>' is no token"),
    ],
)
def test_a_wrong_or_contradicting_eos_is_refused(byte_tokenizer, files, key, fault):
    with pytest.raises(FemtoError, match=fault):
        load_tokenizer(byte_tokenizer(files=files), key)


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_copied_files_give_the_same_tokenizer(byte_tokenizer, tmp_path):
    directory = byte_tokenizer("bos")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "model.safetensors").write_bytes(b"weights")
    tokenizer = load_tokenizer(directory)
    tokenizer.copy_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    copy = load_tokenizer(tmp_path)
    assert (copy.digest, copy.eos_id, copy.bos_id) == (tokenizer.digest, tokenizer.eos_id, tokenizer.bos_id)


def test_a_lone_file_of_any_name_is_copied_as_tokenizer_json(byte_tokenizer, tmp_path):
    file = byte_tokenizer(files={}).joinpath("tokenizer.json").rename(tmp_path / "mine.json")
    (tmp_path / "copy").mkdir()
    load_tokenizer(file, "<|eos|>").copy_files(tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["tokenizer.json"]


def test_the_builtin_tokenizer_has_2048_ids_and_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer("builtin")
    assert (tokenizer.vocab_size, tokenizer.largest_id, tokenizer.eos_id, tokenizer.bos_id) == (2048, 2047, 0, None)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.path.parent)
    text = "Call me Ishmael. Größe, 東京, \t\n 42!"
    assert ids(tokenizer, text) == [[*theirs(text)["input_ids"], theirs.eos_token_id]]
    assert theirs.decode(theirs(text)["input_ids"]) == text


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04canary", b"[1]", b'{"model": {"type": "Pickle"}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FemtoError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_and_one_of_the_older_kind_are_named(tmp_path):
    with pytest.raises(FemtoError, match="nowhere: No such file"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(FemtoError, match=r"no tokenizer\.json; .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_code_that_a_tokenizer_config_names_is_not_run(byte_tokenizer):
    directory = byte_tokenizer(
        files={"tokenizer_config.json": {"eos_token": "<|eos|>", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}}
    )
    (directory / "evil.py").write_text("open(__file__ + '.canary', 'w')")
    load_tokenizer(directory)
    assert json.loads((directory / "tokenizer_config.json").read_text())["auto_map"]
    assert not (directory / "evil.py.canary").exists()
