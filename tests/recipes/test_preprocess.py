"""The preprocessing recipe through the command line: from files of every kind to rows, and every fault a line."""

import gzip
import json
import re

import pytest
import yaml

from femtolib.data.token_dataset import TokenDataset
from femtolib.data.token_files import read_index, verify_digests
from femtolib.data.tokenizer import load_tokenizer


@pytest.fixture
def preprocess(tmp_path, capfd):
    """`preprocess(input="a.txt", …)`: runs the recipe in this process; its exit code, stdout and stderr."""
    from femto.main import main

    def preprocess(*overrides, **keys):
        config = {"output_dir": str(tmp_path / "made"), "tokenizer": "builtin"} | keys
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        code = main(["run", "preprocess", "--config", str(tmp_path / "config.yaml"), *overrides])
        return code, *capfd.readouterr()

    return preprocess


def texts(directory):
    """The documents of a token directory as text, read by rows of one document each."""
    tokenizer = load_tokenizer(directory)
    dataset = TokenDataset([directory], rows="padded", seq_len=1000)
    return [tokenizer.decode(dataset[i].tokens).removesuffix("<|endoftext|>") for i in range(len(dataset))]


def json_lines(*values):
    return "".join(json.dumps({"text": value}) + "\n" for value in values)


def test_files_of_every_kind_become_one_token_directory(tmp_path, preprocess):
    pyarrow, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    import pyarrow.parquet as parquet

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.jsonl").write_text(json_lines("one", "größe"))
    (folder / "2.json.gz").write_bytes(gzip.compress(json_lines("two", None).encode()))
    (folder / "3.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(json_lines("three").encode()))
    parquet.write_table(pyarrow.table({"text": ["four", " "]}), folder / "4.parquet")
    (folder / "5.txt").write_bytes(b"\xef\xbb\xbffive\r\n\r\nsix")
    code, output, errors = preprocess(input=[str(folder / "5.txt"), str(folder / "*.json*"), str(folder / "4.parquet")])
    assert code == 0, errors
    directory = tmp_path / "made"
    assert texts(directory) == ["five", "six", "one", "größe", "two", "three", "four"]
    index = read_index(directory)
    verify_digests(directory, index)
    assert index.skipped == {"empty": 3, "bad": 0}
    assert index.sources == [
        str(folder / name) for name in ("5.txt", "1.jsonl", "2.json.gz", "3.jsonl.zst", "4.parquet")
    ]
    assert f"{index.tokens:,} tokens (uint16) in 7 documents" in output and "3 documents without text, 0 bad" in output
    assert re.search(r"documents/s", errors) and re.search(r"B/s", errors)


def test_a_txt_file_can_be_one_document(tmp_path, preprocess):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert preprocess(input=str(tmp_path / "a.txt"), text_documents="file")[0] == 0
    assert texts(tmp_path / "made") == ["one\ntwo\n"]


def test_the_shipped_config_splits_the_built_in_corpus(tmp_path, preprocess):
    code, output, errors = preprocess(input="builtin", validation_fraction=0.1)
    assert code == 0, errors
    train, validation = (read_index(tmp_path / "made" / part) for part in ("train", "validation"))
    assert train.documents + validation.documents == 549
    assert train.tokens + validation.tokens == 341_501 + 549
    assert train.digest != validation.digest and train.tokenizer_digest == validation.tokenizer_digest
    assert f"data.train={tmp_path / 'made' / 'train'}" in output


def test_keys_reach_the_token_directory(tmp_path, preprocess):
    (tmp_path / "a.jsonl").write_text('{"body": "a b"}\n' * 50 + "oops\n")
    code, _, errors = preprocess(
        *("workers=3", "shard_tokens=20", "on_bad_document=skip", "text_key=body", "eos_token='<|endoftext|>'"),
        input=str(tmp_path / "a.jsonl"),
    )
    assert code == 0, errors
    index = read_index(tmp_path / "made")
    assert index.documents == 50 and index.skipped == {"empty": 0, "bad": 1}
    assert {shard.tokens for shard in index.shards[:-1]} == {18}  # six documents of three tokens
    assert f"skipped: {tmp_path / 'a.jsonl'}:51: not JSON" in errors


@pytest.mark.slow
def test_a_hugging_face_data_set_is_read_by_path_and_split(tmp_path, preprocess):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json_lines("a", "b"))
    (tmp_path / "set" / "test.jsonl").write_text(json_lines("c"))
    code, _, errors = preprocess(dataset={"path": str(tmp_path / "set"), "split": "test"})
    assert code == 0, errors
    assert texts(tmp_path / "made") == ["c"]


