"""Sizes of layouts and the groups that follow. Who is in which group is asked of every rank in turn, of torch's fake
process groups; that collectives run in them, and for how long they wait, of real ones."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from femtolib.errors import FemtoError
from femtolib.parallel.mesh import ParallelDims, build_meshes
from femtolib.parallel.world import World
from femtolib.sections import ParallelSection

CPU = torch.device("cpu")


def section(dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> ParallelSection:
    return ParallelSection(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)


# ── Sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "world_size", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 7, (1, 7, 1, 1)),
        ({"dp_replicate": 2}, 8, (2, 4, 1, 1)),
        ({"dp_replicate": 3, "dp_shard": 1}, 3, (3, 1, 1, 1)),
        ({"dp_replicate": 2, "cp": 2, "tp": 2}, 1024, (2, 128, 2, 2)),
        ({"tp": 8}, 8, (1, 1, 1, 8)),
    ],
)
def test_dp_shard_is_what_the_other_sizes_leave(asked, world_size, sizes):
    dims = ParallelDims.of(section(**asked), world_size)
    assert tuple(vars(dims).values()) == sizes and list(vars(dims)) == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert dims.dp == sizes[0] * sizes[1] and dims.averaged == sizes[0] * sizes[1] * sizes[2]
    assert ParallelDims.of(section(*sizes), world_size) == dims


@pytest.mark.parametrize(
    ("asked", "world_size", "numbers"),
    [
        ({"dp_replicate": 2}, 3, ["dp_replicate 2", "a multiple of 2", "there are 3"]),
        ({"dp_replicate": 4}, 2, ["dp_replicate 4", "a multiple of 4", "there are 2"]),
        ({"tp": 3}, 2, ["tp 3", "a multiple of 3", "there are 2"]),
        ({"dp_shard": 2, "tp": 2}, 2, ["dp_shard 2", "tp 2", "needs 4 processes", "there are 2"]),
        ({"dp_shard": 4}, 1, ["dp_shard 4", "needs 4 processes", "there is 1"]),
        ({"dp_shard": 1}, 2, ["needs 1 processes", "there are 2"]),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, 16, ["cp 2", "needs 8 processes", "there are 16"]),
    ],
)
def test_sizes_that_do_not_multiply_to_the_processes_are_refused_with_both_numbers(asked, world_size, numbers):
    with pytest.raises(FemtoError) as refused:
        ParallelDims.of(section(**asked), world_size)
    (fault,) = refused.value.faults
    assert fault.startswith("parallel: ") and "--nproc-per-node" in fault
    for number in numbers:
        assert number in fault


# ── Groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def members(mesh) -> list[list[int]]:
    """The global ranks of this rank's group in each dimension of `mesh`."""
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


@pytest.mark.parametrize("sizes", [(2, 4, 1, 1), (2, 2, 2, 2), (1, 2, 2, 1), (2, 1, 1, 2), (1, 1, 1, 1)])
def test_every_rank_is_in_the_groups_that_its_place_in_the_layout_says(sizes):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dims = ParallelDims(*sizes)
    places = np.arange(np.prod(sizes)).reshape(sizes)  # neighbouring ranks differ in tp first
    counting = 0
    for rank in places.flat:
        r, s, c, t = (int(place) for place in np.argwhere(places == rank)[0])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=places.size)
        try:
            with warnings.catch_warnings(action="ignore"):  # a fake group has no timeout to be set
                meshes = build_meshes(dims, "cpu", 60)
            assert members(meshes.dp) == [places[:, :, c, t].flatten().tolist()]
            assert meshes.dp.get_local_rank() == r * sizes[1] + s and meshes.dp.size() == dims.dp
            assert members(meshes.fsdp) == [places[:, s, c, t].tolist(), places[r, :, :, t].flatten().tolist()]
            assert tuple(meshes.fsdp.shape) == (sizes[0], sizes[1] * sizes[2])
            assert members(meshes.dp_cp) == [places[:, :, :, t].flatten().tolist()]
            assert members(meshes.cp) == [places[r, s, :, t].tolist()]
            assert members(meshes.tp) == [places[r, s, c, :].tolist()]
            assert meshes.is_first_of_rows == (c == t == 0)
            counting += meshes.is_first_of_rows
        finally:
            dist.destroy_process_group()
    assert counting == dims.dp  # each row is counted once


def test_the_groups_of_real_ranks_sum_over_their_members_and_wait_as_long_as_they_are_told(ranks):
    def on_a_rank() -> tuple[list[float], set[float]]:
        world = World.join(CPU, 60)
        meshes = build_meshes(ParallelDims(2, 2, 1, 1), "cpu", 45)
        groups = [group for mesh in vars(meshes).values() for group in mesh.get_all_groups()]
        sums = []
        for group in groups:
            number = torch.tensor(10.0**world.rank)
            dist.all_reduce(number, group=group)
            sums.append(number.item())
        return sums, {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}

    results = ranks(4, on_a_rank)
    assert [timeouts for _, timeouts in results] == [{45.0}] * 4
    every = 1111.0
    assert [sums for sums, _ in results] == [  # dp, the two dimensions of fsdp, dp_cp, cp, tp
        [every, 101.0, 11.0, every, 1.0, 1.0],
        [every, 1010.0, 11.0, every, 10.0, 10.0],
        [every, 101.0, 1100.0, every, 100.0, 100.0],
        [every, 1010.0, 1100.0, every, 1000.0, 1000.0],
    ]
