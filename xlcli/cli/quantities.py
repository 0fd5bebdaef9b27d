"""Numbers, sizes and durations as text, and sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def amount(value: float) -> str:
    """A number with three significant digits: `1.2k`, `34M`, `6.61B`."""
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            figure = value / scale
            return f"{figure:.0f}{suffix}" if figure >= 100 else f"{figure:.3g}{suffix}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 line`, `1.2k tokens`."""
    return f"{amount(number)} {noun}{'' if number == 1 else 's'}"


def size(n_bytes: float) -> str:
    """A number of bytes: `3.4 MiB`."""
    for scale, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {suffix}"
    return f"{n_bytes:.0f} byte{'' if round(n_bytes) == 1 else 's'}"


def time(seconds: float) -> str:
    """A duration: `4.2 s`, `3:21`, `1:02:03`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """A row of at most `width` bars, each the mean of consecutive values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for i in range(width):
        part = finite[i * len(finite) // width : (i + 1) * len(finite) // width]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def age(seconds: float) -> str:
    """An age in its largest unit: `3 minutes`, `2 days`."""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "just now"
