"""Readers of what people bring: .jsonl, .parquet and .txt files (also .gz and .zst of the first and the last, and
.json where compressed, as such corpora are often named), and Hugging Face data sets. Each gives its documents one by
one, in order, with the place each came from, and holds no more than a few of them in memory. Text is UTF-8 whatever
the locale; a byte order mark and the CR of a CRLF are not text. A document that cannot be read is handed on as a
fault with its place, for the caller to stop or to count; a damaged file raises FemtoError."""

import glob
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from femtolib.data import builtin
from femtolib.errors import FemtoError

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet", ".txt", ".txt.gz", ".txt.zst")
CHUNK = 1 << 20  # bytes read at once


class Document(NamedTuple):
    """One document: where it stands (`path:line`, `path:row`, counted from 1), its text, or what is wrong with it."""

    where: str
    text: str = ""
    fault: str = ""


def find_files(inputs: Iterable[str]) -> list[Path]:
    """The files that `inputs` (files, patterns, directories with all below them, `builtin`) name, in a fixed order.

    Raises FemtoError, one line each, for what names nothing, what no reader reads, and a file named twice.
    """
    faults, found = [], []
    for name in inputs:
        path = builtin.CORPUS if name == "builtin" else Path(name)
        if path.is_dir():
            # Hidden folders hold caches and version control, not documents.
            below = (file for file in sorted(path.rglob("*")) if not _hidden(file.relative_to(path)))
            files = [file for file in below if _kind(file) and file.is_file()]
            if not files:
                faults.append(f"input: {name}: no file below this folder ends in {', '.join(KINDS)}")
        elif path.exists():
            files = [path]
        else:
            files = [Path(match) for match in sorted(glob.glob(name, recursive=True)) if Path(match).is_file()]
            if not files:
                faults.append(f"input: {name}: no such file, folder or pattern")
        faults += [f"input: {_unreadable(file)}" for file in files if not _kind(file)]
        found += files
    seen: set[Path] = set()
    for file in found:
        if file.resolve() in seen:
            faults.append(f"input: {file} is named twice; its documents would count double")
        seen.add(file.resolve())
    if faults:
        raise FemtoError(*dict.fromkeys(faults))
    return found


def read_documents(
    files: Iterable[Path], *, text_key: str = "text", text_documents: Literal["line", "file"] = "line"
) -> Iterator[Document]:
    """The documents of `files`, in order. text_key: the key or column that holds the text; text_documents: whether
    each line of a .txt is a document or the whole file. Raises FemtoError naming a file that is damaged or missing."""
    for path in files:
        kind, name = _kind(path), str(path)
        try:
            if kind == ".parquet":
                yield from _read_parquet(path, text_key)
            elif kind == ".txt" and text_documents == "file":
                yield _decode_text(f"{name}:1", b"".join(_chunks(path)), first=True)
            elif kind == ".txt":
                for number, line in enumerate(_lines(_chunks(path)), 1):
                    yield _decode_text(f"{name}:{number}", line, first=number == 1)
            else:
                for number, line in enumerate(_lines(_chunks(path)), 1):
                    if not line.isspace() and line:
                        yield _parse_object(f"{name}:{number}", line, text_key, first=number == 1)
        except OSError as error:
            raise FemtoError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (EOFError, zlib.error) as error:
            raise FemtoError(f"{path}: the compressed file is damaged or cut short ({error})") from None


