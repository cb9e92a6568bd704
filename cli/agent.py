"""torchrun's agent of one node, which starts its workers, watches them and starts them again, with other ways to end.

- A signal to it goes to the workers as SIGTERM, and it watches on. They agree to stop, save and end, on all nodes,
  whichever node had the signal. (torchrun's would leave at once, and those of other nodes wait for it.)
- The exit code is femto's. torchrun tells success from failure only: a worker leaves its own code in a file. One that
  could not say why it ended (killed, crashed) gets a line.
- No node waits minutes for one that is gone.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from femtolib.command import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER
from femtolib.errors import FemtoError
from femtolib.stop import STOPPING, withheld_stops

# Seconds from a request to stop until workers are killed, unless --shutdown-timeout says otherwise. Meant for one that
# hangs, not for one that writes: the 840 GB of a 70B model take a quarter of an hour at 1 GB/s.
GRACE = 3600
# Seconds that workers have to notice that another node is gone. In training they see it at once, by their connections.
NOTICE = 20
# Seconds that a node which is done waits for the others, which are done at the same time unless they have failed.
OTHERS = 30


class Signals:
    """Signals to the launcher: KeyboardInterrupt while there are no workers; then the time of the first in `since`, and
    `at_once` after another Ctrl-C a second or more later."""

    def __init__(self, names: str) -> None:
        self.have_workers, self.since, self.at_once = False, None, False
        for name in map(str.strip, names.split(",")):
            if name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # started by nohup
                continue
            try:
                signal.signal(signal.Signals[name], self._on_signal)
            except (KeyError, OSError):
                raise FemtoError(f"--signals-to-handle: {name} is no signal that can be handled") from None

    def _on_signal(self, number: int, frame: object) -> None:
        if not self.have_workers:
            raise KeyboardInterrupt
        if self.since is None:
            self.since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since >= 1:
            self.at_once = True


class Agent(LocalElasticAgent):
    """torchrun's agent of one node. It overrides what torch's documentation names for that, and of what is private uses
    `_pcontext`, `_remaining_restarts` and, of the c10d rendezvous, `_state_holder`."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, stop: Signals, folder: Path):
        prefix = config.log_line_prefix_template
        super().__init__(spec, config.logs_specs, exit_barrier_timeout=OTHERS, log_line_prefix_template=prefix)
        self._stop, self._folder = stop, folder
        self._grace = GRACE if config.shutdown_timeout is None else config.shutdown_timeout
        self._starts = 0
        self._told_to_stop = False
        self._lost_since: float | None = None
        self._killed: str | None = None  # why

    def exit_code(self, result: RunResult | None) -> int:
        """femto's exit code for how the workers ended, after the line that they could not say themselves."""
        if result is None:  # of more nodes than are wanted, this one was not needed
            return EXIT_DONE
        codes = self._codes()
        if result.state == WorkerState.SUCCEEDED or {w.global_rank for w in self._worker_group.workers} <= set(codes):
            return next((code for code in (EXIT_USER, EXIT_FAILED, EXIT_STOPPED) if code in codes.values()), EXIT_DONE)
        if cause := self._unsaid(result):
            _say(f"error: {cause}")
        return EXIT_USER if EXIT_USER in codes.values() else EXIT_FAILED

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._stop.have_workers = False
        # torch 2.13 gives every start of the workers the store of the first: they find the addresses of dead ones, and
        # a node that comes later waits for ever. So it is told to share none, and each start gets one of its own.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        super()._rendezvous(worker_group)
        del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
        if worker_group.spec.rdzv_handler.get_backend() == "c10d":
            node, store = worker_group.group_rank, worker_group.store
            if node == 0:
                self._meeting = TCPStore(worker_group.master_addr, 0, is_master=True, wait_for_workers=False)
                store.set("femto/port", str(self._meeting.port))
            worker_group.master_port = int(store.get("femto/port"))
            # One node's restart is the other's change of members, which torch does not count: so they count together.
            store.set(f"femto/starts/{node}", str(self._starts))
            nodes = range(worker_group.group_world_size)
            starts = max(int(store.get(f"femto/starts/{node}")) for node in nodes)
            os.environ["FEMTO_RESTART_COUNT"] = str(starts)
            self._starts = starts + 1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        for path in self._folder.iterdir():
            path.unlink()
        self._lost_since = None
        self._stop.have_workers = True
        with withheld_stops():
            return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._grace)  # if they live, a node has come to join them: they save, and start anew

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.since is not None:
            if not self._told_to_stop:
                self._told_to_stop = True
                _say(STOPPING)
                self._signal_workers(signal.SIGTERM)
            elif self._stop.at_once:
                self._kill_workers("interrupted; what was not saved before is lost")
            elif time.monotonic() - self._stop.since > self._grace:
                self._kill_workers(f"not ended {self._grace} s after the request to stop (--shutdown-timeout): killed")
        elif self._lost_a_node():
            self._lost_since = self._lost_since or time.monotonic()
            if time.monotonic() - self._lost_since > NOTICE:
                self._kill_workers("another node of this run has ended")
        result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and self._remaining_restarts:
            if self._stop.since is not None or EXIT_USER in self._codes().values():
                self._remaining_restarts = 0  # a stop was asked for, or the next start would meet the same fault
            else:
                _say(f"note: {self._unsaid(result) or 'a rank failed'}; starting all again")
        return result

    def _signal_workers(self, number: signal.Signals) -> None:
        for worker in self._pcontext.subprocess_handlers.values():
            worker.proc.send_signal(number)

    def _kill_workers(self, reason: str) -> None:
        self._killed = reason
        self._signal_workers(signal.SIGKILL)

    def _lost_a_node(self) -> bool:
        """Whether a node has closed the rendezvous, or was removed from it because its heartbeats are missing."""
        holder = getattr(self._worker_group.spec.rdzv_handler, "_state_holder", None)
        members = self._worker_group.group_world_size
        return holder is not None and (holder.state.closed or len(holder.state.participants) < members)

    def _codes(self) -> dict[int, int]:
        """The exit codes that workers left, by rank: not one that was killed, or ended because another one did."""
        return {int(path.name): int(path.read_text() or EXIT_FAILED) for path in self._folder.iterdir()}

    def _unsaid(self, result: RunResult) -> str | None:
        """Why the workers ended, where none of them could say it."""
        if self._killed or not result.failures:
            return self._killed
        codes = self._codes()
        first = next(iter(result.failures.values()))
        for rank, failure in result.failures.items():
            # Who lost another rank ends with 1. Who ends later, or by SIGTERM, does so because the agent makes it.
            told = failure.timestamp > first.timestamp + 1 or (failure.exitcode == -signal.SIGTERM and failure != first)
            if rank in codes or failure.exitcode == EXIT_FAILED or told:
                continue
            if failure.exitcode == -signal.SIGTERM and self._told_to_stop:
                return "stopped before there was anything to save"
            if failure.exitcode == -signal.SIGKILL:
                return f"rank {rank} was killed by SIGKILL (was memory short? the system's log tells)"
            if failure.exitcode < 0:
                return f"rank {rank} was killed by {failure.signal_name()}"
            return f"rank {rank} ended with exit code {failure.exitcode}"
        return None


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # who read it may be gone: a Ctrl-C also ends the `tee` behind a pipe
        os.write(2, f"{line}\n".encode())
