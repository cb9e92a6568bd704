"""Fetch a model from the Hugging Face hub into a folder that recipes can name.

What femto reads is fetched: safetensors, tokenizer, configs, model card and license. Other weight formats are left
out; --ignore-patterns sets another list, and --ignore-patterns with nothing behind it fetches everything. A download
that was cut short is continued by the same command. For a private or gated repository set HF_TOKEN, or log in with
`hf auth login`; HF_ENDPOINT names another hub.
"""

import errno
import glob
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

from femto.parser import Parser
from femtolib.errors import FemtoError, RunFailed

# Weights in other formats, and second copies of the weights for other programs (`consolidated*` is Mistral's own).
NOT_READ = [
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.npz", "*.gguf", "*.ggml", "*.h5",
    "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.nemo", "*.onnx", "*.onnx_data",
    "original/*", "metal/*", "onnx/*", "openvino/*", "coreml/*", "consolidated*.safetensors",
]  # fmt: skip

Sizes = dict[str, int | None]  # file name → bytes, where the hub says how many


def main(argv: list[str]) -> int:
    parser = Parser("femto download", __doc__)
    parser.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME on the hub")
    parser.add_argument("--output-dir", metavar="D", type=Path, help="folder of the files (default: NAME, here)")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")
    parser.add_argument(
        "--ignore-patterns", metavar="P", nargs="*", default=NOT_READ,
        help=f"leave out files that match, * being any text (default: {' '.join(NOT_READ)})",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    output = arguments.output_dir or Path(arguments.repo_id.rpartition("/")[2])
    try:
        sizes, left_out = _download(arguments.repo_id, arguments.revision, output, arguments.ignore_patterns)
    except FemtoError:
        raise
    except Exception as error:  # whatever the network brings; a traceback could show the request and its token
        raise _explained(error, arguments.repo_id, arguments.revision, output) from None

    print(f"{arguments.repo_id}: {len(sizes)} files, {_gigabytes(_total(sizes.values()))}, are in {output}")
    if left_out:
        print(f"left out, as femto does not read them: {', '.join(left_out[:5])}{' …' if len(left_out) > 5 else ''}")
    if not any(name.endswith(".safetensors") for name in sizes):
        print("there are no weights among them: femto reads *.safetensors only")
    print(f"to train on from it, say in a config:\n    model: {{path: {output}}}\n    tokenizer: {output}")
    return 0


def _download(repo_id: str, revision: str | None, output: Path, ignore: list[str]) -> tuple[Sizes, list[str]]:
    """Fetch all but what `ignore` matches; returns the files fetched, and the names of those left out."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects, logging

    logging.set_verbosity_error()  # its warnings are several lines long and hold signed addresses
    # Listed here first: snapshot_download calls a folder that holds anything a success when the hub is out of reach.
    listing = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    if listing.gated:  # anyone may list such a repository
        HfApi().auth_check(repo_id)
    sizes = {file.rfilename: file.size for file in listing.siblings or []}
    for name in sizes:
        if not _is_plain(name):
            raise RunFailed(f"{repo_id} lists a file {name!r}, which is no plain relative path; nothing was fetched")
    wanted = {name: sizes[name] for name in filter_repo_objects(sizes, ignore_patterns=ignore or None)}
    if not wanted:
        raise FemtoError(f"{repo_id} has no file that --ignore-patterns leaves: it holds {', '.join(sizes) or 'none'}")
    _refuse_foreign_files(output, sizes)
    _refuse_too_little_space(output, wanted)

    # By exact names and commit, so that what was checked above is what is fetched.
    exact = [glob.escape(name) for name in wanted]
    signal.signal(signal.SIGINT, lambda *_: _abandon(output))
    snapshot_download(repo_id, revision=listing.sha, local_dir=output, allow_patterns=exact)
    for name, size in wanted.items():
        found = (output / name).stat().st_size
        if size is not None and found != size:
            raise RunFailed(f"{output / name} has {found} bytes, not {size}; delete it and run the same command again")
    return wanted, [name for name in sizes if name not in wanted]


def _abandon(output: Path) -> None:
    """End the process at Ctrl-C, exit code 1; half-fetched files, which the client would never continue, are removed.

    An exception would wait for the client's threads until their files are complete, and while those threads live they
    begin new ones; execv ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remove = "import pathlib, sys; [f.unlink() for f in pathlib.Path(sys.argv[1]).rglob('*.incomplete')]; sys.exit(1)"
    os.execv(sys.executable, [sys.executable, "-I", "-c", remove, str(output / ".cache" / "huggingface")])


def _is_plain(name: str) -> bool:
    """Whether a file name from the hub stays inside the folder, on this system and on others, and can be printed."""
    windows = PureWindowsPath(name)  # it parts names at / and at \
    return bool(windows.parts) and not (windows.drive or windows.root or ".." in windows.parts) and name.isprintable()


def _refuse_foreign_files(output: Path, names: Sizes) -> None:
    """FemtoError if `output` holds a file that is not from an earlier download of these `names`.

    It could be overwritten, or, left from another model, be read as a part of this one.
    """
    record = output / ".cache" / "huggingface"
    for path in output.rglob("*"):
        name = path.relative_to(output).as_posix()
        if path.is_dir() or record in path.parents:
            continue
        if name not in names or not (record / "download" / f"{name}.metadata").exists():
            raise FemtoError(f"{path} is not from this download; choose an empty --output-dir, or move it away")


def _refuse_too_little_space(output: Path, wanted: Sizes) -> None:
    missing = _total(size for name, size in wanted.items() if not (output / name).exists())
    folder = next(folder for folder in [output.absolute(), *output.absolute().parents] if folder.exists())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise FemtoError(f"{_gigabytes(missing)} are to be fetched and {folder} has {_gigabytes(free)} free")


def _explained(error: Exception, repo_id: str, revision: str | None, output: Path) -> FemtoError:
    """What a user is told about an exception of the hub's client, with what to do; never with a token."""
    from huggingface_hub import constants, errors, get_token

    hub, token = constants.ENDPOINT, get_token()
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    log_in = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.HFValidationError):
        return FemtoError(f"{repo_id!r} is not the name of a repository; write OWNER/NAME")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        then = "with the account of your token" if token else f"then {log_in}"
        return FemtoError(f"{repo_id} is gated: ask for access at {hub}/{repo_id} {then}")
    if isinstance(error, errors.RevisionNotFoundError):
        return FemtoError(f"{repo_id} has no revision {revision!r}; its branches and tags stand at {hub}/{repo_id}")
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "your token may not see it" if token else f"for a private one {log_in}"
        return FemtoError(f"{hub} has no model {repo_id}; check the name ({private})")
    if status == 401:
        return FemtoError(f"{hub} does not accept your token; {log_in} with a new one")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return FemtoError("HF_HUB_OFFLINE is set, so nothing can be fetched; unset it")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(f"{output}: {os.strerror(error.errno)}; make room and run the same command again")
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
        return FemtoError(f"{error.filename or output}: {os.strerror(error.errno)}; choose another --output-dir")
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if token:
        reason = reason.replace(token, "***")
    return RunFailed(
        f"{repo_id} could not be fetched from {hub}: {reason}; check the network and run the same command again"
    )


def _total(sizes: Iterable[int | None]) -> int:
    return sum(size or 0 for size in sizes)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
