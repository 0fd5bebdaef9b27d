"""HTML page of a scored text (`--html`): words colored by surprisal, then a curve, and the most surprising lines.

The page is one file without script or external references; its Content-Security-Policy allows its own style only.
Words have the bits of `--words`; lines, and parts of long lines, those of their tokens. Documents, if there are
several, have their names as headings, and a list before the text links to them.

The class of a word is the step of its bits (`xlcli.markup`); `page.css` has the colors, for light and dark ground.

The keyboard goes from line to line. The line that it is at shows the bits of its words as text, which a screen reader
reads, too; that is style alone.
"""

from __future__ import annotations

import base64
import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import xlcli
from xlcli.cli.outputs import write_output
from xlcli.cli.quantities import approximate_count, format_bytes
from xlcli.cli.score_report import context_cells
from xlcli.events import ContextBin, TokenScore, WordScore
from xlcli.files import cache_folder
from xlcli.markup import Part, by_token, color_step, colored, continues, direction, escaped, legend, visible

TEXT_BYTES = 2**25  # size of the text shown, which bounds the page of an endless stream; curve and table go on
COLORED_WORDS = 2**18  # words with color and tooltip: about 10 MB of HTML, which a browser opens in a few seconds
BLOCK_BYTES, ROW_BYTES = 2**12, 2**13  # sizes from which a block and a row end; browsers lay out visible blocks only
TABLE_ROWS, LONG_LINE, PREVIEW = 12, 20, 240
"""Number of most surprising lines; their minimum size in bytes, if there are any; bytes after which the text ends."""
CURVE_POINTS = 512  # maximum number of points of the curve
OPEN_LIST, LONGEST_LIST = 30, 1000  # number of documents up to which their list is open, and that it has at most

Facts = Sequence[tuple[str, str]]


