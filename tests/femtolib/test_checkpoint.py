"""Whether training state on disk is whole or not there, comes back to the bit, and can be read from a stranger."""

import hashlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from femtolib import checkpoint
from femtolib.checkpoint import (
    list_checkpoints,
    load_tensors,
    prune_checkpoints,
    read_state,
    save_checkpoint,
    tensor_shapes,
)
from femtolib.errors import FemtoError, RunFailed
from femtolib.publish import remove

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


class Killed(BaseException):
    """Stands in for a SIGKILL: nothing of femto's catches it."""


@pytest.mark.parametrize("moment", ["before", "tensors", "state", "manifest", "removal", "rename"])
@pytest.mark.parametrize("step", [4, 6])
def test_a_save_killed_at_any_moment_leaves_the_checkpoints_before_it_and_can_be_made_again(
    folder, monkeypatch, moment, step
):
    # Automodel#3254: the next save of that step collided with the half-written folder.
    def kill(*_, **__):
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # the dead do not clean up
        raise Killed

    real_write, real_rename, real_save = checkpoint._write_json, Path.rename, dcp.save

    def save_then_kill(*arguments, **more):
        real_save(*arguments, **more)
        kill()

    def write(path, value):
        if path.stem == moment:
            path.write_text("{")
            kill()
        real_write(path, value)

    def rename(self, target):
        if moment == "rename" and self.name.endswith(".partial"):
            kill()
        if moment == "removal" and Path(target).name.endswith(".replaced"):
            real_rename(self, target)
            kill()
        return real_rename(self, target)

    before = tree(folder / "step_00000002")
    with monkeypatch.context() as patched:
        if moment in ("before", "tensors"):
            patched.setattr(dcp, "save", kill if moment == "before" else save_then_kill)
        patched.setattr(checkpoint, "_write_json", write)
        patched.setattr(Path, "rename", rename)
        try:
            save_checkpoint(folder, step, some_tensors(), STATE)
            assert (moment, step) == ("removal", 6), "the save was not killed"
        except Killed:
            assert moment == "before" or list(folder.glob(".*")), "the kill left nothing to clean up"
    assert tree(folder / "step_00000002") == before
    for path in list_checkpoints(folder):
        read_state(path)
        load_tensors(path, blank(some_tensors()))
    assert folder / "step_00000002" in list_checkpoints(folder)

    save_checkpoint(folder, step, some_tensors(), STATE | {"ledger": "again"})
    prune_checkpoints(folder, None)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in list_checkpoints(folder))
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
    for step in (1000, 900):
        save_checkpoint(folder, step, {"x": torch.zeros(1)}, {})
    (folder / "best").mkdir()
    (folder / "step_00002000").mkdir()  # half a checkpoint of another program, of which we know nothing
    (folder / ".step_00000006.partial").mkdir()
    (folder / ".step_00000001.replaced").mkdir()
    prune_checkpoints(folder, keep_last)
    assert names(folder) == [f"step_{step:08d}" for step in kept or [2, 4, 900, 1000]]
    assert {path.name for path in folder.iterdir()} - set(names(folder)) == {"best", "step_00002000"}


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


def far_away(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = 10**15


def transformed(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["os.system"]


@pytest.mark.parametrize(
    "change",
    [bytes_entry, no_size, wrong_size, no_tensors, no_storage, unlisted, bad_chunks, far_away, transformed,
     lambda _: {"a": 1}, lambda _: Metadata({}), lambda _: Metadata, lambda _: torch.Size, lambda _: 5],
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


@pytest.mark.parametrize("module", ["os system", "builtins eval", "builtins getattr", "torch load", "pathlib Path",
                                    "torch.storage _load_from_bytes", "torch.serialization load", "codecs encode",
                                    "torch.distributed.checkpoint.metadata os", "functools partial"])  # fmt: skip
def test_the_metadata_names_nothing_but_dcps_own_classes(saved, module):
    (saved / ".metadata").write_bytes(b"\x80\x02c" + module.replace(" ", "\n").encode() + b"\n.")
    sign(saved)
    assert ".metadata" in refused(saved) and module.replace(" ", ".") in refused(saved)


def test_a_metadata_pickle_cannot_change_pathlib(saved):
    # GLOBAL pathlib.PosixPath; BUILD with a slot state: setattr(PosixPath, "planted", "x")
    (saved / ".metadata").write_bytes(
        b"\x80\x02cpathlib\nPosixPath\nN}X\x07\x00\x00\x00plantedX\x01\x00\x00\x00xs\x86b."
    )
    sign(saved)
    assert ".metadata" in refused(saved)
    assert not hasattr(PosixPath, "planted")
