"""Rows of plain lines: what a regular expression finds in them, for streams."""

from __future__ import annotations

import re
from typing import Any

from xlcli.text.documents import LINE_TEXT, LineRow, Notice, Place, Portions, Rows
from xlcli.text.table_rows import numbered_lines

_CONTAINER = re.compile(rb"\d{4}-\d\d-\d\dT\S+ (?P<stream>stdout|stderr) (?P<tag>[FP])(?::\S*)? ")
"""Beginning of a line of a container in Kubernetes (CRI): its time, stream, and whether it is full or a part."""

_COLOR = re.compile(rb"\x1b\[[0-9;:]*[mK]")  # an escape sequence that colors the text behind it, or the rest of a line
_PATIENCE = 50  # lines without an event; more than most stack traces have, in which a stream may begin


class EventStart:
    """Says which lines begin an event. Warns once if none of the first lines does, since they are all one event then.

    Colors are no part of what `pattern` (of `compile_pattern`) is matched with, though they stay in the text.
    """

    def __init__(self, pattern: Any, warn: Notice) -> None:
        self._pattern = pattern
        self._warn = warn
        self._n_lines = 0
        self._has_matched = False

    def search(self, line: bytes) -> Any:
        """The match of a line, or None, as of a pattern; each line is to be searched once."""
        match = self._pattern.search(_COLOR.sub(b"", line))
        self._n_lines += 1
        self._has_matched = self._has_matched or match is not None
        if self._n_lines == _PATIENCE and not self._has_matched:
            self._warn(f"none of the first {_PATIENCE} lines matches --event-start, so they are one event")
        return match


def line_rows(portions: Portions, name: str, text_regex: Any = None, event_start: Any = None) -> Rows:
    r"""Lines as rows: the named groups of `text_regex`, null without a match, else the whole line as `text`.

    Both patterns are of RE2. A line that does not match `event_start` continues an event, as a whole if it does not
    match `text_regex` either; any other line without that match is a `ValueError`. `DataError` if a line has more than
    `LONGEST_LINE` bytes.
    Example: with (?P<level>\w+) (?P<text>.*), `WARN disk full` is {"level": "WARN", "text": "disk full"}.
    """
    names: list[bytes] = []
    if text_regex is not None:
        names = sorted(text_regex.groupindex, key=text_regex.groupindex.get)
    for number, data in numbered_lines(portions, name):
        if data is None:
            yield None
            continue
        text = data.removesuffix(b"\r").decode(errors="replace")
        line = text.encode()
        place = Place("line", number)
        continues = event_start is not None and event_start.search(line) is None
        match = text_regex.search(line) if text_regex is not None else None
        groups: dict[str, str | None] = {LINE_TEXT: text}
        if match is not None:
            groups = {}
            for group in names:
                value = match[group]
                groups[group.decode()] = None if value is None else value.decode()
        elif text_regex is not None and not continues:
            yield place, ValueError("it does not match --text-regex")
            continue
        row = LineRow(groups, continues=continues)
        container = _CONTAINER.match(line)
        if container is not None:
            row.stream = container["stream"].decode()
            # Whole lines are not joined, since the prefix of the next one would be within the text.
            row.is_part = match is not None and container["tag"] == b"P"
        yield place, row
