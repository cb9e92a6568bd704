"""The order of rows: uniform, the same in every layout, and continued wherever it was left."""

import itertools
import time

import numpy as np
import pytest

from femtolib.data.sampler import EMPTY, StatefulDistributedSampler, order_key, permute
from femtolib.errors import FemtoError


def _sampler(rows, global_batch_size, micro_batch_size=1, **settings) -> StatefulDistributedSampler:
    return StatefulDistributedSampler(
        rows, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, **settings
    )


def _steps(sampler: StatefulDistributedSampler) -> list[list[list]]:
    """What the sampler yields, grouped by step: [step][micro-batch][slot]."""
    micro_batches = list(sampler)
    assert len(micro_batches) % sampler.micro_batches_per_step == 0
    size = sampler.micro_batches_per_step
    return [micro_batches[first : first + size] for first in range(0, len(micro_batches), size)]


def _filled(steps) -> list[set]:
    """The (row, position) pairs of each step, empty slots left out; a pair must not come twice."""
    pairs = [[slot for micro_batch in step for slot in micro_batch if slot.row != EMPTY] for step in steps]
    assert all(len(set(step)) == len(step) for step in pairs)
    return [set(step) for step in pairs]


def _rows(sampler: StatefulDistributedSampler) -> list[list[int]]:
    """The rows of each step by their place in the global batch; one rank."""
    return [[row for row, _ in sorted(step, key=lambda slot: slot.position)] for step in _filled(_steps(sampler))]


# ── The permutation ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_order_is_a_bijection():
    for rows in range(1, 2001):
        order = permute(np.arange(rows), rows, order_key(rows, 3))
        assert np.array_equal(np.sort(order), np.arange(rows)), rows


@pytest.mark.parametrize(("rows", "keys", "tolerance"), [(5, 4000, 1.0), (17, 6000, 0.35), (64, 6000, 0.1)])
def test_orders_are_uniform_in_places_and_neighbours(rows, keys, tolerance):
    """χ² a degree of freedom is 1 for uniform orders; 4 rounds give 2 at 64 rows, a domain of 5 bits 14 at 5 rows."""
    key = np.stack([order_key(1, epoch) for epoch in range(keys)], axis=1)[:, :, None]  # [rounds, keys, 1]
    orders = permute(np.broadcast_to(np.arange(rows), (keys, rows)), rows, key)
    places = np.zeros((rows, rows))
    np.add.at(places, (np.arange(rows), orders), 1)
    expected = keys / rows
    assert abs(((places - expected) ** 2 / expected).sum() / (rows - 1) ** 2 - 1) < tolerance
    neighbours = np.zeros((rows, rows))
    np.add.at(neighbours, (orders[:, :-1], orders[:, 1:]), 1)
    neighbours = neighbours[~np.eye(rows, dtype=bool)]
    expected = keys / rows
    assert abs(((neighbours - expected) ** 2 / expected).sum() / (len(neighbours) - 1) - 1) < tolerance


