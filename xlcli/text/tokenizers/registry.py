"""Choosing, training and loading a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from xlcli.errors import CheckpointError, ConfigError
from xlcli.text.corpus import Facts
from xlcli.text.tokenizers.base import FILE, SCHEMA, Tokenizer
from xlcli.text.tokenizers.bytes import BytesTokenizer
from xlcli.text.tokenizers.sentencepiece import SentencePieceTokenizer
from xlcli.text.tokenizers.words import WordsTokenizer

__all__ = ["SAMPLE_BYTES", "TOKENIZERS", "Tokenizer", "choose_tokenizer", "load_tokenizer", "train_tokenizer"]

TOKENIZERS: dict[str, type[Tokenizer]] = {
    "bytes": BytesTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "words": WordsTokenizer,
}
SENTENCEPIECE_FROM = 100_000
"""Bytes of training text from which `auto` is sentencepiece; below, bytes."""
SAMPLE_BYTES = 8 * 2**20
"""Maximum bytes of text that a sentencepiece tokenizer is trained on."""


def choose_tokenizer(kind: str, vocab_size: int | None, facts: Facts, train_bytes: int) -> tuple[str, int | None]:
    """Kind and vocabulary size for a text, where they are not given.

    Args:
        kind: `auto`, or a key of `TOKENIZERS`.
        vocab_size: The given size, or None.
        facts: Scan of the corpus.
        train_bytes: Length of its training part.

    Raises:
        ConfigError: A vocabulary size other than 256 is given for bytes.
    """
    if kind == "auto":
        is_text = facts.n_chars is not None and not facts.has_nul
        kind = "sentencepiece" if is_text and train_bytes >= SENTENCEPIECE_FROM else "bytes"
    if kind == "bytes" and vocab_size not in (None, 256):
        raise ConfigError(
            f"the bytes tokenizer has 256 tokens, not {vocab_size}.",
            "Drop --vocab-size, or add --tokenizer sentencepiece.",
        )
    if kind == "sentencepiece" and vocab_size is None:
        # 512 up to 2 MB, 1024 at 4 MB, 4096 at 40 MB (docs/log.md); four times as many for text of mostly multi-byte
        # characters.
        doublings = round(0.65 * math.log2(max(train_bytes, 1) / 1e6) - 1.3)
        wide = facts.n_chars is not None and facts.n_bytes > 2 * facts.n_chars
        vocab_size = 2 ** min(max(10 + doublings + 2 * wide, 9), 13)
    return kind, 256 if kind == "bytes" else vocab_size


def train_tokenizer(kind: str, chunks: Iterable[bytes], vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer trained on text.

    Args:
        kind: Key of `TOKENIZERS`.
        chunks: Training text; a sample of it (`Part.sample`) for sentencepiece.
        vocab_size: Approximate vocabulary size; None is the default of the kind.

    Raises:
        DataError: The text is empty.
        ConfigError: The vocabulary size is impossible.
    """
    return TOKENIZERS[kind].train(chunks, vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`.

    Raises:
        CheckpointError: It is missing, damaged, changed or of another format version.
    """
    from xlcli.files import read_json

    about = read_json(folder / FILE)
    if about.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{folder / FILE} has format {about.get('schema')!r}, this program reads {SCHEMA}.", "Update xlcli."
        )
    if str(about.get("kind")) not in TOKENIZERS:
        raise CheckpointError(
            f"{folder / FILE} names an unknown tokenizer, {about.get('kind')!r}.",
            f"Known: {', '.join(TOKENIZERS)}.",
        )
    tokenizer = TOKENIZERS[about["kind"]].load(folder)
    for key, found in (("vocab_size", tokenizer.vocab_size), ("fingerprint", tokenizer.fingerprint)):
        if about.get(key) != found:
            raise CheckpointError(
                f"the tokenizer in {folder} differs from the one that {FILE} describes ({key}).",
                "Copy the model folder again from its source.",
            )
    return tokenizer
