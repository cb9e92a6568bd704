"""What is written is read back; whatever else lies on the disk is refused by the name of its file."""

import hashlib
import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from femtolib.data.token_files import (
    Index,
    is_token_directory,
    map_shard,
    read_index,
    verify_digests,
    write_index,
    write_shard,
)
from femtolib.errors import FemtoError

TOKENS = [np.array([5, 6, 0, 7, 0], np.uint32), np.array([8, 70_000, 0], np.uint32)]
STARTS = [np.array([0, 3], np.int64), np.array([0], np.int64)]


@pytest.fixture
def directory(tmp_path):
    """Two shards of three documents in all."""
    shards = [write_shard(tmp_path, number, TOKENS[number], STARTS[number]) for number in range(2)]
    write_index(
        tmp_path,
        Index(
            dtype="uint32",
            vocab_size=70_001,
            largest_id=70_000,
            eos_id=0,
            bos_id=None,
            tokens=8,
            documents=3,
            skipped={"empty": 1, "bad": 0},
            sources=["größe.jsonl"],
            tokenizer_digest="0" * 64,
            template_digest=None,
            shards=shards,
        ),
    )
    return tmp_path


def change(directory, **keys):
    path = directory / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_shard(directory, **keys):
    shards = json.loads((directory / "index.json").read_text())["shards"]
    change(directory, shards=[shards[0] | keys, shards[1]])


def test_tokens_are_read_back_by_femto_and_by_the_safetensors_library(directory):
    index = read_index(directory)
    assert is_token_directory(directory)
    assert index.shards[1].digest == hashlib.sha256((directory / "tokens-00001.safetensors").read_bytes()).hexdigest()
    verify_digests(directory, index)
    for number in range(2):
        for arrays in (map_shard(directory, index, number), load_file(directory / index.shards[number].file)):
            assert arrays["tokens"].dtype == np.uint32 and arrays["document_starts"].dtype == np.int64
            np.testing.assert_array_equal(arrays["tokens"], TOKENS[number])
            np.testing.assert_array_equal(arrays["document_starts"], STARTS[number])


def test_a_mapped_shard_cannot_be_written(directory):
    with pytest.raises(ValueError, match="read-only"):
        map_shard(directory, read_index(directory), 0)["tokens"][0] = 1


def test_the_mask_of_trained_tokens_is_kept(tmp_path, directory):
    trained = np.array([0, 1, 1, 0, 1], np.uint8)
    index = read_index(directory)
    index.shards[0] = write_shard(directory, 0, TOKENS[0], STARTS[0], trained)
    write_index(directory, index)
    np.testing.assert_array_equal(map_shard(directory, read_index(directory), 0)["trained"], trained)


def test_the_digest_is_of_what_decides_the_rows(directory):
    index = read_index(directory)
    digest = index.digest
    index.sources, index.skipped = [], {}
    assert index.digest == digest
    for name, value in [("eos_id", 5), ("dtype", "uint16"), ("shards", index.shards[::-1])]:
        changed = read_index(directory)
        setattr(changed, name, value)
        assert changed.digest != digest, name


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"format": "tokens"}, "not the index of a token directory"),
        ({"version": 2}, "version 2, but this femto reads version 1"),
        ({"version": True}, "version True"),
        ({"dtype": "float32"}, "dtype: "),
        ({"tokens": "8"}, "tokens: "),
        ({"tokens": 8.0}, "tokens: "),
        ({"tokens": 9}, "tokens: 9, but the shards hold 8"),
        ({"documents": 2}, "documents: 2, but the shards hold 3"),
        ({"eos_id": -1}, "eos_id: "),
        ({"eos_id": 70_001}, "eos_id: 70001 is above largest_id 70000"),
        ({"dtype": "uint16"}, "largest_id: 70000 does not fit uint16"),
        ({"shards": None}, "shards: "),
        ({"tokenizer_digest": "../../etc"}, "tokenizer_digest: "),
    ],
)
def test_a_wrong_index_is_refused_by_key(directory, keys, fault):
    change(directory, **keys)
    with pytest.raises(FemtoError) as error:
        read_index(directory)
    assert f"{directory / 'index.json'}: {fault}" in str(error.value)


