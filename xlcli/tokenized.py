"""A text about to be scored: its tokens and the bytes of each, in unnamed files on disk so that any size will do."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import ResourceError
from xlcli.events import Progress, TokenScore
from xlcli.metrics import LN2, TextCounter, TextCounts
from xlcli.text.cache import cache_folder
from xlcli.text.corpus import Corpus
from xlcli.text.pretokenize import whole_characters, whole_words
from xlcli.text.tokenizers.registry import Tokenizer


@dataclass(frozen=True)
class TokenizedText:
    """The first `n_bytes` of a corpus: `ids` of its tokens and `sizes` in bytes of each (one axis, read only)."""

    corpus: Corpus
    n_bytes: int
    ids: NDArray[Any]
    sizes: NDArray[Any]
    counts: TextCounts

    def scores(self, nats: NDArray[Any]) -> Iterator[TokenScore]:
        """Every token with its bytes and its `nats`, in the order of the text, which is read once more."""
        token = byte = 0
        for words in whole_words(self.corpus.read(0, self.n_bytes)):
            at = 0
            while at < len(words):
                size = int(self.sizes[token])
                yield TokenScore(byte, words[at : at + size], float(nats[token]) / LN2)
                token, at, byte = token + 1, at + size, byte + size


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, limit: int | None, files: ExitStack
) -> Generator[Progress, None, TokenizedText]:
    """The tokens of the first `limit` bytes of a text (all for None), cut between characters; reports progress.

    Raises:
        DataError: The text is empty or cannot be read.
        ResourceError: There is no room on disk.
    """
    yield from corpus.scan()
    stop = corpus.n_bytes
    if limit is not None and limit < stop:
        tail = b"".join(corpus.read(max(limit - 4, 0), limit))
        stop = limit - len(tail) + whole_characters(tail) or limit
    counter, clock = TextCounter(), ProgressMeter("tokenizing", stop, "B")
    ids, sizes = _file(files), _file(files)
    id_type, size_type = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4"), np.dtype("<u4")
    n_tokens = n_bytes = 0
    for words in whole_words(corpus.read(0, stop)):
        counter.feed(words)
        found = tokenizer.encode(words)
        try:
            ids.write(found.astype(id_type).tobytes())
            sizes.write(tokenizer.sizes(found, words).astype(size_type).tobytes())
            ids.flush()
            sizes.flush()
        except OSError as error:
            raise _no_room(error) from None
        n_tokens += len(found)
        n_bytes += len(words)
        yield from clock.report(n_bytes)
    return TokenizedText(
        corpus=corpus,
        n_bytes=stop,
        ids=np.memmap(ids, id_type, mode="r", shape=(n_tokens,)),
        sizes=np.memmap(sizes, size_type, mode="r", shape=(n_tokens,)),
        counts=counter.counts(),
    )


def column(length: int, files: ExitStack) -> NDArray[Any]:
    """`length` float32 on disk, to be filled in any order.

    Raises:
        ResourceError: There is no room on disk.
    """
    file = _file(files)
    try:
        if hasattr(os, "posix_fallocate"):
            # a hole in the file that cannot be filled later would kill the process by SIGBUS
            os.posix_fallocate(file.fileno(), 0, 4 * length)
        return np.memmap(file, np.float32, mode="r+" if hasattr(os, "posix_fallocate") else "w+", shape=(length,))
    except OSError as error:
        raise _no_room(error) from None


class ProgressMeter:
    """Turns amounts done into `Progress`, a few times a second."""

    def __init__(self, stage: str, total: int, unit: str) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self._began = self._told = time.monotonic()

    def report(self, done: int) -> Iterator[Progress]:
        """`Progress` when it is time for one."""
        now = time.monotonic()
        if now - self._told >= 0.2:
            self._told = now
            yield Progress(self.stage, done, self.total, self.unit, done / (now - self._began))


def _file(files: ExitStack) -> IO[bytes]:
    """An unnamed file in the cache folder, gone when `files` closes."""
    try:
        return files.enter_context(tempfile.TemporaryFile(dir=cache_folder()))
    except OSError as error:
        raise _no_room(error) from None


def _no_room(error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot keep the tokens of the text in {cache_folder()}: {error.strerror}.",
        "Set XLCLI_CACHE to a folder on a larger disk, or use --limit.",
    )
