"""How fast documents become a token directory, against `encode_batch_fast` alone on the same text and cores, each in
processes of their own, in turn:

    python tests/benchmarks/tokenize_speed.py TEXT.jsonl [TOKENIZER] [--rounds N] [--cpus N]

Alone means: the texts in memory beforehand, their ids thrown away, in batches of the size (of three) that is fastest.
Prints MB of text a second of wall and of CPU time, the ratio of the medians, and the peak memory. Run it on text of at
least 50 MB; the shipped corpus is too small to tell.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers

from femtolib.data.documents import read_documents
from femtolib.data.tokenize import tokenize_documents
from femtolib.data.tokenizer import load_tokenizer


def alone(text: Path, tokenizer: str, batch_characters: int) -> dict:
    backend = tokenizers.Tokenizer.from_file(str(load_tokenizer(tokenizer, "<|endoftext|>").path))
    batches, size = [[]], 0
    for document in read_documents([text]):
        if size > batch_characters:
            batches, size = [*batches, []], 0
        batches[-1].append(document.text)
        size += len(document.text)
    return measure(lambda: [len(backend.encode_batch_fast(batch)) for batch in batches])


def femto(text: Path, tokenizer: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return measure(
            lambda: tokenize_documents(
                read_documents([text]),
                load_tokenizer(tokenizer, "<|endoftext|>"),
                Path(folder) / "tokens",
                sources=[str(text)],
            )
        )


def measure(work) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # kB
    return {"wall": wall, "cpu": cpu, "peak": int(peak) * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", nargs="?", default="builtin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what a child process does
    arguments = parser.parse_args()
    if arguments.only:
        batch = int(arguments.only)
        work = (
            alone(arguments.text, arguments.tokenizer, batch) if batch else femto(arguments.text, arguments.tokenizer)
        )
        print(json.dumps(work))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cpus])
    megabytes = sum(len(document.text.encode()) for document in read_documents([arguments.text])) / 1e6
    kinds = {"alone, 256 KB": 2**18, "alone, 1 MB": 2**20, "alone, 4 MB": 2**22, "femto": 0}
    results = {kind: [] for kind in kinds}
    for _ in range(arguments.rounds):
        for kind, batch in kinds.items():
            command = [sys.executable, __file__, str(arguments.text), arguments.tokenizer, "--only", str(batch)]
            child = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            results[kind].append(json.loads(child.stdout))
    speeds = {}
    print(f"{megabytes:.1f} MB of text, {arguments.tokenizer}, {arguments.cpus} CPUs, medians of {arguments.rounds}")
    for kind, runs in results.items():
        wall, cpu, peak = (statistics.median(run[key] for run in runs) for key in ("wall", "cpu", "peak"))
        speeds[kind] = megabytes / wall, megabytes / cpu
        print(f"{kind:<16}{megabytes / wall:6.2f} MB/s{megabytes / cpu:8.2f} MB/CPU s{peak / 1e6:8.0f} MB peak")
    for place, unit in enumerate(("wall", "CPU")):
        best = max(speed[place] for kind, speed in speeds.items() if kind != "femto")
        print(f"femto / best alone, {unit} time: {speeds['femto'][place] / best:.3f}")


if __name__ == "__main__":
    main()
