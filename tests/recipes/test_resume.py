"""Whether a run that was stopped, killed or ran out of disk goes on as if nothing had happened, and whether what may
not change between the two halves is refused."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

TIMINGS = {"seconds", "tokens_per_second", "peak_memory_bytes", "mfu"}


@pytest.fixture(scope="session")
def config(tiny_llama, uneven_tokens) -> dict:
    """24 steps of AdamW in float32, 10 of them warmup, 9 steps an epoch; validation at every fifth."""
    return {
        "device": "cpu",
        "threads": 1,
        "model": tiny_llama,
        "data": {"train": str(uneven_tokens), "validation": str(uneven_tokens), "rows": "padded", "seq_len": 16},
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 24,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
        "validate_every": 5,
        "validation_max_rows": 6,
        "log": {"samples": True, "digests": True},
    }


@pytest.fixture(scope="module")
def whole(run, config):
    """The run that nothing interrupted."""
    result = run(config)
    assert result.exit_code == 0, result
    return result


def remaining(result) -> list[dict]:
    """The train and validation lines without their timings."""
    lines = result.lines("train", "validation")
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def assert_same(ours, theirs) -> None:
    """Bit-equal metrics, samples and final weights."""
    assert remaining(ours) == remaining(theirs)
    samples = [(result.output / "samples-rank0.jsonl").read_bytes() for result in (ours, theirs)]
    assert samples[0] == samples[1]
    assert model_bytes(ours.output) == model_bytes(theirs.output)


def model_bytes(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "model").iterdir()}


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of all files below, but for the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


# ── Stop and continue ─────────────────────────────────────────────────────────────────────────────────────────────────

SEEDED = sorted(random.Random(11).sample(range(1, 24), 4))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "stops", [[9, 18], [10, 14], [1, 4, 7], SEEDED], ids=["epoch_ends", "one_epoch", "warmup", "random"]
)
def test_a_stopped_run_continues_bit_for_bit(run, write_config, stop_after, changed, config, whole, stops, workers):
    path = write_config(changed(config, {"data": {"num_workers": workers}}))
    before = 0
    for stop in stops:
        with stop_after(stop - before):
            stopped = run(path)
        assert stopped.exit_code == 3, stopped
        assert stopped.column("step")[-1] == stop and checkpoints(stopped.output)[-1] == f"step_{stop:08d}"
        assert stopped.lines()[-1] == {"event": "end", "step": stop, "reason": "stopped"}
        assert not (stopped.output / "model").exists()
        before = stop
    finished = run(path)
    assert finished.exit_code == 0, finished
    assert [line["resumed_from"] for line in finished.lines("start")] == [None, *stops]
    assert_same(finished, whole)


def test_an_order_resumed_within_an_epoch_goes_on_through_the_next_ones(run, write_config, stop_after, reference,
                                                                      changed, config, tagged_tokens):  # fmt: skip
    # accelerate#4233: the resumed epoch skipped rows of another permutation: some came twice, others never.
    model = {"vocab_size": 13_000, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    data = {"train": str(tagged_tokens), "validation": None}
    changes = {"model": model, "data": data, "validate_every": None, "validation_max_rows": None, "max_steps": 160}
    changes |= {"global_batch_size": 1, "micro_batch_size": 1}
    one_by_one = changed(config, changes)
    uninterrupted = run(one_by_one)
    path = write_config(one_by_one)
    with stop_after(20):
        assert run(path).exit_code == 3
    finished = run(path)
    order = [row for step in reference.delivered(finished.output) for row in step]
    assert len(order) == 160 and all(sorted(order[i : i + 64]) == list(range(64)) for i in (0, 64))
    assert_same(finished, uninterrupted)


def test_epochs_end_where_they_should_after_a_resume_at_an_epochs_end(run, write_config, stop_after, changed, config,
                                                                    write_tokens, tmp_path):  # fmt: skip
    # meta-pytorch/data#1437: a resume at an epoch's end yielded an empty epoch.
    tokens = write_tokens(tmp_path / "tokens", [list(range(i, i + 9)) for i in range(40)], vocab_size=320)
    epochs = changed(config, {"data": {"train": str(tokens)}, "epochs": 4, "schedule": {"name": "constant"}})
    del epochs["max_steps"]
    uninterrupted = run(epochs)
    path = write_config(epochs)
    with stop_after(20):
        stopped = run(path)
    assert (stopped.exit_code, stopped.column("step")[-1], stopped.column("epoch")[-1]) == (3, 20, 1)
    finished = run(path)
    assert finished.column("epoch") == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    assert_same(finished, uninterrupted)

    before = tree(finished.output)
    again = run(path)
    assert again.exit_code == 0 and tree(again.output) == before
    assert "40" in again.stdout + again.stderr, f"nothing says that the run is finished: {again}"

    longer = run(path, "epochs=5")
    assert longer.exit_code == 0 and longer.column("step")[40:] == list(range(41, 51))
    assert longer.column("epoch")[40:] == [4] * 10
    for entry in (path.read_bytes() for path in sorted((longer.output / "checkpoints/step_00000040").iterdir())):
        assert entry in [content for content, _ in before.values()]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "sgd"}, "data": {"rows": "stream", "tail": "pad"}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}, "model": {"tie_word_embeddings": True}},
        {"dtype": "float64", "param_dtype": "float64", "max_grad_norm": None},
        {"dtype": "bfloat16", "schedule": {"name": "wsd", "decay_steps": 3}, "export": {"dtype": "bfloat16"}},
    ],
    ids=["sgd_stream", "momentum_tied", "float64", "bfloat16"],
)
def test_every_optimizer_and_dtype_continues_bit_for_bit(run, write_config, stop_after, changed, config, uneven_tokens,
                                                         write_tokens, tmp_path, changes):  # fmt: skip
    more = write_tokens(tmp_path / "more", [[5, 6, 7, 8, 9] * 4] * 5, vocab_size=320)
    short = changed(config, {"max_steps": 6, "data": {"train": [str(uneven_tokens), str(more)]}})
    path = write_config(changed(short, changes))
    with stop_after(4):
        assert run(path).exit_code == 3
    finished = run(path)
    assert finished.exit_code == 0, finished
    assert_same(finished, run(changed(short, changes)))


def test_a_run_continues_from_before_its_first_update(run, write_tokens, changed, config, tmp_path):
    # The first two steps have no trained token, so the saved optimizer has no state yet.
    documents = [[]] * 8 + [[4, 5, 6, 7], [8, 9], [10, 11, 12], [13]]
    tokens = write_tokens(tmp_path / "tokens", documents, vocab_size=320)
    short = changed(
        config, {"data": {"train": str(tokens), "shuffle": False}, "max_steps": 4, "checkpoint": {"every": 1}}
    )
    uninterrupted = run(short)
    assert uninterrupted.column("trained_tokens") == [0, 0, 10, 0]
    for step in (1, 3):
        branch = changed(short, {"resume": str(uninterrupted.output / f"checkpoints/step_{step:08d}")})
        resumed = run(branch)
        assert resumed.exit_code == 0, resumed
        assert remaining(resumed) == [line for line in remaining(uninterrupted) if line["step"] > step]
        assert model_bytes(resumed.output) == model_bytes(uninterrupted.output)


# ── Signals and kills ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def long(changed, config) -> dict:
    """150 short steps, no validation."""
    changes = {"data": {"validation": None}, "validate_every": None, "validation_max_rows": None, "max_steps": 150}
    return changed(config, changes)


@pytest.fixture(scope="module")
def whole_long(run, long):
    return run(long)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_stops_the_run_with_its_state_saved(start, changed, long, whole_long, number, group, workers):
    running = start(changed(long, {"data": {"num_workers": workers}}))
    running.wait_for_step(3)
    running.signal(number, group)
    stopped = running.result(60)
    assert stopped.exit_code == 3, stopped
    assert "Traceback" not in stopped.stderr and "Warning" not in stopped.stderr, stopped
    assert not running.processes()
    assert 3 <= stopped.column("step")[-1] < 150
    (printed,) = set(re.findall(r"femto run .*", stopped.stdout + stopped.stderr))
    finished = start.command(printed, stopped.output).result()
    assert finished.exit_code == 0, finished
    assert_same(finished, whole_long)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_change_nothing(start, write_config, changed, long, whole_long):
    path = write_config(changed(long, {"checkpoint": {"every": 2, "keep_last": 1}}))
    seeded = random.Random(12)
    step = 0
    for kill in range(20):
        # Workers hear of their parent's death within 5 s, and hold the lock of the output until then: a few times only.
        # A save in the background may be cut off for ever by kills that come fast: every other one waits.
        saves = f"checkpoint.async_save={'true' if kill % 2 else 'false'}"
        running = start(path, f"data.num_workers={2 if kill % 5 == 4 else 0}", saves)
        if seeded.random() < 0.3:
            time.sleep(seeded.uniform(0, 0.5))  # while it starts, mostly
        else:
            running.wait_for_step(step + seeded.randint(1, 4))
            time.sleep(seeded.uniform(0, 0.06))  # in a step or in a save
        running.signal(signal.SIGKILL)
        assert running.result().exit_code == -signal.SIGKILL, running.result()
        deadline = time.monotonic() + 30
        while running.processes():
            assert time.monotonic() < deadline, "loader workers outlived the run by 30 s"
            time.sleep(0.01)
        step = max([step, *saved_steps(running.output)])
    finished = start(path).result()
    assert finished.exit_code == 0, finished
    assert len(finished.lines("start")) > 5
    assert_same(finished, whole_long)
    assert checkpoints(finished.output) == ["step_00000150"]
    left = {path.name for path in finished.output.iterdir()}
    assert not [name for name in left if "tmp" in name or "partial" in name], left


def saved_steps(output: Path) -> list[int]:
    folder = output / "checkpoints"
    return [int(path.name[5:]) for path in folder.glob("step_" + "[0-9]" * 8)] if folder.exists() else []


@pytest.mark.timeout(300)
def test_a_second_run_on_the_same_output_is_refused(start, write_config, run, changed, long):
    path = write_config(changed(long, {"max_steps": 100_000}))
    first = start(path)
    first.wait_for_step(1)
    began = time.monotonic()
    second = run(path)
    assert second.exit_code == 2 and len(second.errors) == 1 and str(first.output) in second.errors[0], second
    assert 8 < time.monotonic() - began < 60
    assert not first.ended
    first.signal(signal.SIGTERM)
    assert first.result().exit_code == 3


# ── What may change between the halves ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def kept(run, write_config, stop_after, changed, config, tmp_path_factory) -> SimpleNamespace:
    """A run of 8 steps that was stopped after 4, with saves at 2 and 4; `kept.copy` is its folder as it was then."""
    path = write_config(changed(config, {"max_steps": 8, "checkpoint": {"every": 2}}))
    with stop_after(4):
        stopped = run(path)
    assert stopped.exit_code == 3, stopped
    copy = tmp_path_factory.mktemp("kept") / "output"
    shutil.copytree(stopped.output, copy)
    return SimpleNamespace(path=path, output=stopped.output, copy=copy)


@pytest.fixture
def stopped(kept) -> SimpleNamespace:
    """The stopped run, put back as it was when it stopped."""
    shutil.rmtree(kept.output)
    shutil.copytree(kept.copy, kept.output)
    return kept


@pytest.fixture(scope="module")
def eight(run, changed, config):
    """The 8 steps without a stop."""
    return run(changed(config, {"max_steps": 8, "checkpoint": {"every": 2}}))


@pytest.mark.parametrize(
    ("change", "words", "must"),
    [
        ("optimizer.lr=2e-3", ["optimizer.lr", "0.001", "0.002"], True),
        ("schedule.warmup_steps=3", ["schedule.warmup_steps", "10", "3"], True),
        ("max_grad_norm=null", ["max_grad_norm", "1.0"], True),
        ("seed=1", ["seed", "0", "1"], False),
        ("data.seq_len=20", ["data.seq_len", "16", "20"], False),
        ("global_batch_size=6", ["global_batch_size", "4", "6"], False),
        ("data.tail=pad", ["data.tail", "drop", "pad"], False),
        ("data.shuffle=false", ["data.shuffle", "true", "false"], False),
        ("model.rope_theta=500000.0", ["rope_theta", "10000", "500000"], None),
        ("max_steps=6", ["8 steps", "6"], None),
    ],
    ids=lambda value: value.split("=")[0] if isinstance(value, str) else "",
)
def test_a_changed_key_is_refused_and_some_are_always(run, stopped, change, words, must):
    before = tree(stopped.output)
    refused = run(stopped.path, change)
    assert refused.exit_code == 2 and len(refused.errors) == 1, refused
    assert all(word.lower() in refused.errors[0].lower() for word in words), refused
    assert tree(stopped.output) == before
    if must is not None:
        forced = run(stopped.path, change, "resume=must")
        assert forced.exit_code == (0 if must else 2), forced
    if must:
        assert "output_dir" in refused.errors[0] and "must" in refused.errors[0]
        assert words[0] in forced.stdout + forced.stderr, "the change that was applied is not printed"
        assert forced.column("step") == list(range(1, 9))


def test_other_data_are_refused_and_the_same_data_elsewhere_are_not(run, stopped, eight, uneven_tokens, write_tokens,
                                                                  tmp_path):  # fmt: skip
    other = write_tokens(tmp_path / "other", [[1, 2, 3]] * 40, vocab_size=320)
    for override in (f"data.train={other}", f"data.train=[{uneven_tokens},{other}]"):
        refused = run(stopped.path, override)
        assert refused.exit_code == 2 and "data" in refused.errors[0], refused
    shutil.copytree(uneven_tokens, tmp_path / "moved")
    moved = run(stopped.path, f"data.train={tmp_path / 'moved'}")
    assert moved.exit_code == 0, moved
    assert_same(moved, eight)


def test_what_does_not_change_the_training_may_change(run, reference, stopped, eight, tmp_path):
    allowed = ["micro_batch_size=3", "data.num_workers=1", "data.prefetch=4", "data.validation=null", "threads=2"]
    allowed += ["log.every=1", "log.samples=false", "checkpoint.every=3", "checkpoint.keep_last=2"]
    allowed += ["export.dtype=bfloat16", "validate_every=null", "validation_max_rows=null"]
    resumed = run(stopped.path, *allowed)
    assert resumed.exit_code == 0, resumed
    for key in ("ledger", "lr", "consumed_rows", "trained_tokens"):
        assert resumed.column(key) == eight.column(key)
    assert reference.distance(resumed.column("loss"), eight.column("loss")) < 1e-5
    assert checkpoints(resumed.output) == ["step_00000006", "step_00000008"]


def test_a_longer_run_goes_on_from_a_finished_one(run, stopped, config, changed):
    assert run(stopped.path).exit_code == 0
    longer = run(stopped.path, "max_steps=12")
    assert longer.exit_code == 0, longer
    assert longer.column("step") == list(range(1, 13))
    assert longer.column("epoch")[8:] == [0, 1, 1, 1]


def test_never_must_and_auto_say_what_may_be_found(run, config, changed, stopped, eight):
    before = tree(stopped.output)
    refused = run(stopped.path, "resume=never")
    assert refused.exit_code == 2 and str(stopped.output) in refused.errors[0] and tree(stopped.output) == before
    nothing = run(changed(config, {"resume": "must"}))
    assert nothing.exit_code == 2 and len(nothing.errors) == 1 and not nothing.output.exists(), nothing
    shutil.rmtree(stopped.output / "checkpoints")
    refused = run(stopped.path)  # a run that had checkpoints is not begun again over its metrics
    assert refused.exit_code == 2 and "checkpoints are gone" in refused.errors[0], refused
    (stopped.output / "metrics.jsonl").unlink()
    fresh = run(stopped.path)
    assert fresh.exit_code == 0 and fresh.lines("start")[-1]["resumed_from"] is None, fresh
    assert_same(fresh, eight)


def test_a_named_checkpoint_continues_in_a_new_folder(run, reference, stopped, eight, tmp_path):
    named = stopped.output / "checkpoints/step_00000002"
    before = tree(stopped.output)
    branched = run(stopped.path, f"resume={named}", f"output_dir={tmp_path / 'branch'}")
    assert branched.exit_code == 0, branched
    assert branched.lines("start")[0]["resumed_from"] == 2
    assert remaining(branched) == [line for line in remaining(eight) if line["step"] > 2]
    assert model_bytes(branched.output) == model_bytes(eight.output)
    assert tree(stopped.output) == before


def test_a_missing_model_is_written_again_and_nothing_else_is_done(run, stopped, eight):
    finished = run(stopped.path)
    before = tree(finished.output / "checkpoints")
    shutil.rmtree(finished.output / "model")
    again = run(stopped.path)
    assert again.exit_code == 0, again
    assert tree(again.output / "checkpoints") == before
    assert again.lines()[-1] == {"event": "end", "step": 8, "reason": "completed"}
    assert_same(again, eight)


def test_lines_past_the_checkpoint_and_a_torn_last_one_are_removed(run, stopped, eight):
    metrics, samples = stopped.output / "metrics.jsonl", stopped.output / "samples-rank0.jsonl"
    with metrics.open("a") as file:
        lines = [line for line in eight.lines("train", "validation") if line["step"] in (5, 6)]
        file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "train", "step": 7, "ep')
    with samples.open("a") as file:
        file.write('{"step": 5, "micro_batch": 0, "rows": [1, 2]}\n{"step": 5, "micro')
    resumed = run(stopped.path)
    assert resumed.exit_code == 0, resumed
    assert resumed.column("step") == list(range(1, 9))
    assert_same(resumed, eight)


# ── Checkpoints on disk ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_a_whole_checkpoint_is_no_checkpoint(run, stopped, eight):
    # Automodel#3254: resume died on a half-written folder, and the next save of that step collided with it.
    folder = stopped.output / "checkpoints"
    (folder / "step_00000006").mkdir()
    for stray in ("best", "step_x", "epoch_9", "step_00000007.partial"):
        (folder / stray).mkdir()
        (folder / stray / "notes.txt").write_text("kept")
    explicit = run(stopped.path, f"resume={folder / 'step_00000006'}")
    assert explicit.exit_code == 2 and "step_00000006" in explicit.errors[0], explicit
    resumed = run(stopped.path)
    assert resumed.exit_code == 0, resumed
    assert resumed.lines("start")[-1]["resumed_from"] == 4
    assert {"step_00000006", "step_00000008", "best"} <= set(checkpoints(resumed.output))
    assert any((folder / "step_00000006").iterdir())
    assert_same(resumed, eight)


def test_retention_removes_the_lowest_steps_and_nothing_else(run, changed, config):
    # open-instruct#541: "latest" by the text of the name, and the newest deleted.
    result = run(changed(config, {"max_steps": 1}))
    assert result.exit_code == 0
    (result.output / "checkpoints/best").mkdir()
    path = result.output.parent / "config.yaml"
    longer = run(path, "max_steps=11", "checkpoint.every=1", "checkpoint.keep_last=2")
    assert longer.exit_code == 0, longer
    assert checkpoints(longer.output) == ["best", "step_00000010", "step_00000011"]
    everything = run(path, "max_steps=13", "checkpoint.every=1")
    assert everything.lines("start")[-1]["resumed_from"] == 11
    assert checkpoints(everything.output) == ["best", *(f"step_{step:08d}" for step in (10, 11, 12, 13))]


def test_the_latest_checkpoint_is_the_highest_number(run, stopped):
    folder = stopped.output / "checkpoints"
    (folder / "step_00000002").rename(folder / "step_00000900")
    misnamed = run(stopped.path)
    assert misnamed.exit_code == 2 and "step_00000900" in misnamed.errors[0], misnamed


def checkpoint_files(output: Path) -> list[Path]:
    folder = output / "checkpoints/step_00000004"
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_no_file_of_a_checkpoint_can_run_code_or_change_unseen(run, stopped, canary):
    # transformers#43140: resuming from a stranger's checkpoint ran code from one of its files.
    planted = [canary.pickle, None]
    names = [path.relative_to(stopped.output) for path in checkpoint_files(stopped.output)]
    assert len(names) > 1
    for name in names:
        for content in planted:
            path = stopped.output / name
            whole = path.read_bytes()
            if content is None:  # one byte in the middle
                content = bytearray(whole)
                content[len(whole) // 2] ^= 1
            path.write_bytes(content)
            refused = run(stopped.path)
            assert not canary.path.exists(), f"{name} ran code"
            assert refused.exit_code == 2 and len(refused.errors) == 1, (name, refused)
            # A manifest with a wrong digest in it accuses the file that the digest is of.
            accused = path.parent.name if name.name == "manifest.json" else name.name
            assert accused in refused.errors[0] and "Traceback" not in refused.stderr, (name, refused)
            path.write_bytes(whole)
    assert run(stopped.path).exit_code == 0


def test_a_file_missing_from_a_checkpoint_is_named(run, stopped):
    largest = max(checkpoint_files(stopped.output), key=lambda path: path.stat().st_size)
    largest.unlink()
    refused = run(stopped.path)
    assert refused.exit_code == 2 and largest.name in refused.errors[0], refused


# ── A full disk ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_save_that_cannot_be_written_ends_the_run_and_keeps_the_last_one(run, after_updates, write_config, changed,
                                                                         config, eight):  # fmt: skip
    path = write_config(changed(config, {"max_steps": 8, "checkpoint": {"every": 2, "async_save": False}}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with after_updates(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))):
        try:
            failed = run(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.exit_code == 1 and len(failed.errors) == 1 and "Traceback" not in failed.stderr, failed
    assert "too large" in failed.errors[0].lower() and "checkpoints" in failed.errors[0], failed
    assert checkpoints(failed.output) == ["step_00000002", "step_00000004"]
    resumed = run(path)
    assert resumed.exit_code == 0, resumed
    assert_same(resumed, eight)


def test_a_line_that_cannot_be_written_ends_the_run_and_is_no_obstacle_to_the_next(run, after_updates, write_config,
                                                                                 changed, config, eight):  # fmt: skip
    path = write_config(changed(config, {"max_steps": 8, "checkpoint": {"every": 2}}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        size = (path.parent / "output/metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))

    with after_updates(3, fill):
        try:
            failed = run(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.exit_code == 1 and len(failed.errors) == 1 and "Traceback" not in failed.stderr, failed
    assert "too large" in failed.errors[0].lower() and "metrics.jsonl" in failed.errors[0], failed
    resumed = run(path)
    assert resumed.exit_code == 0, resumed
    assert_same(resumed, eight)


def size_of(folder: Path) -> int:
    """The space that a folder's files take in pages of 4,096 bytes."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(run, small_disk, write_config, changed, config, eight):
    size = size_of(eight.output / "checkpoints/step_00000002")
    output = small_disk(int(2.6 * size)) / "output"
    path = write_config(changed(config, {"max_steps": 8, "checkpoint": {"every": 2}, "output_dir": str(output)}))
    failed = run(path)
    assert failed.exit_code == 1 and len(failed.errors) == 1 and "Traceback" not in failed.stderr, failed
    assert "no space left" in failed.errors[0].lower() and str(output) in failed.errors[0], failed
    assert checkpoints(output) == ["step_00000002", "step_00000004"]
    small_disk(20 * size)
    resumed = run(path)
    assert resumed.exit_code == 0, resumed
    assert resumed.lines("start")[-1]["resumed_from"] == 4
    assert_same(resumed, eight)


