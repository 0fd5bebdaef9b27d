"""Marks around regions in the texts of rows, such as `The cat *was* here.`: removed as the rows are read."""

from __future__ import annotations

import re

from xlcli.errors import DataError, shortened
from xlcli.text.documents import Document, Portions

EXCERPT = 80  # number of characters of a text that an error shows


def without_marks(portions: Portions, name: str, marks: str) -> Portions:
    """The portions of a text. Its documents lack the marks around their regions, which are kept as places.

    `marks` are one character, or two: before and behind a region. Equal ones in a row count as one: `**was**`.
    `DataError` if regions of a row overlap or do not end, or the text has no rows.
    """
    n_rows = 0
    for portion in portions:
        if isinstance(portion, Document):
            n_rows += 1
            try:
                yield _unmarked(portion, marks[0], marks[-1])
            except ValueError:
                shown = shortened(portion.decode().strip(), EXCERPT)
                problem = f"row {n_rows:,} of {name} does not have {marks[0]} before and {marks[-1]} behind each region"
                raise DataError(f"{problem}: '{shown}'.", "Correct its marks; regions cannot be nested.") from None
        elif portion:
            problem = f"{name} is read as plain text, and only rows have regions."
            raise DataError(problem, "Write one text per row, below the name of a column, and add --text-field NAME.")
        else:
            yield portion


def _unmarked(document: Document, opening: str, closing: str) -> Document:
    """A document without marks, with its regions; `ValueError` if one begins within another, or has one mark only."""
    text = bytearray()
    edges: list[int] = []  # where regions begin and end, by turns
    plain = document.decode().replace("\r\n", "\n")  # which would move the edges later
    for piece in re.split(f"({re.escape(opening)}+|{re.escape(closing)}+)", plain):
        is_inside = len(edges) % 2 == 1
        wanted = closing if is_inside else opening
        if piece.startswith(wanted):
            edges.append(len(text))
        elif piece.startswith((opening, closing)):
            raise ValueError
        else:
            text += piece.encode()
    if len(edges) % 2 == 1:
        raise ValueError
    return Document(bytes(text), document.fields, [*zip(edges[::2], edges[1::2], strict=True)])
