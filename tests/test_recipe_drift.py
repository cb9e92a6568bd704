"""Recipes are copies of each other where they do the same, and copies drift. So what two recipes have under one name
has one body: a section of `main` with the same title, a key of `Config` of the same type, a function. What differs all
the same stands below, statement by statement, with its reason. A difference that nobody explained fails, and so does an
explanation of one that is gone. Syntax trees are compared: comments, docstrings and line breaks may differ.
"""

import ast
import re
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = {path.stem: path.read_text() for path in (Path(__file__).parent.parent / "recipes").glob("[!_]*.py")}

# ── What a distributed recipe does around what a single one does ──────────────────────────────────────────────────────
# These are read as if they were not there where a distributed recipe is held against a single one. Two distributed
# recipes are compared as they stand.

CALLS = {  # world.NAME(lambda: …) or world.NAME(…) is read as what it holds
    "attempt": "what one rank may find wrong and another not is asked of all together",
    "from_first": "what is there once for all ranks is asked or written by the first",
    "any": "a flag of one rank is the flag of all",
    "max": "the largest of the ranks' numbers",
}
KEYWORDS = {  # an argument of that name is read as if it were not there
    "muted": "the first rank alone writes and shows",
    "dp_rank": "which rows are this rank's",
    "dp_size": "which rows are this rank's",
    "agreed": "all ranks raise it, one shows it",
    "launch": "one of several processes ends in another way",
    "restarted": "a launcher starts several processes again when one has failed",
}


WHOLE = "…"


class Explained(NamedTuple):
    """A difference: what the first recipe has and what the second has in its place (spaces, line breaks and kinds of
    quotes do not matter), and why. WHOLE against WHOLE: two parts that have no more than the name in common."""

    part: str
    first: str
    second: str
    why: str


