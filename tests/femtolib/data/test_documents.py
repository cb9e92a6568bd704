"""Every text is read as it is, from every kind of file; everything else is told with its place."""

import gzip
import json
import subprocess
import sys

import pytest

from femtolib.data.documents import Sieve, find_files, read_dataset, read_documents
from femtolib.errors import FemtoError

TEXTS = ["first", "größer\n第二\u2028line", "ends with space ", 'quote " and \\ and \0 and 🙂']


def read(*files, **settings):
    return list(read_documents(files, **settings))


def texts(*files, **settings):
    documents = read(*files, **settings)
    assert not [document.fault for document in documents if document.fault]
    return [document.text for document in documents]


def lines(rows):
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def zstd(content):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inputs_are_files_patterns_and_folders_in_a_fixed_order(tmp_path):
    for name in ["b/2.jsonl", "b/1.txt", "b/.hidden/3.txt", "b/readme.md", "a.parquet", "c.json.gz", "d.JSONL"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_files([str(tmp_path / "d.JSONL"), str(tmp_path / "b"), str(tmp_path / "*.*t"), f"{tmp_path}/**/c.*"])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "d.JSONL",
        "b/1.txt",
        "b/2.jsonl",
        "a.parquet",
        "c.json.gz",
    ]


def test_the_builtin_corpus_has_549_documents():
    documents = read(*find_files(["builtin"]))
    assert len(documents) == 549
    assert not any(document.fault or not document.text.strip() for document in documents)


def test_an_existing_file_with_pattern_letters_in_its_name_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").touch()
    (tmp_path / "a1.txt").touch()
    assert find_files([str(tmp_path / "a[1].txt")]) == [tmp_path / "a[1].txt"]


