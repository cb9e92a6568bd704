"""Learning rates against the published formulas, at every border."""

import itertools
import math

import pytest

from femtolib.schedule import learning_rate, scale_learning_rate


def rates(total: int, **keys) -> list[float]:
    return [learning_rate(update, total=total, **{"lr": 1e-3, "name": "cosine", **keys}) for update in range(total)]


def test_the_last_of_ten_updates_is_at_seven_eighths_of_the_cosine():
    # speculators#1104: the horizon came from epochs, and the cosine never reached its end.
    last = rates(10, warmup_steps=2)[-1]
    assert last == pytest.approx(3.806e-05, rel=1e-3)
    assert last == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)) * 1e-3, rel=1e-15)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_the_warmup_rises_from_the_first_update_to_the_peak_at_its_last(name):
    found = rates(12, name=name, warmup_steps=4, decay_steps=3 if name == "wsd" else None, lr=0.5)
    assert found[:4] == [0.125, 0.25, 0.375, 0.5]
    assert found[4] == 0.5  # progress 0
    assert max(found) == 0.5


def test_twelve_updates_of_each_schedule():
    # accelerate#963: warmup and decay ran several times too fast.
    up = [0.25, 0.5, 0.75, 1.0]
    cosine = [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    linear = [1 - k / 8 for k in range(8)]
    for name, rest, keys in (
        ("cosine", cosine, {}),
        ("linear", linear, {}),
        ("constant", [1.0] * 8, {}),
        ("wsd", [1.0] * 5 + [1.0, 2 / 3, 1 / 3], {"decay_steps": 3}),
    ):
        found = rates(12, name=name, warmup_steps=4, lr=1.0, **keys)
        assert found == pytest.approx([*up, *rest], rel=1e-15, abs=1e-16), name


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_rate_falls_towards_its_floor_and_never_below(name, ratio):
    keys = {"name": name, "min_lr_ratio": ratio, "decay_steps": 1000 if name == "wsd" else None, "lr": 2.0}
    found = rates(1000, **keys)
    assert found[0] == 2.0
    assert all(earlier >= later for earlier, later in itertools.pairwise(found))
    assert 2.0 * ratio <= found[-1] <= 2.0 * ratio + 2.0 * 2e-3
    assert learning_rate(1000, total=1000, **keys) == pytest.approx(2.0 * ratio, abs=1e-15)


def test_no_warmup_starts_at_the_peak():
    assert rates(4, name="linear", lr=1.0) == [1.0, 0.75, 0.5, 0.25]


def test_a_warmup_longer_than_the_run_never_reaches_the_peak():
    assert rates(3, warmup_steps=10, lr=1.0) == pytest.approx([0.1, 0.2, 0.3])


def test_a_warmup_as_long_as_the_run_ends_at_the_peak():
    for name in ("cosine", "linear", "constant"):
        assert rates(4, name=name, warmup_steps=4, lr=1.0) == [0.25, 0.5, 0.75, 1.0]


def test_a_decay_longer_than_what_follows_the_warmup_begins_after_it():
    assert rates(6, name="wsd", warmup_steps=2, decay_steps=100, lr=1.0) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_one_update_is_made_at_the_peak():
    for name in ("cosine", "linear", "constant", "wsd"):
        assert rates(1, name=name, lr=0.5, decay_steps=1) == [0.5]


def test_the_rate_of_an_update_knows_nothing_of_what_came_before():
    total = 97
    forwards = rates(total, warmup_steps=13, min_lr_ratio=0.1)
    backwards = [
        learning_rate(update, total=total, lr=1e-3, name="cosine", warmup_steps=13, min_lr_ratio=0.1)
        for update in reversed(range(total))
    ]
    assert forwards == backwards[::-1]


# ── The rate and the batch ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_rate_grows_and_shrinks_with_the_batch_as_in_goyal_et_al():
    # Section 2.1 and table 2: 0.1 for 256 images, 0.2 for 512, 3.2 for 8,192.
    for batch_size, rate in ((256, 0.1), (512, 0.2), (8192, 3.2), (64, 0.025), (1, 0.1 / 256)):
        assert scale_learning_rate(0.1, batch_size, 256) == pytest.approx(rate, rel=1e-15)


@pytest.mark.parametrize("batch_size", [1, 7, 8192])
def test_without_a_reference_or_at_it_the_rate_is_the_configs_own(batch_size):
    for lr in (3e-4, 1e-3, 0.1, 0.3):
        assert scale_learning_rate(lr, batch_size, None) == lr
        assert scale_learning_rate(lr, batch_size, batch_size) == pytest.approx(lr, rel=3e-16)


def test_the_whole_schedule_is_scaled_with_its_peak():
    keys = {"warmup_steps": 4, "min_lr_ratio": 0.1}
    scaled = rates(12, lr=scale_learning_rate(1e-3, 32, 8), **keys)
    assert scaled == pytest.approx([4 * rate for rate in rates(12, lr=1e-3, **keys)], rel=1e-15)
