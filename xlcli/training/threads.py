"""Number of CPU threads in training, chosen by the measured duration of training steps.

With more threads than idle cores every parallel loop waits for a thread that waits for a core. A step then takes
several times as long as with fewer threads, on a busy machine up to 50 times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

WINDOW = 5
"""Number of latest steps whose median is the present duration of a step."""
TRIAL_STEPS = 3
"""Number of steps of a trial that are measured, after one that is not."""
FASTER = 0.95
"""Ratio of step durations below which a trial changes the number of threads."""
SLOWER = 1.3
"""Ratio of step durations above which fewer threads are tried, and above which a trial ends early."""
MUCH_SLOWER = 3.0
"""Ratio of step durations above which a single step is enough for both."""
SEARCH_STEPS = 10
"""Time, in steps, that a search among fewer threads may lose before its last trial."""
TRIAL_SHARE = 0.03
"""Maximum share of the time that unsuccessful trials may lose."""
RETRY_SECONDS = 10.0
"""Minimum time between two trials."""
LOOP_ROUNDS = 3
"""Number of measurements of a parallel loop at the start, of which the slowest counts."""
LOOP_CHECKS = 5
"""Number of consecutive steps after which a parallel loop must be fast before more threads are tried."""


class Trial(NamedTuple):
    """Result of a trial: number of threads and median seconds per step, before and tried; whether it was adopted."""

    before: int
    before_seconds: float
    tried: int
    tried_seconds: float
    adopted: bool

    def describe(self) -> str:
        """The trial in one line."""
        change = f"{self.before} -> {self.tried} threads" if self.adopted else f"{self.before} threads kept"
        before, tried = self.before_seconds, self.tried_seconds
        return f"{change}: {before:.3g} s per step with {self.before}, {tried:.3g} s with {self.tried}"


class ThreadTuner:
    """Chooses the number of threads of each training step by the duration of the steps before it.

    A trial of another number consists of ordinary training steps. Fewer threads are tried at the start and when steps
    have become slower. More are tried from time to time while fewer than `limit` are in use, if a short parallel loop
    with that number is not slower, because a single step with too many threads can take very long.

    Args:
        limit: Largest number of threads.
        loop_seconds: Duration of a short parallel loop with a given number of threads, in seconds.
        warmup_steps: Number of first steps that are not measured.

    Attributes:
        threads: Number of threads for the next step; at first the one with the fastest loop.
        chosen: Number of threads outside trials.
    """

    def __init__(self, limit: int, loop_seconds: Callable[[int], float], *, warmup_steps: int = 0) -> None:
        self._counts = thread_counts(limit)
        self._loop_seconds = loop_seconds
        self._warmup_steps = warmup_steps
        rounds = [[loop_seconds(n) for n in self._counts] for _ in range(LOOP_ROUNDS)]
        slowest = dict(zip(self._counts, map(max, *rounds), strict=True))
        self.threads = self.chosen = min(self._counts, key=slowest.__getitem__)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._usual = 0.0
        """Lowest median duration of a step since the last search; 0 before the first, which starts it."""
        self._trial: list[float] = []
        self._direction = 1
        self._fast_loops = 0
        self._elapsed = 0.0
        self._lost = 0.0
        self._next_trial = 0.0

    @property
    def trying(self) -> bool:
        """Whether the next step belongs to a trial."""
        return self.threads != self.chosen

    def observe(self, seconds: float) -> Trial | None:
        """Takes the duration of the step made with `threads`, and sets `threads`; returns the trial that it ends."""
        self._elapsed += seconds
        if self._warmup_steps:
            self._warmup_steps -= 1
            return None
        if self.trying:
            self._trial.append(seconds)
            return self._end_trial()
        self._recent.append(seconds)
        full, present = len(self._recent) == WINDOW, median(self._recent)
        if self._elapsed >= self._next_trial:
            if full and present > SLOWER * self._usual and self.chosen > 1:
                self._try(self.chosen, 1)
            elif 0.0 < MUCH_SLOWER * self._usual < seconds and self.chosen > 1:
                self._recent = deque([seconds], WINDOW)
                self._try_if_loop_is_fast(1, checks=1)
            elif full and self.chosen < self._counts[0]:
                self._try_if_loop_is_fast(-1, checks=LOOP_CHECKS)
        if full:
            self._usual = min(self._usual, present)
        return None

    def _try(self, threads: int, direction: int) -> bool:
        """Starts a trial of the number after `threads` in this direction (1: fewer, -1: more), if there is one."""
        i = self._counts.index(threads) + direction
        if not 0 <= i < len(self._counts):
            return False
        self.threads, self._direction, self._trial = self._counts[i], direction, []
        return True

    def _try_if_loop_is_fast(self, direction: int, *, checks: int) -> None:
        """Starts a trial if a parallel loop with that number is not slower in `checks` consecutive calls."""
        candidate = self._counts[self._counts.index(self.chosen) + direction]
        if self._loop_seconds(candidate) > SLOWER * self._loop_seconds(self.chosen):
            self._end_search()
            return
        self._fast_loops += 1
        if self._fast_loops >= checks:
            self._try(self.chosen, direction)

    def _end_trial(self) -> Trial | None:
        """Ends the trial if its result is clear. A search among fewer threads goes on with the next number."""
        before = median(self._recent)
        first, *measured = self._trial  # the first step starts threads and prepares kernels
        if not measured and first <= MUCH_SLOWER * before:
            return None
        tried = median(measured or [first])
        if len(measured) < TRIAL_STEPS and tried <= SLOWER * before:
            return None
        trial = Trial(self.chosen, before, self.threads, tried, adopted=tried < FASTER * before)
        if trial.adopted:
            self.chosen = self.threads
            self._recent = deque(measured, WINDOW)
        else:
            self._lost += max(0.0, math.fsum(self._trial) - before * len(self._trial))
        goes_on = self._direction == 1 and (trial.adopted or self._lost <= SEARCH_STEPS * before)
        if not (goes_on and self._try(trial.tried, 1)):
            self._usual = median(self._recent)
            self._recent.clear()
            self._end_search()
        return trial

    def _end_search(self) -> None:
        """Returns to the chosen number until the next trial is due."""
        self.threads = self.chosen
        self._fast_loops = 0
        self._next_trial = self._elapsed + max(RETRY_SECONDS, self._lost / TRIAL_SHARE)
        self._lost = 0.0


def thread_counts(limit: int) -> tuple[int, ...]:
    """Numbers of threads to choose from, in descending order: `limit`, one fewer for a busy core, and its halves."""
    return tuple(sorted({limit - 1, *(limit >> i for i in range(limit.bit_length()))} - {0}, reverse=True))


def thread_changes(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Numbers of threads in use, each with its first step, from rows of the metrics. Trials are left out."""
    changes: list[dict[str, int]] = []
    for row in rows:
        if "threads" in row and not row.get("trial") and (not changes or changes[-1]["threads"] != row["threads"]):
            changes.append({"step": row["step"], "threads": row["threads"]})
    return changes
