"""Numbers, sizes and durations as short texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xlcli.errors import counted, plural_noun


def compact_number(value: float) -> str:
    """A number with three significant digits: `1.2k`, `34M`, `6.61B`."""
    suffix = ""
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            value /= scale
            suffix = letter
            break
    if value >= 100:  # where `g` may write a power of ten
        return f"{value:.0f}{suffix}"
    return f"{value:.3g}{suffix}"


def number_or_blank(value: float | None, style: str) -> str:
    """A number in this style; nothing for None."""
    return "" if value is None else format(value, style)


def decimals_or_blank(value: float | None, digits: int) -> str:
    """A number with that many decimals, a large one as a power of ten; nothing for None."""
    if value is not None and value >= 1e6:
        return f"{value:.3g}"
    return number_or_blank(value, f".{digits}f")


def approximate_count(number: int, noun: str) -> str:
    """A number of things: `1 line`, `1.2k tokens`."""
    return f"{compact_number(number)} {plural_noun(number, noun)}"


def format_bytes(n_bytes: float) -> str:
    """A number of bytes: `3.4 MiB`."""
    for scale, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {suffix}"
    return f"{n_bytes:.0f} {plural_noun(round(n_bytes), 'byte')}"


def format_duration(seconds: float) -> str:
    """A duration: `4.2 s`, `3:21`, `1:02:03`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def format_age(seconds: float) -> str:
    """An age in its largest unit: `3 minutes`, `2 days`."""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            return counted(int(seconds // length), unit)
    return "just now"


def averaged(values: Sequence[float], n: int) -> list[float]:
    """Means of consecutive values, at most `n`."""
    n = min(n, len(values))
    means = []
    for i in range(n):
        part = values[i * len(values) // n : (i + 1) * len(values) // n]
        means.append(sum(part) / len(part))
    return means
