"""Whether training state on disk is whole or not there, comes back to the bit, and can be read from a stranger."""

import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from femtolib import checkpoint
from femtolib.checkpoint import (
    CheckpointWriter,
    list_checkpoints,
    load_tensors,
    read_state,
    read_tensors,
    tensor_shapes,
)
from femtolib.errors import FemtoError, RunFailed
from femtolib.parallel.world import World
from femtolib.publish import new_folder_beside, remove, remove_leftovers

STATE = {"ledger": "0123456789abcdef", "sampler": {"consumed_rows": 12}, "config": {"lr": 1e-5, "none": None}}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a.weight": torch.randn(5, 7, generator=generator),
        "model.b.weight": torch.randn(9, generator=generator).to(torch.bfloat16),
        "model.c.weight": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "optimizer.a.step": torch.tensor(3.0),
        "optimizer.odd.nan": torch.tensor([float("nan"), -0.0, float("inf"), 5e-324], dtype=torch.float64),
    }


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict, keep_last: int | None = None
) -> None:
    """A process alone writes a checkpoint and waits for it."""
    CheckpointWriter(folder, keep_last=keep_last, world=World()).save(step, tensors, state, wait=True)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sign(folder: Path) -> None:
    """Write a manifest that agrees with the files, as a stranger would after planting one."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    for step in (2, 4):
        save_checkpoint(tmp_path / "checkpoints", step, some_tensors(), STATE)
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder) -> Path:
    return folder / "step_00000004"


def refused(path: Path) -> str:
    """The one line with which a checkpoint is refused by everything that a resume reads of it."""
    with pytest.raises(FemtoError) as caught:
        read_state(path)
        tensor_shapes(path)
        load_tensors(path, blank(some_tensors()))
    assert caught.value.exit_code == 2 and len(caught.value.faults) == 1, caught.value.faults
    return caught.value.faults[0]


# ── There and back ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensors_and_state_come_back_to_the_bit(saved):
    tensors = some_tensors()
    state = read_state(saved)
    assert state == {"format": "femto-checkpoint", "version": 1, "step": 4, **STATE}
    assert tensor_shapes(saved) == {name: tensor.shape for name, tensor in tensors.items()}
    loaded = blank(tensors)
    load_tensors(saved, loaded)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist(), name


def test_the_manifest_lists_size_and_digest_of_every_other_file(saved):
    files = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in saved.iterdir()} - {"manifest.json"}
    for name, about in files.items():
        content = (saved / name).read_bytes()
        assert about == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_loading_neither_adds_nor_changes_a_file(folder, saved):
    before = tree(folder)
    read_state(saved)
    load_tensors(saved, blank(some_tensors()))
    assert tree(folder) == before


def test_a_checkpoint_may_be_moved_and_named_otherwise_but_not_as_another_step(saved, tmp_path):
    moved = shutil.move(saved, tmp_path / "best")
    assert read_state(moved)["step"] == 4
    load_tensors(moved, blank(some_tensors()))
    lying = Path(shutil.move(moved, saved.with_name("step_00000900")))
    assert "step_00000900" in refused(lying) and "step 4" in refused(lying)


def test_names_and_shapes_must_be_exactly_the_saved_ones(saved):
    other = blank(some_tensors())
    other["model.new"] = torch.zeros(1)
    del other["optimizer.a.step"]
    other["model.a.weight"] = torch.zeros(7, 5)
    before = {name: tensor.clone() for name, tensor in other.items()}
    with pytest.raises(FemtoError) as caught:
        load_tensors(saved, other)
    assert caught.value.faults == [
        f"{saved}: has no tensor 'model.new'",
        f"{saved}: has 'optimizer.a.step', which this run lacks",
        f"{saved}: 'model.a.weight' is [5, 7], this run's is [7, 5]",
    ]
    assert all(torch.equal(other[name], tensor) for name, tensor in before.items())
    with pytest.raises(FemtoError) as caught:
        load_tensors(saved, blank(some_tensors()) | {f"extra.{i}": torch.zeros(1) for i in range(30)})
    assert len(caught.value.faults) == 11 and "30" in caught.value.faults[-1]


# ── Cut off ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moment", ["before", "tensors", "state", "manifest", "aside", "rename", "removal"])
@pytest.mark.parametrize("step", [4, 6])
def test_a_save_killed_at_any_moment_leaves_the_checkpoints_before_it_and_can_be_made_again(
    folder, monkeypatch, ranks, moment, step
):
    # Automodel#3254: the next save of that step collided with the half-written folder.
    def kill(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def save():
        real_write, real_rename, real_save, real_remove = Path.write_text, Path.rename, dcp.save, shutil.rmtree

        def save_then_kill(*arguments, **more):
            real_save(*arguments, **more)
            kill()

        def write(self, text, **more):
            if self.stem == moment:
                real_write(self, text[:1])
                kill()
            return real_write(self, text, **more)

        def rename(self, target):
            if moment == "rename" and self.name.endswith(".partial"):
                kill()
            real_rename(self, target)
            if moment == "aside" and Path(target).name.endswith(".replaced"):
                kill()

        def remove(path, **more):
            if moment == "removal" and path.name.endswith(".replaced") and path.exists():
                (path / "manifest.json").unlink()
                kill()
            return real_remove(path, **more)

        if moment in ("before", "tensors"):
            dcp.save = kill if moment == "before" else save_then_kill
        Path.write_text, Path.rename, shutil.rmtree = write, rename, remove
        save_checkpoint(folder, step, some_tensors(), STATE)

    before = tree(folder / "step_00000002")
    ranks(1, save, killed=[0] if (moment, step) not in (("aside", 6), ("removal", 6)) else [])
    assert tree(folder / "step_00000002") == before
    remove_leftovers(folder)
    assert names(folder) == [path.name for path in sorted(folder.iterdir())], "something is left"
    assert {"step_00000002", "step_00000004"} <= set(names(folder))
    for path in list_checkpoints(folder):
        read_state(path)
        load_tensors(path, blank(some_tensors()))

    save_checkpoint(folder, step, some_tensors(), STATE | {"ledger": "again"})
    assert names(folder) == [path.name for path in sorted(folder.iterdir())]
    assert read_state(folder / f"step_{step:08d}")["ledger"] == "again"


@pytest.mark.parametrize("target", ["rename", "fsync", "mkdir"])
def test_a_save_that_the_disk_refuses_leaves_nothing_and_says_why(folder, monkeypatch, target):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    before = tree(folder)
    with monkeypatch.context() as patched:
        if target == "fsync":
            patched.setattr(os, "fsync", fail)
        else:
            real = getattr(Path, target)
            patched.setattr(
                Path, target, lambda self, *a, **k: fail() if self.name.startswith(".") else real(self, *a, **k)
            )
        with pytest.raises(RunFailed) as caught:
            save_checkpoint(folder, 6, some_tensors(), STATE)
    assert "step_00000006" in str(caught.value) and "No space left on device" in str(caught.value)
    assert tree(folder) == before and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("limit", [0, 100, 5_000, 60_000])
def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing(folder, limit):
    before = tree(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = some_tensors() | {"model.large": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunFailed) as caught:
            save_checkpoint(folder, 6, large, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 1 and len(caught.value.faults) == 1
    assert "step_00000006" in str(caught.value) and "File too large" in str(caught.value)
    assert tree(folder) == before and len(list(folder.iterdir())) == 2


def test_a_folder_that_may_not_be_written_is_said_so(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises((RunFailed, OSError)):
        save_checkpoint(tmp_path / "file/checkpoints", 1, some_tensors(), STATE)


# ── Several ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Shapes of the mesh, and how a matrix lies on it; a tensor that has no such dimension is plain.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "two": ((2,), [Shard(0)]),
    "three": ((3,), [Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "tiles": ((2, 2), [Shard(0), Shard(1)]),
    "replicas": ((2,), [Replicate()]),
}


def laid_out(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """`tensors` as this rank has them; those of no dimension are plain, as an optimizer's step counts are."""
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        fitting = [Replicate() if p.is_shard() and p.dim >= tensor.ndim else p for p in placements]
        return distribute_tensor(tensor.clone(), mesh, fitting, src_data_rank=None) if tensor.ndim else tensor.clone()

    return {name: lay(tensor) for name, tensor in tensors.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def to_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def shards_of_some_tensors() -> dict[str, torch.Tensor]:
    """With rows for one rank of two, three and four only, and none at all."""
    few = {f"model.few{rows}": torch.arange(2.0 * rows).view(rows, 2) + 1 for rows in (0, 1, 2, 3)}
    return some_tensors() | few | {"optimizer.wide": torch.randn(6, 1000), "model.turned": torch.randn(6, 4).t()}


@pytest.mark.parametrize("saved_by", ["alone", *LAYOUTS])
def test_what_one_layout_saved_every_other_loads_to_the_bit(tmp_path, ranks, saved_by):
    torch.manual_seed(0)
    tensors = shards_of_some_tensors()
    path = tmp_path / "step_00000003"

    def save() -> None:
        world = World.join(torch.device("cpu"), 60)
        writer = CheckpointWriter(tmp_path, keep_last=1, world=world)
        writer.save(3, laid_out(tensors, saved_by), STATE, wait=True)
        assert list_checkpoints(tmp_path) == [path], "the save is done on every rank, or on none"
        assert [record["step"] for record in writer.finished()] == [3] and writer.finished() == []

    if saved_by == "alone":
        save_checkpoint(tmp_path, 3, tensors, STATE)
    else:
        ranks(math.prod(LAYOUTS[saved_by][0]), save)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert {"step": 3, **STATE}.items() <= read_state(path).items()
    assert tensor_shapes(path) == {name: tensor.shape for name, tensor in tensors.items()}
    # Of replicas one is written: all that the files hold beyond the elements is an archive's frame for each chunk.
    elements = sum(tensor.nbytes for tensor in tensors.values())
    chunks = len(pickle.loads((path / ".metadata").read_bytes()).storage_data)
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) < elements + 2048 * chunks
    assert chunks <= len(tensors) * math.prod(LAYOUTS[saved_by][0] if saved_by != "alone" else [1])

    def load(layout: str) -> None:
        dist.init_process_group("gloo")
        expected = laid_out(tensors, layout)
        loaded = laid_out(blank(tensors), layout)
        load_tensors(path, loaded)
        for name in loaded:
            assert to_bytes(local(loaded[name])) == to_bytes(local(expected[name])), name

    for layout, (shape, _) in LAYOUTS.items():
        ranks(math.prod(shape), load, layout)
    whole = blank(tensors)
    load_tensors(path, whole)
    for loaded in (whole, dict(read_tensors(path, tensors))):
        assert all(to_bytes(loaded[name]) == to_bytes(tensor) for name, tensor in tensors.items())
    stock = blank(tensors)
    dcp.load(stock, checkpoint_id=path, no_dist=True)
    assert all(to_bytes(stock[name]) == to_bytes(tensor) for name, tensor in tensors.items())


