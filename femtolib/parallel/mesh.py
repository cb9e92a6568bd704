"""How the processes of a run are laid out: four dimensions whose product is their number, and the groups that follow.

dp_replicate: copies of the model that see different rows. dp_shard: ranks over which one copy's parameters lie, each
with rows of its own. cp: ranks that share a row's tokens. tp: ranks that share each matrix. Neighbouring ranks differ
in tp first, then cp, dp_shard and dp_replicate: what talks most lies closest. All four are always there, with a size of
1 where they are not used, so that no recipe needs a branch.
"""

import logging
from dataclasses import asdict, dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from femtolib.errors import FemtoError
from femtolib.parallel.world import set_timeout
from femtolib.sections import ParallelSection


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the four dimensions."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @classmethod
    def of(cls, section: ParallelSection, world_size: int) -> "ParallelDims":
        """The sizes that a config asks for, `dp_shard: -1` being whatever the others leave of `world_size` processes.

        Raises FemtoError, naming both numbers, where they do not multiply to it.
        """
        others = section.dp_replicate * section.cp * section.tp
        dp_shard = world_size // others if section.dp_shard == -1 else section.dp_shard
        if others * dp_shard != world_size:
            asked = {"dp_replicate": section.dp_replicate, "dp_shard": section.dp_shard}
            asked |= {"cp": section.cp, "tp": section.tp}
            shown = " · ".join(f"{name} {size}" for name, size in asked.items() if size != 1) or "dp_replicate 1"
            wanted = f"a multiple of {others}" if section.dp_shard == -1 else str(others * dp_shard)
            raise FemtoError(
                f"parallel: {shown} needs {wanted} processes, and there {'is' if world_size == 1 else 'are'} "
                f"{world_size}; change the sizes, or --nproc-per-node and --nnodes (dp_shard: -1 takes what is left)"
            )
        return cls(section.dp_replicate, dp_shard, section.cp, section.tp)

    @property
    def dp(self) -> int:
        """How many ranks, or groups of cp·tp ranks, see rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def averaged(self) -> int:
        """Over how many ranks the gradient reduction takes the mean: the loss is multiplied by it to get a sum."""
        return self.dp_replicate * self.dp_shard * self.cp

    def __str__(self) -> str:
        return f"{prod(asdict(self).values())} = " + " × ".join(f"{name} {size}" for name, size in asdict(self).items())


@dataclass(frozen=True)
class Meshes:
    """The groups of ranks of one layout, each as this rank sees it.

    dp: who reads which rows. fsdp, of two dimensions (dp_replicate, dp_shard_cp): where parameters lie; cp is in it,
    because ranks that share a row hold the same parameters and may as well shard them. dp_cp: over whom a loss is
    summed.
    """

    dp: DeviceMesh
    fsdp: DeviceMesh
    dp_cp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh

    @property
    def is_first_of_rows(self) -> bool:
        """Whether this rank is the one of those with the same rows (a cp × tp group) that counts them."""
        return self.cp.get_local_rank() == 0 and self.tp.get_local_rank() == 0


def build_meshes(dims: ParallelDims, device_type: str, timeout_seconds: int) -> Meshes:
    """Make all groups of a layout; every rank must call it. Their collectives wait for `timeout_seconds` at most.

    Flattening and joining are private in torch 2.13, and are used here alone.
    """
    # It warns on every rank, at the first of some sums and gathers, that a merged mesh would save it a call.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sizes = asdict(dims)
    world = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    assert world.size() == prod(sizes.values())
    dp_shard_cp = world["dp_shard", "cp"]._flatten("dp_shard_cp")
    meshes = Meshes(
        dp=world["dp_replicate", "dp_shard"]._flatten("dp"),
        fsdp=DeviceMesh._concatenate([world["dp_replicate"], dp_shard_cp]),
        dp_cp=world["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
        cp=world["cp"],
        tp=world["tp"],
    )
    for mesh in (world, *vars(meshes).values()):  # else they would wait for torch's default, 10 to 30 minutes
        for group in mesh.get_all_groups():
            set_timeout(group, timeout_seconds)
    return meshes
