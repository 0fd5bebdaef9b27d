"""Frequencies of words: their bits under the unigram distribution of a text, or of counts, to compare surprisal with.

Case and marks at the ends of a word do not count. One is added to each count, also to that of all new words (Laplace).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self

import re2

from xlcli.errors import DataError, shortened
from xlcli.events import Progress, Scored, WordScore
from xlcli.text.corpus import gather
from xlcli.words import split_words

_ENDS = re2.compile(r"^[^\p{L}\p{M}\p{N}]+|[^\p{L}\p{M}\p{N}]+$")
_LISTED = re2.compile(r'(\S*[\t;,])*"?\d[\d.]*"?([\t;,]\S*)*')  # cells without blanks, of which one is a number
_WORD_AND_COUNT = re2.compile(r'"?([^\s;,]+?|[;,])"?[\t;,]"?([0-9]{1,15})"?')
_EXPECTED = "Give two columns, word and count (a whole number), or a text in which words are counted."


class Frequencies:
    """Bits of words by their counts; case and marks at the ends of these words are gone (`_key`)."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._total = counts.total() + len(counts) + 1

    @classmethod
    def read(cls, path: str, *, punctuation: bool) -> Generator[Progress, None, Self]:
        """From a table of words and counts, or a text; with `punctuation` its marks are words of their own."""
        counts = _listed_counts(Path(path))
        if counts is None:
            corpus = yield from gather([path])
            yield from corpus.scan()
            counts = _counts_of_text(corpus.read(0, corpus.n_bytes), punctuation=punctuation)
        return cls(counts)

    def added_to(self, score: Scored) -> Scored:
        """The score of a word with its bits as a further column; others as they are."""
        if not isinstance(score, WordScore):
            return score
        share = (self._counts[_key(score.word)] + 1) / self._total
        return replace(score, columns={**score.columns, "frequency": -math.log2(share)})


def _counts_of_text(portions: Iterable[bytes], *, punctuation: bool) -> Counter[str]:
    """Counts of the words of a text, which comes in portions."""
    counts = Counter[str]()
    rest = b""
    for portion in chain(portions, [b"\n"]):
        data = rest + portion
        end = max(data.rfind(b" "), data.rfind(b"\n")) + 1  # the last word may go on in the next portion
        words = split_words(data[:end].decode("utf-8", "replace"), punctuation=punctuation)
        counts.update(map(_key, words))
        rest = data[end:]
    return counts


def _listed_counts(path: Path) -> Counter[str] | None:
    """Returns the counts of a table of words and counts, or None for a text; `DataError` if a row has anything else."""
    if path.suffix.lower() not in (".tsv", ".csv") or not path.is_file():
        return None
    try:
        text = path.read_text("utf-8-sig")
    except OSError:
        return None  # the error is that of reading it as a text
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8.", _EXPECTED) from None
    rows = list(filter(str.strip, text.splitlines()))
    if not any(map(_LISTED.fullmatch, rows[:2])):
        return None  # sentences, or texts beside them
    if not _LISTED.fullmatch(rows[0]):
        del rows[0]  # the header
    counts = Counter[str]()
    for row in rows:
        word_and_count = _WORD_AND_COUNT.fullmatch(row)
        if word_and_count is None:
            raise DataError(f"{path} is a list of words, but has the row '{shortened(row, 60)}'.", _EXPECTED)
        word, count = word_and_count.groups()
        counts[_key(word)] += int(count)
    return counts


def _key(word: str) -> str:
    return str(_ENDS.sub("", word)).casefold() or word
