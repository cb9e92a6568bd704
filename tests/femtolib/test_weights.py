import dataclasses
import hashlib
import json
import math
import os
import pickle
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import femtolib.weights
from femtolib.errors import FemtoError, RunFailed
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig, read_model_config
from femtolib.weights import initialize_weights, load_weights, save_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def config(tiny_llama) -> ModelConfig:
    return ModelConfig.from_dict(tiny_llama, "", inline=True)


@pytest.fixture
def tied(config) -> ModelConfig:
    return dataclasses.replace(config, tie_word_embeddings=True)


def drawn(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config, dtype).to(dtype)
    initialize_weights(model, seed)
    return model


def save(directory: Path, model: Decoder, max_shard_bytes: int = 10**9, dtype: torch.dtype = torch.float32) -> Path:
    save_model(directory, model.config, model.named_parameters(), dtype=dtype, max_shard_bytes=max_shard_bytes)
    return directory


def load(directory: Path) -> Decoder:
    model = Decoder(read_model_config(directory), torch.float32)
    load_weights(model, directory)
    return model


def assert_same(one: Decoder, other: Decoder) -> None:
    weights = dict(other.named_parameters())
    assert [name for name, p in one.named_parameters() if not torch.equal(p, weights[name])] == []


def rewrite(directory: Path, change) -> None:
    """Change the tensors of a directory's one weights file in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def fault_of_loading(directory: Path) -> str:
    with pytest.raises(FemtoError) as caught:
        load(directory)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ── Initial weights ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_matrices_are_normal_norms_are_one_and_biases_are_zero(config):
    model = drawn(dataclasses.replace(config, attention_bias=True, mlp_bias=True, initializer_range=0.05))
    kinds = {name.rpartition(".")[2] if "norm" not in name else "norm" for name, _ in model.named_parameters()}
    assert kinds == {"weight", "bias", "norm"}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            n = parameter.numel()
            assert abs(parameter.std().item() / 0.05 - 1) < 5 / math.sqrt(2 * n), name
            assert abs(parameter.mean().item()) < 5 * 0.05 / math.sqrt(n), name
        else:
            assert torch.all(parameter == (0 if name.endswith("bias") else 1)), name


def test_seed_name_and_block_each_give_other_values(config):
    model, other = drawn(config, seed=1), drawn(config, seed=2)
    embedding = model.model.embed_tokens.weight
    assert not torch.equal(embedding, other.model.embed_tokens.weight)
    assert not torch.equal(embedding, model.lm_head.weight)
    first, second = model.model.layers
    assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)
    assert not torch.equal(embedding[:64], embedding[256:320])
    assert_same(model, drawn(config, seed=1))


def test_the_weights_of_a_seed_never_change(tiny_llama, config):
    """Somebody's run of last year starts from the same weights: compared to 1e-7, the last bit is the processor's."""
    generator = torch.Generator()
    expected = []
    for block, rows in enumerate((256, 64)):
        digest = hashlib.blake2b(f"7/{EMBEDDING}/{block}".encode(), digest_size=4).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        expected.append(torch.randn(rows, 64, generator=generator) * 0.02)
    torch.testing.assert_close(
        drawn(config, seed=7).model.embed_tokens.weight.detach(), torch.cat(expected), atol=1e-7, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_casts_of_the_float32_weights(config, dtype):
    expected = dict(drawn(config).named_parameters())
    for name, parameter in drawn(config, dtype=dtype).named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, expected[name].to(dtype))


class Shard(torch.nn.Parameter):
    """A stand-in for a sharded tensor: part of a matrix, with the protocol that torch's checkpoints use."""

    def __new__(cls, whole: torch.Tensor, rows: slice, columns: slice):
        shard = super().__new__(cls, torch.empty_like(whole))
        shard.part, shard.place = torch.full_like(whole[rows, columns], 1e9), (rows.start, columns.start)
        return shard

    def to_local(self) -> torch.Tensor:
        return self.part

    def __create_chunk_list__(self) -> list:
        return [SimpleNamespace(offsets=torch.Size(self.place), sizes=self.part.shape)]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(0, 320), slice(0, 64)),
        (slice(0, 100), slice(0, 64)),
        (slice(100, 256), slice(0, 64)),
        (slice(255, 257), slice(0, 64)),
        (slice(256, 320), slice(16, 32)),
        (slice(0, 320), slice(63, 64)),
        (slice(320, 320), slice(0, 64)),
    ],
)
def test_a_part_drawn_or_read_alone_is_bit_equal_to_the_whole(config, tmp_path, rows, columns):
    whole = drawn(config, seed=3)
    shard = Shard(whole.lm_head.weight.detach(), rows, columns)
    model = Decoder(config, torch.float32)
    model.lm_head.weight = shard
    initialize_weights(model, 3)
    assert torch.equal(shard.part, whole.lm_head.weight[rows, columns])

    shard.part.fill_(1e9)
    load_weights(model, save(tmp_path / "model", whole))
    assert torch.equal(shard.part, whole.lm_head.weight[rows, columns])


