"""ALiBi (Press et al. 2022): a penalty on the score, linear in the distance, with a fixed slope for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xlcli.model.position import Heads, Position
from xlcli.ops.context import AttentionContext


class AlibiPosition(Position):
    """Nothing to learn; the same in every layer."""

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor:
        """-slope * distance (h t s)."""
        n_heads = q.shape[1]

        def make() -> Tensor:
            slope = torch.tensor(slopes(n_heads), device=q.device, dtype=torch.float64)
            return (-slope[:, None, None] * context.positions.distance).to(q.dtype)

        return context.cache.constant(("alibi", n_heads, q.dtype), make)


def slopes(n_heads: int) -> list[float]:
    """2^(-8i/n) for i = 1..n, where n is a power of two (section 3 of the paper).

    Other numbers of heads get the slopes of the power below, then every second one of the power above, as in its code.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    own = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return own + [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]
