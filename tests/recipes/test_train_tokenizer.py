"""The tokenizer recipe through the command line: the shipped one again, any other, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import femtolib.data.builtin as builtin
from femtolib.data.tokenizer import load_tokenizer


@pytest.fixture
def train(tmp_path, capfd):
    """`train(input="a.txt", …)`: runs the recipe in this process; its exit code and what it wrote on stderr."""
    from femto.main import main

    def train(**keys):
        config = {"output_dir": str(tmp_path / "made"), "vocab_size": 300} | keys
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        code = main(["run", "train_tokenizer", "--config", str(tmp_path / "config.yaml")])
        return code, capfd.readouterr().err

    return train


@pytest.mark.parametrize("threads", ["1", "4"])
def test_the_shipped_config_makes_the_shipped_tokenizer_byte_for_byte(tmp_path, threads):
    femto = "import sys; from femto.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "run",
        "train_tokenizer",
        "--config",
        "configs/train_tokenizer.yaml",
        f"output_dir={tmp_path / 'made'}",
    ]
    environment = os.environ | {"RAYON_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", femto, *arguments], check=True, cwd=tmp_path, env=environment)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (builtin.TOKENIZER / name).read_bytes()


def test_special_tokens_come_first_and_the_first_ends_a_document(tmp_path, train):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 20 + "größe 東京 🙂\n")
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    code, errors = train(input=str(tmp_path / "*.txt"), special_tokens=special, vocab_size=270)
    assert code == 0, errors
    tokenizer = load_tokenizer(tmp_path / "made")
    assert [tokenizer.backend.token_to_id(token) for token in special] == [0, 1, 2]
    assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.largest_id) == (0, 270, 269)
    text = "never seen: \0 \x7f é ﷽ <|end|>\r\n"
    ids, _ = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids[:-1]) == text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_text_with_too_few_pairs_gives_a_smaller_vocabulary_and_says_so(tmp_path, train):
    (tmp_path / "a.txt").write_text("ab")
    code, errors = train(input=str(tmp_path / "a.txt"))
    assert code == 0 and "pairs for 258 ids only, not 300" in errors


@pytest.mark.parametrize(
    ("content", "keys", "fault"),
    [
        ('{"text": "a"}', {"vocab_size": 256}, "vocab_size: 256 is below 257"),
        ('{"text": "a"}', {"special_tokens": ["<a>", "<a>"]}, "special_tokens"),
        ('{"text": "a"}', {"special_tokens": []}, "special_tokens"),
        ('{"text": "a"}', {"special_tokens": ["x"]}, "special_tokens"),
        ('{"text": "a"}', {"input": []}, "input"),
        ('{"text": "a"}', {"input": "*.zip"}, "no file matches"),
        ('{"text": "a"}\n{"text": 5}', {}, "a.jsonl:2: the text is 5"),
        ('{"text": null}', {}, "no documents (1 empty, 0 bad)"),
        ("", {}, "no documents"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(tmp_path, train, content, keys, fault):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    code, errors = train(**{"input": str(path)} | keys)
    assert code == 2 and fault in errors and "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "config.yaml"}


def test_an_existing_output_is_refused(tmp_path, train):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").touch()
    code, errors = train(input="builtin")
    assert code == 2 and "exists already" in errors
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["mine"]


def test_the_config_names_the_end_token_for_transformers():
    settings = json.loads(Path(builtin.TOKENIZER, "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
