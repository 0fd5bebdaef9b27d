"""Frequencies of words: their bits under the unigram distribution of a text, with which surprisal is compared.

Case and marks at the ends of a word do not count. One is added to each count, also to that of all new words (Laplace).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Self

import re2

from xlcli.events import Progress, Scored, WordScore
from xlcli.text.corpus import gather
from xlcli.words import split_words

_ENDS = re2.compile(r"^[^\p{L}\p{M}\p{N}]+|[^\p{L}\p{M}\p{N}]+$")


class Frequencies:
    """Counts of the words of a text, which comes in portions; with `punctuation`, marks are words of their own."""

    def __init__(self, portions: Iterable[bytes], *, punctuation: bool) -> None:
        self._counts, self._punctuation = Counter[str](), punctuation
        rest = b""
        for portion in portions:
            data = rest + portion
            end = max(data.rfind(b" "), data.rfind(b"\n")) + 1  # the last word may go on in the next portion
            self._add(data[:end])
            rest = data[end:]
        self._add(rest)
        self._total = self._counts.total() + len(self._counts) + 1

    @classmethod
    def read(cls, path: str, *, punctuation: bool) -> Generator[Progress, None, Self]:
        """Those of a file, in any of the formats of texts."""
        corpus = yield from gather([path])
        yield from corpus.scan()
        return cls(corpus.read(0, corpus.n_bytes), punctuation=punctuation)

    def added_to(self, score: Scored) -> Scored:
        """The score of a word with its bits as a further column; others as they are."""
        if not isinstance(score, WordScore):
            return score
        share = (self._counts[_key(score.word)] + 1) / self._total
        return replace(score, columns={**score.columns, "frequency": -math.log2(share)})

    def _add(self, text: bytes) -> None:
        words = split_words(text.decode("utf-8", "replace"), punctuation=self._punctuation)
        self._counts.update(map(_key, words))


def _key(word: str) -> str:
    return str(_ENDS.sub("", word)).casefold() or word
