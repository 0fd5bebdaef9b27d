"""A tokenized text for evaluation: cached tokens, counts of bytes, characters and words, and token scores on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import ResourceError
from xlcli.events import Notice, Progress, TokenScore
from xlcli.files import cache_folder
from xlcli.metrics import LN2, TextCounter, TextCounts
from xlcli.text.corpus import Corpus, Part
from xlcli.text.pretokenize import divided, whole_characters, whole_words
from xlcli.text.tokenizers import Tokenizer
from xlcli.text.tokens import TokenFile, token_file


@dataclass(frozen=True)
class TokenizedText:
    """A text, its tokens and its size in bytes, characters and words."""

    part: Part
    tokens: TokenFile
    counts: TextCounts

    @property
    def documents(self) -> NDArray[np.int64]:
        """First token of each document, ascending from 0; of one document if they are not separated."""
        return np.zeros(1, np.int64) if self.tokens.documents is None else self.tokens.documents

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document."""
        return int(np.diff(self.documents, append=len(self.tokens)).max())

    def token_scores(self, nats: NDArray[Any]) -> Iterator[TokenScore]:
        """Each token with its text and its surprisal, given in nats, in order; reads the text again."""
        token = byte = 0
        documents = () if self.tokens.documents is None else self.part.documents
        for portion in whole_words(self.part.read(), documents=documents):
            at = 0
            while at < len(portion):
                size = int(self.tokens.sizes(token))
                yield TokenScore(byte, portion[at : at + size], float(nats[token]) / LN2)
                token, at, byte = token + 1, at + size, byte + size


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, limit: int | None, *, by_document: bool = False
) -> Generator[Notice | Progress, None, TokenizedText]:
    """Tokenizes the first `limit` bytes of a text (None: all), cut between characters. Yields progress.

    With `by_document` no token is in two documents.

    Raises:
        DataError: The text is empty or cannot be read.
        ResourceError: The cache folder is full.
    """
    yield from corpus.scan()
    yield from corpus.notices()
    stop = corpus.n_bytes
    if limit is not None and limit < stop:
        tail = b"".join(corpus.read(max(limit - 4, 0), limit))
        stop = limit - len(tail) + whole_characters(tail) or limit
    part = Part(corpus, 0, stop)
    tokens = yield from token_file(part, tokenizer, by_document=by_document)
    counter = TextCounter()
    for portion, is_end in divided(part.read(), part.documents if by_document else ()):
        counter.feed(portion)
        if is_end:
            counter.end_word()
    return TokenizedText(part, tokens, counter.counts())


def mapped_scores(length: int, files: ExitStack) -> NDArray[Any]:
    """Array of `length` float32 scores in an unnamed file, which is deleted when `files` closes.

    Raises:
        ResourceError: The cache folder is full.
    """
    try:
        file = files.enter_context(tempfile.TemporaryFile(dir=cache_folder()))  # noqa: SIM115
        if hasattr(os, "posix_fallocate"):
            # On a full disk, writing to an unallocated block of a mapped file kills the process by SIGBUS.
            os.posix_fallocate(file.fileno(), 0, 4 * length)
        return np.memmap(file, np.float32, mode="r+" if hasattr(os, "posix_fallocate") else "w+", shape=(length,))
    except OSError as error:
        raise ResourceError(
            f"cannot keep the score of each token in {cache_folder()}: {error.strerror}.",
            "Set XLCLI_CACHE to a folder on a larger disk, or use --limit.",
        ) from None