def test_orders_of_many_rows_look_random():
    rows = 100_000
    orders = [permute(np.arange(rows), rows, order_key(seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.015
        assert (order == other).sum() < 10
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015


def test_a_trillion_rows_start_at_once():
    rows = 10**12
    built, found = [], []
    for _ in range(5):  # the best of them: other load on the machine can only add to the others
        start = time.process_time()
        sampler = _sampler(rows, 1000, 1000, steps=10**9)
        built.append(time.process_time() - start)
        first = next(iter(sampler))
        found.append(time.process_time() - start - built[-1])
    assert min(built) < 0.01 and min(found) < 0.1, (built, found)
    assert len({row for row, _ in first}) == 1000 and all(0 <= row < rows for row, _ in first)


def test_the_order_is_the_published_one():
    """A change of it would silently give every unfinished run other batches on resume."""
    assert permute(np.arange(10), 10, order_key(0, 0)).tolist() == [8, 9, 7, 2, 3, 6, 1, 4, 0, 5]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, order_key(7, 2)).tolist() == [
        98372739059,
        921801224335,
        864773838335,
    ]


# ── Epochs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_epoch_and_seed_has_an_order_of_its_own():  # pytorch#31771
    def epochs(seed):
        rows = [row for (row,) in _rows(_sampler(16, 1, seed=seed, epochs=3))]
        return [tuple(rows[first : first + 16]) for first in (0, 16, 32)]

    first, again, other = epochs(7), epochs(7), epochs(8)
    assert len({*first, *other}) == 6
    assert first == again
    assert all(sorted(epoch) == list(range(16)) for epoch in first + other)


def test_two_ranks_cover_each_epoch_once():
    ranks = [_steps(_sampler(16, 4, seed=7, epochs=3, dp_rank=rank, dp_size=2)) for rank in range(2)]
    for epoch in range(3):
        rows = [slot.row for steps in ranks for step in steps[epoch * 4 : epoch * 4 + 4] for (slot,) in step]
        assert sorted(rows) == list(range(16))


def test_a_padded_tail_counts_its_own_rows_only():  # transformers#39659
    sampler = _sampler(5, 3, epochs=2, tail="pad", shuffle=False)
    assert _rows(sampler) == [[0, 1, 2], [3, 4]] * 2
    assert (sampler.steps_per_epoch, sampler.rows_per_epoch, sampler.rows_dropped, sampler.steps) == (2, 5, 0, 4)
    assert [sampler.consumed_rows_after(step) for step in range(6)] == [0, 3, 5, 8, 10, 13]
    assert [sampler.epoch_of(update) for update in range(4)] == [0, 0, 1, 1]
    assert _rows(_sampler(3, 4, tail="pad", shuffle=False)) == [[0, 1, 2]]


def test_a_dropped_tail_is_counted():
    sampler = _sampler(5, 3, epochs=2, shuffle=False)
    assert _rows(sampler) == [[0, 1, 2]] * 2
    assert (sampler.steps_per_epoch, sampler.rows_per_epoch, sampler.rows_dropped, sampler.steps) == (1, 3, 2, 2)
    assert [sampler.consumed_rows_after(step) for step in range(4)] == [0, 3, 6, 9]


def test_other_rows_are_dropped_in_each_epoch():
    rows = _rows(_sampler(5, 3, epochs=20))
    assert {row for step in rows for row in step} == set(range(5))


def test_no_step_at_all_is_refused():  # transformers#14309
    with pytest.raises(FemtoError, match="3 rows make no whole batch of 4"):
        _sampler(3, 4)
    with pytest.raises(FemtoError, match="no rows"):
        _sampler(0, 4, tail="pad")


def test_steps_end_where_they_are_told():
    assert len(_rows(_sampler(100, 3, steps=70))) == 70
    assert len(_rows(_sampler(10, 1, steps=500))) == 500
    assert _rows(_sampler(100, 3, steps=0)) == []
    assert len(_rows(_sampler(100, 3))) == 33


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_every_layout_takes_the_same_rows_at_the_same_places(tail):
    settings = {"epochs": 2, "tail": tail, "seed": 5}
    reference = _filled(_steps(_sampler(37, 10, 10, **settings)))
    assert all({position for _, position in step} == set(range(len(step))) for step in reference)
    for dp_size, micro_batch_size in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 7, 16)):
        ranks = [
            _steps(_sampler(37, 10, micro_batch_size, dp_rank=rank, dp_size=dp_size, **settings))
            for rank in range(dp_size)
        ]
        assert {len(micro_batch) for steps in ranks for step in steps for micro_batch in step} == {micro_batch_size}
        for step, expected in enumerate(reference):
            parts = [_filled(steps)[step] for steps in ranks]
            assert set.union(*parts) == expected
            assert sum(map(len, parts)) == len(expected)


