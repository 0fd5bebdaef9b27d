"""Lists of tokens, words and pairs: a table with a header, or JSON lines, with the other columns of the input first."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from xlcli.cli.outputs import FileSink
from xlcli.cli.render import Screen
from xlcli.cli.report import fields, text_object, to_json
from xlcli.errors import named
from xlcli.events import Done, Row, Scored, StoppedEarlyError, TokenScore

DIGITS = 4
"""Decimals of bits in a table."""


class Table:
    """Lines of a list, one for each event but rows, whose columns precede those of the events after them.

    A table has the columns of the first row. A column of the input that is called as one of the events gets `input_`
    before its name. Tokens are JSON.

    Args:
        warn: Called once if a later row has other columns.
        path: File of the list: JSON lines in .jsonl, CSV in .csv, else TSV.
        json: JSON lines instead of TSV, unless in .tsv.
        continued: An earlier process has written the header.
    """

    def __init__(self, warn: Callable[[str], None], path: str, *, json: bool, continued: bool = False) -> None:
        self.json = path.endswith(".jsonl") or (json and not path.endswith((".tsv", ".csv")))
        self._dialect = "excel" if path.endswith(".csv") else "excel-tab"
        self._warn, self._continued = warn, continued
        self._row: Mapping[str, Any] = {}
        self._columns: list[str] = []
        self._left_out: set[str] = set()

    def line(self, event: Scored) -> str:
        """The line of an event, after the header if it is the first one; nothing for a row."""
        if isinstance(event, Row):
            self._row = event.fields
            return ""
        if isinstance(event, TokenScore):
            return to_json(text_object(event)) + "\n"
        own, values = fields(event), dict[str, Any]()
        for name, value in self._row.items():
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
            self._warn(f"columns that the first row does not have are left out: {names}; JSON lines keep them")
        rows.append([_cell(values.get(name)) for name in self._columns])
        lines = ""
        for row in rows:
            line = io.StringIO()
            csv.writer(line, self._dialect).writerow(row)  # quotes a CR only because it ends lines with CR LF
            lines += line.getvalue().removesuffix("\r\n") + "\n"
        return lines


class Listing(FileSink):
    """Prints the lines of events of some classes, or writes them; a regular file only once the list is whole."""

    def __init__(self, table: Table, path: str, screen: Screen, kinds: tuple[type[Scored], ...]) -> None:
        super().__init__(path, lambda line: screen.print(line.decode("utf-8", "surrogateescape"), json=table.json))
        self._table, self._screen, self._kinds = table, screen, kinds

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


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else to_json(value)