def test_names_and_whole_shapes_are_compared_on_every_rank(tmp_path, ranks):
    save_checkpoint(tmp_path, 3, {"x": torch.zeros(7, 2)}, STATE)

    def load() -> None:
        dist.init_process_group("gloo")
        for rows, name in ((8, "x"), (7, "y")):
            with pytest.raises(FemtoError, match=r"'x' is \[7, 2\], this run's is \[8, 2\]|has no tensor 'y'"):
                load_tensors(tmp_path / "step_00000003", laid_out({name: torch.zeros(rows, 2)}, "three"))

    ranks(3, load)


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_is_the_state_at_the_moment_of_the_call(tmp_path, ranks, wait):
    torch.manual_seed(0)
    tensors = {"model.a": torch.randn(7, 3), "optimizer.a.step": torch.tensor(3.0), "model.few": torch.randn(1, 3)}
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(100):
        for tensor in changed.values():
            tensor.add_(1)

    def save() -> list[float]:
        world = World.join(torch.device("cpu"), 60)
        writer = CheckpointWriter(tmp_path, keep_last=None, world=world)
        if world.rank == 1:  # a slow disk, which the others wait for and training does not
            write_data = checkpoint._Writer.write_data
            checkpoint._Writer.write_data = lambda *arguments: time.sleep(0.5) or write_data(*arguments)
        state, live = {"at": ["call"]}, laid_out(tensors, "two")
        for step in (1, 2):
            writer.save(step, live, state, wait=wait)
            assert wait or len(list_checkpoints(tmp_path)) == step - 1, "it did not wait for the save before"
            for _ in range(100):  # training goes on: in place, with collectives of its own
                for tensor in live.values():
                    tensor.add_(1)
                dist.all_reduce(torch.ones(1))
            world.barrier()
            state["at"][0] = f"after {step}"
        writer.close()
        assert not writer.failed
        return [record["seconds_blocked"] / record["seconds_total"] for record in writer.finished()]

    shares = ranks(2, save)
    assert all(max(of_rank[:1]) < 0.2 if not wait else of_rank == [1, 1] for of_rank in shares), shares
    for step, expected in ((1, tensors), (2, changed)):
        loaded = blank(tensors)
        load_tensors(tmp_path / f"step_{step:08d}", loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        assert read_state(tmp_path / f"step_{step:08d}")["at"] == ["call" if step == 1 else "after 1"]


def test_a_sharded_model_and_its_optimizer_are_saved_in_little_memory(tmp_path, ranks, peak_bytes, tiny_llama):
    from torch.distributed.fsdp import fully_shard

    from femtolib.model import Decoder
    from femtolib.model_config import ModelConfig
    from femtolib.optim import training_tensors

    config = ModelConfig.from_dict(tiny_llama | {"vocab_size": 13_001}, "", inline=True)  # 4 ranks do not divide it

    def train_and_save() -> tuple[list[float], dict[str, torch.Tensor]]:
        world = World.join(torch.device("cpu"), 60)
        mesh = init_device_mesh("cpu", (4,))
        with torch.device("meta"):
            model = Decoder(config, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        torch.manual_seed(world.rank)
        for parameter in model.parameters():
            local(parameter.detach()).normal_()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        tensors = training_tensors(model, optimizer)
        held = sum(local(tensor).nbytes for tensor in tensors.values())
        writer = CheckpointWriter(tmp_path, keep_last=1, world=world)
        peaks = [
            peak_bytes(lambda: writer.save(1, tensors, STATE, wait=True)),
            peak_bytes(lambda: writer.save(2, tensors, STATE, wait=False)),
        ]
        writer.close()
        whole = {
            name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in tensors.items()
        }
        for tensor in tensors.values():
            tensor.zero_()
        peaks.append(peak_bytes(lambda: load_tensors(tmp_path / "step_00000002", tensors)))
        for name, tensor in tensors.items():
            assert torch.equal(getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)(), whole[name]), name
        return [peak / held for peak in peaks], {name: tensor.numpy() for name, tensor in whole.items()}

    results = ranks(4, train_and_save)
    for saving, copying, loading in [peaks for peaks, _ in results]:
        assert saving < 0.05 and 1 <= copying < 1.01 and loading < 0.02
    stored = dict(read_tensors(tmp_path / "step_00000002", results[0][1]))
    assert len(stored) > 60 and all((stored[name].numpy() == whole).all() for name, whole in results[0][1].items())


LARGE = {"model.large": torch.zeros(100_000, 2)}


def refuse_to_write(rank: int, moment: str) -> None:
    """From now on the disk of `rank`, if it is this one, is full."""
    if int(os.environ["RANK"]) != rank:
        return

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if moment == "a file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif moment == "fsync":
        os.fsync = fail
    elif moment in ("mkdir", "rename"):
        setattr(Path, moment, fail)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("rank", "moment", "reason"),
    [
        (0, "mkdir", "rank 0: .*No space left on device"),
        (0, "a file", "rank 0: .*File too large"),
        (1, "a file", "rank 1: .*File too large"),
        (1, "fsync", "rank 1: .*No space left on device"),
        (0, "rename", "rank 0: .*No space left on device"),
    ],
)
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing(tmp_path, ranks, wait, rank, moment, reason):
    # Automodel#3254: rank 0 raised and the others hung.
    save_checkpoint(tmp_path, 2, LARGE, STATE)
    before = tree(tmp_path)

    def save() -> None:
        world = World.join(torch.device("cpu"), 60)
        writer = CheckpointWriter(tmp_path, keep_last=1, world=world)
        refuse_to_write(rank, moment)
        with pytest.raises(RunFailed, match=f"(?s){reason}; nothing was kept of it") as caught:
            writer.save(4, laid_out(LARGE, "two"), STATE, wait=wait)
            while not writer.failed:
                time.sleep(0.01)
            writer.save(6, laid_out(LARGE, "two"), STATE, wait=True)
        assert len(caught.value.faults) == 1 and caught.value.agreed and "step_00000004" in str(caught.value)
        assert writer.finished() == []
        if not wait:
            with pytest.raises(RunFailed):
                writer.close()
        world.barrier()  # the groups are still in step

    ranks(2, save)
    assert tree(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.parametrize(
    ("rank", "moment", "wait"),
    [(0, "before", False), (1, "before", True), (0, "write", True), (1, "write", False), (0, "digest", False),
     (1, "digest", True), (0, "publish", True), (0, "publish", False), (0, "prune", True)],
)  # fmt: skip
def test_a_rank_killed_in_a_save_hangs_nobody_and_leaves_no_half_checkpoint(tmp_path, ranks, rank, moment, wait):
    torch.manual_seed(0)
    tensors = shards_of_some_tensors()

    def kill(*_, **__) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save() -> str:
        world = World.join(torch.device("cpu"), 60)
        writer = CheckpointWriter(tmp_path, keep_last=1, world=world)
        writer.save(2, laid_out(tensors, "two"), STATE, wait=True)
        if world.rank == rank:
            place, name = {
                "before": (checkpoint, "local_part" if rank else "new_folder_beside"),
                "write": (checkpoint._Writer, "write_data"),
                "digest": (checkpoint, "_onto_disk"),
                "publish": (checkpoint, "publish"),
                "prune": (checkpoint, "remove"),
            }[moment]
            setattr(place, name, kill)
        try:
            writer.save(4, laid_out(tensors, "two"), STATE, wait=wait)
            writer.close()
        except RuntimeError as error:  # what gloo says of a peer that is gone
            return str(error)
        return "saved"

    [word] = [result for result in ranks(2, save, killed=[rank], seconds=60) if result is not None]
    assert word != "saved"
    remove_leftovers(tmp_path)
    left = names(tmp_path)
    assert left == sorted(path.name for path in tmp_path.iterdir())
    assert left == (["step_00000002", "step_00000004"] if moment == "prune" else ["step_00000002"])
    for path in list_checkpoints(tmp_path):
        read_state(path)
        load_tensors(path, blank(tensors))

    def again() -> None:
        writer = CheckpointWriter(tmp_path, keep_last=1, world=World.join(torch.device("cpu"), 60))
        writer.save(4, laid_out(tensors, "three"), STATE, wait=wait)
        writer.close()

    ranks(3, again)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_a_process_that_ends_with_a_fault_ends_its_save_and_keeps_its_exit_code(tmp_path):
    # The interpreter aborted with code 134: its thread was in torch's code.
    program = """
import sys, torch
from pathlib import Path
from femtolib.checkpoint import CheckpointWriter
from femtolib.parallel.world import World
writer = CheckpointWriter(Path(sys.argv[1]), keep_last=1, world=World())
writer.save(1, {f"t{i}": torch.zeros(1000, 20) for i in range(200)}, {}, wait=False)
sys.exit(5)
"""
    assert subprocess.run([sys.executable, "-c", program, tmp_path], timeout=100).returncode == 5
    assert names(tmp_path) == ["step_00000001"] == [path.name for path in tmp_path.iterdir()]


def test_a_process_that_outlived_its_run_does_not_write_into_the_next_ones_save(tmp_path):
    directory = tmp_path / "step_00000004"
    first = new_folder_beside(directory)
    second = new_folder_beside(directory)
    assert first != second and not first.exists() and second.exists()
    other = new_folder_beside(tmp_path / "step_00000005")
    assert second.exists() and other.exists()


# ── Which checkpoints there are ───────────────────────────────────────────────────────────────────────────────────────


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_checkpoints_are_ordered_by_number_and_strays_are_passed_over(folder):
    # open-instruct#541: "latest" picked step 900 over 1000.
    tensors = {"x": torch.zeros(1)}
    for step in (1000, 900, 123_456_789, 100_000_000):
        save_checkpoint(folder, step, tensors, {})
    for stray in ("best", "epoch_9", "epoch_10", "step_9", "step_x", "step_00000007.old", ".step_00000008.partial"):
        shutil.copytree(folder / "step_00000002", folder / stray)
    (folder / "step_00000006").mkdir()
    (folder / "notes.txt").write_text("mine")
    expected = [2, 4, 900, 1000, 100_000_000, 123_456_789]
    assert names(folder) == [f"step_{step:08d}" for step in expected]
    assert names(folder.parent / "nothing") == []


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(1, [1000]), (2, [900, 1000]), (3, [4, 900, 1000]), (9, None), (None, None)]
)
def test_the_lowest_steps_are_removed_and_nothing_else(folder, keep_last, kept):
    save_checkpoint(folder, 1000, {"x": torch.zeros(1)}, {})
    (folder / "best").mkdir()
    (folder / "step_00002000").mkdir()  # half a checkpoint of another program, of which we know nothing
    (folder / ".step_00000006.0123abcd.partial").mkdir()
    (folder / ".step_00000001.removed").mkdir()
    (folder / ".step_00000002.replaced").mkdir()
    save_checkpoint(folder, 900, {"x": torch.zeros(1)}, {}, keep_last)
    assert names(folder) == [f"step_{step:08d}" for step in kept or [2, 4, 900, 1000]]
    assert {path.name for path in folder.iterdir()} - set(names(folder)) == {"best", "step_00002000"}


