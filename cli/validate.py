"""Check all that can be checked without training, and print the numbers that follow from a config.

    femto validate [torchrun options] RECIPE --config CONFIG [key=value …] [--show N] [--deep] [--json]

Options, RECIPE, CONFIG and key=value are those of `femto run`, and so are the faults: one `error:` line each, exit code
2. Nothing is launched: `--nnodes 128 --nproc-per-node 8` is checked on a laptop, and the nodes need no place to meet.
Raw data files are tokenized into the cache, where the run will find them.
"""

import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from femto.parser import Parser
from femto.run import load_recipe, locate_config, processes_per_node, refuse_options, refuse_processes, split
from femto.shipped import find_recipe
from femtolib.errors import FemtoError

if TYPE_CHECKING:
    from femtolib.config import ConfigModel
    from femtolib.parallel.mesh import ParallelDims


def main(argv: list[str]) -> int:
    parser = Parser("femto validate", __doc__)
    parser.usage = "femto validate [torchrun options] RECIPE --config CONFIG [key=value …] [--show N] [--deep] [--json]"
    parser.add_argument("--config", metavar="CONFIG", type=Path, required=True, help="the config to check")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to set on top of the config")
    parser.add_argument(
        "--show",
        metavar="N",
        type=int,
        default=0,
        help="print the first N rows of training as text, trained tokens in ⟦ ⟧",
    )
    parser.add_argument("--deep", action="store_true", help="read all data and compare them with their digests")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object, and nothing else")
    if argv[:1] in ([], ["-h"], ["--help"]):
        parser.print_help()
        return 0
    options, name, rest = split(argv)
    path = find_recipe(name)
    arguments = parser.parse_intermixed_args(locate_config(name, rest))
    if arguments.show < 0:
        raise FemtoError(f"--show {arguments.show}: should be a number of rows, 0 or more")

    # With --json, standard output is the object alone: what the checks have to say goes where errors go.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        from femtolib.config import load_config

        recipe = load_recipe(path)
        is_distributed = getattr(recipe, "LAUNCH", "single") == "distributed"
        if not is_distributed:
            refuse_options(name, options)
        config = load_config(recipe.Config, arguments.config, arguments.overrides)
        trains = all(hasattr(config, key) for key in ("model", "data", "global_batch_size"))
        layout = _check_layout(config, options) if is_distributed and trains else None
        if trains:
            numbers = _check_training(config, layout, arguments.show, arguments.deep)
        else:
            numbers = _check_preparation(recipe, config)
    if arguments.json:
        print(json.dumps({key: numbers.get(key) for key in ("parameters", "steps", "tokens_per_step", "parallel")}))
    else:
        print(f"{arguments.config}: no fault found")
    return 0


def _check_layout(config: "ConfigModel", options: list[str]) -> "ParallelDims":
    """The layout on as many processes as torchrun's `options` ask for: the most nodes, where they leave it open."""
    from femto.launch import parse_options
    from femtolib.parallel.mesh import ParallelDims

    if options:
        refuse_processes(config)
    settings = parse_options(["--rdzv-endpoint", "anywhere:0", *options], processes_per_node(config))
    if not hasattr(config, "parallel"):  # each rank has a copy
        ranks = settings.max_nodes * settings.nproc_per_node
        return ParallelDims(max(ranks, getattr(config, "processes", 1)), dp_shard=1, cp=1, tp=1)
    for nodes in range(settings.min_nodes, settings.max_nodes + 1):
        layout = ParallelDims.of(config.parallel, nodes * settings.nproc_per_node)
    return layout


