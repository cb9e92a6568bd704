"""Turn documents into token directories, once, so that training reads ids and needs neither text nor tokenizer.

    femto run preprocess --config configs/preprocess.yaml [key=value …]

Reads .jsonl, .parquet and .txt files, compressed ones too, or a Hugging Face data set. Each document is encoded by
itself and ends in exactly one EOS. seq_len is chosen later: rows are cut when the tokens are loaded for training.

To make it your own: `femto cp preprocess mine.py`, edit, `femto run ./mine.py --config …`. What people edit first is
which documents are taken and what becomes of their text (section 2).
"""

import shlex
import sys
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from femtolib import sections
from femtolib.command import run_recipe
from femtolib.config import BuiltinOrPath, ConfigModel, InputPatterns, PositiveInteger
from femtolib.data.documents import find_files, read_dataset, read_documents
from femtolib.data.tokenize import SHARD_TOKENS, tokenize_documents
from femtolib.data.tokenizer import load_tokenizer

LAUNCH = "single"


class DatasetSection(ConfigModel):
    path: str = Field(min_length=1, description="instead of input: a data set of the hub, or a folder that holds one")
    name: str | None = Field(None, description="which of its configurations")
    split: str = Field("train", min_length=1, description="which of its splits")


class Config(ConfigModel):
    output_dir: sections.OutputDir
    input: InputPatterns | None = Field(None, description="files, patterns, folders of .jsonl, .parquet, .txt; builtin")
    dataset: DatasetSection | None = Field(None, validate_default=True)
    text_key: str = Field("text", min_length=1, description=".jsonl, .parquet, dataset: the key that holds the text")
    text_documents: Literal["line", "file"] = Field("line", description=".txt: what one document is")
    tokenizer: BuiltinOrPath = Field(description="HF directory, tokenizer.json or builtin")
    eos_token: str | None = Field(None, description="what ends a document, where the tokenizer's files do not say")
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="part of the documents, by a hash of the text, that goes to output_dir/validation"
    )
    shard_tokens: PositiveInteger = Field(SHARD_TOKENS, description="most tokens in a file; one file is held in memory")
    workers: Annotated[PositiveInteger, Field(le=256)] | None = Field(
        None, description="threads that encode (null: one a CPU)"
    )
    on_bad_document: Literal["stop", "skip"] = Field("stop", description="what a broken document does")

    @field_validator("dataset")
    @classmethod
    def _one_source(cls, value: DatasetSection | None, info: ValidationInfo) -> DatasetSection | None:
        if "input" in info.data and (value is None) == (info.data["input"] is None):
            raise ValueError("set exactly one of input and dataset")
        return value


def main(config: Config) -> None:
    # ── 1 Tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────
    # First, because it says in a second whether it has an end token. Without one, documents would run into each other.
    tokenizer = load_tokenizer(config.tokenizer, config.eos_token)

    # ── 2 Documents ───────────────────────────────────────────────────────────────────────────────────────────────────
    # An iterator: no more than a few batches of documents are in memory, whatever the size of the input.
    if config.dataset is None:
        files = find_files(config.input)
        sources = list(map(str, files))
        documents = read_documents(files, text_key=config.text_key, text_documents=config.text_documents)
    else:
        dataset = config.dataset
        sources = [f"{dataset.path} {dataset.name or ''}[{dataset.split}]"]
        documents = read_dataset(dataset.path, dataset.name, dataset.split, text_key=config.text_key)

    # ── 3 Tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────
    # Written in the order of the documents, so the bytes depend on neither `workers` nor the machine. output_dir
    # appears when it is complete, and not before.
    indexes = tokenize_documents(
        documents,
        tokenizer,
        config.output_dir,
        sources=sources,
        validation_fraction=config.validation_fraction,
        shard_tokens=config.shard_tokens,
        workers=config.workers,
        on_bad_document=config.on_bad_document,
    )
    for part, index in indexes.items():
        size = sum(shard.bytes for shard in index.shards)
        print(
            f"{config.output_dir / part}: {index.tokens:,} tokens ({index.dtype}) in {index.documents:,} documents, "
            f"{size:,} bytes in {len(index.shards)} shards"
        )
    skipped = next(iter(indexes.values())).skipped
    print(f"left out: {skipped['empty']:,} documents without text, {skipped['bad']:,} bad ones")
    keys = [f"data.{part or 'train'}={shlex.quote(str(config.output_dir / part))}" for part in indexes]
    print(f"to train on it: {' '.join(keys)}")


if __name__ == "__main__":
    sys.exit(run_recipe(Config, main, doc=__doc__))
