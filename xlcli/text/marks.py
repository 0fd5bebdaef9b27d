"""Marks around regions in the texts of rows, such as `The cat *was* here.`: removed as the rows are read."""

from __future__ import annotations

import re

from xlcli.errors import DataError, shortened
from xlcli.text.documents import Document, Portions

EXCERPT = 80
"""Number of characters of a text that an error shows."""


def without_marks(portions: Portions, name: str, marks: tuple[str, str]) -> Portions:
    """The portions of a text, whose documents lack the marks before and behind their regions, which are kept as places.

    Raises:
        DataError: The marks of a row are not balanced or nested, a region is empty, or the text has no rows.
    """
    n_rows = 0
    for portion in portions:
        if isinstance(portion, Document):
            n_rows += 1
            try:
                yield _unmarked(portion, marks)
            except ValueError as error:
                shown = shortened(portion.decode().strip(), EXCERPT)
                problem = f"the marks in row {n_rows:,} of {name} are no regions, because {error}: '{shown}'."
                remedy = f"Write {marks[0]} before and {marks[1]} behind each region."
                raise DataError(problem, remedy) from None
        elif portion:
            problem = f"{name} is read as plain text, and only rows have regions."
            raise DataError(problem, "Write one text per row, below the name of a column, and add --text-field NAME.")
        else:
            yield portion


def _unmarked(document: Document, marks: tuple[str, str]) -> Document:
    """A document without marks, with the places of its regions; `ValueError` if they are not one after the other."""
    opening, closing = marks
    text = bytearray()
    regions: list[tuple[int, int]] = []
    start = None  # of the region that is open
    # CR LF, which would be read as LF later, would move the places.
    plain = document.decode().replace("\r\n", "\n")
    for piece in re.split(f"({re.escape(opening)}|{re.escape(closing)})", plain):
        if piece == closing and start is not None:
            if not text[start:].strip():
                raise ValueError("one is empty")
            regions.append((start, len(text)))
            start = None
        elif piece == opening and start is None:
            start = len(text)
        elif piece == opening:
            raise ValueError("one begins within another")
        elif piece == closing:
            raise ValueError("one ends that has not begun")
        else:
            text += piece.encode()
    if start is not None:
        raise ValueError("one does not end")
    return Document(bytes(text), document.fields, regions)
