"""Lists of tokens, words and pairs as tables, JSON lines or Parquet, with the other columns of the input first."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

from xlcli.cli.objects import fields, text_object, to_json
from xlcli.cli.outputs import LIST, Sink, output_file
from xlcli.cli.parquet import parquet_file
from xlcli.cli.render import Screen
from xlcli.errors import DataError, named
from xlcli.events import DocumentScore, Done, Row, Scored, StoppedEarlyError, TokenScore
from xlcli.files import cache_folder

DIGITS = 4  # decimals of bits in a table
LARGE = 1e15  # number from which on decimals say nothing, such as the perplexity of a text in another script
PLACES = (  # columns that are no scores
    *("document", "row", "line", "number", "byte", "word", "text", "base64", "pair", "region", "words"),
    *("length", "last"),
)
_OF_TEXT = re.compile(r"(previous_\d+_)?(length|frequency)")  # further columns that no model decides
_BREAKS_CELLS = re.compile(r"[\0\t\r\n]")  # for readers that know no quotes, or no NUL
_ILLEGAL = re.compile(r"[^\w.]")  # in the name of a column of R


def form_of(path: str, *, json: bool) -> str:
    """The lines of a list: the suffix of its file; that of a pipe or of standard output is JSON lines or TSV."""
    suffix = PurePath(path).suffix.lower()
    if suffix in LIST.suffixes:
        return suffix.removeprefix(".")
    return "jsonl" if json else "tsv"


class Table:
    """Lines of a list, one for each event but rows, whose columns precede those of the events after them.

    A table has the columns of the first row. A text of an event with a tab or a line end is a JSON string in it. A
    column of the input that is called as one of the events gets `input_` before its name.

    The form is `jsonl`, `csv`, `tsv`, or `parquet`, whose lines are JSON for `parquet_file`. `warn` is called once if a
    later row has other columns. `continued`: an earlier process has written the header.
    """

    def __init__(self, warn: Callable[[str], None], form: str, *, continued: bool = False) -> None:
        self.json = form in ("jsonl", "parquet")
        self._dialect = "excel" if form == "csv" else "excel-tab"
        self._warn, self._continued = warn, continued
        self._row: Mapping[str, Any] = {}
        self._columns: list[str] = []
        self._has_warned = False

    def line(self, event: Scored) -> str:
        """The line of an event, after the header if it is the first one; nothing for a row."""
        if isinstance(event, Row):
            self._row = event.fields
            return ""
        return self.row(self._row, event_columns(event))

    def row(self, fields: Mapping[str, Any], columns: dict[str, Any]) -> str:
        """The line of these columns of the input and of an event: {"a": 1}, {"a": 2} has `input_a` and `a`."""
        values = beside(fields, columns)
        if self.json:
            return to_json(values | columns) + "\n"
        for name, value in columns.items():
            values[name] = _rounded(value)
        header = ""
        if not self._columns:
            self._columns = list(values)
            if not self._continued:
                header = self._line(self._columns)
        left_out = sorted(values.keys() - self._columns)
        if left_out and not self._has_warned:
            self._has_warned = True
            self._warn(f"columns missing in the first row are left out: {named(left_out)}; .jsonl output keeps them")
        return header + self._line([_cell(values.get(name)) for name in self._columns])

    def _line(self, cells: Sequence[str]) -> str:
        line = io.StringIO()
        csv.writer(line, self._dialect).writerow(cells)  # quotes a CR only because it ends lines with CR LF
        return line.getvalue().removesuffix("\r\n") + "\n"


def _rounded(value: Any) -> Any:
    """A value of an event for a table: bits are rounded, and a text that would break its cell is a JSON string."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}f}" if value < LARGE else f"{value:.6g}"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str) and _BREAKS_CELLS.search(value):
        return to_json(value)
    return value


