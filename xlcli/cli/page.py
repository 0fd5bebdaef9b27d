"""HTML page of a scored text (`--html`): words colored by surprisal, then a curve, and the most surprising lines.

The page is one file without external references; its Content-Security-Policy allows its own style and script only.
Rows of text (lines, or parts of long lines) are grouped in blocks. Blocks hold the text, colored up to `COLORED_BYTES`,
and compact scores of its words, with which the script (`page.js`) colors visible blocks and shows tooltips.
A text of ten megabytes would otherwise have millions of elements.

Colors begin at quantiles of the text, which are known at its end. So the class of a word is a bin of its bits, and the
style of the page, which is written last, colors the bins.

The bits of a word are those of `--words`, and what they leave of the bits of a line is in its line end. So the bits of
a line are the sum of its tokens, too.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template

import xlcli
from xlcli.cli.display import DisplayToken, concatenate, group_by_word
from xlcli.cli.outputs import write_output
from xlcli.cli.quantities import approximate_count, format_bytes
from xlcli.cli.score_report import context_cells
from xlcli.cli.terminal import Visible, visible
from xlcli.events import ContextBin, TokenScore, WordScore
from xlcli.files import cannot_write

SHARES = (0.5, 0.25, 0.1, 0.05, 0.01)
"""Shares of the words, those with the most bits, for which another color begins."""
BINS, BINS_PER_OCTAVE = 62, 8
"""Number of bins of words by bits, up to the most that a tooltip shows, and of bins in which 1 + bits doubles."""
TEXT_BYTES = 2**25
"""Size of the text shown; curve and table cover the text after it, too. A page of an endless stream is thus bounded."""
COLORED_BYTES = 2**16
"""Size of the text whose words are colored without the script."""
BLOCK_BYTES, BLOCK_ROWS = 2**12, 64
"""Size of a block, which ends with the row that reaches either."""
ROW_BYTES = 2**12
"""Size at which a line is continued in another row."""
TABLE_ROWS, LONG_LINE, PREVIEW = 12, 20, 240
"""Number of most surprising lines; their minimum size in bytes, if there are any; characters shown of each."""
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_BITS_STEP = 0.05
"""Precision of the bits in tooltips; two digits of base 64 reach 204 bits."""
CURVE_POINTS = 512
"""Maximum number of points of the curve."""
MOST_WAITING = 2**15
"""Maximum number of tokens that wait for the end of a word, more than the longest word has."""


@dataclass(slots=True)
class _Row:
    """A line, or a part of a long line."""

    line: int
    words: list[DisplayToken] = field(default_factory=list)
    n_bytes: int = 0
    bits: float = 0.0

    @property
    def bits_per_byte(self) -> float:
        return self.bits / max(1, self.n_bytes)

    def add(self, word: DisplayToken, bits: float) -> None:
        """Adds a word whose tokens have so many bits."""
        self.words.append(word)
        self.n_bytes += word.n_bytes
        self.bits += bits


class _Blocks:
    """HTML of the text in blocks of rows, in an unnamed temporary file: RAM is constant.

    Attributes:
        file: The file.
        n_bytes: Size of the text shown.
        last_line: Number of the last line shown.
    """

    def __init__(self, path: Path) -> None:
        self.n_bytes = self.last_line = 0
        self._path, self._start = path, 0
        self._rows: list[str] = []
        self._scores: list[str] = []
        try:
            folder = path.parent if not path.exists() or path.is_file() else None
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise cannot_write(path, error) from None

    def add(self, row: _Row, byte: int) -> None:
        if not self._rows:
            self._start = byte
        is_colored = self.n_bytes < COLORED_BYTES
        content = _colored(row.words) if is_colored else escape("".join(word.text for word in row.words), quote=False)
        name = f" id=L{row.line}" * (row.line > self.last_line)
        self._rows.append(f"<b{name} data-b={row.bits_per_byte:.2f}>{content}</b>")
        self._scores += map(_encoded, row.words)
        self.n_bytes += row.n_bytes
        self.last_line = row.line
        if byte + row.n_bytes - self._start >= BLOCK_BYTES or len(self._rows) >= BLOCK_ROWS:
            self.end()

    def end(self) -> None:
        if self._rows:
            scores, rows = "".join(self._scores), "".join(self._rows)
            html = f'<pre data-o={self._start} data-t="{scores}">{rows}</pre>\n'
            self._rows, self._scores = [], []
            try:
                self.file.write(html.encode())
            except OSError as error:
                raise cannot_write(self._path, error) from None


class _MostSurprising:
    """Table of the most surprising lines; short ones only if there are no others."""

    def __init__(self) -> None:
        self._rows: list[tuple[bool, float, int, str]] = []
        self._n_rows = 0

    def add(self, row: _Row, *, is_shown: bool) -> None:
        self._n_rows += 1
        rank = (row.n_bytes >= LONG_LINE, row.bits_per_byte if math.isfinite(row.bits) else math.inf, -self._n_rows)
        if len(self._rows) == TABLE_ROWS and rank <= self._rows[0][:3]:
            return
        line = f'<a href="#L{row.line}">{row.line:,}</a>' if is_shown else f"{row.line:,}"
        length = len("".join(word.text for word in row.words).rstrip("\n"))
        text = _colored(row.words, min(length, PREVIEW)) + "..." * (length > PREVIEW)
        heapq.heappush(self._rows, (*rank, f"<tr><td>{row.bits_per_byte:.2f}<td>{line}<td>{text}</tr>"))
        if len(self._rows) > TABLE_ROWS:
            heapq.heappop(self._rows)

    def section(self) -> str:
        longest = max((row[0] for row in self._rows), default=False)
        rows = [row[3] for row in sorted(self._rows, reverse=True) if row[0] == longest]
        if not rows:
            return ""
        about = f"Lines of at least {LONG_LINE} bytes by bits per byte." if longest else "Lines by bits per byte."
        heading = "<tr><th>bits per byte<th>line<th>text</tr>"
        return (
            f"<details id=lines open><summary><h2>Most surprising lines</h2></summary><p class=note>{about}</p>"
            f"<table class=lines>{heading}{''.join(rows)}</table></details>"
        )


class Page(AbstractContextManager["Page"]):
    """Page of a text whose tokens, and words after them, are added in order; a context manager. `save` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = self.n_tokens = self.n_lines = 0
        self.bits = 0.0
        self._first: int | None = None
        self._visible = Visible()
        self._row, self._row_byte = _Row(1), 0
        self._waiting: list[TokenScore] = []  # for the end of their word
        self._owed = 0.0  # bits of the tokens before, less those of their words
        self._bins = [0] * BINS
        self._curve, self._most_surprising, self._blocks = Curve(), _MostSurprising(), _Blocks(path)

    def __exit__(self, *error: object) -> None:
        self._blocks.file.close()

    def add(self, token: TokenScore) -> None:
        """Adds the next token. Offsets count from the first one, which may continue another text."""
        if self._first is None:
            self._first = self._row_byte = token.byte
        if self._waiting and (self._waiting[-1].text.endswith(b"\n") or len(self._waiting) >= MOST_WAITING):
            self._show_rest(len(self._waiting))  # words end at a line end
        self._waiting.append(token)
        self.n_bytes += len(token.text)
        self.n_tokens += 1
        self.bits += token.bits
        self._curve.add(len(token.text), token.bits, self.n_lines + 1)
        self.n_lines += token.text.count(b"\n")

    def add_word(self, word: WordScore) -> None:
        """Adds the next word, after its tokens and at most one more."""
        waiting = self._waiting
        if not waiting or word.byte < waiting[0].byte:  # it began in the text before
            return
        start = next((i for i, each in enumerate(waiting) if each.byte + len(each.text) > word.byte), len(waiting))
        while start and _is_blank(waiting[start - 1].text):
            start -= 1
        self._show_rest(start)
        shown = concatenate(self._take(word.tokens))
        self._owed += shown.bits - word.bits
        self._place(shown._replace(bits=word.bits), shown.bits)

    def _take(self, n_tokens: int) -> list[DisplayToken]:
        """The first waiting tokens, which wait no more."""
        tokens, self._waiting = self._waiting[:n_tokens], self._waiting[n_tokens:]
        return [DisplayToken(self._visible.feed(token.text), len(token.text), token.bits) for token in tokens]

    def _show_rest(self, n_tokens: int) -> None:
        """Moves waiting tokens that no word has to rows, with the bits that words have left to them."""
        for rest in group_by_word(self._take(n_tokens)):
            self._place(rest._replace(bits=rest.bits + self._owed), rest.bits)
            self._owed = 0.0

    def _place(self, word: DisplayToken, bits: float) -> None:
        """Puts a word whose tokens have so many bits into the row."""
        self._row.add(word, bits)
        if "\n" in word.text or self._row.n_bytes >= ROW_BYTES:
            self._end_row()

    def save(
        self,
        title: str,
        model: str,
        context: str,
        facts: Sequence[tuple[str, str]] = (),
        by_context: Sequence[ContextBin] = (),
    ) -> None:
        """Writes the page, atomically if the file is a regular one.

        `facts` are names and values shown at the top, before the model and the context of a token in words.
        """
        lines = f"{approximate_count(self.n_lines, 'line')}, " * (self.n_lines > 0)
        text = f"{format_bytes(self.n_bytes)}, {lines}{approximate_count(self.n_tokens, 'token')}"
        shown = [*facts, ("model", model), ("context", context), ("text", text)]
        write_output(self.path, self._pieces(title, shown, by_context))

    def _end_row(self) -> None:
        row, self._row = self._row, _Row(self._row.line + sum(word.text.count("\n") for word in self._row.words))
        if not row.words:
            return
        for word in row.words:
            self._bins[_bin(word.bits)] += not word.text.isspace()
        is_shown = self._blocks.n_bytes < TEXT_BYTES
        self._most_surprising.add(row, is_shown=is_shown)
        if is_shown:
            self._blocks.add(row, self._row_byte)
        self._row_byte += row.n_bytes

    def _pieces(
        self, title: str, facts: Sequence[tuple[str, str]], by_context: Sequence[ContextBin]
    ) -> Iterator[bytes]:
        self._show_rest(len(self._waiting))
        if rest := self._visible.feed(b"", final=True):
            self._row.add(DisplayToken(rest, 0, 0.0), 0.0)
        self._end_row()
        self._blocks.end()
        files = resources.files("xlcli.cli")
        style, script = (files.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
        colors = self._colors()
        style += "".join(f".w{n} {{ background: var(--c{color}); }}\n" for n, (color, _) in colors.items() if color)
        firsts = {color: (n, share) for n, (color, share) in reversed(colors.items()) if color}
        shown, blocks = format_bytes(self._blocks.n_bytes), self._blocks
        values = {
            "version": xlcli.__version__,
            "title": escape(visible(title)),
            "style": style,
            "style_hash": _hash(style),
            "script": script,
            "script_hash": _hash(script),
            "bits_per_byte": f"{self.bits / self.n_bytes:.4f}" if self.n_bytes else "-",
            "facts": "".join(f"<div><dt>{escape(name)}<dd>{escape(visible(value))}</div>" for name, value in facts),
            "legend": "".join(
                f"<i class=w{n}>{2 ** (n / BINS_PER_OCTAVE) - 1:.1f} ({max(0.1, 100 * share):.1f} %)</i>"
                for n, share in reversed(firsts.values())
            ),
            "curve": self._curve.figure(self._first or 0, blocks.last_line),
            "by_context": context_section(by_context),
            "lines": self._most_surprising.section(),
            "cut": f"<p class=note>The text after its first {shown} is not shown.</p>"
            * (blocks.n_bytes < self.n_bytes),
        }
        head, tail = files.joinpath("page.html").read_text("utf-8").split("<!-- text -->")
        yield Template(head).substitute(values).encode()
        blocks.file.seek(0)
        yield from iter(lambda: blocks.file.read(2**20), b"")
        yield Template(tail).substitute(values).encode()

    def _colors(self) -> dict[int, tuple[int, float]]:
        """Color, from 0 on, of each bin that has words, and the share of the words in this bin and later ones."""
        shares = {n: sum(self._bins[n:]) / sum(self._bins) for n in range(BINS) if self._bins[n]}
        return {n: (sum(share <= most for most in SHARES), share) for n, share in shares.items()}


def _is_blank(text: bytes) -> bool:
    """True for white space within a line, which belongs to the next word."""
    return b"\n" not in text and text.decode("utf-8", "replace").isspace()


def _bits_steps(bits: float) -> int:
    """Bits in the precision of tooltips; two digits of base 64 hold them."""
    return max(0, round(bits / _BITS_STEP)) if bits < _BITS_STEP * (64**2 - 1) else 64**2 - 1


def _bin(bits: float) -> int:
    """Bin of a word, as in the script."""
    return int(BINS_PER_OCTAVE * math.log2(1 + _BITS_STEP * _bits_steps(bits)))


def _encoded(word: DisplayToken) -> str:
    """Length in UTF-16 units, size in bytes unless the shown text has the same, and bits."""
    length = len(word.text.encode("utf-16-le")) // 2
    is_plain = length < len(_DIGITS) and word.n_bytes == len(word.text.encode())
    steps = _bits_steps(word.bits)
    size = _DIGITS[length] if is_plain else f"({length}:{word.n_bytes})"
    return size + _DIGITS[steps // 64] + _DIGITS[steps % 64]


def _colored(words: Iterable[DisplayToken], end: int = sys.maxsize) -> str:
    """Text as HTML, each word in the class of its bin. Characters after the first `end` are left out."""
    html = []
    for word in words:
        shown = word.text[:end].lstrip()
        blank = word.text[: min(end, len(word.text)) - len(shown)]
        html.append(f"{blank}<i class=w{_bin(word.bits)}>{escape(shown, quote=False)}</i>" if shown else blank)
        end = max(0, end - len(word.text))
    return "".join(html)


def _hash(text: str) -> str:
    """Hash of an inline style or script for the Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Curve:
    """Bits per byte along the text, in at most `CURVE_POINTS` stretches of about equal size."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, int]] = []
        self._width = 16

    def add(self, n_bytes: int, bits: float, line: int) -> None:
        """Adds a token of `n_bytes` bytes in this line."""
        if not self.points or self.points[-1][0] >= self._width:
            if len(self.points) == CURVE_POINTS:
                self._width *= 2
                pairs = zip(self.points[::2], self.points[1::2], strict=True)
                self.points = [(one[0] + other[0], one[1] + other[1], one[2]) for one, other in pairs]
            self.points.append((0, 0.0, line))
        stretch_bytes, stretch_bits, first_line = self.points[-1]
        self.points[-1] = stretch_bytes + n_bytes, stretch_bits + bits, first_line

    def figure(self, first_byte: int, last_line: int) -> str:
        """The curve as SVG, from the offset `first_byte`; a stretch links to its first line, up to `last_line`."""
        points = self.points
        if len(points) < 2:
            return ""
        total = sum(n for n, _, _ in points)
        values = [bits / n if math.isfinite(bits) else 0.0 for n, bits, _ in points]
        top = max(1, math.ceil(max(values)))
        ends = [0]
        for n, _, _ in points:
            ends.append(ends[-1] + n)
        x = [f"{1000 * end / total:.5g}" for end in ends]
        y = [f"{100 - 100 * value / top:.4g}" for value in values]
        path = f"M0 {y[0]}" + "".join(f"V{high}H{right}" for high, right in zip(y, x[1:], strict=True))
        mean = 100 - 100 * sum(value * n for value, (n, _, _) in zip(values, points, strict=True)) / total / top
        hits = []
        for (left, right), value, (_, _, line) in zip(pairwise(ends), values, points, strict=True):
            about = f"{value:.2f} bits per byte, line {line:,}, byte {first_byte + left:,}"
            width = 1000 * (right - left) / total
            hit = f'<rect x="{1000 * left / total:.5g}" width="{width:.4g}" height="100"><title>{about}</title></rect>'
            hits.append(f'<a href="#L{line}" tabindex="-1">{hit}</a>' if line <= last_line else hit)
        return (
            "<figure class=curve><div class=scale>"
            f"<span>{top}</span><span>{top / 2:g}</span><span>0</span></div>"
            '<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
            'aria-label="bits per byte along the text">'
            f'<path class=area d="{path}V100H0Z"/><path class=line d="{path}"/>'
            f'<path class=mean d="M0 {mean:.4g}H1000"/>{"".join(hits)}</svg>'
            f"<div class=ends><span>byte {first_byte:,}</span><span>dashed: mean of the text</span>"
            f"<span>{first_byte + total:,}</span></div>"
            "<figcaption>Bits per byte along the text</figcaption></figure>"
        )


def context_section(bins: Sequence[ContextBin]) -> str:
    """Table of the loss by context length with bars."""
    if not bins:
        return ""
    longest = max(each.bits_per_byte for each in bins) or 1.0
    rows = []
    for each in bins:
        width = 100 * each.bits_per_byte / longest
        bar = (
            '<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{width:.4g}" height="1"/></svg>'
        )
        rows.append(f"<tr>{''.join(f'<td>{cell}' for cell in (*context_cells(each), bar))}</tr>")
    heading = "<tr><th>tokens of context<th>tokens<th>bits per byte<th>± (95 %)<th></tr>"
    return (
        "<details open><summary><h2>Loss by context</h2></summary>"
        f"<table class=context>{heading}{''.join(rows)}</table></details>"
    )
