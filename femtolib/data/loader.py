"""Rows to batches: the one place where inputs and labels are made, and the loader that prepares them ahead. A batch
carries what the loop needs to know of it before the first backward (trained tokens, digest), counted where it is made,
in a worker if there are any. Which rows come is the sampler's business."""

import atexit
import functools
import hashlib
import multiprocessing
import signal
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from femtolib.data.sampler import EMPTY, Slot, StatefulDistributedSampler
from femtolib.data.token_dataset import Row, TokenDataset
from femtolib.errors import FemtoError
from femtolib.loss import NOT_TRAINED
from femtolib.stop import end_with_parent


@dataclass
class Batch:
    """One micro-batch. The tensors are [rows, sequence] int64.

    labels: the token after each input, -100 where it is not trained. position_ids, document_ids (0, 1, … in each row,
    -1 on padding): only with document_mask. rows: the data set's indexes, empty rows left out. trained_tokens: labels
    that are not -100. digest: the sum modulo 2**64 of the rows' digests (`row_digest`), empty rows left out.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    document_ids: torch.Tensor | None
    rows: list[int]
    trained_tokens: int
    digest: int

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from where `to` does not wait. The loader calls it."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; copied while the host goes on, where the memory is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function) -> "Batch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})


def collate(
    rows: Sequence[Row | None], slots: Sequence[Slot], *, seq_len: int, eos_id: int, document_mask: bool
) -> Batch:
    """Makes a batch of rows; `slots` says which and where in the global batch they are, None is an empty row.

    The input at t has as its label the row's next token; with document_mask, only within a document. Whatever lies past
    the row's end is padding, known by its place and never by its id: EOS as input, label -100.
    """
    shape = (len(rows), seq_len)
    input_ids = np.full(shape, eos_id, np.int64)
    labels = np.full(shape, NOT_TRAINED, np.int64)
    document_ids = np.full(shape, -1, np.int64)
    digest = 0
    for place, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        if row is None:
            continue
        inputs = row.tokens[:seq_len]
        targets = row.tokens[1:]
        input_ids[place, : len(inputs)] = inputs
        labels[place, : len(targets)] = targets
        if document_mask:
            document_ids[place, : len(inputs)] = row.document_ids[:seq_len]
            labels[place, : len(targets)][np.diff(row.document_ids) != 0] = NOT_TRAINED
        documents = document_ids[place] if document_mask else None
        digest += row_digest(slot.position, input_ids[place], labels[place], documents)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(_positions(document_ids)) if document_mask else None,
        document_ids=torch.from_numpy(document_ids) if document_mask else None,
        rows=[slot.row for slot in slots if slot.row != EMPTY],
        trained_tokens=int((labels != NOT_TRAINED).sum()),
        digest=digest % 2**64,
    )


def row_digest(position: int, input_ids: np.ndarray, labels: np.ndarray, document_ids: np.ndarray | None) -> int:
    """What one row adds to batch_digest: the first 8 bytes of the SHA-256 of its place in the global batch (int64),
    inputs, labels and, where masked, document ids (int32 each), all little-endian. The arrays are [sequence]."""
    sha256 = hashlib.sha256(position.to_bytes(8, "little"))
    for values in (input_ids, labels) if document_ids is None else (input_ids, labels, document_ids):
        sha256.update(values.astype("<i4"))
    return int.from_bytes(sha256.digest()[:8], "little")


def make_loader(
    dataset: TokenDataset,
    sampler: StatefulDistributedSampler,
    *,
    document_mask: bool,
    num_workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> StatefulDataLoader:
    """A loader of Batches, micro-batch by micro-batch, in the sampler's order whatever num_workers is.

    num_workers: processes that read ahead, `prefetch` micro-batches each; 0: read in this one when asked. Load the
    sampler's state before iterating: an iterator keeps what it began with (and so resume by the sampler's state, not by
    the loader's, which knows no other num_workers). A FemtoError in a worker is raised here as it is. Workers ignore
    SIGTERM and SIGINT and end with the iterator, or with this process.
    """
    with warnings.catch_warnings():
        # By torch 2.13; torchdata 0.11 calls it whenever it makes a loader.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return _Loader(
            _SlotRows(dataset),
            batch_sampler=sampler,
            collate_fn=functools.partial(
                _collate_or_fault, seq_len=dataset.seq_len, eos_id=dataset.eos_id, document_mask=document_mask
            ),
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            worker_init_fn=_die_with_parent,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # an iterator draws a seed: not from the one that a recipe may draw from
            # Under spawn and forkserver, a worker does not inherit the signals blocked at its birth.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            snapshot_every_n_steps=None,  # of the data set's own state: ours has none
        )


class _SlotRows(Dataset):
    """Looks slots up in a data set, or hands over the fault that kept it from it."""

    def __init__(self, dataset: TokenDataset):
        self.dataset = dataset

    def __getitems__(self, slots: list[Slot]) -> tuple[list[Row | None], list[Slot]] | FemtoError:
        try:
            return [None if slot.row == EMPTY else self.dataset[slot.row] for slot in slots], slots
        except FemtoError as fault:
            return fault


def _collate_or_fault(fetched: tuple[list[Row | None], list[Slot]] | FemtoError, **settings) -> Batch | FemtoError:
    return fetched if isinstance(fetched, FemtoError) else collate(*fetched, **settings)


class _Loader(StatefulDataLoader):
    """torchdata's loader, with workers that outlive a signal to the whole process group but not their parent."""

    def __iter__(self) -> Iterator[Batch]:
        # A stop (Ctrl-C, a launcher's SIGTERM) goes to every process of the group. The loop finishes its step first, so
        # its workers must still be there: they are born with both signals blocked.
        others = multiprocessing.active_children()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            batches = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _workers.update(child for child in multiprocessing.active_children() if child not in others)
        return _raise_faults(batches)


def _raise_faults(batches: Iterator[Batch | FemtoError]) -> Iterator[Batch]:
    """Raises a fault that a worker met. (Raised there, it would arrive with its traceback inside the message.)"""
    for batch in batches:
        if isinstance(batch, FemtoError):
            raise batch
        yield batch


def _die_with_parent(worker: int) -> None:
    """torch's own watch takes 5 seconds, in which a worker would hold what it inherited: the lock of the output."""
    end_with_parent()


# An interpreter that exits while an iterator is alive (an exception on its way up) sends SIGTERM to the workers and
# waits for them, for ever, as they do not hear it. Exit functions run last registered first: this one before that.
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@atexit.register
def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler calls a worker that dies an error
    for worker in _workers:
        worker.kill()


def _positions(document_ids: np.ndarray) -> np.ndarray:
    """Positions that restart wherever document_ids [rows, sequence] change; padding counts from 0 too."""
    places = np.broadcast_to(np.arange(document_ids.shape[1]), document_ids.shape)
    begins = np.diff(document_ids, axis=1, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