class Killed(BaseException):
    """Stands in for a SIGKILL: nothing of femto's catches it."""


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(folder, monkeypatch):
    def killed(path, ignore_errors=False):
        if path.exists():
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            remove(folder / "step_00000002")
    assert names(folder) == ["step_00000004"]
    assert not (folder / "step_00000002").exists()


def test_a_checkpoint_is_complete_with_all_files_of_its_manifest_in_their_size(saved):
    for name in ("state.json", ".metadata", "__0_0.distcp", "manifest.json"):
        whole = (saved / name).read_bytes()
        (saved / name).unlink()
        assert name in refused(saved)
        (saved / name).write_bytes(whole[:-1])
        assert name in refused(saved)
        (saved / name).write_bytes(whole)
    read_state(saved)
    for path in (saved.with_name("step_00000005"), saved.parent / "nothing/at/all"):
        assert str(path) in refused(path) and "no such folder" in refused(path)
    saved.with_name("step_00000005").mkdir()
    assert "manifest.json" in refused(saved.with_name("step_00000005"))


# ── What a stranger may have written ──────────────────────────────────────────────────────────────────────────────────


class Canary:
    """A pickle of this creates a folder when it is loaded without restriction."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


FILES = ["state.json", ".metadata", "__0_0.distcp", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_in_place_of_any_file_never_runs(saved, tmp_path, name, signed, protocol):
    # transformers#43140: resuming from a stranger's checkpoint ran code from a side file.
    canary = tmp_path / "canary"
    (saved / name).write_bytes(pickle.dumps(Canary(canary), protocol))
    if signed and name != "manifest.json":
        sign(saved)
    assert name in refused(saved) or name == "__0_0.distcp"
    assert not canary.exists()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_noticed(saved, name):
    whole = (saved / name).read_bytes()
    for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        for bit in (1, 128):
            broken = bytearray(whole)
            broken[place] ^= bit
            (saved / name).write_bytes(broken)
            try:
                fault = refused(saved)
            except pytest.fail.Exception:
                # a blank or a line break of the JSON that became another one says the same
                assert json.loads(bytes(broken)) == json.loads(whole), (name, place, bit)
            else:
                assert str(saved) in fault


@pytest.mark.parametrize("content", ["[]", "{}", "5", "null", '"text"', '{"files": []}', '{"files": {"state.json": 5}}',
                                     '{"files": {"state.json": {}}}', "[" * 100_000, "", "\x00",
                                     '{"format": "femto-checkpoint", "version": 1}',
                                     '{"format": "femto-checkpoint", "version": 1, "step": "4"}'])  # fmt: skip
def test_json_of_another_shape_is_refused(saved, content):
    (saved / "state.json").write_text(content)
    sign(saved)
    assert "state.json" in refused(saved)
    (saved / "manifest.json").write_text(content)
    assert "manifest" in refused(saved)


def test_a_manifest_without_a_digest_is_refused(saved):
    files = json.loads((saved / "manifest.json").read_text())["files"]
    del files["state.json"]["sha256"]
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    assert "manifest.json" in refused(saved)


def test_a_manifest_that_leaves_a_file_of_tensors_unverified_is_refused(saved):
    files = json.loads((saved / "manifest.json").read_text())["files"]
    del files["__0_0.distcp"]
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    assert "does not list __0_0.distcp" in refused(saved)


def test_a_checkpoint_of_another_format_or_of_a_later_version_is_refused_by_name(saved):
    state = json.loads((saved / "state.json").read_text())
    for change, words in ({"version": 2}, "version 2"), ({"format": "other"}, "other version 1"):
        (saved / "state.json").write_text(json.dumps(state | change))
        sign(saved)
        assert words in refused(saved) and "femto-checkpoint version 1" in refused(saved)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", "x\x00y"])
def test_a_manifest_names_no_file_outside_its_folder(saved, name):
    (saved.parent / "outside").write_text("secret")
    files = json.loads((saved / "manifest.json").read_text())["files"]
    files[name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    assert str(saved) in refused(saved)


def rewrite_metadata(saved: Path, change) -> None:
    """Change DCP's metadata with stock pickle and sign the checkpoint again."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (saved / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    sign(saved)