EXPLAINED: dict[tuple[str, str], list[Explained]] = {
    ("data_parallel_pretrain", "distributed_pretrain"): [
        Explained(
            "Data",
            "dp_rank=world.rank, dp_size=world.size,",
            "dp_rank=meshes.dp.get_local_rank(), dp_size=meshes.dp.size(),",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Data",
            "if (idle := (world.size - math.ceil(config.global_batch_size / config.micro_batch_size))) > 0: "
            "print(f'note: {idle} of {world.size} ranks get empty rows alone: global_batch_size "
            "{config.global_batch_size} makes too few micro-batches of micro_batch_size "
            "{config.micro_batch_size}')",
            "if (idle := (meshes.dp.size() - math.ceil(config.global_batch_size / config.micro_batch_size))) > "
            "0: print(f'note: {idle} of {meshes.dp.size()} ranks get empty rows alone: global_batch_size "
            "{config.global_batch_size} makes too few micro-batches of micro_batch_size "
            "{config.micro_batch_size}')",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Model",
            "",
            "split_matrices(model, meshes.tp) model.tie_weights() compiler.layers(model) compute_loss = "
            "compiler.loss(summed_cross_entropy) shard_model(model, meshes.fsdp, compute_dtype=compute_dtype, "
            "param_dtype=param_dtype)",
            "every rank has the whole model",
        ),
        Explained("Model", "model.tie_weights()", "", "every rank has the whole model"),
        Explained(
            "Model",
            "",
            "assert not any((tensor.is_meta for tensor in model.parameters())), 'a parameter was left without memory'",
            "every rank has the whole model",
        ),
        Explained(
            "Model",
            "broadcast_weights(model) replica = model if compute_dtype != param_dtype: accumulation_dtype = "
            "torch.float32 if config.accumulate_in == 'float32' else compute_dtype replica = "
            "compute_copy(model, compute_dtype, accumulation_dtype) compiler.layers(replica) compute_loss = "
            "compiler.loss(summed_cross_entropy) synchronizer = "
            "GradientSynchronizer(replica, bucket_mb=config.gradient_sync.bucket_mb, "
            "overlap=config.gradient_sync.overlap, "
            "communication_dtype=DTYPES.get(config.gradient_sync.communication_dtype), "
            "find_unused_parameters=config.gradient_sync.find_unused_parameters, "
            "static_graph=config.gradient_sync.static_graph)",
            "sequence = SequenceCut.over(meshes.cp, config.data.seq_len)",
            "the sums of gradients, and mixed precision, in the open",
        ),
        Explained(
            "Optimizer and schedule",
            "loss_scale = LossScale() if compute_dtype == torch.float16 else None def transform_gradients() -> "
            "float: grad_norm = clip_gradients(model, config.max_grad_norm) if config.max_grad_value is not "
            "None: torch.nn.utils.clip_grad_value_(model.parameters(), config.max_grad_value) return grad_norm",
            "",
            "float16's loss scale; the chain of gradient transforms",
        ),
        Explained(
            "Resume",
            "copy_weights(model, replica) if loss_scale and start.state.get('loss_scale'): loss_scale = "
            "LossScale(**start.state['loss_scale'])",
            "",
            "where it computes in a smaller dtype, a replica computes",
        ),
        Explained(
            "Resume",
            "if config.log.samples:",
            "if config.log.samples and meshes.is_first_of_rows:",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Validation",
            "global_batch_size=config.micro_batch_size * world.size,",
            "global_batch_size=config.micro_batch_size * meshes.dp.size(),",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Validation",
            "dp_rank=world.rank, dp_size=world.size,",
            "dp_rank=meshes.dp.get_local_rank(), dp_size=meshes.dp.size(),",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Validation",
            "replica.eval()",
            "model.eval()",
            "where it computes in a smaller dtype, a replica computes",
        ),
        Explained(
            "Validation",
            "attend = plan_attention(batch.document_ids, device=device, dtype=compute_dtype) batch = "
            "batch.to(device) logits = replica(batch.input_ids, batch.position_ids, attend)",
            "attend = plan_attention(batch.document_ids, sequence, device=device, dtype=compute_dtype) batch = "
            "sequence.take_batch(batch).to(device) logits = model(batch.input_ids, batch.position_ids, attend)",
            "a replica may compute, and always on whole rows",
        ),
        Explained(
            "Validation",
            "replica.train()",
            "model.train() drop_gathered(model)",
            "where it computes in a smaller dtype, a replica computes",
        ),
        Explained(
            "Validation",
            "dist.all_reduce(summed_loss) [tokens] = world.sum(tokens)",
            "dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group()) [tokens] = world.sum(tokens if "
            "meshes.is_first_of_rows else 0)",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Checkpoint",
            "'loss_scale': loss_scale and asdict(loss_scale),",
            "",
            "float16 needs a loss scale, and all ranks skip a step together",
        ),
        Explained(
            "Training loop",
            "",
            "counted = micro_batches if meshes.is_first_of_rows else []",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Training loop",
            "stops = world.sum(sum((batch.trained_tokens for batch in micro_batches)), sum((batch.digest for "
            "batch in micro_batches)),",
            "stops = world.sum(sum((batch.trained_tokens for batch in counted)), sum((batch.digest for batch "
            "in counted)),",
            "each rank sees rows of its own: there are no other dimensions",
        ),
        Explained(
            "Training loop",
            "scale = loss_scale.value if loss_scale else 1.0",
            "",
            "float16 needs a loss scale, and all ranks skip a step together",
        ),
        Explained(
            "Training loop",
            "attend = plan_attention(batch.document_ids, device=device, dtype=compute_dtype) batch = "
            "batch.to(device) with nullcontext() if number == len(micro_batches) else synchronizer.no_sync(): "
            "logits = replica(batch.input_ids, batch.position_ids, attend) micro_loss = compute_loss(logits, "
            "batch.labels) del logits (micro_loss * scale / trained_tokens).backward()",
            "reduce_gradients(model, is_last=number == len(micro_batches), "
            "deferred=config.parallel.defer_gradient_reduction) attend = plan_attention(batch.document_ids, "
            "sequence, device=device, dtype=compute_dtype) batch = sequence.take_batch(batch).to(device) logits "
            "= model(batch.input_ids, batch.position_ids, attend) micro_loss = compute_loss(logits, "
            "batch.labels) del logits (micro_loss * dims.averaged / trained_tokens).backward()",
            "whole rows, and the synchronizer's sums, not FSDP's means",
        ),
        Explained(
            "Training loop",
            "synchronizer.finish() dist.all_reduce(summed_loss)",
            "dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group())",
            "the synchronizer's sums, not FSDP's means",
        ),
        Explained(
            "Training loop",
            "hand_over_gradients(replica, model, divide_by=scale) grad_norm = transform_gradients() overflowed "
            "= world.any(not math.isfinite(grad_norm)) if loss_scale else False if overflowed and "
            "math.isfinite(loss) and (scale > 1): grad_norm = None elif not (math.isfinite(loss) and "
            "math.isfinite(grad_norm)):",
            "grad_norm = clip_gradients(model, config.max_grad_norm) if not (math.isfinite(loss) and "
            "math.isfinite(grad_norm)):",
            "float16 needs a loss scale, and all ranks skip a step together",
        ),
        Explained(
            "Training loop",
            "else: set_learning_rate(optimizer, lr) optimizer.step() copy_weights(model, replica) if "
            "loss_scale: loss_scale.update(overflowed)",
            "set_learning_rate(optimizer, lr) optimizer.step()",
            "float16 needs a loss scale, and all ranks skip a step together",
        ),
        Explained(
            "Training loop",
            "loss_scale=loss_scale and loss_scale.value, skipped_updates=loss_scale and loss_scale.skipped,",
            "",
            "float16 needs a loss scale, and all ranks skip a step together",
        ),
        Explained("Finish", "", "whole = whole_parameters(model, world)", "every rank has the whole model"),
        Explained("Finish", "model.named_parameters(),", "whole,", "every rank has the whole model"),
        Explained("Finish", "", "else: for _ in whole: pass", "every rank has the whole model"),
    ],
    ("distributed_pretrain", "single_device_pretrain"): [
        Explained(
            "Data",
            "def prepare() -> list[Path]: return prepare_tokens(paths,",
            "directories = prepare_tokens(paths,",
            "once a node, then by all; alone, once",
        ),
        Explained(
            "Data",
            "prepare() if world.local_rank == 0 else None return TokenDataset(prepare(), "
            "rows=config.data.rows, seq_len=config.data.seq_len)",
            "return TokenDataset(directories, rows=config.data.rows, seq_len=config.data.seq_len)",
            "the first process of a node tokenizes, the others find the tokens made",
        ),
        Explained(
            "Data",
            "if (idle := (meshes.dp.size() - math.ceil(config.global_batch_size / config.micro_batch_size))) > 0: "
            "print(f'note: {idle} of {meshes.dp.size()} ranks get empty rows alone: global_batch_size "
            "{config.global_batch_size} makes too few micro-batches of micro_batch_size {config.micro_batch_size}')",
            "",
            "one process has all rows",
        ),
        Explained(
            "Data",
            "world.check_same({**flatten(resolved(config)), 'the digest of data.train': dataset.digest, "
            "'the digest of data.validation': validation_dataset and validation_dataset.digest})",
            "",
            "every rank has read a config and data of its own",
        ),
        Explained(
            "Model",
            "split_matrices(model, meshes.tp)",
            "model.to_empty(device=device)",
            "alone, a model gets its memory before its ties",
        ),
        Explained(
            "Model",
            "compiler.layers(model) compute_loss = "
            "compiler.loss(summed_cross_entropy) shard_model(model, meshes.fsdp, compute_dtype=compute_dtype, "
            "param_dtype=param_dtype) model.to_empty(device=device)",
            "",
            "tied, compiled, then sharded, and only then given memory: no rank ever holds the whole model",
        ),
        Explained(
            "Model",
            "assert not any((tensor.is_meta for tensor in model.parameters())), 'a parameter was left without memory'",
            "compiler.layers(model) compute_loss = compiler.loss(summed_cross_entropy)",
            "what a rank was not given memory for is not seen in the others' losses",
        ),
        Explained(
            "Model",
            "sequence = SequenceCut.over(meshes.cp, config.data.seq_len)",
            "",
            "ranks may share a row",
        ),
        Explained("Resume", "world.close()", "", "ranks leave together"),
        Explained("Resume", "check_shared(output_dir, start)", "", "nodes may see another folder of that name"),
        Explained(
            "Resume",
            "samples = None if config.log.samples and meshes.is_first_of_rows: "
            "samples = open_samples(output_dir, step, rank=world.rank, world_size=world.size)",
            "samples = open_samples(output_dir, step) if config.log.samples else None",
            "one file for each rank that has rows of its own",
        ),
        Explained(
            "Resume",
            "layout = {'world_size': world.size, 'parallel': asdict(dims)}",
            "layout = {'world_size': 1, 'parallel': None}",
            "one process has no layout",
        ),
        Explained(
            "Resume",
            "print(f'ranks: {dims}')",
            "",
            "one process has no layout",
        ),
        Explained(
            "Validation",
            "progress = tqdm(total=steps, initial=step, unit='step', disable=None if is_first else True)",
            "progress = tqdm(total=steps, initial=step, unit='step', disable=None)",
            "the first rank alone shows",
        ),
        Explained(
            "Validation",
            "global_batch_size=config.micro_batch_size * meshes.dp.size(),",
            "global_batch_size=config.micro_batch_size,",
            "one forward pass of all ranks",
        ),
        Explained(
            "Validation",
            "attend = plan_attention(batch.document_ids, sequence, device=device, dtype=compute_dtype) batch = "
            "sequence.take_batch(batch).to(device)",
            "attend = plan_attention(batch.document_ids, device=device, dtype=compute_dtype) batch = batch.to(device)",
            "ranks may share a row",
        ),
        Explained("Validation", "stopped = False", "", "all ranks know of a stop, or none"),
        Explained(
            "Validation",
            "if (stopped := stop.requested):",
            "if stop.requested:",
            "all ranks know of a stop, or none: asked once a pass",
        ),
        Explained(
            "Validation",
            "drop_gathered(model) if stopped:",
            "if stop.requested:",
            "forward passes leave gathered parameters behind",
        ),
        Explained(
            "Validation",
            "dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group()) "
            "[tokens] = world.sum(tokens if meshes.is_first_of_rows else 0)",
            "",
            "each rank has seen its rows",
        ),
        Explained(
            "Resume",
            "checkpoints = CheckpointWriter(output_dir / 'checkpoints', "
            "keep_last=config.checkpoint.keep_last, world=world)",
            "checkpoints = CheckpointWriter(output_dir / 'checkpoints', "
            "keep_last=config.checkpoint.keep_last, world=World())",
            "every rank writes its shards",
        ),
        Explained(
            "Training loop",
            "counted = micro_batches if meshes.is_first_of_rows else [] trained_tokens, digest, stops = "
            "world.sum(sum((batch.trained_tokens for batch in counted)), sum((batch.digest for batch in counted)), "
            "int(stop.requested or checkpoints.failed)) if stops:",
            "if stop.requested or checkpoints.failed:",
            "tokens, digest and stop in one sum over all ranks",
        ),
        Explained(
            "Training loop",
            "batch_digest = f'{digest % 2 ** 64:016x}'",
            "trained_tokens = sum((batch.trained_tokens for batch in micro_batches)) "
            "batch_digest = f'{sum((batch.digest for batch in micro_batches)) % 2 ** 64:016x}'",
            "tokens, digest and stop in one sum over all ranks",
        ),
        Explained(
            "Training loop",
            "for number, batch in enumerate(micro_batches, 1): reduce_gradients(model, "
            "is_last=number == len(micro_batches), deferred=config.parallel.defer_gradient_reduction) attend = "
            "plan_attention(batch.document_ids, sequence, device=device, dtype=compute_dtype) batch = "
            "sequence.take_batch(batch).to(device)",
            "for batch in micro_batches: attend = plan_attention(batch.document_ids, device=device, "
            "dtype=compute_dtype) batch = batch.to(device)",
            "gradients are reduced over ranks, not after every micro-batch; ranks may share a row",
        ),
        Explained(
            "Training loop",
            "(micro_loss * dims.averaged / trained_tokens).backward()",
            "(micro_loss / trained_tokens).backward()",
            "FSDP takes the mean over ranks where a sum is meant",
        ),
        Explained(
            "Training loop",
            "dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group())",
            "",
            "each rank has the loss of its rows",
        ),
        Explained(
            "Training loop",
            "config.data.seq_len) * tokens_per_second / (peak * world.size) if peak else None)",
            "config.data.seq_len) * tokens_per_second / peak if peak else None)",
            "of all devices",
        ),
        Explained(
            "Training loop",
            "mine = tensors_digest((item for item in tensors if item[0].startswith(part))) "
            "record[key] = world.together(lambda mine=mine: mine)",
            "record[key] = [tensors_digest((item for item in tensors if item[0].startswith(part)))]",
            "each rank has its shards",
        ),
        Explained(
            "Training loop",
            "profiler = write_trace(profiler, output_dir / 'profile' / f'trace-rank{world.rank}-to-step{step}.json')",
            "profiler = write_trace(profiler, output_dir / 'profile' / f'trace-rank0-to-step{step}.json')",
            "a file a rank",
        ),
        Explained(
            "Finish",
            "write_trace(profiler, output_dir / 'profile' / f'trace-rank{world.rank}-to-step{step}.json')",
            "write_trace(profiler, output_dir / 'profile' / f'trace-rank0-to-step{step}.json')",
            "a file a rank",
        ),
        Explained("Finish", "world.close()", "", "ranks leave together, after a stop"),
        Explained(
            "Finish",
            "whole = whole_parameters(model, world) if is_first: save_model(output_dir / 'model',",
            "save_model(output_dir / 'model',",
            "the first rank writes",
        ),
        Explained("Finish", "whole,", "model.named_parameters(),", "gathered one by one"),
        Explained("Finish", "else: for _ in whole: pass", "", "gathering takes all ranks"),
        Explained("Finish", "if start.lock: start.lock.close()", "start.lock.close()", "the first rank has the lock"),
        Explained("Finish", "world.close()", "", "ranks leave together, at the end"),
    ],
    ("preprocess", "train_tokenizer"): [
        Explained(
            "Config.text_key: str",
            "text_key: str = Field('text', min_length=1, "
            "description='.jsonl, .parquet, dataset: the key that holds the text')",
            "text_key: str = Field('text', min_length=1, "
            "description='.jsonl and .parquet: the key that holds the text')",
            "a tokenizer is trained on files alone",
        ),
        Explained(
            "Documents", WHOLE, WHOLE, "one reads Hugging Face data sets, too, the other counts what it leaves out"
        ),
        Explained("Tokenizer", WHOLE, WHOLE, "one loads a tokenizer, the other makes one"),
    ],
}


