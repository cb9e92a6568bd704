"""Whether a run of several ranks that cannot go on ends on all of them, within its time, with the reason of the rank
whose fault it is on the screen once, and with the last checkpoint as it was."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

TIMINGS = {"seconds", "tokens_per_second", "peak_memory_bytes", "mfu"}


@pytest.fixture(scope="session")
def config(tiny_llama, uneven_tokens) -> dict:
    """8 steps in float32 with saves at every second, two micro-batches a step on two ranks."""
    return {
        "device": "cpu",
        "threads": 1,
        "model": tiny_llama | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": 16},
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "max_steps": 8,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "checkpoint": {"every": 2, "async_save": False},
        "log": {"samples": True},
    }


@pytest.fixture(scope="module")
def whole(run_ranks, config):
    """The run on two ranks to which nothing happened."""
    result = run_ranks(2, config)
    assert result.exit_codes == [0, 0], result
    return result


def assert_refused(result, *words: str) -> None:
    """Refused on all ranks, with all these words in one line of one rank, and nothing left behind."""
    assert set(result.exit_codes) == {2}, result
    assert len(result.errors) == 1 and "Traceback" not in result.stderr, result
    for word in words:
        assert word in result.errors[0], f"{word!r} is not in {result.errors[0]!r}"
    assert not result.output.exists(), "something was left behind"


def assert_failed(result, victim: int, reason: str, code: int = 1) -> None:
    """The reason stands on the screen once, with the rank whose it is; the others say in a line that they ended."""
    assert result.exit_codes[victim] == code and 0 not in result.exit_codes, result
    lines = [line for line in result.stderr.splitlines() if re.search(reason, line)]
    assert len(lines) == 1 and f"rank {victim}: " in lines[0], result
    for rank, (_, stderr) in enumerate(result.screens):
        others = [line for line in stderr.splitlines() if line not in lines]
        if rank != victim:
            assert len(others) <= 1 and all(line.startswith(f"error: rank {rank}: ") for line in others), result


def assert_goes_on(run_ranks, path: Path, whole, resumed_from: int) -> None:
    """The checkpoint of that step is the last and is whole: the run goes on from it as if nothing had happened."""
    result = run_ranks(2, path)
    assert result.exit_codes == [0, 0], result
    assert result.lines("start")[-1]["resumed_from"] == resumed_from
    ours, theirs = (
        [{key: value for key, value in line.items() if key not in TIMINGS} for line in r.lines("train")]
        for r in (result, whole)
    )
    assert ours == theirs
    for name in ("model/model.safetensors", "samples-rank0.jsonl", "samples-rank1.jsonl"):
        assert (result.output / name).read_bytes() == (whole.output / name).read_bytes(), name


def checkpoints(output: Path) -> list[str]:
    """What stands among the checkpoints under a final name."""
    return sorted(path.name for path in (output / "checkpoints").glob("[!.]*"))


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("count", "overrides", "words"),
    [
        (2, ["parallel.dp_shard=3"], ["parallel", "dp_shard 3", "3 processes", "are 2"]),
        (3, ["parallel.dp_replicate=2"], ["parallel", "dp_replicate 2", "a multiple of 2", "are 3"]),
        (2, ["parallel.dp_replicate=2", "parallel.dp_shard=2"], ["dp_replicate 2", "dp_shard 2", "4", "are 2"]),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_both_numbers(run_ranks, config, count, overrides, words):
    assert_refused(run_ranks(count, config, *overrides), *words)


@pytest.mark.parametrize(
    ("count", "overrides", "faults"),
    [  # torchtitan#932: shape errors deep in attention
        (4, ["parallel.tp=4"], [["parallel.tp", "4", "num_key_value_heads, 2"]]),
        (2, ["parallel.tp=2", "model.vocab_size=321"], [["parallel.tp", "2", "vocab_size, 321"]]),
        (2, ["parallel.tp=2", "data.seq_len=47"], [["data.seq_len", "47", "parallel.tp 2"]]),
        (2, ["parallel.cp=2", "data.seq_len=46"], [["data.seq_len", "46", "2 · parallel.cp 2", "= 4"]]),
        (4, ["parallel.cp=2", "parallel.tp=2", "data.seq_len=44", "model.intermediate_size=127"],
         [["parallel.tp", "2", "intermediate_size, 127"], ["data.seq_len", "44", "= 8"]]),
    ],
)  # fmt: skip
def test_what_ranks_share_must_divide_by_their_number(run_ranks, config, count, overrides, faults):
    result = run_ranks(count, config, *overrides)
    assert result.exit_codes == [2] * count and "Traceback" not in result.stderr, result
    assert len(result.errors) == len(faults)
    for line, words in zip(result.errors, faults, strict=True):
        assert all(word in line for word in words), line
    assert not result.output.exists()


# ── Ranks that do not see the same ────────────────────────────────────────────────────────────────────────────────────


def sees_other_data(rank: int, victim: int, directory: str) -> None:
    """This rank finds other tokens at the same path: its node has a copy of its own."""
    from pathlib import Path

    import femto.recipes.distributed_pretrain as recipe

    if rank == victim:
        recipe.prepare_tokens = lambda *_, **__: [Path(directory)]


def test_a_rank_whose_data_differ_is_named(run_ranks, config, write_tokens, tmp_path):
    other = write_tokens(tmp_path / "other", [[1, 2, 3]] * 37, vocab_size=320)
    differs = run_ranks(3, config, plant=(sees_other_data, 1, str(other)))
    assert_refused(differs, "data.train", "rank 1", "ranks 0, 2")
    few = write_tokens(tmp_path / "few", [[1, 2, 3]] * 3, vocab_size=320)
    assert_refused(run_ranks(2, config, plant=(sees_other_data, 1, str(few))), "rank 1", "3", "global_batch_size")
    gone = run_ranks(2, config, plant=(sees_other_data, 1, str(tmp_path / "gone")))
    assert_refused(gone, "rank 1", str(tmp_path / "gone"))


def reads_another_config(rank: int, victim: int, override: str) -> None:
    import datetime

    import femtolib.command as command
    import femtolib.parallel.world as world

    world._GATHERING = datetime.timedelta(seconds=5)
    real = command.load_config
    if rank == victim:
        command.load_config = lambda config_type, path, overrides: real(config_type, path, [*overrides, override])


def test_a_rank_whose_config_differs_is_named(run_ranks, config):
    differs = run_ranks(2, config, plant=(reads_another_config, 1, "optimizer.lr=0.5"))
    assert_refused(differs, "optimizer.lr", "0.001 on rank 0", "0.5 on rank 1")
    wrong = run_ranks(2, config, "process_group_timeout=5", plant=(reads_another_config, 1, "optimizer.lr=fast"))
    assert wrong.exit_codes == [1, 2] and "Traceback" not in wrong.stderr, wrong
    assert "rank 1: " in wrong.screens[1][1] and "optimizer.lr" in wrong.screens[1][1], wrong
    assert len(wrong.errors) == 2 and "rank 0: " in wrong.screens[0][1], wrong


def sees_another_folder(rank: int, victim: int, folder: str) -> None:
    """This rank's output folder is on its own disk."""
    from pathlib import Path

    import femto.recipes.distributed_pretrain as recipe

    real = recipe.check_shared
    if rank == victim:
        recipe.check_shared = lambda output_dir, start: real(Path(folder), start, seconds=1)