def test_a_disk_too_full_for_the_model_keeps_the_final_checkpoint(
    run, small_disk, write_config, changed, config, eight
):
    size = size_of(eight.output / "checkpoints/step_00000002")
    output = small_disk(int(1.15 * size)) / "output"
    path = write_config(changed(config, {"max_steps": 8, "output_dir": str(output)}))
    failed = run(path)
    assert failed.exit_code == 1 and len(failed.errors) == 1 and "no space left" in failed.errors[0].lower(), failed
    assert checkpoints(output) == ["step_00000008"]
    assert not [entry for entry in output.iterdir() if "model" in entry.name]
    small_disk(20 * size)
    finished = run(path)
    assert finished.exit_code == 0, finished
    assert_same(finished, eight)


def test_a_run_killed_while_it_publishes_its_model_leaves_the_old_or_none(run, monkeypatch, stopped, eight):
    """Stands in for a crash at the worst moment: the rename that publishes is the last thing that happens."""
    real = os.replace, os.rename

    class Crash(BaseException):
        pass

    def crash(source, target, *rest, **more):
        if Path(target).name == "model":
            raise Crash
        return real[0](source, target, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        patched.setattr(os, "rename", crash)
        with contextlib.suppress(Crash):
            run(stopped.path)
    assert not (stopped.output / "model").exists()
    finished = run(stopped.path)
    assert finished.exit_code == 0, finished
    assert_same(finished, eight)