def beside(fields: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the input that stand beside these columns: `a` is called `input_a` if there is a column `a`."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        while name in columns or name in values:  # no field of the input is lost
            name = f"input_{name}"
        values[name] = value
    return values


class Listing(Sink):
    """Prints lines of events of some classes, or writes them to a file, in its place once whole, after `Done`."""

    def __init__(self, path: str, form: str, screen: Screen, kinds: tuple[type[Scored], ...]) -> None:
        self._path, self._screen, self._kinds = path, screen, kinds
        self._table = Table(partial(screen.say, level="warning"), form)
        self._file = ExitStack()  # ends the file: without an exception it comes into its place
        self._is_saved = path == "-"
        self._write: Callable[[bytes], object] | None = None
        if path != "-":
            opened = output_file(Path(path))
            if form == "parquet":
                opened = parquet_file(Path(path))
            self._write = self._file.enter_context(opened)

    def add(self, event: Any) -> None:
        if isinstance(event, Done):
            self._save()
        elif isinstance(event, self._kinds):
            self._write_line(self._table.line(event))

    def _write_line(self, line: str) -> None:
        if self._write is None:
            self._screen.print(line, json=self._table.json)
        else:
            self._write(line.encode("utf-8", "surrogateescape"))

    def _save(self) -> None:
        self._file.close()
        self._is_saved = True

    def close(self) -> None:
        if not self._is_saved:
            with suppress(StoppedEarlyError), self._file:
                raise StoppedEarlyError  # a regular file is not replaced by a part of a list
            self._screen.not_written(self._path)

    def discard(self) -> None:
        self._file.__exit__(*sys.exc_info())


class JoinedListing(Listing):
    """The list of the scores of several models in columns `bits_NAME`; `DataError` if their words differ."""

    def __init__(
        self, path: str, form: str, screen: Screen, kinds: tuple[type[Scored], ...], names: Sequence[str]
    ) -> None:
        super().__init__(path, form, screen, kinds)
        self._suffixes = legal_names(names)
        self._n_done = 0  # models whose text is scored
        self._row: Mapping[str, Any] = {}
        self._waiting = []
        for _ in names:
            file = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115
            self._waiting.append(self._file.enter_context(file))

    def add(self, event: Any) -> None:
        if isinstance(event, Done):
            self._n_done += 1
            if self._n_done == len(self._suffixes):
                self._join()
                self._save()
        elif isinstance(event, Row):
            self._row = event.fields
        elif isinstance(event, self._kinds):
            columns = event_columns(event)
            equal = (*PLACES, "bytes", "characters") if isinstance(event, DocumentScore) else PLACES  # for all models
            of_text = dict.fromkeys([*equal, *filter(_OF_TEXT.fullmatch, columns)])
            places = {key: columns.pop(key) for key in of_text if key in columns}
            self._waiting[self._n_done].write(to_json([self._row, places, columns]).encode() + b"\n")

    def _join(self) -> None:
        """Writes the lines that wait: {"word": 1, "bits": 2.0} of each model are {"word": 1, "bits_a": 2.0, ...}."""
        for file in self._waiting:
            file.seek(0)
        for lines in zip_longest(*self._waiting, fillvalue=b"[{}, {}, {}]"):
            row, places, _ = json.loads(lines[0])
            joined = dict(places)
            for suffix, line in zip(self._suffixes, lines, strict=True):
                _, own_places, columns = json.loads(line)
                if own_places != places:
                    reason = f"tokens of the models divide words differently at byte {places.get('byte', '(end)')}."
                    raise DataError(reason, "List each model by itself (-m NAME), or whole rows: --documents FILE.tsv.")
                for key, value in columns.items():
                    joined[f"{key}_{suffix}"] = value
            self._write_line(self._table.row(row, joined))


def legal_names(names: Sequence[str]) -> list[str]:
    """Names of models as they can end the name of a column in R: letters, digits, dots and underscores.

    ["my-model", "my_model"] become ["my_model_2", "my_model"]: legal names stay, and equal ones get a number.
    """
    taken = {name for name in names if _ILLEGAL.search(name) is None}
    legal = []
    for name in names:
        if name not in taken:
            plain = _ILLEGAL.sub("_", name)
            name, number = plain, 1
            while name in taken:
                number += 1
                name = f"{plain}_{number}"
            taken.add(name)
        legal.append(name)
    return legal


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in CSV whose columns are the keys of the first row; numbers are not rounded."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(rows[0])
    table.writerows([_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()


def event_columns(event: Scored) -> dict[str, Any]:
    if isinstance(event, TokenScore):
        return text_object(event)
    return fields(event, "columns") | getattr(event, "columns", {})


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return to_json(value)
