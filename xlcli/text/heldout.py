"""Splitting a corpus into training, validation and test parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from xlcli.text.corpus import EXCERPT, Corpus, open_corpus
from xlcli.text.pretokenize import stable_prefix_len, whole_characters
from xlcli.text.sources import Reading

DEFAULT_FRACTION = 0.05
LARGEST_DEFAULT = 2**20
"""Maximum bytes of a held-out part of default size."""
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
        """Length."""
        return self.stop - self.start

    @property
    def sha256(self) -> str:
        """Hash of the bytes."""
        return self.corpus.range_sha256(self.start, self.stop)

    @property
    def documents(self) -> Sequence[int]:
        """Offsets at which its documents begin, ascending from 0; a cut document begins with the part."""
        return self.corpus.documents(self.start, self.stop)

    def fingerprint(self, *, by_document: bool) -> str:
        """Hash of the bytes, and of the places at which documents begin if they are separated."""
        if not by_document:
            return self.sha256
        places = ",".join(map(str, self.documents))
        return sha256(f"{self.sha256}:{places}".encode()).hexdigest()

    def read(self) -> Iterator[bytes]:
        """The bytes, in portions."""
        return self.corpus.read(self.start, self.stop) if self.n_bytes else iter(())

    def sample(self, limit: int) -> Iterator[bytes]:
        """At most `limit` bytes of the part, in evenly spread blocks that start and end between words."""
        if self.corpus.excerpts is not None:
            yield from self.corpus.excerpts[: max(1, limit // EXCERPT)]
            return
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
    """The three parts of a corpus; validation and test may be empty."""

    train: Part
    valid: Part
    test: Part


def split(
    corpus: Corpus, valid: str | float | None = None, test: str | float | None = None, *, by_document: bool = False
) -> Split:
    """Splits a corpus into training, validation and test part, in this order, at line ends if possible.

    Args:
        corpus: The text.
        valid: Fraction of the text, or a file; None is 5 %, at most 1 MiB.
        test: As `valid`; None is an empty part if `valid` is a file.
        by_document: Split between documents where one begins at most 64 KiB before the place of the split.

    Raises:
        DataError: A file cannot be read or is empty.
    """
    if test is None and isinstance(valid, str):
        test = 0.0
    end = corpus.n_bytes
    cut = _boundary(corpus, end - _size(corpus, test), end, by_document=by_document)
    reading = corpus.sources[0].reading
    test_part = _file_part(test, reading) if isinstance(test, str) else Part(corpus, cut, end)
    end, cut = cut, _boundary(corpus, cut - _size(corpus, valid), cut, by_document=by_document)
    valid_part = _file_part(valid, reading) if isinstance(valid, str) else Part(corpus, cut, end)
    return Split(Part(corpus, 0, cut), valid_part, test_part)


def _file_part(path: str, reading: Reading) -> Part:
    corpus = open_corpus([path], reading=reading)
    return Part(corpus, 0, corpus.n_bytes)


def _size(corpus: Corpus, part: str | float | None) -> int:
    """Bytes of the corpus that belong to a held-out part."""
    if part is None:
        return min(int(corpus.n_bytes * DEFAULT_FRACTION), LARGEST_DEFAULT)
    return 0 if isinstance(part, str) else int(corpus.n_bytes * part)


def _boundary(corpus: Corpus, target: int, end: int, *, by_document: bool) -> int:
    """The last line end before `target`, else the last space, else the last character boundary.

    `by_document`: the last document that begins in the `_SEARCH` bytes up to `target`, if there is one.
    """
    if corpus.excerpts is not None:
        return target
    if target >= end or target <= 0:
        return end if target >= end else 0
    documents = corpus.facts.documents
    document = documents[bisect_right(documents, target) - 1]
    if by_document and document > max(target - _SEARCH, 0):
        return document
    start = target - min(_SEARCH, target, max(end - target, 4))
    before = b"".join(corpus.read(start, target))
    if (line := before.rfind(b"\n") + 1) > 0:
        return start + line
    if (space := before.rfind(b" ")) > 0:
        return start + len(before[:space].rstrip(b" "))
    return start + whole_characters(before)


def _spread(part: Part, starts: list[int]) -> Iterator[bytes]:
    """Blocks of the part at these ascending offsets; in one pass if the corpus is not seekable."""
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