def test_all_inputs_that_name_nothing_readable_are_told_at_once(tmp_path):
    for name in ["list.json", "notes.md", "empty/readme.md", "twice.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "same.txt").symlink_to(tmp_path / "twice.txt")
    names = ["list.json", "notes.md", "empty", "twice.txt", "same.txt", "missing.txt", "*.zip"]
    with pytest.raises(FemtoError) as error:
        find_files([str(tmp_path / name) for name in names])
    reasons = ["name it .jsonl", "not one of", "no file below", "no such file", "no such file", "named twice"]
    assert len(error.value.faults) == len(reasons)
    assert all(reason in fault for reason, fault in zip(reasons, sorted_by(error.value.faults, reasons), strict=True))


def sorted_by(faults, reasons):
    return sorted(faults, key=lambda fault: next(i for i, reason in enumerate(reasons) if reason in fault))


# ── Every kind of file ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.jsonl", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.json.gz", gzip.compress),
        ("a.jsonl.zst", zstd),
        ("a.json.zst", zstd),
        ("A.JSONL.GZ", gzip.compress),
    ],
)
def test_json_lines_are_read_whole_and_placed_by_line(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress(lines({"id": i, "text": text} for i, text in enumerate(TEXTS))))
    assert texts(path) == TEXTS
    assert [document.where for document in read(path)] == [f"{path}:{line}" for line in (1, 2, 3, 4)]


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path, compress):
    path = tmp_path / ("a.jsonl.gz" if compress is gzip.compress else "a.jsonl.zst")
    path.write_bytes(b"".join(compress(lines([{"text": text}])) for text in TEXTS) + compress(b""))
    assert texts(path) == TEXTS


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_cut_or_damaged_compressed_file_is_named(tmp_path, compress):
    path = tmp_path / ("a.txt.gz" if compress is gzip.compress else "a.txt.zst")
    content = compress("".join(f"line {i * i}\n" for i in range(10_000)).encode())
    for broken in (
        content[:-3],
        content + content[:20],
        content[: len(content) // 2],
        b"no archive",
        content + b"more!",
    ):
        path.write_bytes(broken)
        with pytest.raises(FemtoError, match=path.name):
            read(path)


def test_the_text_of_a_txt_file_is_its_lines_or_the_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\nthree \u2028 still\rthree\nlast", encoding="utf-8")
    assert texts(path) == ["one", "", "three \u2028 still\rthree", "last"]
    assert [document.where for document in read(path)] == [f"{path}:{line}" for line in (1, 2, 3, 4)]
    assert texts(path, text_documents="file") == ["one\n\nthree \u2028 still\rthree\nlast"]


# visidata#908, langchain-community#138: a byte order mark in the first row, CR at the end of each
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_byte_order_mark_and_crlf_are_not_text_and_the_last_line_needs_no_end(tmp_path, kind):
    rows = [b'{"text": "a"}', b'{"text": "b"}'] if kind == "jsonl" else [b"a", b"b"]
    path = tmp_path / f"x.{kind}"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    assert texts(path) == ["a", "b"]
    if kind == "txt":
        assert texts(path, text_documents="file") == ["a\nb"]


def test_a_line_of_30_megabytes_is_read_whole(tmp_path):
    path = tmp_path / "long.jsonl"
    text = "word " * 6_000_000
    path.write_bytes(lines([{"text": "short"}, {"text": text}, {"text": "after"}]))
    assert texts(path) == ["short", text, "after"]


def test_reading_does_not_depend_on_the_locale(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("größe 東京\n".encode())
    code = (
        "import sys, pathlib; from femtolib.data.documents import read_documents;"
        "sys.stdout.buffer.write(next(read_documents([pathlib.Path(sys.argv[1])])).text.encode())"
    )
    for locale in ("C", "C.UTF-8"):
        environment = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": ""}
        ran = subprocess.run([sys.executable, "-c", code, path], env=environment, stdout=subprocess.PIPE, check=True)
        assert ran.stdout.decode() == "größe 東京"


# ── Bad documents ─────────────────────────────────────────────────────────────────────────────────────────────────────


# datasets#6460, datasets#2573: one bad line ends the load without a place, or the rest of the file is dropped
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "x"', "not JSON: Expecting ',' delimiter at column 13"),
        (b"5", "5 (int), not an object"),
        (b"null", "None (NoneType), not an object"),
        (b'["text"]', "not an object"),
        (b'{"text": 5}', "the text is 5 (int), not a string"),
        (b'{"text": ["a"]}', "not a string"),
        (b"{}", "no key 'text' (keys: none)"),
        (b'{"body": "a", "id": 1}', "no key 'text' (keys: 'body', 'id')"),
        (b'{"text": "\\ud800"}', "half a surrogate pair (\\ud800)"),
        (b'{"text": "it\x92s"}', "not UTF-8 (byte 0x92)"),
        (b'{"text": "a\0b"}', "not JSON: Invalid control character"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"text": ' + b"[" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_bad_line_is_a_fault_with_its_place_and_the_next_is_read(tmp_path, line, fault):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = read(path)
    assert (before.text, after.text) == ("before", "after")
    assert bad.fault.startswith(f"{path}:3: ") and fault in bad.fault
    assert len(bad.fault) < len(str(path)) + 200


def test_a_surrogate_pair_is_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\\ud83d\\ude42"}')
    assert texts(path) == ["🙂"]


def test_a_json_array_in_a_jsonl_file_is_recognised(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('[\n  {"text": "a"},\n  {"text": "b"}\n]\n')
    assert "a JSON array? Wanted: one object a line" in read(path)[0].fault


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf_16_is_never_read_as_text(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes('{"text": "hello"}\n'.encode(encoding))
    first = read(path)[0]
    assert first.fault.startswith(f"{path}:1: ")
    if name == "a.txt":
        assert "UTF-16" in first.fault


def test_a_bad_byte_is_placed_by_its_line_also_where_a_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nit\x92s\nmore\n")
    assert [document.fault for document in read(path)] == ["", f"{path}:2: not UTF-8 (byte 0x92)", ""]
    assert read(path, text_documents="file")[0].fault == f"{path}:2: not UTF-8 (byte 0x92)"
    assert not any("\ufffd" in document.text for document in read(path))


def test_null_empty_and_blank_texts_are_counted_apart_from_bad_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": None}, {"text": ""}, {"text": " \t\n\u3000"}, {"text": 5}, {"text": "b"}]))
    sieve = Sieve("skip")
    assert [document.text for document in sieve.readable(read_documents([path]))] == ["b"]
    assert (sieve.kept, sieve.empty, sieve.bad) == (1, 3, 1)
    with pytest.raises(FemtoError, match=r"a\.jsonl:4: the text is 5 .*on_bad_document=skip"):
        list(Sieve("stop").readable(read_documents([path])))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FemtoError, match=r"gone\.jsonl: cannot be read: No such file"):
        read(tmp_path / "gone.jsonl")


# ── Parquet and data sets ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def write_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def write(values, kind="string", name="a.parquet", **settings):
        column = pyarrow.array(values, getattr(pyarrow, kind)() if isinstance(kind, str) else kind)
        table = pyarrow.table({"id": list(range(len(values))), "text": column})
        parquet.write_table(table, tmp_path / name, **settings)
        return tmp_path / name

    return write


# litgpt#1759, axolotl#290: null texts crash, or are trained as the word None
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
@pytest.mark.parametrize("row_group_size", [1, 3, 1000])
def test_parquet_columns_of_every_string_type_are_read_by_row_groups(write_parquet, kind, row_group_size):
    pyarrow = pytest.importorskip("pyarrow")
    values = ["", None, "b", "   ", *TEXTS, "b"]
    kind = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) if kind == "dictionary" else kind
    path = write_parquet(values, kind, row_group_size=row_group_size)
    assert texts(path) == [value or "" for value in values]
    assert [document.where for document in read(path)] == [f"{path}:{row}" for row in range(1, len(values) + 1)]
    sieve = Sieve("stop")
    assert [document.text for document in sieve.readable(read_documents([path]))] == ["b", *TEXTS, "b"]
    assert sieve.empty == 3


def test_a_parquet_value_that_is_no_text_is_a_fault_with_its_row(write_parquet):
    assert read(write_parquet([1, 2], "int64"))[1].fault.endswith("a.parquet:2: the text is 2 (int), not a string")
    pyarrow = pytest.importorskip("pyarrow")
    broken = pyarrow.array([b"good", b"it\x92s", b"also"]).view(pyarrow.string())
    first, bad, last = read(write_parquet(broken, "string"))
    assert (first.text, last.text) == ("good", "also")
    assert bad.fault.endswith("a.parquet:2: not UTF-8 (byte 0x92)")


def test_a_missing_column_and_a_damaged_file_are_named(write_parquet):
    path = write_parquet(["a"] * 1000)
    with pytest.raises(FemtoError, match=r"a\.parquet: no column 'body' \(columns: 'id', 'text'\)"):
        read(path, text_key="body")
    content = path.read_bytes()
    for broken in (content[:-8], b"", content[: len(content) // 2], b"PAR1" + b"\xff" * 500 + b"PAR1"):
        path.write_bytes(broken)
        with pytest.raises(FemtoError, match=r"a\.parquet: damaged"):
            read(path)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst"), ("datasets", None)]
)
def test_a_reader_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FemtoError, match=rf"needs {package}: pip install 'femto\[data\]'"):
        if name:
            (tmp_path / name).touch()
            read(tmp_path / name)
        else:
            list(read_dataset("somewhere"))


@pytest.mark.slow
def test_a_hugging_face_data_set_is_streamed(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines({"text": text} for text in [*TEXTS, None]))
    (folder / "test.jsonl").write_bytes(lines([{"text": "a"}]))
    documents = list(read_dataset(str(folder)))
    assert [document.text for document in documents] == [*TEXTS, ""]
    assert documents[1].where == f"{folder}[train]:2"
    assert [document.text for document in read_dataset(str(folder), split="test")] == ["a"]
    for arguments, fault in [
        ({"split": "nope"}, "nope"),
        ({"text_key": "body"}, "no column 'body'"),
        ({"name": "other"}, "other"),
    ]:
        with pytest.raises(FemtoError, match=fault):
            list(read_dataset(str(folder), **arguments))
