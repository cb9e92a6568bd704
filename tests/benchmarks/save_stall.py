"""How long training stands still for a save of 262 MB by two gloo ranks, in the foreground and in the background.

    python tests/benchmarks/save_stall.py [--rounds 3]

Model and loop are step_cost.py's with a smaller vocabulary and shorter rows: 21.8M parameters, AdamW's two moments. A
run of 16 steps saves every 4; the figures are those of its metrics.jsonl. A step is `beside a save` when the save in
the background was not over before the step was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import step_cost

STEPS, EVERY = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    step_cost.VOCABULARY, step_cost.SEQUENCE = 12000, 128
    seconds: dict[str, list[float]] = {}
    for mode in ["sync", "async"] * rounds:
        for name, values in measure(mode == "async").items():
            seconds.setdefault(f"{mode:<5} {name}", []).extend(values)
    for name, values in sorted(seconds.items()):
        print(f"{name:<26} median {statistics.median(values):.2f} s, {min(values):.2f} to {max(values):.2f}")


def measure(asynchronous: bool) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        step_cost.write_workload(Path(folder), 2 * step_cost.ROWS, STEPS)
        checkpoint = f"checkpoint={{every: {EVERY}, keep_last: 1, async_save: {str(asynchronous).lower()}}}"
        words = ["distributed_pretrain", "--config", f"{folder}/config.yaml", "threads=1", checkpoint]
        command = [Path(sys.executable).with_name("femto"), "run", "--nproc-per-node", "2", *words]
        subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, check=True)
        lines = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
    saves = [line for line in lines if line["event"] == "checkpoint"]
    found = {
        "save, training blocked": [save["seconds_blocked"] for save in saves],
        "save, until published": [save["seconds_total"] for save in saves],
        "step alone": [],
        "step beside a save": [],
    }
    left = 0.0  # of the save in the background
    for line in lines:
        if line["event"] == "train" and line["step"] > 1:  # the first one loads libraries
            found["step beside a save" if left > 0 else "step alone"].append(line["seconds"])
            left -= line["seconds"]
            if line["step"] % EVERY == 0:
                save = next(save for save in saves if save["step"] == line["step"])
                left = save["seconds_total"] - save["seconds_blocked"]
    return {name: values for name, values in found.items() if values}


if __name__ == "__main__":
    main()
