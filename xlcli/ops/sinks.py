"""Attention sinks: the first tokens of a text, which stay visible besides the latest ones (Xiao et al. 2024)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from xlcli.ops.heads import product


class Sinks(NamedTuple):
    """Queries (b h t e), and keys (b g n e) and values (b g n w), which they see where `visible` (b 1 t n) is true."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor

    def scores(self, scale: float) -> Tensor:
        """Scores (b h t n), -inf where hidden."""
        scores = product(self.queries * scale, self.keys.to(self.queries.dtype).mT)
        return scores.masked_fill(~self.visible, float("-inf"))
