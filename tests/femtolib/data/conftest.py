"""Tokenizers as people bring them, made here without a network, and text files of every kind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|bos|>", "<|eos|>"


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Callable[..., Path]:
    """`byte_tokenizer(post="bos", files={"tokenizer_config.json": {…}}, change=f)`: a Hugging Face directory with a
    byte-level BPE of 300 ids, `<|bos|> <|eos|> <|im_start|> <|im_end|>` being 0 to 3.

    post: what the post-processor adds: "", "bos" or "bos eos". files: other JSON files of the directory, by default a
    tokenizer_config.json that names the EOS. change: called with the tokenizer before it is saved.
    """

    def make(post: str = "", files: dict[str, object] | None = None, change: Callable | None = None) -> Path:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[BOS, EOS, "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the cat sat on the mat and the dog lay on the log"] * 3, trainer)
        if post:
            template = {"bos": f"{BOS} $A", "bos eos": f"{BOS} $A {EOS}"}[post]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=[(BOS, 0), (EOS, 1)]
            )
        if change:
            change(tokenizer)
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(directory / "tokenizer.json"))
        for name, content in ({"tokenizer_config.json": {"eos_token": EOS}} if files is None else files).items():
            (directory / name).write_text(json.dumps(content))
        return directory

    return make


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory) -> Callable[..., Path]:
    """`word_tokenizer(65_537)`: a Hugging Face directory with a tokenizer of whole words, `w0 w1 …`, and `<eos>` last.

    added: that many further tokens beyond the vocabulary, `x0 x1 …`. end: special (an added token found in the text),
    or plain: a word of the vocabulary like any other.
    """

    def make(size: int, added: int = 0, end: str = "special") -> Path:
        vocabulary = {f"w{i}": i for i in range(size - 1)} | {"<eos>": size - 1}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if end == "special":
            tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
        tokenizer.add_tokens([f"x{i}" for i in range(added)])
        directory = tmp_path_factory.mktemp("words")
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
        return directory

    return make
