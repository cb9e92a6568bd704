"""What all tests share: a tiny model's config, token directories written here from their published format and not by
femto, and three ways to run a recipe: in this process, where no signal is involved, in a process of its own, and on
several ranks."""

import contextlib
import copy
import hashlib
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

RECIPE = "single_device_pretrain"
# Seconds in which anything here is done on a machine whose few cores several tests share: torch alone takes ten of CPU
# time to import in a run of two ranks. What takes longer hangs.
PATIENCE = 150

# For this process and all that tests start: models this small gain nothing from more threads, and several test
# processes that spin for each other's cores lose most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """No test reads or fills the cache of the person who runs it."""
    os.environ["FEMTO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_llama() -> dict:
    """A Llama of 0.1 M parameters: 2 layers, width 64, 4 heads, 2 key-value heads, 320 ids, 128 positions."""
    return {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


# ── Token directories ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def write_tokens() -> Callable[..., Path]:
    """`write_tokens(directory, documents, vocab_size, shards=1)`: a token directory. EOS is the last id."""
    return _write_tokens


def _write_tokens(directory: Path, documents: list[list[int]], vocab_size: int, shards: int = 1) -> Path:
    directory.mkdir(parents=True)
    eos = vocab_size - 1
    _write_word_tokenizer(directory, vocab_size)
    entries = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
        texts = [[*documents[i], eos] for i in part]
        starts = np.cumsum([0, *map(len, texts)])[:-1].astype(np.int64)
        path = directory / f"tokens-{number:05d}.safetensors"
        save_file({"tokens": np.concatenate(texts).astype(np.uint16), "document_starts": starts}, path)
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        tokens = sum(map(len, texts))
        entries.append(
            {"file": path.name, "tokens": tokens, "documents": len(texts), "bytes": len(content), "digest": digest}
        )
    settings = json.loads((directory / "tokenizer.json").read_bytes()) | {"truncation": None, "padding": None}
    settings["model"] |= {"dropout": None}  # what may differ without another id coming out
    index = {
        "format": "femto-tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "largest_id": eos,
        "eos_id": eos,
        "bos_id": None,
        "tokens": sum(entry["tokens"] for entry in entries),
        "documents": len(documents),
        "skipped": {"empty": 0, "bad": 0},
        "sources": [],
        "tokenizer_digest": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "template_digest": None,
        "shards": entries,
    }
    (directory / "index.json").write_text(json.dumps(index))
    return directory


def _write_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """One word an id, `w0 w1 …`, and `<eos>` as the last id."""
    words = {f"w{i}": i for i in range(vocab_size - 1)}
    end = {"id": vocab_size - 1, "content": "<eos>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words | {"<eos>": vocab_size - 1}, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )


@pytest.fixture(scope="session")
def tagged_tokens(tmp_path_factory) -> Path:
    """64 documents, document k being the ids 200k, 200k+1, … (fewer than 200): an id names its document and place."""
    lengths = np.random.default_rng(0).integers(20, 200, 64)
    documents = [list(range(200 * k, 200 * k + length)) for k, length in enumerate(lengths)]
    return _write_tokens(tmp_path_factory.mktemp("tagged") / "tokens", documents, vocab_size=13_000, shards=3)


@pytest.fixture(scope="session")
def uneven_tokens(tmp_path_factory) -> Path:
    """37 documents over 320 ids of 0 to 80 tokens, most of them very short, some without a token but the EOS."""
    random = np.random.default_rng(1)
    lengths = random.permutation([0, 0, 1, 1, 1, 2, 2, 3, 80, 70, 60, 47, 48, 49, *random.integers(1, 30, 23)])
    documents = [random.integers(0, 319, length).tolist() for length in lengths]
    return _write_tokens(tmp_path_factory.mktemp("uneven") / "tokens", documents, vocab_size=320, shards=2)


# ── Running a recipe ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    """What a run left: its exit code, what it printed, and the folder it wrote to."""

    exit_code: int
    stdout: str
    stderr: str
    output: Path

    def lines(self, *events: str) -> list[dict]:
        """The lines of metrics.jsonl, or those of `events`."""
        text = (self.output / "metrics.jsonl").read_text()
        assert text.endswith("\n"), "the last line of metrics.jsonl is torn"
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if not events or line["event"] in events]

    def column(self, key: str) -> list:
        """One value of each train line."""
        return [line[key] for line in self.lines("train")]

    @property
    def errors(self) -> list[str]:
        """The `error:` lines of the screen."""
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"


@pytest.fixture(scope="session")
def write_config(tmp_path_factory) -> Callable[[dict], Path]:
    """`write_config(config)`: the path of a YAML file in its own folder, where output_dir is by default."""

    def write(config: dict) -> Path:
        folder = tmp_path_factory.mktemp("run")
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(folder / "output"), **config}, sort_keys=False))
        return path

    return write


