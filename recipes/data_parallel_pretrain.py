"""Pretrain a language model with data parallelism from first principles: each rank has a copy, and gradients are added.

    femto run [--nproc-per-node 2] data_parallel_pretrain --config configs/llama_small.yaml [key=value …]
    femto run data_parallel_pretrain --config configs/llama_small.yaml processes=2     starts its processes itself

Data parallel training is a broadcast of the weights at the start (section 3), and in each step (section 8) two sums
over the ranks: of the tokens that are trained, by which every loss is divided, and of the gradients, while the last
backward pass goes on. Here they stand in the open, without torch's DDP or FSDP: the second is GradientSynchronizer's
(femtolib/parallel/gradient_sync.py), and mixed precision is a copy of the weights in a smaller dtype. Batches, losses
and checkpoints are those of distributed_pretrain, which is the one to take where a model outgrows a device.

To make it your own: `femto cp data_parallel_pretrain mine.py`, edit, `femto run ./mine.py --config …`. What people edit
first is what is done to the gradients (section 4) and the loss (section 8). Whether an edit still trains alike on any
number of processes, `femto run parity` tells.
"""

import hashlib
import math
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from femtolib import sections
from femtolib.attention import plan_attention
from femtolib.checkpoint import CheckpointWriter, load_tensors, tensor_shapes
from femtolib.checks import check_inputs
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
    LossScale,
    all_finite,
    build_optimizer,
    clip_gradients,
    compute_copy,
    copy_weights,
    hand_over_gradients,
    make_room_for_state,
    set_learning_rate,
    training_tensors,
)
from femtolib.output import check_output, check_shared, claim_output, write_config
from femtolib.parallel.gradient_sync import GradientSynchronizer, broadcast_weights
from femtolib.parallel.mesh import ParallelDims
from femtolib.parallel.spawn import must_spawn, spawn
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
    dtype: sections.ComputeDtypeOrFloat16 = "float32"
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
    max_grad_value: sections.MaxGradValue = None
    schedule: sections.ScheduleSection = sections.ScheduleSection()
    processes: sections.Processes = 1
    gradient_sync: sections.GradientSyncSection = sections.GradientSyncSection()
    accumulate_in: sections.AccumulateIn = "float32"
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
    # ── 1 Processes ───────────────────────────────────────────────────────────────────────────────────────────────────
    # Every process runs this page from top to bottom, with a rank of its own: those of a launcher, or those that this
    # one starts here and then only waits for. What one rank may find wrong and another not is asked of all together: a
    # rank that stopped alone would leave the others waiting for it.
    if must_spawn(config.processes):
        return spawn(main, config, config.processes)
    device = choose_device(config.device)
    prepare_process(device, threads=config.threads, deterministic=config.deterministic)
    compute_dtype, param_dtype = DTYPES[config.dtype], DTYPES[config.param_dtype]
    world = World.join(device, config.process_group_timeout)
    is_first = world.rank == 0
    dims = ParallelDims(dp_replicate=world.size, dp_shard=1, cp=1, tp=1)

    # Whatever the headers of the named files can tell to be wrong is told now, before hours of tokenizing or training.
    world.from_first(
        lambda: check_output(
            config.output_dir,
            data=[*config.data.train, *(config.data.validation or [])],
            sources=[config.model.path, config.tokenizer],
        )
    )
    model_config = world.attempt(lambda: check_inputs(config.model, config.data, config.tokenizer))
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
            dp_rank=world.rank,
            dp_size=world.size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            tail=config.data.tail,
        )
    )
    if (idle := world.size - math.ceil(config.global_batch_size / config.micro_batch_size)) > 0:
        print(
            f"note: {idle} of {world.size} ranks get empty rows alone: global_batch_size "
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
    # Every rank makes the whole model, from one seed, and rank 0's is broadcast to be sure. Where it computes in a
    # smaller dtype there are two of it: `model` has the master weights, which are optimized, saved and exported, and
    # `replica` is a copy in that dtype, which computes. An update by a thousandth of a weight is lost on a bfloat16,
    # which has three digits; the masters keep it.
    with torch.device("meta"):
        model = Decoder(model_config, compute_dtype).to(param_dtype)
    model.to_empty(device=device)
    model.tie_weights()
    if config.model.weights == "random":
        initialize_weights(model, config.seed)
    else:
        world.attempt(lambda: load_weights(model, config.model.path))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    broadcast_weights(model)  # before copies are made of them; the synchronizer does it for the replica and its buffers
    replica = model
    if compute_dtype != param_dtype:
        accumulation_dtype = torch.float32 if config.accumulate_in == "float32" else compute_dtype
        replica = compute_copy(model, compute_dtype, accumulation_dtype)
    compiler.layers(replica)
    compute_loss = compiler.loss(summed_cross_entropy)
    synchronizer = GradientSynchronizer(
        replica,
        bucket_mb=config.gradient_sync.bucket_mb,
        overlap=config.gradient_sync.overlap,
        communication_dtype=DTYPES.get(config.gradient_sync.communication_dtype),
        find_unused_parameters=config.gradient_sync.find_unused_parameters,
        static_graph=config.gradient_sync.static_graph,
    )

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
    loss_scale = LossScale() if compute_dtype == torch.float16 else None

    # What is done to the gradients between their sum and the update, in this order; put your own here. They are whole
    # and the same on every rank, so none of this needs a sum over ranks. Returns the norm before any of it.
    def transform_gradients() -> float:
        grad_norm = clip_gradients(model, config.max_grad_norm)
        if config.max_grad_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), config.max_grad_value)
        return grad_norm

    # ── 5 Resume ──────────────────────────────────────────────────────────────────────────────────────────────────────
    # Tensors come from the checkpoint, on whatever layout they were saved, and every rank reads all of them, so that no
    # broadcast is needed; everything else comes from its state.json. A changed config is refused where it would change
    # what is trained: a run that goes on must be the run that was stopped.
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
        copy_weights(model, replica)
        if loss_scale and start.state.get("loss_scale"):
            loss_scale = LossScale(**start.state["loss_scale"])
    to_continue = world.from_first(lambda: write_config(config, recipe_name(__name__, __file__)))
    resumed_from = step if start.checkpoint else None
    checkpoints = CheckpointWriter(output_dir / "checkpoints", keep_last=config.checkpoint.keep_last, world=world)
    metrics = JsonLines(output_dir / "metrics.jsonl", resumed_from, muted=not is_first)
    samples = None
    if config.log.samples:
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
            global_batch_size=config.micro_batch_size * world.size,
            micro_batch_size=config.micro_batch_size,
            dp_rank=world.rank,
            dp_size=world.size,
            shuffle=False,
            tail="pad",
        )
        summed_loss, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
        stopped = False
        replica.eval()
        with torch.no_grad():
            for batch in load_rows(validation_dataset, order):
                if stopped := world.any(stop.requested):
                    break
                attend = plan_attention(batch.document_ids, device=device, dtype=compute_dtype)
                batch = batch.to(device)
                logits = replica(batch.input_ids, batch.position_ids, attend)
                summed_loss += compute_loss(logits, batch.labels)
                tokens += batch.trained_tokens
        replica.train()
        if stopped:
            return False
        dist.all_reduce(summed_loss)
        [tokens] = world.sum(tokens)
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
    # All have the same to write, so each writes a part, beside the checkpoint's place; it is renamed when whole: a kill
    # of any rank at any moment leaves the checkpoint before it. Older ones go only after the new one is there.
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
            "loss_scale": loss_scale and asdict(loss_scale),
            **identity,
        }
        checkpoints.save(step, tensors, state, wait=wait)
        return step

    # ── 8 Training loop ───────────────────────────────────────────────────────────────────────────────────────────────
    # One optimizer step is one global batch. Its micro-batches are drawn before the first backward: the loss of each is
    # divided by the number of trained tokens in all of them, on all ranks, so that a token weighs the same wherever it
    # lands. Averaging the micro-batches' or the ranks' means instead would favour the tokens of short rows. That number
    # comes from one small sum over all ranks, which also tells them of a stop and makes the batch's digest. What a rank
    # gets from its rows is then a part of the batch's gradient, and their sum over the ranks is the whole. It is made
    # once a step, while the last micro-batch's backward pass goes on. A rank whose rows are all empty makes that pass,
    # too: its gradients are zeros, and the others wait for them.
    batches = iter(load_rows(dataset, sampler))
    profiler = None
    stopping = validation_owed
    while step < steps and not stopping:
        if step + 1 == config.profile.start:
            profiler = torch.profiler.profile(record_shapes=True)
            profiler.start()
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(sampler.micro_batches_per_step)]
        trained_tokens, digest, stops = world.sum(
            sum(batch.trained_tokens for batch in micro_batches),
            sum(batch.digest for batch in micro_batches),
            int(stop.requested or checkpoints.failed),
        )
        if stops:
            break
        batch_digest = f"{digest % 2**64:016x}"

        loss, grad_norm = None, None
        lr = learning_rate(step, total=steps, lr=peak_lr, **config.schedule.model_dump())
        if trained_tokens:  # else there is nothing to learn from: the step counts, and nothing is updated
            summed_loss = torch.zeros((), dtype=torch.float64, device=device)
            scale = loss_scale.value if loss_scale else 1.0
            for number, batch in enumerate(micro_batches, 1):
                attend = plan_attention(batch.document_ids, device=device, dtype=compute_dtype)
                batch = batch.to(device)
                with nullcontext() if number == len(micro_batches) else synchronizer.no_sync():
                    logits = replica(batch.input_ids, batch.position_ids, attend)  # [rows, sequence, vocabulary]
                    micro_loss = compute_loss(logits, batch.labels)
                    del logits  # or they would live through the backward pass, beside their gradient
                    (micro_loss * scale / trained_tokens).backward()
                summed_loss += micro_loss.detach()
            synchronizer.finish()
            dist.all_reduce(summed_loss)
            loss = summed_loss.item() / trained_tokens
            hand_over_gradients(replica, model, divide_by=scale)
            grad_norm = transform_gradients()
            overflowed = world.any(not math.isfinite(grad_norm)) if loss_scale else False
            if overflowed and math.isfinite(loss) and scale > 1:
                # The loss is finite, its gradients times `scale` are more than float16 holds (65,504). No rank updates
                # its weights, since one flag says so to all; the next step is tried with half the scale.
                grad_norm = None
            elif not (math.isfinite(loss) and math.isfinite(grad_norm)):  # stop before the update that would spread it
                raise not_finite(
                    metrics, checkpoints, step, f"loss {loss} and gradient norm {grad_norm} in step {step + 1}"
                )
            else:
                set_learning_rate(optimizer, lr)
                optimizer.step()
                copy_weights(model, replica)
            if loss_scale:
                loss_scale.update(overflowed)
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
            loss_scale=loss_scale and loss_scale.value,
            skipped_updates=loss_scale and loss_scale.skipped,
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
    if is_first:
        save_model(
            output_dir / "model",
            model_config,
            model.named_parameters(),
            dtype=DTYPES[config.export.dtype or config.param_dtype],
            max_shard_bytes=config.export.max_shard_bytes,
            tokenizer_files=load_tokenizer(dataset.tokenizer_directory).files,
        )
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
