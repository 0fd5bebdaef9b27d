"""How a vocabulary is chosen, trained and loaded."""

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

SMALLEST_TEXT = 100_000
"""With fewer bytes of training text than this, bytes are chosen over pieces."""
SAMPLE_BYTES = 8 * 2**20
"""A vocabulary of pieces is learned from at most so much text, evenly spread."""


__all__ = ["SAMPLE_BYTES", "TOKENIZERS", "Tokenizer", "choose_tokenizer", "load_tokenizer", "train_tokenizer"]

TOKENIZERS: dict[str, type[BytesTokenizer] | type[SentencePieceTokenizer] | type[WordsTokenizer]] = {
    "bytes": BytesTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "words": WordsTokenizer,
}


def choose_tokenizer(kind: str, vocab_size: int | None, facts: Facts, train_bytes: int) -> tuple[str, int | None]:
    """The kind of vocabulary and its size that suit a text, where they were left open.

    Args:
        kind: `auto`, or a name in `TOKENIZERS`.
        vocab_size: as asked for, or None.
        facts: what is known of the corpus.
        train_bytes: length of its training part.

    Raises:
        ConfigError: the byte vocabulary was asked for with another size than its own.
    """
    if kind == "auto":
        piecemeal = facts.n_chars is not None and not facts.has_nul and train_bytes >= SMALLEST_TEXT
        kind = "sentencepiece" if piecemeal else "bytes"
    if kind == "bytes" and vocab_size not in (None, 256):
        raise ConfigError(
            f"the byte vocabulary has 256 tokens, not {vocab_size}.",
            "Drop --vocab-size, or add --tokenizer sentencepiece.",
        )
    if kind == "sentencepiece" and vocab_size is None:
        # 1024 at 1 MB, 2048 at 4 MB and so on; more where characters are many and wide
        doublings = round(math.log2(max(train_bytes, 1) / 1e6) / 2 - 0.3)
        wide = facts.n_chars is not None and facts.n_bytes > 2 * facts.n_chars
        vocab_size = 2 ** min(max(10 + doublings + 2 * wide, 9), 13)
    return kind, 256 if kind == "bytes" else vocab_size


def train_tokenizer(kind: str, chunks: Iterable[bytes], vocab_size: int | None = None) -> Tokenizer:
    """A vocabulary learned from text, of about `vocab_size` tokens.

    Args:
        kind: a name in `TOKENIZERS`.
        chunks: the training text, or for pieces a sample of it (`Part.sample`); not read for bytes.
        vocab_size: the size; None leaves it to the kind.

    Raises:
        DataError: the text is empty.
        ConfigError: the size is impossible.
    """
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "words":
        return WordsTokenizer.train(chunks, vocab_size)
    return SentencePieceTokenizer.train(chunks, vocab_size or 2048)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The vocabulary saved in `folder`.

    Raises:
        CheckpointError: it is missing, damaged, changed or of a newer format.
    """
    from xlcli.files import read_json

    about = read_json(folder / FILE)
    remedy = "Copy the model folder again from where it came."
    if about.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{folder / FILE} has format {about.get('schema')!r}, this program reads {SCHEMA}.", "Update xlcli."
        )
    if str(about.get("kind")) not in TOKENIZERS:
        raise CheckpointError(
            f"{folder / FILE} names an unknown kind of vocabulary, {about.get('kind')!r}.",
            f"Known: {', '.join(TOKENIZERS)}.",
        )
    tokenizer: Tokenizer = TOKENIZERS[about["kind"]].load(folder)
    for key, found in (("vocab_size", tokenizer.vocab_size), ("fingerprint", tokenizer.fingerprint)):
        if about.get(key) != found:
            raise CheckpointError(
                f"the vocabulary in {folder} is not the one {FILE} describes ({key} differs).", remedy
            )
    return tokenizer
