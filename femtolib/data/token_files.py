"""The token directory: documents as token ids on disk, and the index that says what they are. `index.json` describes
`tokens-00000.safetensors`, …, each with `tokens` (1-D, uint16 or uint32), `document_starts` (int64, offsets in that
shard; a document never crosses a shard) and, for chat, `trained` (uint8 a token). This file alone knows the format.
Nothing in a directory is trusted: types, sizes and names are checked before a byte is used, and nothing is unpickled.
Which rows are cut from the tokens is the data set's business, not the files'."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.numpy import save_file

from femtolib.errors import FemtoError

FORMAT, VERSION = "femto-tokens", 1
INDEX_NAME = "index.json"

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# A shard lies beside its index: a name that could lead anywhere else is refused.
ShardName = Annotated[str, Field(pattern=r"^tokens-\d{5,}\.safetensors$")]


@dataclass
class Shard:
    """One file of tokens: whole documents, `bytes` long, `digest` the SHA-256 of the file."""

    file: ShardName
    tokens: Count
    documents: Count
    bytes: Count
    digest: Digest


@dataclass
class Index:
    """What index.json holds. `largest_id` is the largest id the tokenizer can produce, added tokens included."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    largest_id: Count
    eos_id: Count
    bos_id: Count | None
    tokens: Count
    documents: Count
    skipped: dict[str, Count]
    sources: list[str]
    tokenizer_digest: Digest
    template_digest: Digest | None
    shards: list[Shard]
    format: Literal["femto-tokens"] = FORMAT
    version: int = VERSION

    @property
    def digest(self) -> str:
        """SHA-256 over what decides the rows: width, EOS, and the shards in order; not where anything lies."""
        parts = [self.dtype, str(self.eos_id), *(shard.digest for shard in self.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_token_directory(path: Path) -> bool:
    """Whether `path` is a folder with an index.json; `read_index` says whether it is a sound one."""
    return (Path(path) / INDEX_NAME).is_file()


def write_shard(
    directory: Path,
    number: int,
    tokens: np.ndarray,
    document_starts: np.ndarray,
    trained: np.ndarray | None = None,
) -> Shard:
    """Writes shard `number` and returns its entry in the index.

    tokens [tokens] uint16 or uint32, document_starts [documents] int64, trained [tokens] uint8. The bytes depend on
    the arguments alone. An OSError (a full disk) is left to the caller, who owns the directory.
    """
    assert tokens.dtype in (np.uint16, np.uint32) and document_starts.dtype == np.int64
    arrays = {"tokens": tokens, "document_starts": document_starts}
    if trained is not None:
        assert trained.dtype == np.uint8 and trained.shape == tokens.shape
        arrays["trained"] = trained
    path = Path(directory) / f"tokens-{number:05d}.safetensors"
    save_file(arrays, path)
    return Shard(path.name, len(tokens), len(document_starts), path.stat().st_size, _file_digest(path))


def write_index(directory: Path, index: Index) -> None:
    """Writes index.json. It goes last: a directory with an index is a whole one."""
    path = Path(directory) / INDEX_NAME
    fields = asdict(index)
    ordered = {"format": fields.pop("format"), "version": fields.pop("version"), **fields}
    path.write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_index(directory: Path) -> Index:
    """Reads and checks index.json and the sizes of the shards it names (`verify_digests` reads every byte).

    Raises FemtoError with every fault, each naming the file.
    """
    directory = Path(directory)
    path = directory / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise FemtoError(
            f"{directory}: no {INDEX_NAME} here, so not a token directory (recipe preprocess makes one)"
        ) from None
    except OSError as error:
        raise FemtoError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FemtoError(f"{path}: not JSON ({error}): make the token directory again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FemtoError(f'{path}: not the index of a token directory: no "format": "{FORMAT}"')
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise FemtoError(
            f"{path}: version {version!r}, but this femto reads version {VERSION}: update it or make the tokens again"
        )
    try:
        index = TypeAdapter(Index).validate_json(text, strict=True)
    except ValidationError as error:
        raise FemtoError(
            *(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        ) from None
    faults = _inconsistencies(index, path) or _wrong_sizes(index, directory)
    if faults:
        raise FemtoError(*faults)
    return index


def map_shard(directory: Path, index: Index, number: int) -> dict[str, np.ndarray]:
    """The arrays of shard `number`, memory-mapped and read-only: `tokens`, `document_starts`, perhaps `trained`.

    Raises FemtoError naming the file when its header is not the one the index promises.
    """
    shard = index.shards[number]
    path = Path(directory) / shard.file
    expected = {"tokens": (index.dtype, shard.tokens), "document_starts": ("int64", shard.documents)}
    dtypes = {"U16": "uint16", "U32": "uint32", "I64": "int64", "U8": "uint8"}
    try:
        content = np.memmap(path, np.uint8, mode="r")
        header_bytes = int(content[:8].view("<u8")[0])
        header = json.loads(content[8 : 8 + header_bytes].tobytes())
        arrays = {}
        for name, (dtype, length) in {**expected, "trained": ("uint8", shard.tokens)}.items():
            if name not in header and name not in expected:
                continue
            start, end = header[name]["data_offsets"]
            if not 0 <= start <= end:
                raise ValueError(f"{name} lies at {start}:{end}")
            array = content[8 + header_bytes + start : 8 + header_bytes + end].view(dtype)
            if (dtypes[header[name]["dtype"]], header[name]["shape"], len(array)) != (dtype, [length], length):
                raise ValueError(f"{name} is {header[name]['dtype']} {header[name]['shape']}, not {dtype} [{length}]")
            arrays[name] = array
    except OSError as error:
        raise FemtoError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise FemtoError(
            f"{path}: not the shard that {INDEX_NAME} describes ({error}): make the tokens again"
        ) from None
    return arrays


def verify_digests(directory: Path, index: Index) -> None:
    """Reads every shard and raises FemtoError naming those whose bytes are not the ones the index recorded."""
    directory = Path(directory)
    faults = [
        f"{directory / shard.file}: the content has changed since it was written (SHA-256 differs from {INDEX_NAME}): "
        "copy it anew or make the tokens again"
        for shard in index.shards
        if _file_digest(directory / shard.file) != shard.digest
    ]
    if faults:
        raise FemtoError(*faults)


def _inconsistencies(index: Index, path: Path) -> list[str]:
    faults = []
    for name in ("tokens", "documents"):
        total, parts = getattr(index, name), sum(getattr(shard, name) for shard in index.shards)
        if total != parts:
            faults.append(f"{path}: {name}: {total}, but the shards hold {parts}")
    if len({shard.file for shard in index.shards}) != len(index.shards):
        faults.append(f"{path}: shards: one file is named twice")
    for name in ("eos_id", "bos_id"):
        token_id = getattr(index, name)
        if token_id is not None and token_id > index.largest_id:
            faults.append(f"{path}: {name}: {token_id} is above largest_id {index.largest_id}")
    if index.largest_id > np.iinfo(index.dtype).max:
        faults.append(f"{path}: largest_id: {index.largest_id} does not fit {index.dtype}")
    return faults


def _wrong_sizes(index: Index, directory: Path) -> list[str]:
    faults = []
    for shard in index.shards:
        path = directory / shard.file
        if not path.is_file():
            faults.append(f"{path}: missing, though {INDEX_NAME} names it")
        elif path.stat().st_size != shard.bytes:
            faults.append(f"{path}: {path.stat().st_size} bytes, but {INDEX_NAME} says {shard.bytes}: copy it anew")
    return faults


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FemtoError(f"{path}: cannot be read: {error.strerror}") from None
