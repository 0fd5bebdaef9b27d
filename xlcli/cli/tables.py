"""Lists of tokens, words and pairs: a table with a header, or JSON lines, with the other columns of the input first."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from xlcli.cli.objects import fields, text_object, to_json
from xlcli.cli.outputs import LIST, FileSink
from xlcli.cli.render import Screen
from xlcli.errors import DataError, named
from xlcli.events import Done, Row, Scored, StoppedEarlyError, TokenScore
from xlcli.files import cache_folder

DIGITS = 4
"""Decimals of bits in a table."""
PLACES = ("document", "row", "line", "number", "byte", "word", "text", "base64", "pair")
"""Columns that are no scores."""


def form_of(path: str, *, json: bool) -> str:
    """The lines of a list: the suffix of its file; that of a pipe or of standard output is JSON lines or TSV."""
    suffix = PurePath(path).suffix.lower()
    if suffix in LIST.suffixes:
        return suffix.removeprefix(".")
    return "jsonl" if json else "tsv"


class Table:
    """Lines of a list, one for each event but rows, whose columns precede those of the events after them.

    A table has the columns of the first row. A column of the input that is called as one of the events gets `input_`
    before its name.

    Args:
        warn: Called once if a later row has other columns.
        form: `jsonl`, `csv` or `tsv`.
        continued: An earlier process has written the header.
    """

    def __init__(self, warn: Callable[[str], None], form: str, *, continued: bool = False) -> None:
        self.json, self._dialect = form == "jsonl", "excel" if form == "csv" else "excel-tab"
        self._warn, self._continued = warn, continued
        self._row: Mapping[str, Any] = {}
        self._columns: list[str] = []
        self._left_out: set[str] = set()

    def line(self, event: Scored) -> str:
        """The line of an event, after the header if it is the first one; nothing for a row."""
        if isinstance(event, Row):
            self._row = event.fields
            return ""
        return self.row(self._row, _own(event))

    def row(self, fields: Mapping[str, Any], own: dict[str, Any]) -> str:
        """The line of these columns of the input and of an event."""
        values = dict[str, Any]()
        for name, value in fields.items():
            while name in own or name in values:
                name = f"input_{name}"
            values[name] = value
        if self.json:
            return to_json(values | own) + "\n"
        own = {name: f"{value:.{DIGITS}f}" if isinstance(value, float) else value for name, value in own.items()}
        values |= own
        rows = [] if self._columns or self._continued else [list(values)]
        self._columns = self._columns or list(values)
        if not self._left_out and (unknown := values.keys() - self._columns):
            self._left_out = unknown
            names = named(sorted(unknown))
            self._warn(f"columns missing in the first row are left out: {names}; .jsonl output keeps them")
        rows.append([_cell(values.get(name)) for name in self._columns])
        lines = ""
        for row in rows:
            line = io.StringIO()
            csv.writer(line, self._dialect).writerow(row)  # quotes a CR only because it ends lines with CR LF
            lines += line.getvalue().removesuffix("\r\n") + "\n"
        return lines


class Listing(FileSink):
    """Prints the lines of events of some classes, or writes them; a regular file only once the list is whole."""

    def __init__(self, path: str, form: str, screen: Screen, kinds: tuple[type[Scored], ...]) -> None:
        super().__init__(path, lambda line: screen.print(line.decode("utf-8", "surrogateescape"), json=form == "jsonl"))
        self._table, self._screen, self._kinds = Table(partial(screen.say, level="warning"), form), screen, kinds

    def add(self, event: Any) -> None:
        """Adds a line; `Done` puts the file in its place."""
        if isinstance(event, Done):
            self.save()
        elif isinstance(event, self._kinds):
            self.write(self._table.line(event).encode("utf-8", "surrogateescape"))

    def close(self) -> None:
        """Warns that a regular file was not written."""
        if not self.is_saved:
            with suppress(StoppedEarlyError), self._file:
                raise StoppedEarlyError
            self._screen.not_written(self.name)


class JoinedListing(Listing):
    """The list of the scores of several models, in columns `bits_NAME`; those of each wait in a file for the last.

    Raises:
        DataError: The models have divided the text into other words.
    """

    def __init__(self, *listing: Any, names: Sequence[str]) -> None:
        super().__init__(*listing)
        self._names, self._n_done = names, 0
        files = (tempfile.TemporaryFile(dir=cache_folder()) for _ in names)  # noqa: SIM115
        self._waiting = [*map(self._file.enter_context, files)]
        self._row: Mapping[str, Any] = {}

    def add(self, event: Any) -> None:
        """Keeps a line; the last `Done` puts the file in its place."""
        if isinstance(event, Done):
            self._n_done += 1
            if self._n_done == len(self._names):
                self._join()
                self.save()
        elif isinstance(event, Row):
            self._row = event.fields
        elif isinstance(event, self._kinds):
            self._waiting[self._n_done].write(to_json([self._row, _own(event)]).encode() + b"\n")

    def _join(self) -> None:
        for file in self._waiting:
            file.seek(0)
        for lines in zip_longest(*self._waiting, fillvalue=b"[{}, {}]"):
            rows, owns = zip(*map(json.loads, lines), strict=True)
            places = [{name: value for name, value in own.items() if name in PLACES} for own in owns]
            if any(place != places[0] for place in places):
                at = places[0].get("byte", "the end")
                raise DataError(f"the models have different words from byte {at} on.", "List each by itself: -m NAME.")
            joined = places[0]
            for name, own in zip(self._names, owns, strict=True):
                joined |= {f"{key}_{name}": value for key, value in own.items() if key not in PLACES}
            self.write(self._table.row(rows[0], joined).encode("utf-8", "surrogateescape"))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in CSV whose columns are the keys of the first row; numbers are not rounded."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(rows[0])
    table.writerows([_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()


def _own(event: Scored) -> dict[str, Any]:
    """The columns of an event."""
    if isinstance(event, TokenScore):
        return text_object(event)
    return fields(event, "columns") | getattr(event, "columns", {})


def _cell(value: Any) -> str:
    is_empty = value is None or (isinstance(value, float) and not math.isfinite(value))
    return value if isinstance(value, str) else "" if is_empty else to_json(value)
