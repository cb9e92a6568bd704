"""The keys that recipes share: their defaults, their bounds, and what one key asks of another."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from femtolib import sections
from femtolib.config import ConfigModel, dump_config, load_config, resolved
from femtolib.errors import FemtoError


class Config(ConfigModel):
    output_dir: sections.OutputDir
    seed: sections.Seed = 0
    device: sections.Device = "auto"
    threads: sections.Threads = None
    dtype: sections.ComputeDtype = "float32"
    param_dtype: sections.ParamDtype = "float32"
    resume: sections.Resume = "auto"
    model: sections.ModelSection
    tokenizer: sections.Tokenizer = None
    data: sections.DataSection
    global_batch_size: sections.GlobalBatchSize = 8
    micro_batch_size: sections.MicroBatchSize = 1
    max_steps: sections.MaxSteps = None
    epochs: sections.Epochs = None
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    max_grad_norm: sections.MaxGradNorm = 1.0
    schedule: sections.ScheduleSection = sections.ScheduleSection()
    activation_checkpointing: str = sections.activation_checkpointing()
    activation_offloading: bool = sections.activation_offloading()
    optimizer_in_backward: bool = sections.optimizer_in_backward()
    loss: sections.LossSection = sections.LossSection()
    compile: sections.CompileSection = sections.CompileSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    export: sections.ExportSection = sections.ExportSection()
    validate_every: sections.ValidateEvery = None
    validation_max_rows: sections.ValidationMaxRows = None
    log: sections.LogSection = sections.LogSection()
    profile: sections.ProfileSection = sections.ProfileSection()


@pytest.fixture
def load(tmp_path, monkeypatch, tiny_llama):
    """`load(*overrides, **keys)`: a config without a fault, some of its keys set on top."""
    monkeypatch.chdir(tmp_path)

    def load(*overrides: str, **keys) -> Config:
        base = {"output_dir": "out", "model": tiny_llama, "data": {"train": "builtin"}, "max_steps": 3}
        Path("c.yaml").write_text(yaml.safe_dump(base | keys, sort_keys=False))
        return load_config(Config, Path("c.yaml"), overrides)

    return load


@pytest.fixture
def faults(load):
    def faults(*overrides: str, **keys) -> list[str]:
        with pytest.raises(FemtoError) as caught:
            load(*overrides, **keys)
        return caught.value.faults

    return faults


def test_every_default_is_the_published_one(load, tmp_path):
    values = resolved(load())
    del values["model"]
    assert values == {
        "output_dir": str(tmp_path / "out"), "seed": 0, "device": "auto", "threads": None, "dtype": "float32",
        "param_dtype": "float32", "resume": "auto", "tokenizer": None,
        "data": {
            "train": ["builtin"], "validation": None, "rows": "stream", "seq_len": 512, "document_mask": None,
            "shuffle": True, "tail": "drop", "num_workers": 0, "prefetch": 2, "text_key": "text",
            "text_documents": "line", "on_bad_document": "stop", "too_long": "truncate",
        },
        "global_batch_size": 8, "micro_batch_size": 1, "max_steps": 3, "epochs": None,
        "optimizer": {
            "name": "adamw", "lr": 3e-4, "lr_reference_batch_size": None, "betas": [0.9, 0.95], "eps": 1e-8,
            "weight_decay": 0.1, "momentum": 0.0,
        },
        "max_grad_norm": 1.0,
        "schedule": {"name": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.0, "decay_steps": None},
        "activation_checkpointing": "none", "activation_offloading": False, "optimizer_in_backward": False,
        "loss": {"chunks": 1}, "compile": {"model": False, "loss": False, "optimizer": False},
        "checkpoint": {"every": None, "keep_last": None, "async_save": True},
        "export": {"dtype": None, "max_shard_bytes": 5_000_000_000},
        "validate_every": None, "validation_max_rows": None,
        "log": {"every": 10, "tensorboard": False, "wandb_project": None, "samples": False, "digests": False},
        "profile": {"start": None, "steps": 3},
    }  # fmt: skip


def test_the_resolved_config_runs_again_and_resolves_to_itself(load, tmp_path, monkeypatch, tiny_llama):
    (tmp_path / "raw.txt").write_text("hello")
    config = load("data.train=[raw.txt, builtin]", "optimizer.lr=1e-5", "model.rope_theta=500000.0", "threads=2")
    (tmp_path / "again.yaml").write_text(dump_config(config, "femto run x"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_config(Config, tmp_path / "again.yaml")
    assert resolved(again) == resolved(config)
    assert again.model.inline_keys() == tiny_llama | {"rope_theta": 500000.0}


def test_one_source_or_several_are_a_list(load):
    assert load("data.train=builtin").data.train == ["builtin"]
    assert load("data.train=[builtin, builtin]").data.train == ["builtin", "builtin"]


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1", "seed=1.5", "seed=9223372036854775808", "device=tpu", "threads=0", "threads=100000", "dtype=fp8",
        "param_dtype=bfloat16", "global_batch_size=0", "micro_batch_size=0", "max_steps=-1", "max_steps=1.5",
        "optimizer.name=os.system", "optimizer.lr_reference_batch_size=0", "optimizer.lr_reference_batch_size=-8",
        "optimizer.lr_reference_batch_size=1.5", "optimizer.lr=0", "optimizer.lr=-0.5", "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9, 0.95, 0.99]", "optimizer.betas=[1.0, 0.9]", "optimizer.betas=[-0.1, 0.9]",
        "optimizer.eps=0", "optimizer.weight_decay=-0.1", "max_grad_norm=0", "max_grad_norm=-1", "schedule.name=cos",
        "schedule.warmup_steps=-1", "schedule.min_lr_ratio=1.1", "schedule.min_lr_ratio=-0.1", "checkpoint.every=0",
        "checkpoint.keep_last=0", "checkpoint.keep_last=-1", "export.dtype=int8", "export.max_shard_bytes=0",
        "log.every=0", "profile.start=0", "profile.steps=0", "data.train=[]", "data.rows=documents", "data.seq_len=0",
        "data.tail=keep", "data.num_workers=-1", "data.num_workers=2000", "data.prefetch=0",
        "data.prefetch=2000", "data.text_key=''", "data.text_documents=word",
        "data.on_bad_document=ignore", "data.too_long=cut", "resume=sometimes",
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_one_fault_that_names_key_and_value(faults, override):
    key, _, value = override.partition("=")
    [fault] = faults(override)
    assert fault.startswith(f"command line: {key}: ")
    assert value.strip("[]'").split(",")[0] in fault


@pytest.mark.parametrize(
    "override",
    ["activation_checkpointing=full", "activation_offloading=true", "optimizer_in_backward=true", "loss.chunks=8",
     "data.too_long=drop", "data.rows=packed"],
)  # fmt: skip
def test_a_feature_to_come_is_refused_for_that_reason(faults, override):
    [fault] = faults(override)
    assert fault.startswith(f"command line: {override.partition('=')[0]}: not built yet")


def test_exactly_one_of_max_steps_and_epochs_is_given(load, faults):
    assert load("max_steps=0").max_steps == 0
    assert load("max_steps=null", "epochs=2").epochs == 2
    for overrides in (["epochs=2"], ["max_steps=null"], ["max_steps=None", "epochs=~"], ["max_steps=0", "epochs=1"]):
        [fault] = faults(*overrides)
        assert "exactly one of max_steps and epochs" in fault
    [fault] = faults("max_steps=x", "epochs=2")  # which of the two is meant cannot be told yet
    assert "max_steps: should be a whole number" in fault


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("param_dtype", ["float32", "float64"])
def test_float64_is_computed_and_stored_together(load, faults, dtype, param_dtype):
    overrides = [f"dtype={dtype}", f"param_dtype={param_dtype}"]
    if (dtype == "float64") == (param_dtype == "float64"):
        config = load(*overrides)
        assert (config.dtype, config.param_dtype) == (dtype, param_dtype)
    else:
        [fault] = faults(*overrides)
        assert "param_dtype" in fault and f"dtype: {dtype}" in fault and param_dtype in fault


def test_float16_is_refused_with_who_has_it(faults):
    [fault] = faults("dtype=float16")
    assert "data_parallel_pretrain" in fault and "bfloat16" in fault


def test_decay_steps_go_with_wsd_alone(load, faults):
    assert load("schedule.name=wsd", "schedule.decay_steps=2").schedule.decay_steps == 2
    [fault] = faults("schedule.name=wsd")
    assert "schedule.decay_steps" in fault and "wsd" in fault
    [fault] = faults("schedule.decay_steps=2")
    assert "schedule.decay_steps" in fault and "wsd" in fault
    [fault] = faults("schedule.name=wds", "schedule.decay_steps=2")
    assert "schedule.name" in fault


def test_a_key_without_an_effect_is_refused(load, faults):
    assert load("optimizer.name=sgd", "optimizer.momentum=0.9").optimizer.momentum == 0.9
    for overrides in (
        ["optimizer.momentum=0.9"],
        ["optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"],
        ["optimizer.name=sgd", "optimizer.eps=1e-6"],
        ["schedule.name=constant", "schedule.min_lr_ratio=0.1"],
        ["validate_every=2"],
        ["validation_max_rows=2"],
    ):
        [fault] = faults(*overrides)
        assert fault.startswith(f"command line: {overrides[-1].partition('=')[0]}: ")
    assert load("validate_every=2", "data.validation=builtin").validate_every == 2


def test_documents_are_kept_apart_in_padded_rows_and_not_in_a_stream(load):
    assert not load().data.keeps_documents_apart()
    assert load("data.rows=padded").data.keeps_documents_apart()
    assert not load("data.rows=padded", "data.document_mask=false").data.keeps_documents_apart()


def test_a_batch_size_that_the_learning_rate_was_found_for_goes_with_every_optimizer(load):
    for name in ("adamw", "sgd"):
        section = load(f"optimizer.name={name}", "optimizer.lr_reference_batch_size=256").optimizer
        assert section.lr_reference_batch_size == 256 and section.lr == 3e-4


# ── Data parallelism ──────────────────────────────────────────────────────────────────────────────────────────────────


class DataParallelConfig(Config):
    dtype: sections.ComputeDtypeOrFloat16 = "float32"
    max_grad_value: sections.MaxGradValue = None
    processes: sections.Processes = 1
    gradient_sync: sections.GradientSyncSection = sections.GradientSyncSection()
    accumulate_in: sections.AccumulateIn = "float32"


@pytest.fixture
def load_parallel(load):
    """`load_parallel(*overrides)`: the same config with the keys of data parallelism."""
    return lambda *overrides: load_config(DataParallelConfig, (load() and Path("c.yaml")), overrides)


def test_the_defaults_of_data_parallelism_are_the_published_ones(load_parallel):
    values = resolved(load_parallel())
    names = ("max_grad_value", "processes", "gradient_sync", "accumulate_in")
    assert {name: values[name] for name in names} == {
        "max_grad_value": None, "processes": 1, "accumulate_in": "float32",
        "gradient_sync": {
            "bucket_mb": 25.0, "overlap": True, "communication_dtype": None, "find_unused_parameters": False,
            "static_graph": False,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    "override",
    [
        "dtype=fp16", "max_grad_value=0", "max_grad_value=-0.1", "processes=0", "processes=-1", "processes=1025",
        "processes=1.5", "accumulate_in=bfloat16", "accumulate_in=float64", "gradient_sync.bucket_mb=-1",
        "gradient_sync.bucket_mb=1000000", "gradient_sync.overlap=maybe", "gradient_sync.communication_dtype=float16",
        "gradient_sync.find_unused_parameters=2", "gradient_sync.static_graph=later",
    ],
)  # fmt: skip
def test_a_value_of_data_parallelism_out_of_bounds_is_one_fault_that_names_it(load_parallel, override):
    with pytest.raises(FemtoError) as caught:
        load_parallel(override)
    [fault] = caught.value.faults
    key, _, value = override.partition("=")
    assert fault.startswith(f"command line: {key}: ")
    assert value in fault


@pytest.mark.parametrize(
    "override",
    [
        "max_grad_value=0.5", "max_grad_value=null", "processes=1024", "gradient_sync.bucket_mb=0",
        "gradient_sync.bucket_mb=0.5", "gradient_sync.overlap=false", "gradient_sync.communication_dtype=bfloat16",
        "gradient_sync.communication_dtype=float32", "gradient_sync.find_unused_parameters=true",
    ],
)  # fmt: skip
def test_a_value_of_data_parallelism_within_its_bounds_is_taken(load_parallel, override):
    key, _, value = override.partition("=")
    found = load_parallel(override)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == yaml.safe_load(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_gradients_add_up_in_a_smaller_dtype_only_where_there_is_one(load_parallel, dtype):
    overrides = [f"dtype={dtype}", f"param_dtype={'float64' if dtype == 'float64' else 'float32'}"]
    assert load_parallel(*overrides, "accumulate_in=float32").accumulate_in == "float32"
    if dtype in ("bfloat16", "float16"):
        assert load_parallel(*overrides, "accumulate_in=dtype").accumulate_in == "dtype"
    else:
        with pytest.raises(FemtoError) as caught:
            load_parallel(*overrides, "accumulate_in=dtype")
        [fault] = caught.value.faults
        assert fault.startswith(f"command line: accumulate_in: has no effect with dtype: {dtype}")


def test_float16_is_for_the_recipe_that_scales_the_loss_and_refused_by_the_others(load):
    path = load() and Path("c.yaml")
    for name in ("single_device_pretrain", "distributed_pretrain", "data_parallel_pretrain"):
        config_type = importlib.import_module(f"femto.recipes.{name}").Config
        if name == "data_parallel_pretrain":
            config = load_config(config_type, path, ["dtype=float16", "accumulate_in=dtype"])
            assert (config.dtype, config.param_dtype) == ("float16", "float32")
        else:
            with pytest.raises(FemtoError) as caught:
                load_config(config_type, path, ["dtype=float16"])
            [fault] = caught.value.faults
            assert fault.startswith("command line: dtype: only data_parallel_pretrain scales the loss"), name


# ── The model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_inline_model_starts_from_random_weights(load):
    assert load().model.weights == "random" and load("model.weights=random").model.weights == "random"


def test_a_model_on_disk_is_loaded_unless_random_weights_are_asked_for(load, tmp_path, tiny_llama):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(tiny_llama))
    config = load(model={"path": "hf"})
    assert config.model.path == tmp_path / "hf" and config.model.weights == "load"
    assert load(model={"path": "hf", "weights": "random"}).model.weights == "random"


def test_a_model_is_given_in_one_way(faults, tmp_path, tiny_llama):
    (tmp_path / "hf").mkdir()
    for model, words in (
        ({}, ["path", "config.json"]),
        ({"path": None}, ["path", "config.json"]),
        ({"path": "hf"}, ["config.json", str(tmp_path / "hf")]),
        ({"path": "hf", "hidden_size": 64}, ["path", "'hidden_size'"]),
        (tiny_llama | {"weights": "load"}, ["weights: load", "path"]),
        ({"path": "nowhere"}, ["model.path", "nowhere"]),
    ):
        [fault] = faults(model=model)
        assert fault.startswith("c.yaml:") and all(word in fault for word in words), fault


def test_faults_of_an_inline_model_stand_at_their_own_lines(faults, tiny_llama):
    found = faults(
        "model.hidden_sise=5",
        "model.rope_theta=.inf",
        model={"model_type": "llama", "vocab_size": 0, "num_hidden_layers": "2", "mlp_bias": 1},
    )
    places = {"vocab_size": "c.yaml:4", "num_hidden_layers": "c.yaml:5", "mlp_bias": "c.yaml:6"}
    places |= {"hidden_sise": "command line", "rope_theta": "command line"}
    assert len(found) == len(places)
    for key, place in places.items():
        assert sum(fault.startswith(f"{place}: model: ") and key in fault for fault in found) == 1, (key, found)


def test_a_model_that_is_no_section_is_refused(faults):
    for value in ("5", "null", "llama", "[1]"):
        [fault] = faults(f"model={value}")
        assert fault.startswith("command line: model: should be a section of keys")


# ── What is not installed ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(faults, load, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(sections, "find_spec", lambda name: None if name in ("tensorboard", "wandb") else real(name))
    for override in ("log.tensorboard=true", "log.wandb_project=mine"):
        [fault] = faults(override)
        assert override.partition("=")[0] in fault and "pip install 'femto[logging]'" in fault
    load("log.tensorboard=false", "log.wandb_project=null")
