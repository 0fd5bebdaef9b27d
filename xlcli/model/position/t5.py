"""T5's bias (Raffel et al. 2020, section 2.1): a learned number for each bucket of distances and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from xlcli.model.position import Heads, Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.relative_buckets import bucket


class T5Position(Position):
    """The table (bucket h) may be shared by all layers."""

    initial_constants: ClassVar[Mapping[str, float]] = {"table.weight": 0.0}

    def __init__(self, *, table: nn.Embedding, max_distance: int) -> None:
        super().__init__()
        self.table = table
        self.max_distance = max_distance

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor:
        """The entry of the distance's bucket (h t s)."""
        place = buckets(context, self.table.num_embeddings, self.max_distance)
        return context.cache.learned((self.table, q.dtype), lambda: self.table.weight.T.to(q.dtype)[:, place])


def buckets(context: AttentionContext, n_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance (t s)."""
    return context.cache.constant(
        ("buckets", n_buckets, max_distance),
        lambda: bucket(context.positions.distance, n_buckets=n_buckets, max_distance=max_distance),
    )
