"""Documents become token directories: `tokenize_documents` for a recipe, `prepare_tokens` for a config that names raw
files. One thread reads, `workers` threads encode (the tokenizer runs in Rust, outside the GIL), and what they make is
written in the order of the documents: the bytes do not depend on `workers`, and memory is bounded by a shard and a few
batches. A directory is made beside its place, under another name, and published by rename: what bears its name is
whole. Rows are cut from the tokens when they are loaded, not here."""

import contextlib
import hashlib
import json
import os
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from femtolib.data.documents import Document, Sieve, find_files, read_documents
from femtolib.data.token_files import VERSION, Index, is_token_directory, read_index, write_index, write_shard
from femtolib.data.tokenizer import Tokenizer, load_tokenizer
from femtolib.errors import FemtoError
from femtolib.publish import locked, published

SHARD_TOKENS = 2**26  # 128 MB of uint16, held in memory while it fills
BATCH_CHARACTERS = 2**18  # a tokenizer takes some 50 bytes a character while it encodes
DOCUMENT_CHARACTERS = 64  # what a document costs apart from its text, counted as characters


def tokenize_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    output_dir: Path,
    *,
    sources: Sequence[str],
    validation_fraction: float | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    on_bad_document: Literal["stop", "skip"] = "stop",
) -> dict[str, Index]:
    """Writes the token directory `output_dir` and returns its index, under the key ""; with `validation_fraction`
    writes output_dir/train and output_dir/validation, and returns both indexes under these names.

    A shard is closed before the document that would take it over `shard_tokens`. A document goes to validation by a
    hash of its text, so it stays there as the data grow. workers: threads that encode, None for one a usable CPU.
    Raises FemtoError for an `output_dir` that holds something, for a bad document (unless they are skipped) and for a
    part without documents; RunFailed where the disk takes no more. Nothing is left behind then.
    """
    with locked(output_dir, wait=False), published(output_dir) as partial:
        return _write(
            documents,
            tokenizer,
            partial,
            sources=sources,
            validation_fraction=validation_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            on_bad_document=on_bad_document,
        )


def prepare_tokens(
    paths: Sequence[str],
    tokenizer: str | None,
    *,
    text_key: str = "text",
    text_documents: Literal["line", "file"] = "line",
    on_bad_document: Literal["stop", "skip"] = "stop",
) -> list[Path]:
    """A token directory for each of `paths`: itself where it is one; raw files, folders of them and `builtin` are
    tokenized on first use into the cache ($FEMTO_CACHE, else $XDG_CACHE_HOME/femto, else ~/.cache/femto).

    What is in the cache is known by path, size and time of change of the files, by the tokenizer and the settings. Of
    several processes that need the same directory one makes it; the others wait on its lock file.
    """
    directories, loaded = [], None
    for name in paths:
        if name != "builtin" and is_token_directory(Path(name)):
            directories.append(Path(name))
            continue
        if tokenizer is None:
            raise FemtoError(f"tokenizer: needed: {name} is not a token directory; `builtin` is the shipped one")
        loaded = loaded or load_tokenizer(tokenizer)
        files = find_files([name])
        reading = {"text_key": "text" if name == "builtin" else text_key, "text_documents": text_documents}
        identity = {
            "version": VERSION,
            "files": [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
            # All its files, since the token directory will hold copies of them.
            "tokenizer": [hashlib.sha256(file.read_bytes()).hexdigest() for file in loaded.files],
            "eos_id": loaded.eos_id,
            "on_bad_document": on_bad_document,
            **reading,
        }
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        directory = _cache() / "tokens" / key
        if not _is_sound(directory):
            with locked(directory, wait=True):
                if not _is_sound(directory):  # else another process has made it meanwhile
                    print(f"tokenizing {name} into {directory}", file=sys.stderr)
                    with published(directory, replace=True) as partial:
                        documents = read_documents(files, **reading)
                        _write(
                            documents, loaded, partial, sources=list(map(str, files)), on_bad_document=on_bad_document
                        )
        directories.append(directory)
    return directories


def _is_sound(directory: Path) -> bool:
    """Whether an entry of the cache is there and whole; one that is not is made again."""
    try:
        return bool(read_index(directory))
    except FemtoError:
        return False


def _write(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    sources: Sequence[str],
    validation_fraction: float | None = None,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    on_bad_document: Literal["stop", "skip"] = "stop",
) -> dict[str, Index]:
    """Writes the token directories below the folder `directory`, which is not published yet."""
    parts = [""] if validation_fraction is None else ["train", "validation"]
    writers = {part: _ShardWriter(directory / part, tokenizer.dtype, shard_tokens) for part in parts}
    sieve = Sieve(on_bad_document)

    def part_of(document: Document) -> str:
        if validation_fraction is None:
            return ""
        place = int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8]) / 2**64
        return "validation" if place < validation_fraction else "train"

    def encode(part: str, batch: list[Document]) -> tuple[str, list[Document], np.ndarray, np.ndarray]:
        return part, batch, *tokenizer.encode_documents([document.text for document in batch])

    def write(part: str, batch: list[Document], ids: np.ndarray, ends: np.ndarray) -> None:
        control = tokenizer.control_tokens_in(ids, ends)
        for number, token in control.items():
            sieve.refuse(f"{batch[number].where}: this tokenizer reads {token!r} in the text as its control token")
        if control:
            lengths = np.diff(ends, prepend=0)
            kept = ~np.isin(np.arange(len(batch)), list(control))
            ids, ends = ids[np.repeat(kept, lengths)], np.cumsum(lengths[kept])
        writers[part].add(ids, ends)
        progress.update(sum(len(document.text.encode()) for document in batch))
        made = sum(writer.documents for writer in writers.values())
        progress.set_postfix_str(f"{made / max(progress.format_dict['elapsed'], 1e-3):,.0f} documents/s", refresh=False)

    workers = workers or len(os.sched_getaffinity(0))
    running = deque()
    progress = tqdm(desc="tokenizing", unit="B", unit_scale=True, mininterval=0.5, file=sys.stderr)
    with progress, _own_threads_only(), ThreadPoolExecutor(workers) as pool:
        try:
            for part, batch in _batches(sieve.readable(documents), part_of):
                running.append(pool.submit(encode, part, batch))
                if len(running) > 2 * workers:
                    write(*running.popleft().result())
            while running:
                write(*running.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)

    written = sum(writer.documents for writer in writers.values())
    if not written:
        raise FemtoError(f"input: no documents in {_shorten(sources)} ({sieve.empty} empty, {sieve.bad} bad)")
    for part, writer in writers.items():
        if not writer.documents:
            raise FemtoError(f"validation_fraction: {validation_fraction} of {written} documents leaves {part} empty")
    indexes = {}
    for part, writer in writers.items():
        writer.flush()
        indexes[part] = Index(
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            largest_id=tokenizer.largest_id,
            eos_id=tokenizer.eos_id,
            bos_id=tokenizer.bos_id,
            tokens=sum(shard.tokens for shard in writer.shards),
            documents=writer.documents,
            skipped={"empty": sieve.empty, "bad": sieve.bad},
            sources=[os.fsencode(source).decode(errors="replace") for source in sources],  # a name may be no text
            tokenizer_digest=tokenizer.digest,
            template_digest=None,
            shards=writer.shards,
        )
        tokenizer.copy_files(directory / part)
        write_index(directory / part, indexes[part])
    return indexes


