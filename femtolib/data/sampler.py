"""Which rows make up each optimizer step. The order of an epoch is a keyed permutation evaluated by index, so a
trillion rows start as fast as a thousand and no rank holds a list; the sampler's whole state is the number of rows
delivered. Step s takes G = global_batch_size consecutive places of the order, whatever the layout: ranks and
micro-batches only decide who takes which of them. What does not come out even is filled with empty rows, so that no
row is ever counted twice. Reading the rows is left to the loader."""

import hashlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from femtolib.errors import FemtoError

EMPTY = -1  # the `row` of a slot that nothing fills

# Four rounds leave the neighbours in an order of 64 rows visibly dependent; six do not. A domain of fewer than 8 bits
# skews small orders whatever the rounds.
_ROUNDS, _LEAST_BITS = 6, 8

# Places looked up at once: a look-up costs 0.1 ms however few they are.
_LOOKUP = 2048


class Slot(NamedTuple):
    """One place of a micro-batch: the row that fills it (EMPTY: none) and its place in the global batch, from 0."""

    row: int
    position: int


class StatefulDistributedSampler:
    """The loader's batch sampler: yields micro-batches, lists of micro_batch_size Slots, micro_batches_per_step a step.

    Iterating starts at the step that `consumed_rows` has reached and ends after `steps`; epochs follow each other, each
    in an order of its own (`shuffle`; else 0, 1, 2, …). Rank r of dp_size takes, in its micro-batch m, the places
    (m · dp_size + r) · micro_batch_size + 0, 1, … of each global batch; a place past the batch's end is an empty slot.
    `tail` says what becomes of an epoch's rows that fill no whole batch: `drop` leaves them out (rows_dropped of them),
    `pad` delivers them in a last batch with empty slots.

    It differs from torchdata's StatefulDistributedSampler in three ways: it shards by the data-parallel rank it is
    given, not by the global one (the ranks of one tensor- or context-parallel group must see the same rows); it counts
    the rows that all ranks together have delivered, not its own, so a state loads under any number of ranks; and it
    never repeats rows to come out even. The count moves when the training loop calls `advance`, once a step: workers
    that prefetch run ahead of the loop, and what they have read is not delivered yet.

    steps: optimizer steps, counted from the run's first also when a state is loaded; None: those of `epochs` passes, or
    of one. Raises FemtoError where no step would come out.
    """

    def __init__(
        self,
        rows: int,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["drop", "pad"] = "drop",
    ):
        assert global_batch_size > 0 and micro_batch_size > 0 and 0 <= dp_rank < dp_size and tail in ("drop", "pad")
        if rows < 1:
            raise FemtoError("data: no rows: there is nothing to read")
        whole_batches = rows // global_batch_size
        if tail == "drop" and whole_batches == 0:
            raise FemtoError(
                f"global_batch_size: {rows} rows make no whole batch of {global_batch_size}, and data.tail is drop: no "
                f"step would be made; set data.tail to pad, or global_batch_size to {rows} or less"
            )
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rows_per_epoch = whole_batches * global_batch_size if tail == "drop" else rows
        self.rows_dropped = rows - self.rows_per_epoch
        self.steps_per_epoch = -(-self.rows_per_epoch // global_batch_size)
        self.steps = (epochs or 1) * self.steps_per_epoch if steps is None else steps
        self.micro_batches_per_step = -(-global_batch_size // (micro_batch_size * dp_size))
        micro_batches = np.arange(self.micro_batches_per_step)[:, None]
        places = (micro_batches * dp_size + dp_rank) * micro_batch_size + np.arange(micro_batch_size)
        self._places = places.reshape(-1)  # this rank's places in every global batch, [micro-batches · size]
        self._step = 0

    def __iter__(self) -> Iterator[list[Slot]]:
        step = self._step
        while step < self.steps:
            epoch, first = divmod(step, self.steps_per_epoch)
            count = min(max(1, _LOOKUP // len(self._places)), self.steps_per_epoch - first, self.steps - step)
            rows = self._rows_of(epoch, first, count).reshape(-1, self.micro_batch_size)
            positions = np.tile(self._places, count).reshape(-1, self.micro_batch_size)
            for slots in zip(rows.tolist(), positions.tolist(), strict=True):
                yield [Slot(row, position) for row, position in zip(*slots, strict=True)]
            step += count

    def _rows_of(self, epoch: int, first: int, count: int) -> np.ndarray:
        """The rows at this rank's places in `count` steps of an epoch from `first` on, [count, places]."""
        numbers = np.arange(first, first + count)[:, None] * self.global_batch_size + self._places
        filled = (self._places < self.global_batch_size) & (numbers < self.rows_per_epoch)
        rows = np.full_like(numbers, EMPTY)
        rows[filled] = numbers[filled]
        if self.shuffle:
            rows[filled] = permute(numbers[filled], self.rows, order_key(self.seed, epoch))
        return rows

    @property
    def consumed_rows(self) -> int:
        """Rows delivered to the training loop of all ranks since the run began; empty slots are not rows."""
        return self.consumed_rows_after(self._step)

    def advance(self) -> None:
        """Counts one more step as delivered."""
        self._step += 1

    def consumed_rows_after(self, step: int) -> int:
        """`consumed_rows` after so many steps of the run."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.rows_per_epoch + steps * self.global_batch_size

    def epoch_of(self, update: int) -> int:
        """The epoch, from 0, that update `update`, from 0, belongs to."""
        return update // self.steps_per_epoch

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the rows delivered, and what they were drawn from."""
        return {"consumed_rows": self.consumed_rows, "rows": self.rows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to where the run that made `state` had come; to be called before the loader is iterated.

        Raises FemtoError, naming both values, for a state of another order, or one that ends inside a batch of ours.
        """
        saved = {name: state.get(name) for name in ("consumed_rows", "rows", "seed")}
        if not all(type(value) is int for value in saved.values()) or saved["consumed_rows"] < 0:
            raise FemtoError("data: the checkpoint's state of the sampler is not what a run has saved")
        faults = [
            f"data: the checkpoint's order was made with {name} {state[name]}, this run's with {getattr(self, name)}: "
            f"restore {name} to continue it, or start anew in another output_dir"
            for name in ("rows", "seed")
            if state[name] != getattr(self, name)
        ]
        if faults:
            raise FemtoError(*faults)
        epochs, rows = divmod(state["consumed_rows"], self.rows_per_epoch)
        step = epochs * self.steps_per_epoch + -(-rows // self.global_batch_size)
        if self.consumed_rows_after(step) != state["consumed_rows"]:
            raise FemtoError(
                f"global_batch_size: the checkpoint's {state['consumed_rows']} consumed rows are no whole number of "
                f"batches of {self.global_batch_size}; restore the global_batch_size and data.tail it was made with"
            )
        self._step = step


def order_key(seed: int, epoch: int) -> np.ndarray:
    """The round keys of one epoch's order, [rounds] uint64."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def permute(places: np.ndarray, rows: int, key: np.ndarray) -> np.ndarray:
    """The rows at `places` of a pseudo-random order of [0, rows): a bijection for every key. Any shape, int64.

    A Feistel network over the next power of two, walked until it lands below `rows` (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). key: [rounds], or [rounds, …] broadcast against `places`.
    """
    bits = max(_LEAST_BITS, (rows - 1).bit_length())
    walked = _feistel(places.astype(np.uint64), bits, key)
    while (outside := walked >= rows).any():
        walked = np.where(outside, _feistel(walked, bits, key), walked)
    return walked.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Permutes [0, 2**bits) by rounds that change the low and the high part in turn, each by a hash of the other."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask, high_mask = (np.uint64((1 << width) - 1) for width in (bits - bits // 2, bits // 2))
    high, low = values >> low_bits, values & low_mask
    for number in range(0, _ROUNDS, 2):
        low = low ^ (_mix(high + key[number]) & low_mask)
        high = high ^ (_mix(low + key[number + 1]) & high_mask)
    return high << low_bits | low


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every bit of the result hangs on every bit."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
