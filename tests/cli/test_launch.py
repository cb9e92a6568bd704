"""`femto run` of a recipe on several processes, started as a person starts it: how it ends, and what is left then. The
recipe is a toy that counts steps together; what a real one saves is tested in tests/recipes/."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOY = '''"""A toy that counts steps on several processes."""

import gc
import os
import signal
import time

import torch

from femtolib import sections
from femtolib.config import ConfigModel
from femtolib.errors import FemtoError
from femtolib.parallel.world import World
from femtolib.stop import StopRequest

LAUNCH = "distributed"
if os.environ.get("RANK") == os.environ.get("TOY_INTERRUPTED", ""):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


class Config(ConfigModel):
    output_dir: sections.OutputDir
    steps: int = 1_000_000
    rank_1: str = ""  # what it does in step 3
    note: str = ""
    resume: str = "auto"
    parallel: sections.ParallelSection = sections.ParallelSection()


def main(config: Config) -> int | None:
    assert gc.isenabled() and (gc.get_freeze_count() or "RANK" not in os.environ), "torch's modules are not frozen"
    world = World.join(torch.device("cpu"), 60)
    config.output_dir.mkdir(exist_ok=True)
    saved = config.output_dir / "saved"
    step = first = int(saved.read_text()) if saved.exists() else 0
    stop = StopRequest(muted=world.rank > 0)
    pid = config.output_dir / f"pid{world.rank}"
    again = pid.exists()
    pid.write_text(str(os.getpid()))
    assert world.sum(config.resume == "auto")[0] in (0, world.size)
    while step < config.steps:
        step += 1
        (config.output_dir / f"step{world.rank}").write_text(str(step))
        if world.rank == 1 and step == 3 and not again:
            match config.rank_1:
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exits":
                    os._exit(7)
                case "raises":
                    raise ValueError("the third step")
                case "finds a fault":
                    raise FemtoError("row 7 is bad; mend it")
        if config.rank_1 == "hangs" and step == 3:
            time.sleep(100)
        time.sleep(0.01)
        if world.sum(stop.requested)[0]:
            saved.write_text(str(step))
            if world.rank == 0:
                from femtolib.output import write_config  # the other toys start sooner without it

                print(f"stopped after step {step}; to go on: {write_config(config, 'toy.py')}")
            world.close()
            return 3
    print(f"{first} to {step} on {world.size} ranks; {config.note}")
    world.close()
'''

FEMTO = [sys.executable, "-c", "import sys, femto.main; sys.exit(femto.main.main())", "run"]


class Launched:
    """A `femto run` under way: its process, the folder of its toy, and what it prints."""

    def __init__(self, command: list[str], output: Path, folder: Path, environment: dict[str, str] | None = None):
        self.output, self.folder = output, folder
        folder.mkdir()
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"} | (environment or {}),
            )

    def __str__(self) -> str:
        return f"exit code {self.process.poll()}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"

    stdout = property(lambda self: (self.folder / "stdout").read_text())
    stderr = property(lambda self: (self.folder / "stderr").read_text())

    def rank(self, rank: int) -> int:
        """The process of a rank of the toy."""
        return int((self.output / f"pid{rank}").read_text())

    def wait_until(self, reached: Callable[[], object], seconds: float = 150) -> None:
        """Returns when `reached()`; fails when the run ends first or takes longer."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"the run ended first: {self}"
            assert time.monotonic() < deadline, f"not reached in {seconds} s: {self}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, ranks: int = 2) -> None:
        """Returns when every rank of the toy is in `step` or a later one."""

        def step_of(rank: int) -> int:
            with contextlib.suppress(OSError):
                return int((self.output / f"step{rank}").read_text() or 0)
            return 0

        self.wait_until(lambda: all(step_of(rank) >= step for rank in range(ranks)))

    def ends(self, seconds: float = 150) -> int:
        """Waits for the end and returns the exit code; fails when it takes longer, or a process or file is left."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end in {seconds} s: {self}")
        assert not self.workers(), f"left behind: {self}"
        if code >= 0:
            assert sorted(path.name for path in self.folder.iterdir()) == ["stderr", "stdout"]
        return code

    def workers(self) -> list[int]:
        """Its workers that are alive, and what they started in their sessions."""
        workers, sessions = set(), {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _parent, _group, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    sessions[int(process.name)] = int(session)
                if f"\0femto.worker\0{self.process.pid}\0" in (process / "cmdline").read_text():
                    workers.add(int(process.name))
        return [pid for pid, session in sessions.items() if pid in workers or session in workers]

    def kill(self) -> None:
        for pid in [self.process.pid, *self.workers()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launch(tmp_path, monkeypatch) -> Iterator[Callable[..., Launched]]:
    """`launch("--nproc-per-node 2", "steps=3")`: a run of the toy begun with torchrun's options and overrides."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    launched: list[Launched] = []

    def launch(
        options: str, *overrides: str, to: str = "output", environment: dict[str, str] | None = None
    ) -> Launched:
        number = len(launched)
        output = tmp_path / to
        (tmp_path / "toy.yaml").write_text("note: ''\n")
        command = [*FEMTO, *options.split(), "toy.py", "--config", "toy.yaml", f"output_dir={output}", *overrides]
        launched.append(Launched(command, output, tmp_path / f"screen{number}", environment))
        return launched[-1]

    launch.launched = launched
    yield launch
    for run in launched:
        run.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# ── How a run ends ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_runs_at_once_end_well_whatever_a_launcher_left_in_the_environment(launch):
    stale = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="5", MASTER_ADDR="no.such.host", MASTER_PORT="29500")
    stale |= dict(TORCHELASTIC_RUN_ID="old", TORCHELASTIC_RESTART_COUNT="3", FEMTO_EXIT_CODES="/nowhere")
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it: as good
            taken.bind(("", 29500))
            taken.listen()
        one = launch("--nproc-per-node 2", "steps=3", "note=costs $$5 ${local_rank}", to="one", environment=stale)
        two = launch("--nproc-per-node=2 --standalone --max-restarts 1", "steps=3", to="two")
        assert one.ends() == two.ends() == 0
    assert (one.stdout, one.stderr) == ("0 to 3 on 2 ranks; costs $$5 ${local_rank}\n", "")
    assert (two.stdout, two.stderr) == ("0 to 3 on 2 ranks; \n", "")


