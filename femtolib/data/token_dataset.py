"""Rows out of token directories: a pure function of the stored tokens and seq_len, looked up by index. Nothing is
loaded: shards are memory-mapped when a row first needs them, in whichever process asks, so the data set itself is a
few numbers that travel to workers for nothing. A row is what was stored; what is trained in it is decided by the
collator, and in which order rows come by the sampler."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from femtolib.data.token_files import Index, map_shard, read_index
from femtolib.errors import FemtoError


class Row(NamedTuple):
    """Up to seq_len + 1 consecutive tokens: inputs and, one further, targets.

    tokens [length] int64; document_ids [length] int32: 0 for the row's first document, 1 for the next, …
    """

    tokens: np.ndarray
    document_ids: np.ndarray


class TokenDataset(Dataset):
    """The rows of one or more token directories, read in the order given as if they were one.

    rows: `stream`: the tokens of all documents one after the other, cut every seq_len; row i is tokens
    [i · seq_len, i · seq_len + seq_len], both included, so every token but the very first is a target once
    (`tokens_left_over` at the end make no whole row). `padded`: row i is document i, cut after seq_len + 1 tokens
    (`truncated` counts those).

    Raises FemtoError for directories that are unsound, were tokenized differently, or give no row to train on.
    """

    def __init__(self, directories: Sequence[Path], *, rows: Literal["stream", "padded"], seq_len: int):
        assert directories and seq_len > 0 and rows in ("stream", "padded")
        self.directories = [Path(directory) for directory in directories]
        self._padded = rows == "padded"
        self.seq_len = seq_len
        indexes = [read_index(directory) for directory in self.directories]
        _refuse_other_tokenizers(self.directories, indexes)
        self.eos_id = indexes[0].eos_id
        self.vocab_size = indexes[0].vocab_size
        self.largest_id = max(index.largest_id for index in indexes)
        self.tokens = sum(index.tokens for index in indexes)
        self.documents = sum(index.documents for index in indexes)
        self.digest = hashlib.sha256("\n".join(index.digest for index in indexes).encode()).hexdigest()
        self.tokenizer_directory = self.directories[0]
        self._indexes = indexes
        self._shards = [
            (directory, number) for directory, index in enumerate(indexes) for number in range(len(index.shards))
        ]
        sizes = [shard for index in indexes for shard in index.shards]
        self._first_token = [0, *accumulate(shard.tokens for shard in sizes)]  # of each shard, and the end
        self._first_document = [0, *accumulate(shard.documents for shard in sizes)]
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        if not self._padded:
            self._length = max(0, self.tokens - 1) // seq_len
            self.tokens_left_over = max(0, self.tokens - 1) % seq_len
            self.truncated = 0
            self.rows_without_trained_tokens = None
        else:
            lengths = [self._document_lengths(shard) for shard in range(len(self._shards))]
            self._length = self.documents
            self.tokens_left_over = 0
            self.truncated = sum(int((length > seq_len + 1).sum()) for length in lengths)
            self.rows_without_trained_tokens = sum(int((length < 2).sum()) for length in lengths)
        self._refuse_no_row()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        row = (
            self._document(index)
            if self._padded
            else self._stream(index * self.seq_len, (index + 1) * self.seq_len + 1)
        )
        if len(row.tokens) and row.tokens.max() > self.largest_id:
            raise FemtoError(
                f"{', '.join(map(str, self.directories))}: row {index} has the id {row.tokens.max()}, above the "
                f"tokenizer's last, {self.largest_id}: the files are damaged; `femto validate --deep` says which"
            )
        return row

    def __getstate__(self) -> dict:
        """Everything but the maps of the files: whoever receives a copy opens its own."""
        return {**self.__dict__, "_arrays": {}}

    def _stream(self, start: int, stop: int) -> Row:
        """Tokens [start, stop) of all shards as one, and the documents they belong to."""
        tokens = np.empty(stop - start, np.int64)
        new_document = np.zeros(stop - start, np.int32)
        shard, position = bisect_right(self._first_token, start) - 1, start
        while position < stop:
            first, end = self._first_token[shard], min(stop, self._first_token[shard + 1])
            stored, starts = self._open(shard)
            tokens[position - start : end - start] = stored[position - first : end - first]
            begun = starts[np.searchsorted(starts, position - first) : np.searchsorted(starts, end - first)]
            new_document[begun + (first - start)] = 1
            shard, position = shard + 1, end
        new_document[0] = 0
        return Row(tokens, np.cumsum(new_document, dtype=np.int32))

    def _document(self, index: int) -> Row:
        shard = bisect_right(self._first_document, index) - 1
        tokens, starts = self._open(shard)
        number = index - self._first_document[shard]
        start = int(starts[number])
        end = int(starts[number + 1]) if number + 1 < len(starts) else len(tokens)
        kept = tokens[start : min(end, start + self.seq_len + 1)].astype(np.int64)
        return Row(kept, np.zeros(len(kept), np.int32))

    def _document_lengths(self, shard: int) -> np.ndarray:
        tokens, starts = self._open(shard)
        return np.diff(starts, append=len(tokens))

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and document starts of a shard, mapped on first use."""
        if shard not in self._arrays:
            directory, number = self._shards[shard]
            arrays = map_shard(self.directories[directory], self._indexes[directory], number)
            # np.asarray: a memmap's slices are memmaps too, and take 3 µs each to make.
            tokens, starts = np.asarray(arrays["tokens"]), np.asarray(arrays["document_starts"])
            if len(starts) and (starts[0] != 0 or starts[-1] >= len(tokens) or (starts[1:] <= starts[:-1]).any()):
                raise FemtoError(
                    f"{self.directories[directory]}: shard {number} has documents that do not follow each other: the "
                    "files are damaged; `femto validate --deep` says which"
                )
            self._arrays[shard] = tokens, starts
        return self._arrays[shard]

    def _refuse_no_row(self) -> None:
        where = ", ".join(map(str, self.directories))
        if self.documents == 0:
            raise FemtoError(f"{where}: no documents: nothing to read")
        if self._length == 0:
            raise FemtoError(
                f"{where}: {self.tokens} tokens, but a row of data.seq_len {self.seq_len} takes {self.seq_len + 1}: "
                "bring more text or set a smaller one"
            )
        if self.rows_without_trained_tokens == self._length:
            raise FemtoError(f"{where}: {self._length} of {self._length} rows have no trained tokens: nothing to learn")


def _refuse_other_tokenizers(directories: list[Path], indexes: list[Index]) -> None:
    faults = [
        f"{directory}: {name} is {getattr(index, name)}, but {getattr(indexes[0], name)} in {directories[0]}: "
        "directories that are read together must be made with one tokenizer"
        for directory, index in zip(directories, indexes, strict=True)
        for name in ("tokenizer_digest", "eos_id")
        if getattr(index, name) != getattr(indexes[0], name)
    ]
    if faults:
        raise FemtoError(*faults)
