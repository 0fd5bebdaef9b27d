"""Cutting a corpus into training, validation and test parts, before anything is learned from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xlcli.text.corpus import Corpus, open_corpus
from xlcli.text.pretokenize import stable_prefix_len, whole_characters

DEFAULT_FRACTION = 0.05
LARGEST_DEFAULT = 2**20
"""A held-out part nobody asked for takes no more bytes than this."""
_SEARCH = 2**16
_SAMPLE_BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` to `stop` of a corpus."""

    corpus: Corpus
    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start

    @property
    def sha256(self) -> str:
        """Hash of its bytes."""
        return self.corpus.range_sha256(self.start, self.stop)

    def read(self) -> Iterator[bytes]:
        """Its bytes in order, in portions."""
        return self.corpus.read(self.start, self.stop) if self.n_bytes else iter(())

    def sample(self, limit: int) -> Iterator[bytes]:
        """At most `limit` bytes of it, in blocks evenly spread; all of it when it is no longer."""
        if self.n_bytes <= limit:
            yield from self.read()
            return
        n_blocks = max(1, limit // _SAMPLE_BLOCK)
        starts = [self.start + i * (self.n_bytes - _SAMPLE_BLOCK) // max(n_blocks - 1, 1) for i in range(n_blocks)]
        for block in _spread(self, starts):
            first = block.find(b"\n", 0, _SAMPLE_BLOCK // 2)
            if first < 0:
                first = max(block.find(b" ", 0, _SAMPLE_BLOCK // 2), 0) - 1
            block = block[first + 1 :]
            yield block[: stable_prefix_len(block)] or block


@dataclass(frozen=True, slots=True)
class Split:
    """The three parts; validation and test may be empty."""

    train: Part
    valid: Part
    test: Part


def split(corpus: Corpus, valid: str | float | None = None, test: str | float | None = None) -> Split:
    """Cut the held-out parts off the end: train, then valid, then test, each cut at a line end where one is near.

    Args:
        corpus: the text.
        valid: fraction of the text, or a file; None is 5 %, at most 1 MiB.
        test: likewise; where `valid` is a file, None is nothing.

    Raises:
        DataError: a file cannot be read or is empty.
    """
    if test is None and isinstance(valid, str):
        test = 0.0
    end = corpus.n_bytes
    cut = _border(corpus, end - _share(corpus, test), end)
    test_part = _file_part(test) if isinstance(test, str) else Part(corpus, cut, end)
    end, cut = cut, _border(corpus, cut - _share(corpus, valid), cut)
    valid_part = _file_part(valid) if isinstance(valid, str) else Part(corpus, cut, end)
    return Split(Part(corpus, 0, cut), valid_part, test_part)


def _file_part(path: str) -> Part:
    corpus = open_corpus([path])
    return Part(corpus, 0, corpus.n_bytes)


def _share(corpus: Corpus, asked: str | float | None) -> int:
    if asked is None:
        return min(int(corpus.n_bytes * DEFAULT_FRACTION), LARGEST_DEFAULT)
    return 0 if isinstance(asked, str) else int(corpus.n_bytes * asked)


def _border(corpus: Corpus, target: int, end: int) -> int:
    """The good place to cut nearest before `target`: after a line end, else before a blank, else between characters."""
    if target >= end or target <= 0:
        return end if target >= end else 0
    reach = min(_SEARCH, target, max(end - target, 4))
    before = b"".join(corpus.read(target - reach, target))
    if (line := before.rfind(b"\n") + 1) > 0:
        return target - reach + line
    if (blank := before.rfind(b" ")) > 0:
        return target - reach + len(before[:blank].rstrip(b" "))
    return target - reach + whole_characters(before)


def _spread(part: Part, starts: list[int]) -> Iterator[bytes]:
    """Blocks of the part at the given ascending places; in one pass when going to a place means reading up to it."""
    if part.corpus.seekable:
        for start in starts:
            yield b"".join(part.corpus.read(start, min(start + _SAMPLE_BLOCK, part.stop)))
        return
    portions = part.read()
    held, place = b"", part.start
    for start in starts:
        while place + len(held) < start + _SAMPLE_BLOCK and (portion := next(portions, b"")):
            held += portion
            drop = max(0, min(start - place, len(held)))
            held, place = held[drop:], place + drop
        yield held[start - place : start - place + _SAMPLE_BLOCK]
