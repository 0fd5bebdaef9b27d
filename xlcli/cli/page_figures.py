"""Figures of the HTML page: the curve of bits per byte along the text, and the loss by context length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from xlcli.cli import report

if TYPE_CHECKING:
    from xlcli.events import ContextBin

CURVE_POINTS = 512
"""Maximum number of points of the curve."""


class Curve:
    """Bits per byte along the text, in at most `CURVE_POINTS` stretches of about equal size."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, int]] = []
        self._width = 16

    def add(self, n_bytes: int, bits: float, line: int) -> None:
        """Adds a token of `n_bytes` bytes in this line."""
        if self.points and self.points[-1][0] < self._width:
            self.points[-1] = self._joined(self.points[-1], (n_bytes, bits, line))
            return
        if len(self.points) == CURVE_POINTS:
            self._width *= 2
            self.points = [self._joined(*self.points[at : at + 2]) for at in range(0, CURVE_POINTS, 2)]
        self.points.append((n_bytes, bits, line))

    @staticmethod
    def _joined(first: tuple[int, float, int], second: tuple[int, float, int]) -> tuple[int, float, int]:
        return first[0] + second[0], first[1] + second[1], first[2]

    def figure(self, first_byte: int, last_line: int) -> str:
        """The curve as SVG; each stretch links to the line where it begins.

        Args:
            first_byte: Offset of the text.
            last_line: Number of the last line that the page shows.
        """
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
        cells = (
            report.context_range(each),
            f"{each.tokens:,}",
            f"{each.bits_per_byte:.4f}",
            "-" if each.margin is None else f"{each.margin:.4f}",
        )
        width = 100 * each.bits_per_byte / longest
        bar = (
            '<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{width:.4g}" height="1"/></svg>'
        )
        rows.append(f"<tr>{''.join(f'<td>{cell}' for cell in (*cells, bar))}</tr>")
    heading = "<tr><th>tokens of context<th>tokens<th>bits per byte<th>± (95 %)<th></tr>"
    return (
        "<details open><summary><h2>Loss by context</h2></summary>"
        f"<table class=context>{heading}{''.join(rows)}</table></details>"
    )
