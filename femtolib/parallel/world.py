"""The processes of a run and what they agree on: who is who, sums that every rank knows, faults that every rank raises.

A rank that raises alone leaves the others waiting in their next collective, so what one rank may find wrong and another
not (a file, a disk) is asked through `together` or `from_first`. All of it runs over gloo on the CPU, without waiting
for the device. What shards and tensors do over the device's own groups is in mesh.py and fsdp.py.
"""

import datetime
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from femtolib.config import show
from femtolib.errors import FemtoError, RunFailed

Result = TypeVar("Result")

# How long a rank waits where another one may write or tokenize: a rank that dies meanwhile is noticed at once all the
# same, because its connections close.
_PATIENCE = datetime.timedelta(days=1)
# How long the ranks may take to come together: the slowest one's imports.
_GATHERING = datetime.timedelta(minutes=10)


class World:
    """This process among those of its run: `rank` of `size`, and `local_rank` on its node; `restarted`, by a launcher
    after a rank had failed.

    `World()` is a process alone, without a process group; `World.join` makes the group that a launcher prepared.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.local_rank = 0, 1, 0
        self.restarted = False
        self.patient: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: torch.device, timeout_seconds: int) -> "World":
        """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (of ranks without a launcher,
        FEMTO_RENDEZVOUS) name, or one of this process alone where there are none; on a GPU node, take the device of
        this local rank.

        `timeout_seconds`: how long a collective of the training loop may wait for the slowest rank. What ranks other
        than 0 print goes nowhere from here on; their errors stay on stderr. Raises FemtoError where the variables are
        not those of a launcher or a GPU is missing, RunFailed where the others do not come. The CUDA branch is
        unverified on hardware.
        """
        world = cls()
        timeout = datetime.timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            world.rank, world.size, world.local_rank = _launched()
            world.restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            if device.type == "cuda":
                if world.local_rank >= torch.cuda.device_count():
                    raise FemtoError(
                        f"rank {world.rank}: is process {world.local_rank} (from 0) of its node, which has "
                        f"{torch.cuda.device_count()} GPUs: start no more processes than GPUs (--nproc-per-node)"
                    )
                torch.cuda.set_device(world.local_rank)
            try:
                place, store = os.environ.get("FEMTO_RENDEZVOUS"), None
                if place:  # not as a URL, which would end at a # in the path
                    store = dist.FileStore(place, world.size)
                    store.set_timeout(max(timeout, _GATHERING))
                ranks = {"rank": world.rank, "world_size": world.size}
                dist.init_process_group(backend, None, max(timeout, _GATHERING), store=store, **ranks)
            except dist.DistError as error:
                place = place or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                raise RunFailed(f"did not find the other ranks at {place}: {str(error).splitlines()[0]}") from None
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        set_timeout(dist.group.WORLD, timeout_seconds)
        world.patient = world.new_group()
        if world.rank:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (for the rest of the process)
        return world

    def new_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks whose collectives wait for slow disks; None for a process alone.

        All ranks must ask for their groups in the same order.
        """
        return dist.new_group(backend="gloo", timeout=_PATIENCE) if dist.is_initialized() else None

    def sum(self, *numbers: int) -> list[int]:
        """The sums over all ranks of each of `numbers`, in one collective.

        They are added as int64, which wraps, and given back as int64: a sum modulo 2**64 is the answer modulo 2**64.
        """
        signed = torch.tensor([(number + 2**63) % 2**64 - 2**63 for number in numbers], dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(signed)
        return signed.tolist()

    def max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        largest = torch.tensor(number, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.max(int(flag)) == 1

    def together(self, function: Callable[[], Result]) -> list[Result]:
        """Call `function` on every rank; returns the results by rank, on every rank.

        A FemtoError on some ranks is raised on all, with the number of the rank where not all had the same; it is
        `agreed`, and rank 0 alone shows it. Results must be picklable.
        """
        if self.size == 1:
            return [function()]
        result, fault = None, None
        try:
            result = function()
        except FemtoError as error:
            fault = error
        outcomes: list[Any] = [None] * self.size
        mine = (result, fault and (fault.faults, fault.exit_code))
        dist.all_gather_object(outcomes, mine, group=self.patient)
        failed = {rank: fault for rank, (_, fault) in enumerate(outcomes) if fault}
        if not failed:
            results = [result for result, _ in outcomes]
            results[self.rank] = result  # not a copy: it may hold what cannot be sent, such as a lock
            return results
        ranks: dict[str, list[int]] = {}
        for rank, (faults, _) in failed.items():
            for text in faults:
                ranks.setdefault(text, []).append(rank)
        lines = [text if len(on) == self.size else f"{_ranks(on)}: {text}" for text, on in ranks.items()]
        kind = FemtoError if all(code == FemtoError.exit_code for _, code in failed.values()) else RunFailed
        raise kind(*lines, agreed=True)

    def attempt(self, function: Callable[[], Result]) -> Result:
        """What `function` returns on this rank; a FemtoError on any rank is raised on all, as in `together`."""
        kept: list[Result] = []
        self.together(lambda: kept.append(function()))
        return kept[0]

    def from_first(self, function: Callable[[], Result]) -> Result:
        """What `function` returns on rank 0, the only one that calls it; a FemtoError there is raised on all ranks."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]

    def check_same(self, values: dict[str, Any]) -> None:
        """Check that every rank has the same under each name; raises FemtoError with the values and whose they are."""
        by_rank = self.together(lambda: {name: show(value) for name, value in values.items()})
        faults = []
        for name in values:
            ranks: dict[str, list[int]] = {}
            for rank, theirs in enumerate(by_rank):
                ranks.setdefault(theirs[name], []).append(rank)
            if len(ranks) > 1:
                shown = "; ".join(f"{value} on {_ranks(on)}" for value, on in ranks.items())
                faults.append(f"{name} is not the same on all ranks: {shown}")
        if faults:
            raise FemtoError(*faults, agreed=True)

    def barrier(self) -> None:
        """Wait until every rank has come here, however long one of them writes."""
        if self.size > 1:
            dist.barrier(group=self.patient)

    def close(self) -> None:
        """End the process group once every rank is done with it."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sharded tensor (a DTensor) this rank's shard, of any other the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # importing DTensor takes a second


def set_timeout(group: dist.ProcessGroup, seconds: int) -> None:
    """How long a collective of `group` waits for the slowest rank. (Private in torch 2.13.)"""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


# Who waits for work in the background gets gloo's words without the place in gloo that said them.
_OF_A_GROUP = "gloo|NCCL|c10d|ProcessGroup|pair closure|by peer"


def lost_contact(error: BaseException) -> str | None:
    """What to tell of an error that only says that another rank has gone or is late; None for any other error."""
    if not isinstance(error, RuntimeError) or not dist.is_initialized():
        return None
    if not isinstance(error, dist.DistError) and not re.search(_OF_A_GROUP, str(error)):
        return None
    if re.search("(?i)timed out|timeout", str(error)):
        return "waited longer than process_group_timeout allows for another rank, which hangs or is slow"
    return "lost contact with another rank, which has ended"


def leave_process_group() -> None:
    """For who runs several recipes in one process. The group of several ranks ends with the process: to take leave of
    ranks that have failed is to wait for them."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def _launched() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK. FemtoError if they, or where to meet, are not what a launcher sets: what a shell
    has kept from an earlier run would be waited for in vain."""
    variables = {"LOCAL_RANK": "0", **os.environ}
    if "FEMTO_RENDEZVOUS" in variables:  # they meet at a file
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    wrong = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT") if not variables.get(name, "").isdecimal()
    ]
    try:
        socket.getaddrinfo(variables["MASTER_ADDR"], 0)
    except (KeyError, OSError):
        wrong.append("MASTER_ADDR")
    if "MASTER_PORT" not in wrong and not int(variables["MASTER_PORT"]) < 2**16:
        wrong.append("MASTER_PORT")
    if not wrong and not int(variables["RANK"]) < int(variables["WORLD_SIZE"]):
        wrong = ["RANK", "WORLD_SIZE"]
    if wrong:
        shown = " and ".join(
            f"{name}={variables[name]}" if name in variables else f"{name} is not set" for name in wrong
        )
        raise FemtoError(f"{shown}: not what a launcher sets; `unset RANK` to run as one process")
    return int(variables["RANK"]), int(variables["WORLD_SIZE"]), int(variables["LOCAL_RANK"])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
