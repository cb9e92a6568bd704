"""Who may write a folder, whether a run in it goes on and from where, and which changes a resumed run may bring."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from femtolib import output
from femtolib.checkpoint import CheckpointWriter
from femtolib.config import ConfigModel, load_config
from femtolib.errors import FemtoError
from femtolib.output import Start, check_output, claim_output, decide_start, write_config
from femtolib.parallel.world import World
from femtolib.sections import OutputDir, Resume

CONFIG = {
    "output_dir": "/runs/a", "seed": 0, "device": "cpu", "threads": None, "deterministic": False, "dtype": "float32",
    "param_dtype": "float32", "resume": "auto", "tokenizer": "/tok", "process_group_timeout": 600, "processes": 1,
    "model": {"path": None, "weights": "random", "hidden_size": 64},
    "data": {
        "train": ["/data"], "validation": None, "rows": "stream", "seq_len": 512, "document_mask": None,
        "shuffle": True, "tail": "drop", "num_workers": 0, "prefetch": 2, "text_key": "text", "text_documents": "line",
        "on_bad_document": "stop", "too_long": "truncate",
    },
    "parallel": {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1}, "global_batch_size": 8, "micro_batch_size": 1,
    "max_steps": 10, "epochs": None,
    "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.0},
    "max_grad_norm": 1.0,
    "schedule": {"name": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.0, "decay_steps": None},
    "activation_checkpointing": "none", "activation_offloading": False, "optimizer_in_backward": False,
    "loss": {"chunks": 1}, "compile": {"model": False}, "checkpoint": {"every": 2, "keep_last": None},
    "export": {"dtype": None, "max_shard_bytes": 5e9}, "validate_every": None, "validation_max_rows": None,
    "log": {"every": 10, "digests": False}, "profile": {"start": None, "steps": 3},
}  # fmt: skip
IDENTITY = {"data": "0123456789abcdef", "model": {"hidden_size": 64, "rope_theta": 10000.0, "rope_scaling": None}}


def with_key(key: str, value) -> dict:
    """CONFIG with one dotted key set."""
    config = copy.deepcopy(CONFIG)
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    assert name in section
    section[name] = value
    return config


def save(folder: Path, step: int, **changes) -> Path:
    state = {"steps": 10, "ledger": "0" * 16, "sampler": {"consumed_rows": 8 * step}, "config": CONFIG, **IDENTITY}
    writer = CheckpointWriter(folder / "checkpoints", keep_last=None, world=World())
    writer.save(step, {"x": torch.zeros(1)}, state | changes, wait=True)
    return folder / "checkpoints" / f"step_{step:08d}"


@pytest.fixture
def folder(tmp_path) -> Path:
    """The output of a run of 10 steps that was stopped after step 4."""
    for step in (2, 4):
        save(tmp_path / "run", step)
    (tmp_path / "run/config.yaml").write_text("output_dir: run\n")
    return tmp_path / "run"


def decide(folder: Path, resume: str | Path = "auto", *, config=None, identity=None, steps: int = 10) -> Start:
    return decide_start(folder, resume, config=config or CONFIG, identity=identity or IDENTITY, steps=steps)


def refused(folder: Path, resume: str | Path = "auto", **keys) -> list[str]:
    with pytest.raises(FemtoError) as caught:
        decide(folder, resume, **keys)
    assert caught.value.exit_code == 2
    return caught.value.faults


# ── What a run may write over ─────────────────────────────────────────────────────────────────────────────────────────


def check_refused(output_dir: Path, data=(), sources=()) -> str:
    with pytest.raises(FemtoError) as caught:
        check_output(output_dir, data=data, sources=sources)
    [fault] = caught.value.faults
    assert fault.startswith("output_dir: ") and caught.value.exit_code == 2
    return fault


def test_a_folder_of_a_run_and_a_new_one_may_be_written(folder, tmp_path):
    write_config(Config(output_dir=folder), "single_device_pretrain")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    for output_dir in (folder, tmp_path / "new/deeper"):
        check_output(output_dir, data=["builtin", str(tmp_path / "data")], sources=[None, "builtin", tmp_path / "base"])


def test_what_a_run_did_not_write_is_not_written_over(tmp_path):
    for name, word in (("config.yaml", "was not written by a run"), ("checkpoints", "is not a folder")):
        (tmp_path / name).write_text("output_dir: .\n")
        assert word in check_refused(tmp_path) and name in check_refused(tmp_path)
        (tmp_path / name).unlink()
    for name in ("metrics.jsonl", ".config.yaml"):
        (tmp_path / name).mkdir()
        assert f"{name} is a folder" in check_refused(tmp_path)
        (tmp_path / name).rmdir()
    (tmp_path / "model").mkdir()
    check_output(tmp_path, data=[], sources=[])
    (tmp_path / "model/net.py").write_text("")
    assert "something else than a model" in check_refused(tmp_path)
    assert "is not a folder" in check_refused(tmp_path / "model/net.py")
    assert "is not a folder" in check_refused(tmp_path / "model/net.py/run")


def test_a_run_does_not_write_into_its_data_nor_over_its_model(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    assert str(data) in check_refused(data / "run", data=[str(data)])
    assert str(data) in check_refused(data, data=[str(data)])
    check_output(tmp_path / "data-run", data=[str(data)], sources=[])
    run = tmp_path / "run"
    for source in (run / "model", run / "model/tokenizer.json"):
        assert str(source) in check_refused(run, sources=[source])


def test_a_run_whose_checkpoints_were_removed_is_not_replaced(folder):
    (folder / "metrics.jsonl").write_text('{"event": "checkpoint", "step": 4}\n')
    shutil.rmtree(folder / "checkpoints")
    [fault] = refused(folder)
    assert str(folder) in fault and "checkpoints are gone" in fault
    (folder / "metrics.jsonl").write_text('{"event": "end", "step": 0, "reason": "completed"}\n')
    assert decide(folder) == Start()  # what max_steps: 0 left is made anew in a second


# ── Where a run begins ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_folder_and_none_begin_at_step_0(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        for resume in ("auto", "never"):
            start = decide(folder, resume)
            assert start == Start() and start.step == 0 and not start.finished
        [fault] = refused(folder, "must")
        assert "must" in fault and str(folder) in fault
        assert not list(tmp_path.iterdir())


def test_a_run_is_continued_from_its_last_checkpoint(folder):
    for resume in ("auto", "must"):
        start = decide(folder, resume)
        assert start.checkpoint == folder / "checkpoints/step_00000004" and start.step == 4
        assert start.state["sampler"] == {"consumed_rows": 32} and not start.finished
    [fault] = refused(folder, "never")
    assert "never" in fault and str(folder) in fault and "output_dir" in fault


def test_a_run_without_a_checkpoint_yet_begins_at_step_0_again(tmp_path):
    (tmp_path / "config.yaml").write_text("output_dir: x\n")
    assert decide(tmp_path) == Start() and decide(tmp_path, "must") == Start()
    assert "never" in refused(tmp_path, "never")[0]


def test_a_damaged_last_checkpoint_is_told_and_not_passed_over(folder):
    (folder / "checkpoints/step_00000004/state.json").write_text("{}")
    [fault] = refused(folder)
    assert "step_00000004" in fault and "state.json" in fault


def test_a_saved_checkpoint_without_its_manifest_is_told_and_a_removed_one_is_done_without(folder):
    (folder / "metrics.jsonl").write_text('{"event": "checkpoint", "step": 2}\n{"event": "checkpoint", "step": 4}\n')
    last = folder / "checkpoints/step_00000004"
    (last / "manifest.json").unlink()
    [fault] = refused(folder)
    assert str(last) in fault and "manifest.json is gone" in fault
    assert decide(folder, last.with_name("step_00000002")).step == 2  # named, and the last that is whole
    shutil.rmtree(last)
    shutil.copytree(last.with_name("step_00000002"), last.with_name("step_4"))  # no name of ours
    (folder / "checkpoints/step_00000006").mkdir()  # not this run's
    assert decide(folder).step == 2


def test_a_named_checkpoint_is_continued_where_no_later_one_stands(folder, tmp_path):
    named = folder / "checkpoints/step_00000002"
    start = decide(tmp_path / "branch", named)
    assert start.checkpoint == named and start.step == 2
    assert decide(folder, folder / "checkpoints/step_00000004").step == 4
    [fault] = refused(folder, named)
    assert "step_00000002" in fault and "step_00000004" in fault and "output_dir" in fault
    [fault] = refused(folder, folder / "checkpoints")
    assert "manifest.json" in fault


@pytest.mark.parametrize(
    "change",
    [{"config": None}, {"config": []}, {"steps": "10"}, {"steps": None}, {"ledger": 5}, {"sampler": [1]}],
    ids=str,
)
def test_a_state_of_another_shape_is_refused(folder, change):
    path = save(folder, 6, **change)
    [fault] = refused(folder)
    assert str(path / "state.json") in fault and next(iter(change)) in fault


# ── A finished run ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def finished(folder) -> Path:
    save(folder, 10)
    lines = [{"event": "train", "step": 10, "ledger": "a", "batch_digest": "b"}]
    lines += [{"event": "end", "step": 10, "reason": "completed"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    return folder


def test_a_finished_run_has_its_final_checkpoint_and_its_model(finished):
    assert decide(finished).finished
    (finished / "model/config.json").unlink()
    start = decide(finished)
    assert not start.finished and start.step == 10  # nothing to train; the model is written


def test_a_run_that_ended_otherwise_is_not_finished(finished):
    path = finished / "metrics.jsonl"
    whole = path.read_text()
    for text in (whole.replace("completed", "stopped"), whole.splitlines()[0] + "\n", whole[:-3], ""):
        path.write_text(text)
        assert not decide(finished).finished
    path.unlink()
    assert not decide(finished).finished


def test_a_finished_run_is_continued_by_a_longer_one(finished):
    start = decide(finished, steps=15, config=with_key("max_steps", 15))
    assert not start.finished and start.step == 10


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_cannot_shrink(folder, resume):
    for steps in (9, 4, 3):
        [fault] = refused(folder, resume, steps=steps, config=with_key("max_steps", steps))
        assert "10" in fault and str(steps) in fault


# ── What may change ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tp", 2), ("parallel.dp_shard", 4), ("micro_batch_size", 4), ("data.num_workers", 2),
        ("data.prefetch", 4), ("data.validation", ["/other"]), ("device", "cuda"), ("threads", 2),
        ("deterministic", True), ("process_group_timeout", 60), ("processes", 4), ("activation_checkpointing", "full"),
        ("activation_offloading", True), ("optimizer_in_backward", True), ("loss.chunks", 8), ("compile.model", True),
        ("log.every", 1), ("log.digests", True), ("profile.start", 3), ("checkpoint.every", 5),
        ("checkpoint.keep_last", 1), ("export.dtype", "bfloat16"), ("validate_every", 2), ("validation_max_rows", 8),
        ("output_dir", "/moved"), ("resume", "must"), ("data.train", ["/moved"]), ("tokenizer", "/moved"),
        ("model.path", "/moved"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_what_does_not_change_the_training_may_change(folder, key, value, resume, capsys):
    assert decide(folder, resume, config=with_key(key, value)).step == 4
    assert capsys.readouterr().out == ""


def test_a_run_may_become_longer_in_steps_or_epochs(folder):
    assert decide(folder, steps=11, config=with_key("max_steps", 11)).step == 4
    assert decide(folder, steps=30, config=with_key("max_steps", None) | {"epochs": 3}).step == 4


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("optimizer.lr", 1e-3, "0.0003 and is now 0.001"), ("optimizer.betas", [0.9, 0.99], "[0.9, 0.95] and is now"),
        ("optimizer.weight_decay", 0.0, "0.1 and is now 0.0"), ("max_grad_norm", None, "1.0 and is now null"),
        ("schedule.name", "linear", '"cosine" and is now "linear"'), ("schedule.warmup_steps", 3, "0 and is now 3"),
        ("dtype", "bfloat16", '"float32" and is now "bfloat16"'),
    ],
)  # fmt: skip
def test_another_change_needs_must_which_prints_it(folder, key, value, shown, capsys):
    [fault] = refused(folder, config=with_key(key, value))
    assert key in fault and shown in fault and "resume=must" in fault and "output_dir" in fault
    assert decide(folder, "must", config=with_key(key, value)).step == 4
    out = capsys.readouterr().out
    assert key in out and shown in out and out.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1), ("data.seq_len", 256), ("data.rows", "padded"), ("data.shuffle", False), ("data.tail", "pad"),
        ("data.document_mask", True), ("data.too_long", "drop"), ("global_batch_size", 16),
    ],
)  # fmt: skip
def test_what_decides_the_rows_never_changes(folder, key, value):
    for resume in ("auto", "must", folder / "checkpoints/step_00000004"):
        [fault] = refused(folder, resume, config=with_key(key, value))
        assert key in fault and "was" in fault and "is now" in fault
        assert "resume=must" not in fault and "output_dir" in fault


def test_what_the_saved_tensors_are_of_never_changes(folder):
    for key, value in (("param_dtype", "float64"), ("optimizer.name", "sgd")):
        for resume in ("auto", "must"):
            [fault] = refused(folder, resume, config=with_key(key, value))
            assert key in fault


def test_data_and_model_are_compared_by_what_they_are(folder):
    for resume in ("auto", "must"):
        [fault] = refused(folder, resume, identity=IDENTITY | {"data": "f" * 16})
        assert "data" in fault and IDENTITY["data"] in fault and "f" * 16 in fault
        model = {"hidden_size": 64, "rope_theta": 500000.0, "new": 1}
        found = refused(folder, resume, identity=IDENTITY | {"model": model})
        assert ["model.rope_theta was 10000.0 and is now 500000.0" in fault for fault in found] == [True, False]
        assert "model.new was null and is now 1" in found[1]


def test_a_state_that_another_recipe_wrote_lacks_what_it_never_knew(folder):
    [fault] = refused(folder, identity=IDENTITY | {"reference": "abc"})
    assert "reference was null" in fault


def test_keys_that_only_one_of_two_recipes_has_are_not_compared(folder):
    config = copy.deepcopy(CONFIG) | {"new_key": 5}
    del config["parallel"], config["max_grad_norm"], config["optimizer"]["momentum"]
    config["optimizer"]["nesterov"] = True
    assert decide(folder, config=config).step == 4


@pytest.mark.parametrize(
    ("key", "value", "without"),
    [
        ("max_grad_value", 0.001, None),
        ("accumulate_in", "dtype", "float32"),
        ("gradient_sync", {"communication_dtype": "bfloat16"}, {"communication_dtype": None}),
    ],
)
def test_what_some_recipes_cannot_do_is_not_begun_or_dropped_by_a_change_of_recipe(folder, key, value, without):
    [fault] = refused(folder, config=copy.deepcopy(CONFIG) | {key: value})
    assert key in fault and "resume=must" in fault
    assert decide(folder, config=copy.deepcopy(CONFIG) | {key: without}).step == 4


def test_every_difference_is_told_at_once(folder):
    config = with_key("seed", 1)
    config["optimizer"] |= {"lr": 1.0, "eps": 1.0}
    config["data"]["seq_len"] = 7
    found = refused(folder, config=config, identity=IDENTITY | {"data": "f" * 16}, steps=3)
    assert len(found) == 6
    for word in ("seed", "optimizer.lr", "optimizer.eps", "data.seq_len", "data.train or its tokenizer", "steps"):
        assert sum(word in fault for fault in found) == 1, word
    [*found] = refused(folder, "must", config=config)
    assert len(found) == 2  # lr and eps would be applied, the other two never


def test_a_value_comes_back_from_json_as_what_it_was(folder):
    config = copy.deepcopy(CONFIG)
    config["optimizer"]["lr"] = 0.1 + 0.2
    save(folder, 6, config=config)
    assert decide(folder, config=config).step == 6


# ── One run at a time ─────────────────────────────────────────────────────────────────────────────────────────────────


def claim(folder: Path, resume: str | Path = "auto", **keys) -> Start:
    return claim_output(folder, resume, config=CONFIG, identity=IDENTITY, steps=10, **keys)


def test_a_folder_is_made_and_claimed_until_its_lock_is_closed(tmp_path, monkeypatch):
    folder = tmp_path / "a/b"
    start = claim(folder)
    assert folder.is_dir() and start.step == 0
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    with pytest.raises(FemtoError) as caught:
        claim(folder)
    assert 10 <= clock[0] < 11
    assert str(folder) in str(caught.value) and "in use by another run" in str(caught.value)
    start.lock.close()
    claim(folder).lock.close()


def test_a_checkpoint_that_a_killed_save_had_set_aside_is_continued(folder):
    last = folder / "checkpoints/step_00000004"
    last.rename(last.with_name(".step_00000004.replaced"))
    start = claim(folder)
    start.lock.close()
    assert start.checkpoint == last and start.step == 4
    assert not list(folder.glob("checkpoints/.*"))


def test_a_second_run_waits_for_the_first_to_end(tmp_path):
    first = claim(tmp_path)
    timer = threading.Timer(0.3, first.lock.close)
    timer.start()
    started = time.monotonic()
    claim(tmp_path).lock.close()
    assert 0.2 < time.monotonic() - started < 30


HOLDER = """
import sys, time
from pathlib import Path
from femtolib.output import claim_output
start = claim_output(Path(sys.argv[1]), "auto", config={}, identity={}, steps=1)
print("claimed", flush=True)
time.sleep(60)
"""


def test_another_process_holds_the_folder_until_it_ends_even_by_sigkill(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"claimed\n"
        with pytest.raises(FemtoError, match="in use"):
            output._lock(tmp_path, seconds=0.3)
        child.send_signal(signal.SIGKILL)
        claim(tmp_path).lock.close()
    finally:
        child.kill()
        child.wait()


def test_a_refused_run_leaves_no_folder_that_was_not_there(tmp_path):
    for resume in ("must", tmp_path):
        with pytest.raises(FemtoError):
            claim(tmp_path / "new", resume)
        assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(FemtoError):
        claim(tmp_path / "old", "must")
    assert (tmp_path / "old").exists()
    claim(tmp_path / "old").lock.close()  # and the refused one has let go of it


def test_a_run_that_waited_for_a_refused_one_gets_a_folder_that_is_there(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    real, calls = output.fcntl.flock, []

    def flock(file, how):  # the refused run removes its folder between our opening the lock and our getting it
        calls.append(how)
        if len(calls) == 1:
            (folder / ".lock").unlink()
            folder.rmdir()
        real(file, how)

    monkeypatch.setattr(output.fcntl, "flock", flock)
    lock = output._lock(folder)
    assert len(calls) == 2 and os.fstat(lock.fileno()).st_ino == (folder / ".lock").stat().st_ino


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file/below", Path("/proc/no"), tmp_path / ("x" * 300)):
        with pytest.raises(FemtoError) as caught:
            claim(path)
        assert caught.value.exit_code == 2 and str(path) in str(caught.value) and "output_dir" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(output.fcntl, "flock", no_locks)
    with pytest.raises(FemtoError, match="No locks available"):
        claim(tmp_path)


# ── The resolved config ───────────────────────────────────────────────────────────────────────────────────────────────


class Config(ConfigModel):
    output_dir: OutputDir
    resume: Resume = "auto"
    lr: float = 1e-3


@pytest.mark.parametrize("resume", ["auto", "never", "must", "path"])
def test_the_config_left_behind_runs_again_and_the_command_continues_the_run(tmp_path, resume):
    resume = tmp_path if resume == "path" else resume
    config = Config(output_dir=tmp_path / "my run", resume=resume, lr=1e-5)
    config.output_dir.mkdir()
    for _ in range(2):
        command = write_config(config, "single_device_pretrain")
    path = tmp_path / "my run/config.yaml"
    assert command == f"femto run single_device_pretrain --config '{path}'"
    assert path.read_text().startswith(f"# {command}\n")
    assert load_config(Config, path) == config.model_copy(update={"resume": "auto"})
    assert [entry.name for entry in config.output_dir.iterdir()] == ["config.yaml"]


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    config = Config(output_dir=tmp_path)
    write_config(config, "x")
    before = (tmp_path / "config.yaml").read_bytes()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        write_config(Config(output_dir=tmp_path, lr=1.0), "x")
    assert (tmp_path / "config.yaml").read_bytes() == before


# ── A launcher that starts a failed run again ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("resume", ["auto", "never", "must", Path("elsewhere")])
def test_a_restarted_run_goes_on_with_what_it_has_saved(folder, resume):
    start = claim_output(folder, resume, config=CONFIG, identity=IDENTITY, steps=10, restarted=True)
    start.lock.close()
    assert start.step == 4


def test_a_run_that_began_with_a_checkpoint_is_not_begun_without(folder, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text("output_dir: new\n")
    (new / "metrics.jsonl").write_text(json.dumps({"event": "start", "resumed_from": 4}) + "\n")
    [fault] = refused(new)
    assert "step 4" in fault and "resume=PATH" in fault
    assert decide(new, folder / "checkpoints/step_00000004").step == 4


def test_a_run_restarted_before_it_saved_begins_where_it_first_began(folder, tmp_path):
    restarted = {"config": with_key("optimizer.lr", 2e-3), "identity": IDENTITY, "steps": 10, "restarted": True}
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.yaml").write_text("output_dir: new\n")
    same = restarted | {"config": CONFIG}
    from_path = claim_output(tmp_path / "new", folder / "checkpoints/step_00000004", **same)
    assert from_path.step == 4
    from_path.lock.close()
    anew = claim_output(tmp_path / "new", "never", **restarted)
    assert anew.step == 0 and not anew.checkpoint
    anew.lock.close()
    with_changes = claim_output(folder, "must", **restarted)
    assert with_changes.step == 4
    with_changes.lock.close()
