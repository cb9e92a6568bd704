"""`femto download` against a server on this machine that speaks the routes of a hub that a snapshot needs. Each command
line runs in a process of its own, as a person's would, so all that it shows is what is judged."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

FEMTO = str(Path(sys.executable).with_name("femto"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_aVerySecretTokenOfThisTest"
MODEL = {
    "README.md": b"# a model",
    "LICENSE": b"free",
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"weights again",
    "original/consolidated.00.pth": b"and again",
    "consolidated.safetensors": b"and again",
    "onnx/model.onnx": b"and again",
}
READ = ["LICENSE", "README.md", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]


class Hub(ThreadingHTTPServer):
    """A hub with one model, `who/model`; the attributes make it misbehave."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(MODEL)
        self.gated: bool | str = False
        self.tokens: set[str] = set()  # the Authorization headers that came
        self.cuts: dict[str, list[int]] = {}  # file → after how many bytes each coming answer breaks off
        self.sizes: dict[str, int] = {}  # file → a size that is not true
        self.stalls = False  # files never end

    def handle_error(self, *_) -> None:
        """A client that went away in the middle of an answer is part of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if token := self.headers.get("Authorization"):
            self.server.tokens.add(token)
        if self.server.gated and f"Bearer {TOKEN}" != token and ("/resolve/" in path or "auth-check" in path):
            return self._refuse(403 if token else 401, "GatedRepo", "Access is restricted")
        if token and token != f"Bearer {TOKEN}":
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        sizes = {name: self.server.sizes.get(name, len(content)) for name, content in self.server.files.items()}
        if path in ("/api/models/who/model", f"/api/models/who/model/revision/{COMMIT}"):
            siblings = [{"rfilename": name, "size": size, "blobId": "0"} for name, size in sizes.items()]
            return self._json({"id": "who/model", "sha": COMMIT, "siblings": siblings, "gated": self.server.gated})
        if path == f"/api/models/who/model/tree/{COMMIT}":
            return self._json(
                [{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in sizes.items()]
            )
        if path == "/api/models/who/model/auth-check":
            return self._json({})
        if path == "/api/models/who/broken":
            return self._refuse(500, None, f"out of order, {token}")
        name = path.removeprefix(f"/who/model/resolve/{COMMIT}/")
        if name in self.server.files:
            return self._file(name)
        if path.startswith("/api/models/who/model/"):
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {path}")
        return self._refuse(404, "RepoNotFound", f"Repository not found {token}")

    do_HEAD = do_GET

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, name: str) -> None:
        content = self.server.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.server.cuts.get(name)
        cut = cuts.pop(0) if cuts else len(content)
        if self.server.stalls:
            cut = 1
        self.wfile.write(content[start : start + cut])
        while self.server.stalls:
            time.sleep(0.1)
        if cut < len(content) - start:
            self.close_connection = True

    def log_message(self, *_) -> None:
        """Silent: the test's own output stays readable."""


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.stalls = False
        server.shutdown()


@pytest.fixture
def environment(hub, tmp_path, monkeypatch) -> Callable[..., dict[str, str]]:
    """The environment of a person who uses this hub; no settings of the machine's own reach the test."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return lambda **more: {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **more}


@pytest.fixture
def download(environment, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`download("who/model", …, HF_TOKEN=…)`: the command, run in tmp_path/here; a token is never on the screen."""
    here = tmp_path / "here"
    here.mkdir()

    def download(*arguments: str, **settings: str) -> subprocess.CompletedProcess:
        command = [FEMTO, "download", *arguments]
        ended = subprocess.run(
            command, env=environment(**settings), cwd=here, capture_output=True, text=True, timeout=100
        )
        assert TOKEN not in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        return ended

    return download


