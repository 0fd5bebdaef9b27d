"""Contextual encodings: position scores that depend on query and key, with one vector for each relative bucket.

Vectors are projected once per bucket and gathered by distance, not projected per pair of tokens.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.model.position import ScoreRule
from xlcli.model.position.t5 import BucketPosition
from xlcli.ops.context import AttentionContext
from xlcli.ops.heads import product


class Contextual1Position(BucketPosition):
    """Position score q · W_r e(bucket)."""

    n_terms = 2

    def __init__(self, *, table: nn.Embedding, max_distance: int, n_heads: int, head_dim: int) -> None:
        super().__init__(table=table, max_distance=max_distance)
        self.n_heads = n_heads
        self.relative = nn.Linear(table.embedding_dim, n_heads * head_dim, bias=False)

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        """Position scores (b h t s)."""
        index = self.buckets(context)
        keys = rearrange(self.relative(self.table.weight), "n (h e) -> h e n", h=self.n_heads)
        query_scores: Tensor = (q * rule.scale) @ keys.to(q.dtype)
        return query_scores.gather(-1, index.expand(*q.shape[:-1], -1))


class Contextual2Position(BucketPosition):
    """Position score q · W_k e(bucket) + k · W_q e(bucket), with the layer's projections (He et al. 2021, sec. 3.1)."""

    n_terms = 3

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor:
        """Position scores (b h t s)."""
        index = self.buckets(context)
        queries, keys = (part.to(q.dtype) * rule.scale for part in rule.project(self.table.weight))
        k = k.repeat_interleave(len(queries) // len(keys), dim=1) if len(keys) < len(queries) else k
        query_scores = product(q, keys.mT).gather(-1, index.expand(*q.shape[:-1], -1))
        if len(index) == 1:
            return query_scores + torch.einsum("bhse,hse->bhs", k, queries[:, index[0]])[:, :, None]
        key_scores = (k @ queries.mT).gather(-1, index.T.expand(*k.shape[:-1], -1))
        return query_scores + key_scores.mT
