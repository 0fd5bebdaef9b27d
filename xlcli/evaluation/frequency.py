"""Frequencies of words: their bits under the unigram distribution of a text, with which surprisal is compared.

Case and marks at the ends of a word do not count. One is added to each count, also to that of all new words (Laplace).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Self

from xlcli.events import Progress, Scored, WordScore
from xlcli.text.corpus import gather
from xlcli.words import split_words

_ENDS = re.compile(r"^\W+|\W+$")


class Frequencies:
    """Counts of the words of a text, which comes in portions."""

    def __init__(self, portions: Iterable[bytes]) -> None:
        self._counts, rest = Counter[str](), b""
        for portion in portions:
            data = rest + portion
            end = max(data.rfind(b" "), data.rfind(b"\n")) + 1
            self._add(data[:end])
            rest = data[end:]
        self._add(rest)
        self._total = self._counts.total() + len(self._counts) + 1

    @classmethod
    def read(cls, path: str) -> Generator[Progress, None, Self]:
        """Those of a file, in any of the formats of texts."""
        corpus = yield from gather([path])
        yield from corpus.scan()
        return cls(corpus.read(0, corpus.n_bytes))

    def added_to(self, score: Scored) -> Scored:
        """The score of a word with its bits as a further column; others as they are."""
        if not isinstance(score, WordScore):
            return score
        share = (self._counts[_key(score.word)] + 1) / self._total
        return replace(score, columns={**score.columns, "frequency": -math.log2(share)})

    def _add(self, text: bytes) -> None:
        self._counts.update(map(_key, split_words(text.decode("utf-8", "replace"))))


def _key(word: str) -> str:
    return _ENDS.sub("", word).casefold() or word
