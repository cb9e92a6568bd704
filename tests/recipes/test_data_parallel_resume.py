"""Whether a data parallel run that was stopped or killed goes on as if nothing had happened, on as many ranks as
before, on another number or under another recipe; whether a rank that cannot go on ends all; and whether a run that
starts its processes itself is one that a launcher has started."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = "data_parallel_pretrain"
TIMINGS = {"seconds", "tokens_per_second", "peak_memory_bytes", "mfu"}
STEPS = 14  # 9 an epoch
HALF = {"dtype": "bfloat16", "param_dtype": "float32"}
FLOAT16 = {"dtype": "float16", "param_dtype": "float32"}
START = 150  # seconds in which fresh interpreters have imported torch, also on a busy machine


@pytest.fixture(scope="session")
def config(tiny_llama, uneven_tokens) -> dict:
    """14 steps of AdamW, 9 an epoch, two micro-batches a step on two ranks; validation at every sixth."""
    return {
        "device": "cpu",
        "threads": 1,
        "model": tiny_llama | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        "data": {"train": str(uneven_tokens), "validation": str(uneven_tokens), "rows": "padded", "seq_len": 16},
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "max_steps": STEPS,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
        "validate_every": 6,
        "validation_max_rows": 5,
        "checkpoint": {"async_save": False},
        "log": {"samples": True, "digests": True},
    }


@pytest.fixture(scope="session")
def double(changed, config) -> dict:
    """The same in float64."""
    return changed(config, {"dtype": "float64", "param_dtype": "float64", "log": {"digests": False}})


@pytest.fixture(scope="module")
def uninterrupted(run, double):
    """The float64 run on a single device that nothing interrupted."""
    result = run(double)
    assert result.exit_code == 0, result
    return result


@pytest.fixture(scope="session")
def on_ranks(run_ranks):
    """`on_ranks(count, config, …)`: this recipe on so many ranks, to its end."""
    return lambda count, *arguments, **more: run_ranks(count, *arguments, **{"recipe": RECIPE, **more})


@pytest.fixture(scope="session")
def whole(on_ranks, config, changed):
    """`whole(count, **changes)`: the run on so many ranks that nothing interrupted; made once."""
    made = {}

    def whole(count: int, **changes):
        key = json.dumps([count, changes])
        if key not in made:
            made[key] = on_ranks(count, changed(config, changes))
            assert made[key].exit_codes == [0] * count, made[key]
        return made[key]

    return whole


def remaining(result) -> list[dict]:
    """The train and validation lines without their timings."""
    lines = result.lines("train", "validation")
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def samples(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("samples-rank*.jsonl")}


def model_bytes(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "model").iterdir()}


def assert_same(ours, theirs) -> None:
    """Bit-equal metrics, digests, samples and final weights."""
    assert remaining(ours) == remaining(theirs)
    assert samples(ours.output) == samples(theirs.output)
    assert model_bytes(ours.output) == model_bytes(theirs.output)


def assert_stopped(result, step: int, recipe: str = RECIPE) -> None:
    """All ranks ended as stopped after `step`, with its checkpoint, and the last line says how to go on."""
    assert set(result.exit_codes) == {3}, result
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr, result
    assert all(out == "" for out, _ in result.screens[1:]), result
    assert result.lines()[-1] == {"event": "end", "step": step, "reason": "stopped"}
    assert [line["step"] for line in result.lines("train")] == list(range(1, step + 1))
    assert checkpoints(result.output)[-1] == f"step_{step:08d}"
    assert not (result.output / "model").exists()
    assert re.fullmatch(rf"\s*femto run {recipe} --config \S+/config.yaml", result.stdout.splitlines()[-1])


def checkpoints(output: Path) -> list[str]:
    """What stands among the checkpoints under a final name."""
    return sorted(path.name for path in (output / "checkpoints").glob("[!.]*"))


# ── What happens to a rank ────────────────────────────────────────────────────────────────────────────────────────────


def signal_after_update(rank: int, ranks: list[int], update: int, number: int) -> None:
    """Sends these ranks a signal as soon as they have made their update of this number, from 1."""
    import signal

    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = [update]

    def hook(*_) -> None:
        left[0] -= 1
        if left[0] == 0 and rank in ranks:
            signal.raise_signal(number)

    register_optimizer_step_post_hook(hook)


def signal_in_validation(rank: int, ranks: list[int], batch: int, number: int) -> None:
    """Sends these ranks a signal in their validation batch of this number, from 1."""
    import signal

    import torch

    import femto.recipes.data_parallel_pretrain as recipe

    real, left = recipe.summed_cross_entropy, [batch]

    def loss(*arguments):
        if not torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == 0 and rank in ranks:
                signal.raise_signal(number)
        return real(*arguments)

    recipe.summed_cross_entropy = loss


def overflow(rank: int, step: int, update: int | None) -> None:
    """Rank 1's gradient overflows in this step, and the run is stopped after this update."""
    import signal

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import femto.recipes.data_parallel_pretrain as recipe

    copy, synchronizer, steps, updates = recipe.compute_copy, recipe.GradientSynchronizer, [0], [0]

    def compute_copy(*arguments):
        model = copy(*arguments)
        first = next(model.parameters())

        def hook(parameter) -> None:
            if rank == 1 and steps[0] == step - 1:
                parameter.grad[0] = torch.inf

        first.register_post_accumulate_grad_hook(hook)
        return model

    def finish(self) -> None:
        steps[0] += 1
        real_finish(self)

    def stop(*_) -> None:
        updates[0] += 1
        if updates[0] == update:
            signal.raise_signal(signal.SIGTERM)

    recipe.compute_copy, real_finish = compute_copy, synchronizer.finish
    synchronizer.finish = finish
    register_optimizer_step_post_hook(stop)


