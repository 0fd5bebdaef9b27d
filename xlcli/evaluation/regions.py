"""Regions of texts: words between marks, or words whose numbers a column names, and their sums.

A word belongs to the region that any part of it is in: in `the *dog*.` the region is `dog.`.

A further column of words is one of regions, too: a sum if it has bits or lengths (`_SUMMED`), what is known after the
region from its last word (`_OF_LAST_WORD`), and anything else, such as the rank, from its first word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from xlcli.errors import DataError, shortened
from xlcli.events import Notice, RegionScore, Row, Scored, WordScore
from xlcli.text.corpus import Corpus

_NUMBERS = re.compile(r"(\d+)(?:\.0)?(?:\s*[-–]\s*(\d+))?")  # pandas writes numbers beside empty cells as 3.0
_SUMMED = re.compile("frequency|length|entropy_reduction|(temperature|layer)_.*")
_OF_LAST_WORD = ("last", "next_entropy")
_DIVIDER = re.compile(r"\s*,\s*|(?<![-–\s])\s+(?![-–\s])")


def check_regions(corpus: Corpus, column: str | None) -> Iterator[Notice]:
    """A notice on rows without regions; `DataError` if there are no others, or if a cell names no numbers."""
    rows = [row for _, row in corpus.rows()]
    without = [row for row in rows if not regions_of(row, column)]
    if len(without) == len(rows):
        raise DataError("no row has a region.", "Correct --region-mark, or leave it out.")
    if without:
        yield Notice(f"{len(without):,} of {len(rows):,} rows have no region ({without[0].place} is the first)")


def regions_of(row: Row, column: str | None) -> Sequence[tuple[int, int]]:
    """Where each region of a row begins and ends: offsets in its text, or numbers of words if a `column` names them.

    With numbers, `3-5, 8` is (3, 6), (8, 9). `DataError` if the row lacks the column, or has something else there.
    """
    if column is None:
        return row.regions
    if column not in row.fields:
        raise DataError(f"{row.place} has no '{column}'.", "Name a column or key that all rows have.")
    cell = str(row.fields[column] or "").strip()
    regions: list[tuple[int, int]] = []
    n_before = 0  # number of the last word of the regions so far
    for part in filter(None, _DIVIDER.split(cell)):
        numbers = _NUMBERS.fullmatch(part)
        first = last = 0  # no word has this number
        if numbers is not None:
            first = int(numbers[1])
            last = int(numbers[2] or first)
        if not n_before < first <= last:
            problem = f"'{column}' of {row.place} is '{shortened(cell, 40)}', not ascending numbers of words."
            raise DataError(problem, "Write 3, or 3-5, or 3-5, 8. Format the column as text, and leave others empty.")
        regions.append((first, last + 1))
        n_before = last
    return regions


def with_regions(scores: Iterable[Scored], corpus: Corpus, column: str | None) -> Iterator[Scored]:
    """The scores of words with the number of their region in a further column `region`, 0 outside.

    The regions of a row come after its words. `DataError` if a region has no word, or a word is in two of them.
    """
    rows = corpus.rows()
    words = _Words(Row(0, {}), [], is_numbered=False)
    for score in scores:
        if isinstance(score, Row):
            yield from words.regions()
            place, row = next(pair for pair in rows if pair[1].document == score.document)
            regions = regions_of(row, column)
            if column is None:
                regions = [(place + start, place + end) for start, end in regions]
            words = _Words(row, regions, is_numbered=column is not None)
        if isinstance(score, WordScore):
            score = words.take(score)
        yield score
    yield from words.regions()


class _Words:
    """The words of a row so far, and where its regions begin and end: offsets in all files, or numbers of words."""

    def __init__(self, row: Row, regions: Sequence[tuple[int, int]], *, is_numbered: bool) -> None:
        self._row, self._regions, self._is_numbered = row, regions, is_numbered
        self._words: list[WordScore] = []

    def take(self, word: WordScore) -> WordScore:
        """The next word with its region."""
        begin, end = word.byte, _end_of(word)
        if self._is_numbered:
            begin, end = len(self._words) + 1, len(self._words) + 2
        region = 0
        for number, (region_begin, region_end) in enumerate(self._regions, 1):
            is_inside = region_begin < end and begin < region_end
            if is_inside and region:
                problem = f"'{word.word}' in {self._row.place} is one word, but in two regions."
                raise DataError(problem, "Mark whole words.")
            if is_inside:
                region = number
        word = replace(word, columns={**word.columns, "region": region})
        self._words.append(word)
        return word

    def regions(self) -> Iterator[RegionScore]:
        """Yields the scores of the regions; is called after the last word. `DataError` if a region has no word."""
        region_of_word = [word.columns["region"] for word in self._words]
        for region, (begin, end) in enumerate(self._regions, 1):
            n_words = region_of_word.count(region)
            is_beyond_row = self._is_numbered and n_words < end - begin
            if not n_words or is_beyond_row:
                problem = f"region {region} of {self._row.place} is not there: the row has {len(self._words)} words."
                raise DataError(problem, "Correct that region.")
            first = region_of_word.index(region)
            words = self._words[first : first + n_words]
            next_bits = [word.bits for word in self._words[first + n_words :][:2]]  # of the next two words
            yield RegionScore(
                document=words[0].document,
                region=region,
                number=first + 1,
                byte=words[0].byte,
                text=_joined(words),
                words=n_words,
                bits=sum(word.bits for word in words),
                naive_bits=sum(word.naive_bits for word in words),
                token_entropy=words[0].token_entropy,
                tokens=sum(word.tokens for word in words),
                next_bits=next_bits[0] if next_bits else None,
                next_two_bits=sum(next_bits) if len(next_bits) == 2 else None,
                columns=_columns_of(words),
            )


def _columns_of(words: Sequence[WordScore]) -> dict[str, object]:
    """The further columns of a region with these words, as the module says. A sum is None if a word has no value."""
    columns: dict[str, object] = {}
    for name in words[0].columns:
        if name == "region":
            continue
        values = [word.columns[name] for word in words]
        if name in _OF_LAST_WORD:
            columns[name] = values[-1]
        elif _SUMMED.fullmatch(name):
            columns[name] = None if None in values else sum(values)
        else:
            columns[name] = values[0]
    return columns


def _joined(words: Sequence[WordScore]) -> str:
    """The text of words that follow one another, with a blank where white space divides them."""
    text = words[0].word
    for before, word in pairwise(words):
        if word.byte > _end_of(before):
            text += " "
        text += word.word
    return text


def _end_of(word: WordScore) -> int:
    return word.byte + len(word.word.encode())
