"""Lists of tokens, words and pairs: a table with a header, or JSON lines, with the other columns of the input first."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from xlcli.cli.outputs import Sink, output_file
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


class Listing(Sink):
    """Prints the lines of events of some classes, or writes them; a regular file only once the list is whole.

    `path` is a file, or `-` or None for standard output.
    """

    def __init__(self, table: Table, path: str | None, screen: Screen, kinds: tuple[type[Scored], ...]) -> None:
        self._table, self._path, self._screen, self._kinds = table, path, screen, kinds
        self._file = ExitStack()
        self._is_open = path not in (None, "-")
        if self._is_open:
            self._write = self._file.enter_context(output_file(Path(str(path))))

    def add(self, event: Any) -> None:
        """Adds a line; `Done` puts the file in its place."""
        if isinstance(event, Done):
            self._file.close()
            self._is_open = False
        elif isinstance(event, self._kinds):
            line = self._table.line(event)
            if self._is_open:
                self._write(line.encode())
            else:
                self._screen.print(line, json=self._table.json)

    def close(self) -> None:
        """Warns that a regular file was not written."""
        if self._is_open:
            with suppress(StoppedEarlyError), self._file:
                raise StoppedEarlyError
            self._screen.not_written(str(self._path))

    def discard(self) -> None:
        """Removes what was written."""
        self._file.__exit__(*sys.exc_info())


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else to_json(value)
