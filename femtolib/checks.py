"""What can be known to be wrong before any work: a config's model, tokenizer and data held against each other.

`load_config` checks each key by itself; here are the questions that need more than one of them and the headers of the
files they name. Every recipe asks them first, and `femto validate` asks nothing else that costs little.
"""

from dataclasses import replace
from pathlib import Path

from femtolib.data.documents import find_files
from femtolib.data.token_files import is_token_directory, read_index
from femtolib.data.tokenizer import load_tokenizer
from femtolib.errors import FemtoError
from femtolib.model_config import ModelConfig, read_model_config
from femtolib.parallel.mesh import ParallelDims
from femtolib.sections import DataSection, ModelSection


def configured_model(model: ModelSection) -> ModelConfig:
    """The model that a config names or describes; FemtoError with every fault."""
    if model.path is not None:
        return read_model_config(model.path)
    return ModelConfig.from_dict(model.inline_keys(), "model", inline=True)


def check_inputs(model: ModelSection, data: DataSection, tokenizer: str | None) -> ModelConfig:
    """Check that model, tokenizer and data fit each other; returns the model's config.

    The token ids that an inline model leaves open (BOS, EOS) are the tokenizer's. Raises FemtoError with every fault.
    """
    faults: list[str] = []
    model_config = None
    try:
        model_config = configured_model(model)
    except FemtoError as error:
        faults += error.faults
    indexes, raw = [], []
    for key, paths in (("data.train", data.train), ("data.validation", data.validation or [])):
        seen: set[Path] = set()
        for path in paths:
            try:
                if path != "builtin" and is_token_directory(Path(path)):
                    files = [Path(path).resolve()]
                    index = read_index(files[0])
                    indexes.append((f"{key}: {path}", index))
                    if load_tokenizer(files[0]).digest != index.tokenizer_digest:
                        faults.append(f"{key}: {path}: its tokenizer.json is not the one that made its tokens")
                else:
                    files = [file.resolve() for file in find_files([path])]
                    raw.append(f"{key}: {path}")
                faults += [f"{key}: {file} is named twice" for file in files if file in seen]
                seen.update(files)
            except FemtoError as error:
                faults += [f"{key}: {fault}" for fault in error.faults]
    loaded = None
    if tokenizer is not None:
        try:
            loaded = load_tokenizer(tokenizer)
        except FemtoError as error:
            faults += error.faults
    elif raw:
        faults.append(f"tokenizer: needed, because {raw[0]} is not a token directory; `builtin` is the shipped one")
    if loaded is not None:
        owner, vocabulary, digest = f"tokenizer: {tokenizer}", loaded, loaded.digest
    elif indexes:
        owner, vocabulary = indexes[0]
        digest = vocabulary.tokenizer_digest
    else:
        vocabulary = None  # a fault above says why
    if vocabulary is not None:
        faults += [
            f"{where} was made with another tokenizer than {owner}"
            for where, index in indexes
            if index.tokenizer_digest != digest
        ]
    if vocabulary is not None and model_config is not None and model_config.vocab_size <= vocabulary.largest_id:
        faults.append(
            f"model: vocab_size is {model_config.vocab_size}, but {owner} has ids up to {vocabulary.largest_id}; "
            f"it must be at least {vocabulary.largest_id + 1}"
        )
    if model_config is not None and data.seq_len > model_config.max_position_embeddings:
        faults.append(
            f"data.seq_len: {data.seq_len} is above the model's max_position_embeddings, "
            f"{model_config.max_position_embeddings}"
        )
    if faults:
        raise FemtoError(*dict.fromkeys(faults))
    assert model_config is not None
    if model.path is not None:
        return model_config
    return replace(
        model_config,
        bos_token_id=vocabulary.bos_id if model_config.bos_token_id is None else model_config.bos_token_id,
        eos_token_id=vocabulary.eos_id if model_config.eos_token_id is None else model_config.eos_token_id,
    )


def check_layout(dims: ParallelDims, model: ModelConfig, seq_len: int) -> None:
    """FemtoError, with every fault, where what the ranks share does not divide by their number."""
    shared_by_tp = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    faults = [
        f"parallel.tp: {dims.tp} does not divide the model's {key}, {getattr(model, key)}"
        for key in shared_by_tp
        if getattr(model, key) % dims.tp
    ]
    chunks = (2 * dims.cp if dims.cp > 1 else 1) * dims.tp
    if seq_len % chunks:
        product = f"parallel.tp {dims.tp}" if dims.cp == 1 else f"2 · parallel.cp {dims.cp} · parallel.tp {dims.tp}"
        faults.append(f"data.seq_len: {seq_len} is not a multiple of {product}{f' = {chunks}' if dims.cp > 1 else ''}")
    if faults:
        raise FemtoError(*faults)