class Page:
    """Page of a text whose tokens, and words after them, are added in order. `save` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = self.n_tokens = self.n_lines = 0
        self.bits = 0.0
        self._rows: list[_Row] = []  # the one that grows, and before it one whose last word may come yet
        self._document = _Document(number=1, name="", first_line=1)
        self._documents: list[_Document] = []  # the first `LONGEST_LIST` of those that have begun
        self._next_name: str | None = None  # of the document that begins with the next token
        self._curve, self._most_surprising, self._blocks = _Curve(), _MostSurprising(), _Blocks()

    def begin(self, name: str) -> None:
        """The next token, if one comes, begins a document of this name."""
        self._next_name = name

    def add(self, token: TokenScore) -> None:
        """Adds the next token. Offsets count from the first one, which may continue another text."""
        if self._next_name is not None:
            self._begin_document(self._next_name)
            self._next_name = None
            self._begin_row(token.byte)
        elif not self._rows or (self._rows[-1].is_full and not continues(token.text)):  # a word is not divided
            self._begin_row(token.byte)
        row = self._rows[-1]
        row.tokens.append((len(row.text), token.bits))
        row.text += token.text
        row.bits += token.bits
        self._document.bits += token.bits
        self._document.n_bytes += len(token.text)
        self._curve.add(token, self._document, self.n_lines + 1)
        self.n_bytes += len(token.text)
        self.n_tokens += 1
        self.n_lines += token.text.count(b"\n")
        self.bits += token.bits

    def _begin_document(self, name: str) -> None:
        """Begins a document, in a line of its own, even if the line before has no end."""
        if self._rows and not self._rows[-1].text.endswith(b"\n"):
            self.n_lines += 1
        is_first = self.n_tokens == 0
        number = 1 if is_first else self._document.number + 1
        self._document = _Document(number, name, self.n_lines + 1)
        if number <= LONGEST_LIST:
            self._documents.append(self._document)

    def _begin_row(self, byte: int) -> None:
        """Begins a row at a byte of the text; shows the row before the last one, which gets no more words."""
        self._rows.append(_Row(self._document, self.n_lines + 1, byte))
        if len(self._rows) > 2:
            self._show(self._rows.pop(0))

    def add_word(self, word: WordScore) -> None:
        """Adds the next word, after its tokens and at most one more; not one that began in the text before."""
        for row in reversed(self._rows):
            if word.byte >= row.byte:
                row.parts.append(Part(word.byte - row.byte, len(row.text), word.bits))
                return

    def save(
        self, title: str, model: str, context: str, facts: Facts = (), by_context: Sequence[ContextBin] = ()
    ) -> None:
        """Writes the page, atomically if the file is a regular one.

        `facts` are names and values shown at the top, before the model and the context of a token in words.
        """
        sizes = [format_bytes(self.n_bytes), approximate_count(self.n_tokens, "token")]
        if self.n_lines:
            sizes.insert(1, approximate_count(self.n_lines, "line"))
        shown = [*facts, ("model", model), ("context", context), ("text", ", ".join(sizes))]
        write_output(self.path, self._pieces(title, shown, by_context))

    def _show(self, row: _Row) -> None:
        """Puts a row into the table and the text."""
        row.parts = by_token(row.text, row.parts, row.tokens)
        self._most_surprising.add(row)
        if self._blocks.n_bytes < TEXT_BYTES:
            self._blocks.add(row)

    def _pieces(self, title: str, facts: Facts, by_context: Sequence[ContextBin]) -> Iterator[bytes]:
        """The parts of the file; ends the text."""
        for row in self._rows:
            self._show(row)
        if self._document.number == 1:
            self._document.name = ""  # a single document needs none
        blocks = self._blocks
        blocks.end()
        if blocks.n_bytes < self.n_bytes:
            blocks.note(f"The text after its first {format_bytes(blocks.n_bytes)} is not shown.")

        files = resources.files("xlcli.cli")
        style = files.joinpath("page.css").read_text("utf-8")
        values = {
            "version": xlcli.__version__,
            "title": escape(visible(title)),
            "style": style,
            "style_hash": base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
            "bits_per_byte": f"{self.bits / self.n_bytes:.4f}" if self.n_bytes else "-",
            "facts": "".join(f"<div><dt>{escape(name)}<dd>{escape(visible(value))}</div>" for name, value in facts),
            **self._list_of_documents(),
            "legend": legend(_paint),
            "context_rows": _context_rows(by_context),
            "context_hidden": "" if by_context else " hidden",
            **self._curve.drawing(blocks.last_line),
            **self._most_surprising.table(blocks.last_line),
        }
        head, tail = files.joinpath("page.html").read_text("utf-8").split("<!-- text -->")
        yield Template(head).substitute(values).encode()
        with blocks.file as text:
            text.seek(0)
            yield from iter(lambda: text.read(2**20), b"")
        yield Template(tail).substitute(values).encode()

    def _list_of_documents(self) -> dict[str, str]:
        """The list of several documents, and the heading of the first one, by names of the template; else nothing."""
        if self._document.number == 1:
            return {"documents": "", "first_heading": ""}
        items = ""
        for document in self._documents:
            name = f"<bdi>{escape(visible(document.name))}</bdi>"
            if document.number <= self._blocks.last_document:
                name = f'<a href="#D{document.number}">{name}</a>'
            items += f'<li lang="">{name} {document.bits / max(1, document.n_bytes):.4f}'
        n_documents = self._document.number
        if n_documents > len(self._documents):
            items += f"<li>and {n_documents - len(self._documents):,} more"
        is_open = " open" if n_documents <= OPEN_LIST else ""
        summary = f"<summary><h2>{n_documents:,} documents, with bits per byte</h2></summary>"
        nav = f'<nav aria-label="documents"><details{is_open}>{summary}<ul>{items}</ul></details></nav>'
        return {"documents": nav, "first_heading": f"<pre>{self._documents[0].heading}</pre>"}


@dataclass(slots=True)
class _Document:
    """A document: its number from 1, its name, its first line in the whole text, and what was read of it."""

    number: int
    name: str
    first_line: int
    n_bytes: int = 0
    bits: float = 0.0

    @property
    def heading(self) -> str:
        name = escape(visible(self.name))
        return f'<strong id=D{self.number} role=heading aria-level=2 lang="" dir=auto>{name}</strong>'

    def place(self, line: int) -> str:
        """A line of the whole text as it is counted in the document: `chapter.txt, line 3`."""
        place = f"line {line - self.first_line + 1:,}"
        return f"{self.name}, {place}" if self.name else place


@dataclass(slots=True)
class _Row:
    """A line, or a part of a long line, from a byte of the text on. If it ends within a word, it has the word.

    `line` counts in the whole text. `tokens` are first byte in the row and bits of each, `parts` what gets a color.
    """

    document: _Document
    line: int
    byte: int
    text: bytearray = field(default_factory=bytearray)
    bits: float = 0.0
    tokens: list[tuple[int, float]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.text.endswith(b"\n") or len(self.text) >= ROW_BYTES

    @property
    def is_long(self) -> bool:
        return len(self.text) >= LONG_LINE

    @property
    def bits_per_byte(self) -> float:
        return self.bits / max(1, len(self.text))

    @property
    def rank(self) -> tuple[bool, float]:
        """What orders the most surprising lines: long ones are before others, and those without a number first."""
        return self.is_long, self.bits_per_byte if math.isfinite(self.bits) else math.inf

    def html(self, most_bytes: int | None = None) -> str:
        """The text with its parts in color. It ends before a part that begins after `most_bytes`."""
        return colored(self.text, self.parts, _paint, most_bytes)


def _paint(html: str, bits: float) -> str:
    return f'<i class=w{color_step(bits)} title="{bits:.2f} bits">{html}</i>'


class _Blocks:
    """HTML of the text in blocks of rows, in an unnamed temporary file: RAM is constant."""

    def __init__(self) -> None:
        self.n_bytes = self.last_line = self.last_document = 0  # of the text shown
        self.file = tempfile.TemporaryFile(dir=cache_folder())  # noqa: SIM115
        self._rows: list[str] = []
        self._block_bytes = self._n_colored = 0

    def add(self, row: _Row) -> None:
        """Adds a row, after a heading if it begins a document, and without colors after `COLORED_WORDS` words."""
        if row.document.number > max(1, self.last_document):  # the heading of the first one is written at the end
            self._rows.append(row.document.heading)
        has_colors = self._n_colored < COLORED_WORDS
        self._rows.append(self._html(row, has_colors=has_colors))
        self.last_document = row.document.number
        self.last_line = row.line
        self.n_bytes += len(row.text)
        self._block_bytes += len(row.text)
        if self._block_bytes >= BLOCK_BYTES:
            self.end()
        if has_colors:
            self._n_colored += len(row.parts)
            if self._n_colored >= COLORED_WORDS:
                self.end()
                self.note("The words after this line have no colors, so that a browser can open the page.")

    def _html(self, row: _Row, *, has_colors: bool) -> str:
        """A row with its score. Links lead to the first row of a line, the keyboard to rows with colors."""
        score = f"{row.bits_per_byte:.2f}"
        attributes = name = ""
        if row.line > self.last_line:  # else it continues a line
            attributes = f"id=L{row.line} "
            name = f"line {row.line - row.document.first_line + 1}, "
        if direction(row.text) == "rtl":
            attributes += "dir=rtl "
        attributes += f"data-b={score}"
        if has_colors and row.text.strip():
            attributes += f' tabindex=0 role=group aria-label="{name}{score} bits per byte"'
        return f"<b {attributes}>{row.html() if has_colors else escaped(row.text)}</b>"

    def end(self) -> None:
        if self._rows:
            self.file.write(f"<pre>{''.join(self._rows)}</pre>\n".encode())
            self._rows, self._block_bytes = [], 0

    def note(self, text: str) -> None:
        self.file.write(f"<p class=note>{text}</p>\n".encode())


class _MostSurprising:
    """Table of the most surprising lines; short ones only if there are no others."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, row: _Row) -> None:
        if len(self._rows) < TABLE_ROWS or row.rank > self._rows[-1].rank:
            self._rows.append(row)
            self._rows.sort(key=lambda row: row.rank, reverse=True)
            del self._rows[TABLE_ROWS:]

    def table(self, last_line: int) -> dict[str, str]:
        """Returns what the page shows of these lines, by names of its template; lines up to `last_line` have links."""
        caption = "Lines by bits per byte."
        long_rows = [row for row in self._rows if row.is_long]
        if long_rows:
            caption = f"Lines of at least {LONG_LINE} bytes by bits per byte."
        html = ""
        for row in long_rows or self._rows:
            place = escape(visible(row.document.place(row.line).removeprefix("line ")))  # as the column is called
            if row.line <= last_line:
                place = f'<a href="#L{row.line}">{place}</a>'
            else:
                place = f"<span>{place}</span>"
            text = f'<td dir={direction(row.text)} lang="" tabindex=0>{row.html(PREVIEW)}'
            html += f"<tr><td>{row.bits_per_byte:.2f}<td>{place}{text}</tr>"
        return {"about_lines": caption, "line_rows": html}