@pytest.fixture
def rank_of():
    """`rank_of(rank, world_size)`: this process becomes a rank of a group whose other members do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda rank, world_size: dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.destroy_process_group()


# One rank a layout: torch remembers the placement of a mesh by its shape, whatever rank this process now plays.
@pytest.mark.parametrize(("shape", "rank"), [((4,), 3), ((2, 2), 1), ((3,), 1)])
def test_a_sharded_model_holds_its_part_of_the_same_weights(tied, tmp_path, rank_of, shape, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    config = dataclasses.replace(tied, vocab_size=1030, intermediate_size=130)  # neither is divided by 4 or 3
    whole = drawn(config, seed=3)
    directory = save(tmp_path / "model", whole)
    expected = dict(whole.named_parameters())
    rank_of(rank, math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    with torch.device("meta"):
        model = Decoder(config, torch.float32)
    if "tp" in mesh.mesh_dim_names:
        plan = {"model.layers.*.self_attn.q_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.tie_weights()
    for fill in (lambda: initialize_weights(model, 3), lambda: load_weights(model, directory)):
        for parameter in model.parameters():
            parameter.detach().to_local().fill_(1e9)
        fill()
        for name, parameter in model.named_parameters():
            [chunk] = parameter.__create_chunk_list__()
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(parameter.to_local(), expected[name][place]), name
            assert 0 < parameter.to_local().numel() < parameter.numel()


# ── Round trips ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_import_and_export_give_the_same_tensors_and_config_values(config, tmp_path):
    config = dataclasses.replace(config, bos_token_id=3, eos_token_id=[4, 5], extra={"note": "kept"})
    first = save(tmp_path / "first", drawn(config))
    second = save(tmp_path / "second", load(first))
    assert sorted(p.name for p in second.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    assert read_model_config(second) == config
    assert json.loads((second / "generation_config.json").read_text()) == {"bos_token_id": 3, "eos_token_id": [4, 5]}


def test_an_exported_directory_is_readable_by_others(config, tmp_path):
    directory = save(tmp_path / "model", drawn(config))
    umask = os.umask(0)
    os.umask(umask)
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~umask for path in directory.iterdir())
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # mlx#743


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_weights_are_exported_in_the_dtype_asked_for_and_config_json_says_so(config, tmp_path, stored, dtype):
    # torchtitan#4166
    model = drawn(config, dtype=stored)
    directory = save(tmp_path / "model", model, dtype=dtype)
    keys = json.loads((directory / "config.json").read_text())
    assert keys["dtype"] == keys["torch_dtype"] == str(dtype).removeprefix("torch.")
    tensors = load_file(directory / "model.safetensors")
    assert all(torch.equal(tensors[name], p.to(dtype)) for name, p in model.named_parameters())
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    reloaded = load(directory)
    assert all(torch.equal(p, tensors[name].float()) for name, p in reloaded.named_parameters())


def test_tied_weights_are_stored_once_and_either_name_suffices(tied, tmp_path):
    # transformers#38870, safetensors#265
    model = drawn(tied)
    both = [*model.named_parameters(), (HEAD, model.lm_head.weight)]
    directory = tmp_path / "model"
    save_model(directory, tied, both, dtype=torch.float32, max_shard_bytes=10**9)
    assert HEAD not in load_file(directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is True

    ids = torch.arange(128)[None]
    for change in (
        lambda tensors: None,
        lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
        lambda tensors: tensors.update({EMBEDDING: tensors[HEAD].clone()}),
    ):
        rewrite(directory, change)
        reloaded = load(directory)
        assert torch.equal(reloaded(ids), model(ids))
        assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight

    rewrite(directory, lambda tensors: tensors[HEAD][5, 5].add_(1))
    assert f"{HEAD} differs from {EMBEDDING}" in fault_of_loading(directory)


def test_an_untied_config_without_a_head_is_refused(config, tmp_path):
    directory = save(tmp_path / "model", drawn(config))
    rewrite(directory, lambda tensors: tensors.pop(HEAD))
    assert fault_of_loading(directory) == f"{directory}: lacks {HEAD}"


def test_rotary_frequencies_that_old_files_hold_are_passed_over(config, tmp_path):
    model = drawn(config)
    directory = save(tmp_path / "model", model)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert_same(load(directory), model)


# ── Shards ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_exports_into_the_same_folder_never_mix(config, tmp_path):
    # diffusers#14769, torchtitan#2137
    directory = tmp_path / "model"
    total = sum(p.numel() * 4 for p in drawn(config).parameters())
    for seed, (limit, count) in enumerate([(total // 2, 3), (total, 1), (total - 1, 2)]):
        model = drawn(config, seed)
        save(directory, model, limit)
        files = sorted(directory.glob("*.safetensors"))
        assert len(files) == count
        assert_same(load(directory), model)
        assert all(path.stat().st_size < limit + 8192 for path in files)
        index = directory / "model.safetensors.index.json"
        assert index.exists() == (count > 1)
        if count > 1:
            assert [path.name for path in files] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in (1, 2, 3)][
                :count
            ]
            assert json.loads(index.read_text())["metadata"]["total_size"] == total
            listed = json.loads(index.read_text())["weight_map"]
            assert sorted(listed) == sorted(dict(model.named_parameters()))
            assert all(name in load_file(directory / file) for name, file in listed.items())

    save_file({"model.norm.weight": torch.zeros(64)}, directory / "consolidated.safetensors")
    assert_same(load(directory), model)
    files[0].unlink()
    assert f"names files that are not there: {files[0].name}" in fault_of_loading(directory)


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(config, tmp_path):
    model = drawn(config)
    directory = save(tmp_path / "model", model, max_shard_bytes=1)
    assert len(list(directory.glob("*.safetensors"))) == len(list(model.parameters()))
    assert_same(load(directory), model)


@pytest.mark.parametrize("max_shard_bytes", [1, 10**10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tensor_is_in_memory_at_a_time(config, tmp_path, peak_bytes, monkeypatch, max_shard_bytes, dtype):
    monkeypatch.setattr(femtolib.weights, "ELEMENTS_AT_ONCE", 1024)
    config = dataclasses.replace(config, intermediate_size=config.vocab_size)  # large ones follow each other
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config, torch.float32).named_parameters()}
    largest = max(shape.numel() for shape in shapes.values()) * 4

    def tensors():
        for name, shape in shapes.items():
            yield name, torch.ones(shape)

    peak = peak_bytes(
        lambda: save_model(tmp_path / "model", config, tensors(), dtype=dtype, max_shard_bytes=max_shard_bytes)
    )
    assert largest <= peak < largest + 32 * 1024
    assert peak_bytes(lambda: [torch.ones(50_000) for _ in range(2)]) == 400_000


def test_tensors_may_come_in_any_order(config, tmp_path):
    model = drawn(config)
    first = save(tmp_path / "first", model, max_shard_bytes=100_000)
    reversed_ = [*model.named_parameters()][::-1]
    save_model(tmp_path / "second", config, reversed_, dtype=torch.float32, max_shard_bytes=100_000)
    for path in first.iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_transformers_reads_every_shard(tied, tmp_path):
    from transformers import AutoModelForCausalLM

    for config, limit in ((tied, 10**9), (dataclasses.replace(tied, tie_word_embeddings=False), 100_000)):
        model = drawn(config)
        directory = save(tmp_path / f"{limit}", model, limit, dtype=torch.bfloat16)
        theirs = dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(theirs[name], parameter.bfloat16()), name
        for path in directory.glob("*.safetensors"):  # the library's own writer lays out the same elements
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
            header_length = int.from_bytes(path.read_bytes()[:8], "little")
            assert header_length % 8 == 0
            save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
            assert (tmp_path / "theirs").stat().st_size == path.stat().st_size


def edit_index(directory: Path, change) -> None:
    path = directory / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("name", ["../evil.safetensors", "/evil.safetensors", "sub/evil.safetensors", "..\\e"])
def test_names_in_an_index_never_leave_its_directory(config, tmp_path, name):
    directory = save(tmp_path / "model", drawn(config), max_shard_bytes=100_000)
    save_file({HEAD: torch.zeros(320, 64)}, tmp_path / "evil.safetensors")
    edit_index(directory, lambda values: values["weight_map"].update({HEAD: name}))
    assert f"names files outside its directory: {name}" in fault_of_loading(directory)


def test_an_index_that_contradicts_the_files_is_refused(config, tmp_path):
    directory = save(tmp_path / "model", drawn(config), max_shard_bytes=100_000)
    index = directory / "model.safetensors.index.json"
    good = index.read_text()
    listed = json.loads(good)["weight_map"]
    other = next(file for file in listed.values() if file != listed[HEAD])
    edit_index(directory, lambda values: values["weight_map"].update({HEAD: other}))
    assert f"not in the file that it names: {HEAD}" in fault_of_loading(directory)
    for content, expected in (("{}", "weight_map: should name a file"), ("{", "not JSON"), ("[]", "an object")):
        index.write_text(content)
        assert expected in fault_of_loading(directory)
    index.write_text(good)
    save_file({"x": torch.zeros(1)}, directory / "model.safetensors")
    assert "holds both model.safetensors and model.safetensors.index.json" in fault_of_loading(directory)
    (directory / "model.safetensors").unlink()
    shard = load_file(directory / other)
    save_file(shard | {HEAD: torch.zeros(320, 64)}, directory / other)
    assert f"holds what another shard holds too: {HEAD}" in fault_of_loading(directory)


# ── What is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod."])
def test_names_must_match_exactly(config, tmp_path, prefix):
    # pytorch/examples#1029, torchtune#2537
    directory = save(tmp_path / "model", drawn(config))
    names = [name for name, _ in Decoder(config, torch.float32).named_parameters()]

    def add_prefix(tensors: dict) -> None:
        for name in names:
            tensors[prefix + name] = tensors.pop(name)

    rewrite(directory, add_prefix)
    missing, unexpected = fault_of_loading(directory).split("\n")
    assert missing == f"{directory}: lacks {', '.join(names[:10])}, … (21 in all)"
    assert unexpected.count(prefix) >= 10 and unexpected.endswith(", … (21 in all)")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.update(extra=torch.zeros(1)), "holds what its config.json has no place for: extra"),
        (lambda t: t.update({HEAD: torch.zeros(64, 320)}), f"{HEAD} is [64, 320], config.json wants [320, 64]"),
        (lambda t: t.update({HEAD: torch.zeros(321, 64)}), f"{HEAD} is [321, 64], config.json wants [320, 64]"),
        (lambda t: t.update({HEAD: t[HEAD].to(torch.int8)}), f"{HEAD} is stored as I8, which is not read"),
        (lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)}), f"{HEAD} is stored as F8_E4M3"),
    ],
)
def test_a_wrong_tensor_is_named(config, tmp_path, change, expected):
    directory = save(tmp_path / "model", drawn(config))
    rewrite(directory, change)
    assert expected in fault_of_loading(directory)


class Canary:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json", "pytorch_model.bin", "model.pt"]
)
def test_a_pickle_in_place_of_any_file_is_refused_and_never_run(config, tmp_path, name):
    # transformers#43140
    directory, canary = save(tmp_path / "model", drawn(config)), tmp_path / "canary"
    if name.endswith((".bin", ".pt")):
        (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps(Canary(canary)))
    fault = fault_of_loading(directory)
    assert name in fault
    assert not canary.exists()
    if name == "pytorch_model.bin":
        assert "\n" not in fault and "from transformers import AutoModelForCausalLM" in fault
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary would have sung"


def test_a_truncated_or_absent_weights_file_is_named(config, tmp_path):
    directory = save(tmp_path / "model", drawn(config))
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: not a whole safetensors file" in fault_of_loading(directory)
    path.unlink()
    assert fault_of_loading(directory).startswith(f"{directory}: no weights")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokenizer_files_are_copied_and_a_former_model_goes_whole(config, tmp_path):
    directory, tokenizer = save(tmp_path / "model", drawn(config)), tmp_path / "tokenizer.json"
    (directory / "stale.json").write_text("{}")
    tokenizer.write_text('{"version": "1.0"}')
    save_model(
        directory,
        config,
        drawn(config).named_parameters(),
        dtype=torch.float32,
        max_shard_bytes=10**9,
        tokenizer_files=[tokenizer],
    )
    assert (directory / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (directory / "stale.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_holds_something_else_is_not_replaced(config, tmp_path):
    directory = tmp_path / "thesis"
    directory.mkdir()
    save(directory, drawn(config))  # an empty one is
    precious = tmp_path / "other" / "chapter.txt"
    precious.parent.mkdir()
    precious.write_text("It was a dark night")
    with pytest.raises(FemtoError, match="holds something else than a model and is not replaced"):
        save(precious.parent, drawn(config))
    assert precious.read_text() == "It was a dark night"


def assert_failed_save_leaves_the_old_model(directory: Path, config: ModelConfig, expected: str) -> None:
    with pytest.raises(RunFailed, match=expected) as caught:
        save(directory, drawn(config, seed=2), max_shard_bytes=50_000)
    assert caught.value.exit_code == 1 and str(directory) in str(caught.value)


def test_a_weight_that_its_dtype_turns_into_infinity_is_not_saved(config, tmp_path):
    weights = drawn(config)
    with torch.no_grad():
        next(weights.parameters()).view(-1)[0] = 1e5  # above float16's 65,504
    with pytest.raises(RunFailed, match="not finite in float16"):
        save(tmp_path / "model", weights, dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "model", weights, dtype=torch.bfloat16)


def test_a_full_disk_is_told_and_leaves_the_old_model_alone(config, tmp_path):
    old = drawn(config, seed=1)
    directory = save(tmp_path / "model", old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # the embedding has 81,920 bytes
    try:
        assert_failed_save_leaves_the_old_model(directory, config, "could not be written: .*File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(load(directory), old)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_place_that_cannot_be_written_is_told(config, tmp_path):
    (tmp_path / "file").write_text("")
    assert_failed_save_leaves_the_old_model(tmp_path / "file" / "model", config, "Not a directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_save_leaves_nothing_and_a_killed_one_is_swept_up(config, tmp_path):
    old = drawn(config, seed=1)
    directory = save(tmp_path / "model", old)

    def interrupted():
        for number, pair in enumerate(old.named_parameters()):
            if number == 15:
                raise KeyboardInterrupt
            yield pair

    with pytest.raises(KeyboardInterrupt):
        save_model(directory, config, interrupted(), dtype=torch.float32, max_shard_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(load(directory), old)

    for leftover in (".model.0123abcd.partial", ".model.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_text("half")
    save(directory, old)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(load(directory), old)
