"""A Hugging Face tokenizer.json as femto uses it: a document becomes its ids with exactly one end token (EOS) after
them, and in front only what the tokenizer's own post-processor puts there. The text of a special token inside a
document is text, never a control id. What would lose or blur text (truncation, padding, BPE dropout, all of which a
tokenizer.json may carry) is switched off, with a notice. Chat templates are neither read nor rendered here."""

import hashlib
import json
import shutil
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from femtolib.data import builtin
from femtolib.data.token_files import is_token_directory, read_index
from femtolib.errors import FemtoError

# What makes up a tokenizer in a Hugging Face directory. config.json and generation_config.json belong to a model.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def load_tokenizer(source: str | Path, eos_token: str | None = None) -> "Tokenizer":
    """Loads `builtin`, a Hugging Face directory, a token directory or a lone tokenizer.json.

    The end token is the one that tokenizer_config.json names, else generation_config.json or config.json, else
    `eos_token`. Raises FemtoError where there is none, where `eos_token` contradicts the files, and for a file that
    is missing or cannot be read.
    """
    path = builtin.TOKENIZER if str(source) == "builtin" else Path(source)
    directory = path.parent if path.name == "tokenizer.json" else path
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise FemtoError(
                f"tokenizer: {directory} has no tokenizer.json; for an older tokenizer transformers writes one: "
                f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
            )
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise FemtoError(
            f"tokenizer: {source}: {error.strerror} (wanted: a Hugging Face directory, a tokenizer.json, or builtin)"
        ) from None
    except Exception as error:  # whatever the Rust parser has to say comes as a plain Exception
        raise FemtoError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None
    _keep_text_whole(backend, path)
    files = [directory / name for name in FILES if (directory / name).is_file()] if directory.is_dir() else [path]
    return Tokenizer(backend, path, files, _eos_id(backend, directory, path, eos_token))


class Tokenizer:
    """A loaded tokenizer and what the data path must know of it; made by `load_tokenizer`.

    prefix: ids in front of every document (the post-processor's), suffix: ids behind it, the EOS last.
    bos_id: the first id of the prefix, or None where documents begin without one.
    largest_id: the largest id it can produce, added tokens included. digest: SHA-256 of what decides the ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, path: Path, files: list[Path], eos_id: int):
        # Read from the file, not asked of the library: the digest must outlive the library's versions.
        specification = json.loads(path.read_bytes()) | {"truncation": None, "padding": None}
        specification["model"] |= {"dropout": None}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        before, after = _affixes(backend, vocabulary, path)
        self.backend = backend
        self.path = path
        self.files = files
        self.eos_id = eos_id
        self.prefix = list(dict.fromkeys(before))  # a template that doubles its BOS gives one
        self.suffix = [token_id for token_id in after if token_id != eos_id] + [eos_id]
        self.bos_id = self.prefix[0] if self.prefix else None
        self.vocab_size = len(vocabulary)
        self.largest_id = max(*vocabulary.values(), *self.prefix, *self.suffix)
        self.dtype = "uint16" if self.largest_id < 2**16 else "uint32"
        self.digest = hashlib.sha256(json.dumps(specification, sort_keys=True).encode()).hexdigest()
        # The unknown token is a control token that stands for text, so text may produce it.
        unknown = _unknown_id(specification["model"], vocabulary)
        special = {token["id"] for token in specification.get("added_tokens", []) if token["special"]} - {unknown}
        self._control = np.zeros(self.largest_id + 1, bool)
        self._control[[*special, *self.prefix, *self.suffix]] = True

    def encode_documents(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all documents, one after the other, and where each ends: [tokens] `dtype`, [documents] int64.

        Runs in Rust, outside the GIL, but for handing over the ids.
        """
        ids, ends = array("I"), array("q")
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            ids.fromlist(self.prefix)
            ids.fromlist(encoding.ids)  # the fastest way to get at them: 20 ns a token; numpy takes 30
            ids.fromlist(self.suffix)
            ends.append(len(ids))
        return np.array(ids, self.dtype), np.array(ends)

    def control_tokens_in(self, ids: np.ndarray, ends: np.ndarray) -> dict[int, str]:
        """The documents whose own text was read as a control token, and which.

        `encode_special_tokens` prevents it for tokens found by a search in the text; but a model whose own vocabulary
        holds the token (WordLevel, Unigram) may still spell the text so.
        """
        starts = np.append(0, ends[:-1])
        added = len(self.prefix) + len(self.suffix)
        counts = np.add.reduceat(self._control[ids], starts, dtype=np.int64)
        found = {}
        for number in np.flatnonzero(counts > added).tolist():
            body = ids[starts[number] + len(self.prefix) : ends[number] - len(self.suffix)]
            found[number] = self.backend.id_to_token(int(body[self._control[body]][0]))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens shown."""
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=False)

    def copy_files(self, directory: Path) -> None:
        """Copies the tokenizer's files, as they are, so that `load_tokenizer(directory)` gives the same tokenizer."""
        for file in self.files:
            shutil.copyfile(file, directory / ("tokenizer.json" if file == self.path else file.name))


