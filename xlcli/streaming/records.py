"""The records of a stream whose text comes in rows: what is known of each until it is output."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import Any

from xlcli.store.state_files import RecordPosition, StreamPosition
from xlcli.text.documents import Document


class Records:
    """Records of the text that has arrived, from the first one that was not output yet. Others have none."""

    def __init__(self, position: StreamPosition, *, has_events: bool) -> None:
        self.waiting = deque(position.records)  # these records, in order
        self.input_line = position.input_line  # line of the input at which the last row that arrived begins
        # Number of these and of all others that have arrived in this run, with text.
        self.n_begun = len(self.waiting)
        self.n_skipped = 0  # number of lines of the input that were skipped in this run: they have no text
        self.stream = position.stream  # stream of the container that wrote the last row, or None
        self.unfinished = position.unfinished  # this stream if its line goes on in a later row, else None
        self._last_skipped = 0  # line of the input
        self._has_events = has_events
        self.end = 0  # offset of the end of the text that has arrived

    def count(self, document: Document) -> None:
        """Takes note of the place of a row in the input; one without text is skipped."""
        self.input_line = document.line
        if document:
            self.stream = document.stream
            self.unfinished = document.unfinished
        elif document.line != self._last_skipped:  # a broken line may have several values
            self._last_skipped = document.line
            self.n_skipped += 1

    def begin(self, start: int, document: Document) -> None:
        """Adds the record of a document whose text begins at this byte."""
        row = document.row or {**document.fields, document.key: document.decode(errors="replace").removesuffix("\n")}
        as_json = json.dumps(row, default=str)
        self.waiting.append(RecordPosition(start, self.input_line, as_json, document.key))

    def join(self, document: Document) -> None:
        """Takes note that the text of a row was added to the last record."""
        ends_line = str(document.row[document.key]).endswith("\n")
        self.waiting.append(replace(self.waiting.pop(), is_joined=True, ends_line=ends_line))

    def covers(self, byte: int) -> bool:
        """True if the text that ends at this byte is of a record."""
        return bool(self.waiting) and self.waiting[0].start < byte

    def ends_at(self, byte: int) -> bool:
        """True if the first record ends at a line end before this byte, and nothing can be added to it."""
        if len(self.waiting) > 1:
            return byte >= self.waiting[1].start
        return byte >= self.end and not self._has_events


def fields_of(record: RecordPosition, text: bytes) -> dict[str, Any]:
    """The fields of a record, whose text is as it came, or `text` if it came in several rows."""
    fields: dict[str, Any] = json.loads(record.row, parse_constant=str)  # NaN, Infinity: JSON has no such numbers
    if record.is_joined:
        whole = text.decode(errors="replace")
        fields[record.key] = whole if record.ends_line else whole.removesuffix("\n")
    return fields
