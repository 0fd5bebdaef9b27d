"""Bits per byte, bits per character and perplexity from a sum of nats. Never imports torch.

Bits per byte (nats / ln 2 / bytes of text, each token scored once) is the main metric because it does not depend on
the tokenizer. A character is a Unicode code point. A word is a run of bytes other than ASCII white space, and each line
end counts as one more, as in the published word-level benchmarks (Mikolov et al. 2010, Merity et al. 2017): the
perplexity per word of a word-level model is its perplexity per token, and models of other tokenizers compare with it.
"""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass

LN2 = math.log(2.0)
"""Nats per bit."""


def bits_per(nats: float, count: int) -> float:
    """Bits per unit of text, of which there are `count`; 0 for an empty text."""
    return nats / LN2 / count if count else 0.0


def perplexity(nats: float, count: int) -> float:
    """exp(nats / count); infinity on overflow, 1 for an empty text."""
    try:
        return math.exp(nats / count) if count else 1.0
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Size of a text. `chars` and `words` are None if it is not UTF-8; `lines` is the number of line ends."""

    bytes: int
    lines: int
    chars: int | None
    words: int | None


class TextCounter:
    """Counts a text fed in portions, in constant memory."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._bytes = self._lines = self._chars = self._words = 0
        self._inside = False
        self._valid = True

    def feed(self, data: bytes) -> None:
        """Adds the next portion."""
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
        """Counts of the text fed so far. An unfinished character at its end is not UTF-8."""
        valid = self._valid and not self._decoder.getstate()[0]
        return TextCounts(
            bytes=self._bytes,
            lines=self._lines,
            chars=self._chars if valid else None,
            words=self._words + self._lines if valid else None,
        )


def context_bin_edges(longest: int) -> list[int]:
    """Edges of the context bins in tokens: 1, 2, 4, 8 ... and `longest` + 1, where the last bin ends."""
    edges = [1]
    while 2 * edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [*edges, longest + 1]
