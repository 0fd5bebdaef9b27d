"""Token embeddings: one table, a factorized table, or clusters with narrower vectors for rare words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from xlcli.ops.layers import Dropout


class Embedding(nn.Module):
    """Base of token embeddings: vectors, multiplied by sqrt(dim) if `scaled` (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, dim: int, dropout: float, *, scaled: bool) -> None:
        super().__init__()
        self.scale = dim**0.5 if scaled else 1.0
        self.dropout = Dropout(dropout)

    def vectors(self, tokens: Tensor) -> Tensor:
        """Vectors (b t d) of tokens (b t), not scaled."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.vectors(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        return self.dropout(x)  # type: ignore[no-any-return]


class TokenEmbedding(Embedding):
    """A table of vectors; with `inner_dim` they have that width, and `up` projects them to `dim` (Lan et al. 2020)."""

    def __init__(
        self, *, vocab_size: int, dim: int, inner_dim: int | None = None, scaled: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(dim, dropout, scaled=scaled)
        self.table = nn.Embedding(vocab_size, inner_dim or dim)
        self.up = nn.Linear(inner_dim, dim, bias=False) if inner_dim else None

    def vectors(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        if self.up is not None:
            x = self.up(x)
        return x


class AdaptiveEmbedding(Embedding):
    """Adaptive input embedding (Baevski and Auli 2019, section 3), as in the code of Transformer-XL.

    Words are sorted by frequency; `cutoffs` are the first words of all clusters except the first. Cluster i has vectors
    of width w // div_val^i, where w is `inner_dim` or else `dim`. With `inner_dim` or `div_val` > 1, every cluster, the
    first included, projects them to `dim` by a matrix.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        inner_dim: int | None = None,
        cutoffs: Sequence[int],
        div_val: int,
        scaled: bool,
        dropout: float,
    ) -> None:
        super().__init__(dim, dropout, scaled=scaled)
        self.cutoffs = tuple(cutoffs)
        clusters = []
        for i, (start, stop) in enumerate(pairwise((0, *cutoffs, vocab_size))):
            width = inner_dim
            if width is not None or div_val > 1:
                width = (dim if inner_dim is None else inner_dim) // div_val**i
            clusters.append(TokenEmbedding(vocab_size=stop - start, dim=dim, inner_dim=width))
        self.clusters: Sequence[TokenEmbedding] = nn.ModuleList(clusters)  # type: ignore[assignment]

    def vectors(self, tokens: Tensor) -> Tensor:
        # Every cluster embeds every token; tokens of other clusters become word 0. With indexing, the vector of a token
        # could depend on the other tokens of the call in its last bits.
        cluster = cluster_of(tokens, self.cutoffs)
        x: Tensor = self.clusters[0](torch.where(cluster == 0, tokens, 0))
        for i, (start, table) in enumerate(zip(self.cutoffs, self.clusters[1:], strict=True), start=1):
            is_here = cluster == i
            vectors = table(torch.where(is_here, tokens - start, 0))
            x = torch.where(is_here[..., None], vectors, x)
        return x


class BigramEmbedding(nn.Module):
    """Table (n d) of vectors for pairs of successive tokens, which are assigned to rows by a hash.

    n-gram tables of this kind add parameters without arithmetic (Svenstrup et al. 2017; Huang et al. 2025).
    """

    initial_constants: ClassVar[Mapping[str, float]] = {"table.weight": 0.0}  # for `init_weights`

    def __init__(self, n_rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(n_rows, dim)

    def forward(self, tokens: Tensor, previous: Tensor, begins: Tensor | None = None) -> Tensor:
        """Vectors (b t d) of tokens (b t) with their predecessors; `previous` (b) precedes the first, -1 if none.

        Tokens that begin a document, a mask (b t) or None, have no predecessor.
        """
        before = torch.cat((previous[:, None], tokens[:, :-1]), dim=1)
        if begins is not None:
            before = before.masked_fill(begins, -1)
        return self.table(bigram_rows(before, tokens, self.table.num_embeddings))  # type: ignore[no-any-return]


def bigram_rows(previous: Tensor, tokens: Tensor, n_rows: int) -> Tensor:
    """Row of each pair of tokens (int64), 0 to `n_rows` - 1: a multiplicative hash of both numbers."""
    mixed = ((previous + 1) * 2_654_435_761 + tokens) * 668_265_263
    return (mixed ^ (mixed >> 15)) % n_rows


def cluster_of(words: Tensor, cutoffs: Sequence[int]) -> Tensor:
    """Cluster of each word: the number of cutoffs at or below it."""
    cluster = torch.zeros_like(words)
    for cutoff in cutoffs:
        cluster += words >= cutoff
    return cluster
