"""Show that a recipe trains alike on any number of processes: the same steps on one and on several, side by side.

    femto run parity --config configs/parity.yaml [recipe=./mine.py] [config=./mine.yaml] [key=value …]

Runs `recipe` with `config` in one process and then in each of `layouts`, and compares what they log and leave: loss and
gradient norm of every step, which rows were trained, a checksum of every rank's parameters, the final weights. A sum
where a mean was meant, or a rank with rows or weights of its own, shows in the first step or two. Exit code 0: nothing
differs by more than rounding; 1: something does, or a run failed. The tables are left in OUTPUT/parity.md and .json.

It serves every recipe with LAUNCH = "distributed" that logs as the shipped ones do, also one that you copied: run it
after an edit. Judge in float64, as the shipped config does, and over few steps: rounding is some 1e-15 there, while in
float32 it hides small faults. With `control` a run that differs by rounding alone stands in the table, and ten times as
much as that is allowed where it is more than `tolerance`. What people edit first is what is compared (`compare`).
"""

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field
from safetensors import safe_open
from tqdm import tqdm

from femtolib import sections
from femtolib.command import EXIT_DONE, EXIT_FAILED, EXIT_USER, run_recipe
from femtolib.config import ConfigModel, PositiveInteger
from femtolib.errors import FemtoError, RunFailed
from femtolib.output import check_output
from femtolib.stop import end_with_parent

LAUNCH = "single"


class Layout(ConfigModel):
    processes: PositiveInteger = Field(description="how many")
    parallel: dict[str, int | bool] | None = Field(None, description="in place of the config's section `parallel`")

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{key} {value}" for key, value in (self.parallel or {}).items() if value is True or value != 1
        )
        return f"{self.processes} process{'es' * (self.processes > 1)}{f' ({sizes})' if sizes else ''}"


class Config(ConfigModel):
    output_dir: sections.OutputDir
    recipe: str = Field(min_length=1, description="what to test: a name from `femto ls`, or the path of a .py file")
    config: str = Field(min_length=1, description="its config: a name from `femto ls`, or the path of a .yaml file")
    overrides: list[str] = Field([], description="key=value, on top of that config")
    steps: PositiveInteger = Field(20, description="optimizer steps of each run")
    # Rounding adds up in the weights, and AdamW, which divides a gradient by its own size, blows up that of tiny ones.
    tolerance: float = Field(1e-12, gt=0, description="largest relative difference; of final weights 100 times that")
    control: bool = Field(False, description="also one process on each batch's rows in reverse: rounding alone")
    layouts: list[Layout] = Field(min_length=1, description="what to hold against one process: processes, parallel")


