"""Start the processes of a recipe that runs on several, and end as they end. Options, rendezvous, start and restart are
torchrun's, through its Python interface; agent.py changes how the workers end, worker.py is what each of them runs.
"""

import contextlib
import errno
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
import uuid
from argparse import Namespace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from femto.agent import Agent, Signals
from femtolib.errors import FemtoError, RunFailed

# Seconds in which what listens at the endpoint must have answered: a rendezvous does at once, another program never.
ANSWER = 30


def parse_options(options: list[str], processes: int) -> LaunchConfig:
    """What torchrun's `options` ask for, femto's defaults filled in: `processes` on this node, a rendezvous of this
    node alone on a free port where none is named, c10d where only an endpoint is. FemtoError for what cannot be."""
    parser = get_args_parser()
    unset = [name for name in ("nproc_per_node", "rdzv_backend") if f"PET_{name.upper()}" not in os.environ]
    parser.set_defaults(**dict.fromkeys(unset))
    known = parser.parse_args([*options, "RECIPE"])
    for name in ("module", "no_python", "run_path", "start_method"):
        if getattr(known, name) != parser.get_default(name):
            raise FemtoError(f"--{name.replace('_', '-')} means nothing here: femto runs recipes, in its own way")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", known.nnodes):
        raise FemtoError(f"--nnodes {known.nnodes}: should be a number of nodes, or MIN:MAX")
    known.nproc_per_node = known.nproc_per_node or str(processes)
    if not re.fullmatch(r"[1-9]\d*|auto|cpu|gpu|xpu", known.nproc_per_node):
        raise FemtoError(f"--nproc-per-node {known.nproc_per_node}: should be a number of processes, or gpu")
    if not known.log_dir:
        for name in ("redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters"):
            if getattr(known, name) != parser.get_default(name):
                raise FemtoError(f"--{name.replace('_', '-')} goes by files: name a folder for them with --log-dir")
        known.log_dir = os.devnull  # or torch would make a folder in /tmp, and leave it
    _choose_rendezvous(known)
    logging.getLogger("torch.distributed").handlers = [logging.NullHandler()]
    threads = os.environ.get("OMP_NUM_THREADS")
    try:
        config = config_from_args(known)[0]
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        raise FemtoError(f"torchrun's options before the recipe: {error}") from None
    if not threads:  # torchrun gives each process one, whatever the machine
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // config.nproc_per_node))
    return config


def _choose_rendezvous(known: Namespace) -> None:
    if not known.rdzv_backend and not known.rdzv_endpoint and (known.master_port or known.master_addr != "127.0.0.1"):
        known.rdzv_endpoint = f"{known.master_addr}:{known.master_port or 29500}"
    if known.standalone or not (known.rdzv_backend or known.rdzv_endpoint):
        if known.nnodes not in ("1", "1:1"):
            raise FemtoError(
                f"--nnodes {known.nnodes}: the nodes must know where to meet; add --rdzv-endpoint HOST:PORT, the same "
                "on every node, HOST being one of them"
            )
        known.rdzv_backend, known.rdzv_endpoint, known.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        known.local_addr = known.local_addr or "localhost"  # a machine's own name may be unknown to its resolver
    known.rdzv_backend = known.rdzv_backend or "c10d"
    known.master_port = known.master_port or 29500  # of backend static, as in torchrun


def launch(config: LaunchConfig, recipe: str, arguments: list[str]) -> int:
    """Run a recipe in the processes of `config` on this node; returns femto's exit code. FemtoError where the nodes
    cannot meet, RunFailed where they lose each other."""
    handler = _meet(config)
    stop = Signals(config.signals_to_handle)
    with tempfile.TemporaryDirectory(prefix="femto-") as folder:
        os.environ |= {"FEMTO_EXIT_CODES": folder, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
        # -u: a worker that is killed has said all it had to. -P: nothing in the current folder passes for a module.
        words = ["-u", "-P", "-m", "femto.worker", str(os.getpid()), recipe, *arguments]
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=sys.executable,
            args=tuple(word.replace("$", "$$") for word in words),  # the agent fills in ${local_rank}
            rdzv_handler=handler,
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=config.numa_options,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
            virtual_local_rank=config.virtual_local_rank,
        )
        agent = Agent(spec, config, stop, Path(folder))
        try:
            return agent.exit_code(agent.run())
        except RendezvousTimeoutError:
            raise RunFailed(f"{config.rdzv_endpoint}: waited in vain for {config.min_nodes} nodes") from None
        except (RendezvousError, DistError) as error:
            reason = "a node of this run has ended" if isinstance(error, RendezvousError) else _first_line(error)
            raise RunFailed(f"{config.rdzv_endpoint}: {reason}") from None
        finally:
            handler.shutdown()


def _meet(config: LaunchConfig) -> RendezvousHandler:
    """Connect to where the nodes meet, once the node that is to be that place is up."""
    endpoint, nodes = config.rdzv_endpoint, (config.min_nodes, config.max_nodes)
    settings = {"read_timeout": ANSWER, **config.rdzv_configs}
    place = RendezvousParameters(config.rdzv_backend, endpoint, config.run_id, *nodes, config.local_addr, **settings)
    met: list[RendezvousHandler | Exception] = []  # one, or none after the time that it may take

    def connect() -> None:
        try:
            met.append(get_rendezvous_handler(place))
        except Exception as error:
            met.append(error)

    try:
        seconds = place.get_as_int("read_timeout")
        if config.max_nodes > 1 and config.rdzv_backend == "c10d" and "store_type" not in settings:
            print(f"waiting for {' to '.join(map(str, sorted({*nodes})))} nodes at {endpoint}", flush=True)
            _wait_for_listener(*parse_rendezvous_endpoint(endpoint, 29400), place.get_as_int("join_timeout", 600))
    except (ValueError, OSError) as error:
        met.append(error)
    else:  # in a thread, because torch waits for ever where nothing at all answers, and for read_timeout otherwise
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(seconds + 5)
    result = met[0] if met else RendezvousConnectionError()
    if isinstance(result, RendezvousConnectionError):
        raise FemtoError(
            f"--rdzv-endpoint {endpoint}: what listens there is no rendezvous, or does not answer; if another program "
            "has the port, choose another one, on all nodes"
        )
    if isinstance(result, Exception):
        raise FemtoError(f"--rdzv-endpoint {endpoint}: {getattr(result, 'strerror', None) or _first_line(result)}")
    return result


def _wait_for_listener(host: str, port: int, seconds: int) -> None:
    """Return when something listens at the endpoint, or at once where that is this machine, which will be the listener.

    torch waits read_timeout for both, the start of another node and the answer of what has the port. But nodes may
    start minutes apart, and who has the port by mistake never answers.
    """
    deadline = time.monotonic() + seconds
    while True:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.bind(address)
                    return
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        return
            with contextlib.suppress(OSError), socket.create_connection(address[:2], timeout=5):
                return
        if time.monotonic() > deadline:
            raise FemtoError(f"--rdzv-endpoint {host}:{port}: nothing listens there; start femto on that node, too")
        time.sleep(1)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
