"""Regions of texts: words between marks, or with numbers that a column names, and their sums.

A word that a mark divides is in the region of its marked part: in `the *dog*.` the region is `dog.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from xlcli.errors import DataError, shortened
from xlcli.events import Notice, RegionScore, Row, Scored, WordScore
from xlcli.text.corpus import Corpus

_NUMBERS = re.compile(r"(\d+)(?:\.0)?(?:\s*[-–]\s*(\d+))?")  # pandas writes numbers beside empty cells as 3.0
_DIVIDER = re.compile(r"\s*,\s*|(?<![-–\s])\s+(?![-–\s])")


def check_regions(corpus: Corpus, column: str | None) -> Iterator[Notice]:
    """A notice on rows without regions; `DataError` if there are no others, or if a cell names no numbers."""
    n_rows = 0
    without = list[int]()
    for _, row in corpus.rows():
        n_rows += 1
        if not regions_of(row, column):
            without.append(row.document)
    if len(without) == n_rows:
        where = "has marks" if column is None else f"names words in '{column}'"
        raise DataError(f"no row {where}, so there are no regions.", "Correct --region-mark, or leave it out.")
    if without:
        yield Notice(f"{len(without):,} of {n_rows:,} rows have no region (row {without[0]:,} is the first)")


def regions_of(row: Row, column: str | None) -> Sequence[tuple[int, int]]:
    """Where each region of a row begins and ends: offsets in its text, or numbers of words if a `column` names them.

    With numbers, 3-5 is (3, 6). `DataError` if the row lacks the column, or if its cell is something else.
    """
    if column is None:
        return row.regions
    if column not in row.fields:
        raise DataError(f"row {row.document} has no '{column}'.", "Name a column or key that all rows have.")
    cell = row.fields[column]
    regions: list[tuple[int, int]] = []
    n_before = 0  # number of the last word of the regions so far
    for part in _DIVIDER.split("" if cell is None else str(cell).strip()):
        numbers = _NUMBERS.fullmatch(part)
        if not part:
            continue
        first, last = (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2] or numbers[1]))
        if not n_before < first <= last:
            problem = f"'{column}' in row {row.document} is '{shortened(str(cell), 40)}', not ascending numbers of words."
            raise DataError(problem, "Write 3, 3-5 or 3-5, 8 as text; leave the cell of a row without region empty.")
        regions.append((first, last + 1))
        n_before = last
    return regions


def with_regions(scores: Iterable[Scored], corpus: Corpus, column: str | None) -> Iterator[Scored]:
    """The scores of words with the number of their region in a further column `region`, 0 outside.

    After the words of each row, its regions. `DataError` as of `regions_of`, or if a word is in two regions, or none.
    """
    rows = corpus.rows()
    text = _Text(0, ())
    for score in scores:
        if isinstance(score, Row):
            yield from text.regions()
            text = _text_of(score, rows, column)
        if isinstance(score, WordScore):
            score = text.take(score)
        yield score
    yield from text.regions()


def _text_of(begun: Row, rows: Iterator[tuple[int, Row]], column: str | None) -> _Text:
    """The text of the row that begins, which is one of the next `rows`."""
    for place, row in rows:
        if row.document == begun.document:
            regions = regions_of(row, column)
            if column is not None:
                return _NumberedText(row.document, regions)
            return _Text(row.document, [(place + start, place + end) for start, end in regions])
    raise AssertionError("the text has the rows of its corpus")


class _Text:
    """The words of a row so far, and where its regions begin and end, as offsets in all files together."""

    def __init__(self, row: int, places: Sequence[tuple[int, int]]) -> None:
        self._row = row
        self._places = places
        self._words: list[WordScore] = []
        self._members: list[list[int]] = [[] for _ in places]  # indices of the words of each region

    def extent(self, word: WordScore) -> tuple[int, int]:
        """Where the next word begins and ends, in the unit of the places."""
        return word.byte, word.byte + len(word.word.encode())

    def take(self, word: WordScore) -> WordScore:
        """The next word with the number of its region."""
        begin, end = self.extent(word)
        numbers = []
        for number, (region_begin, region_end) in enumerate(self._places, 1):
            if region_begin < end and begin < region_end:
                numbers.append(number)
        if len(numbers) > 1:
            problem = f"'{word.word}' in row {self._row} is one word, but in {len(numbers)} regions."
            raise DataError(problem, "Mark whole words.")
        region = 0
        if numbers:
            region = numbers[0]
            self._members[region - 1].append(len(self._words))
        if self._places:  # else nobody asks for them
            self._words.append(word)
        return replace(word, columns={**word.columns, "region": region})

    def regions(self) -> Iterator[RegionScore]:
        """The regions, after the last word."""
        for region, members in enumerate(self._members, 1):
            if not members:
                problem = f"region {region} of row {self._row} has no word: the row has {len(self._words)} words."
                raise DataError(problem, "Correct that region.")
            first, behind = members[0], members[-1] + 1
            words = self._words[first:behind]
            following = [word.bits for word in self._words[behind : behind + 2]]
            yield RegionScore(
                document=words[0].document,
                region=region,
                number=first + 1,
                byte=words[0].byte,
                text=_joined(words),
                words=len(words),
                bits=sum(word.bits for word in words),
                tokens=sum(word.tokens for word in words),
                next_bits=following[0] if following else None,
                next_two_bits=sum(following) if len(following) == 2 else None,
            )


class _NumberedText(_Text):
    """Its regions begin and end at numbers of words."""

    def extent(self, word: WordScore) -> tuple[int, int]:
        number = len(self._words) + 1
        return number, number + 1


def _joined(words: Sequence[WordScore]) -> str:
    """The text of words that follow one another, with a blank where white space divides them."""
    text = ""
    end = words[0].byte
    for word in words:
        if word.byte > end:
            text += " "
        text += word.word
        end = word.byte + len(word.word.encode())
    return text