def _output_of(path: Path, overrides: tuple[str, ...]) -> Path:
    named = [text.split("=", 1)[1] for text in overrides if text.startswith("output_dir=")]
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, KeyError, TypeError):  # a spoilt config names none
        named = named or [yaml.safe_load(path.read_text())["output_dir"]]
    return Path(named[-1] if named else path.parent / "output")


@pytest.fixture(scope="session")
def run(write_config) -> Callable[..., Run]:
    """`run(config, *overrides)`: one run of the recipe in this process. `config` is a dict or the path of a file."""
    import importlib

    import torch

    from femtolib.command import run_recipe

    recipe = importlib.import_module(f"femto.recipes.{RECIPE}")

    def run(config: dict | Path, *overrides: str) -> Run:
        path = write_config(config) if isinstance(config, dict) else config
        stdout, stderr = io.StringIO(), io.StringIO()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = run_recipe(recipe.Config, recipe.main, ["--config", str(path), *overrides])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.use_deterministic_algorithms(False)
        return Run(code or 0, stdout.getvalue(), stderr.getvalue(), _output_of(path, overrides))

    return run


# A server that has imported torch once and forks for every run: a process of its own in 50 ms instead of seconds.
# The child does what the `femto` script does, in a session of its own, and ends as an interpreter ends.
_SERVER = """
import gc, json, os, sys
gc.disable()
import torch, femto.main, femto.recipes.single_device_pretrain
import torch._dynamo  # or every run's first optimizer step would import it
gc.collect()
gc.enable()
gc.freeze()  # or every child would visit, and so copy, all of this memory when it ends: a second of CPU time
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(request["folder"], name), os.O_CREAT | os.O_WRONLY), descriptor)
        os.environ.update(request["environment"])
        sys.argv = ["femto", *request["arguments"]]
        sys.exit(femto.main.main())
    print(child, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(os.path.join(request["folder"], "exit_code.new"), "w") as file:
        file.write(str(code))
    os.rename(file.name, os.path.join(request["folder"], "exit_code"))
"""


