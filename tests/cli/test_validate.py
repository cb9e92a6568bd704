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


@pytest.fixture
def validate_on(femto, write_config):
    """`validate_on("--nproc-per-node 2", config, …, recipe="distributed_pretrain")`: the same of a recipe for several
    processes, with torchrun options."""

    def validate_on(options: str, config: dict, *more: str, recipe: str = "distributed_pretrain"):
        path = write_config(config)
        return femto("validate", *options.split(), recipe, "--config", path, "device=cpu", *more)

    return validate_on


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


def test_parity_is_asked_for_its_recipe_and_that_recipe_s_config(femto):
    assert femto("validate", "parity", "--config", "parity").code == 0
    for override, wanted in [
        ("overrides=[lr=2]", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("overrides=[max_steps=3]", "max_steps is parity's to set"),
    ]:
        ended = femto("validate", "parity", "--config", "parity", override)
        assert ended.code == 2 and wanted in ended.error


# ── Several processes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "overrides", "sizes", "numbers"),
    [
        ("", [], (1, 1, 1, 1), ["ranks: 1 =", "at most 115,008 parameters", "3 micro-batches a rank (2 rows of"]),
        ("--nproc-per-node 2", [], (1, 2, 1, 1), ["at most 57,504 parameters", "2 micro-batches a rank (6 rows of"]),
        # 320 ids over 3 ranks: 107 rows; norms of 64: 22
        ("--nproc-per-node=3", ["global_batch_size=12"], (1, 3, 1, 1), ["at most 38,894 ", "1 micro-batch a rank;"]),
        ("--nproc-per-node 4", ["parallel.dp_replicate=2"], (2, 2, 1, 1), ["at most 57,504 parameters a rank"]),
        ("--nnodes 2 --nproc-per-node 2", ["parallel.dp_shard=4"], (1, 4, 1, 1), ["ranks: 4 =", "at most 28,752"]),
        (
            "--nnodes 128 --nproc-per-node 8",
            ["parallel.dp_shard=8", "parallel.dp_replicate=128", "schedule.warmup_steps=99"],
            (128, 8, 1, 1),
            ["note: 1021 of 1024 ranks get empty rows alone", "warmup_steps: 99 is longer than the run of"],
        ),
        ("--nnodes 1:2 --nproc-per-node 2 --rdzv-endpoint host:1", [], (1, 4, 1, 1), ["ranks: 4 ="]),
        # An eighth of every matrix, a quarter of the five norms of 64.
        ("--nproc-per-node 8", ["parallel.cp=2", "parallel.tp=2"], (1, 2, 2, 2), ["at most 14,416 parameters a rank"]),
    ],
)
def test_the_layout_and_each_ranks_share_are_printed(validate_on, config, options, overrides, sizes, numbers):
    parallel = dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True))
    ended = validate_on(options, config, *overrides)
    assert ended.code == 0, ended.stderr
    assert " × ".join(f"{name} {size}" for name, size in parallel.items()) in ended.stdout
    for number in numbers:
        assert number in ended.stdout
    assert json.loads(validate_on(options, config, *overrides, "--json").stdout)["parallel"] == parallel


def test_who_holds_and_reads_what_is_drawn(validate_on, config):
    sizes = ["parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.cp=2", "parallel.tp=2", "data.seq_len=64"]
    shown = validate_on("--nproc-per-node 8", config, *sizes).stdout.splitlines()
    [first] = [number for number, line in enumerate(shown) if line.split()[:2] == ["rank", "copy"]]
    drawn = [line.split(maxsplit=13) for line in shown[first + 1 : first + 9]]
    assert [line[0] for line in drawn] == [*"01234567"]
    # copy, shard, rows, matrices: tp peers are neighbours, then cp; who shares a row has other tokens of it.
    assert [[line[i] for i in (1, 4, 7, 10)] for line in drawn] == [
        [*"0000"], [*"0001"], [*"0100"], [*"0101"], [*"1010"], [*"1011"], [*"1110"], [*"1111"]
    ]  # fmt: skip
    assert [line[13] for line in drawn[:4]] == ["0–15 and 48–63"] * 2 + ["16–31 and 32–47"] * 2
    many = validate_on("--nnodes 128 --nproc-per-node 8", config).stdout.splitlines()
    assert [line.split()[0] for line in many if line.startswith("  ")][1:] == [*"01234567", "…", "1023"]