def _check_preparation(recipe: ModuleType, config: "ConfigModel") -> dict[str, int | None]:
    """Look for the files that a recipe which makes data or tokenizers names; of parity, validate what it is to run."""
    from femtolib.data.documents import find_files
    from femtolib.data.tokenizer import load_tokenizer

    if tokenizer := getattr(config, "tokenizer", None):
        load_tokenizer(tokenizer, getattr(config, "eos_token", None))
    if patterns := getattr(config, "input", None):
        print(f"input: {len(find_files(patterns)):,} files")
    if hasattr(recipe, "keys_of") and hasattr(recipe, "command_of"):
        keys = recipe.keys_of(config)
        for number, layout in enumerate(config.layouts, 1):
            command = recipe.command_of(config, layout, keys, config.output_dir / f"layout_{number}")
            print(f"{layout}:")
            main(command[1:])
    return {}


def _check_training(
    config, layout: "ParallelDims | None", show: int, deep: bool
) -> dict[str, int | dict[str, int] | None]:
    """Ask what a training recipe asks before its first step, and print the answers; returns the numbers of --json."""
    from dataclasses import asdict
    from math import ceil

    import torch

    from femtolib.checks import check_inputs, check_layout
    from femtolib.config import resolved
    from femtolib.data.sampler import StatefulDistributedSampler
    from femtolib.data.token_dataset import TokenDataset
    from femtolib.data.token_files import read_index, verify_digests
    from femtolib.data.tokenize import prepare_tokens
    from femtolib.device import choose_device
    from femtolib.model import Decoder
    from femtolib.output import check_output, decide_start
    from femtolib.weights import load_weights

    device = choose_device(config.device)
    check_output(
        config.output_dir,
        data=[*config.data.train, *(config.data.validation or [])],
        sources=[config.model.path, config.tokenizer],
    )
    model_config = check_inputs(config.model, config.data, config.tokenizer)
    with torch.device("meta"):
        model = Decoder(model_config, torch.float32)
    if config.model.weights == "load":
        load_weights(model, config.model.path)  # into nothing: names and shapes are compared
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters in {config.param_dtype}, computing in {config.dtype} on {device}")
    if layout:
        check_layout(layout, model_config, config.data.seq_len)
        print(_describe_layout(layout, model, config.data.seq_len))

    data = config.data
    datasets = {}
    for key, paths in {"train": data.train, "validation": data.validation or []}.items():
        if paths:
            directories = prepare_tokens(
                paths,
                config.tokenizer,
                text_key=data.text_key,
                text_documents=data.text_documents,
                on_bad_document=data.on_bad_document,
            )
            datasets[key] = TokenDataset(directories, rows=data.rows, seq_len=data.seq_len)
            for directory in directories if deep else []:
                verify_digests(directory, read_index(directory))
            print(_describe(key, datasets[key]))
    dataset = datasets["train"]
    sampler = StatefulDistributedSampler(
        len(dataset),
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        steps=config.max_steps,
        epochs=config.epochs,
        seed=config.seed,
        shuffle=data.shuffle,
        tail=data.tail,
    )
    tokens_per_step = config.global_batch_size * data.seq_len
    at_once = config.micro_batch_size * (layout.dp if layout else 1)  # rows in one forward pass of all ranks
    micro_batches = ceil(config.global_batch_size / at_once)
    empty = micro_batches * at_once - config.global_batch_size
    print(
        f"{sampler.steps:,} steps of {config.global_batch_size} rows, {tokens_per_step:,} tokens, each in "
        f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}{' a rank' if layout else ''}"
        f"{f' ({empty} rows of the last stay empty)' if empty else ''}; {sampler.steps_per_epoch:,} steps an epoch, "
        f"which leaves out {sampler.rows_dropped} rows"
    )
    if layout and (idle := layout.dp - ceil(config.global_batch_size / config.micro_batch_size)) > 0:
        print(f"note: {idle} of {layout.dp} ranks get empty rows alone")
    if (warmup := config.schedule.warmup_steps) > sampler.steps:
        print(f"note: schedule.warmup_steps: {warmup} is longer than the run of {sampler.steps} steps")
    identity = {"data": dataset.digest, "model": asdict(model_config)}
    start = decide_start(
        config.output_dir, config.resume, config=resolved(config), identity=identity, steps=sampler.steps
    )
    if start.checkpoint:
        print(f"{config.output_dir}: {'finished' if start.finished else 'goes on'} after step {start.step}")
    if show:
        _show_rows(dataset, sampler, show, document_mask=data.keeps_documents_apart())
    parallel = layout and asdict(layout)
    return {"parameters": parameters, "steps": sampler.steps, "tokens_per_step": tokens_per_step, "parallel": parallel}


