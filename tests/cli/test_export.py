"""Whether an exported checkpoint is the model that the run itself writes, however it lay on ranks; what is refused."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def config(tiny_llama) -> dict:
    """4 steps on raw text, tokenized into the cache, with checkpoints after the second and the last."""
    return {
        "model": tiny_llama | {"vocab_size": 2048, "intermediate_size": 2048},
        "tokenizer": "builtin",
        "data": {"train": "builtin", "seq_len": 16},
        "max_steps": 4,
        "checkpoint": {"every": 2},
    }


@pytest.fixture(scope="module")
def trained(run, config) -> Path:
    """The output folder of a finished run."""
    ended = run(config)
    assert ended.exit_code == 0, ended
    return ended.output


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sign(checkpoint: Path) -> None:
    """Make the manifest agree with the files."""
    (checkpoint / "manifest.json").unlink()
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in checkpoint.iterdir()
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"files": entries}))


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    """A copy of the run's last checkpoint, to spoil."""
    return Path(shutil.copytree(trained / "checkpoints/step_00000004", tmp_path / "step_00000004"))


def edit_state(checkpoint: Path, change) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)


# ── What is written ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_export_is_to_the_byte_what_the_run_wrote(femto, trained, tmp_path):
    ended = femto("export", trained, tmp_path / "model")
    assert (ended.code, ended.stderr) == (0, "") and "after step 4, " in ended.stdout
    assert files(tmp_path / "model") == files(trained / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    earlier = trained / "checkpoints/step_00000002"
    assert femto("export", earlier, tmp_path / "earlier").code == 0
    assert files(tmp_path / "earlier").keys() == files(tmp_path / "model").keys()
    assert files(tmp_path / "earlier")["model.safetensors"] != files(tmp_path / "model")["model.safetensors"]


def test_the_runs_own_settings_are_the_default_and_options_come_before_them(
    femto, run, changed, config, uneven_tokens, tiny_llama, tmp_path
):
    model = tiny_llama | {"tie_word_embeddings": True}
    changes = {
        "data": {"train": str(uneven_tokens)},
        "tokenizer": None,
        "export": {"dtype": "bfloat16", "max_shard_bytes": 50_000},
    }
    ended = run(changed({**config, "model": model}, changes))
    assert ended.exit_code == 0, ended
    expected = files(ended.output / "model")
    assert len([name for name in expected if name.endswith(".safetensors")]) > 2
    assert femto("export", ended.output, tmp_path / "model").code == 0
    assert files(tmp_path / "model") == expected

    options = ["--dtype", "float32", "--max-shard-bytes", "1e9"]
    assert femto("export", ended.output, tmp_path / "model", *options, "--force").code == 0
    assert json.loads(files(tmp_path / "model")["config.json"])["dtype"] == "float32"
    assert "model.safetensors" in files(tmp_path / "model")


def test_a_checkpoint_of_several_ranks_is_exported_by_one_process(femto, run_ranks, changed, config, tmp_path):
    ended = run_ranks(3, changed(config, {"parallel": {"dp_shard": 3}}))
    assert ended.exit_code == 0, ended
    assert len(list(ended.output.glob("checkpoints/step_00000004/*.distcp"))) == 3
    assert femto("export", ended.output, tmp_path / "model").code == 0
    assert files(tmp_path / "model") == files(ended.output / "model")


def test_one_tensor_is_in_memory_at_a_time(femto, trained, tmp_path, monkeypatch):
    import itertools

    import torch

    from femtolib import weights

    monkeypatch.setattr(weights, "ELEMENTS_AT_ONCE", 1024)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert femto("export", trained, tmp_path / "model").code == 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    largest = 2048 * 64 * 4
    assert largest <= max(alive) < 1.1 * largest


# ── Tokenizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tokenizer_that_is_gone_is_said_so_and_another_may_be_named(femto, checkpoint, trained, tmp_path):
    edit_state(checkpoint, lambda state: state["config"].update(tokenizer="/nowhere/tokenizer"))
    edit_state(checkpoint, lambda state: state["config"]["data"].update(train=["/nowhere/text.jsonl"]))
    ended = femto("export", checkpoint, tmp_path / "model")
    assert ended.code == 2
    assert (
        ended.error == "the run's tokenizer is no longer at /nowhere/tokenizer; say where it is with --tokenizer PATH"
    )
    assert not (tmp_path / "model").exists()
    assert femto("export", checkpoint, tmp_path / "model", "--tokenizer", trained / "model").code == 0
    assert files(tmp_path / "model") == files(trained / "model")


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(femto, checkpoint, tagged_tokens, tmp_path):
    ended = femto("export", checkpoint, tmp_path / "model", "--tokenizer", tagged_tokens)
    assert ended.code == 2 and "ids up to 12999" in ended.error and "vocab_size is 2048" in ended.error


# ── What is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_at_dest_stays_without_force_and_a_thesis_even_with_it(femto, trained, checkpoint, tmp_path):
    dest = tmp_path / "dest"
    dest.mkdir()  # an empty folder may be filled
    assert femto("export", checkpoint, dest).code == 0
    (dest / "mine.txt").write_text("mine")
    ended = femto("export", checkpoint, dest)
    assert ended.code == 2 and ended.error == f"{dest} exists; --force replaces it if it is a model"
    assert (dest / "mine.txt").exists()
    assert femto("export", checkpoint, dest, "--force").code == 0
    assert files(dest) == files(trained / "model")
    (dest / "config.json").unlink()
    for place in (dest, tmp_path / "file"):
        place.exists() or place.write_text("thesis")
        for more in ([], ["--force"]):
            assert femto("export", checkpoint, place, *more).code == 2
            assert place.exists()


@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("fault", ["flipped", "absent", "canary"])
def test_a_damaged_or_hostile_checkpoint_is_refused_by_name(femto, checkpoint, tmp_path, name, fault):
    class Canary:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "canary"),)

    path = checkpoint / name
    if fault == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif fault == "absent":
        path.unlink()
    else:
        path.write_bytes(pickle.dumps(Canary()))
        name == "manifest.json" or sign(checkpoint)
    ended = femto("export", checkpoint, tmp_path / "model")
    assert ended.code == 2 and str(checkpoint) in ended.error
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000004"}


