"""Weights of a decoder: drawn, read from a Hugging Face directory, written as one.

Initial weights depend on seed and parameter name alone, not on how a model lies over devices. Reading is strict: every
tensor that the model wants and no other, each in its shape, from safetensors files only, so nothing in a file can run.
Writing is all or nothing: a directory is complete beside its place before it takes it. Names in files are the model's
own, so nothing is converted on the way.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from femtolib.config import show
from femtolib.errors import FemtoError, RunFailed
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig, read_json_object

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
    """Fill a model from a Hugging Face directory, cast to the dtypes of its parameters; on meta, only check it.

    Two rules are lenient: `*.rotary_emb.inv_freq` is passed over, and of a tied pair either name will do, or both if
    they are equal. Otherwise names and shapes must match exactly; raises FemtoError with the first ten that do not and
    their number. One tensor, or a shard's part of it, is in memory at a time.
    """
    files = _find_tensors(directory)
    files = {name: path for name, path in files.items() if not name.endswith(".rotary_emb.inv_freq")}
    parameters = _parameters(model)
    stored_as = {name: name for name in parameters}
    if model.config.tie_word_embeddings and HEAD in files:
        if EMBEDDING not in files:
            stored_as[EMBEDDING] = HEAD
        else:
            _check_equal(files)
            del files[HEAD]

    faults = []
    if missing := [name for name in parameters if stored_as[name] not in files]:
        faults.append(f"{directory}: lacks {_first_ten(missing)}")
    if unexpected := [name for name in files if name not in stored_as.values()]:
        faults.append(f"{directory}: holds what its config.json has no place for: {_first_ten(unexpected)}")
    if faults:
        raise FemtoError(*faults)

    by_file: dict[Path, list[str]] = {}
    for name, stored in stored_as.items():
        by_file.setdefault(files[stored], []).append(name)
    _check_shapes(directory, by_file, stored_as, parameters)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                stored = file.get_slice(stored_as[name])
                for offsets, piece in _local_pieces(parameters[name]):
                    if piece.numel() and not piece.is_meta:
                        place = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                        piece.copy_(stored[place])


def _find_tensors(directory: Path) -> dict[str, Path]:
    """Tensor name → its file: model.safetensors, or what the index names; every other file is ignored."""
    single, index = directory / SINGLE, directory / INDEX
    if not index.exists() and not single.exists():
        raise FemtoError(_no_weights(directory))
    if not index.exists():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)

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
    found: dict[str, Path] = {}
    for shard in shards:
        with _open(directory / shard) as file:
            if twice := sorted(found.keys() & set(file.keys())):
                raise FemtoError(f"{directory / shard}: holds what another shard holds too: {_first_ten(twice)}")
            found |= dict.fromkeys(file.keys(), directory / shard)
    if wrong := [name for name, shard in listed.items() if found.get(name) != directory / shard]:
        raise FemtoError(f"{index}: these tensors are not in the file that it names: {_first_ten(wrong)}")
    return found


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


def _check_equal(files: dict[str, Path]) -> None:
    with _open(files[HEAD]) as one, _open(files[EMBEDDING]) as other:
        if not torch.equal(one.get_tensor(HEAD), other.get_tensor(EMBEDDING)):
            raise FemtoError(
                f"{files[HEAD]}: {HEAD} differs from {EMBEDDING}, though config.json ties them: "
                "set tie_word_embeddings to false there, or remove one of the two"
            )


def _check_shapes(
    directory: Path, by_file: dict[Path, list[str]], stored_as: dict[str, str], parameters: dict[str, torch.Tensor]
) -> None:
    wrong = []
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                stored = file.get_slice(stored_as[name])
                shape, dtype = list(stored.get_shape()), stored.get_dtype()
                if shape != list(parameters[name].shape):
                    wrong.append(f"{stored_as[name]} is {shape}, config.json wants {list(parameters[name].shape)}")
                elif dtype not in ("F64", "F32", "F16", "BF16"):
                    wrong.append(f"{stored_as[name]} is stored as {dtype}, which is not read")
    if wrong:
        raise FemtoError(f"{directory}: {_first_ten(wrong, '; ')}")


def _first_ten(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:10]) + (f"{separator}… ({len(names)} in all)" if len(names) > 10 else "")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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

    `tensors`: (parameter name, whole tensor), taken one by one, cast to `dtype`; a tied head may come too and is left
    out. A file holds at most `max_shard_bytes`, or one tensor that is larger; one file's tensors are in memory at a
    time. Raises FemtoError where `directory` holds something else than a model, and RunFailed where writing fails:
    then `directory` is as it was, and nothing else is left behind.
    """
    directory = directory.resolve()
    if directory.exists() and not (directory / "config.json").is_file() and not _is_empty(directory):
        raise FemtoError(f"{directory}: exists and holds no config.json, so it is not replaced: choose another place")
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_tensors(partial, config, tensors, dtype, max_shard_bytes)
        name = str(dtype).removeprefix("torch.")
        _write_json(partial / "config.json", {**config.to_dict(), "dtype": name, "torch_dtype": name})
        token_ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        _write_json(partial / "generation_config.json", {k: v for k, v in token_ids.items() if v is not None})
        for file in tokenizer_files:
            shutil.copyfile(file, partial / file.name)
        for file in partial.iterdir():
            shutil.copymode(partial / "config.json", file)  # safetensors makes files that their owner alone may read
            _sync(file)
        _sync(partial)
        _replace(directory, partial)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{directory}: the model could not be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(
    directory: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shards: list[list[str]] = []
    total_bytes = 0
    for number, shard in enumerate(_cut(tensors, config, dtype, max_shard_bytes)):
        save_file(shard, directory / f"{number}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    with torch.device("meta"):
        wanted = sorted(_parameters(Decoder(config, dtype)))
    written = sorted(name for shard in shards for name in shard)
    assert written == wanted, "the tensors are not those of this config"

    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for number, name in enumerate(names):
        (directory / f"{number}.safetensors").rename(directory / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(directory / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _cut(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, dtype: torch.dtype, max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one file after another."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name == HEAD and config.tie_word_embeddings:
            continue
        ready = tensor.detach().to("cpu", dtype).contiguous()
        if shard and sum(other.nbytes for other in shard.values()) + ready.nbytes > max_shard_bytes:
            yield shard
            shard = {}
        shard[name] = ready
    yield shard


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(directory: Path, partial: Path) -> None:
    """Put `partial` in the place of `directory`: the old one goes out of sight before it goes."""
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)
