"""Lists of tokens, words and pairs: TSV with a header, or JSON lines, with the other columns of the input first."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

from xlcli.cli.report import fields, text_object, to_json
from xlcli.events import PairScore, Row, TokenScore, WordScore

DIGITS = 6
"""Decimals of numbers in TSV."""


class Table:
    """Lines of a list, one for each event but rows, whose columns precede those of the events behind them.

    TSV has the columns of the first row. Tokens are JSON.

    Args:
        warn: Called once if a later row has others.
        path: File of the list; its name may end in .jsonl or .tsv.
        json: JSON lines instead of TSV in a file of another name.

    Attributes:
        json: Whether lines are JSON.
    """

    def __init__(self, warn: Callable[[str], None], path: str, *, json: bool) -> None:
        self.json = path.endswith(".jsonl") or (json and not path.endswith(".tsv"))
        self._warn = warn
        self._left_out = False
        self._row: Mapping[str, Any] = {}
        self._columns: list[str] = []

    def line(self, event: TokenScore | Row | WordScore | PairScore) -> str:
        """The line of an event, behind the header if it is the first one; nothing for a row."""
        if isinstance(event, Row):
            self._row = event.fields
            return ""
        if isinstance(event, TokenScore):
            return to_json(text_object(event)) + "\n"
        own = fields(event)
        values = {f"input_{name}" if name in own else name: value for name, value in self._row.items()} | own
        if self.json:
            return to_json(values) + "\n"
        header = "" if self._columns else _line(list(values))
        self._columns = self._columns or list(values)
        unknown = values.keys() - set(self._columns)
        if unknown and not self._left_out:
            self._left_out = True
            self._warn(f"'{min(unknown)}', which only some rows have, is left out; JSON lines keep it")
        return header + _line([_cell(values.get(name)) for name in self._columns])


def _line(cells: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, "excel-tab", lineterminator="\n").writerow(cells)
    return line.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{round(value, DIGITS) + 0.0:.{DIGITS}f}"
    return value if isinstance(value, str) else "" if value is None else to_json(value)