def test_ranks_take_turns_by_micro_batch():
    first = [_steps(_sampler(8, 8, 2, shuffle=False, dp_rank=rank, dp_size=2))[0] for rank in range(2)]
    assert [[slot.row for slot in micro_batch] for micro_batch in first[0]] == [[0, 1], [4, 5]]
    assert [[slot.row for slot in micro_batch] for micro_batch in first[1]] == [[2, 3], [6, 7]]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_validation_counts_every_row_once(dp_size):  # pytorch#25162
    for global_batch_size, micro_batch_size in itertools.product((1, 4, 10, 16), (1, 2, 3)):
        ranks = [
            _sampler(10, global_batch_size, micro_batch_size, shuffle=False, tail="pad", dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        rows = [slot.row for sampler in ranks for micro_batch in sampler for slot in micro_batch if slot.row != EMPTY]
        assert sorted(rows) == list(range(10))
        assert len({len(list(sampler)) for sampler in ranks}) == 1  # or a collective would hang


# ── Resume ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("rows", "global_batch_size", "tail"), [(64, 1, "drop"), (37, 10, "drop"), (37, 10, "pad")])
def test_resume_continues_the_order_from_every_step(rows, global_batch_size, tail):  # accelerate#4233, data#1437
    settings = {"seed": 3, "tail": tail}
    steps = _sampler(rows, global_batch_size, **settings).steps_per_epoch * 5 // 2
    whole = _rows(_sampler(rows, global_batch_size, steps=steps, **settings))
    first = _sampler(rows, global_batch_size, steps=steps, **settings)
    for step in range(steps + 1):
        state = first.state_dict()
        assert state == {"consumed_rows": sum(map(len, whole[:step])), "rows": rows, "seed": 3}
        second = _sampler(rows, global_batch_size, steps=steps, **settings)
        second.load_state_dict(state)
        assert _rows(second) == whole[step:]
        assert second.state_dict() == state
        first.advance()


def test_resume_at_an_epochs_end_reads_the_epochs_that_are_left():  # tinker-cookbook#448
    four, five = (_rows(_sampler(10, 1, epochs=epochs)) for epochs in (4, 5))
    for epochs, consumed, left in ((4, 20, four[20:]), (4, 40, []), (5, 40, five[40:])):
        resumed = _sampler(10, 1, epochs=epochs)
        resumed.load_state_dict({"consumed_rows": consumed, "rows": 10, "seed": 0})
        assert _rows(resumed) == left
    assert len(five[40:]) == 10


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3)])
def test_resume_on_another_number_of_ranks_reads_the_complement(before, after):  # torchtitan#816
    def ranks(dp_size):
        return [_sampler(48, 12, 3, epochs=2, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]

    whole = _filled(_steps(_sampler(48, 12, 3, epochs=2)))
    stopped, resumed = ranks(before), ranks(after)
    for sampler in stopped:
        for _ in range(3):
            sampler.advance()
    for sampler in resumed:
        sampler.load_state_dict(stopped[-1].state_dict())
    assert all(sampler.state_dict() == stopped[0].state_dict() for sampler in stopped)
    parts = [_filled(_steps(sampler)) for sampler in resumed]
    assert [set.union(*step) for step in zip(*parts, strict=True)] == whole[3:]


def test_a_state_of_another_order_is_refused_with_both_values():
    state = {"consumed_rows": 12, "rows": 48, "seed": 4}
    with pytest.raises(FemtoError) as error:
        _sampler(50, 12, seed=9).load_state_dict(state)
    rows, seed = error.value.faults
    assert "rows 48" in rows and "50" in rows and "seed 4" in seed and "9" in seed
    with pytest.raises(FemtoError, match="12 consumed rows are no whole number of batches of 5"):
        _sampler(48, 5, seed=4).load_state_dict(state)
    for change in {"rows": "48"}, {"seed": None}, {"consumed_rows": -12}, {"consumed_rows": True}:
        with pytest.raises(FemtoError, match="not what a run has saved"):
            _sampler(48, 12, seed=4).load_state_dict(state | change)


def test_rows_that_were_read_ahead_are_not_delivered():
    sampler = _sampler(64, 4, steps=100)
    micro_batches = iter(sampler)
    for _ in range(50):
        next(micro_batches)
    assert sampler.state_dict()["consumed_rows"] == 0
    sampler.advance()
    assert sampler.state_dict()["consumed_rows"] == 4
