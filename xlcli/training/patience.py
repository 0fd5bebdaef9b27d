"""Early stopping: the end of a run whose validations no longer improve."""

from __future__ import annotations

from dataclasses import dataclass

from xlcli.config import TrainConfig
from xlcli.optim import BUDGET_SCHEDULES


@dataclass
class Patience:
    """Counter of validations without improvement; the budget of the run is shortened after `limit` of them.

    The last part of the schedule, in which `wsd` decays, begins at once. It takes the share `decay` of the shortened
    run: if `decay` is a fifth, a quarter of the steps before it. A schedule without decay (`decay` 0) ends at once, and
    one that is already in its last part does not change.

    Attributes:
        limit: Number of validations without improvement; None never shortens the run.
        decay: Share of a run in which the learning rate decays at its end; 0 if it does not depend on the budget.
        stale: Validations since the best one.
        plateau: Share of the budget that was spent when patience ran out; None before that.
    """

    limit: int | None
    decay: float
    stale: int = 0
    plateau: float | None = None

    @staticmethod
    def of(train: TrainConfig) -> Patience:
        """Patience of a new run."""
        return Patience(train.patience, train.decay_fraction if train.lr_schedule in BUDGET_SCHEDULES else 0.0)

    @property
    def end(self) -> float:
        """Share of the budget at which the run ends."""
        if self.plateau is None or self.decay == 1.0:
            return 1.0
        return min(1.0, self.plateau / (1.0 - self.decay))

    def observe(self, spent: float, *, best: bool) -> bool:
        """Counts a validation after a share `spent` of the budget. Whether patience ran out with it."""
        self.stale = 0 if best else self.stale + 1
        if self.limit is None or self.plateau is not None or self.stale < self.limit:
            return False
        self.plateau = spent
        return True

    def describe(self, step: int) -> str:
        """Message that patience ran out after `step` steps."""
        reason = f"the last {self.stale} validation{'s' if self.stale > 1 else ''} brought no improvement"
        if self.end == 1.0:
            return f"{reason}: the run is in its last part and ends with its budget"
        if not self.decay:
            return f"{reason}: the run ends"
        last = round(step / (1.0 - self.decay))
        return f"{reason}: the learning rate decays from here, and the run ends at about step {last:,}"

    def fraction(self, spent: float) -> float:
        """Share of the run that is done after a share `spent` of the budget, both 0 to 1."""
        if self.plateau is None or self.end == 1.0:
            return spent
        length = self.end - self.plateau
        left = 1.0 - (spent - self.plateau) / length if length else 0.0
        return 1.0 - self.decay * left if left > 1e-9 else 1.0