@dataclass(slots=True)
class _Stretch:
    """A part of the text that begins in this line of a document, at this byte."""

    document: _Document
    line: int
    byte: int
    n_bytes: int = 0
    bits: float = 0.0

    def add(self, n_bytes: int, bits: float) -> None:
        self.n_bytes += n_bytes
        self.bits += bits

    @property
    def bits_per_byte(self) -> float:
        """What is drawn: 0 for scores that are no number."""
        return self.bits / self.n_bytes if math.isfinite(self.bits) else 0.0


class _Curve:
    """Bits per byte along the text, in at most `CURVE_POINTS` stretches of about equal size."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._least_bytes = 16  # of a stretch that has ended

    def add(self, token: TokenScore, document: _Document, line: int) -> None:
        stretches = self._stretches
        if not stretches or stretches[-1].n_bytes >= self._least_bytes:
            if len(stretches) == CURVE_POINTS:  # each two become one, and new ones are as long
                self._least_bytes *= 2
                for one, next_one in zip(stretches[::2], stretches[1::2], strict=True):
                    one.add(next_one.n_bytes, next_one.bits)
                del stretches[1::2]
            stretches.append(_Stretch(document, line, token.byte))
        stretches[-1].add(len(token.text), token.bits)

    def drawing(self, last_line: int) -> dict[str, str]:
        """Returns values for the template of the page; a stretch links to its first line, up to `last_line`.

        In the drawing x runs from 0 to 1000 along the text, and y down from 0 at `top` bits per byte to 100 at 0.
        """
        total_bytes = sum(stretch.n_bytes for stretch in self._stretches)
        top = max(1, math.ceil(max((stretch.bits_per_byte for stretch in self._stretches), default=0.0)))
        steps = []  # of an SVG path: y, then `H` and the x up to which the line is level
        areas = ""  # with a text that is shown when the pointer is there
        sum_bits = 0.0
        n_before = 0  # bytes of the stretches before
        for stretch in self._stretches:
            bits, n_bytes = stretch.bits_per_byte, stretch.n_bytes
            y = 100 - 100 * bits / top
            steps.append(f"{y:.4g}H{1000 * (n_before + n_bytes) / total_bytes:.5g}")
            line = escape(visible(stretch.document.place(stretch.line)))
            title = f"{bits:.2f} bits per byte, {line}, byte {stretch.byte:,}"
            place = f'x="{1000 * n_before / total_bytes:.5g}" width="{1000 * n_bytes / total_bytes:.4g}" height="100"'
            area = f"<rect {place}><title>{title}</title></rect>"
            if stretch.line <= last_line:
                area = f'<a href="#L{stretch.line}" tabindex="-1">{area}</a>'
            areas += area
            sum_bits += bits * n_bytes
            n_before += n_bytes
        first_byte = self._stretches[0].byte if self._stretches else 0
        mean = sum_bits / max(1, total_bytes)
        return {
            "top": str(top),
            "half": f"{top / 2:g}",
            "path": "M0 " + "V".join(steps or ["100"]),
            "mean": f"{100 - 100 * mean / top:.4g}",
            "mean_bits": f"{mean:.2f}",
            "stretches": areas,
            "first_byte": f"{first_byte:,}",
            "last_byte": f"{first_byte + total_bytes:,}",
        }


def _context_rows(bins: Sequence[ContextBin]) -> str:
    """Rows of the loss by context length with bars."""
    most_bits = max((context.bits_per_byte for context in bins), default=0.0) or 1.0
    rows = ""
    for context in bins:
        width = f"{100 * context.bits_per_byte / most_bits:.4g}"
        bar = f'<svg viewBox="0 0 100 1" preserveAspectRatio="none"><rect width="{width}" height="1"/></svg>'
        rows += "<tr><td>" + "<td>".join((*context_cells(context), bar)) + "</tr>"
    return rows
