"""T5 bias (Raffel et al. 2020, section 2.1): a learned scalar for each relative bucket and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from xlcli.model.position import Position, ProjectVectors
from xlcli.ops.context import AttentionContext
from xlcli.ops.relative_buckets import relative_bucket


class T5Position(Position):
    """Bias from a table (bucket h), which all layers may share; initially zero."""

    initial_constants: ClassVar[Mapping[str, float]] = {"table.weight": 0.0}

    def __init__(self, *, table: nn.Embedding, max_distance: int) -> None:
        super().__init__()
        self.table = table
        self.max_distance = max_distance

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, project: ProjectVectors) -> Tensor:
        """Table entries (h t s)."""
        index = relative_buckets(context, self.table.num_embeddings, self.max_distance)
        return context.cache.learned((self.table, q.dtype), lambda: self.table.weight.T.to(q.dtype)[:, index])


def relative_buckets(context: AttentionContext, n_buckets: int, max_distance: int) -> Tensor:
    """Relative bucket of each distance (t s)."""
    return context.cache.constant(
        ("relative buckets", n_buckets, max_distance),
        lambda: relative_bucket(context.positions.distance, n_buckets=n_buckets, max_distance=max_distance),
    )
