"""Pretrain a language model on any number of devices: documents in, a Hugging Face model directory out.

    femto run [--nproc-per-node 8] distributed_pretrain --config configs/llama_small.yaml [key=value …]

Runs as one process or many, on CPUs or GPUs, on one node or several. How the processes share the work (the section
`parallel` of the config) changes neither the batches nor the loss. Stopped by Ctrl-C or SIGTERM it saves its state;
started again with the same command, on as many processes as there are then, it goes on as if it had never stopped.

To make it your own: `femto cp distributed_pretrain mine.py`, edit, `femto run ./mine.py --config …`. What people edit
first is the loss (section 8) and what a batch is made of (section 2).
"""

import hashlib
import math
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from femtolib import sections
from femtolib.attention import plan_attention
from femtolib.checkpoint import CheckpointWriter, load_tensors, tensor_shapes
from femtolib.checks import check_inputs, check_layout
from femtolib.command import EXIT_DONE, EXIT_STOPPED, recipe_name, run_recipe
from femtolib.compile import Compiler
from femtolib.config import ConfigModel, flatten, resolved
from femtolib.data.loader import make_loader
from femtolib.data.sampler import StatefulDistributedSampler
from femtolib.data.token_dataset import TokenDataset
from femtolib.data.tokenize import prepare_tokens
from femtolib.data.tokenizer import load_tokenizer
from femtolib.device import DTYPES, choose_device, peak_flops, peak_memory_bytes, prepare_process
from femtolib.errors import RunFailed
from femtolib.loss import summed_cross_entropy
from femtolib.metrics import (
    LEDGER_START,
    JsonLines,
    Trackers,
    next_ledger,
    open_samples,
    tensors_digest,
    verify_ledger,
    was_logged,
)
from femtolib.model import Decoder
from femtolib.model_config import flops_per_token
from femtolib.optim import (
    all_finite,
    build_optimizer,
    clip_gradients,
    make_room_for_state,
    set_learning_rate,
    training_tensors,
)
from femtolib.output import check_output, check_shared, claim_output, write_config
from femtolib.parallel.context import SequenceCut
from femtolib.parallel.fsdp import drop_gathered, reduce_gradients, shard_model, whole_parameters
from femtolib.parallel.mesh import ParallelDims, build_meshes
from femtolib.parallel.tensor import split_matrices
from femtolib.parallel.world import World
from femtolib.schedule import learning_rate, scale_learning_rate
from femtolib.stop import StopRequest
from femtolib.weights import initialize_weights, load_weights, save_model

LAUNCH = "distributed"


class Config(ConfigModel):
    output_dir: sections.OutputDir
    seed: sections.Seed = 0
    device: sections.Device = "auto"
    threads: sections.Threads = None
    deterministic: sections.Deterministic = False
    process_group_timeout: sections.ProcessGroupTimeout = 600
    dtype: sections.ComputeDtype = "float32"
    param_dtype: sections.ParamDtype = "float32"
    resume: sections.Resume = "auto"
    model: sections.ModelSection
    tokenizer: sections.Tokenizer = None
    data: sections.DataSection
    global_batch_size: sections.GlobalBatchSize = 8
    micro_batch_size: sections.MicroBatchSize = 1
    max_steps: sections.MaxSteps = None
    epochs: sections.Epochs = None
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    max_grad_norm: sections.MaxGradNorm = 1.0
    schedule: sections.ScheduleSection = sections.ScheduleSection()
    parallel: sections.ParallelSection = sections.ParallelSection()
    activation_checkpointing: str = sections.activation_checkpointing()
    activation_offloading: bool = sections.activation_offloading()
    optimizer_in_backward: bool = sections.optimizer_in_backward()
    loss: sections.LossSection = sections.LossSection()
    compile: sections.CompileSection = sections.CompileSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    export: sections.ExportSection = sections.ExportSection()
    validate_every: sections.ValidateEvery = None
    validation_max_rows: sections.ValidationMaxRows = None
    log: sections.LogSection = sections.LogSection()
    profile: sections.ProfileSection = sections.ProfileSection()