def _keep_text_whole(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Switches off what a tokenizer.json may carry and what would cut text, pad it, or make a control id of it."""
    if backend.truncation:
        print(f"note: {path}: truncation to {backend.truncation['max_length']} tokens switched off", file=sys.stderr)
        backend.no_truncation()
    if backend.padding:
        print(f"note: {path}: padding switched off", file=sys.stderr)
        backend.no_padding()
    if getattr(backend.model, "dropout", None):
        print(f"note: {path}: BPE dropout {backend.model.dropout:g} switched off", file=sys.stderr)
        backend.model.dropout = None
    backend.encode_special_tokens = True


def _affixes(backend: tokenizers.Tokenizer, vocabulary: dict[str, int], path: Path) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts in front of a text and behind it."""
    for probe in ("a", *vocabulary):  # any text that has an id of its own
        encoding = backend.encode(probe)
        added = encoding.special_tokens_mask
        if 0 in added:
            return encoding.ids[: added.index(0)], encoding.ids[len(added) - added[::-1].index(0) :]
    raise FemtoError(f"tokenizer: {path} finds no token in any text, not even in its own vocabulary")


def _unknown_id(model: dict, vocabulary: dict[str, int]) -> int | None:
    return model["unk_id"] if "unk_id" in model else vocabulary.get(model.get("unk_token"))


def _eos_id(backend: tokenizers.Tokenizer, directory: Path, path: Path, eos_token: str | None) -> int:
    wanted = None if eos_token is None else backend.token_to_id(eos_token)
    if eos_token is not None and wanted is None:
        raise FemtoError(f"eos_token: {eos_token!r} is no token of {path}")
    eos_id, origin = _recorded_eos(backend, directory)
    if eos_id is None and wanted is None:
        raise FemtoError(
            f"tokenizer: {directory} does not say which token ends a document (tokenizer_config.json, "
            'generation_config.json, config.json): add "eos_token" to its tokenizer_config.json, or '
            "preprocess the data with the key eos_token"
        )
    if eos_id is not None and wanted is not None and eos_id != wanted:
        raise FemtoError(
            f"eos_token: {eos_token!r} (id {wanted}), but {origin} says {backend.id_to_token(eos_id)!r} (id {eos_id}): "
            "leave eos_token out, or change that file"
        )
    return wanted if eos_id is None else eos_id


def _recorded_eos(backend: tokenizers.Tokenizer, directory: Path) -> tuple[int | None, Path | None]:
    """The id of the end token that the files name, and the file that does."""
    if is_token_directory(directory):
        return read_index(directory).eos_id, directory / "index.json"
    path = directory / "tokenizer_config.json"
    token = _read_json(path).get("eos_token")
    if token is not None:
        token = token["content"] if isinstance(token, dict) and "content" in token else token
        if not isinstance(token, str) or backend.token_to_id(token) is None:
            raise FemtoError(f"{path}: eos_token: {token!r} is no token of {directory / 'tokenizer.json'}")
        return backend.token_to_id(token), path
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos_id = _read_json(path).get("eos_token_id")
        if isinstance(eos_id, list) and eos_id:  # several ways to end an answer; the first is the one that pads
            eos_id = eos_id[0]
        if eos_id is not None:
            if type(eos_id) is not int or backend.id_to_token(eos_id) is None:
                raise FemtoError(f"{path}: eos_token_id: {eos_id!r} is no id of {directory / 'tokenizer.json'}")
            return eos_id, path
    return None, None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise FemtoError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FemtoError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise FemtoError(f"{path}: not a JSON object")
    return content
