"""Learning-rate schedules after the warmup: each is a class here, with its name in `ScheduleName` and `SCHEDULES`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]


@dataclass(frozen=True)
class Schedule(ABC):
    """How the learning rate decays: from 1 at the end of the warmup, and it never rises.

    Attributes:
        n_warmup: Steps of warmup.
        decay_fraction: Last share of the budget, in which `wsd` decays.
    """

    n_warmup: int
    decay_fraction: float

    @abstractmethod
    def decay(self, fraction: float, step: int) -> float:
        """What is left of the learning rate, 1 to 0, after a share of the budget, 0 to 1, and a number of steps."""

    @property
    def ends_with_budget(self) -> bool:
        """True if the rate decays to the end of the budget. If not, patience can end the run at any step."""
        return self.decay(1.0, step=0) < self.decay(0.0, step=0)


class CosineSchedule(Schedule):
    """Half a cosine over the budget."""

    def decay(self, fraction: float, step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * fraction))


class LinearSchedule(Schedule):
    """A straight line over the budget."""

    def decay(self, fraction: float, step: int) -> float:
        return 1.0 - fraction


class WarmupStableDecaySchedule(Schedule):
    """Constant, then a straight line in the last share of the budget (Hu et al. 2024, section 4)."""

    def decay(self, fraction: float, step: int) -> float:
        return min(1.0, (1.0 - fraction) / self.decay_fraction)


class ConstantSchedule(Schedule):
    """No decay."""

    def decay(self, fraction: float, step: int) -> float:
        return 1.0


class InverseSquareRootSchedule(Schedule):
    """Proportional to 1/sqrt(step) after the warmup, whatever the budget (Vaswani et al. 2017, section 5.3)."""

    def decay(self, fraction: float, step: int) -> float:
        return float(min(1.0, (self.n_warmup + 1) / (step + 1)) ** 0.5)


SCHEDULES: Mapping[ScheduleName, type[Schedule]] = {
    "cosine": CosineSchedule,
    "linear": LinearSchedule,
    "wsd": WarmupStableDecaySchedule,
    "constant": ConstantSchedule,
    "inverse_sqrt": InverseSquareRootSchedule,
}