@pytest.mark.parametrize("name", ["../step_00000002/__0_0.distcp", "/etc/passwd", "..", "", 5, None, b"x"])
def test_the_metadata_names_no_file_outside_its_folder(saved, name):
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    rewrite_metadata(saved, change)
    assert str(saved) in refused(saved)


def bytes_entry(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"] = dcp.metadata.BytesStorageMetadata()


def no_size(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.a.weight"].size


def wrong_size(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].size = [5, 7]


def no_tensors(metadata: Metadata) -> None:
    metadata.state_dict_metadata = None


def no_storage(metadata: Metadata) -> None:
    metadata.storage_data = None


def unlisted(metadata: Metadata) -> None:
    metadata.storage_data = dict(list(metadata.storage_data.items())[1:])


def bad_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].chunks = 5


def in_part(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].chunks = []


def twice(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].chunks *= 2


def far_away(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = 10**15


def transformed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["os.system"]


@pytest.mark.parametrize(
    "change",
    [bytes_entry, no_size, wrong_size, no_tensors, no_storage, unlisted, bad_chunks, in_part, twice, far_away,
     transformed, lambda _: {"a": 1}, lambda _: Metadata({}), lambda _: Metadata, lambda _: torch.Size, lambda _: 5],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_metadata_of_another_shape_is_refused(saved, change):
    rewrite_metadata(saved, change)
    with pytest.raises(FemtoError) as caught:
        load_tensors(saved, blank(some_tensors()))
    assert all(str(saved) in fault for fault in caught.value.faults)


def test_an_entry_that_is_no_tensor_runs_nothing(tmp_path):
    """What stock `dcp.load` does with such an entry is checked too, or the test would prove nothing."""
    canary, path = tmp_path / "canary", tmp_path / "step_00000001"
    dcp.save({"model.x": Canary(canary), "model.y": torch.zeros(2)}, checkpoint_id=path, no_dist=True)
    (path / "state.json").write_text(json.dumps({"format": "femto-checkpoint", "version": 1, "step": 1}))
    sign(path)
    canary.exists() and canary.rmdir()
    for names in (["model.x"], ["model.x", "model.y"]):
        with pytest.raises(FemtoError, match="step_00000001"):
            load_tensors(path, {name: torch.zeros(2) for name in names})
    with pytest.raises(FemtoError):
        tensor_shapes(path)
    assert not canary.exists()
    dcp.load({"model.x": None, "model.y": torch.zeros(2)}, checkpoint_id=path, no_dist=True)
    assert canary.exists(), "stock dcp.load has become harmless"


@pytest.mark.parametrize("module", ["os system", "builtins eval", "builtins setattr", "torch load", "pathlib Path",
                                    "torch.storage _load_from_bytes", "torch.serialization load", "codecs encode",
                                    "torch.distributed.checkpoint.metadata os", "functools partial"])  # fmt: skip
def test_the_metadata_names_nothing_but_dcps_own_classes(saved, module):
    (saved / ".metadata").write_bytes(b"\x80\x02c" + module.replace(" ", "\n").encode() + b"\n.")
    sign(saved)
    assert ".metadata" in refused(saved) and module.replace(" ", ".") in refused(saved)


def test_members_of_an_enumeration_are_read_as_every_python_pickles_them_and_getattr_reads_nothing_else(
    saved, monkeypatch
):
    # Python 3.11.0 to 3.11.3, Debian 12's among them, pickle a member as getattr(its class, its name).
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    rewrite_metadata(saved, lambda metadata: None)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    load_tensors(saved, blank(some_tensors()))
    for owner in (b"ctorch\nSize\n", b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"):
        (saved / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + owner + b"V__class__\ntR.")
        sign(saved)
        assert ".metadata: refused" in refused(saved)
        assert "__class__" in refused(saved)


def test_a_metadata_pickle_cannot_change_pathlib(saved):
    # GLOBAL pathlib.PosixPath; BUILD with a slot state: setattr(PosixPath, "planted", "x")
    (saved / ".metadata").write_bytes(
        b"\x80\x02cpathlib\nPosixPath\nN}X\x07\x00\x00\x00plantedX\x01\x00\x00\x00xs\x86b."
    )
    sign(saved)
    assert ".metadata" in refused(saved)
    assert not hasattr(PosixPath, "planted")
