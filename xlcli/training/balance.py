"""Time of the steps of several ranks: the own work of each, the wait for the others, and ranks that are slower."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from xlcli.events import Notice

WINDOW = 20
"""Number of steps over which the medians of the ranks are compared."""
FACTOR = 1.5
"""Ratio to the median of all ranks above which a rank is slow."""
REPEAT = 1000
"""Number of steps after which a rank that is still slow is reported again."""


class RankTimes(NamedTuple):
    """Times of one step.

    Attributes:
        seconds: Own work of each rank: the forward and backward passes of its rows without waiting.
        waiting: Seconds for which a rank waited in these passes for gradients and parameters of others, mean of all.
    """

    seconds: tuple[float, ...]
    waiting: float


class WorkTimer:
    """Own work of this rank in a step, and its wait for other ranks, in seconds.

    On a CUDA device the host waits for the own work once. Gathers of a divided model wait on the device, and count as
    own work there.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.seconds = 0.0
        self.waited = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Begins a step."""
        self._started, self.seconds, self.waited = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which this rank waits for others."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def end_with(self, loss: Tensor) -> None:
        """Ends the own work with the backward pass of this loss, the last of the step."""
        loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Ends the wait, once the backward pass has returned."""
        self.waited = time.perf_counter() - self._started - self.seconds

    def _queue(self, _: Tensor) -> None:
        # Callbacks of a backward pass are called at its end in their order. The engines that average gradients queue
        # theirs, which waits, with the gradient of a parameter: later than this one.
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.seconds = time.perf_counter() - self._started - self.waited


class LagWatch:
    """Warns when a rank takes longer for its rows than the others, which all wait for it.

    Args:
        machines: Name of the machine of each rank.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self.machines = machines
        self._steps: list[Sequence[float]] = []
        self._reported: dict[int, int] = {}

    def observe(self, step: int, seconds: Sequence[float]) -> Iterator[Notice]:
        """Warnings after this step, whose own work took each rank this time."""
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return
        medians = [median(times) for times in zip(*self._steps, strict=True)]
        self._steps.clear()
        usual = median_low(medians)
        for rank, own in enumerate(medians):
            if own > FACTOR * usual and step >= self._reported.get(rank, -REPEAT) + REPEAT:
                self._reported[rank] = step
                yield Notice(
                    f"rank {rank} ({self.machines[rank]}) takes {own:.3g} s for its part of a step, {own / usual:.1f} "
                    f"times the median of {usual:.3g} s of all ranks, which wait for it.",
                    "warning",
                )