# ── Reading a recipe ──────────────────────────────────────────────────────────────────────────────────────────────────


class _WithoutTexts(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node


class _Alone(ast.NodeTransformer):
    """Reads a distributed recipe as if it were for one process; `used` are the names of CALLS and KEYWORDS it met."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        self.used |= {keyword.arg for keyword in node.keywords if keyword.arg in KEYWORDS}
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in KEYWORDS]
        match node:
            case ast.Call(ast.Attribute(ast.Name("world"), name), [held], []) if name in CALLS:
                self.used.add(name)
                return held.body if isinstance(held, ast.Lambda) else held
        return node


def parts(source: str, alone: _Alone | None = None) -> dict[str, list[str]]:
    """The parts of a recipe by name (`Resume`, `write_trace`, `Config.seed: sections.Seed`), each in lines that depend
    on its syntax tree alone: one for each statement, or several of a long one."""
    titled = re.sub(r"^( *)# ── \d+ (.+?) ─+$", r"\1TITLE['\2']", source, flags=re.M)  # a statement, and so in the tree
    tree = _WithoutTexts().visit(ast.parse(titled))
    tree = alone.visit(tree) if alone else tree
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            keys = [key for key in node.body if isinstance(key, ast.AnnAssign)]
            found |= {f"{node.name}.{ast.unparse(key).partition(' =')[0]}": [ast.unparse(key)] for key in keys}
        elif isinstance(node, ast.FunctionDef):
            name = node.name
            for line in ast.unparse(node).splitlines():
                if title := re.fullmatch(r" *TITLE\['(.+)'\]", line):
                    name = title[1]
                else:
                    found.setdefault(name, []).extend(re.split("(?<=,) ", line) if len(line) > 120 else [line])
    found.pop("main", None)  # what stands in it before its first title
    return found


# ── Comparing two ─────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(first: dict[str, list[str]], second: dict[str, list[str]]) -> list[Explained]:
    """Each place where parts of the same name differ, not yet explained."""
    found = []
    for part in (name for name in first if name in second):
        matcher = SequenceMatcher(None, first[part], second[part], autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                found.append(Explained(part, "\n".join(first[part][a:b]), "\n".join(second[part][c:d]), ""))
    return found


def complaints(first: str, second: str, explained: list[Explained], used: set[str]) -> list[str]:
    """What is wrong between two sources: differences without an explanation, explanations without a difference.

    Adds to `used` the names of CALLS and KEYWORDS that their comparison takes.
    """
    alone = _Alone()
    is_distributed = [re.search("^LAUNCH = .distributed", source, re.M) is not None for source in (first, second)]
    read = [
        parts(source, alone if mine and not all(is_distributed) else None)
        for source, mine in zip((first, second), is_distributed, strict=True)
    ]
    used |= alone.used
    stale, unexplained = list(explained), []
    namesakes = {explanation.part for explanation in explained if explanation.first == WHOLE}
    for difference in differences(*read):
        fitting = [e for e in stale if _same(e, difference) or (e.part == difference.part and e.first == WHOLE)]
        if fitting:
            stale.remove(fitting[0])
        elif difference.part not in namesakes:
            unexplained.append(difference)
    return [
        f"{what}, in {part}:\n{theirs or '(nothing)'}\n  against\n{others or '(nothing)'}"
        for what, those in {"not explained": unexplained, "explained, and no longer so": stale}.items()
        for part, theirs, others, _ in those
    ]


def _same(*pair: Explained) -> bool:
    one, two = (["".join(text.split()).replace('"', "'") for text in each[:3]] for each in pair)
    return one == two


# ── The tests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_two_recipes_have_under_one_name_has_one_body_or_a_reason():
    used: set[str] = set()
    pairs = set(combinations(sorted(SOURCES), 2))
    assert EXPLAINED.keys() <= pairs
    # Two whose differences from a third are explained need no explanation of their own.
    through_a_third = {(first, last) for first, middle in EXPLAINED for other, last in EXPLAINED if other == middle}
    for pair in sorted(pairs - through_a_third):
        found = complaints(*(SOURCES[name] for name in pair), EXPLAINED.get(pair, []), used)
        assert not found, f"{' and '.join(pair)}:\n\n" + "\n\n".join(found)
    assert used == CALLS.keys() | KEYWORDS.keys(), "what is read as if it were not there is there no more"
    assert all(difference.why for differences in EXPLAINED.values() for difference in differences)


ONE = '''
"""A recipe."""
LAUNCH = "single"


class Config(ConfigModel):
    seed: int = 0


def main(config):
    # ── 1 Data ────────────────────────────────────────────────────────────────────────────────────────────────────────
    rows = read(config.paths, seed=config.seed)
    for row in rows:
        # ── 2 Loop ────────────────────────────────────────────────────────────────────────────────────────────────────
        loss = train(row)
    log(loss)
'''


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("config.seed)", "config.seed + 1)"),
        ("log(loss)", "    log(loss)"),
        ("    log(loss)", "    log(loss)\n" * 3),
        ("    log(loss)\n", ""),
        ("seed: int = 0", "seed: int = 1"),
        ("1 Data ─", "1 Loop ─"),
    ],
)
def test_a_changed_statement_or_key_is_a_complaint_until_it_is_explained(before, after):
    other = ONE.replace(before, after)
    assert other != ONE
    found = differences(parts(ONE), parts(other))
    assert len(complaints(ONE, other, [], set())) == len(found) > 0
    assert not complaints(ONE, other, found, set())
    assert len(complaints(ONE, ONE, found, set())) == len(found), "an explanation of nothing"
    once_more = other.replace("train(row)", "train(rows)")
    assert complaints(ONE, once_more, found, set()), "a second difference beside an explained one"
    namesakes = [Explained(part, WHOLE, WHOLE, "") for part in {difference.part for difference in found}]
    assert not complaints(ONE, other, namesakes, set()) and complaints(ONE, ONE, namesakes, set())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""A recipe."""', '"""Another."""'),
        ("log(loss)", "log(loss)  # shown"),
        ("(config.paths, ", "(\n        config.paths,\n        "),
        ("2 Loop", "3 Loop"),
        ("1 Data ─", "1 Rows ─"),
        ("seed: int = 0", "seeds: int = 1"),
    ],
)
def test_comments_line_breaks_numbers_and_what_only_one_of_them_has_are_no_difference(before, after):
    other = ONE.replace(before, after)
    assert other != ONE and not complaints(ONE, other, [], set())


def test_what_makes_one_process_one_of_many_is_read_over_against_a_single_recipe_alone():
    many = ONE.replace('"single"', '"distributed"')
    for before, after in (
        (
            "read(config.paths, seed=config.seed)",
            "world.attempt(lambda: read(config.paths, seed=config.seed, dp_rank=0))",
        ),
        ("log(loss)", "log(world.max(loss), muted=True)"),
    ):
        assert before in many
        used: set[str] = set()
        changed = many.replace(before, after)
        assert not complaints(ONE, changed, [], used) and len(used) == 2
        assert complaints(many, changed, [], set())
