"""Whether every wrong config, file and combination ends with exit 2 and one readable line a fault, before any work and
with nothing left behind."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def config(tiny_llama, uneven_tokens) -> dict:
    """A config without a fault, for no step at all."""
    return {
        "device": "cpu",
        "threads": 1,
        "model": tiny_llama,
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": 16},
        "max_steps": 0,
    }


def assert_refused(result, *words: str, faults: int = 1) -> None:
    """Exit 2, one `error:` line a fault and no other word on the screen, every one of `words` in them, no output."""
    assert result.exit_code == 2, result
    assert len(result.errors) == faults, result
    assert "Traceback" not in result.stderr + result.stdout, result
    text = "\n".join(result.errors).lower()
    assert [word for word in words if word.lower() not in text] == [], result
    assert not result.output.exists(), [str(path) for path in result.output.rglob("*")]


def test_the_config_that_the_faults_are_planted_in_has_none(run, config):
    result = run(config)
    assert result.exit_code == 0 and (result.output / "model/model.safetensors").exists(), result
    assert not (result.output / "checkpoints").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # keys
        (["micro_batchsize=2"], ["micro_batchsize", "micro_batch_size"]),
        (["optimizer.beta=[0.9,0.95]"], ["optimizer.beta", "betas"]),
        (["data.seqlen=16"], ["data.seqlen", "seq_len"]),
        (["parallel.tp=2"], ["parallel"]),
        (["model.hidden_sise=64"], ["hidden_sise", "hidden_size"]),
        (["model.num_experts=8"], ["num_experts"]),
        (["seed"], ["seed", "key=value"]),
        (["optimizer=adamw"], ["optimizer", "adamw"]),
        (["seed.x=1"], ["seed"]),
        # types and bounds
        (["optimizer.lr=abc"], ["optimizer.lr", "abc"]),
        (["optimizer.lr=-1"], ["optimizer.lr", "-1"]),
        (["optimizer.lr=.nan"], ["optimizer.lr", "nan"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas"]),
        (["optimizer.betas=[0.9,1.5]"], ["betas", "1.5"]),
        (["optimizer.name=os.system"], ["optimizer.name", "os.system"]),
        (["optimizer.weight_decay=-0.1"], ["optimizer.weight_decay", "-0.1"]),
        (["schedule.name=cosin"], ["schedule.name", "cosin", "cosine"]),
        (["schedule.warmup_steps=-1"], ["schedule.warmup_steps", "-1"]),
        (["schedule.min_lr_ratio=2"], ["schedule.min_lr_ratio", "2"]),
        (["global_batch_size=0"], ["global_batch_size", "0"]),
        (["micro_batch_size=-1"], ["micro_batch_size", "-1"]),
        (["max_steps=1.5"], ["max_steps", "1.5"]),
        (["max_steps=010"], ["max_steps", "010"]),
        (["max_steps=3:25"], ["max_steps", "3:25"]),
        (["max_steps=true"], ["max_steps", "true"]),
        (["max_steps=-1"], ["max_steps", "-1"]),
        (["data.seq_len=0"], ["data.seq_len", "0"]),
        (["data.shuffle=perhaps"], ["data.shuffle", "perhaps"]),
        (["data.tail=keep"], ["data.tail", "keep", "drop", "pad"]),
        (["data.num_workers=-1"], ["data.num_workers", "-1"]),
        (["dtype=fp32"], ["dtype", "fp32", "float32"]),
        (["export.dtype=int8"], ["export.dtype", "int8"]),
        (["export.max_shard_bytes=0"], ["export.max_shard_bytes", "0"]),
        (["checkpoint.every=0"], ["checkpoint.every", "0"]),
        (["checkpoint.keep_last=0"], ["checkpoint.keep_last", "0"]),
        (["checkpoint.keep_last=-1"], ["checkpoint.keep_last", "-1"]),
        (["max_grad_norm=-1"], ["max_grad_norm", "-1"]),
        (["threads=0"], ["threads", "0"]),
        # combinations
        (["epochs=2"], ["max_steps", "epochs"]),
        (["max_steps=null"], ["max_steps", "epochs"]),
        (["dtype=float64"], ["float64", "param_dtype"]),
        (["param_dtype=float64"], ["float64", "dtype"]),
        (["dtype=float16"], ["dtype", "float16", "bfloat16"]),
        (["data.seq_len=129"], ["seq_len", "129", "128"]),
        (["model.vocab_size=319"], ["vocab_size", "319", "320"]),
        (["global_batch_size=38"], ["38", "37"]),
        (["schedule.name=wsd"], ["decay_steps"]),
        (["optimizer.momentum=0.9"], ["optimizer.momentum", "sgd"]),
        (["optimizer.lr=1e39"], ["optimizer.lr", "1e+39"]),
        (["validate_every=5"], ["validate_every", "data.validation"]),
        # models
        (["model.model_type=gpt2"], ["model_type", "gpt2", "llama"]),
        (["model.num_attention_heads=6"], ["hidden_size", "64", "6"]),
        (["model.num_key_value_heads=3"], ["num_key_value_heads", "3", "4"]),
        (["model.head_dim=15"], ["head_dim", "15"]),
        (["model.hidden_size=wide"], ["hidden_size", "wide"]),
        (["model.num_hidden_layers=-2"], ["num_hidden_layers", "-2"]),
        (["model.attention_dropout=0.1"], ["attention_dropout", "0.1"]),
        (["model.rope_scaling={rope_type: elastic, factor: 2.0}"], ["rope_scaling", "elastic"]),
        (["model.hidden_act=gelu"], ["hidden_act", "gelu"]),
        (["model.path=/nowhere/model"], ["/nowhere/model"]),
        # paths
        (["data.train=/nowhere/tokens"], ["data.train", "/nowhere/tokens"]),
        (["data.validation=/nowhere/tokens"], ["data.validation", "/nowhere/tokens"]),
        (["tokenizer=/nowhere/tokenizer.json"], ["tokenizer", "/nowhere/tokenizer.json"]),
        (["resume=/nowhere/step_00000001"], ["resume", "/nowhere/step_00000001"]),
        # features to come
        (["data.rows=packed"], ["data.rows", "packed"]),
        (["activation_checkpointing=full"], ["activation_checkpointing", "full"]),
        (["optimizer_in_backward=true"], ["optimizer_in_backward"]),
        (["loss.chunks=8"], ["loss"]),
        # code
        (["optimizer.name=!!python/object/apply:os.system ['true']"], ["optimizer.name"]),
    ],
    ids=lambda value: value[0].split("!!")[0][:40] if len(value) == 1 and "=" in value[0] else None,
)
def test_a_wrong_value_is_refused_by_name(run, config, overrides, words):
    shorter = ["max_steps=3"] if not any("max_steps" in text or "epochs" in text for text in overrides) else []
    assert_refused(run(config, *shorter, *overrides), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here_is_refused(run, config):
    assert_refused(run(config, "device=cuda"), "device", "cuda")


@pytest.mark.parametrize("key", ["output_dir", "model", "data.train"])
def test_a_key_that_must_be_given_is_named(run, config, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lacking = {**config, "output_dir": "output", "data": dict(config["data"])}
    section, _, name = key.rpartition(".")
    del (lacking[section] if section else lacking)[name]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(lacking))
    result = run(path)
    assert result.exit_code == 2 and len(result.errors) == 1 and key in result.errors[0], result
    assert list(tmp_path.iterdir()) == [path]


def test_all_faults_are_told_at_once(run, config):
    overrides = ["sed=1", "optimizer.lr=-1", "data.seq_len=0", "dtype=fp8"]
    assert_refused(run(config, *overrides), "sed", "seed", "optimizer.lr", "data.seq_len", "dtype", faults=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["config.yaml"]),
        (b"- a\n- b\n", ["config.yaml"]),
        (b"seed: [1\n", ["config.yaml"]),
        (b"seed: 1\n\tdtype: float32\n", ["config.yaml"]),
        (b"\xff\xfes\x00e\x00", ["config.yaml"]),
        (b"seed: 1\nmax_steps: 3\nseed: 2\n", ["config.yaml:3", "seed"]),
        (b"seed: !!python/object/apply:os.mkdir [CANARY]\n", ["config.yaml", "python"]),
        (b"seed: !!python/name:os.system\n", ["config.yaml", "python"]),
    ],
    ids=["empty", "list", "unclosed", "tab", "utf16", "duplicate", "call", "name"],
)
def test_a_file_that_is_no_config_is_refused_by_name_and_line(run, config, tmp_path, content, words):
    path, canary = tmp_path / "config.yaml", tmp_path / "canary"
    whole = yaml.safe_dump({**config, "output_dir": str(tmp_path / "output")}).encode()
    kept = b"" if content in (b"", b"- a\n- b\n", b"\xff\xfes\x00e\x00") else whole
    path.write_bytes(content.replace(b"CANARY", str(canary).encode()) + kept)
    result = run(path, f"output_dir={tmp_path / 'output'}")
    assert not canary.exists()
    assert result.exit_code == 2 and result.errors and "Traceback" not in result.stderr, result
    assert all(any(word in error for error in result.errors) for word in words), result
    assert not (tmp_path / "output").exists()


def test_a_config_that_is_not_there_is_named(run, tmp_path):
    for path in (tmp_path / "no.yaml", tmp_path):
        result = run(path, f"output_dir={tmp_path / 'output'}")
        assert result.exit_code == 2 and len(result.errors) == 1 and str(path) in result.errors[0], result


def test_scalars_mean_what_a_person_means(run, config, tmp_path):
    # torchtune#1939: 1e-5 read as text, None read as a word.
    path = tmp_path / "config.yaml"
    scalars = "optimizer: {lr: 1e-5, eps: 1E-9}\nmax_grad_norm: None\nvalidate_every: ~\ncheckpoint: {every: null}\n"
    path.write_text(yaml.safe_dump({**config, "output_dir": str(tmp_path / "a=b=c")}) + scalars)
    result = run(
        path, f"output_dir={tmp_path / 'x=y=z'}", "optimizer.eps=1e-7", "optimizer.betas=[0.8,0.9]", "threads=None"
    )
    assert result.exit_code == 0, result
    resolved = yaml.safe_load((tmp_path / "x=y=z/config.yaml").read_text())
    assert resolved["optimizer"]["lr"] == 1e-5 and resolved["optimizer"]["eps"] == 1e-7
    assert resolved["optimizer"]["betas"] == [0.8, 0.9]
    assert (resolved["max_grad_norm"], resolved["validate_every"], resolved["threads"]) == (None, None, None)
    assert resolved["checkpoint"]["every"] is None


# ── Data ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tokens(uneven_tokens, tmp_path) -> Path:
    """A token directory of its own, to be spoiled."""
    return Path(shutil.copytree(uneven_tokens, tmp_path / "tokens"))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "index.json").unlink(), ["tokens"]),
        (lambda d: cut(d / "index.json"), ["index.json"]),
        (lambda d: edit_json(d / "index.json", version=2), ["index.json", "2"]),
        (lambda d: edit_json(d / "index.json", format="other"), ["index.json"]),
        (lambda d: edit_json(d / "index.json", eos_id=-1), ["index.json", "eos_id"]),
        (lambda d: edit_json(d / "index.json", tokens=5), ["index.json", "tokens"]),
        (lambda d: (d / "tokens-00001.safetensors").unlink(), ["tokens-00001.safetensors"]),
        (lambda d: cut(d / "tokens-00001.safetensors"), ["tokens-00001.safetensors"]),
    ],
    ids=["no_index", "cut_index", "version", "format", "eos", "count", "no_shard", "cut_shard"],
)
def test_a_spoilt_token_directory_is_refused(run, changed, config, tokens, spoil, words):
    spoil(tokens)
    for key in ("train", "validation"):
        assert_refused(run(changed(config, {"data": {key: str(tokens)}, "max_steps": 3})), str(tokens), *words)


def test_a_shard_outside_its_directory_is_refused(run, changed, config, tokens):
    index = json.loads((tokens / "index.json").read_text())
    shutil.move(tokens / index["shards"][0]["file"], tokens.parent / "tokens-00000.safetensors")
    index["shards"][0]["file"] = "../tokens-00000.safetensors"
    edit_json(tokens / "index.json", shards=index["shards"])
    assert_refused(run(changed(config, {"data": {"train": str(tokens)}, "max_steps": 3})), "index.json")


@pytest.mark.parametrize("name", ["index.json", "tokens-00000.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_pickle_among_the_tokens_never_runs(run, changed, config, tokens, canary, name):
    size = (tokens / name).stat().st_size
    (tokens / name).write_bytes(canary.pickle.ljust(size, b"\0")[:size])
    result = run(changed(config, {"data": {"train": str(tokens)}, "max_steps": 3}))
    assert not canary.path.exists()
    if name.startswith("tokenizer"):
        assert result.exit_code in (0, 2) and "Traceback" not in result.stderr  # only copied to OUTPUT/model
    else:
        assert_refused(result, name)


def test_token_directories_of_different_tokenizers_do_not_mix(run, changed, config, tokens, uneven_tokens):
    words = json.loads((tokens / "tokenizer.json").read_text().replace('"w5"', '"another"'))
    (tokens / "tokenizer.json").write_text(json.dumps(words))
    words["model"]["dropout"] = None
    digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()
    edit_json(tokens / "index.json", tokenizer_digest=digest)
    both = [str(uneven_tokens), str(tokens)]
    assert_refused(run(changed(config, {"data": {"train": both}, "max_steps": 3})), "tokenizer", str(tokens))
    assert_refused(run(changed(config, {"data": {"validation": str(tokens)}, "max_steps": 3})), "tokenizer")


def test_raw_text_needs_a_tokenizer_and_ids_need_a_model_with_as_many_rows(run, changed, config, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 50)
    raw = changed(config, {"data": {"train": str(tmp_path / "text.jsonl")}, "max_steps": 3})
    assert_refused(run(raw), "tokenizer")
    assert_refused(run(changed(raw, {"tokenizer": "builtin"})), "vocab_size", "320", "2048")


def test_a_bad_line_of_raw_text_is_named(run, changed, config, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    raw = {"data": {"train": str(tmp_path / "text.jsonl")}, "tokenizer": "builtin", "model": {"vocab_size": 2048}}
    assert_refused(run(changed(config, {**raw, "max_steps": 3})), "text.jsonl:3")
    (tmp_path / "text.jsonl").write_text("")
    assert_refused(run(changed(config, {**raw, "max_steps": 3})), "text.jsonl")


# ── Models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def whole_model(run, config) -> Path:
    result = run(config)
    assert result.exit_code == 0, result
    return result.output / "model"


@pytest.fixture
def model(whole_model, tmp_path) -> Path:
    """An HF directory of its own, to be spoiled."""
    return Path(shutil.copytree(whole_model, tmp_path / "model"))


def edit_tensors(path: Path, edit) -> None:
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})


def prefixed(prefix: str):
    return lambda d: edit_tensors(d / "model.safetensors", lambda ts: {prefix + name: t for name, t in ts.items()})


def without(name: str):
    return lambda d: edit_tensors(d / "model.safetensors", lambda ts: {n: t for n, t in ts.items() if n != name})


def with_tensor(name: str, tensor: torch.Tensor):
    return lambda d: edit_tensors(d / "model.safetensors", lambda ts: ts | {name: tensor})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "config.json").unlink(), ["config.json"]),
        (lambda d: cut(d / "config.json"), ["config.json"]),
        (lambda d: edit_json(d / "config.json", model_type="mamba"), ["config.json", "model_type", "mamba"]),
        (lambda d: edit_json(d / "config.json", attention_dropout=0.1), ["config.json", "attention_dropout"]),
        (lambda d: edit_json(d / "config.json", num_hidden_layers=4), ["model.layers.2", "18"]),
        (lambda d: edit_json(d / "config.json", hidden_size=128, num_attention_heads=8), ["[128,", "21"]),
        (lambda d: (d / "model.safetensors").unlink(), ["safetensors"]),
        (lambda d: cut(d / "model.safetensors"), ["model.safetensors"]),
        (prefixed("model."), ["model.model.layers", "21"]),
        (prefixed("module."), ["module.model.layers", "21"]),
        (prefixed("_orig_mod."), ["_orig_mod.model.layers", "21"]),
        (without("lm_head.weight"), ["lm_head.weight"]),
        (with_tensor("surplus.weight", torch.zeros(2)), ["surplus.weight"]),
        (with_tensor(NORM, torch.zeros(65)), [NORM, "65", "64"]),
    ],
    ids=[
        "no_config", "cut_config", "family", "dropout", "layers", "width", "no_weights", "cut_weights", "model_prefix",
        "module_prefix", "compiled_prefix", "no_head", "surplus", "shape",
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(run, config, model, spoil, words):
    # pytorch/examples#1029: lenient loading of names with a prefix left the model random.
    spoil(model)
    result = run({**config, "model": {"path": str(model)}})
    assert result.errors, result
    assert_refused(result, *words, faults=len(result.errors))


def test_a_tied_model_loads_by_either_name(run, changed, config, reference, tmp_path):
    made = run(changed(config, {"model": {"tie_word_embeddings": True}}))
    original = reference.read_weights(made.output)
    model = Path(shutil.copytree(made.output / "model", tmp_path / "model"))
    edit_tensors(model / "model.safetensors", lambda ts: {"lm_head.weight": ts.pop("model.embed_tokens.weight"), **ts})
    again = run({**config, "model": {"path": str(model)}})
    assert again.exit_code == 0, again
    loaded = reference.read_weights(again.output)
    assert loaded.keys() == original.keys() and all(torch.equal(loaded[name], original[name]) for name in original)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_a_pickle_among_the_weights_never_runs(run, config, model, canary, name):
    (model / name).write_bytes(canary.pickle)
    if name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
    result = run({**config, "model": {"path": str(model)}})
    assert not canary.path.exists()
    if name == "tokenizer.json":
        assert result.exit_code in (0, 2) and "Traceback" not in result.stderr, result
    else:
        assert_refused(result, name if name != "pytorch_model.bin" else ".bin")


# ── Output ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_output_that_cannot_be_a_folder_is_refused(run, config, tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file/output", Path("/proc/femto-output")):
        result = run({**config, "output_dir": str(path)})
        assert result.exit_code == 2 and len(result.errors) == 1 and str(path) in result.errors[0], result
    assert (tmp_path / "file").read_text() == "kept"


def test_help_names_every_key_and_its_default(start, tmp_path):
    result = start.command("femto run single_device_pretrain --help", tmp_path).result()
    assert result.exit_code == 0 and not result.stderr, result
    for key in ("micro_batch_size", "optimizer.lr", "schedule.warmup_steps", "data.seq_len", "checkpoint.every"):
        assert key in result.stdout
    assert re.search(r"optimizer\.lr\b.*0\.0003", result.stdout) or re.search(r"optimizer\.lr\b.*3e-0?4", result.stdout)