@pytest.mark.parametrize(
    ("act", "code", "wanted"),
    [
        ("is killed", 1, ["error: rank 1 was killed by SIGKILL (was memory short? the system's log tells)"]),
        ("exits", 1, ["error: rank 1 ended with exit code 7"]),
        ("raises", 1, ["rank 1: Traceback (most recent call last):", "ValueError: the third step"]),
        ("finds a fault", 2, ["error: rank 1: row 7 is bad; mend it"]),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_the_screen_says_why(launch, act, code, wanted):
    run = launch("--nproc-per-node 2 --max-restarts 0", f"rank_1={act}")
    assert run.ends() == code
    lines = [line for line in run.stderr.splitlines() if not line.startswith(" ") and "lost contact" not in line]
    assert lines == wanted, run


def test_a_signal_to_the_launcher_or_to_a_rank_stops_all_with_their_state_saved(launch):
    said = "\nstopping after this step; Ctrl-C again stops at once and saves nothing\n"
    steps = [0]
    for number in (signal.SIGINT, None):
        run = launch("--nproc-per-node 2 --max-restarts 3")
        run.wait_for_step(steps[-1] + 3)
        if number:
            run.process.send_signal(number)
        else:
            os.kill(run.rank(1), signal.SIGTERM)
        assert run.ends() == 3, run
        steps.append(int((run.output / "saved").read_text()))
        again = f"femto run --nproc-per-node 2 --max-restarts 3 toy.py --config {run.output}/config.yaml"
        assert run.stdout == f"stopped after step {steps[-1]}; to go on: {again}\n"
        assert run.stderr == (said if number else "")
    assert steps[1] < steps[2]


def test_an_interrupt_while_a_rank_imports_its_recipe_is_told_in_a_line(launch):
    run = launch("--nproc-per-node 2", environment={"TOY_INTERRUPTED": "1"})
    assert run.ends() == 1
    lines = [line for line in run.stderr.splitlines() if "lost contact" not in line]
    assert lines == ["error: rank 1: interrupted before there was anything to save"], run


def test_a_second_interrupt_ends_at_once_what_does_not_stop(launch):
    run = launch("--nproc-per-node 2 --max-restarts 3", "rank_1=hangs")
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.ends(60) == 1
    assert run.stderr.splitlines()[-1] == "error: interrupted; what was not saved before is lost"


@pytest.mark.slow
def test_workers_that_do_not_stop_are_killed_when_their_time_is_over(launch):
    run = launch("--nproc-per-node 2 --shutdown-timeout 1", "rank_1=hangs")
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(60) == 1
    assert "error: not ended 1 s after the request to stop (--shutdown-timeout): killed" in run.stderr


def test_no_worker_outlives_a_launcher_that_is_killed(launch):
    run = launch("--nproc-per-node 2")
    run.wait_for_step(1)
    assert len(run.workers()) == 2
    run.process.kill()
    deadline = time.monotonic() + 60
    while run.workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.ends() == -signal.SIGKILL


def test_a_killed_rank_is_restarted_and_a_stop_is_not(launch):
    run = launch("--nproc-per-node 2 --max-restarts 1", "rank_1=is killed", "resume=never")
    run.wait_for_step(5)
    assert "note: rank 1 was killed by SIGKILL" in run.stderr and "starting all again" in run.stderr
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 3, run
    assert run.stdout.startswith("stopped after step ")


# ── Several nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_slurm_script_runs_on_two_nodes_and_requeues_a_job_that_was_stopped(launch, tmp_path):
    # Slurm is played by two scripts: srun starts its command once a node, scontrol knows one host and notes the rest.
    stubs = {
        "femto": f"exec {sys.executable} -c 'import sys, femto.main; sys.exit(femto.main.main())' \"$@\"",
        "srun": 'for node in $(seq $SLURM_NNODES); do "$@" & echo $! >> agents; done; code=0\n'
        "for agent in $(cat agents); do wait $agent || code=$?; done; exit $code",
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" > requeued; fi',
    }
    for name, text in stubs.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = dict(SLURM_JOB_ID=str(free_port()), SLURM_NNODES="2", SLURM_GPUS_ON_NODE="1", SLURM_CPUS_PER_TASK="1")
    slurm |= dict(SLURM_JOB_NODELIST="localhost", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "toy.yaml").write_text("note: ''\n")
    script = Path(__file__).parents[2] / "docs" / "slurm.sbatch"
    output = tmp_path / "output"
    command = ["bash", str(script), "toy.py", "--config", "toy.yaml", f"output_dir={output}"]
    job = Launched(command, output, tmp_path / "screen", slurm)
    launch.launched.append(job)
    job.wait_for_step(3)
    agents = [int(pid) for pid in (tmp_path / "agents").read_text().split()]
    os.kill(agents[1], signal.SIGTERM)
    assert job.ends() == 3, job
    assert (tmp_path / "requeued").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    assert job.stdout.count("waiting for 2 nodes at localhost:") == 2
    assert f"stopped after step {(output / 'saved').read_text()}; to go on: femto run --nnodes 2 " in job.stdout


@pytest.mark.slow
def test_a_node_that_dies_ends_the_others_at_once_or_while_they_start_within_a_minute(launch):
    for moment in ("training", "starting"):
        options = f"--nnodes 2 --nproc-per-node 1 --rdzv-endpoint localhost:{free_port()}"
        first, second = [launch(options, to=moment) for _ in range(2)]
        if moment == "training":
            first.wait_for_step(3)
        else:
            for run in (first, second):
                run.wait_until(run.workers)
        second.process.kill()
        assert first.ends() == 1, first
        assert first.stderr.startswith("error: ") and first.stderr.count("\n") <= 2, first


@pytest.mark.slow
def test_a_worker_that_dies_on_one_node_is_restarted_on_both(launch):
    options = f"--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-endpoint localhost:{free_port()}"
    runs = [launch(options, "rank_1=is killed", "steps=20", "resume=never") for _ in range(2)]
    assert [run.ends() for run in runs] == [0, 0], "\n".join(map(str, runs))


@pytest.mark.slow
def test_a_node_that_comes_later_joins_those_that_train(launch):
    options = f"--nnodes 1:2 --nproc-per-node 1 --rdzv-conf last_call_timeout=1 --rdzv-endpoint localhost:{free_port()}"
    first = launch(options, "resume=never")
    first.wait_for_step(3, ranks=1)
    second = launch(options, "resume=never")
    first.wait_for_step(1, ranks=2)
    second.process.send_signal(signal.SIGTERM)
    assert (first.ends(), second.ends()) == (3, 3), f"{first}\n{second}"
    assert first.stdout.count("stopped after step") + second.stdout.count("stopped after step") == 2


def test_a_port_that_another_program_has_is_refused_in_a_line(launch):
    with socket.socket() as silent, socket.socket() as talking:
        for listener in (silent, talking):
            listener.bind(("localhost", 0))
            listener.listen()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    talking.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 9)

        threading.Thread(target=talk, daemon=True).start()
        places = [f"localhost:{listener.getsockname()[1]}" for listener in (silent, talking)]
        where = "--nnodes 2 --nproc-per-node 1 --rdzv-conf read_timeout=3 --rdzv-endpoint"
        for place, run in [(place, launch(f"{where} {place}")) for place in places]:
            assert run.ends() == 2
            assert run.stderr.startswith(f"error: --rdzv-endpoint {place}: what listens there is no rendezvous"), run
            assert run.stderr.count("\n") == 1


# ── What is refused before anything is launched ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--nnodes 2 toy.py", "--nnodes 2: the nodes must know where to meet; add --rdzv-endpoint HOST:PORT"),
        ("--standalone --nnodes 2 toy.py", "--nnodes 2: the nodes must know where to meet"),
        ("--nnodes 1:4 toy.py", "--nnodes 1:4: the nodes must know where to meet"),
        ("--nnodes two toy.py", "--nnodes two: should be a number of nodes, or MIN:MAX"),
        ("--nnodes 3:2 --rdzv-endpoint a:1 toy.py", "min_nodes must be > 0 and <= max_nodes"),
        ("--nproc-per-node 0 toy.py", "--nproc-per-node 0: should be a number of processes, or gpu"),
        ("--nproc-per-node gpus toy.py", "--nproc-per-node gpus: should be a number of processes, or gpu"),
        ("--max-restarts -1 toy.py", "max_restarts must be >= 0"),
        ("--max-restarts many toy.py", "argument --max-restarts/--max_restarts: invalid int value: 'many'"),
        ("--no-python toy.py", "--no-python means nothing here"),
        ("-m toy.py", "--module means nothing here"),
        ("--run-path toy.py", "--run-path means nothing here"),
        ("--start-method fork toy.py", "--start-method means nothing here"),
        ("--tee 3 toy.py", "--tee goes by files: name a folder for them with --log-dir"),
        ("--signals-to-handle TERM toy.py", "--signals-to-handle: TERM is no signal that can be handled"),
        ("--rdzv-conf read_timeout=x toy.py", "The rendezvous configuration option 'read_timeout' does not represent"),
        ("--rdzv-conf x toy.py", "The rendezvous configuration option 'x' must have a value specified."),
        ("--rdzv-backend nfs --rdzv-endpoint a:1 toy.py", "--rdzv-endpoint a:1: The rendezvous backend 'nfs'"),
        ("--nnodes 2 --rdzv-endpoint localhost:x toy.py", "The port number of the rendezvous endpoint 'localhost:x'"),
        ("--nnodes 2 --rdzv-endpoint no.such.host:1 toy.py", "--rdzv-endpoint no.such.host:1: Name or service not"),
        ("--nproc-per-node 2 toy.py stepps=1", "unknown key 'stepps'; did you mean 'steps'?"),
        ("--nproc-per-node 3 toy.py parallel.dp_shard=2", "parallel: dp_shard 2 needs 2 processes, and there are 3"),
        ("--nnodes 4 --rdzv-endpoint a:1 --nproc-per-node 2 toy.py parallel.dp_shard=2", "and there are 8"),
        ("toy.py --config /dev/stdin", "/dev/stdin is a pipe: toy.py reads its config in every process"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_line(femto, tmp_path, monkeypatch, arguments, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("output_dir: output\n")
    words = arguments.split()
    ended = femto("run", *words, *([] if "--config" in words else ["--config", "toy.yaml"]))
    assert ended.code == 2
    assert wanted in ended.error
    assert not (tmp_path / "output").exists()


def test_without_options_on_a_cpu_a_recipe_is_one_process_this_one(femto, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("output_dir: output\n")
    for name, value in dict(RANK="5", WORLD_SIZE="8", MASTER_ADDR="no.such.host", TORCHELASTIC_RUN_ID="old").items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ended = femto("run", "toy.py", "--config", "toy.yaml", "steps=2")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == (0, "0 to 2 on 1 ranks; \n", "")
    assert int((tmp_path / "output" / "pid0").read_text()) == os.getpid()
