import json

import pytest

from femto.shipped import configs, recipe_of

RECIPE = "single_device_pretrain"


@pytest.fixture
def config(tiny_llama, uneven_tokens) -> dict:
    """10 rows of 16 tokens a step, on documents that are already tokenized."""
    return {
        "model": tiny_llama,
        "data": {"train": str(uneven_tokens), "seq_len": 16},
        "global_batch_size": 10,
        "micro_batch_size": 4,
        "epochs": 2,
    }


@pytest.fixture
def validate(femto, write_config):
    """`validate(config, …)`: `femto validate` on a config given as a dict."""
    return lambda config, *more: femto("validate", RECIPE, "--config", write_config(config), *more)


def stored(directory) -> dict:
    return json.loads((directory / "index.json").read_text())


def test_the_numbers_that_follow_from_a_config_are_printed(validate, config, uneven_tokens):
    index = stored(uneven_tokens)
    rows = (index["tokens"] - 1) // 16
    steps = 2 * (rows // 10)
    ended = validate(config)
    assert ended.code == 0, ended.stderr
    parameters = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert f"{parameters:,} parameters" in ended.stdout
    assert f"{index['tokens']:,} tokens in {index['documents']} documents make {rows} rows of 16" in ended.stdout
    assert f"{steps} steps of 10 rows, 160 tokens, each in 3 micro-batches" in ended.stdout

    ended = validate(config, "--json")
    expected = {"parameters": parameters, "steps": steps, "tokens_per_step": 160, "parallel": None}
    assert json.loads(ended.stdout) == expected
    assert json.loads(validate(config, "--json", "epochs=3").stdout)["steps"] == steps // 2 * 3


def test_the_files_that_make_data_and_tokenizers_are_looked_for(femto, write_config, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = {"input": str(tmp_path), "tokenizer": "builtin", "output_dir": str(tmp_path / "tokens")}
    ended = femto("validate", "preprocess", "--config", write_config(config))
    assert ended.code == 0 and "input: 1 files" in ended.stdout, ended.stderr
    (tmp_path / "a.txt").unlink()
    ended = femto("validate", "preprocess", "--config", write_config(config))
    assert ended.code == 2 and "no file below this folder" in ended.stderr


def test_nothing_is_written(validate, config, tmp_path):
    assert validate(config, f"output_dir={tmp_path / 'output'}").code == 0
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimiser.lr=1", "optimizer"),
        ("max_steps=two", "max_steps"),
        ("data.train=nowhere", "nowhere"),
        ("model.vocab_size=100", "vocab_size is 100"),
        ("data.seq_len=129", "max_position_embeddings"),
        ("global_batch_size=1000", "no whole batch of 1000"),
        ("resume=must", "holds no run"),
        ("model.path=nowhere", "nowhere"),
    ],
)
def test_what_run_would_refuse_is_refused_in_the_same_words(validate, femto, write_config, config, override, wanted):
    ended = validate(config, override)
    assert ended.code == 2
    assert wanted in ended.stderr
    assert femto("run", RECIPE, "--config", write_config(config), override).code == 2


def test_weights_that_do_not_fit_their_config_are_refused(validate, config, tiny_llama, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, tmp_path / "model.safetensors")
    ended = validate({**config, "model": {"path": str(tmp_path)}})
    assert ended.code == 2 and "lacks" in ended.error and "model.embed_tokens.weight" in ended.error


def test_show_prints_the_first_rows_of_training_with_trained_tokens_marked(validate, config, uneven_tokens):
    config["data"] |= {"shuffle": False, "rows": "padded"}
    ended = validate(config, "--show", "4")
    rows = ended.stdout.split("\nrow ")[1:]
    assert len(rows) == 4 and rows[1].startswith("1: ")
    for row in rows:
        text = row.split("\n")[1]
        tokens, trained = int(row.split()[1]), int(row.split()[3])
        assert len(text.replace("⟦", " ").replace("⟧", " ").split()) == tokens
        assert trained == tokens - 1  # padded: all but the first token of a document
        if trained:
            assert text.index("⟦") > 0 and text.rstrip().endswith("⟧")


def test_deep_reads_the_data_and_finds_a_changed_byte(validate, config, uneven_tokens, tmp_path):
    import shutil

    copy = shutil.copytree(uneven_tokens, tmp_path / "tokens")
    config["data"]["train"] = str(copy)
    assert validate(config, "--deep").code == 0
    shard = copy / stored(copy)["shards"][0]["file"]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert validate(config).code == 0
    ended = validate(config, "--deep")
    assert ended.code == 2 and str(shard) in ended.error


def test_a_finished_run_and_a_changed_one_are_told_apart(validate, femto, write_config, config):
    path = write_config({**config, "max_steps": 2, "epochs": None})
    assert femto("run", RECIPE, "--config", path).code == 0
    start = json.loads((path.parent / "output" / "metrics.jsonl").read_text().splitlines()[0])
    numbers = json.loads(femto("validate", RECIPE, "--config", path, "--json").stdout)
    assert all(numbers[key] == start[key] for key in ("parameters", "steps", "parallel"))
    trained = {"path": str(path.parent / "output" / "model")}
    assert femto("validate", RECIPE, "--config", write_config({**config, "model": trained})).code == 0
    assert "finished after step 2" in femto("validate", RECIPE, "--config", path).stdout
    assert "goes on after step 2" in femto("validate", RECIPE, "--config", path, "max_steps=3").stdout
    ended = femto("validate", RECIPE, "--config", path, "seed=1")
    assert ended.code == 2 and "seed was 0 and is now 1" in ended.error


@pytest.mark.parametrize("name", configs())
def test_every_shipped_config_is_valid(femto, here, name):
    path = configs()[name]
    assert femto("validate", recipe_of(path), "--config", name).code == 0
