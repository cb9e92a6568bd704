"""Documents become token directories: every token once, the same bytes whoever makes them, all or nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from femtolib.data import tokenize
from femtolib.data.documents import Document, read_documents
from femtolib.data.token_dataset import TokenDataset
from femtolib.data.token_files import map_shard, read_index, verify_digests
from femtolib.data.tokenize import prepare_tokens, tokenize_documents
from femtolib.data.tokenizer import load_tokenizer
from femtolib.errors import FemtoError, RunFailed


def documents(*texts):
    return [Document(f"test:{number}", text) for number, text in enumerate(texts, 1)]


def stored(directory):
    """The documents of a token directory, as lists of ids."""
    index, found = read_index(directory), []
    for number in range(len(index.shards)):
        arrays = map_shard(directory, index, number)
        starts = arrays["document_starts"].tolist()
        found += [ids.tolist() for ids in np.split(arrays["tokens"], starts[1:])] if starts else []
    return found


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


@pytest.fixture
def words(word_tokenizer):
    """w0 … w98, `<eos>` is 99."""
    return load_tokenizer(word_tokenizer(100))


@pytest.fixture(scope="module")
def many():
    """3,000 documents of very uneven length, some without text."""
    lengths = np.random.default_rng(0).zipf(1.5, 3000) % 3000
    return documents(*(" ".join(f"w{(i + j) % 99}" for j in range(n)) for i, n in enumerate(lengths)))


# trl#4554: tokens past the length of a block vanish
@pytest.mark.parametrize(
    ("lengths", "seq_len", "tokens", "rows", "left"), [((4, 2, 3, 1), 3, 14, 4, 1), ((121,), 60, 122, 2, 1)]
)
def test_each_token_is_stored_once_and_in_order(tmp_path, words, lengths, seq_len, tokens, rows, left):
    ids = iter(range(99 * 2))
    expected = [[next(ids) % 99 for _ in range(length)] for length in lengths]
    tokenize_documents(
        documents(*(" ".join(f"w{i}" for i in document) for document in expected)), words, tmp_path / "t", sources=[]
    )
    assert stored(tmp_path / "t") == [[*document, 99] for document in expected]
    dataset = TokenDataset([tmp_path / "t"], rows="stream", seq_len=seq_len)
    assert (dataset.tokens, len(dataset), dataset.tokens_left_over) == (tokens, rows, left)


# litgpt#706: no separator between documents, or two
@pytest.mark.parametrize(("post", "bos"), [("", None), ("bos", 0), ("bos eos", 0)])
def test_the_index_records_what_begins_and_ends_a_document(tmp_path, byte_tokenizer, post, bos):
    index = tokenize_documents(
        documents("a", "b", "c"), load_tokenizer(byte_tokenizer(post)), tmp_path / "t", sources=[]
    )[""]
    assert (index.eos_id, index.bos_id) == (1, bos)
    for ids in stored(tmp_path / "t"):
        assert ids.count(1) == 1 and ids[-1] == 1 and ids.count(0) == (bos is not None)


# LLM-Shearing#65: two bytes whatever the vocabulary
@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_largest_id_survives_and_decides_the_width(tmp_path, word_tokenizer, size, dtype):
    tokenizer = load_tokenizer(word_tokenizer(size))
    index = tokenize_documents(documents(f"w1 w{size - 2}"), tokenizer, tmp_path / "t", sources=[])[""]
    assert (index.dtype, index.largest_id) == (dtype, size - 1)
    assert stored(tmp_path / "t") == [[1, size - 2, size - 1]]


def test_a_token_directory_carries_its_tokenizer(tmp_path, byte_tokenizer):
    original = load_tokenizer(byte_tokenizer(files={}), "<|im_end|>")
    index = tokenize_documents(documents("a"), original, tmp_path / "t", sources=["here"])[""]
    copy = load_tokenizer(tmp_path / "t")  # no key eos_token: the index knows
    assert (copy.digest, copy.eos_id) == (original.digest, 3) == (index.tokenizer_digest, index.eos_id)
    assert copy.decode(stored(tmp_path / "t")[0]) == "a<|im_end|>"


@pytest.mark.parametrize("fraction", [None, 0.3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch, words, many, fraction):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 5000)
    results = []
    for workers in (1, 2, 7):
        directory = tmp_path / str(workers)
        tokenize_documents(
            *(many, words, directory),
            **{"sources": ["x"], "workers": workers, "shard_tokens": 10_000, "validation_fraction": fraction},
        )
        results.append(files(directory))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 10


def test_a_document_never_crosses_a_shard_and_a_shard_holds_at_most_its_tokens(tmp_path, words, many):
    index = tokenize_documents(many, words, tmp_path / "t", sources=[], shard_tokens=1000)[""]
    whole = [[*(int(word[1:]) for word in text.split()), 99] for _, text, _ in many if text]
    assert stored(tmp_path / "t") == whole
    assert index.tokens == sum(map(len, whole)) and index.documents == len(whole)
    assert index.skipped == {"empty": len(many) - len(whole), "bad": 0}
    assert all(shard.tokens <= 1000 or shard.documents == 1 for shard in index.shards)
    for number, shard in enumerate(index.shards[:-1]):  # closed no earlier than needed
        following = map_shard(tmp_path / "t", index, number + 1)
        starts = [*following["document_starts"].tolist(), index.shards[number + 1].tokens]
        assert shard.tokens + starts[1] > 1000
    verify_digests(tmp_path / "t", index)


def test_a_document_stays_in_validation_as_the_data_grow(tmp_path, words, many):
    def split(name, some):
        tokenize_documents(some, words, tmp_path / name, sources=[], validation_fraction=0.2)
        return [set(map(tuple, stored(tmp_path / name / part))) for part in ("train", "validation")]

    train, validation = split("small", many[:1500])
    more_train, more_validation = split("large", many[::-1])
    assert train <= more_train and validation <= more_validation
    assert not more_train & more_validation
    assert 0.1 < len(more_validation) / len(more_train | more_validation) < 0.3


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_part_without_documents_is_refused(tmp_path, words, part):
    fraction = 1e-9 if part == "validation" else 1 - 1e-9
    with pytest.raises(FemtoError, match=f"leaves {part} empty"):
        tokenize_documents(documents("w1"), words, tmp_path / "t", sources=[], validation_fraction=fraction)
    assert not list(tmp_path.iterdir())


# ── All or nothing ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_an_input_without_documents_is_refused_and_leaves_nothing(tmp_path, words, texts):
    with pytest.raises(FemtoError, match=rf"no documents in a\.txt \({len(texts)} empty, 0 bad\)"):
        tokenize_documents(documents(*texts), words, tmp_path / "new" / "t", sources=["a.txt"])
    assert not list(tmp_path.iterdir())


def test_a_bad_document_stops_and_leaves_nothing_or_is_counted(tmp_path, words, many, capsys):
    broken = [*many, *(Document(f"x:{i}", fault=f"x:{i}: broken") for i in range(7)), *documents("w5")]
    with pytest.raises(FemtoError, match="x:0: broken"):
        tokenize_documents(broken, words, tmp_path / "t", sources=[], shard_tokens=1000)
    assert not list(tmp_path.iterdir())
    index = tokenize_documents(broken, words, tmp_path / "t", sources=[], on_bad_document="skip")[""]
    assert index.skipped["bad"] == 7
    assert stored(tmp_path / "t")[-1] == [5, 99]
    assert capsys.readouterr().err.count("skipped: x:") == 5


def test_a_text_that_a_tokenizer_takes_for_its_control_token_is_a_bad_document(tmp_path, word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer(100, end="plain"))
    texts = documents("w1", "w2 <eos> w3", "w4", "<eos>")
    with pytest.raises(FemtoError, match=r"test:2: .*'<eos>'"):
        tokenize_documents(texts, tokenizer, tmp_path / "t", sources=[])
    index = tokenize_documents(texts, tokenizer, tmp_path / "t", sources=[], on_bad_document="skip")[""]
    assert stored(tmp_path / "t") == [[1, 99], [4, 99]]
    assert index.skipped == {"empty": 0, "bad": 2}


def test_an_output_that_exists_is_refused_unless_it_is_an_empty_folder(tmp_path, words):
    (tmp_path / "t").mkdir()
    tokenize_documents(documents("w1"), words, tmp_path / "t", sources=[])
    before = files(tmp_path)
    (tmp_path / "file").write_text("mine")
    for name in ("t", "file"):
        with pytest.raises(FemtoError, match="exists already"):
            tokenize_documents(documents("w2"), words, tmp_path / name, sources=[])
    assert files(tmp_path) == before | {"file": b"mine"}


def test_an_output_that_cannot_be_written_is_named(tmp_path, words):
    (tmp_path / "file").write_text("")
    for output_dir in (tmp_path / "file" / "t", tmp_path / ("x" * 300)):
        with pytest.raises(FemtoError, match="cannot be written"):
            tokenize_documents(documents("w1"), words, output_dir, sources=[])


def run_in_a_process(code, *arguments, **settings):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


TOKENIZE = """
import resource, sys, time
from pathlib import Path
from femtolib.data.documents import Document
from femtolib.data.tokenize import tokenize_documents
from femtolib.data.tokenizer import load_tokenizer
from femtolib.errors import RunFailed

