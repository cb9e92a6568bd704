"""Whether parity tells a recipe that trains alike on any number of processes from one that does not, and says why: on
copies with the faults that data parallel training is known for, and on runs that fail, are refused or are interrupted.

Two tests start parity as a person would. In the others it runs in this process, and its runs on the test's own
launcher, which has torch in memory."""

import contextlib
import importlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file

from femtolib.command import run_recipe
from femtolib.config import describe_keys
from femtolib.errors import RunFailed

parity = importlib.import_module("femto.recipes.parity")
SOURCES = Path(parity.__file__).parent


@pytest.fixture(scope="module")
def tiny(tiny_llama, uneven_tokens) -> dict:
    """Rows of uneven length in float64, four a step, each a micro-batch: two or four on a rank."""
    return {
        "device": "cpu",
        "threads": 1,
        "dtype": "float64",
        "param_dtype": "float64",
        "model": tiny_llama | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        "data": {"train": str(uneven_tokens), "rows": "padded", "seq_len": 16, "num_workers": 0},
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "max_steps": 8,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"warmup_steps": 2},
        "output_dir": "not written",
    }


def use_copy(rank: int, name: str, path: str) -> None:
    """This rank runs a copy of the recipe, as `femto run ./mine.py` would."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("mine", path)
    module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = sys.modules[f"femto.recipes.{name}"]
    recipe.Config, recipe.main = module.Config, module.main


@pytest.fixture
def compared(run_ranks, tiny, tmp_path, monkeypatch):
    """`compared(recipe, layouts, copy=None, **more)`: parity's exit code, screens and parity.json."""

    def compared(recipe: str, layouts: list[dict], *, copy: Path | None = None, **more) -> SimpleNamespace:
        def run(command, layout, steps, output, screen) -> int:
            plant = (use_copy, recipe, str(copy)) if copy else None
            result = run_ranks(layout.processes, Path(command[5]), *command[6:], recipe=recipe, plant=plant)
            screen.write_text(str(result))
            return result.exit_code

        monkeypatch.setattr(parity, "run", run)
        keys = describe_keys(importlib.import_module(f"femto.recipes.{recipe}").Config)
        monkeypatch.setattr(parity, "keys_of", lambda config: {line.split()[0] for line in keys.splitlines()})
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(tiny))
        config = {"recipe": str(copy or recipe), "config": str(path), "steps": 3, "layouts": layouts, **more}
        return call(tmp_path, config)

    return compared