def test_all_faults_of_an_index_are_told_at_once(directory):
    change(directory, dtype="int8", tokens=-1, documents=None)
    with pytest.raises(FemtoError) as error:
        read_index(directory)
    assert len(error.value.faults) == 3


@pytest.mark.parametrize("name", ["../tokens-00000.safetensors", "/etc/passwd", "a/tokens-00000.safetensors", "x", ""])
def test_a_shard_never_lies_outside_its_directory(directory, name):
    change_shard(directory, file=name)
    with pytest.raises(FemtoError, match=r"shards\.0\.file: "):
        read_index(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, pickle.dumps({"format": "femto-tokens"})])
def test_an_index_that_is_not_json_is_named(directory, content):
    (directory / "index.json").write_bytes(content)
    with pytest.raises(FemtoError, match=r"index\.json: not JSON"):
        read_index(directory)


def test_a_folder_without_an_index_is_no_token_directory(tmp_path):
    assert not is_token_directory(tmp_path)
    with pytest.raises(FemtoError, match="not a token directory"):
        read_index(tmp_path)


def test_missing_and_cut_shards_are_all_named(directory):
    (directory / "tokens-00000.safetensors").unlink()
    path = directory / "tokens-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FemtoError) as error:
        read_index(directory)
    assert [fault.split(": ")[0] for fault in error.value.faults] == [
        str(directory / "tokens-00000.safetensors"),
        str(path),
    ]


def test_one_file_named_twice_is_refused(directory):
    index = json.loads((directory / "index.json").read_text())
    change(directory, shards=[index["shards"][0]] * 2, tokens=10, documents=4)
    with pytest.raises(FemtoError, match="one file is named twice"):
        read_index(directory)


def test_a_flipped_bit_is_found_by_its_digest(directory):
    path = directory / "tokens-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    index = read_index(directory)  # sizes alone agree
    with pytest.raises(FemtoError, match=r"tokens-00001\.safetensors: the content has changed"):
        verify_digests(directory, index)


# transformers#43140: a side file that is unpickled runs code
def test_a_pickle_in_place_of_a_shard_is_refused_and_not_run(directory, tmp_path):
    class Canary:
        def __reduce__(self):
            return open, (str(tmp_path / "canary"), "w")

    content = pickle.dumps(Canary())
    (directory / "tokens-00000.safetensors").write_bytes(content)
    change_shard(directory, bytes=len(content))
    with pytest.raises(FemtoError, match=r"tokens-00000\.safetensors: not the shard"):
        map_shard(directory, read_index(directory), 0)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "arrays",
    [
        {"tokens": np.zeros(5, np.uint16), "document_starts": STARTS[0]},
        {"tokens": np.zeros(5, np.int32), "document_starts": STARTS[0]},
        {"tokens": np.zeros(4, np.uint32), "document_starts": STARTS[0]},
        {"tokens": np.zeros((5, 1), np.uint32), "document_starts": STARTS[0]},
        {"tokens": TOKENS[0], "document_starts": np.zeros(3, np.int64)},
        {"tokens": TOKENS[0]},
        {"tokens": TOKENS[0], "document_starts": STARTS[0], "trained": np.zeros(4, np.uint8)},
    ],
)
def test_a_shard_that_holds_other_arrays_than_the_index_says_is_refused(directory, arrays):
    path = directory / "tokens-00000.safetensors"
    save_file(arrays, path)
    change_shard(directory, bytes=path.stat().st_size)
    with pytest.raises(FemtoError, match="not the shard that"):
        map_shard(directory, read_index(directory), 0)


@pytest.mark.parametrize("offsets", [[0, 10**20], [-40, -20], [40, 20], "ab", [0, 20, 40], None])
def test_a_header_that_points_outside_its_file_is_refused(directory, offsets):
    path = directory / "tokens-00000.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["tokens"]["data_offsets"] = offsets
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    change_shard(directory, bytes=path.stat().st_size)
    with pytest.raises(FemtoError, match="not the shard"):
        map_shard(directory, read_index(directory), 0)
