"""From tokens to vectors: one table, one factorized into two matrices, or one whose rare words are narrower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """Rows of one table, multiplied by sqrt(dim) when `scaled` (Vaswani et al. 2017, section 3.4).

    With `inner_dim` the rows have that width and a matrix takes them to `dim` (Lan et al. 2020, section 3.1).
    """

    def __init__(
        self, *, vocab_size: int, dim: int, inner_dim: int | None = None, scaled: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, inner_dim or dim)
        self.up = nn.Linear(inner_dim, dim, bias=False) if inner_dim else None
        self.scale = dim**0.5 if scaled else 1.0
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b t) to (b t d)."""
        x = self.table(tokens)
        if self.up is not None:
            x = self.up(x)
        return self.dropout(x * self.scale if self.scale != 1.0 else x)  # type: ignore[no-any-return]


class AdaptiveEmbedding(nn.Module):
    """Adaptive input (Baevski and Auli 2019, section 3), with the details of Transformer-XL's code.

    Words are sorted by frequency, and `cutoffs` are the first words of all clusters but the first. Cluster i has rows
    of width dim // div_val^i and, when `div_val` > 1, a matrix that takes them to `dim`; so has the first, whose rows
    are as wide as that already.
    """

    def __init__(
        self, *, vocab_size: int, dim: int, cutoffs: Sequence[int], div_val: int, scaled: bool, dropout: float
    ) -> None:
        super().__init__()
        self.cutoffs = tuple(cutoffs)
        borders = (0, *cutoffs, vocab_size)
        self.clusters = nn.ModuleList(
            TokenEmbedding(vocab_size=stop - start, dim=dim, inner_dim=dim // div_val**i if div_val > 1 else None)
            for i, (start, stop) in enumerate(pairwise(borders))
        )
        self.scale = dim**0.5 if scaled else 1.0
        self.dropout = nn.Dropout(dropout)

    def tables(self) -> Iterator[TokenEmbedding]:
        """The clusters, frequent words first."""
        for cluster in self.clusters:
            assert isinstance(cluster, TokenEmbedding)
            yield cluster

    def forward(self, tokens: Tensor) -> Tensor:
        """(b t) to (b t d)."""
        # Every cluster sees every token, the foreign ones as its word 0: its matrix costs little, and no token's vector
        # depends on which others share its call, not even in the last bit.
        cluster = cluster_of(tokens, self.cutoffs)
        x: Tensor | None = None
        for i, (start, table) in enumerate(zip((0, *self.cutoffs), self.tables(), strict=True)):
            own = cluster == i
            vectors = table(torch.where(own, tokens - start, 0))
            x = vectors if x is None else torch.where(own[..., None], vectors, x)
        assert x is not None
        return self.dropout(x * self.scale if self.scale != 1.0 else x)  # type: ignore[no-any-return]


def cluster_of(words: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """The cluster of each word: how many cutoffs are not beyond it."""
    cluster = torch.zeros_like(words)
    for cutoff in cutoffs:
        cluster += words >= cutoff
    return cluster