def grow(state: dict) -> None:
    state["model"]["num_hidden_layers"] = 2**30


@pytest.mark.parametrize(
    "change",
    [
        grow,
        lambda state: state["model"].update(hidden_size=32),
        lambda state: state["model"].update(rope_scaling=5),
        lambda state: state["model"].update(extra=[]),
        lambda state: state["model"].update(attention_dropout=0.5),
        lambda state: state.update(model=None),
        lambda state: state.update(config=[]),
        lambda state: state["config"].update(param_dtype="int8"),
        lambda state: state["config"]["export"].update(max_shard_bytes="many"),
        lambda state: state["config"]["data"].update(train=[]),
        lambda state: state["config"].update(tokenizer=5),
    ],
)
def test_a_state_of_another_shape_is_refused(femto, checkpoint, tmp_path, change):
    edit_state(checkpoint, change)
    ended = femto("export", checkpoint, tmp_path / "model")
    assert ended.code == 2 and str(checkpoint) in ended.stderr
    assert not (tmp_path / "model").exists()


def test_a_folder_without_a_checkpoint_is_said_so(femto, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for place, reason in (
        (tmp_path / "run", "neither a checkpoint nor the output folder of a run that has one"),
        (tmp_path / "run/checkpoints", "neither a checkpoint nor"),
        (tmp_path / "nothing", "no such folder"),
    ):
        ended = femto("export", place, tmp_path / "model")
        assert ended.code == 2 and ended.error.startswith(str(place)) and reason in ended.error
    for value in ("0", "-5", "nan", "inf", "many"):
        ended = femto("export", tmp_path / "run", tmp_path / "model", "--max-shard-bytes", value)
        assert ended.code == 2 and f"--max-shard-bytes: {value}: should be a number of bytes" in ended.error