def fetched(folder: Path) -> list[str]:
    """The files of a folder, less the client's own record of the download."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.startswith(".cache/"))


def only_error(ended: subprocess.CompletedProcess) -> str:
    """The one `error:` line of a command that printed nothing else after it."""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and ended.stderr.rstrip().endswith(lines[0]), ended.stderr
    return lines[0]


def test_a_model_lands_in_a_folder_of_its_name_without_the_formats_femto_does_not_read(download, tmp_path):
    ended = download("who/model")
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "here" / "model"
    assert fetched(folder) == READ
    assert all((folder / name).read_bytes() == MODEL[name] for name in READ)
    assert "6 files" in ended.stdout and "pytorch_model.bin" in ended.stdout
    assert "model: {path: model}" in ended.stdout
    assert "100%" in ended.stderr  # progress


def test_ignore_patterns_replace_the_list_of_what_is_left_out(download, tmp_path):
    assert download("who/model", "--ignore-patterns", "*.safetensors", "*.md", "o*").returncode == 0
    expected = ["LICENSE", "config.json", "merges.txt", "pytorch_model.bin", "tokenizer.json"]
    assert fetched(tmp_path / "here" / "model") == expected
    assert download("who/model", "--output-dir", "all", "--ignore-patterns").returncode == 0
    assert fetched(tmp_path / "here" / "all") == sorted(MODEL)


def test_a_token_is_sent_and_never_shown(download, hub):
    assert download("who/model", HF_TOKEN=TOKEN).returncode == 0
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert download("who/else", HF_TOKEN=TOKEN).returncode == 2  # this answer and the next one quote the token
    ended = download("who/broken", HF_TOKEN=TOKEN)
    assert ended.returncode == 1 and "out of order, Bearer ***" in only_error(ended)


def test_a_gated_repository_says_where_to_ask(download, hub, tmp_path):
    hub.gated = "manual"
    ended = download("who/model")
    assert ended.returncode == 2
    assert f"{hub.url}/who/model" in only_error(ended) and "HF_TOKEN" in only_error(ended)
    assert not (tmp_path / "here" / "model").exists()
    assert download("who/model", HF_TOKEN=TOKEN).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "settings", "wanted"),
    [
        (["who/else"], {}, "has no model who/else; check the name"),
        (["who/model", "--revision", "v2"], {}, "who/model has no revision 'v2'"),
        (["http://hub/who/model"], {}, "write OWNER/NAME"),
        (["who/model"], {"HF_TOKEN": "hf_old"}, "does not accept your token"),
        (["who/model"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (["who/model", "--ignore-patterns", "*"], {}, "no file that --ignore-patterns leaves"),
        (["who/model", "--output-dir", "/dev/null"], {}, "choose another --output-dir"),
        (["who/model", "--rev", "v2"], {}, "unrecognized arguments: --rev"),
    ],
)
def test_a_wrong_request_is_one_line_with_the_remedy(download, tmp_path, arguments, settings, wanted):
    ended = download(*arguments, **settings)
    assert ended.returncode == 2
    assert wanted in only_error(ended)
    assert not any((tmp_path / "here").iterdir())


def test_a_hub_out_of_reach_is_one_line_also_where_an_earlier_download_lies(download, hub, tmp_path):
    download("who/model")
    (tmp_path / "here" / "model" / "model.safetensors").unlink()
    ended = download("who/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.returncode == 1
    assert "could not be fetched from http://127.0.0.1:9" in only_error(ended)


@pytest.mark.slow
def test_a_broken_connection_is_taken_up_again(download, hub, tmp_path):
    hub.cuts["model.safetensors"] = [1000, 50_000]
    assert download("who/model").returncode == 0
    assert (tmp_path / "here" / "model" / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.slow
def test_a_download_cut_short_publishes_no_half_file_and_goes_on_later(download, hub, tmp_path):
    hub.cuts["model.safetensors"] = [1000] + [0] * 20
    ended = download("who/model")
    assert ended.returncode == 1
    assert "run the same command again" in only_error(ended)
    assert "model.safetensors" not in fetched(tmp_path / "here" / "model")
    hub.cuts.clear()
    assert download("who/model").returncode == 0
    assert fetched(tmp_path / "here" / "model") == READ


def test_a_file_of_another_size_than_the_hub_says_is_not_a_success(download, tmp_path):
    download("who/model")
    file = tmp_path / "here" / "model" / "model.safetensors"
    before = file.stat()
    file.write_bytes(b"cut")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # one that is a second newer is fetched again
    ended = download("who/model")
    assert ended.returncode == 1
    assert "model/model.safetensors has 3 bytes, not 102400" in only_error(ended)


@pytest.mark.parametrize(
    "name", ["../escaped", "a/../../escaped", "/tmp/escaped", "..\\escaped", "C:\\escaped", "", "\x1b[2J"]
)
def test_no_file_name_of_the_hub_leaves_the_folder(download, hub, tmp_path, name):
    hub.files[name] = b"hostile"
    ended = download("who/model")
    assert ended.returncode == 1
    assert repr(name) in only_error(ended) and "nothing was fetched" in only_error(ended)
    assert not any(path.is_file() for path in (tmp_path / "here").rglob("*"))


def test_more_than_the_disk_holds_is_refused_before_the_first_byte(download, hub, tmp_path):
    hub.sizes["model.safetensors"] = 10**18
    ended = download("who/model")
    assert ended.returncode == 2
    assert "1,000,000,000.00 GB are to be fetched" in only_error(ended)
    assert not any((tmp_path / "here").iterdir())


def test_files_that_are_not_from_this_download_are_neither_overwritten_nor_mixed_in(download, hub, tmp_path):
    folder = tmp_path / "here" / "notes"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    ended = download("who/model", "--output-dir", "notes")
    assert ended.returncode == 2
    assert "notes/README.md is not from this download" in only_error(ended)
    assert fetched(folder) == ["README.md"] and (folder / "README.md").read_text() == "mine"

    download("who/model", "--output-dir", "second")
    del hub.files["model.safetensors"]
    hub.files["model-00001-of-00001.safetensors"] = b"a later revision in shards"
    ended = download("who/model", "--output-dir", "second")
    assert ended.returncode == 2 and "second/model.safetensors is not from this download" in only_error(ended)


def test_ctrl_c_ends_a_download_at_once(environment, hub, tmp_path):
    hub.stalls = True
    command = [FEMTO, "download", "who/model"]
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.rglob("*.incomplete")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1 and "Traceback" not in stderr
    assert not list(tmp_path.rglob("*.incomplete"))
