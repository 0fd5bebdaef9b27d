"""Rows of CSV and TSV tables, whose first row names the columns."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from xlcli.errors import DataError, named
from xlcli.text import documents
from xlcli.text.documents import Notice, Place, Portions, Rows
from xlcli.text.misreadings import conversion

_ANY_QUOTE = re.compile(rb'(?:^|[\t,;])"')
"""Beginning of a quoted cell as long as it is not known what divides the cells."""
_QUOTE_END = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # rest of a quoted cell
_QUALTRICS = '{"ImportId":'
"""Beginning of the cells of the third row, which names the columns once more, as the second one does."""
_DATA = re.compile(r"[-+.]?\d[-+.,:/\dTZ ]*|NULL|NA|NaN|None|true|false|TRUE|FALSE|True|False")
"""Cells that hardly ever name a column: numbers, times and values of programs."""
_PCIBEX = " docs/words.md has a script for results of PCIbex."
_SEPARATOR = re.compile(rb'"?sep=(.)"?\s*')  # first line with which spreadsheets say what divides the cells

_SAMPLE_ROWS = 20  # rows from which an encoding is guessed: the names of columns alone may be too few letters


def table_rows(portions: Portions, name: str, text_fields: Sequence[str], notice: Notice) -> Rows:
    """Rows of a table. Calls `notice` at the first quotation that joins rows, and the first comma that divides a text.

    `DataError` if a column of `text_fields` is missing, a name is there twice, or a row is broken or too long.
    """
    csv.field_size_limit(documents.LONGEST_LINE)
    table = _Table(name, text_fields)
    has_told_of_quote = has_told_of_comma = False
    rows = table.joined(numbered_lines(portions, name))
    for first_line, last_line, row in rows:
        if row is None:  # a pause
            yield None
            continue
        if not row.strip(b" \r\n"):  # an empty line, where a reader may stop
            yield b""
            continue
        place = Place("line", first_line)
        try:
            cells = table.take(row, place)
        except UnicodeDecodeError:
            for _, _, following in itertools.islice(rows, _SAMPLE_ROWS):
                if following is None:  # a pause, whose end may be far
                    break
                row += following
            remedy = f"Save it as CSV UTF-8. {conversion(bytes(row))}."
            raise DataError(f"{place} of {name} is not UTF-8.", remedy) from None
        if cells is None:  # it names the columns
            continue
        if not has_told_of_comma and table.divides_text(cells):
            has_told_of_comma = True
            remark = f"the cell behind the text in {place} of {name} begins with a blank, as if a comma divided it"
            notice(f"{remark}; write texts with commas in quotes")
        yield place, cells
        if last_line > first_line and not has_told_of_quote and table.joins_rows(row):
            has_told_of_quote = True
            remark = f"the quote in {place} of {name} joins it with line {last_line}"
            notice(f'{remark}; write each quote in a text as ""')


class _Table:
    """What divides the cells of a table, and its columns, once they are read."""

    def __init__(self, name: str, text_fields: Sequence[str]) -> None:
        self._name, self._text_fields = name, text_fields
        self._delimiter = ""
        self._columns: list[str] = []
        self._header: list[str] = []
        self._quote = _ANY_QUOTE

    def joined(self, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[tuple[int, int, bytearray | None]]:
        """Joins lines to rows, as quoted cells may have line ends: first and last number, and text (None: a pause)."""
        row = bytearray()
        first_line = 1
        is_open = False  # a quoted cell goes on in the next line
        for number, line in lines:
            if line is None:
                yield first_line, number, None
                continue
            if not is_open:
                row = bytearray()
                first_line = number
            row += line + b"\n"
            is_open = self._is_open_after(line, is_open=is_open)
            if not is_open or len(row) > documents.LONGEST_LINE:  # which `take` refuses
                yield first_line, number, row
        if is_open:
            raise _broken(f"line {first_line} of {self._name}", "a quote is not closed")

    def _is_open_after(self, line: bytes, *, is_open: bool) -> bool:
        """True if a quoted cell goes on behind this line; `is_open`: one goes on in it."""
        at = 0
        while True:
            quote = _QUOTE_END.match(line, at) if is_open else self._quote.search(line, at)
            if quote is None:
                return is_open
            at = quote.end()
            is_open = not is_open

    def take(self, row: bytearray, place: str) -> dict[str, str] | None:
        """The cells of a row by column, if it is UTF-8; None if it names them or what divides them, which is kept."""
        separator = _SEPARATOR.fullmatch(row)
        if separator and not self._columns:
            self._delimiter = separator[1].decode(errors="replace")
            return None
        if not self._delimiter:
            self._delimiter = _delimiter(row, self._text_fields)
        cells = self._cells(row, place)
        if not self._columns:
            require_columns(self._text_fields, cells, cells, f"{place} of {self._name}")
            self._columns = [cell or f"column {i}" for i, cell in enumerate(cells, start=1)]
            self._quote = re.compile(rb'(?:^|%b)"' % re.escape(self._delimiter.encode()))
            self._header = cells
            return None
        if [cells[0].removeprefix("\ufeff"), *cells[1:]] == self._header:  # of another table that was appended
            return {}
        if any(cell.startswith(_QUALTRICS) for cell in cells):
            problem = f"{place} of {self._name} is no answer, but names the columns, as the line before it does."
            raise DataError(problem, "Remove both; the first line names them, too.")
        if len(cells) != len(self._columns):
            reason = f"it has {len(cells):,} cells, but the header has {len(self._columns):,}"
            raise _broken(f"{place} of {self._name}", reason)
        return dict(zip(self._columns, cells, strict=True))

    def _cells(self, row: bytearray, place: str) -> list[str]:
        try:
            return next(csv.reader([row.decode()], delimiter=self._delimiter, strict=True))
        except csv.Error:
            reason = "a quote is not doubled or not closed, or a line ends in CR alone"
            raise _broken(f"{place} of {self._name}", reason) from None

    def divides_text(self, values: dict[str, str]) -> bool:
        """True if the cell behind a text begins with a blank, as prose does behind a comma, but its column does not."""
        if self._delimiter == "\t":
            return False
        for column, following in itertools.pairwise(self._columns):
            is_text = column in self._text_fields
            if is_text and values.get(following, "").startswith(" ") and not following.startswith(" "):
                return True
        return False

    def joins_rows(self, row: bytearray) -> bool:
        """True if lines of a row would be rows without quotes. A comma before a blank or line end is punctuation."""
        n_columns, delimiter = len(self._columns), self._delimiter.encode()
        is_prose = b"\n" if delimiter == b"\t" else delimiter + b" "
        lines = (line.replace(b'"', b"").rstrip(b"\r\n") + b" " for line in io.BytesIO(row))
        return n_columns > 1 and all(line.count(delimiter) == n_columns - 1 and is_prose not in line for line in lines)


def numbered_lines(portions: Portions, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Lines without line ends, and their numbers from 1; None for a pause. `DataError` if a line is too long."""
    held, number = bytearray(), 1
    for portion in portions:
        if portion is None:
            yield number, None
            continue
        for line in io.BytesIO(portion):
            held += line
            if len(held) > documents.LONGEST_LINE + 1:
                problem = f"line {number} of {name} has more than {documents.LONGEST_LINE >> 20} MiB."
                raise DataError(problem, "Divide it into documents, or use --binary to read its raw bytes.")
            if line.endswith(b"\n"):
                yield number, bytes(held[:-1])
                number += 1
                held.clear()
    if held:
        yield number, bytes(held)


