"""Tables and texts that fit the width of a terminal: cells are shortened, columns left out, lines wrapped."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from xlcli.cli.terminal import visible

_GAP = "  "


def cells(text: str) -> int:
    """Number of terminal cells of a text without control characters."""
    return sum(_cells(character) for character in text)


def shorten(text: str, width: int) -> str:
    """A text of at most `width` cells: an ellipsis replaces its middle."""
    if cells(text) <= width:
        return text
    tail = _clip(text[::-1], (width - 1) // 2)[::-1]
    return _clip(text, max(width - 1 - cells(tail), 0)) + "…" + tail


def fitted(
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    flexible: Mapping[str, int],
    optional: Sequence[str] = (),
    right: Collection[str] = (),
) -> str:
    """Aligned columns, heading first.

    Args:
        rows: Heading and rows.
        width: Number of cells of a line; None leaves all cells as they are.
        flexible: Headings of columns that may be shortened, with their minimum widths.
        optional: Headings of columns that may be left out if minimum widths do not suffice, in that order.
        right: Headings of columns that are flush right.
    """
    rows = [[visible(cell).replace("\n", " ") for cell in row] for row in rows] if width is not None else rows
    heading = rows[0]
    columns = list(range(len(heading)))
    widths = [max(cells(row[i]) for row in rows) for i in columns]
    if width is not None:
        least = [min(widths[i], flexible.get(heading[i], widths[i])) for i in columns]
        for name in optional:
            if _total([least[i] for i in columns]) > width:
                columns.remove(heading.index(name))
        while _total([widths[i] for i in columns]) > width:
            widest = max(columns, key=lambda i: widths[i] - least[i])
            if widths[widest] == least[widest]:
                break
            widths[widest] -= 1
    lines = []
    for row in rows:
        shown = [(shorten(row[i], widths[i]), widths[i] if heading[i] in right else -widths[i]) for i in columns]
        lines.append(_GAP.join(_aligned(text, size) for text, size in shown).rstrip())
    return "\n".join(lines) + "\n"


def definitions(rows: Sequence[tuple[str, str]], width: int | None) -> str:
    """Names and their texts in two columns; texts are wrapped at `width` cells, if it is given."""
    left = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        wrapped = [text] if width is None else textwrap.wrap(text, max(width - left - len(_GAP), 20)) or [""]
        labels = [name, *[""] * (len(wrapped) - 1)]
        lines += [f"{label:{left}}{_GAP}{line}" for label, line in zip(labels, wrapped, strict=True)]
    return "\n".join(lines) + "\n"


def wrapped(text: str, width: int | None) -> str:
    """A text whose long lines are broken between words; None leaves it as it is.

    A line continues under its beginning, or under its value if it begins with a label and two blanks. Commands are not
    broken, so that they can be copied.
    """
    if width is None:
        return text
    return "\n".join(_wrap(line, width) for line in text.split("\n"))


def _wrap(line: str, width: int) -> str:
    if cells(line) <= width or line.lstrip().startswith("xlcli "):
        return line
    label = re.match(r" *(?:\S+ {2,}(?=\S)|xlcli: )?", line)
    indent = len(label[0]) if label and len(label[0]) <= width // 2 else 0
    head, rest = line[:indent], line[indent:]
    lines = textwrap.wrap(rest, max(width - indent, 20), break_long_words=False, break_on_hyphens=False)
    return head + ("\n" + " " * indent).join(lines)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _clip(text: str, width: int) -> str:
    """Longest beginning of a text of at most `width` cells."""
    used = 0
    for i, character in enumerate(text):
        used += _cells(character)
        if used > width:
            return text[:i]
    return text


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _aligned(text: str, width: int) -> str:
    """Text padded to `width` cells: flush right, or flush left if `width` is negative."""
    padding = " " * (abs(width) - cells(text))
    return padding + text if width > 0 else text + padding