def main(config: Config) -> int:
    # ── 1 Devices and mesh ────────────────────────────────────────────────────────────────────────────────────────────
    # Every process runs this page from top to bottom, with a rank of its own. What one of them may find wrong and
    # another not is asked of all together: a rank that stopped alone would leave the others waiting for it.
    device = choose_device(config.device)
    prepare_process(device, threads=config.threads, deterministic=config.deterministic)
    compute_dtype, param_dtype = DTYPES[config.dtype], DTYPES[config.param_dtype]
    world = World.join(device, config.process_group_timeout)
    is_first = world.rank == 0
    dims = world.attempt(lambda: ParallelDims.of(config.parallel, world.size))
    meshes = build_meshes(dims, device.type, config.process_group_timeout)

    # Whatever the headers of the named files can tell to be wrong is told now, before hours of tokenizing or training.
    world.from_first(
        lambda: check_output(
            config.output_dir,
            data=[*config.data.train, *(config.data.validation or [])],
            sources=[config.model.path, config.tokenizer],
        )
    )
    model_config = world.attempt(lambda: check_inputs(config.model, config.data, config.tokenizer))
    world.attempt(lambda: check_layout(dims, model_config, config.data.seq_len))
    compiler = world.attempt(lambda: Compiler(config.compile, device))

    # ── 2 Data ────────────────────────────────────────────────────────────────────────────────────────────────────────
    # Rows are a pure function of the token files and seq_len; their order is a keyed permutation, a function of seed
    # and epoch. So the rows of any step are known without replaying those before it, and a resume is one number. The
    # rows of a step do not depend on the layout; which rank reads which of them does.
    def open_rows(paths: list[str]) -> TokenDataset:
        def prepare() -> list[Path]:
            return prepare_tokens(
                paths,
                config.tokenizer,
                text_key=config.data.text_key,
                text_documents=config.data.text_documents,
                on_bad_document=config.data.on_bad_document,
            )

        world.attempt(lambda: prepare() if world.local_rank == 0 else None)  # once a node: the others find it made
        return world.attempt(lambda: TokenDataset(prepare(), rows=config.data.rows, seq_len=config.data.seq_len))

    def load_rows(dataset: TokenDataset, sampler: StatefulDistributedSampler) -> StatefulDataLoader:
        return make_loader(
            dataset,
            sampler,
            document_mask=config.data.keeps_documents_apart(),
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
            pin_memory=device.type == "cuda",
        )

    dataset = open_rows(config.data.train)
    sampler = world.attempt(
        lambda: StatefulDistributedSampler(
            len(dataset),
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            steps=config.max_steps,
            epochs=config.epochs,
            dp_rank=meshes.dp.get_local_rank(),
            dp_size=meshes.dp.size(),
            seed=config.seed,
            shuffle=config.data.shuffle,
            tail=config.data.tail,
        )
    )
    if (idle := meshes.dp.size() - math.ceil(config.global_batch_size / config.micro_batch_size)) > 0:
        print(
            f"note: {idle} of {meshes.dp.size()} ranks get empty rows alone: global_batch_size "
            f"{config.global_batch_size} makes too few micro-batches of micro_batch_size {config.micro_batch_size}"
        )
    validation_dataset = open_rows(config.data.validation) if config.data.validation else None
    world.check_same(
        {
            **flatten(resolved(config)),
            "the digest of data.train": dataset.digest,
            "the digest of data.validation": validation_dataset and validation_dataset.digest,
        }
    )

    # ── 3 Model ───────────────────────────────────────────────────────────────────────────────────────────────────────
    # Built without memory ("meta"), cut and sharded, given memory, then filled: no rank ever holds the whole model, nor
    # a weight twice. Initial weights are a function of seed and name alone, so every layout of devices starts from the
    # same ones; stored ones are read by every rank, the bytes of its shards alone.
    with torch.device("meta"):
        model = Decoder(model_config, compute_dtype).to(param_dtype)
    split_matrices(model, meshes.tp)
    model.tie_weights()
    compiler.layers(model)
    compute_loss = compiler.loss(summed_cross_entropy)
    shard_model(model, meshes.fsdp, compute_dtype=compute_dtype, param_dtype=param_dtype)
    model.to_empty(device=device)
    if config.model.weights == "random":
        initialize_weights(model, config.seed)
    else:
        world.attempt(lambda: load_weights(model, config.model.path))
    assert not any(tensor.is_meta for tensor in model.parameters()), "a parameter was left without memory"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sequence = SequenceCut.over(meshes.cp, config.data.seq_len)

    # ── 4 Optimizer and schedule ──────────────────────────────────────────────────────────────────────────────────────
    # The learning rate is computed from the step, so there is no scheduler whose state could be lost. More devices do
    # not change it, since global_batch_size is what it was.
    optimizer = build_optimizer(model, config.optimizer)
    compiler.step(optimizer)
    steps = sampler.steps
    reference = config.optimizer.lr_reference_batch_size
    peak_lr = scale_learning_rate(config.optimizer.lr, config.global_batch_size, reference)
    if reference:
        print(f"peak learning rate: {peak_lr:.3g}, for {config.global_batch_size} rows a step instead of {reference}")
    if config.schedule.warmup_steps > steps > 0:
        print(f"note: schedule.warmup_steps: {config.schedule.warmup_steps} is longer than the run of {steps} steps")

    # ── 5 Resume ──────────────────────────────────────────────────────────────────────────────────────────────────────
    # Tensors come from the checkpoint, each rank reading what its shards need, on whatever layout they were saved;
    # everything else comes from its state.json. A changed config is refused where it would change what is trained: a
    # run that goes on must be the run that was stopped.
    output_dir = config.output_dir
    recipe_digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    identity = {"data": dataset.digest, "model": asdict(model_config)}
    start = world.from_first(
        lambda: claim_output(
            output_dir,
            config.resume,
            config=resolved(config),
            identity=identity,
            steps=steps,
            restarted=world.restarted,
        )
    )
    if start.finished:
        print(f"{output_dir} holds a finished run of {steps} steps: nothing to do; its model: {output_dir / 'model'}")
        world.close()
        return EXIT_DONE
    world.attempt(lambda: check_shared(output_dir, start))
    step, ledger = start.step, LEDGER_START
    if start.checkpoint:
        ledger = start.state["ledger"]
        world.from_first(lambda: verify_ledger(output_dir / "metrics.jsonl", step, ledger))
        world.attempt(lambda: sampler.load_state_dict(start.state["sampler"]))
        shapes = world.attempt(lambda: tensor_shapes(start.checkpoint))
        make_room_for_state(model, optimizer, shapes)
        world.attempt(lambda: load_tensors(start.checkpoint, training_tensors(model, optimizer)))
    to_continue = world.from_first(lambda: write_config(config, recipe_name(__name__, __file__)))
    resumed_from = step if start.checkpoint else None
    checkpoints = CheckpointWriter(output_dir / "checkpoints", keep_last=config.checkpoint.keep_last, world=world)
    metrics = JsonLines(output_dir / "metrics.jsonl", resumed_from, muted=not is_first)
    samples = None
    if config.log.samples and meshes.is_first_of_rows:
        samples = open_samples(output_dir, step, rank=world.rank, world_size=world.size)
    trackers = world.attempt(lambda: Trackers(config.log, output_dir, resolved(config), step, muted=not is_first))
    layout = {"world_size": world.size, "parallel": asdict(dims)}
    metrics.write(
        event="start",
        recipe=Path(__file__).stem,
        **layout,
        parameters=parameters,
        trained_parameters=parameters,
        rows=len(dataset),
        rows_per_epoch=sampler.rows_per_epoch,
        rows_dropped=sampler.rows_dropped,
        rows_without_trained_tokens=dataset.rows_without_trained_tokens,
        steps=steps,
        resumed_from=resumed_from,
    )
    print(f"{parameters:,} parameters in {config.param_dtype}, computing in {config.dtype} on {device}")
    print(f"ranks: {dims}")
    print(
        f"{len(dataset):,} rows of {config.data.seq_len} tokens; {steps:,} steps of {config.global_batch_size} rows, "
        f"each in {sampler.micro_batches_per_step} micro-batches; {sampler.steps_per_epoch:,} steps an epoch"
    )
    if start.checkpoint:
        print(f"continuing after step {step} from {start.checkpoint}")
        if start.state.get("recipe") == Path(__file__).stem and start.state.get("recipe_digest") != recipe_digest:
            print("note: the recipe's code is not that of the checkpoint; whether it trains alike is yours to know")

    # ── 6 Validation ──────────────────────────────────────────────────────────────────────────────────────────────────
    # The same mean over tokens as in training, each row once: the last batch is filled with empty rows, so that all
    # ranks make the same number of passes. Who asks for a stop is not made to wait for the end of it: then the
    # checkpoint says that it is owed, and a resume begins with it.
    stop = StopRequest(muted=not is_first)
    progress = tqdm(total=steps, initial=step, unit="step", disable=None if is_first else True)

    def validate(step: int) -> bool:
        order = StatefulDistributedSampler(
            min(len(validation_dataset), config.validation_max_rows or len(validation_dataset)),
            global_batch_size=config.micro_batch_size * meshes.dp.size(),
            micro_batch_size=config.micro_batch_size,
            dp_rank=meshes.dp.get_local_rank(),
            dp_size=meshes.dp.size(),
            shuffle=False,
            tail="pad",
        )
        summed_loss, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
        stopped = False
        model.eval()
        with torch.no_grad():
            for batch in load_rows(validation_dataset, order):
                if stopped := world.any(stop.requested):
                    break
                attend = plan_attention(batch.document_ids, sequence, device=device, dtype=compute_dtype)
                batch = sequence.take_batch(batch).to(device)
                logits = model(batch.input_ids, batch.position_ids, attend)
                summed_loss += compute_loss(logits, batch.labels)
                tokens += batch.trained_tokens
        model.train()
        drop_gathered(model)
        if stopped:
            return False
        dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group())
        [tokens] = world.sum(tokens if meshes.is_first_of_rows else 0)
        record = dict(step=step, loss=summed_loss.item() / tokens if tokens else None, trained_tokens=tokens)
        if tokens and not math.isfinite(record["loss"]):
            raise not_finite(metrics, checkpoints, step, f"validation loss {record['loss']} after step {step}")
        metrics.write(event="validation", **record)
        trackers.log(step, "validation", record)
        shown = f"loss {record['loss']:.4f}" if tokens else "no trained token"
        progress.write(f"step {step}/{steps}  validation: {shown} over {tokens:,} tokens")
        return True

    validation_owed = False
    if validation_dataset and start.state and start.state.get("validation_owed"):
        done = world.from_first(lambda: was_logged(output_dir / "metrics.jsonl", "validation", step))
        validation_owed = not done and not validate(step)

    # ── 7 Checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────────
    # Every rank writes its shards, beside the checkpoint's place; it is renamed when whole: a kill of any rank at any
    # moment leaves the checkpoint before it. Older ones go only after the new one is there.
    saved = step if start.checkpoint and start.checkpoint.parent == output_dir / "checkpoints" else None

    def save(step: int, *, wait: bool) -> int:
        tensors = training_tensors(model, optimizer)
        if world.any(not all_finite(tensors)):
            raise not_finite(metrics, checkpoints, step, f"weights or optimizer state after step {step}")
        metrics.sync()
        state = {
            "recipe": Path(__file__).stem,
            "recipe_digest": recipe_digest,
            "steps": steps,
            "ledger": ledger,
            "validation_owed": validation_owed,
            "sampler": sampler.state_dict(),
            "config": resolved(config),
            "layout": layout,
            **identity,
        }
        checkpoints.save(step, tensors, state, wait=wait)
        return step

    # ── 8 Training loop ───────────────────────────────────────────────────────────────────────────────────────────────
    # One optimizer step is one global batch. Its micro-batches are drawn before the first backward: the loss of each is
    # divided by the number of trained tokens in all of them, on all ranks, so that a token weighs the same wherever it
    # lands. Averaging the micro-batches' or the ranks' means instead would favour the tokens of short rows. That number
    # comes from one small sum over all ranks, which also tells them of a stop and makes the batch's digest.
    batches = iter(load_rows(dataset, sampler))
    profiler = None
    stopping = validation_owed
    while step < steps and not stopping:
        if step + 1 == config.profile.start:
            profiler = torch.profiler.profile(record_shapes=True)
            profiler.start()
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(sampler.micro_batches_per_step)]
        counted = micro_batches if meshes.is_first_of_rows else []
        trained_tokens, digest, stops = world.sum(
            sum(batch.trained_tokens for batch in counted),
            sum(batch.digest for batch in counted),
            int(stop.requested or checkpoints.failed),
        )
        if stops:
            break
        batch_digest = f"{digest % 2**64:016x}"

        loss, grad_norm = None, None
        lr = learning_rate(step, total=steps, lr=peak_lr, **config.schedule.model_dump())
        if trained_tokens:  # else there is nothing to learn from: the step counts, and nothing is updated
            summed_loss = torch.zeros((), dtype=torch.float64, device=device)
            for number, batch in enumerate(micro_batches, 1):
                reduce_gradients(
                    model, is_last=number == len(micro_batches), deferred=config.parallel.defer_gradient_reduction
                )
                # This rank's tokens of each row; their keys are those of whole rows.
                attend = plan_attention(batch.document_ids, sequence, device=device, dtype=compute_dtype)
                batch = sequence.take_batch(batch).to(device)
                logits = model(batch.input_ids, batch.position_ids, attend)  # [rows, sequence, vocabulary]
                micro_loss = compute_loss(logits, batch.labels)
                del logits  # or they would live through the backward pass, beside their gradient
                # Gradients are averaged over ranks where a sum is meant: the factor makes it one.
                (micro_loss * dims.averaged / trained_tokens).backward()
                summed_loss += micro_loss.detach()
            dist.all_reduce(summed_loss, group=meshes.dp_cp.get_group())
            loss = summed_loss.item() / trained_tokens
            grad_norm = clip_gradients(model, config.max_grad_norm)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # stop before the update that would spread it
                raise not_finite(
                    metrics, checkpoints, step, f"loss {loss} and gradient norm {grad_norm} in step {step + 1}"
                )
            set_learning_rate(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()

        step += 1
        consumed_before = sampler.consumed_rows
        sampler.advance()
        ledger = next_ledger(ledger, step, batch_digest)
        seconds = time.perf_counter() - started
        tokens_per_second = (sampler.consumed_rows - consumed_before) * config.data.seq_len / seconds
        peak = peak_flops(device, compute_dtype)
        record = dict(
            step=step,
            epoch=sampler.epoch_of(step - 1),
            consumed_rows=sampler.consumed_rows,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            trained_tokens=trained_tokens,
            batch_digest=batch_digest,
            ledger=ledger,
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            peak_memory_bytes=world.max(peak_memory_bytes(device)),
            mfu=flops_per_token(model_config, config.data.seq_len) * tokens_per_second / (peak * world.size)
            if peak
            else None,
        )
        if config.log.digests:
            tensors = training_tensors(model, optimizer).items()
            for key, part in (("parameters_digest", "model."), ("optimizer_digest", "optimizer.")):
                mine = tensors_digest(item for item in tensors if item[0].startswith(part))
                record[key] = world.together(lambda mine=mine: mine)
        metrics.write(event="train", **record)
        if samples:
            for number, batch in enumerate(micro_batches):
                samples.write(step=step, micro_batch=number, rows=batch.rows)
        progress.update()
        if step % config.log.every == 0 or step == steps:
            shown = "no trained token" if loss is None else f"loss {loss:.4f}"
            progress.set_postfix_str(f"{shown}, {tokens_per_second:,.0f} tokens/s")
            progress.write(f"step {step}/{steps}  {shown}  lr {lr:.3g}  {tokens_per_second:,.0f} tokens/s")
            trackers.log(step, "train", record)
        if profiler and step + 1 == config.profile.start + config.profile.steps:
            profiler = write_trace(profiler, output_dir / "profile" / f"trace-rank{world.rank}-to-step{step}.json")

        due = step == steps or (config.validate_every and step % config.validate_every == 0)
        stopping = validation_owed = bool(validation_dataset and due) and not validate(step)
        if compiled := compiler.report():
            progress.write(f"step {step}/{steps}  {compiled}")
        if step == steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
            saved = save(step, wait=not config.checkpoint.async_save)
        for record in checkpoints.finished():
            metrics.write(event="checkpoint", **record)

    # ── 9 Finish ──────────────────────────────────────────────────────────────────────────────────────────────────────
    # The last line of metrics.jsonl is written when the model is whole: a kill before it leaves a run to be finished.
    if saved != step and (step < steps or validation_owed):  # stopped between two checkpoints
        save(step, wait=True)
    checkpoints.close()
    for record in checkpoints.finished():
        metrics.write(event="checkpoint", **record)
    if profiler:  # the run ended before the steps that were to be traced
        write_trace(profiler, output_dir / "profile" / f"trace-rank{world.rank}-to-step{step}.json")
    progress.close()
    trackers.close()
    del batches  # ends the loader's workers
    if step < steps or validation_owed:
        metrics.write(event="end", step=step, reason="stopped")
        print(f"stopped after step {step} of {steps} with the state saved; to continue:")
        print(f"    {to_continue}")
        world.close()
        return EXIT_STOPPED
    whole = whole_parameters(model, world)
    if is_first:
        save_model(
            output_dir / "model",
            model_config,
            whole,
            dtype=DTYPES[config.export.dtype or config.param_dtype],
            max_shard_bytes=config.export.max_shard_bytes,
            tokenizer_files=load_tokenizer(dataset.tokenizer_directory).files,
        )
    else:
        for _ in whole:  # gathering takes all ranks
            pass
    metrics.write(event="end", step=step, reason="completed")
    if start.lock:
        start.lock.close()
    print(f"done: the model lies in {output_dir / 'model'}, an HF directory. With `pip install transformers`:")
    print(f"    transformers.AutoModelForCausalLM.from_pretrained({str(output_dir / 'model')!r})")
    print(f"or train it on: {shlex.quote('model={path: ' + str(output_dir / 'model') + '}')} with another output_dir")
    world.close()
    return EXIT_DONE


def write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """End the tracing; chrome://tracing and ui.perfetto.dev show the file."""
    profiler.stop()
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    print(f"wrote a trace: {path}")


def not_finite(metrics: JsonLines, checkpoints: CheckpointWriter, step: int, what: str) -> RunFailed:
    """Close the log of a run that cannot go on; what is not finite is never saved, what was before still is."""
    checkpoints.close()
    for record in checkpoints.finished():
        metrics.write(event="checkpoint", **record)
    metrics.write(event="end", step=step, reason="non_finite")
    return RunFailed(f"{what}: not finite; stopped, and the checkpoints are those of the steps before", agreed=True)


if __name__ == "__main__":
    sys.exit(run_recipe(Config, main, doc=__doc__, launch=LAUNCH))