# ── The same number of ranks: bit for bit ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({"data": {"num_workers": 0}}, [([1], 4, "SIGTERM"), ([0, 1], 9, "SIGINT")]),
        ({"data": {"num_workers": 2}, "checkpoint": {"every": 3, "async_save": True}}, [([0], 7, "SIGINT")]),
        (HALF, [([0], 5, "SIGTERM")]),
    ],
    ids=["twice", "async_workers", "bfloat16"],
)
def test_a_stopped_run_continues_bit_for_bit(on_ranks, write_config, changed, config, whole, changes, stops):
    path = write_config(changed(config, changes))
    before = 0
    for ranks, stop, name in stops:
        plant = (signal_after_update, ranks, stop - before, getattr(signal, name))
        assert_stopped(on_ranks(2, path, plant=plant), stop)
        before = stop
    finished = on_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert [line["resumed_from"] for line in finished.lines("start")] == [None, *(stop for _, stop, _ in stops)]
    assert_same(finished, whole(2, **(changes if changes is HALF else {})))
    for line in finished.lines("train"):
        assert len(line["parameters_digest"]) == len(line["optimizer_digest"]) == 2


def test_the_loss_scale_goes_on_where_it_was(on_ranks, write_config, changed, config):
    half = changed(config, FLOAT16)
    theirs = on_ranks(2, half, plant=(overflow, 3, None))
    assert theirs.exit_codes == [0, 0] and theirs.column("skipped_updates") == [0, 0] + [1] * 12, theirs
    assert theirs.column("loss_scale") == [2.0**16] * 2 + [2.0**15] * 12
    path = write_config(half)
    assert_stopped(on_ranks(2, path, plant=(overflow, 3, 4)), 5)
    state = json.loads(next((path.parent / "output/checkpoints").glob("*/state.json")).read_text())
    assert state["loss_scale"] == {"value": 2.0**15, "fitting": 2, "skipped": 1}
    finished = on_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert_same(finished, theirs)


def test_a_stop_in_validation_leaves_it_to_the_resume(on_ranks, write_config, config, whole):
    path = write_config(config)
    stopped = on_ranks(2, path, plant=(signal_in_validation, [1], 2, signal.SIGTERM))
    assert_stopped(stopped, 6)
    assert not stopped.lines("validation")
    finished = on_ranks(2, path)
    assert finished.exit_codes == [0, 0], finished
    assert_same(finished, whole(2))


# ── Another number of ranks, another recipe: the same batches, the same losses ────────────────────────────────────────