def main(config: Config) -> int:
    # ── 1 Recipe ──────────────────────────────────────────────────────────────────────────────────────────────────────
    # A recipe that was copied and changed need not have all keys: its own --help tells, and that the names are right.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which ends the run of the moment first
    check_output(config.output_dir, data=[], sources=[])
    keys = keys_of(config)
    names = ["one_process", *["control"] * config.control]
    names += [f"layout_{number}" for number in range(1, len(config.layouts) + 1)]
    files = ["parity.json", "parity.md", *(f"{name}.txt" for name in names)]
    claim(config.output_dir, files)

    # ── 2 Runs ────────────────────────────────────────────────────────────────────────────────────────────────────────
    # Each is a `femto run` of its own, as a person would start it, and what it leaves is compared; of that nothing is
    # kept but its screen. One that fails is a fault of its layout, and the others still run.
    report = {**config.model_dump(mode="json"), "passed": True, "files": files, "results": []}
    text, verdicts = [], []
    bounds = {"loss": config.tolerance, "grad_norm": config.tolerance, "weights": 100 * config.tolerance}
    print(f"{config.recipe} with {config.config}, {config.steps} steps in each run")
    with tempfile.TemporaryDirectory(prefix=".parity-", dir=config.output_dir, ignore_cleanup_errors=True) as scratch:
        alone = Layout(processes=1, parallel={} if any(key.startswith("parallel.") for key in keys) else None)
        for name, layout in zip(names, [alone, *[alone] * config.control, *config.layouts], strict=True):
            output = Path(scratch) / name
            command = command_of(config, layout, keys, output)
            if name == "control":
                command = reversed_command(command, config, Path(scratch))
            code = run(command, layout, config.steps, output, config.output_dir / f"{name}.txt")
            shown = f"{layout}, rows in reverse" if name == "control" else str(layout)
            text += ["", f"## {shown}", "", f"    {shlex.join(['femto', *command])}"]
            if code and name in ("one_process", "control"):  # there is nothing to hold the layouts against
                return EXIT_USER if code == EXIT_USER else EXIT_FAILED
            if name == "one_process":
                continue
            result = {"layout": shown, "exit_code": code, "faults": [], "steps": []}
            if code == EXIT_DONE:
                # A control that is further off than rounding ever is shows a fault, and is no measure of the others.
                allowed = {key: value * 100 if name == "control" else value for key, value in bounds.items()}
                result |= compare(Path(scratch) / "one_process", output, allowed, config.steps)
                if name == "control" and not result["faults"]:
                    bounds = {key: max(bounds[key], 10 * value) for key, value in largest(result).items()}
                text += ["", *(lines := table(result, layout, allowed))]
                print("", *lines, "", sep="\n", flush=True)
            verdicts.append(verdict(result))
            report["results"].append(result)
            shutil.rmtree(output, ignore_errors=True)

    # ── 3 Verdict ─────────────────────────────────────────────────────────────────────────────────────────────────────
    report["passed"] = not any(result["exit_code"] or result["faults"] for result in report["results"])
    end = f"{config.recipe} {'trains' if report['passed'] else 'does NOT train'} alike on 1 process and on "
    end += ", ".join(map(str, config.layouts)) if len(config.layouts) <= 4 else f"{len(config.layouts)} layouts"
    head = [f"# {end}", "", f"{config.config}, {config.steps} steps, tolerance {config.tolerance:g}", ""]
    if faulty := [f"- {'; '.join(map(str.strip, lines))}" for lines in verdicts if lines[1:]]:
        head += [*faulty, ""]
    head += summary(report["results"])
    (config.output_dir / "parity.md").write_text("\n".join([*head, *text, ""]), encoding="utf-8")
    write_report(config.output_dir, report)
    print(*(line for lines in verdicts for line in lines), sep="\n")
    print(f"the tables are in {config.output_dir / 'parity.md'}")
    if not report["passed"]:
        raise RunFailed(end)
    print(end)
    return EXIT_DONE


# ── Runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

FEMTO = [sys.executable, "-P", "-m", "femto.main"]  # -P: nothing in the current folder passes for a module


def keys_of(config: Config) -> set[str]:
    """The keys of the recipe's config; FemtoError where there is no such recipe or config, or nothing to compare."""

    def ask(*options: str) -> subprocess.CompletedProcess:
        command = [*FEMTO, "run", *options, config.recipe, "--config", config.config, "--help"]
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")

    if (answer := ask("--nproc-per-node", "1")).returncode:
        if ask().returncode == EXIT_DONE:  # it is the option that was refused
            raise FemtoError(f"recipe: {config.recipe} has LAUNCH = 'single': it has no ranks to compare")
        *before, last = answer.stderr.splitlines() or [""]  # a file that cannot be imported has a traceback before
        print(*before, sep="\n", end="\n" * bool(before), file=sys.stderr)
        raise (FemtoError if answer.returncode == EXIT_USER else RunFailed)(last.removeprefix("error: "))
    keys = {*re.findall(r"^  (\S+)  ", answer.stdout.rpartition("keys of the config:")[2], re.MULTILINE)}
    needed = {"output_dir", "max_steps", "log.digests"}
    if config.control:
        needed |= {"global_batch_size", "micro_batch_size"}
    if lacking := needed - keys:
        raise FemtoError(f"recipe: {config.recipe} has no key {', '.join(sorted(lacking))}, which parity sets")
    if unknown := {f"parallel.{key}" for layout in config.layouts for key in layout.parallel or {}} - keys:
        raise FemtoError(f"layouts: {config.recipe} has no key {', '.join(sorted(unknown))}; its --help lists them")
    return keys