def _describe_layout(layout: "ParallelDims", model, seq_len: int) -> str:
    """The sizes, what the largest rank holds, and which rank has what."""
    from dataclasses import astuple
    from math import prod

    from femtolib.parallel.context import SequenceCut

    sizes, shards = astuple(layout), layout.dp_shard * layout.cp
    held = 0
    for name, parameter in model.named_parameters():
        # Norms are not cut over tp, of each pair of matrices the second by columns; then all are by rows, rounded up.
        by_columns = ".o_proj." in name or ".down_proj." in name
        rows = len(parameter) // (1 if by_columns or "norm" in name else layout.tp)
        columns = parameter[0].numel() // (layout.tp if by_columns and parameter.ndim > 1 else 1)
        held += -(-rows // shards) * columns
    lines = [f"ranks: {layout}; at most {held:,} parameters a rank"]
    count = prod(sizes)
    if count > 1:
        lines.append(f"{'rank':>6}  {'copy':9}  {'shard':9}  {'rows':9}  {'matrices':9}  tokens of a row")
    shown = range(count) if 1 < count <= 16 else [*range(8), count - 1] if count > 1 else []
    for rank in shown:
        if count > 16 and rank == count - 1:
            lines.append("     …")
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        copy, dp_shard = divmod(rest, layout.dp_shard)
        parts = [(copy, layout.dp_replicate), (dp_shard * layout.cp + cp, shards), (rest, layout.dp), (tp, layout.tp)]
        shown = "  ".join(f"{f'{part} of {of}':9}" for part, of in parts)
        chunks = SequenceCut(seq_len, cp, layout.cp).chunks
        tokens = "all" if layout.cp == 1 else " and ".join(f"{start}–{stop - 1}" for start, stop in chunks)
        lines.append(f"{rank:6}  {shown}  {tokens}")
    return "\n".join(lines)


def _describe(key: str, dataset) -> str:
    left = f", {dataset.tokens_left_over:,} tokens left over" if dataset.tokens_left_over else ""
    cut = f", {dataset.truncated:,} documents truncated" if dataset.truncated else ""
    untrained = (
        f", {dataset.rows_without_trained_tokens:,} rows train nothing" if dataset.rows_without_trained_tokens else ""
    )
    return (
        f"data.{key}: {dataset.tokens:,} tokens in {dataset.documents:,} documents make {len(dataset):,} rows of "
        f"{dataset.seq_len}{left}{cut}{untrained}"
    )


def _show_rows(dataset, sampler, count: int, *, document_mask: bool) -> None:
    """Print the first rows that training would get; tokens that it would be trained to predict stand in ⟦ ⟧."""
    from itertools import groupby, islice

    from femtolib.data.loader import make_loader
    from femtolib.data.tokenizer import load_tokenizer
    from femtolib.loss import NOT_TRAINED

    tokenizer = load_tokenizer(dataset.tokenizer_directory)
    batches = make_loader(dataset, sampler, document_mask=document_mask)
    rows = (row for batch in batches for row in zip(batch.rows, batch.labels.tolist(), strict=False))
    for index, labels in islice(rows, min(count, sys.maxsize)):
        tokens = dataset[index].tokens.tolist()
        trained = [False] + [label != NOT_TRAINED for label in labels]
        print(f"row {index}: {len(tokens)} tokens, {sum(trained)} trained")
        for is_trained, span in groupby(zip(tokens, trained, strict=False), key=lambda pair: pair[1]):
            text = tokenizer.decode([token for token, _ in span])
            print(f"⟦{text}⟧" if is_trained else text, end="")
        print()
