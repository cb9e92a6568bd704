"""Weights of a decoder: drawn, read from a Hugging Face directory, written as one.

Initial weights depend on seed and parameter name alone, not on how a model lies over devices. Reading is strict: every
tensor that the model wants and no other, each in its shape, from safetensors files only, so nothing in a file can run.
Writing is all or nothing: a directory is complete beside its place before it takes it. Names in files are the model's
own, so nothing is converted on the way.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from femtolib.config import show
from femtolib.errors import FemtoError, RunFailed
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig, read_json_object
from femtolib.publish import is_empty, published

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# ── Initial weights ───────────────────────────────────────────────────────────────────────────────────────────────────

ROWS_PER_BLOCK = 256  # 8 MB of float32 at a width of 8,192: large enough that drawing costs what one `normal_` does


@torch.no_grad()
def initialize_weights(model: Decoder, seed: int) -> None:
    """Fill a materialized model: matrices from a normal distribution, norms with ones, biases with zeros.

    A matrix is drawn in blocks of rows, each from a generator seeded by (seed, parameter name, block): always on a CPU
    and in float32, then cast. So a weight is the same to the bit in every dtype and layout, and a rank draws no block
    that its rows do not touch.
    """
    for name, parameter in _parameters(model).items():
        for offsets, piece in _local_pieces(parameter):
            if parameter.ndim == 1:
                piece.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                _draw(piece, offsets, parameter.shape, model.config.initializer_range, f"{seed}/{name}")


def _draw(piece: torch.Tensor, offsets: tuple[int, ...], shape: torch.Size, std: float, key: str) -> None:
    """Fill `piece`, which lies at `offsets` in a matrix of `shape`."""
    generator = torch.Generator("cpu")
    first, end = offsets[0], offsets[0] + piece.shape[0]
    columns = slice(offsets[1], offsets[1] + piece.shape[1])
    for block in range(first // ROWS_PER_BLOCK, -(-end // ROWS_PER_BLOCK)):
        start = block * ROWS_PER_BLOCK
        stop = min(start + ROWS_PER_BLOCK, shape[0])
        digest = hashlib.blake2b(f"{key}/{block}".encode(), digest_size=4).digest()  # torch seeds with 32 bits
        generator.manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.empty(stop - start, shape[1], dtype=torch.float32, device="cpu")
        drawn.normal_(0.0, std, generator=generator)
        low, high = max(start, first), min(stop, end)
        piece[low - first : high - first] = drawn[low - start : high - start, columns]


def _parameters(model: Decoder) -> dict[str, torch.nn.Parameter]:
    """Name → parameter; of a tied pair the embedding alone."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings, "call tie_weights() after to_empty()"
    return dict(model.named_parameters())


def _local_pieces(parameter: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The parts of a parameter that this process holds, each with its offsets in the whole."""
    if not hasattr(parameter, "__create_chunk_list__"):  # the protocol of sharded tensors in torch's checkpoints
        return [((0,) * parameter.ndim, parameter)]
    [chunk] = parameter.__create_chunk_list__()
    return [(tuple(chunk.offsets), parameter.to_local())]


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def load_weights(model: Decoder, directory: Path) -> None:
    """Fill a materialized model from a Hugging Face directory, cast to the dtypes of its parameters.

    Two rules are lenient: `*.rotary_emb.inv_freq` is passed over, and of a tied pair either name will do, or both if
    they are equal. Otherwise names and shapes must match exactly; raises FemtoError with the first ten that do not and
    their number. One tensor, or this process's part of it, is in memory at a time.
    """
    parameters = _parameters(model)
    stored = _find_tensors(directory)
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(".rotary_emb.inv_freq")}
    stored_as = {name: name for name in parameters}
    if model.config.tie_word_embeddings and HEAD in stored:
        if EMBEDDING in stored:
            _check_equal(stored[HEAD], stored.pop(EMBEDDING))
        stored_as[EMBEDDING] = HEAD

    faults = []
    if missing := [name for name, its_name in stored_as.items() if its_name not in stored]:
        faults.append(f"{directory}: lacks {_first_ten(missing)}")
    if unexpected := [name for name in stored if name not in stored_as.values()]:
        faults.append(f"{directory}: holds what its config.json has no place for: {_first_ten(unexpected)}")
    wrong = []
    for name, parameter in parameters.items():
        tensor, wanted = stored.get(stored_as[name]), list(parameter.shape)
        if tensor and tensor.shape != wanted:
            wrong.append(f"{tensor.name} is {tensor.shape}, config.json wants {wanted}")
        elif tensor and tensor.dtype not in DTYPE_NAMES.values():
            wrong.append(f"{tensor.name} is stored as {tensor.dtype}, which is not read")
    if wrong:
        faults.append(f"{directory}: {_first_ten(wrong, '; ')}")
    if faults:
        raise FemtoError(*faults)

    for name, parameter in parameters.items():
        tensor = stored[stored_as[name]]
        with _open(tensor.path) as file:
            content = file.get_slice(tensor.name)
            for offsets, piece in _local_pieces(parameter):
                if piece.numel():
                    piece.copy_(content[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))])


class _Stored(NamedTuple):
    """A tensor in a file, as the file's header has it."""

    path: Path
    name: str
    shape: list[int]
    dtype: str


def _find_tensors(directory: Path) -> dict[str, _Stored]:
    """All tensors by name, of model.safetensors or of the files that the index names; every other file is ignored."""
    single, index = directory / SINGLE, directory / INDEX
    if not index.exists():
        if not single.exists():
            raise FemtoError(_no_weights(directory))
        return _tensors_in(single)

    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise FemtoError(f"{index}: weight_map: should name a file for every tensor, got {show(listed)}")
    shards = sorted(set(map(str, listed.values())))
    if outside := [shard for shard in shards if Path(shard).name != shard or "\\" in shard]:
        raise FemtoError(f"{index}: names files outside its directory: {_first_ten(outside)}")
    if absent := [shard for shard in shards if not (directory / shard).is_file()]:
        raise FemtoError(f"{index}: names files that are not there: {_first_ten(absent)}")
    if single.exists() and shards != [SINGLE]:
        raise FemtoError(f"{directory}: holds both {SINGLE} and {INDEX}: remove the one that is stale")
    found: dict[str, _Stored] = {}
    for shard in shards:
        tensors = _tensors_in(directory / shard)
        if twice := sorted(found.keys() & tensors.keys()):
            raise FemtoError(f"{directory / shard}: holds what another shard holds too: {_first_ten(twice)}")
        found |= tensors
    if wrong := [name for name, shard in listed.items() if name not in found or found[name].path.name != shard]:
        raise FemtoError(f"{index}: these tensors are not in the file that it names: {_first_ten(wrong)}")
    return found


def _tensors_in(path: Path) -> dict[str, _Stored]:
    with _open(path) as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a file is no dict)
        return {name: _Stored(path, name, head.get_shape(), head.get_dtype()) for name, head in headers.items()}