def claim(output_dir: Path, files: list[str]) -> None:
    """Remove what an earlier comparison has written, by its own list; FemtoError where another's file is in the way."""
    earlier = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = json.loads((output_dir / "parity.json").read_bytes())["files"]
        earlier = [
            name for name in listed if re.fullmatch(r"parity\.(json|md)|(one_process|control|layout_\d+)\.txt", name)
        ]
    for name in files:
        if name not in earlier and (output_dir / name).exists():
            raise FemtoError(f"output_dir: {output_dir / name} was not written by parity; choose another folder")
    for name in earlier:
        (output_dir / name).unlink(missing_ok=True)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_report(output_dir, {"passed": False, "files": files})  # until there is a better one
    except OSError as error:
        raise FemtoError(f"output_dir: cannot write {output_dir}: {error.strerror}; choose another one") from None


def write_report(output_dir: Path, report: dict[str, Any]) -> None:
    """JSON knows no infinity: what has no number is null."""
    report = json.loads(json.dumps(report), parse_constant=lambda _: None)
    (output_dir / "parity.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def command_of(config: Config, layout: Layout, keys: set[str], output: Path) -> list[str]:
    """The `femto run` of one layout; FemtoError for overrides that are none, or that parity sets itself."""
    settings = {"output_dir": output, "max_steps": config.steps, "epochs": "null", "resume": "never", "processes": 1}
    settings |= {"log.digests": "true", "log.tensorboard": "false", "log.wandb_project": "null"}
    settings |= {"checkpoint.every": "null", "export.dtype": "null"}
    for word in config.overrides:
        key, separator, _ = word.partition("=")
        if not separator or word.startswith("-"):
            raise FemtoError(f"overrides: {word!r} should be key=value")
        if key in settings or key.partition(".")[0] == "parallel":
            remedy = "say it in layouts" if key.startswith(("parallel", "processes")) else "leave it out"
            raise FemtoError(f"overrides: {key} is parity's to set; {remedy}")
    words = [f"{key}={value}" for key, value in settings.items() if key in keys]
    if layout.parallel is not None:
        words.append(f"parallel={json.dumps(layout.parallel)}")
    options = ["--nproc-per-node", str(layout.processes)]
    return ["run", *options, config.recipe, "--config", config.config, *config.overrides, *words]


REVERSED = """
import femtolib.data.loader as _loader

_collate = _loader.collate
_loader.collate = lambda *rows, **settings: _collate(*rows, **settings)._map(lambda tensor: tensor.flip(0))
"""


def reversed_command(command: list[str], config: Config, scratch: Path) -> list[str]:
    """The same run of a copy of the recipe that has each batch in one piece, its rows in reverse order."""
    rows = yaml.safe_load((scratch / "one_process/config.yaml").read_text(encoding="utf-8"))["global_batch_size"]
    is_path = config.recipe.endswith(".py")
    source = Path(config.recipe) if is_path else Path(__file__).with_name(f"{config.recipe}.py")
    copy = scratch / source.name
    text = source.read_text(encoding="utf-8") + REVERSED
    if is_path:  # what the recipe imports from beside itself is not beside its copy
        folder = str(source.resolve().parent)
        text = f"import sys\n\nsys.path.insert(0, {folder!r})\nexec(compile({text!r}, __file__, 'exec'))\n"
    copy.write_text(text, encoding="utf-8")
    command = [str(copy) if word == config.recipe else word for word in command]
    return [*command, f"micro_batch_size={rows}"]


def run(command: list[str], layout: Layout, steps: int, output: Path, screen: Path) -> int:
    """The exit code of a run, whose steps are counted as they come, and whose errors are shown."""
    started, metrics = time.monotonic(), output / "metrics.jsonl"
    shown = dict(total=steps, leave=False, disable=None, bar_format="{desc}: step {n_fmt} of {total_fmt}, {elapsed}")
    with screen.open("wb") as file, tqdm(desc=str(layout), **shown) as progress:
        streams = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        process = subprocess.Popen([*FEMTO, *command], **streams, preexec_fn=end_with_parent)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                progress.n = metrics.read_bytes().count(b'"event": "train"') if metrics.exists() else 0
                progress.refresh()
        finally:  # after Ctrl-C it still lives, and ends its own processes if it is let
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(10)
            process.kill()
    code = process.wait()
    ended = f"failed with exit code {code}" if code else f"{steps} steps"
    print(f"{layout}: {ended} in {time.monotonic() - started:.0f} s", flush=True)
    if code:
        lines = screen.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error:")]
        untold = not errors or any("Traceback (most recent call last)" in line for line in lines)
        print(*(lines[-40:] if untold else errors), sep="\n", file=sys.stderr, flush=True)
    return code


# ── Comparison ────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(one: Path, many: Path, bounds: dict[str, float], steps_wanted: int) -> dict[str, Any]:
    """Two runs side by side, step by step, and the faults in the order in which they show, each kind once."""
    (_, theirs), (copies, ours) = read_metrics(one), read_metrics(many)
    steps, faults = [], {}
    for a, b in zip(theirs, ours, strict=False):
        checksums = b["parameters_digest"]
        part = len(checksums) // copies  # ranks that are this far apart hold the same part of the model
        step = {"step": b["step"], "same_rows": a["ledger"] == b["ledger"], "checksums": checksums}
        step["ranks_apart"] = [rank for rank, own in enumerate(checksums) if own != checksums[rank % part]]
        if not step["same_rows"]:
            hint = "which rank reads which: dp_rank and dp_size of the sampler"
            faults.setdefault("rows", f"step {b['step']}: other rows than in one process ({hint})")
        for key, what, hint in (
            ("loss", "loss", "the weights before this step, or what it is summed over"),
            ("grad_norm", "gradient norm", "sum or mean over the ranks? what is the loss divided by?"),
        ):
            apart = difference(a[key], b[key])
            step |= {key: [a[key], b[key]], f"{key}_difference": apart}
            if apart > bounds[key]:
                faults.setdefault(key, f"step {b['step']}: {what} off by {apart:.1e} ({hint})")
        for rank in step["ranks_apart"][:1]:
            hint = "initial weights, or gradients that not all ranks added"
            text = f"step {b['step']}: rank {rank} holds other parameters than rank {rank % part} ({hint})"
            faults.setdefault("parameters", text)
        steps.append(step)
    for key in ("loss", "grad_norm"):
        if ours and all(line[key] is None for line in (*theirs, *ours)):
            faults[key] = f"no step has a {key}: nothing was compared"
    if not len(theirs) == len(ours) == steps_wanted:
        faults["steps"] = f"{len(theirs)} and {len(ours)} steps were logged, not {steps_wanted}"
    apart, name = weight_difference(one / "model", many / "model")
    if apart > bounds["weights"]:
        faults["weights"] = f"at the end: weights off by {apart:.1e}, most in {name}"
    return {"faults": [*faults.values()], "weight_difference": apart, "steps": steps}


def read_metrics(output: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many copies of the model a run had (dp_replicate, the outermost dimension), and its train lines."""
    try:
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise RunFailed(f"a run of {output.name} ended well, and left no metrics.jsonl to read: {error}") from None
    parallel = [line.get("parallel") or {} for line in lines if line["event"] == "start"]
    copies = max((layout.get("dp_replicate", 1) for layout in parallel), default=1)
    steps = [line for line in lines if line["event"] == "train"]
    for line in steps:
        if lacking := {"step", "loss", "grad_norm", "ledger", "parameters_digest"} - line.keys():
            raise RunFailed(f"the recipe's train lines lack {', '.join(sorted(lacking))}, which parity compares")
        digests = line["parameters_digest"]
        if not isinstance(digests, list) or not digests or len(digests) % copies:
            raise RunFailed("parameters_digest of the recipe's train lines should be a list, by rank")
    return copies, steps


def difference(one: float | None, many: float | None) -> float:
    """Relative to the first; infinite where only one of them has a value, or where one is not finite."""
    if one is None or many is None:
        return 0.0 if one is many else math.inf
    apart = abs(many - one) / abs(one or 1)
    return apart if math.isfinite(apart) else math.inf


def weight_difference(one: Path, many: Path) -> tuple[float, str]:
    """The largest difference of a weight of two HF directories, relative to the largest of its tensor, and where."""

    def read(folder: Path) -> dict[str, Any]:
        files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]  # read when they are asked
        return {key: file for file in files for key in file.keys()}  # noqa: SIM118 (no dict)

    theirs, ours = read(one), read(many)
    found = [(math.inf, key) for key in theirs.keys() ^ ours.keys()]
    for key in theirs.keys() & ours.keys():
        a, b = (files[key].get_tensor(key).double() for files in (theirs, ours))
        apart = (a - b).abs().max().item() / (a.abs().max().item() or 1) if a.shape == b.shape else math.inf
        found.append((apart if math.isfinite(apart) else math.inf, key))
    return max(found, default=(math.inf, "no file, for there is none"))


def largest(result: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each kind."""
    series = {key: [step[f"{key}_difference"] for step in result["steps"]] for key in ("loss", "grad_norm")}
    return {key: max(values, default=0.0) for key, values in series.items()} | {"weights": result["weight_difference"]}


def table(result: dict[str, Any], layout: Layout, bounds: dict[str, float]) -> list[str]:
    """A line a step; ! marks what should be alike and is not."""
    rows = [["step", "loss, 1 process", f"loss, {layout.processes}", "apart", "norm apart", "parameters, by rank"]]
    for step in result["steps"]:
        losses = ["none" if loss is None else f"{loss:#.16g}" for loss in step["loss"]]
        apart = {key: step[f"{key}_difference"] for key in ("loss", "grad_norm")}
        words = [checksum[:8] for checksum in step["checksums"]]
        shown = " ".join(words[:4]) + (f" … {len(words)} ranks" if len(words) > 4 else "")
        marked = [f"{'! ' * (value > bounds[key])}{value:.1e}" for key, value in apart.items()]
        rows.append([str(step["step"]), *losses, *marked, "! " * bool(step["ranks_apart"]) + shown])
    return markdown(rows)


def summary(results: list[dict[str, Any]]) -> list[str]:
    """A line a layout."""
    rows = [["layout", "loss", "gradient norm", "final weights", "same rows"]]
    for result in results:
        if result["exit_code"]:
            rows.append([result["layout"], *["failed"] * 4])
        else:
            same_rows = "yes" if all(step["same_rows"] for step in result["steps"]) else "NO"
            rows.append([result["layout"], *(f"{value:.1e}" for value in largest(result).values()), same_rows])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> list[str]:
    """A table that can be read on a terminal, too; the first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, [f"{'-' * (width - 1)}:" for width in widths])
    return [f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows]


def verdict(result: dict[str, Any]) -> list[str]:
    """A line, and one for each fault."""
    if result["exit_code"]:
        return [f"{result['layout']}: FAILED with exit code {result['exit_code']}"]
    if result["faults"]:  # the first to show says most
        return [f"{result['layout']}: DIFFERS", *(f"  {fault}" for fault in result["faults"])]
    loss, norm, weights = largest(result).values()
    differences = f"loss {loss:.1e}, gradient norm {norm:.1e}, final weights {weights:.1e}"
    return [f"{result['layout']}: the same training; at most apart: {differences}"]


if __name__ == "__main__":
    sys.exit(run_recipe(Config, main, doc=__doc__, launch=LAUNCH))
