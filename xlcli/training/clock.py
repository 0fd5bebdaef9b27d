"""The time of a run, and the request to stop it, which several ranks agree on after each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from xlcli.ranks import Ranks


class Clock:
    """Seconds of a run, and whether to stop it.

    A single process reads both when they are needed. Several ranks use the seconds of the first one, and stop if one of
    them is to stop, as of their latest `agree` or `meet`.

    Args:
        ranks: Ranks of the run.
        before: Seconds before this process.
        started: Start of the seconds in this process, by `time.monotonic`.
    """

    def __init__(self, ranks: Ranks, before: float, started: float) -> None:
        self.ranks = ranks
        self.stop: Callable[[], bool] = lambda: False
        self._before, self._started = before, started
        self._validation = 0.0
        self._agreed: tuple[float, ...] = before, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds spent on this run, in this process and before it was resumed."""
        return self._now() if self.ranks.size == 1 else self._agreed[0]

    @property
    def validation_seconds(self) -> float:
        """Seconds spent on validation in this process."""
        return self._validation if self.ranks.size == 1 else self._agreed[1]

    @property
    def stops(self) -> bool:
        """Whether the run is to be stopped."""
        return self.stop() if self.ranks.size == 1 else self._agreed[2] > 0.0

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Counts the time in this context."""
        started = time.monotonic()
        yield
        self._validation += time.monotonic() - started

    def votes(self) -> tuple[float, ...]:
        """Numbers whose sums over all ranks are the arguments of `agree`; none in a single process."""
        if self.ranks.size == 1:
            return ()
        own = (self._now(), self._validation) if self.ranks.is_first else (0.0, 0.0)
        return *own, float(self.stop())

    def agree(self, sums: Sequence[float]) -> None:
        """Takes the sums of all votes."""
        if sums:
            self._agreed = tuple(sums)

    def meet(self) -> None:
        """Agrees after work between two steps."""
        self.agree(self.ranks.sum(torch.tensor(self.votes(), dtype=torch.float64)).tolist())

    def _now(self) -> float:
        return self._before + time.monotonic() - self._started
