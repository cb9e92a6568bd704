"""A small corpus and a tokenizer trained on it, so that everything can be tried without a download. SOURCES.md says
where they come from."""

from pathlib import Path

TOKENIZER = Path(__file__).parent
CORPUS = TOKENIZER / "corpus.jsonl"
