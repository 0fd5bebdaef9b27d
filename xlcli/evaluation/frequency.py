"""Frequencies of words: their bits under the unigram distribution of a text, or of counts, to compare surprisal with.

Case and marks at the ends of a word do not count. One is added to each count, also to that of all new words (Laplace).
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
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
_NUMBER = re2.compile(r"[-+]?\d[\d.,]*")
_EXPECTED = "Give two columns, word and count (a whole number), or a text in which words are counted."


class Frequencies:
    """Bits of words by their counts; case and marks at the ends of these words are gone (`_key`)."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._total = counts.total() + len(counts) + 1

    @classmethod
    def read(cls, path: str, *, punctuation: bool) -> Generator[Progress, None, Self]:
        """Those of a table of words and counts (`_listed_counts`), or of the words of a text in any of the formats.

        With `punctuation`, marks of a text are words of their own.
        """
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
    """Counts of a .tsv or .csv file with a word and its count in each row, after a header or not; None for a text.

    `DataError` if it is a list of words with other columns, or a count is no whole number.
    """
    if path.suffix.lower() not in (".tsv", ".csv") or not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first_line = file.readline()
            delimiter = next((mark for mark in "\t;," if mark in first_line), None)
            if delimiter is None:
                return None
            file.seek(0)
            # A word can be a lone quote. In a TSV file quotes then mean nothing.
            quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
            rows = [row for row in csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True) if row]
    except OSError:
        return None  # the error is that of reading it as a text
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table in UTF-8: {error}.", _EXPECTED) from None
    if not _has_number(rows[0]):
        del rows[0]  # the header
    has_blanks = any(len(cell.split()) > 1 for cell in chain(*rows[:1]))
    if not rows or has_blanks or not _has_number(rows[0]):
        return None  # sentences, or texts beside them
    counts = Counter[str]()
    for row in rows:
        count = row[-1].strip('"')
        if len(row) != 2 or not count.isdecimal():
            raise DataError(f"{path} is a list of words, but has the row '{shortened(' '.join(row), 60)}'.", _EXPECTED)
        counts[_key(row[0])] += int(count)
    return counts


def _has_number(row: Sequence[str]) -> bool:
    return any(_NUMBER.fullmatch(cell.strip('"')) for cell in row)


def _key(word: str) -> str:
    return str(_ENDS.sub("", word)).casefold() or word
