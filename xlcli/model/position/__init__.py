"""Position encodings: how a score depends on where query and key stand.

Every hook does nothing by default. Attention calls those that it offers (`xlcli.config.attention`), in the order of
this file. All but the first two consume distances, never positions, so that one encoding serves every kind of softmax
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from xlcli.ops.context import AttentionContext

Term = tuple[Tensor, Tensor]
"""A second score term: queries (b h t f), and keys (s f) shared by all heads."""
Heads = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Vectors (n d) to the queries and keys (h n e) that the layer's projections make of them."""


class Position(nn.Module):
    """No position information; the base of every encoding. One instance a layer, and one at the embedding."""

    initial_constants: ClassVar[Mapping[str, float]] = {}
    """Parameters with a constant initial value; all others are drawn (`model/init.py`)."""
    n_terms = 1
    """Inner products that make up a score: scores are divided by sqrt(n_terms * head_dim)."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Inputs (b t d) with their absolute positions marked."""
        return x

    def rotate(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries or keys (b h n e) of the n latest tokens as the inner product should see them; keys are kept so."""
        return x

    def term(self, q: Tensor, context: AttentionContext) -> tuple[Tensor, Term | None]:
        """Queries (b h t e) for the keys, and an additional score term."""
        return q, None

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, heads: Heads) -> Tensor | None:
        """What is added to the scaled scores of queries (b h t e) and keys (b h s e): (b h t s), (h t s) or None."""
        return None

    def value_bias(self, context: AttentionContext) -> Callable[[Tensor], Tensor] | None:
        """Function from the attention weights (b h t s) to an addition (b h t e) to the output, or None."""
        return None