def assert_continued(result, theirs, reference, starts: list) -> None:
    """Went on to the end as a run that nothing interrupted, but for rounding."""
    assert result.exit_code == 0 and result.stderr == "", result
    assert [(line["recipe"], line["world_size"], line["resumed_from"]) for line in result.lines("start")] == starts
    for key in ("step", "epoch", "consumed_rows", "trained_tokens", "lr", "batch_digest", "ledger"):
        assert result.column(key) == theirs.column(key), key
    assert reference.delivered(result.output) == reference.delivered(theirs.output)
    for key in ("loss", "grad_norm"):
        assert reference.distance(result.column(key), theirs.column(key)) <= 1e-12, key
    ours, losses = ([line["loss"] for line in r.lines("validation")] for r in (result, theirs))
    assert reference.distance(ours, losses) <= 1e-12
    assert reference.weight_distance(*map(reference.read_weights, (result.output, theirs.output))) <= 1e-10


@pytest.mark.timeout(300)
def test_a_run_continues_on_any_number_of_ranks(on_ranks, write_config, reference, double, uninterrupted):
    # torchtitan#816: a checkpoint of n ranks loaded on fewer, and the other ranks' places in the data vanished.
    path = write_config(double)
    chain = [
        (1, 3, []),
        (2, 5, ["data.num_workers=2"]),
        (4, 9, []),  # an epoch's end
        (2, None, ["gradient_sync.bucket_mb=0.01", "micro_batch_size=2"]),
    ]
    before = 0
    for count, stop, overrides in chain:
        plant = stop and (signal_after_update, [count - 1], stop - before, signal.SIGTERM)
        result = on_ranks(count, path, *overrides, plant=plant)
        if stop:
            assert_stopped(result, stop)
            before = stop
    starts = [(RECIPE, count, before) for count, before in [(1, None), (2, 3), (4, 5), (2, 9)]]
    assert_continued(result, uninterrupted, reference, starts)


@pytest.mark.timeout(300)
def test_a_run_continues_under_another_recipe(run, run_ranks, on_ranks, stop_after, write_config, reference, double,
                                              uninterrupted):  # fmt: skip
    path = write_config(double)
    with stop_after(3):
        assert run(path).exit_code == 3
    chain = [
        (RECIPE, 2, 5, []),
        ("distributed_pretrain", 2, 8, []),  # dp_shard: 2
        (RECIPE, 2, 10, ["checkpoint.every=1", "checkpoint.async_save=true", "checkpoint.keep_last=1"]),
    ]
    before = 3
    for recipe, count, stop, overrides in chain:
        plant = (signal_after_update, [1], stop - before, signal.SIGTERM)
        stopped = run_ranks(count, path, *overrides, recipe=recipe, plant=plant)
        assert_stopped(stopped, stop, recipe)
        before = stop
    finished = run(path)
    single = "single_device_pretrain"
    starts = [(single, 1, None), (RECIPE, 2, 3), ("distributed_pretrain", 2, 5), (RECIPE, 2, 8), (single, 1, 10)]
    assert_continued(finished, uninterrupted, reference, starts)


# ── A rank that cannot go on ──────────────────────────────────────────────────────────────────────────────────────────


def raises_in_micro_batch(rank: int, victim: int, number: int) -> None:
    import femto.recipes.data_parallel_pretrain as recipe

    real, left = recipe.summed_cross_entropy, [number]

    def loss(*arguments):
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            raise ValueError("the planted fault")
        return real(*arguments)

    recipe.summed_cross_entropy = loss


def has_one_layer_less(rank: int, victim: int) -> None:
    import femto.recipes.data_parallel_pretrain as recipe

    real = recipe.Decoder

    def decoder(*arguments):
        model = real(*arguments)
        if rank == victim:
            del model.model.layers[-1]
        return model

    recipe.Decoder = decoder


def skips_a_layer(rank: int, victim: int, passes: int) -> None:
    """This rank leaves the feed-forward out of its pass of this number, from 1, and of those after it."""
    import femtolib.model as model

    real, made = model.FeedForward.forward, [0]

    def forward(self, x):
        made[0] += 1
        return x * 0 if rank == victim and made[0] >= passes else real(self, x)

    model.FeedForward.forward = forward


@pytest.fixture(scope="session")
def saving(changed, config) -> dict:
    """Eight steps with saves at every second, two micro-batches a step on two ranks."""
    saving = changed(config, {"max_steps": 8, "checkpoint": {"every": 2}})
    del saving["validate_every"], saving["validation_max_rows"], saving["data"]["validation"]
    return saving


