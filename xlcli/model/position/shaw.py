"""Shaw et al. 2018: learned vectors of the distance, added to keys and values, shared by the heads of a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from xlcli.model.position import Position, ScoreRule
from xlcli.ops.context import AttentionContext


class ShawPosition(Position):
    """One vector for each distance up to `max_distance`; longer distances use the vector of `max_distance`."""

    def __init__(self, *, head_dim: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.keys = nn.Embedding(max_distance + 1, head_dim)
        self.value_vectors = nn.Embedding(max_distance + 1, head_dim)

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        """Scores q · a^K of the distance (b h t s); equation 4."""
        index = self._clipped(context).expand(*q.shape[:-1], -1)
        return ((q * rule.scale) @ self.keys.weight.T.to(q.dtype)).gather(-1, index)

    def value_bias(self, context: AttentionContext) -> Callable[[Tensor], Tensor]:
        """Sum of weight times a^V of the distance (b h t e); equation 3."""
        clipped = self._clipped(context)

        def values(weights: Tensor) -> Tensor:
            # Weights of equal distance are summed before the product with the vectors.
            index = clipped.expand_as(weights)
            by_distance = weights.new_zeros(*weights.shape[:-1], self.max_distance + 1).scatter_add(-1, index, weights)
            return by_distance @ self.value_vectors.weight.to(weights.dtype)

        return values

    def _clipped(self, context: AttentionContext) -> Tensor:
        longest = self.max_distance
        return context.constant(("clipped", longest), lambda: context.positions.distance.clamp(0, longest))
