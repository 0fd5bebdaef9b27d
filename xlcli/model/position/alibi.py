"""ALiBi (Press et al. 2022): score penalty that is linear in the distance, with a fixed slope for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xlcli.model.position import Position, ScoreRule
from xlcli.ops.context import AttentionContext


class AlibiPosition(Position):
    """Bias without parameters, shared by all layers."""

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        """Bias -slope * distance (h t s)."""
        n_heads = q.shape[1]

        def make() -> Tensor:
            slope = torch.tensor(slopes(n_heads), device=q.device, dtype=torch.float64)
            return (-slope[:, None, None] * context.positions.distance).to(q.dtype)

        return context.constant(("alibi", n_heads, q.dtype), make)


def slopes(n_heads: int) -> list[float]:
    """Slopes 2^(-8i/n) for i = 1..n if the number of heads n is a power of two (section 3 of the paper).

    Otherwise the slopes of the next lower power, then every second slope of the next higher power, as in its code.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    own = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return own + [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]
