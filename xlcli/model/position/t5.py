"""T5 bias (Raffel et al. 2020, section 2.1): a learned scalar for each relative bucket and head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from xlcli.model.position import Position, ScoreRule
from xlcli.ops.context import AttentionContext


class BucketPosition(Position):
    """Base of encodings with a table of one row for each relative bucket."""

    def __init__(self, *, table: nn.Embedding, max_distance: int) -> None:
        super().__init__()
        self.table = table
        self.max_distance = max_distance

    def buckets(self, context: AttentionContext) -> Tensor:
        """Relative bucket of each distance (t s)."""
        sizes = {"n_buckets": self.table.num_embeddings, "max_distance": self.max_distance}
        return context.constant(
            ("relative buckets", *sizes.values()), lambda: relative_bucket(context.positions.distance, **sizes)
        )


class T5Position(BucketPosition):
    """Bias from a table (bucket h), which all layers may share; initially zero."""

    initial_constants: ClassVar[Mapping[str, float]] = {"table.weight": 0.0}

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        """Table entries (h t s)."""
        index = self.buckets(context)
        return context.learned((self.table, q.dtype), lambda: self.table.weight.T.to(q.dtype)[:, index])


def relative_bucket(distance: Tensor, *, n_buckets: int, max_distance: int) -> Tensor:
    """Relative bucket (int64, any shape) of each distance; negative distances are in bucket 0.

    Each distance below n_buckets // 2 has its own bucket. The other buckets are log-spaced up to `max_distance`,
    and the last one contains all longer distances.
    """
    return torch.bucketize(distance, _edges(n_buckets, max_distance).to(distance.device), right=True)


def _edges(n_buckets: int, max_distance: int) -> Tensor:
    """Shortest distance (int64) of each bucket except the first."""
    exact = n_buckets // 2
    wide = n_buckets - exact
    ratio = max_distance / exact
    edges = list(range(1, exact + 1))
    for i in range(1, wide):
        edge = exact * ratio ** (i / wide)
        # An edge that is an integer up to rounding errors starts a bucket at that integer.
        edges.append(math.ceil(edge - 16 * math.ulp(edge)))
    return torch.tensor(edges)