def read_dataset(
    path: str, name: str | None = None, split: str = "train", *, text_key: str = "text"
) -> Iterator[Document]:
    """The documents of a Hugging Face data set, streamed: nothing but what is read is downloaded or held."""
    datasets = _import("datasets")
    where = f"{path}{f'/{name}' if name else ''}[{split}]"
    try:
        if (Path(path) / "state.json").is_file():  # of Dataset.save_to_disk, which load_dataset refuses
            rows = datasets.load_from_disk(path)
        else:
            rows = datasets.load_dataset(path, name, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            if text_key not in row:
                raise FemtoError(f"dataset: {where}: no column {text_key!r} (it has {', '.join(row)}): set text_key")
            yield _check_text(f"{where}:{number}", row[text_key])
    except FemtoError:
        raise
    except Exception as error:  # the library raises what its readers and the network raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FemtoError(f"dataset: {where}: {reason[0]}") from None


@dataclass
class Sieve:
    """Lets readable documents through and counts them, those without text, and the bad ones that are skipped."""

    on_bad_document: Literal["stop", "skip"]
    kept: int = 0
    empty: int = 0
    bad: int = 0

    def readable(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents that have text; raises FemtoError at a bad one, unless they are skipped."""
        for document in documents:
            if document.fault:
                self.refuse(document.fault)
            elif not document.text or document.text.isspace():
                self.empty += 1
            else:
                self.kept += 1
                yield document

    def refuse(self, fault: str) -> None:
        """Stops at a bad document, or shows the first few and counts all."""
        if self.on_bad_document == "stop":
            raise FemtoError(f"{fault} (on_bad_document=skip leaves it out)")
        self.bad += 1
        if self.bad <= 5:
            tqdm.write(f"skipped: {fault}", file=sys.stderr)  # above a progress bar, where there is one


def _kind(path: Path) -> str:
    """`.jsonl`, `.txt` or `.parquet`: how to read a file, by its name; empty where no reader does."""
    ending = next((ending for ending in KINDS if path.name.lower().endswith(ending)), "")
    return ".jsonl" if ending.startswith(".json") else ending.removesuffix(".gz").removesuffix(".zst")


def _unreadable(path: Path) -> str:
    if path.name.lower().endswith(".json"):
        return f"{path}: .json is not read; where each line holds an object, name it .jsonl"
    return f"{path}: not one of {', '.join(KINDS)}"


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_text(where: str, text: Any) -> Document:
    if text is None:
        return Document(where)
    if not isinstance(text, str):
        return Document(where, fault=f"{where}: the text is {_show(text)}, not a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(text[error.start]):04x}"
            return Document(where, fault=f"{where}: half a surrogate pair ({surrogate}), which is no character")
    return Document(where, text)


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text[:40]}{'…' * (len(text) > 40)} ({type(value).__name__})"


# ── Lines of JSON and of text ─────────────────────────────────────────────────────────────────────────────────────────


def _parse_object(where: str, line: bytes, text_key: str, *, first: bool) -> Document:
    text, fault = _decode(where, line, first)
    if fault:
        return Document(where, fault=fault)
    try:
        row = json.loads(text)
    except RecursionError:
        return Document(where, fault=f"{where}: not JSON that can be read: nested too deeply")
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        array = "; a JSON array? Wanted: one object a line" if first and text.lstrip().startswith("[") else ""
        return Document(where, fault=f"{where}: not JSON: {reason}{array}")
    if not isinstance(row, dict):
        return Document(where, fault=f"{where}: {_show(row)}, not an object with the key {text_key!r}")
    if text_key not in row:
        keys = ", ".join(map(repr, list(row)[:10])) or "none"
        return Document(where, fault=f"{where}: no key {text_key!r} (keys: {keys}): set text_key, or mend the line")
    return _check_text(where, row[text_key])


def _decode_text(where: str, content: bytes, *, first: bool) -> Document:
    text, fault = _decode(where, content, first)
    if "\0" in text:
        fault = f"{where}: a NUL byte, so not text (or UTF-16: iconv -f UTF-16 -t UTF-8 converts it)"
    return Document(where, fault=fault) if fault else Document(where, text.replace("\r\n", "\n").removesuffix("\r"))


def _decode(where: str, content: bytes, first: bool) -> tuple[str, str]:
    """The text, without a byte order mark where it is the `first` of its file; or an empty one and the fault."""
    try:
        return (content.removeprefix(b"\xef\xbb\xbf") if first else content).decode("utf-8"), ""
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x}"
        if first and content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return "", f"{where}: UTF-16, not UTF-8 ({byte}): iconv -f UTF-16 -t UTF-8 converts it"
        breaks = content.count(b"\n", 0, error.start)  # a whole file as one document still has lines
        path, _, line = where.rpartition(":")
        return "", f"{path}:{int(line) + breaks}: not UTF-8 ({byte})"


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts at LF alone: `str.splitlines` would also cut at characters that may stand inside a text."""
    pending: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            pending.append(line)
            yield b"".join(pending)
            pending.clear()
        pending.append(rest)
    if any(pending):
        yield b"".join(pending)


def _chunks(path: Path) -> Iterator[bytes]:
    if path.name.lower().endswith(".zst"):
        yield from _decompress_zstandard(path)
        return
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _decompress_zstandard(path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own reader ends silently after the first frame, and where a file was cut short."""
    zstandard = _import("zstandard")
    frame = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    try:
        with path.open("rb") as file:
            while piece := file.read(4096):  # small, because nothing bounds what a piece expands to
                while piece:
                    yield frame.decompress(piece)
                    begun, piece = not frame.eof, frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise FemtoError(f"{path}: the compressed file is damaged ({error})") from None
    if begun:
        raise FemtoError(f"{path}: the compressed file is cut short")


# ── Parquet ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_parquet(path: Path, text_key: str) -> Iterator[Document]:
    _import("pyarrow")
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        # Both settings, or a whole row group is held in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK) as file:
            if text_key not in file.schema_arrow.names:
                names = ", ".join(map(repr, file.schema_arrow.names))
                raise FemtoError(f"{path}: no column {text_key!r} (columns: {names}): set text_key")
            number = 0
            for batch in file.iter_batches(batch_size=64, columns=[text_key], use_threads=False):
                for value in batch.column(0):
                    number += 1
                    try:
                        yield _check_text(f"{path}:{number}", value.as_py())
                    except UnicodeDecodeError as error:
                        byte = f"byte 0x{error.object[error.start]:02x}"
                        yield Document(f"{path}:{number}", fault=f"{path}:{number}: not UTF-8 ({byte})")
    except (ArrowException, OSError) as error:
        raise FemtoError(f"{path}: damaged, or not a parquet file: {str(error).splitlines()[0]}") from None


def _import(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        raise FemtoError(f"reading this input needs {package}: pip install 'femto[data]'") from None
