"""Repeated calls, timed: warm-up first, then as many as fit a number of seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from xlcli.events import Progress, ProgressMeter, StoppedEarlyError
from xlcli.runtime import Runtime

WARMUP = 3
"""Number of calls before the timed ones."""
LEAST = 3
"""Minimum number of timed calls."""
UNEVEN = 1.5
"""Ratio of the 90th percentile to the median above which the machine was not quiet."""


@dataclass(frozen=True)
class Times:
    """Durations of calls in seconds, ascending."""

    seconds: tuple[float, ...]

    @property
    def total(self) -> float:
        """Sum of all durations in seconds."""
        return math.fsum(self.seconds)

    def percentile(self, share: float) -> float:
        """Duration in seconds that this share of the calls does not exceed; 0.5 is the median."""
        place = share * (len(self.seconds) - 1)
        low, high = self.seconds[math.floor(place)], self.seconds[math.ceil(place)]
        return low + (place - math.floor(place)) * (high - low)

    @property
    def median(self) -> float:
        """Median duration in seconds."""
        return self.percentile(0.5)


def repeat(
    call: Callable[[], object],
    stage: str,
    seconds: float,
    runtime: Runtime,
    stop: Callable[[], bool],
    *,
    warmup: int = WARMUP,
) -> Generator[Progress, None, Times]:
    """Times a call again and again for about `seconds`; yields progress.

    Args:
        call: The call.
        stage: Name of the measurement in the events.
        seconds: Time for all calls; at least `LEAST` are timed. A second call that takes longer is the only
            timed one.
        runtime: Device, which is waited for.
        stop: Called between calls.
        warmup: Number of calls before the timed ones, at least 1 in any case: the first call may compile or allocate.

    Raises:
        StoppedEarlyError: `stop` became true.
    """
    meter = ProgressMeter(stage, None, "calls")
    durations: list[float] = []
    warmup = max(1, warmup)
    while len(durations) < 2 or (
        durations[1] < seconds and (len(durations) < warmup + LEAST or math.fsum(durations[warmup:]) < seconds)
    ):
        if stop():
            raise StoppedEarlyError
        started = time.perf_counter()
        call()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
        yield from meter.report(len(durations))
    return Times(tuple(sorted(durations[warmup:] or durations[1:])))