@pytest.fixture(scope="session")
def saving_whole(on_ranks, saving):
    result = on_ranks(2, saving)
    assert result.exit_codes == [0, 0], result
    return result


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_in_its_seventh_micro_batch_ends_all(on_ranks, write_config, saving, saving_whole, victim):
    path = write_config(saving)
    failed = on_ranks(2, path, plant=(raises_in_micro_batch, victim, 7))
    assert failed.exit_codes == [1, 1], failed
    assert failed.stderr.count("ValueError: the planted fault") == 1, failed
    assert failed.screens[victim][1].startswith(f"rank {victim}: Traceback"), failed
    other = failed.screens[1 - victim][1]
    assert other.startswith(f"error: rank {1 - victim}: ") and other.count("\n") == 1, failed
    assert "in 8 Training loop: lost contact with another rank" in other, failed
    assert checkpoints(failed.output) == ["step_00000002"]
    if victim == 1:
        finished = on_ranks(2, path)
        assert finished.exit_codes == [0, 0] and finished.lines("start")[-1]["resumed_from"] == 2, finished
        assert_same(finished, saving_whole)


@pytest.mark.parametrize(("half", "victim"), [(False, 0), (True, 1)], ids=["alone", "copy"])
def test_a_rank_with_fewer_parameters_ends_all_and_is_named(on_ranks, changed, saving, half, victim):
    failed = on_ranks(2, changed(saving, HALF if half else {}), plant=(has_one_layer_less, victim))
    assert 0 not in failed.exit_codes and "Traceback" not in failed.stderr, failed
    assert len(failed.errors) == 1, failed
    for words in ("the copies of the model differ", "rank 1 has ", "rank 0 has ", "model.layers.0."):
        assert words in failed.errors[0], failed
    assert not (failed.output / "checkpoints").exists()


def test_a_rank_that_skips_a_layer_ends_all_and_says_which(on_ranks, write_config, saving, saving_whole):
    path = write_config(saving)
    failed = on_ranks(2, path, plant=(skips_a_layer, 1, 2 * 4 + 1))
    assert failed.exit_codes == [1, 1] and "Traceback" not in failed.stderr, failed
    assert len(failed.errors) == 1, failed
    for words in ("no gradient", "mlp.gate_proj.weight (rank 1)", "find_unused_parameters"):
        assert words in failed.errors[0], failed
    assert "self_attn" not in failed.errors[0]
    assert checkpoints(failed.output) == ["step_00000002", "step_00000004"]
    finished = on_ranks(2, path)
    assert finished.exit_codes == [0, 0] and finished.lines("start")[-1]["resumed_from"] == 4, finished
    assert_same(finished, saving_whole)


def test_a_layer_that_only_some_ranks_use_trains_where_that_is_allowed(on_ranks, saving):
    result = on_ranks(2, saving, "gradient_sync.find_unused_parameters=true", plant=(skips_a_layer, 1, 5))
    assert result.exit_codes == [0, 0] and result.stderr == "", result
    assert all(len(set(line)) == 1 for line in result.column("parameters_digest"))
    changes = on_ranks(2, saving, "gradient_sync.static_graph=true", plant=(skips_a_layer, 1, 5))
    assert changes.exit_codes == [1, 1] and len(changes.errors) == 1, changes
    assert "static_graph" in changes.errors[0] and "mlp.gate_proj.weight (rank 1)" in changes.errors[0], changes


# ── Processes without a launcher ──────────────────────────────────────────────────────────────────────────────────────


def last_step(output: Path) -> int:
    path = output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return max((line["step"] for line in lines if line["event"] == "train"), default=0)