def test_a_rank_that_cannot_see_the_output_folder_is_named(run_ranks, config, tmp_path):
    began = time.monotonic()
    (tmp_path / "there").mkdir()
    results = [run_ranks(2, config, plant=(sees_another_folder, 1, str(tmp_path / name))) for name in ("there", "gone")]
    for result in results:
        assert result.exit_codes == [2, 2] and len(result.errors) == 1 and "Traceback" not in result.stderr, result
        assert all(word in result.errors[0] for word in ("rank 1", "output_dir", "share")), result
        assert not (result.output / "checkpoints").exists() and not (result.output / "metrics.jsonl").exists()
    assert time.monotonic() - began < 60


# ── A rank that fails ─────────────────────────────────────────────────────────────────────────────────────────────────


def fails_in_micro_batch(rank: int, victim: int, number: int, how: str) -> None:
    """This rank raises, dies or hangs in its micro-batch of this number, from 1."""
    import os
    import signal
    import time

    import femto.recipes.distributed_pretrain as recipe

    real, left = recipe.summed_cross_entropy, [number]

    def loss(*arguments):
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            match how:
                case "raise":
                    raise ValueError("the planted fault")
                case "memory":
                    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
                case "SIGKILL" | "SIGTERM":
                    os.kill(os.getpid(), getattr(signal, how))
                case seconds:
                    time.sleep(float(seconds))
        return real(*arguments)

    recipe.summed_cross_entropy = loss


