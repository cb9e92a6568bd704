"""Turn a training checkpoint into a Hugging Face directory, on a CPU.

CHECKPOINT is a checkpoint (OUTPUT/checkpoints/step_00000050), saved by any number of processes, or the OUTPUT folder of
a run, whose latest is taken. DEST is then what the run itself would write to OUTPUT/model: config.json, safetensors and
the tokenizer, which transformers and vLLM load as it is, and `model: {path: DEST}` of a config. Every file of the
checkpoint is compared with its digest first. One tensor is in memory at a time.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from femto.parser import Parser
from femtolib.errors import FemtoError


def main(argv: list[str]) -> int:
    parser = Parser("femto export", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint, or a run's output folder")
    parser.add_argument("dest", metavar="DEST", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of the weights (default: the run's export.dtype, or else its param_dtype)",
    )
    parser.add_argument(
        "--max-shard-bytes",
        metavar="N",
        type=_bytes,
        help="bytes of one file, such as 5e9 (default: the run's export.max_shard_bytes)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a Hugging Face directory, a tokenizer.json or `builtin` (default: where the run found its own)",
    )
    parser.add_argument("--force", action="store_true", help="replace the model at DEST where there is one")
    arguments = parser.parse_args(argv)
    dest = arguments.dest

    from femtolib.checkpoint import read_state
    from femtolib.device import DTYPES
    from femtolib.publish import is_empty, locked
    from femtolib.weights import refuse_other_than_model, save_model

    if dest.exists() and not is_empty(dest) and not arguments.force:
        raise FemtoError(f"{dest} exists; --force replaces it if it is a model")
    refuse_other_than_model(dest)
    checkpoint = _find(arguments.checkpoint)
    print(f"checking {checkpoint}, {_gigabytes(sum(file.stat().st_size for file in checkpoint.glob('*')))}", flush=True)
    state = read_state(checkpoint)
    settings = _settings(checkpoint, state)
    model_config = _model_config(checkpoint, state)
    parameters = _parameters(checkpoint, model_config)
    tokenizer_files = _tokenizer_files(arguments.tokenizer, settings, model_config.vocab_size)
    dtype = arguments.dtype or settings["dtype"]
    with locked(dest, wait=False):
        save_model(
            dest,
            model_config,
            _tensors(checkpoint, parameters),
            dtype=DTYPES[dtype],
            max_shard_bytes=arguments.max_shard_bytes or settings["max_shard_bytes"],
            tokenizer_files=tokenizer_files,
        )
    count, source = sum(parameters.values()), tokenizer_files[0].parent
    print(f"{dest}: the model after step {state['step']}, {count:,} parameters in {dtype}, tokenizer from {source}")
    return 0


def _bytes(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 1 <= (number := float(text)) < float("inf"):
            return int(number)
    raise argparse.ArgumentTypeError(f"{text}: should be a number of bytes, at least 1")


def _find(path: Path) -> Path:
    """`path`, or the latest checkpoint of the run whose output folder it is; FemtoError where that has none."""
    from femtolib.checkpoint import list_checkpoints

    if not path.is_dir():
        raise FemtoError(f"{path}: no such folder")
    if (path / "manifest.json").is_file() or path.name.startswith("step_"):
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise FemtoError(f"{path}: neither a checkpoint nor the output folder of a run that has one")
    return checkpoints[-1]


def _settings(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What the run's config says of its model's directory; FemtoError where it says nothing of the kind."""
    from femtolib.device import DTYPES

    try:
        config = state["config"]
        settings = {
            "dtype": config["export"]["dtype"] or config["param_dtype"],
            "max_shard_bytes": config["export"]["max_shard_bytes"],
            "data": config["data"]["train"][0],
            "tokenizer": config["tokenizer"],
        }
        texts = isinstance(settings["data"], str) and isinstance(settings["tokenizer"], str | None)
        if settings["dtype"] in DTYPES and settings["max_shard_bytes"] >= 1 and texts:
            return settings
    except (KeyError, TypeError, IndexError):
        pass
    raise FemtoError(f"{checkpoint / 'state.json'}: its config is not that of a training run")


def _model_config(checkpoint: Path, state: dict[str, Any]):
    from femtolib.model_config import ModelConfig

    where = f"{checkpoint / 'state.json'}: model"
    try:
        fields = dict(state["model"])
        return ModelConfig.from_dict(fields.pop("extra") | fields, where, inline=False)
    except (KeyError, TypeError, ValueError):
        raise FemtoError(f"{where}: not the config of a model") from None


def _tokenizer_files(named: str | None, settings: dict[str, Any], vocab_size: int) -> list[Path]:
    """The tokenizer's files: those of `named`, or else where the run found them. FemtoError where they are no more, and
    where the model has too few rows for them."""
    from femtolib.data.token_files import is_token_directory
    from femtolib.data.tokenizer import load_tokenizer

    data, source = settings["data"], settings["tokenizer"]
    if named is not None:
        source = named
    elif data != "builtin" and (source is None or is_token_directory(Path(data))):
        source = data
    if source != "builtin" and named is None and not Path(source).exists():
        raise FemtoError(f"the run's tokenizer is no longer at {source}; say where it is with --tokenizer PATH")
    tokenizer = load_tokenizer(source)
    if tokenizer.largest_id >= vocab_size:
        raise FemtoError(
            f"tokenizer: {source} has ids up to {tokenizer.largest_id}, but the model's vocab_size is {vocab_size}"
        )
    return tokenizer.files


def _parameters(checkpoint: Path, model_config) -> dict[str, int]:
    """Name → elements of the model's parameters; FemtoError where the checkpoint holds others."""
    import torch

    from femtolib.checkpoint import tensor_shapes
    from femtolib.model import Decoder

    stored = {name: shape for name, shape in tensor_shapes(checkpoint).items() if name.startswith("model.")}
    wanted = {}
    if model_config.num_hidden_layers <= len(stored):  # more would only take long to build
        with torch.device("meta"):
            model = Decoder(model_config, torch.float32)
        wanted = {f"model.{name}": parameter.shape for name, parameter in model.named_parameters()}
    if stored != wanted:
        other = next(name for name in stored | wanted if stored.get(name) != wanted.get(name))
        raise FemtoError(f"{checkpoint}: its tensors are not those of its model: {other} is one that differs")
    return {name.removeprefix("model."): shape.numel() for name, shape in wanted.items()}


def _tensors(checkpoint: Path, parameters: dict[str, int]):
    """The model's tensors, one after the other, under a bar of progress."""
    from tqdm import tqdm

    from femtolib.checkpoint import read_tensors

    with tqdm(total=sum(parameters.values()), unit=" parameters", unit_scale=True, disable=None) as progress:
        for name, tensor in read_tensors(checkpoint, [f"model.{name}" for name in parameters]):
            yield name.removeprefix("model."), tensor
            progress.update(tensor.numel())
            del tensor  # before the next one is made


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