def _delimiter(row: bytearray, text_fields: Sequence[str]) -> str:
    """Tab, comma or semicolon: what divides the first row into cells with these names, else into most cells."""
    line = re.sub("[\r\n]", " ", row[: documents.LONGEST_LINE].decode(errors="replace").rstrip("\r\n"))
    cells = {delimiter: next(csv.reader([line], delimiter=delimiter), []) for delimiter in "\t,;"}
    return max(cells, key=lambda delimiter: ({*text_fields} <= {*cells[delimiter]}, len(cells[delimiter])))


def require_columns(text_fields: Sequence[str], texts: Sequence[str], columns: Sequence[str], place: str) -> None:
    """`DataError` if one of `text_fields` is not among `texts`, the columns of text, or `columns` has a name twice."""
    for field in text_fields:
        if field not in texts:
            raise _missing_column(field, texts, columns, place)
    for name, times in Counter(columns).most_common():
        if times > 1 and name:  # columns without a name get different ones
            raise DataError(f"{place} names {times:,} columns '{name[:99]}'.", "Give each a different name.")


def _missing_column(field: str, texts: Sequence[str], columns: Sequence[str], place: str) -> DataError:
    """The error for a table without this column of text: its first line may be a comment, or data."""
    if columns and columns[0].startswith("#"):
        remedy = f"Remove the comments; if no line has the names of the columns, write one.{_PCIBEX}"
        return DataError(f"{place} is a comment, not the names of the columns.", remedy)
    if any(map(_DATA.fullmatch, columns)):
        remedy = f"Add a line above it with a name for each of its {len(columns):,} columns.{_PCIBEX}"
        return DataError(f"{place} seems to be data, not the names of the columns: {named(columns)}.", remedy)
    remedy = f"Name one of its columns: {named(texts) or 'none'}."
    remedy += f" If these are no names, write a line with {field} above."
    return DataError(f"{place} has no text column '{field}'.", remedy)


def _broken(place: str, reason: str) -> DataError:
    remedy = 'Write a cell with quotes as "a ""quoted"" cell"; in R: row.names = FALSE, qmethod = "double".'
    return DataError(f"{place} is not a row of the table: {reason}.", remedy)
