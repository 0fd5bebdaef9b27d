"""Additions to scores and values that depend on the distance.

ALiBi       penalty that is linear in the distance, with a fixed slope for each head (Press et al. 2022)
T5          a learned scalar for each relative bucket and head (Raffel et al. 2020, section 2.1)
contextual  scores of query and key with a vector for each relative bucket
Shaw        learned vectors of the distance, added to keys and values (Shaw et al. 2018)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.model.position import Position, ScoreRule
from xlcli.ops.context import AttentionContext
from xlcli.ops.scoring import product


class AlibiPosition(Position):
    """Bias without parameters, shared by all layers."""

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
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
    of_power = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    of_next_power = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * (n_heads - power), 2)]
    return of_power + of_next_power


class BucketPosition(Position):
    """Base of encodings with a table of one row for each relative bucket."""

    def __init__(self, *, table: nn.Embedding, max_distance: int) -> None:
        super().__init__()
        self.table = table
        self.max_distance = max_distance

    def buckets(self, context: AttentionContext) -> Tensor:
        """Relative bucket of each distance (t s)."""
        n_buckets, max_distance = self.table.num_embeddings, self.max_distance

        def make() -> Tensor:
            return relative_bucket(context.positions.distance, n_buckets=n_buckets, max_distance=max_distance)

        return context.constant(("relative buckets", n_buckets, max_distance), make)


class T5Position(BucketPosition):
    """Bias from a table (bucket h), which all layers may share; initially zero."""

    initial_constants: ClassVar[Mapping[str, float]] = {"table.weight": 0.0}

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
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


class Contextual1Position(BucketPosition):
    """Position score q · W_r e(bucket)."""

    n_terms = 2

    def __init__(self, *, table: nn.Embedding, max_distance: int, n_heads: int, head_dim: int) -> None:
        super().__init__(table=table, max_distance=max_distance)
        self.n_heads = n_heads
        self.relative = nn.Linear(table.embedding_dim, n_heads * head_dim, bias=False)

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        index = self.buckets(context)
        keys = rearrange(self.relative(self.table.weight), "n (h e) -> h e n", h=self.n_heads)
        query_scores: Tensor = (q * rule.scale) @ keys.to(q.dtype)
        return query_scores.gather(-1, index.expand(*q.shape[:-1], -1))


class Contextual2Position(BucketPosition):
    """Position score q · W_k e(bucket) + k · W_q e(bucket), with the layer's projections (He et al. 2021, sec. 3.1)."""

    n_terms = 3

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        index = self.buckets(context)
        queries, keys = (part.to(q.dtype) * rule.scale for part in rule.project(self.table.weight))
        if len(keys) < len(queries):  # heads of queries share keys
            k = k.repeat_interleave(len(queries) // len(keys), dim=1)
        query_scores = product(q, keys.mT).gather(-1, index.expand(*q.shape[:-1], -1))
        if len(index) == 1:  # of one token, only the products that it needs
            return query_scores + torch.einsum("bhse,hse->bhs", k, queries[:, index[0]])[:, :, None]
        key_scores = (k @ queries.mT).gather(-1, index.T.expand(*k.shape[:-1], -1))
        return query_scores + key_scores.mT


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
