"""Text for a terminal: made safe, in tables, and in lines that fit its width. The only file that imports rich.

Control characters of a text would act on a terminal, and are escaped (`xlcli.markup`).
Each character is replaced independently, so a sequence split over two calls is harmless too. Output to a pipe is exact.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO

from xlcli.markup import BIDI_CONTROLS, SEPARATORS, visible

QUOTATION = 200  # maximum length of a quotation in characters
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *BIDI_CONTROLS, *SEPARATORS)}


def visible_json(text: str) -> str:
    """JSON with control characters escaped as in JSON, so that its value does not change."""
    return text.translate(_JSON_ESCAPES)


def one_line(text: str) -> str:
    """At most `QUOTATION` characters of `text`, control characters escaped: for a quotation inside a sentence."""
    if len(text) > QUOTATION:
        text = text[:QUOTATION] + "..."
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def columns(stream: TextIO) -> int | None:
    """Width of a terminal in cells, `COLUMNS` if it is set; None if the stream is no terminal."""
    if not stream.isatty():
        return None
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdigit():
        return int(wanted)
    return os.get_terminal_size(stream.fileno()).columns


def clipped(text: str, width: int) -> str:
    """A line of at most `width` cells: an ellipsis replaces its end."""
    from rich.text import Text

    shown = Text(text)
    shown.truncate(width, overflow="ellipsis")
    return shown.plain


def table(
    rows: Sequence[Sequence[str]], width: int | None = None, *, left: Collection[int] = (0,), clip: bool = False
) -> str:
    """Aligned columns in lines of `width` cells, or of as many as needed; control characters are escaped.

    The columns of texts, by number, are flush left; they are broken if they do not fit, or shortened to `clip` them.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    has_short_names = clip and max(len(row[0]) for row in rows) <= (width or 0) // 3
    for i in range(len(rows[0])):
        if i not in left:
            grid.add_column(justify="right", no_wrap=True, overflow="fold")
        else:
            grid.add_column(no_wrap=has_short_names and i == 0, overflow="fold")
    for row in rows:
        cells = []
        for cell in row:
            text = visible(cell).replace("\n", " ")
            cells.append(Text(text, no_wrap=clip, overflow="ellipsis" if clip else "fold"))
        grid.add_row(*cells)
    file = io.StringIO()
    Console(file=file, width=width or 10**6, color_system=None).print(grid)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def wrapped(text: str, width: int | None) -> str:
    """A text whose long lines are broken between words, but not commands, which are copied; None leaves it as it is.

    A line continues under its beginning, or under its value if it begins with a label and two blanks.
    """
    if width is None:
        return text
    return "\n".join(_wrap(line, width) for line in text.split("\n"))


def _wrap(line: str, width: int) -> str:
    if len(line) <= width or line.lstrip().startswith("xlcli "):
        return line
    label = re.match(r" *(?:\S+ {2,}(?=\S)|xlcli: )?", line)
    indent = len(label[0]) if label else 0
    if indent > width // 2:
        indent = 0
    lines = textwrap.wrap(line[indent:], max(width - indent, 20), break_long_words=False, break_on_hyphens=False)
    return line[:indent] + ("\n" + " " * indent).join(lines)


class Visible:
    """Incremental decoder from bytes to safe text. Holds back incomplete UTF-8 characters, escapes invalid bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Safe text of the characters that `data` completes; `final` includes an incomplete last one."""
        return visible(self._decoder.decode(data, final))