class _ShardWriter:
    """Collects documents and writes a shard whenever the next would take it over `shard_tokens`."""

    def __init__(self, directory: Path, dtype: str, shard_tokens: int):
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.dtype = np.dtype(dtype)
        self.shard_tokens = shard_tokens
        self.shards = []
        self.documents = 0
        self._tokens, self._starts = bytearray(), array("q")

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Takes documents, one after the other in `ids`, each ending where `ends` says."""
        first, start = 0, 0  # the next document, and where it starts in `ids`
        while first < len(ends):
            filled = len(self._tokens) // self.dtype.itemsize
            after = int(np.searchsorted(ends, start + self.shard_tokens - filled, side="right"))  # those that fit
            if not filled:
                after = max(after, first + 1)  # one longer than a shard has a shard of its own
            if after <= first:
                self.flush()
                continue
            starts = np.append(start, ends[first : after - 1]) - start + filled
            stop = int(ends[after - 1])
            self._starts.frombytes(starts.astype(np.int64).tobytes())
            self._tokens += ids[start:stop].tobytes()
            first, start = after, stop
        self.documents += len(ends)

    def flush(self) -> None:
        tokens, starts = np.frombuffer(self._tokens, self.dtype), np.frombuffer(self._starts, np.int64)
        self.shards.append(write_shard(self.directory, len(self.shards), tokens, starts))
        self._tokens, self._starts = bytearray(), array("q")


def _batches(documents: Iterable[Document], part_of: Callable[[Document], str]) -> Iterator[tuple[str, list[Document]]]:
    """Documents of one part in batches of about BATCH_CHARACTERS; where they are cut depends on the documents alone."""
    batches: dict[str, list[Document]] = {}
    characters: Counter[str] = Counter()
    for document in documents:
        part = part_of(document)
        batches.setdefault(part, []).append(document)
        characters[part] += len(document.text) + DOCUMENT_CHARACTERS
        if characters[part] >= BATCH_CHARACTERS:
            yield part, batches.pop(part)
            characters[part] = 0
    yield from batches.items()


@contextlib.contextmanager
def _own_threads_only() -> Iterator[None]:
    """The tokenizer's own threads take a tenth more CPU than ours for the same text, and warn at every later fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _cache() -> Path:
    if os.environ.get("FEMTO_CACHE"):
        return Path(os.environ["FEMTO_CACHE"])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "femto"
    except RuntimeError:
        raise FemtoError("there is no home folder to keep tokens in: set FEMTO_CACHE to a folder") from None


def _shorten(sources: Sequence[str]) -> str:
    return ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
