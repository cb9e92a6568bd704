"""Train a tokenizer: documents in, a byte-level BPE out as tokenizer.json and tokenizer_config.json.

    femto run train_tokenizer --config configs/train_tokenizer.yaml [key=value …]

The shipped tokenizer (`tokenizer: builtin`) is what this recipe makes of the shipped corpus with the shipped config:
the same text and settings give the same bytes. The first special token is the one that will end every document.

To make it your own: `femto cp train_tokenizer mine.py`, edit, `femto run ./mine.py --config …`. What people edit first
is how text is cut before merges are learned (section 2): digits one by one, another regular expression.
"""

import json
import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from femtolib import sections
from femtolib.command import run_recipe
from femtolib.config import ConfigModel, InputPatterns, PositiveInteger
from femtolib.data.documents import Sieve, find_files, read_documents
from femtolib.errors import FemtoError
from femtolib.publish import locked, published

LAUNCH = "single"


def _distinct(tokens: list[str]) -> list[str]:
    if len(set(tokens)) < len(tokens):
        raise ValueError("the same token stands twice")
    return tokens


class Config(ConfigModel):
    output_dir: sections.OutputDir
    input: InputPatterns = Field(description="files, patterns or folders of .jsonl, .parquet, .txt, …, or builtin")
    text_key: str = Field("text", min_length=1, description=".jsonl and .parquet: the key that holds the text")
    text_documents: Literal["line", "file"] = Field("line", description=".txt: what one document is")
    on_bad_document: Literal["stop", "skip"] = Field("stop", description="what a broken document does")
    vocab_size: PositiveInteger = Field(le=2**24, description="ids in all: special tokens, 256 bytes, and merges")
    special_tokens: Annotated[
        list[Annotated[str, Field(min_length=2)]], Field(min_length=1), AfterValidator(_distinct)
    ] = Field(["<|endoftext|>"], description="ids 0, 1, …; the first ends every document (EOS)")


def main(config: Config) -> None:
    # ── 1 Documents ───────────────────────────────────────────────────────────────────────────────────────────────────
    # Read one by one and never held: what grows is the table of different words that the trainer counts.
    smallest = len(config.special_tokens) + 256
    if config.vocab_size < smallest:
        raise FemtoError(f"vocab_size: {config.vocab_size} is below {smallest}: the special tokens and the 256 bytes")
    files = find_files(config.input)
    documents = read_documents(files, text_key=config.text_key, text_documents=config.text_documents)
    sieve = Sieve(config.on_bad_document)

    # ── 2 Tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────
    # Byte level: any text can be written, so there is no unknown token. No normalizer: decoding gives the text back to
    # the byte. No post-processor: femto ends each document in EOS itself and puts nothing in front.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    # ── 3 Training ────────────────────────────────────────────────────────────────────────────────────────────────────
    # The alphabet is given in order, whole, whatever bytes the text has: ids must not depend on a hash table's order.
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=config.special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    with locked(config.output_dir, wait=False), published(config.output_dir) as directory:
        tokenizer.train_from_iterator((document.text for document in sieve.readable(documents)), trainer)
        if not sieve.kept:
            raise FemtoError(f"input: no documents ({sieve.empty} empty, {sieve.bad} bad): nothing to learn from")

        # ── 4 Files ───────────────────────────────────────────────────────────────────────────────────────────────────
        # tokenizer_config.json says which token ends a document, to femto and to transformers.
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": config.special_tokens[0],
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size = tokenizer.get_vocab_size()
    if size < config.vocab_size:
        print(f"note: the text has pairs for {size} ids only, not {config.vocab_size}", file=sys.stderr)
    print(
        f"{config.output_dir}: a tokenizer of {size:,} ids, from {sieve.kept:,} documents ({sieve.empty:,} empty and "
        f"{sieve.bad:,} bad ones left out)"
    )


if __name__ == "__main__":
    sys.exit(run_recipe(Config, main, doc=__doc__))