class Running:
    """A `femto run` under way in a process, process group and session of its own, `pid`."""

    def __init__(self, pid: int, folder: Path, output: Path):
        self.pid, self.folder, self.output = pid, folder, output

    @property
    def ended(self) -> bool:
        """Whether the process has ended; processes that it started may live on."""
        return (self.folder / "exit_code").exists()

    def wait_until(self, reached: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Returns when `reached()`; fails when the run ends first or takes longer."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"not reached in {seconds} s"
            assert not self.ended, f"the run ended first: {self.result()}"
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Returns when metrics.jsonl has the train line of `step` or of a later one."""
        path = self.output / "metrics.jsonl"

        def reached() -> bool:
            whole = path.read_text().split("\n")[:-1] if path.exists() else []
            return any(line["event"] == "train" and line["step"] >= step for line in map(json.loads, whole))

        self.wait_until(reached)

    def signal(self, number: int, group: bool = False) -> None:
        """Sends a signal to the process, or to all of its group."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def processes(self) -> list[int]:
        """The processes of this run's session that are alive: the run itself and its loader workers."""
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _parent, _group, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.pid and state != "Z":
                    alive.append(int(stat.parent.name))
        return alive

    def result(self, seconds: float = PATIENCE) -> Run:
        """Waits for the end; a run that takes longer is killed and fails the test."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL, group=True)
                pytest.fail(f"the run did not end in {seconds} s: {self._screen()}")
            time.sleep(0.005)
        return Run(int((self.folder / "exit_code").read_text()), *self._screen(), self.output)

    def _screen(self) -> tuple[str, str]:
        paths = [self.folder / name for name in ("stdout", "stderr")]  # one killed at once may have made none
        return tuple(path.read_text() if path.exists() else "" for path in paths)


@pytest.fixture(scope="session")
def start(write_config, tmp_path_factory):
    """`start(config, *overrides)`: a `femto run` begun in a process of its own; `.result()` waits for it.

    `start.command(line, output)` begins a `femto …` command line as a person would type it.
    """
    servers: list[subprocess.Popen] = []
    runs: list[tuple[subprocess.Popen, Running]] = []

    def idle_server() -> subprocess.Popen:
        busy = {server for server, running in runs if not running.ended}
        for server in servers:
            if server not in busy and server.poll() is None:
                return server
        command = [sys.executable, "-c", _SERVER]
        servers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return servers[-1]

    def command(line: str, output: Path, environment: dict[str, str] | None = None) -> Running:
        folder = tmp_path_factory.mktemp("process")
        request = {"arguments": shlex.split(line)[1:], "folder": str(folder), "environment": environment or {}}
        server = idle_server()
        print(json.dumps(request), file=server.stdin, flush=True)
        running = Running(int(server.stdout.readline()), folder, output)
        runs.append((server, running))
        return running

    def start(config: dict | Path, *overrides: str, environment: dict[str, str] | None = None) -> Running:
        path = write_config(config) if isinstance(config, dict) else config
        line = shlex.join(["femto", "run", RECIPE, "--config", str(path), *overrides])
        return command(line, _output_of(path, overrides), environment)

    start.command = command
    yield start
    for _, running in runs:
        if not running.ended:
            running.signal(signal.SIGKILL, group=True)
    for server in servers:
        server.stdin.close()
        server.wait(10)


# ── Running a recipe on several ranks ─────────────────────────────────────────────────────────────────────────────────

# Like the server above, for one process a rank: a launcher that forks the ranks, each with the variables that torchrun
# sets, and holds the store through which they meet, so that no port is chosen before it is taken. There is no agent:
# ranks that lose one of theirs must end by themselves.
_LAUNCHER = """
import atexit, faulthandler, gc, importlib, json, os, signal, sys, threading
gc.disable()
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
from femtolib.command import run_recipe

names = ("distributed_pretrain", "data_parallel_pretrain")
recipes = {name: importlib.import_module(f"femto.recipes.{name}") for name in names}
gc.collect()
gc.enable()
gc.freeze()


def run(request, rank, port):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(request["folder"], f"{name}-{rank}")
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    faulthandler.enable()  # a rank that crashes says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks where a rank hangs
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["count"], "LOCAL_WORLD_SIZE": request["count"]}
    os.environ.update({name: str(value) for name, value in {**meeting, **ranks, **request["environment"]}.items()})
    if request["plant"]:
        source, name, arguments = request["plant"]
        exec(source, names := {})
        names[name](rank, *arguments)
    recipe = recipes[request["recipe"]]
    code = run_recipe(recipe.Config, recipe.main, request["arguments"], doc="", launch="distributed")
    # An interpreter's own end visits, and so copies, all of this memory: a third of the time of a short run.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(request):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gates, ranks = [], {}
    for rank in range(request["count"]):
        gate = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gate[1])
            for _, writer in gates:
                os.close(writer)
            port = os.read(gate[0], 10).decode()
            os.close(gate[0])
            run(request, rank, port)
        os.close(gate[0])
        gates.append(gate)
        ranks[child] = rank
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    write(request, "pids", list(ranks))
    for _, writer in gates:
        os.write(writer, str(store.port).encode())
        os.close(writer)
    codes = [None] * len(ranks)
    for _ in ranks:
        child, status = os.waitpid(-1, 0)
        codes[ranks[child]] = os.waitstatus_to_exitcode(status)
        write(request, "exit_codes", codes)
    os._exit(0)


def write(request, name, value):
    path = os.path.join(request["folder"], name)
    with open(path + ".new", "w") as file:
        json.dump(value, file)
    os.rename(path + ".new", path)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        launch(json.loads(line))
    print(child, flush=True)
