"""Notices and progress of any workflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Notice:
    """Message for the user: a choice made automatically, a warning, or a hint at a better choice."""

    text: str
    level: Literal["info", "warning", "detail", "hint"] = "info"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long stage, in `unit`s. `total` is None if unknown; `rate` is units per second."""

    stage: str
    done: int
    total: int | None
    unit: str
    rate: float | None = None


PROGRESS_INTERVAL = 0.2
"""Minimum seconds between two `Progress` events of a stage."""


class ProgressMeter:
    """Makes the `Progress` events of one stage, at most one every `PROGRESS_INTERVAL` seconds.

    Args:
        stage: Name of the stage, such as "tokenizing".
        total: Amount of work; None if unknown.
        unit: Its unit.
    """

    def __init__(self, stage: str, total: int | None, unit: str) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self._started = self._reported = time.monotonic()

    def report(self, done: int) -> Iterator[Progress]:
        """An event for the amount `done`, if the last one is old enough."""
        now = time.monotonic()
        if now - self._reported >= PROGRESS_INTERVAL:
            self._reported = now
            yield Progress(self.stage, done, self.total, self.unit, done / (now - self._started))


class StoppedEarlyError(Exception):
    """`stop` became true before there was anything to save or to score."""


def until(stop: Callable[[], bool], work: Generator[E, None, T]) -> Generator[E, None, T]:
    """Events and result of `work`, which is closed as soon as `stop` is true.

    Raises:
        StoppedEarlyError: It was.
    """
    while not stop():
        try:
            event = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield event
    work.close()
    raise StoppedEarlyError
