"""Values from text: counts (10k, 64MiB), durations (1h30m), fractions (5%). `ValueError` gives the reason.

A validator of pydantic, such as `COUNT`, is the part of the type of a setting that reads it from text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

from pydantic import BeforeValidator

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COUNT = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kmg]?i?)b?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?\s*(?:ms|min|[smhd])\s*)+", re.IGNORECASE)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|min|[smhd])", re.IGNORECASE)


def count(value: str) -> int:
    """Whole number: `512`, `10k`, `1e6`, `2M`, `64MiB`."""
    match = _COUNT.fullmatch(value.strip())
    if not match or match[2].lower() not in _SCALES:
        raise ValueError("not a whole number such as 512, 10k or 1e6")
    amount = Decimal(match[1].replace("_", ""))  # as 4.1 * 10**6 is no whole number of floating point
    scale = _SCALES[match[2].lower()]
    limit = 2**63 // scale
    if not -limit < amount < limit:
        raise ValueError("far too large")
    result = amount * scale
    if result != int(result):
        raise ValueError("not a whole number")
    return int(result)


def number(value: str) -> float:
    try:
        result = float(value)
    except ValueError:
        raise ValueError("not a number") from None
    if not math.isfinite(result):
        raise ValueError("not a finite number")
    return result


def duration(value: str) -> float:
    """Seconds: `90`, `90s`, `30m`, `1h30m`, `2d`."""
    stripped = value.strip()
    if _DURATION.fullmatch(stripped):
        return sum(float(amount) * _SECONDS[unit.lower()] for amount, unit in _DURATION_PART.findall(stripped))
    try:
        return number(stripped)
    except ValueError:
        raise ValueError("not a duration such as 90s, 30m or 1h30m") from None


def interval(value: str) -> int | float:
    """Interval in steps (int: `100`, `1k`) or in seconds (float, from text with a unit: `30s`, `5m`)."""
    if value.strip().endswith("M"):
        raise ValueError("minutes or a million steps? Write 5m, or 5000k")
    are_minutes = value.strip().endswith("m")  # to `count` they are millions
    if not are_minutes:
        with suppress(ValueError):
            return count(value)
    with suppress(ValueError):
        return duration(value)
    raise ValueError("neither a number of steps such as 100 nor a time such as 30s")


def fraction(value: str) -> float:
    """Fraction: `0.05`, `5%`."""
    if value.endswith("%"):
        return number(value[:-1]) / 100
    return number(value)


def share(value: str) -> float | str:
    """Fraction, or the name of a file."""
    try:
        return fraction(value)
    except ValueError:
        return value


def lengths(value: str) -> list[int]:
    """Whole numbers separated by commas: `0,128,512`."""
    return [count(part) for part in value.split(",")]


def switch(value: str) -> bool:
    """Yes (`1`, `true`) or no (`0`, `false`)."""
    if value.lower() not in ("0", "1", "false", "true"):
        raise ValueError("neither 1 nor 0")
    return value.lower() in ("1", "true")


def device(value: str) -> str:
    """Device name: `auto`, `cpu`, `cuda` or `cuda:N`."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", value):
        return value
    raise ValueError("not a device; devices are auto, cpu, cuda and cuda:N")


def reads(read: Callable[[str], Any]) -> BeforeValidator:
    """Validator that reads a text. Other values stay as they are; lists become tuples, as strict validation needs."""

    def validate(value: Any) -> Any:
        if isinstance(value, str):
            value = read(value)
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(validate)


COUNT, NUMBER, DURATION, INTERVAL, LENGTHS = map(reads, (count, number, duration, interval, lengths))