def call(folder: Path, config: dict) -> SimpleNamespace:
    """parity in this process, in `folder`/out."""
    path = folder / "parity.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out"), **config}))
    stdout, stderr = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = run_recipe(parity.Config, parity.main, ["--config", str(path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    file = folder / "out/parity.json"
    report = json.loads(file.read_text(), parse_constant=pytest.fail) if file.exists() else None
    return SimpleNamespace(code=code, out=stdout.getvalue(), err=stderr.getvalue(), report=report)


# ── What is alike ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copied_recipe_passes_as_a_person_starts_it(tmp_path, tiny):
    (tmp_path / "mine.py").write_text((SOURCES / "data_parallel_pretrain.py").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny))
    config = {"output_dir": "out", "recipe": "./mine.py", "config": "mine.yaml", "steps": 3}
    (tmp_path / "parity.yaml").write_text(yaml.safe_dump(config | {"layouts": [{"processes": 2}]}))
    command = [sys.executable, "-m", "femto.main", "run", "parity", "--config", "parity.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and ended.stderr == "", ended
    lines = ended.stdout.splitlines()
    assert max(map(len, lines[:-2])) <= 120, "too wide for a terminal"
    assert lines[-1] == "./mine.py trains alike on 1 process and on 2 processes"
    report = json.loads((tmp_path / "out/parity.json").read_text())
    [result] = report["results"]
    assert report["passed"] and [step["step"] for step in result["steps"]] == [1, 2, 3]
    for step in result["steps"]:
        one, two = step["checksums"]
        assert one == two and step["loss_difference"] <= 1e-12 and step["same_rows"]
        [row] = [line for line in lines if line.startswith("|") and line.split()[1] == str(step["step"])]
        assert f"{step['loss'][0]:#.16g}" in row and f"{step['loss'][1]:#.16g}" in row and row.count(one[:8]) == 2
    assert 0 <= result["weight_difference"] <= 1e-10
    names = ["layout_1.txt", "one_process.txt", "parity.json", "parity.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all(line in (tmp_path / "out/parity.md").read_text().splitlines() for line in lines if "|" in line)


def test_layouts_are_judged_one_by_one_and_copies_of_a_shard_are_compared(compared, tmp_path):
    layouts = [
        {"processes": 2, "parallel": {"dp_replicate": 2}},
        {"processes": 3, "parallel": {"dp_replicate": 2}},
        {"processes": 4, "parallel": {"dp_replicate": 2, "defer_gradient_reduction": True}},
        {"processes": 1},
    ]
    result = compared("distributed_pretrain", layouts)
    assert result.code == 1 and result.report["passed"] is False
    copies, _refused, shards, again = result.report["results"]
    assert [r["exit_code"] for r in result.report["results"]] == [0, 2, 0, 0]
    assert "3 processes (dp_replicate 2): FAILED with exit code 2" in result.out
    assert "3" in (tmp_path / "out/layout_2.txt").read_text()
    for passed in (copies, shards, again):
        assert passed["faults"] == [] and len(passed["steps"]) == 3
        assert f"{passed['layout']}: the same training" in result.out
    for step in shards["steps"]:
        a, b, c, d = step["checksums"]
        assert (a, b) == (c, d) and a != b
    assert again["weight_difference"] == 0 and all(step["loss_difference"] == 0 for step in again["steps"])
    assert "does NOT train alike" in result.err and result.err.count("error:") == 1

    # Again in the same folder: what was there goes, and nothing of another's does.
    (tmp_path / "out/notes.txt").write_text("mine")
    (tmp_path / "out/layout_9.txt").write_text("mine, too")
    result = compared("distributed_pretrain", [{"processes": 2}], control=True)
    assert result.code == 0 and result.err == "" and result.report["passed"] is True
    control, _ = result.report["results"]
    assert control["layout"] == "1 process, rows in reverse" and 0 < control["weight_difference"] <= 1e-12
    names = ["control.txt", "layout_1.txt", "layout_9.txt", "notes.txt", "one_process.txt", "parity.json", "parity.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


# ── Planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────

BACKWARD = "(micro_loss * scale / trained_tokens)"
OWN_TOKENS = "(world.size * max(1, sum(own.trained_tokens for own in micro_batches)))"
UNSENT = """
import femtolib.parallel.gradient_sync as gradient_sync
gradient_sync.broadcast_weights = broadcast_weights = lambda *_: None
LAUNCH = """

# What is changed in the copy, and how what differs in the first step begins.
FAULTS = {
    "own token count": ({BACKWARD: f"(micro_loss * scale / {OWN_TOKENS})"}, ["gradient norm off by"]),
    "mean over ranks": (
        {BACKWARD: "(micro_loss * scale / trained_tokens / world.size)"},
        ["gradient norm off by 5.0e-01"],
    ),
    "a seed of its own": (
        {"LAUNCH = ": UNSENT, "initialize_weights(model, config.seed)": "initialize_weights(model, world.rank)"},
        ["loss off by", "gradient norm off by", "rank 1 holds other parameters than rank 0"],
    ),
    "rows of rank 0": (
        {"dp_rank=world.rank": "dp_rank=0"},
        ["other rows than in one process", "loss off by", "gradient norm off by"],
    ),
    "a micro-batch unsent": (
        {
            "            synchronizer.finish()\n": "",
            "nullcontext() if number == len(micro_batches)": "nullcontext() if number == 1",
            "summed_loss += micro_loss.detach()\n": "summed_loss += micro_loss.detach()\n"
            "                number == 1 and synchronizer.finish()\n",
        },
        ["gradient norm off by", "rank 1 holds other parameters than rank 0"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_for_the_right_reason(compared, tmp_path, name):
    changes, reasons = FAULTS[name]
    text = (SOURCES / "data_parallel_pretrain.py").read_text()
    for before, after in changes.items():
        assert before in text, f"the recipe has no {before!r} any more"
        text = text.replace(before, after, 1)
    (tmp_path / "mine.py").write_text(text)
    result = compared("data_parallel_pretrain", [{"processes": 2}], copy=tmp_path / "mine.py", steps=2)
    assert result.code == 1 and result.report["passed"] is False, result.err
    [judged] = result.report["results"]
    assert judged["exit_code"] == 0, (tmp_path / "out/layout_1.txt").read_text()
    first = [fault for fault in judged["faults"] if fault.startswith("step 1: ")]
    assert judged["faults"][: len(first)] == first and len(first) == len(reasons), judged["faults"]
    assert all(fault.startswith(f"step 1: {begin}") for fault, begin in zip(first, reasons, strict=True)), first
    assert judged["faults"][-1].startswith("at the end: weights off by")
    lines = result.out.splitlines()
    [row] = [line for line in lines if line.startswith("|    1 ")]
    assert row.count("!") == len([reason for reason in reasons if "rows" not in reason]), row
    assert "2 processes: DIFFERS" in lines and all(f"  {fault}" in lines for fault in judged["faults"])
    assert result.err == f"error: {tmp_path / 'mine.py'} does NOT train alike on 1 process and on 2 processes\n"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--help", "should be key=value"),
        ("output_dir=elsewhere", "output_dir is parity's to set; leave it out"),
        ("processes=2", "processes is parity's to set; say it in layouts"),
        ("parallel.dp_shard=1", "parallel.dp_shard is parity's to set; say it in layouts"),
    ],
)
def test_overrides_that_parity_sets_itself_are_refused(compared, override, words):
    result = compared("data_parallel_pretrain", [{"processes": 2}], overrides=[override])
    assert result.code == 2 and words in result.err


def test_the_control_of_a_copied_recipe_finds_what_lies_beside_that(tmp_path):
    texts = {"mine": "from __future__ import annotations\nimport beside_mine", "beside_mine": "print('found')"}
    for name, text in {**texts, "types": "the standard library's is meant"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "out/one_process").mkdir(parents=True)
    (tmp_path / "out/one_process/config.yaml").write_text("global_batch_size: 7\n")
    config = {"output_dir": tmp_path, "recipe": str(tmp_path / "mine.py"), "config": "c", "layouts": [{"processes": 2}]}
    command = parity.reversed_command(["run", config["recipe"]], parity.Config(**config), tmp_path / "out")
    assert command == ["run", str(tmp_path / "out/mine.py"), "micro_batch_size=7"]
    assert subprocess.check_output([sys.executable, "-P", command[1]], text=True) == "found\n"


def test_a_control_that_fails_ends_the_comparison_without_a_verdict(compared, monkeypatch):
    monkeypatch.setattr(parity, "reversed_command", lambda command, *_: [*command, "seed=none"])
    result = compared("data_parallel_pretrain", [{"processes": 2}], control=True)
    assert result.code == 2 and not result.report["passed"] and "train alike" not in result.err + result.out


def test_a_fault_that_the_control_has_too_is_no_measure(compared, tmp_path):
    """Each micro-batch divided by its own tokens: batches in one piece differ from it, by far more than rounding."""
    source, own = (SOURCES / "data_parallel_pretrain.py").read_text(), "batch.trained_tokens"
    assert source.count("(micro_loss * scale / trained_tokens)") == 1
    mean = f"(micro_loss * scale / max(1, {own}) / sampler.micro_batches_per_step / world.size)"
    (tmp_path / "mine.py").write_text(source.replace("(micro_loss * scale / trained_tokens)", mean))
    result = compared("data_parallel_pretrain", [{"processes": 2}], copy=tmp_path / "mine.py", control=True)
    control, _ = result.report["results"]
    assert result.code == 1 and control["layout"] == "1 process, rows in reverse" and control["faults"]
    assert not result.report["passed"]


# ── Prepared runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def prepared(tmp_path):
    """`prepared(**changes)`: what parity.compare says of two runs of two steps that are alike but for `changes`, in the
    second step of the second one; `weights` and `copies` of that one, too."""
    line = {"event": "train", "loss": 5.0, "grad_norm": 2.0, "ledger": "l", "parameters_digest": ["a", "b", "a", "b"]}

    def prepared(*, weights: dict | None = None, copies: int = 2, drop: str | None = None, **changes) -> dict:
        for name, second in (("one", {}), ("many", changes)):
            (tmp_path / name / "model").mkdir(parents=True, exist_ok=True)
            lines = [{"event": "start", "parallel": {"dp_replicate": copies}}]
            lines += [line | {"step": 1}, line | {"step": 2} | second]
            lines[2].pop(drop, None)
            (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            ours = weights if weights and name == "many" else {"w": torch.tensor([4.0, -1.0], dtype=torch.float64)}
            save_file(ours, tmp_path / name / "model/model.safetensors")
        bounds = {"loss": 1e-12, "grad_norm": 1e-12, "weights": 1e-10}
        return parity.compare(tmp_path / "one", tmp_path / "many", bounds, 2)

    return prepared


def test_a_run_that_leaves_nothing_to_compare_is_told_in_a_line(prepared, tmp_path):
    prepared()
    start = '{"event": "start", "parallel": {"dp_replicate": 2}}\n'
    step = '{"event": "train", "step": 1, "loss": 1.0, "grad_norm": 1.0, "ledger": "l", "parameters_digest": '
    for content in (None, "no JSON\n", f'{step}"ab"}}\n', f'{start}{step}["a"]}}\n'):
        (tmp_path / "many/metrics.jsonl").unlink(missing_ok=True)
        if content:
            (tmp_path / "many/metrics.jsonl").write_text(content)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl to read|a list, by rank"):
            parity.compare(tmp_path / "one", tmp_path / "many", {"loss": 1.0, "grad_norm": 1.0, "weights": 1.0}, 2)


def test_runs_without_a_loss_are_not_alike(prepared, tmp_path):
    prepared()
    for name in ("one", "many"):
        path = tmp_path / name / "metrics.jsonl"
        path.write_text(path.read_text().replace('"loss": 5.0', '"loss": null'))
    bounds = {"loss": 1e-12, "grad_norm": 1e-12, "weights": 1e-10}
    found = parity.compare(tmp_path / "one", tmp_path / "many", bounds, 2)["faults"]
    assert found == ["no step has a loss: nothing was compared"]


def test_what_no_test_run_shows_is_told_on_prepared_ones(prepared, tmp_path):
    def faults(**more) -> list[str]:
        return [fault.split(" (")[0] for fault in prepared(**more)["faults"]]

    def tensor(*values: float) -> dict:
        return {"w": torch.tensor(values, dtype=torch.float64)}

    assert faults() == []
    assert faults(loss=5.0 + 4e-12, grad_norm=2.0 + 1.8e-12) == []
    assert faults(loss=5.0 + 6e-12) == ["step 2: loss off by 1.2e-12"]
    assert faults(grad_norm=2.0 - 2.2e-12) == ["step 2: gradient norm off by 1.1e-12"]
    assert faults(loss=None) == ["step 2: loss off by inf"] == faults(loss=math.nan)
    assert faults(ledger="m") == ["step 2: other rows than in one process"]
    assert faults(parameters_digest=["a", "b", "a", "c"]) == ["step 2: rank 3 holds other parameters than rank 1"]
    assert faults(copies=4) == ["step 1: rank 1 holds other parameters than rank 0"]
    assert faults(copies=1) == []
    assert faults(event="other") == ["2 and 1 steps were logged, not 2"]
    assert faults(weights=tensor(4.0, -1.0 - 3.9e-10)) == []
    assert faults(weights=tensor(4.0, -1.0 - 4.1e-10)) == ["at the end: weights off by 1.0e-10, most in w"]
    for other in (tensor(4.0, math.nan), tensor(4.0), tensor(4.0, -1.0) | {"v": torch.zeros(1)}):
        [fault] = faults(weights=other)
        assert fault.startswith("at the end: weights off by inf, most in "), fault
    with pytest.raises(parity.RunFailed, match="lack ledger"):
        prepared(drop="ledger")

    # An infinite difference is readable by every reader of JSON, and is shown.
    result = {"layout": "4 processes", "exit_code": 0, **prepared(loss=None)}
    parity.write_report(tmp_path, {"results": [result]})
    text = (tmp_path / "parity.json").read_text()
    step = json.loads(text, parse_constant=pytest.fail)["results"][0]["steps"][1]
    assert step["loss"] == [5.0, None] and step["loss_difference"] is None
    row = parity.table(result, parity.Layout(processes=4), {"loss": 1e-12, "grad_norm": 1e-12})[-1]
    assert row.split()[5:9] == ["none", "|", "!", "inf"] and row.endswith(" a b a b |"), row


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "data_parallel_pretrian"}, ["'data_parallel_pretrian'", "did you mean 'data_parallel_pretrain'"]),
        ({"recipe": "./none.py"}, ["'./none.py'"]),
        ({"config": "llama_smal"}, ["'llama_smal'", "did you mean 'llama_small'"]),
        ({"recipe": "solo.py"}, ["solo.py", "LAUNCH = 'single'", "no ranks to compare"]),
        ({"recipe": None}, ["'recipe' is missing"]),
        ({"layouts": []}, ["layouts"]),
        ({"layouts": [{"processes": 2, "tp": 2}]}, ["layouts: unknown key 'tp'"]),
        ({"tolerance": 0}, ["tolerance", "above 0"]),
        ({"layouts": [{"processes": 2, "parallel": {"tp": 2}}]}, ["data_parallel_pretrain has no key parallel.tp"]),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused_in_a_line_before_anything_runs(tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    solo = ["from femtolib.config import ConfigModel", "class Config(ConfigModel):", "    seed: int = 0"]
    (tmp_path / "solo.py").write_text("\n".join([*solo, "def main(config): raise AssertionError"]))
    config = {"recipe": "data_parallel_pretrain", "config": "llama_small", "layouts": [{"processes": 2}], **changes}
    result = call(tmp_path, {key: value for key, value in config.items() if value is not None})
    assert result.code == 2 and result.out == "" and not (tmp_path / "out").exists()
    assert result.err.count("\n") == 1 and result.err.startswith("error: "), result.err
    assert all(word in result.err for word in words), result.err


def test_what_another_wrote_is_refused(compared, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("layout_1.txt", "parity.json"):
        (tmp_path / "out" / name).write_text('{"files": ["layout_1.txt"]}' if name == "layout_1.txt" else "[1]")
        refused = compared("data_parallel_pretrain", [{"processes": 2}])
        assert refused.code == 2 and f"{name} was not written by parity" in refused.err
        assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
        (tmp_path / "out" / name).unlink()
    wrong = compared("data_parallel_pretrain", [{"processes": 2}], overrides=["global_batch_size=none"])
    assert wrong.code == 2 and wrong.report == {"passed": False, "files": wrong.report["files"]}


def test_ctrl_c_ends_the_runs_too(tmp_path, tiny):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    config = {"output_dir": str(tmp_path / "out"), "recipe": "data_parallel_pretrain", "steps": 100_000}
    config |= {"config": str(tmp_path / "tiny.yaml"), "layouts": [{"processes": 2}]}
    (tmp_path / "parity.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "femto.main", "run", "parity", "--config", str(tmp_path / "parity.yaml")]

    def runs() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if f"output_dir={tmp_path}" in path.read_text():
                    found.append(int(path.parent.name))
        return found

    with (tmp_path / "screen").open("w") as screen:
        running = subprocess.Popen(command, stdout=screen, stderr=screen, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob(".parity-*/one_process/metrics.jsonl")):
            assert running.poll() is None and time.monotonic() < deadline, (tmp_path / "screen").read_text()
            time.sleep(0.05)
        assert len(runs()) == 2, "a launcher and a worker"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all that is in the foreground
        assert running.wait(60) == 1
        deadline = time.monotonic() + 60
        while (left := runs()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        running.kill()
        running.wait()
    text = (tmp_path / "screen").read_text()
    assert "error: interrupted" in text and "Traceback" not in text, text
    assert not list((tmp_path / "out").glob(".parity-*"))
