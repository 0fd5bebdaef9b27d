"""Scores from sums: nats in, bits per byte, bits per character and perplexities out. Never imports torch.

Bits per byte is the headline because it does not depend on the vocabulary: nats / ln 2 / bytes of text, each token
scored once. A character is a Unicode code point. Words are counted as the published word-level benchmarks count them
(Mikolov et al. 2010, Merity et al. 2017): a run of bytes that are not ASCII white space, and one more word for every
line end. So the perplexity per word of a word-level model is its perplexity, and a byte-level model's compares with it.
"""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass

LN2 = math.log(2.0)
"""Nats in a bit."""


def bits_per(nats: float, count: int) -> float:
    """Bits for each of `count` units of text; 0 for no text."""
    return nats / LN2 / count if count else 0.0


def perplexity(nats: float, count: int) -> float:
    """The exponential of the mean nats a unit; infinity where that overflows, 1 for no text."""
    try:
        return math.exp(nats / count) if count else 1.0
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Size of a text. `chars` and `words` are None when it is not UTF-8; `lines` counts line ends."""

    bytes: int
    lines: int
    chars: int | None
    words: int | None


class TextCounter:
    """Counts a text that comes in portions, in constant memory; the counts do not depend on the portions."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._bytes = self._lines = self._chars = self._words = 0
        self._inside = False
        self._valid = True

    def feed(self, data: bytes) -> None:
        """Counts the next portion."""
        if not data:
            return
        self._bytes += len(data)
        self._lines += data.count(b"\n")
        self._words += len(data.split()) - (self._inside and not data[:1].isspace())
        self._inside = not data[-1:].isspace()
        if self._valid:
            try:
                self._chars += len(self._decoder.decode(data))
            except UnicodeDecodeError:
                self._valid = False

    def counts(self) -> TextCounts:
        """Counts of all that was fed, taken as the whole text: an unfinished character at the end is not UTF-8."""
        valid = self._valid and not self._decoder.getstate()[0]
        return TextCounts(
            bytes=self._bytes,
            lines=self._lines,
            chars=self._chars if valid else None,
            words=self._words + self._lines if valid else None,
        )


def context_bin_edges(longest: int) -> list[int]:
    """Borders of the buckets of context: 1, 2, 4, 8 ... and one past `longest`, which the last bucket reaches."""
    edges = [1]
    while 2 * edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [*edges, longest + 1]