@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 2}], ids=["shards", "copies"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_on_one_rank_ends_all(run_ranks, write_config, changed, config, whole, victim, parallel):
    path = write_config(changed(config, {"parallel": parallel}))
    failed = run_ranks(2, path, plant=(fails_in_micro_batch, victim, 7, "raise"))
    assert set(failed.exit_codes) == {1}, failed
    assert failed.stderr.count("ValueError: the planted fault") == 1, failed
    assert failed.screens[victim][1].startswith(f"rank {victim}: Traceback"), failed
    other = failed.screens[1 - victim][1]
    assert other.startswith(f"error: rank {1 - victim}: ") and other.count("\n") == 1, failed
    assert "in 8 Training loop: lost contact with another rank" in other, failed
    assert checkpoints(failed.output) == ["step_00000002"]
    if not parallel:
        assert_goes_on(run_ranks, path, whole, resumed_from=2)


def test_a_rank_out_of_memory_says_so(run_ranks, config):
    failed = run_ranks(2, config, plant=(fails_in_micro_batch, 1, 3, "memory"))
    assert_failed(failed, 1, "out of memory")
    assert failed.exit_codes == [1, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all(run_ranks, write_config, config, whole, victim):
    path = write_config(config)
    killed = run_ranks(2, path, plant=(fails_in_micro_batch, victim, 10, "SIGKILL"))
    assert killed.exit_codes[victim] == -signal.SIGKILL and killed.exit_codes[1 - victim] == 1, killed
    assert len(killed.errors) == 1 and f"rank {1 - victim}: " in killed.errors[0], killed
    assert "lost contact" in killed.errors[0] and "Traceback" not in killed.stderr, killed
    assert checkpoints(killed.output) == ["step_00000002", "step_00000004"]
    assert_goes_on(run_ranks, path, whole, resumed_from=4)


def dies_at(rank: int, victim: int, name: str) -> None:
    """This rank dies where the recipe calls this function. Who has not met it yet waits 5 s for it."""
    import datetime
    import os
    import signal

    import femto.recipes.distributed_pretrain as recipe
    import femtolib.parallel.world as world

    world._GATHERING = datetime.timedelta(seconds=5)

    if rank == victim:
        setattr(recipe, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("name", ["choose_device", "check_inputs", "make_room_for_state", "load_tokenizer"])
def test_a_rank_that_dies_outside_the_training_loop_ends_all(run_ranks, write_config, config, whole, name):
    """Before it has met the others, while it reads, while it loads a checkpoint, while the model is gathered."""
    path = write_config(config)
    if name == "make_room_for_state":
        assert run_ranks(2, path, plant=(fails_in_micro_batch, 1, 5, "SIGKILL")).exit_codes == [1, -signal.SIGKILL]
    victim = 0 if name == "load_tokenizer" else 1
    killed = run_ranks(2, path, "process_group_timeout=5", plant=(dies_at, victim, name))
    assert killed.exit_codes[victim] == -signal.SIGKILL and killed.exit_codes[1 - victim] == 1, killed
    assert len(killed.errors) == 1 and f"rank {1 - victim}: " in killed.errors[0], killed
    assert "Traceback" not in killed.stderr, killed
    assert not (killed.output / "model").exists()


def test_a_row_that_only_one_rank_can_not_read_ends_all(run_ranks, config, write_tokens, changed, tmp_path):
    tokens = write_tokens(tmp_path / "tokens", [[5, 6, 7]] * 16, vocab_size=320)
    (shard,) = tokens.glob("*.safetensors")
    arrays = load_file(shard)
    arrays["tokens"][-3] = 400  # in the last row; sizes stay, and digests are checked by `validate --deep`
    save_file(arrays, shard)
    for workers in (0, 2):
        data = {"train": str(tokens), "shuffle": False, "num_workers": workers}
        failed = run_ranks(2, changed(config, {"data": data, "max_steps": 4}))  # rank 1 reads row 15, in step 4
        assert_failed(failed, 1, "the id 400, above", code=2)
        assert failed.column("step") == [1, 2, 3] and checkpoints(failed.output) == ["step_00000002"]


# ── A disk that is full ───────────────────────────────────────────────────────────────────────────────────────────────


def fills_its_disk(rank: int, victim: int, update: int, size: int) -> None:
    """From this update on, this rank can write no file beyond `size` bytes."""
    import resource
    import threading

    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = [update]

    def hook(*_) -> None:
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            for thread in threading.enumerate():  # the save before this one is still to be written
                if thread.name.startswith("checkpoint "):
                    thread.join()
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    register_optimizer_step_post_hook(hook)


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_on_one_rank_ends_all_and_keeps_the_last_checkpoint(run_ranks, write_config, changed, config, whole,
                                                                        victim, in_background):  # fmt: skip
    path = write_config(changed(config, {"checkpoint": {"async_save": in_background}, "log": {"samples": True}}))
    failed = run_ranks(2, path, plant=(fills_its_disk, victim, 4, 20_000))
    assert failed.exit_codes == [1, 1] and "Traceback" not in failed.stderr, failed
    assert len(failed.errors) == 1 and f"rank {victim}: " in failed.errors[0], failed
    assert "too large" in failed.errors[0].lower() and "step_00000004" in failed.errors[0], failed
    assert checkpoints(failed.output) == ["step_00000002"]
    assert not list((failed.output / "checkpoints").glob(".*")), "a half checkpoint was left"
    assert_goes_on(run_ranks, path, whole, resumed_from=2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_line_that_one_rank_cannot_write_ends_all(run_ranks, write_config, config, whole, victim):
    path = write_config(config)
    failed = run_ranks(2, path, plant=(fills_its_disk, victim, 6, 400))  # its screen is a file, too
    name = "metrics.jsonl" if victim == 0 else "samples-rank1.jsonl"
    assert_failed(failed, victim, f"{name}: could not be written: File too large")
    assert checkpoints(failed.output) == ["step_00000002", "step_00000004"]
    assert_goes_on(run_ranks, path, whole, resumed_from=4)


@pytest.mark.parametrize(("room", "saved"), [(2.6, [2, 4]), (4.2, [2, 4, 6, 8])], ids=["checkpoint", "model"])
def test_a_disk_full_for_all_ends_all_and_keeps_what_is_whole(run_ranks, small_disk, write_config, changed, config,
                                                              whole, room, saved):  # fmt: skip
    files = [path for path in (whole.output / "checkpoints/step_00000002").iterdir() if path.is_file()]
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    output = small_disk(int(room * size)) / "output"
    path = write_config(changed(config, {"output_dir": str(output)}))
    failed = run_ranks(2, path)
    assert set(failed.exit_codes) == {1} and "Traceback" not in failed.stderr, failed
    assert len([line for line in failed.errors if "No space left" in line and str(output) in line]) == 1, failed
    assert len(failed.errors) <= 2 and checkpoints(output) == [f"step_{step:08d}" for step in saved], failed
    small_disk(40 * size)
    assert_goes_on(run_ranks, path, whole, resumed_from=saved[-1])


# ── A rank that hangs, and one that only takes its time ───────────────────────────────────────────────────────────────


def takes_its_time(rank: int, seconds: float) -> None:
    """Rank 0 is slow to tokenize, to save and to export."""
    import time

    import femto.recipes.distributed_pretrain as recipe
    import femtolib.checkpoint as checkpoint

    def slowly(real):
        def slow(*arguments, **more):
            time.sleep(seconds)
            return real(*arguments, **more)

        return slow

    if rank == 0:
        recipe.prepare_tokens = slowly(recipe.prepare_tokens)
        recipe.save_model = slowly(recipe.save_model)
        checkpoint.publish = slowly(checkpoint.publish)


@pytest.fixture(scope="module")
def slow(start_ranks, changed, config):
    """Two runs of two ranks that wait longer than process_group_timeout for rank 0, begun before the other tests and
    asked for after them: `sync` and `async`, by how they save."""
    patient = changed(config, {"process_group_timeout": 5, "max_steps": 2, "checkpoint": {"every": None}})
    return {
        name: start_ranks(
            2, changed(patient, {"checkpoint": {"async_save": name == "async"}}), plant=(takes_its_time, 8)
        )
        for name in ("sync", "async")
    }


@pytest.fixture(scope="module", autouse=True)
def _begin_slow(slow):
    pass


def test_a_rank_that_hangs_is_noticed_and_the_place_is_named(run_ranks, config):
    hanging = (fails_in_micro_batch, 3, 2, "9")
    hung = run_ranks(4, config, "process_group_timeout=5", "parallel.dp_replicate=2", plant=hanging)
    assert set(hung.exit_codes) == {1} and "Traceback" not in hung.stderr, hung
    assert len(hung.errors) == 4, hung
    assert sum("process_group_timeout" in line for line in hung.errors) >= 1, hung
    for rank, (_, stderr) in enumerate(hung.screens):
        assert stderr.startswith(f"error: rank {rank}: in 8 Training loop: "), hung
        assert "process_group_timeout" in stderr or "lost contact" in stderr, hung


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_rank_that_takes_its_time_to_tokenize_save_and_export_is_waited_for(slow, name):
    # axolotl#2684: the job died because ranks waited longer than the collective's timeout.
    result = slow[name].result(90)
    assert result.exit_codes == [0, 0] and result.stderr == "", result
    assert result.lines("checkpoint")[-1]["seconds_total"] > 8
    assert json.loads((result.output / "model/config.json").read_text())["model_type"] == "llama"
