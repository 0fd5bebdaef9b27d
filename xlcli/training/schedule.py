"""The course of a run: counters, clock, intervals of validations and checkpoints, early stopping, overfitting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field

from xlcli.config import BaseConfig
from xlcli.errors import counted
from xlcli.ranks import Ranks
from xlcli.store.layout import numbers

Steps = Annotated[int, Field(ge=0, lt=10**12)]


class Counters(BaseConfig):
    """Counters of a run, which `state.json` of a checkpoint holds."""

    step: Steps = 0  # steps taken
    tokens: Annotated[int, Field(ge=0, lt=10**18)] = 0  # tokens trained on
    seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0  # spent until the last save, by all processes
    n_read: Annotated[int, Field(ge=0, lt=10**18)] = 0  # tokens of each sequence that were read
    best_bits: Annotated[float, Field(allow_inf_nan=False)] | None = None  # bits per byte of the best validation
    best_step: Steps | None = None  # step of the best validation
    validated_step: Steps | None = None  # step of the last validation
    validation_due: bool = False  # a validation is due that has not been completed
    rollbacks: Annotated[int, Field(ge=0, le=100)] = 0  # number of roll-backs, each of which divides the learning rates
    stale: Steps = 0  # validations since the best one
    plateau: Annotated[float, Field(gt=0.0, le=1.0)] | None = None  # share of the budget spent when patience ran out
    reserve: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0  # seconds for last validation, final score

    @property
    def progress(self) -> tuple[int, int | None]:
        """Step, and step of the last validation."""
        return self.step, self.validated_step

    @property
    def is_validated(self) -> bool:
        return self.validated_step == self.step


class Clock:
    """Seconds of a run, and whether to stop it. All ranks use the seconds of the first one, and stop if one is to stop.

    It is made with the seconds `before` this process, and functions for those since a start in this process
    (`running`) and for whether this process is to `stop`.
    """

    def __init__(self, ranks: Ranks, before: float, running: Callable[[], float], stop: Callable[[], bool]) -> None:
        self.ranks, self.stop = ranks, stop
        self._before, self._running = before, running
        # Seconds of the run at the latest `synchronize`, those of validation by the first rank in this process.
        self.seconds, self.validation, self.stops = before, 0.0, False

    def now(self) -> float:
        """Seconds spent on this run, by this process."""
        return self._before + self._running()

    def synchronize(self, validation: float = 0.0) -> float:
        """Sets the attributes to equal values on all ranks, those of the clock of the first rank. All must call it.

        `validation` are the seconds that a validation took, if there was one; returns those of the first rank.
        """
        seconds = self.now()
        if not self.ranks.is_first:
            # Sums over the ranks are then the values of the first one.
            seconds, validation = 0.0, 0.0
        of_rank = torch.tensor([seconds, validation, float(self.stop())], dtype=torch.float64)
        self.seconds, validation, n_stops = self.ranks.sum(of_rank).tolist()
        self.stops = n_stops > 0.0
        self.validation += validation
        return float(validation)


@dataclass
class IntervalTrigger:
    """Triggers an action at regular intervals."""

    every: int | float | None  # in steps (int) or seconds (float); None divides the budget into `parts` intervals
    parts: int = 1
    elapsed: int = 0  # number of intervals that have ended

    def move_on(self, step: int, seconds: float, fraction: float) -> bool:
        """Counts the intervals that have ended by now, and returns whether one has since the last call.

        Intervals in steps do not depend on the clock. `fraction` is the share of the budget that is spent.
        """
        before = self.elapsed
        if self.every is None:
            self.elapsed = int(fraction * self.parts)
        elif isinstance(self.every, int):
            self.elapsed = step // self.every
        else:
            self.elapsed = int(seconds // self.every)
        return self.elapsed > before


@dataclass(frozen=True)
class Patience:
    """Counter of validations without improvement; the budget of the run is shortened after `limit` of them.

    The last part of the schedule, in which `wsd` decays, begins at once. A schedule without decay (`decay` 0) ends at
    once, and one that is already in its last part does not change.
    """

    limit: int | None  # number of validations without improvement; None never shortens the run
    decay: float  # share of a run in which the learning rate decays at its end; 0 if it does not depend on the budget
    counters: Counters  # counters of the run, of which patience uses `stale` and `plateau`

    @property
    def end(self) -> float:
        """Share of the budget at which the run ends: 1 until patience runs out.

        The rest of the run is then its decay, and what was spent before is the share 1 - `decay` of it: if that is 0.4
        of the budget, and `decay` is 0.2, the run ends at 0.5.
        """
        spent_before_decay = self.counters.plateau
        decays_from_start = self.decay == 1.0
        if spent_before_decay is None or decays_from_start:
            return 1.0
        return min(1.0, spent_before_decay / (1.0 - self.decay))

    def observe(self, spent: float, *, best: bool) -> dict[str, Any]:
        """New values of the counters `stale` and `plateau`, by name, after a validation.

        `spent` is the share of the budget that is spent, less than 1; `best`: no validation before was better.
        """
        n_without_improvement = 0 if best else self.counters.stale + 1
        spent_when_run_out = self.counters.plateau
        is_too_many = self.limit is not None and n_without_improvement >= self.limit
        if is_too_many and spent_when_run_out is None:
            spent_when_run_out = spent
        return {"stale": n_without_improvement, "plateau": spent_when_run_out}

    def describe(self) -> str:
        """Message that patience ran out after this step."""
        reason = f"the last {counted(self.counters.stale, 'validation')} brought no improvement"
        if self.end == 1.0:
            return f"{reason}: the run is in its last part and ends with its budget"
        if not self.decay:
            return f"{reason}: the run ends"
        last = round(self.counters.step / (1.0 - self.decay))
        return f"{reason}: the learning rate decays from here, and the run ends at about step {last:,}"

    def fraction(self, spent: float) -> float:
        """Share of the run that is done when the share `spent` of its budget is spent, both 0 to 1.

        The two are equal until patience runs out. Then the learning rate decays at once, in the last part of the run,
        its share `decay`. So what is done jumps to 1 - `decay`, and grows evenly to 1, which it reaches at the `end`.
        Example with a decay of 0.2, from 0.4 of the budget to 0.5 of it: 0.4, 0.45 and 0.5 give 0.8, 0.9 and 1.
        """
        spent_before_decay = self.counters.plateau
        if spent_before_decay is None or self.end == 1.0:
            return spent
        budget_of_decay = self.end - spent_before_decay
        if budget_of_decay == 0.0:  # this schedule has no decay
            return 1.0
        decay_left = 1.0 - (spent - spent_before_decay) / budget_of_decay
        if decay_left <= ROUNDING:
            return 1.0
        return 1.0 - self.decay * decay_left


ROUNDING = 1e-9  # share of the decay that counts as nothing, so that rounding errors add no step
RISES = 3  # successive rises of the validation that show overfitting
RISE = 1.01  # the least ratio to the best validation that they end with


def overfits(rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if the last of these rows of `metrics.jsonl` is the first since the best validation that shows overfitting.

    That is: validations rose `RISES` times in a row, to `RISE` times the best or more, while the training loss fell. An
    average of the steps before the last validation is compared with that of the steps after the best one.
    """
    since_best: Sequence[Mapping[str, Any]] = []  # rows from the latest validation on that was the best so far
    for i, row in enumerate(rows):
        if row.get("best") is True:
            since_best = rows[i:]
    scores: list[float] = []  # of each validation, first the best one
    losses: list[float] = []  # mean training loss of the steps before each; there are none before the first
    nats: list[float] = []  # of the steps since the last validation
    for row in since_best:
        figures = numbers(row)
        if "validation_bits_per_byte" not in figures:
            nats.append(figures.get("nats", math.inf))
            continue
        scores.append(figures["validation_bits_per_byte"])
        losses.append(sum(nats) / max(1, len(nats)))
        nats = []
        if len(scores) <= RISES:
            continue
        is_rising = all(earlier < later for earlier, later in pairwise(scores[-RISES - 1 :]))
        is_much_worse = scores[-1] >= RISE * scores[0]
        fits_better = losses[-1] < losses[1]
        if is_rising and is_much_worse and fits_better:
            return row is rows[-1]
    return False