@pytest.mark.parametrize(
    ("content", "keys", "fault"),
    [
        (json_lines("a") + "\n" + '{"text": "x"\n' + json_lines("b"), {}, "a.jsonl:3: not JSON"),
        (json_lines("a", 5), {}, "a.jsonl:2: the text is 5 (int), not a string"),
        ("{}\n", {}, "a.jsonl:1: no key 'text'"),
        ('[\n{"text": "a"}\n]\n', {}, "a JSON array? Wanted: one object a line"),
        (json_lines("a\ud800"), {}, "a.jsonl:1: half a surrogate pair"),
        ("", {}, "no documents in"),
        (json_lines("", None, "  "), {}, "(3 empty, 0 bad)"),
        (json_lines("a"), {"validation_fraction": 1e-9}, "leaves validation empty"),
        (json_lines("a"), {"validation_fraction": 1}, "validation_fraction"),
        (json_lines("a"), {"validation_fraction": 0.0}, "validation_fraction"),
        (json_lines("a"), {"shard_tokens": 0}, "shard_tokens"),
        (json_lines("a"), {"workers": 0}, "workers"),
        (json_lines("a"), {"on_bad_document": "ignore"}, "on_bad_document"),
        (json_lines("a"), {"tokenizer": "nowhere"}, "tokenizer"),
        (json_lines("a"), {"eos_token": "</s>"}, "'</s>' is no token"),
        (json_lines("a"), {"dataset": {"path": "x"}}, "exactly one of input and dataset"),
        (json_lines("a"), {"input": None}, "exactly one of input and dataset"),
        (json_lines("a"), {"input": "nowhere.jsonl"}, "no such file"),
        (json_lines("a"), {"shard_token": 5}, "shard_tokens"),
    ],
)
def test_a_fault_is_one_line_and_leaves_nothing(tmp_path, preprocess, content, keys, fault):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    code, _, errors = preprocess(**{"input": str(path)} | keys)
    assert code == 2
    assert [fault in line for line in errors.splitlines() if line.startswith("error: ")] == [True], errors
    assert "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "config.yaml"}


def test_one_input_that_stands_twice_is_refused(tmp_path, preprocess):
    (tmp_path / "a.jsonl").write_text(json_lines("a"))
    code, _, errors = preprocess(input=[str(tmp_path / "a.jsonl"), str(tmp_path)])
    assert code == 2 and "a.jsonl is named twice" in errors


def test_a_second_run_does_not_touch_the_first(tmp_path, preprocess):
    (tmp_path / "a.jsonl").write_text(json_lines("a"))
    assert preprocess(input=str(tmp_path / "a.jsonl"))[0] == 0
    before = (tmp_path / "made" / "index.json").read_bytes()
    code, _, errors = preprocess(input="builtin")
    assert code == 2 and "exists already: remove it, or choose another" in errors
    assert (tmp_path / "made" / "index.json").read_bytes() == before


# pyyaml#900: a config that calls a function
def test_a_tag_in_the_config_runs_nothing(tmp_path, capfd):
    from femto.main import main

    path = tmp_path / "config.yaml"
    path.write_text(
        f"output_dir: out\ninput: builtin\ntokenizer: !!python/object/apply:open ['{tmp_path}/canary', w]\n"
    )
    assert main(["run", "preprocess", "--config", str(path)]) == 2
    assert not (tmp_path / "canary").exists() and "Traceback" not in capfd.readouterr().err