"""


@dataclass
class RanksRun(Run):
    """What a run of several ranks left: `exit_code` is the largest of `exit_codes`, by rank; stdout is rank 0's, stderr
    that of all ranks."""

    exit_codes: list[int]
    screens: list[tuple[str, str]]

    def __str__(self) -> str:
        shown = [f"rank {rank}, stdout:\n{out}\nstderr:\n{err}" for rank, (out, err) in enumerate(self.screens)]
        return "\n".join([f"exit codes {self.exit_codes}", *shown])


class RunningRanks(Running):
    """A run of several ranks under way; its launcher is `pid`, whose session is theirs."""

    def __init__(self, pid: int, folder: Path, output: Path, count: int):
        super().__init__(pid, folder, output)
        self._count = count

    @property
    def exit_codes(self) -> list[int | None]:
        """By rank; None: not ended."""
        path = self.folder / "exit_codes"
        return json.loads(path.read_text()) if path.exists() else [None] * self._count

    @property
    def ended(self) -> bool:
        return None not in self.exit_codes

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        self.wait_until(lambda: (self.folder / "pids").exists())
        return json.loads((self.folder / "pids").read_text())

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to some ranks, or to all."""
        for rank in ranks or range(self._count):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def end(self) -> None:
        """Kills what is left of the launcher, the ranks and their loader workers."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def result(self, seconds: float = PATIENCE) -> RanksRun:
        """Waits for the end of all ranks; a run that takes longer is killed and fails the test, and says where each
        rank was. Fails where a process is left behind, too."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                self.signal(signal.SIGUSR1)
                time.sleep(1)
                self.end()
                pytest.fail(f"not all ranks ended in {seconds} s: {self._result([c or -9 for c in self.exit_codes])}")
            time.sleep(0.005)
        while left := self.processes():
            if time.monotonic() > deadline + 30:
                self.end()
                pytest.fail(f"processes {left} outlived the run by 30 s")
            time.sleep(0.005)
        return self._result(self.exit_codes)

    def _result(self, codes: list[int]) -> RanksRun:
        paths = [[self.folder / f"{name}-{rank}" for name in ("stdout", "stderr")] for rank in range(self._count)]
        screens = [tuple(path.read_text() if path.exists() else "" for path in pair) for pair in paths]
        stderr = "".join(err for _, err in screens)
        return RanksRun(max(codes, key=abs), screens[0][0], stderr, self.output, codes, screens)


@pytest.fixture(scope="session")
def start_ranks(write_config, tmp_path_factory) -> Iterator[Callable[..., RunningRanks]]:
    """`start_ranks(count, config, *overrides, plant=None)`: a recipe, distributed_pretrain or another one with LAUNCH =
    "distributed", begun on so many ranks.

    plant: `(function, *arguments)`, called as function(rank, *arguments) in each rank before the recipe. The ranks are
    no children of this process: the function is sent as text, so it imports what it needs and sees nothing around it.
    """
    command = [sys.executable, "-c", _LAUNCHER]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started: list[RunningRanks] = []

    def start(
        count: int,
        config: dict | Path,
        *overrides: str,
        recipe: str = "distributed_pretrain",
        plant: tuple | None = None,
        environment: dict[str, str] | None = None,
    ) -> RunningRanks:
        path = write_config(config) if isinstance(config, dict) else config
        folder = tmp_path_factory.mktemp("ranks")
        request = {"count": count, "recipe": recipe, "folder": str(folder), "environment": environment or {}}
        request["plant"] = None
        request["arguments"] = ["--config", str(path), *overrides]
        if plant:
            function, *arguments = plant
            request["plant"] = [textwrap.dedent(inspect.getsource(function)), function.__name__, arguments]
        print(json.dumps(request), file=launcher.stdin, flush=True)
        started.append(RunningRanks(int(launcher.stdout.readline()), folder, _output_of(path, overrides), count))
        return started[-1]

    yield start
    for running in started:
        if not running.ended:
            running.end()
    launcher.stdin.close()
    launcher.wait(60)


@pytest.fixture(scope="session")
def run_ranks(start_ranks) -> Callable[..., RanksRun]:
    """`run_ranks(count, config, *overrides, recipe=…, plant=None)`: as `start_ranks`, to its end."""
    # Eight ranks on two cores that other work is using take their time.
    return lambda count, *arguments, **more: start_ranks(count, *arguments, **more).result(max(PATIENCE, 30 * count))


@pytest.fixture(scope="session")
def after_updates():
    """`with after_updates(3, act):` calls `act()` as soon as the third optimizer step in the block has been made."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    @contextlib.contextmanager
    def after_updates(count: int, act: Callable[[], None]):
        left = [count]

        def hook(*_) -> None:
            left[0] -= 1
            if left[0] == 0:
                act()

        handle = register_optimizer_step_post_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return after_updates


@pytest.fixture(scope="session")
def stop_after(after_updates):
    """`with stop_after(3):` sends this process a SIGTERM as soon as the third optimizer step has been made."""

    def terminate() -> None:
        assert callable(signal.getsignal(signal.SIGTERM)), "the run has no handler for SIGTERM"
        signal.raise_signal(signal.SIGTERM)

    return lambda count: after_updates(count, terminate)


@pytest.fixture(scope="session")
def changed() -> Callable[..., dict]:
    """`changed(config, {"data": {"tail": "pad"}})`: a copy of a config with some keys set, sections merged."""

    def merge(config: dict, changes: dict) -> dict:
        config = copy.deepcopy(config)
        for key, value in changes.items():
            both = isinstance(value, dict) and isinstance(config.get(key), dict)
            config[key] = merge(config[key], value) if both else value
        return config

    return merge