def living(session: int) -> list[int]:
    """The processes of this session that are alive."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            alive.append(int(stat.parent.name))
    return alive


def assert_none_left(session: int, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (left := living(session)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def ranks_of(parent: int) -> list[int]:
    """The ranks that this process has started, in their order."""
    children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return sorted(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture(scope="module")
def original() -> Path:
    return Path(importlib.util.find_spec(f"femto.recipes.{RECIPE}").origin)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_copied_recipe_starts_its_processes_stops_and_goes_on(
    start, original, write_config, changed, config, whole, monkeypatch
):
    path = write_config(changed(config, {"processes": 2}))
    monkeypatch.setenv("TMPDIR", str(path.parent / "a#b"))  # in a URL a path would end there
    (path.parent / "a#b").mkdir()
    mine = path.parent / "mine.py"
    line = "        micro_batches = [next(batches)"
    text = original.read_text()
    assert text.count(line) == 1
    mine.write_text(text.replace(line, f"        time.sleep(0.05)\n{line}"))
    running = start.command(f"femto run {mine} --config {path}", path.parent / "output")
    running.wait_until(lambda: last_step(running.output) >= 3, START)
    assert len(ranks_of(running.pid)) == 2
    running.signal(signal.SIGTERM)
    stopped = running.result()
    assert stopped.exit_code == 3 and "Traceback" not in stopped.stderr, stopped
    assert_none_left(running.pid)
    step = stopped.lines()[-1]["step"]
    assert stopped.lines()[-1] == {"event": "end", "step": step, "reason": "stopped"} and 3 <= step < STEPS
    assert checkpoints(stopped.output) == [f"step_{step:08d}"]
    command = stopped.stdout.splitlines()[-1]
    assert shlex.split(command)[:3] == ["femto", "run", str(mine)], stopped

    finished = start.command(command, stopped.output).result(START)
    assert finished.exit_code == 0 and finished.stderr == "", finished
    assert [(line["recipe"], line["world_size"]) for line in finished.lines("start")] == [("mine", 2)] * 2
    assert_same(finished, whole(2))
    assert_none_left(running.pid)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["rank", "parent"])
def test_a_kill_of_a_rank_or_of_its_parent_ends_all(original, write_config, saving, victim):
    """By `python recipe.py` and by `femto run`, as a person starts them."""
    path = write_config(saving)
    femto = [str(Path(sys.executable).with_name("femto")), "run", RECIPE]
    command = [sys.executable, str(original)] if victim == "rank" else femto
    words = ["--config", str(path), "processes=2", "max_steps=1000000", "checkpoint.keep_last=1"]
    with (path.parent / "screen").open("w") as screen:
        process = subprocess.Popen(
            [*command, *words], stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START
        while not [*(path.parent / "output/checkpoints").glob("step_*")]:
            assert time.monotonic() < deadline and process.poll() is None, (path.parent / "screen").read_text()
            time.sleep(0.02)
        os.kill(ranks_of(process.pid)[1] if victim == "rank" else process.pid, signal.SIGKILL)
        code = process.wait(60)
        assert_none_left(process.pid)
    finally:
        for pid in living(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
    text = (path.parent / "screen").read_text()
    assert "Traceback" not in text, text
    if victim == "rank":
        assert code == 1, text
        assert text.count("error: rank 1 was ended by SIGKILL") == 1, text
        assert "error: rank 0: in 8 Training loop: lost contact with another rank" in text, text
    else:
        assert code == -signal.SIGKILL, text
    assert len(checkpoints(path.parent / "output")) in (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_ranks_refuse_is_said_once(start, write_config, saving, tmp_path):
    path = write_config(saving)
    output = path.parent / "output"
    begun = [
        start.command(f"femto run {RECIPE} --config {path} {words}", output)
        for words in (f"processes=2 data.train={tmp_path / 'nowhere'}", "processes=0", "processes=2 optimizer.lr=fast")
    ]
    for running, word in zip(begun, ("nowhere", "processes", "optimizer.lr"), strict=True):
        refused = running.result(START)
        assert refused.exit_code == 2 and len(refused.errors) == 1, refused
        assert word in refused.errors[0] and "Traceback" not in refused.stderr, refused
    assert not output.exists()


def test_processes_are_refused_where_a_launcher_has_started_some(on_ranks, saving):
    launched = on_ranks(2, saving, "processes=2")
    assert launched.exit_codes == [2, 2] and len(launched.errors) == 1, launched
    assert "processes: 2" in launched.errors[0] and "launcher" in launched.errors[0], launched
    alone = on_ranks(1, saving, "processes=1", "max_steps=1")
    assert alone.exit_codes == [0], alone
    assert not launched.output.exists()