def slow():
    for i in range(10**9):
        if i == 2000:
            print("running", flush=True)
        time.sleep(float(sys.argv[2]) if i >= 2000 else 0)
        yield Document("x", f"document {i} " * 20)

if sys.argv[3:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    tokenize_documents(slow(), load_tokenizer("builtin"), Path(sys.argv[1]), sources=[], shard_tokens=20_000)
except RunFailed as error:
    print(error)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_neither_output_nor_process(tmp_path, number):
    process = run_in_a_process(TOKENIZE, tmp_path / "out" / "t", 0.001, start_new_session=True)
    assert process.stdout.readline() == "running\n"
    assert list(tmp_path.glob("out/.t.*.partial"))
    os.killpg(process.pid, number)
    assert process.wait(20) not in (0, -signal.SIGKILL)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, words):
    process = run_in_a_process(TOKENIZE, tmp_path / "t", 0.001)
    assert process.stdout.readline() == "running\n"
    process.kill()
    process.wait()
    assert list(tmp_path.glob(".t.*.partial")) and (tmp_path / ".t.lock").exists()
    tokenize_documents(documents("w1"), words, tmp_path / "t", sources=[])
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert stored(tmp_path / "t") == [[1, 99]]


def test_two_processes_do_not_make_the_same_output(tmp_path, words):
    process = run_in_a_process(TOKENIZE, tmp_path / "t", 0.001)
    assert process.stdout.readline() == "running\n"
    with pytest.raises(FemtoError, match="being made by another process"):
        tokenize_documents(documents("w1"), words, tmp_path / "t", sources=[])
    assert process.poll() is None and list(tmp_path.glob(".t.*.partial"))
    process.kill()
    process.wait()