def _no_weights(directory: Path) -> str:
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
    if not pickled:
        return f"{directory}: no weights: neither {SINGLE} nor {INDEX} is there"
    convert = f"M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')"
    return (
        f"{directory}: {pickled[0]} is not read: a pickle can run code. To convert it to safetensors: "
        f'python -c "from transformers import AutoModelForCausalLM as M; {convert}"'
    )


@contextlib.contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise FemtoError(f"{path}: not a whole safetensors file ({error}): fetch or write it anew") from None


def _check_equal(head: _Stored, embedding: _Stored) -> None:
    with _open(head.path) as one, _open(embedding.path) as other:
        if not torch.equal(one.get_tensor(head.name), other.get_tensor(embedding.name)):
            raise FemtoError(
                f"{head.path}: {head.name} differs from {embedding.name}, though config.json ties them: "
                "set tie_word_embeddings to false there, or remove one of the two"
            )


def _first_ten(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:10]) + (f"{separator}… ({len(names)} in all)" if len(names) > 10 else "")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ELEMENTS_AT_ONCE = 2**22  # cast, checked and written together: 16 MB of float32


def save_model(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    tokenizer_files: Iterable[Path] = (),
) -> None:
    """Write a Hugging Face directory, in place of what was at `directory`.

    `tensors`: (parameter name, whole tensor), in any order, taken one by one, cast to `dtype`; none is kept once it is
    written. A tied head may come too and is left out. A file holds at most `max_shard_bytes`, or one tensor that is
    larger. Raises FemtoError where `directory` holds something else than a model, and RunFailed where writing fails:
    then `directory` is as it was, and nothing else is left behind.
    """
    directory = directory.resolve()
    refuse_other_than_model(directory)
    with published(directory, replace=True) as partial:
        _write_tensors(partial, config, tensors, dtype, max_shard_bytes)
        name = str(dtype).removeprefix("torch.")
        _write_json(partial / "config.json", {**config.to_dict(), "dtype": name, "torch_dtype": name})
        token_ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        _write_json(partial / "generation_config.json", {k: v for k, v in token_ids.items() if v is not None})
        for file in tokenizer_files:
            shutil.copyfile(file, partial / file.name)


def refuse_other_than_model(directory: Path) -> None:
    """FemtoError where `save_model` would: at `directory` there is something else than a model, or than nothing."""
    if directory.exists() and not (directory / "config.json").is_file() and not is_empty(directory):
        raise FemtoError(f"{directory}: holds something else than a model and is not replaced: choose another place")


def _write_tensors(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in _parameters(Decoder(config, dtype)).items()}
    shards = _cut({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    places = {}
    for file, shard in zip(names, shards, strict=True):
        places |= _write_header(directory / file, {name: shapes[name] for name in shard}, dtype)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total_bytes = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        _write_json(directory / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})

    for name, tensor in tensors:
        if name == HEAD and config.tie_word_embeddings:
            continue
        if tensor.shape != shapes.pop(name, None):
            raise RunFailed(f"{name}: the model's config.json has no such tensor, or not in this shape; leave it out")
        path, start = places[name]
        with path.open("r+b") as file:
            file.seek(start)
            for piece in tensor.detach().reshape(-1).split(ELEMENTS_AT_ONCE):
                ready = piece.to("cpu", dtype)
                if not ready.isfinite().all():
                    raise RunFailed(
                        f"{name} is not finite in {str(dtype).removeprefix('torch.')}: the model was not saved"
                    )
                file.write(ready.view(torch.uint8).numpy())
        del tensor, piece, ready  # before the next one is made
    assert not shapes, f"these tensors of the config did not come: {_first_ten(list(shapes))}"


def _cut(sizes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """The tensors' names, file by file, given their bytes."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_header(path: Path, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, tuple[Path, int]]:
    """Begin a safetensors file whose tensors are written later; returns the file and the place in it of each.

    The library writes a file at once, with all of its tensors in memory. The format: the header's length in 8 bytes,
    the header as JSON, the elements (https://github.com/huggingface/safetensors#format).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the elements are aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    first = path.stat().st_size
    return {name: (path, first + header[name]["data_offsets"][0]) for name in shapes}


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
