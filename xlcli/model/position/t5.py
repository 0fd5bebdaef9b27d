"""T5's bias (Raffel et al. 2020, section 2.1): a learned number for each bucket of distances and head."""

from __future__ import annotations

from torch import Tensor, nn

from xlcli.model.position import Heads, Position
from xlcli.ops.relative_buckets import bucket
from xlcli.ops.span import AttentionContext


class T5Position(Position):
    """The table (bucket h) may be shared by all layers."""

    def __init__(self, *, table: nn.Embedding, max_distance: int) -> None:
        super().__init__()
        self.table = table
        self.max_distance = max_distance

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor:
        """The entry of the distance's bucket (h t s)."""
        place = buckets(context, self.table.num_embeddings, self.max_distance)
        return context.cached((self.table, q.dtype), lambda: self.table.weight.T.to(q.dtype)[:, place])


def buckets(context: AttentionContext, n_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance (t s)."""
    return context.cached(
        ("buckets", n_buckets, max_distance),
        lambda: bucket(context.distance, n_buckets=n_buckets, max_distance=max_distance),
    )