def test_a_disk_that_takes_no_more_ends_the_run_and_leaves_nothing(tmp_path):
    process = run_in_a_process(TOKENIZE, tmp_path / "t", 0, 10_000)  # no file may grow past 10,000 bytes
    output, errors = process.communicate(timeout=100)
    assert "could not be written" in output and "File too large" in output, errors
    assert not list(tmp_path.iterdir())


def test_a_fault_while_the_output_is_finished_leaves_nothing(tmp_path, words, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenize, "write_index", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        tokenize_documents(documents("w1"), words, tmp_path / "t", sources=[])
    assert not list(tmp_path.iterdir())


# ── The cache ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEMTO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text('{"text": "w1 w2", "body": "w5"}\n{"text": "w3", "body": "w6"}\n')
    return path


def test_raw_files_are_tokenized_once_and_token_directories_taken_as_they_are(
    tmp_path, cache, raw, words, word_tokenizer, capsys
):
    tokenize_documents(documents("w9"), words, tmp_path / "t", sources=[])
    tokenizer = str(word_tokenizer(100))
    first = prepare_tokens([str(raw), str(tmp_path / "t")], tokenizer)
    assert [stored(path) for path in first] == [[[1, 2, 99], [3, 99]], [[9, 99]]]
    assert first[1] == tmp_path / "t" and cache in first[0].parents
    assert f"tokenizing {raw}" in capsys.readouterr().err
    before = first[0].stat().st_mtime_ns
    assert prepare_tokens([str(raw), str(tmp_path / "t")], tokenizer) == first
    assert first[0].stat().st_mtime_ns == before
    assert "tokenizing" not in capsys.readouterr().err


def test_a_change_of_file_tokenizer_or_setting_is_another_entry(cache, raw, word_tokenizer):
    found = {}
    for name, changes in {
        "plain": {},
        "tokenizer": {"tokenizer": str(word_tokenizer(101))},
        "key": {"text_key": "body"},
        "bad": {"on_bad_document": "skip"},
    }.items():
        settings = {"tokenizer": str(word_tokenizer(100))} | changes
        found[name] = prepare_tokens([str(raw)], **settings)[0]
    directory = word_tokenizer(100)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    found["template"] = prepare_tokens([str(raw)], str(directory))[0]
    raw.write_text(raw.read_text().replace("w1", "w7"))  # of the same size
    found["file"] = prepare_tokens([str(raw)], str(word_tokenizer(100)))[0]
    assert len(set(found.values())) == 6
    assert stored(found["key"]) == [[5, 99], [6, 99]]
    assert stored(found["file"]) == [[7, 2, 99], [3, 99]]


def test_the_builtin_corpus_and_a_folder_of_files_are_raw_files_too(cache, tmp_path, raw, word_tokenizer):
    (builtin,) = prepare_tokens(["builtin"], "builtin", text_key="another")
    assert read_index(builtin).tokens == 341_501 + 549
    assert stored(prepare_tokens([str(raw.parent)], str(word_tokenizer(100)))[0]) == [[1, 2, 99], [3, 99]]


def test_raw_files_need_a_tokenizer(cache, raw):
    with pytest.raises(FemtoError, match="tokenizer: needed"):
        prepare_tokens([str(raw)], None)


def test_a_bad_raw_file_leaves_nothing_in_the_cache(cache, raw, word_tokenizer):
    raw.write_text("{")
    with pytest.raises(FemtoError, match=r"raw\.jsonl:1: not JSON"):
        prepare_tokens([str(raw)], str(word_tokenizer(100)))
    assert not cache.exists()


def test_the_cache_lies_where_the_environment_says(tmp_path, monkeypatch, raw, word_tokenizer):
    monkeypatch.delenv("FEMTO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path / "xdg" / "femto" in prepare_tokens([str(raw)], str(word_tokenizer(100)))[0].parents
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tmp_path / "home/.cache/femto" in prepare_tokens([str(raw)], str(word_tokenizer(100)))[0].parents


PREPARE = """
import sys, time
from pathlib import Path
from femtolib.data import tokenize
from femtolib.data.documents import read_documents
def slowly(*arguments, **settings):
    Path(sys.argv[3]).open("a").write("made\\n")
    for document in read_documents(*arguments, **settings):
        time.sleep(0.3)
        yield document
tokenize.read_documents = slowly
print(*tokenize.prepare_tokens([sys.argv[1]], sys.argv[2]))
"""


def test_of_processes_that_need_the_same_entry_one_makes_it_and_the_others_wait(cache, tmp_path, raw, word_tokenizer):
    processes = [run_in_a_process(PREPARE, raw, word_tokenizer(100), tmp_path / "log") for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({output for output, _ in outputs}) == 1
    assert (tmp_path / "log").read_text() == "made\n"
    assert stored(Path(outputs[0][0].strip())) == [[1, 2, 99], [3, 99]]
    assert [path.name for path in (cache / "tokens").iterdir()] == [Path(outputs[0][0].strip()).name]


def test_waiting_ends_when_the_maker_is_killed(cache, tmp_path, raw, word_tokenizer):
    raw.write_text(raw.read_text() * 5)
    maker = run_in_a_process(PREPARE, raw, word_tokenizer(100), tmp_path / "log")
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    waiter = run_in_a_process(PREPARE, raw, word_tokenizer(100), tmp_path / "log")
    assert waiter.stderr.readline().startswith("waiting for another process")
    maker.kill()
    output, errors = waiter.communicate(timeout=100)
    assert waiter.returncode == 0, errors
    assert len(stored(Path(output.strip()))) == 10


# transformers#43140: a cache file that is unpickled runs code
@pytest.mark.parametrize("name", ["tokens-00000.safetensors", "index.json"])
def test_a_damaged_cache_entry_is_made_again(cache, raw, word_tokenizer, name):
    (directory,) = prepare_tokens([str(raw)], str(word_tokenizer(100)))
    whole = (directory / name).read_bytes()
    for damage in (lambda: (directory / name).write_bytes(b"\x80\x04canary"), (directory / name).unlink):
        damage()
        assert prepare_tokens([str(raw)], str(word_tokenizer(100))) == [directory]
        assert (directory / name).read_bytes() == whole


# ── Size ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path):
    code = """
import sys
from pathlib import Path
from femtolib.data.documents import Document
from femtolib.data.tokenize import tokenize_documents
from femtolib.data.tokenizer import load_tokenizer
text = "The quick brown fox jumps over the lazy dog and runs. " * 40
copies = (Document("x", text) for _ in range(int(sys.argv[2])))
tokenize_documents(copies, load_tokenizer("builtin"), Path(sys.argv[1]), sources=[], shard_tokens=100_000)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
    processes = [run_in_a_process(code, tmp_path / str(count), count) for count in (500, 5000)]
    peaks = [int(process.communicate(timeout=300)[0]) / 1000 for process in processes]  # MB
    assert peaks[1] < peaks[0] + 30 and peaks[1] < 400, peaks  # the text grows by 10 MB, all its encodings by 400


@pytest.mark.slow
def test_one_line_of_30_megabytes_becomes_one_document(tmp_path, word_tokenizer):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": ("w1234" + " " * 25) * 1_000_000}))
    tokenizer = load_tokenizer(word_tokenizer(2000))
    index = tokenize_documents(read_documents([path]), tokenizer, tmp_path / "t", sources=[], shard_tokens=1000)[""]
    assert index.documents == 1 and len(index.shards) == 1 and index.tokens == 1_000_001
