"""Duration of an evaluation, estimated from its first calls of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from xlcli.events import Notice

MEASURE_SECONDS = 2.0
"""Time over which calls are measured."""
LONG_SECONDS = 120.0
"""Duration from which the estimate is reported."""
SHORT_SECONDS = 30.0
"""Duration of the shorter evaluation that is recommended."""


class Clock:
    """Reports, once, how long an evaluation takes and what makes it shorter.

    Args:
        n_bytes: Length of the text.
        scale: Duration of the whole evaluation as a multiple of the one pass that is measured.
        clock: Time in seconds.
    """

    def __init__(self, n_bytes: int, scale: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_bytes, self._scale, self._clock = n_bytes, scale, clock
        self._started: float | None = None

    def report(self, n_done: int, n_calls: int) -> Iterator[Notice]:
        """A notice if it is long, after call `n_done` of `n_calls`; the first is slower and does not count."""
        now = self._clock()
        if n_done == 1:
            self._started = now
        elif self._started is not None and now - self._started >= MEASURE_SECONDS:
            seconds = self._scale * n_calls * (now - self._started) / (n_done - 1)
            self._started = None
            if seconds >= LONG_SECONDS:
                limit = 2 ** max(10, int(math.log2(self._n_bytes * SHORT_SECONDS / seconds)))
                size = f"{limit // 2**20}MiB" if limit >= 2**20 else f"{limit // 2**10}KiB"
                about = f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
                yield Notice(f"this takes about {about}; --limit {size} gives a score in half a minute")
