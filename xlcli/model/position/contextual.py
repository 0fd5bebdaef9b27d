"""Contextual encodings: the score of a distance depends on what stands there. One vector for each bucket of distances.

Vectors are projected once for each bucket and picked by distance, never once for each pair of tokens.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.model.position import Heads, Position
from xlcli.model.position.t5 import buckets
from xlcli.ops.context import AttentionContext


class Contextual1Position(Position):
    """q · W_r e(bucket): the query asks for a distance."""

    n_terms = 2

    def __init__(
        self, *, dim: int, n_heads: int, head_dim: int, n_buckets: int, max_distance: int, scale: float
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.max_distance = max_distance
        self.scale = scale
        self.table = nn.Embedding(n_buckets, dim)
        self.relative = nn.Linear(dim, n_heads * head_dim, bias=False)

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor:
        """The bias (b h t s)."""
        place = buckets(context, self.table.num_embeddings, self.max_distance)
        keys = rearrange(self.relative(self.table.weight), "n (h e) -> h e n", h=self.n_heads)
        asked: Tensor = (q * self.scale) @ keys.to(q.dtype)
        return asked.gather(-1, place.expand(*q.shape[:-1], -1))


class Contextual2Position(Position):
    """q · W_k e(bucket) + k · W_q e(bucket), by the layer's own projections (He et al. 2021, section 3.1)."""

    n_terms = 3

    def __init__(self, *, dim: int, n_buckets: int, max_distance: int, scale: float) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.scale = scale
        self.table = nn.Embedding(n_buckets, dim)

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor:
        """The bias (b h t s)."""
        place = buckets(context, self.table.num_embeddings, self.max_distance)
        queries, keys = (part.to(q.dtype) * self.scale for part in heads(self.table.weight))
        asked = (q @ keys.mT).gather(-1, place.expand(*q.shape[:-1], -1))
        if len(place) == 1:
            return asked + torch.einsum("bhse,hse->bhs", k, queries[:, place[0]])[:, :, None]
        answered = (k @ queries.mT).gather(-1, place.T.expand(*k.shape[:-1], -1))
        return asked + answered.mT
