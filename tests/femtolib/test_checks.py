"""What is found wrong in model, tokenizer and data together, before any work."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from femtolib.checks import check_inputs
from femtolib.data.tokenizer import load_tokenizer
from femtolib.errors import FemtoError
from femtolib.sections import DataSection, ModelSection


@pytest.fixture
def tokens(uneven_tokens, tmp_path) -> Path:
    """A token directory of 320 ids (EOS 319) whose index bears the digest of the tokenizer beside it."""
    directory = Path(shutil.copytree(uneven_tokens, tmp_path / "tokens"))
    edit(directory / "index.json", tokenizer_digest=load_tokenizer(directory).digest)
    return directory


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def check(tiny_llama, tokens):
    """`check(model, data, tokenizer)`: a small model on `tokens`, with some keys set on top."""

    def check(model: dict | None = None, data: dict | None = None, tokenizer: str | None = None):
        model = model if model and "path" in model else tiny_llama | (model or {})
        data = {"train": [str(tokens)], "seq_len": 64} | (data or {})
        return check_inputs(ModelSection(**model), DataSection(**data), tokenizer)

    return check


@pytest.fixture
def faults(check):
    def faults(*arguments, **keys) -> list[str]:
        with pytest.raises(FemtoError) as caught:
            check(*arguments, **keys)
        assert caught.value.exit_code == 2
        return caught.value.faults

    return faults


def test_an_inline_model_takes_bos_and_eos_from_the_data_or_the_tokenizer(check, tokens):
    config = check()
    assert (config.bos_token_id, config.eos_token_id, config.hidden_size) == (None, 319, 64)
    assert check(tokenizer=str(tokens)) == config
    assert check(data={"train": ["builtin"]}, tokenizer=str(tokens)) == config
    given = check({"eos_token_id": 5, "bos_token_id": 0})
    assert (given.bos_token_id, given.eos_token_id) == (0, 5)


def test_data_named_twice_are_refused(faults, tokens, tmp_path):
    [fault] = faults(data={"train": [str(tokens), str(tokens)]})
    assert "data.train" in fault and str(tokens) in fault and "twice" in fault
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text('{"text": "a"}\n')
    [fault] = faults(data={"train": [str(raw), str(raw / "a.jsonl")]}, tokenizer=str(tokens))
    assert "data.train" in fault and "a.jsonl" in fault and "twice" in fault


def test_a_model_on_disk_keeps_its_own_token_ids(check, tiny_llama, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(tiny_llama | {"eos_token_id": 7, "bos_token_id": 6}))
    config = check({"path": tmp_path / "hf"})
    assert (config.bos_token_id, config.eos_token_id) == (6, 7)


def test_the_vocabulary_must_hold_every_id_and_may_hold_more(check, faults, tokens):
    assert check({"vocab_size": 320}).vocab_size == 320
    assert check({"vocab_size": 1000}).vocab_size == 1000
    for tokenizer in (None, str(tokens)):
        [fault] = faults({"vocab_size": 319}, tokenizer=tokenizer)
        assert "vocab_size is 319" in fault and "ids up to 319" in fault and "at least 320" in fault
        assert str(tokens) in fault


def test_an_added_token_beyond_the_vocabulary_counts(faults, tokens):
    edit(tokens / "index.json", largest_id=400, vocab_size=321)
    [fault] = faults({"vocab_size": 321})
    assert "vocab_size is 321" in fault and "at least 401" in fault


def test_a_row_must_fit_the_models_positions(check, faults):
    assert check(data={"seq_len": 128})
    [fault] = faults(data={"seq_len": 129})
    assert "data.seq_len: 129" in fault and "128" in fault


def test_raw_text_needs_a_tokenizer(faults, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    for data in ({"train": [str(tmp_path / "a.txt")]}, {"validation": ["builtin"]}, {"train": ["builtin"]}):
        [fault] = faults(data=data)
        assert fault.startswith("tokenizer: needed") and "builtin" in fault


def test_token_directories_and_tokenizer_must_agree(check, faults, tokens, tmp_path):
    other = Path(shutil.copytree(tokens, tmp_path / "other"))
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"w5"', '"another"'))
    [fault] = faults(data={"train": [str(other)]})
    assert f"data.train: {other}: its tokenizer.json is not the one that made its tokens" in fault
    edit(other / "index.json", tokenizer_digest=load_tokenizer(other).digest)
    for key in ("train", "validation"):
        [fault] = faults(data={key: [str(tokens), str(other)] if key == "train" else [str(other)]})
        assert f"data.{key}: {other}" in fault and "another tokenizer" in fault and str(tokens) in fault
    [fault] = faults(data={"train": [str(other)]}, tokenizer=str(tokens))
    assert str(other) in fault and str(tokens) in fault
    assert check(data={"validation": [str(tokens)]}, tokenizer=str(tokens))


def test_every_fault_is_told_at_once_and_once(faults, tokens, tmp_path, tiny_llama):
    broken = Path(shutil.copytree(tokens, tmp_path / "broken"))
    (broken / "index.json").write_text("{")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(tiny_llama | {"hidden_size": 0, "attention_dropout": 0.1}))
    (tmp_path / "tokenizer.json").write_text("{}")
    found = faults(
        {"path": tmp_path / "hf"},
        {"train": [str(broken), "builtin"], "validation": [str(broken)]},
        str(tmp_path / "tokenizer.json"),
    )
    for word in ("hidden_size", "attention_dropout", "data.train", "data.validation", str(tmp_path / "tokenizer.json")):
        assert sum(word in fault for fault in found) == 1, (word, found)
    assert len(found) == 5


def test_what_does_not_depend_on_a_broken_file_is_still_told(faults, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    found = faults(
        {"vocab_size": 5}, {"train": ["builtin"], "seq_len": 500}, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert len(found) == 2 and any("seq_len: 500" in fault for fault in found)
    found = faults({"vocab_size": 5}, {"seq_len": 500}, tokenizer=str(tmp_path / "tokenizer.json"))
    assert len(found) == 3 and any("vocab_size is 5" in fault for fault in found)


def test_nothing_but_headers_is_read(check, tokens, monkeypatch):
    for path in tokens.glob("tokens-*.safetensors"):
        size = path.stat().st_size
        path.write_bytes(b"\xff" * size)

    def fail(*_, **__):
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(torch, "empty", fail)
    assert check(tokenizer=str(tokens))