@pytest.mark.parametrize(
    ("options", "overrides", "wanted"),
    [
        ("--nproc-per-node 3", ["parallel.dp_replicate=2"], "needs a multiple of 2 processes, and there are 3"),
        ("--nproc-per-node 2", ["parallel.dp_shard=4"], "dp_shard 4 needs 4 processes, and there are 2"),
        ("--nnodes 2:3 --nproc-per-node 2", ["parallel.dp_shard=6"], "dp_shard 6 needs 6 processes, and there are 4"),
        ("", ["parallel.dp_shard=2"], "dp_shard 2 needs 2 processes, and there is 1"),
        ("--nproc-per-node 4", ["parallel.tp=4"], "parallel.tp: 4 does not divide the model's num_key_value_heads, 2"),
        (
            "--nproc-per-node 2",
            ["parallel.cp=2", "data.seq_len=66"],
            "data.seq_len: 66 is not a multiple of 2 · par",
        ),
        ("--nproc-per-node none", [], "--nproc-per-node none"),
        ("--nproc-per-node 2 --show 3", [], "only torchrun's options stand before RECIPE"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_both_numbers_as_run_does(
    validate_on, femto, write_config, config, options, overrides, wanted
):
    assert wanted in validate_on(options, config, *overrides).error
    rendezvous = ["--rdzv-endpoint", "localhost:1"] if "--nnodes" in options and ":" not in options else []
    if "2:3" not in options:  # a range of nodes: run knows when they have come
        run = femto("run", *options.split(), *rendezvous, "distributed_pretrain", "--config", write_config(config),
                    "device=cpu", *overrides)  # fmt: skip
        assert run.code == 2 and wanted in run.error


@pytest.mark.parametrize(
    ("options", "overrides", "ranks", "micro_batches"),
    [
        ("", [], 1, "3 micro-batches a rank (2 rows of the last stay empty)"),
        ("", ["processes=3"], 3, "1 micro-batch a rank (2 rows of the last stay empty)"),
        ("", ["processes=3", "micro_batch_size=1"], 3, "4 micro-batches a rank (2 rows of the last stay empty)"),
        (
            "",
            ["processes=5", "micro_batch_size=2", "dtype=float16", "accumulate_in=dtype"],
            5,
            "1 micro-batch a rank;",
        ),
        ("--nproc-per-node 2", [], 2, "2 micro-batches a rank (6 rows of the last stay empty)"),
        ("--nproc-per-node 3", ["micro_batch_size=1"], 3, "4 micro-batches a rank (2 rows of the last stay empty)"),
        ("--nnodes 5 --nproc-per-node 2", ["micro_batch_size=1"], 10, "1 micro-batch a rank;"),
        (
            "--nnodes 1:2 --nproc-per-node 1 --rdzv-endpoint host:1",
            ["micro_batch_size=5"],
            2,
            "1 micro-batch a rank;",
        ),
    ],
)
def test_each_rank_of_data_parallelism_has_the_whole_model_and_its_part_of_the_rows(
    validate_on, config, options, overrides, ranks, micro_batches
):
    ended = validate_on(options, config, *overrides, recipe="data_parallel_pretrain")
    assert ended.code == 0, ended.stderr
    sizes = {"dp_replicate": ranks, "dp_shard": 1, "cp": 1, "tp": 1}
    shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
    assert f"ranks: {ranks} = {shown}; at most 115,008 parameters a rank" in ended.stdout
    assert f"of 10 rows, 160 tokens, each in {micro_batches}" in ended.stdout
    ended = validate_on(options, config, *overrides, "--json", recipe="data_parallel_pretrain")
    numbers = json.loads(ended.stdout)
    assert (numbers["parameters"], numbers["parallel"]) == (115_008, sizes)


@pytest.mark.parametrize(
    ("options", "overrides", "wanted"),
    [
        ("--nproc-per-node 2", ["processes=2"], "processes: 2 is for a run without torchrun's options"),
        ("", ["parallel.dp_shard=2"], "unknown key 'parallel'"),
        ("", ["processes=0"], "processes: should be at least 1"),
        ("", ["accumulate_in=dtype"], "accumulate_in: has no effect with dtype: float32"),
    ],
)
def test_what_run_would_refuse_of_data_parallelism_is_refused_in_the_same_words(
    validate_on, femto, write_config, config, options, overrides, wanted
):
    for ended in (
        validate_on(options, config, *overrides, recipe="data_parallel_pretrain"),
        femto("run", *options.split(), "data_parallel_pretrain", "--config", write_config(config), "device=cpu",
              *overrides),
    ):  # fmt: skip
        assert ended.code == 2 and wanted in ended.error


def test_the_rows_shown_are_the_first_of_the_run_whatever_the_layout(validate_on, config):
    one, four = (
        validate_on(options, config, "--show", "5").stdout.partition("\nrow ")[2].rpartition("\n/")[0]
        for options in ("", "--nproc-per-node 4")
    )
    assert one == four != ""


def test_a_single_recipe_takes_no_torchrun_options(femto, write_config, config):
    ended = femto("validate", "--nproc-per-node", "2", RECIPE, "--config", write_config(config))
    assert ended.code == 2 and "takes no torchrun options" in ended.error


# ── The shipped configs ───────────────────────────────────────────────────────────────────────────────────────────────

# What their owners have to bring, and the built-in corpus in its place, which is short of a global batch.
TO_FILL_IN = {
    "llama_150m": ["data.train", "data.validation"],
    "llama3_8b": ["tokenizer", "data.train", "data.validation"],
    "llama3_70b": ["tokenizer", "data.train", "data.validation"],
}
STAND_IN = ["tokenizer=builtin", "data.train=builtin", "data.validation=builtin", "data.tail=pad"]


@pytest.mark.parametrize("name", configs())
def test_every_shipped_config_is_valid(femto, here, name):
    path = configs()[name]
    ended = femto("validate", recipe_of(path), "--config", name, *(STAND_IN if name in TO_FILL_IN else []))
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize(("name", "keys"), TO_FILL_IN.items())
def test_a_config_that_is_not_filled_in_says_so_in_a_line_for_each_key(femto, here, name, keys):
    lines = femto("validate", recipe_of(configs()[name]), "--config", name).stderr.splitlines()
    assert len(lines) == len(keys)
    for line, key in zip(lines, keys, strict=True):
        assert line.startswith("error: ") and f": {key}: no such file or directory" in line


@pytest.mark.parametrize(
    ("name", "options", "parameters", "tokens"),
    [
        ("llama_150m", [], 151_020_288, 2**19),
        ("llama3_8b", ["--nproc-per-node", "8"], 8_030_261_248, 2**22),
        ("llama3_70b", ["--nnodes", "128", "--nproc-per-node", "8"], 70_553_706_496, 2**22),
    ],
)
def test_the_large_configs_have_the_sizes_of_their_models(femto, here, name, options, parameters, tokens):
    ended = femto("validate", *options, "distributed_pretrain", "--config", name, "device=cpu", *STAND_IN, "--json")
    numbers = json.loads(ended.stdout)
    assert (numbers["parameters"], numbers["tokens_per_step"]) == (parameters, tokens)
    trained = numbers["steps"] * numbers["tokens_per_step"]
    assert 19 < trained / parameters < 21.5  # tokens a parameter, as each says


def test_the_first_run_is_for_both_recipes_and_for_two_processes_without_empty_rows(femto, here):
    single = femto("validate", RECIPE, "--config", "llama_small")
    both = femto("validate", "--nproc-per-node", "2", "distributed_pretrain", "--config", "llama_small", "device=cpu")
    assert single.code == both.code == 0
    assert "each in 1 micro-batch a rank;" in both.stdout
