"""Intervals of validations and checkpoints."""

from __future__ import annotations


class IntervalTrigger:
    """Triggers an action at regular intervals.

    Args:
        every: Interval in steps (int) or seconds (float); None divides the budget into `parts` intervals.
        parts: Number of intervals.
    """

    def __init__(self, every: int | float | None, *, parts: int = 1) -> None:
        self.every = every
        self.parts = parts
        self.elapsed = 0

    def reset(self, step: int, seconds: float, fraction: float) -> None:
        """Ignores the intervals that ended before this point of the run."""
        self.elapsed = self._intervals(step, seconds, fraction)

    def due(self, step: int, seconds: float, fraction: float) -> bool:
        """Whether an interval has ended since the last call. Intervals in steps do not depend on the clock."""
        before, self.elapsed = self.elapsed, self._intervals(step, seconds, fraction)
        return self.elapsed > before

    def _intervals(self, step: int, seconds: float, fraction: float) -> int:
        if self.every is None:
            return int(fraction * self.parts)
        return int((step if isinstance(self.every, int) else seconds) // self.every)
