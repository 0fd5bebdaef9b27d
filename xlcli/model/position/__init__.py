"""Position encodings: modules with hooks that attention calls, all of which do nothing by default.

An attention kind calls the hooks that it offers (`config/attention.py`). `embed`, `place` and `far` read absolute
positions, all others distances only, so one encoding serves every kind of softmax attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from xlcli.ops.context import AttentionContext
from xlcli.ops.scoring import FarKeys, ScoreTerm, ShiftedTerm


class ScoreRule(NamedTuple):
    """Scores of a layer: `scale` is the factor on inner products, `project` gives queries and keys of vectors (n d)."""

    scale: float
    project: Callable[[Tensor], tuple[Tensor, Tensor]]


class Position(nn.Module):
    """Base of all encodings, without position information. One instance for each layer and one at the embedding."""

    n_terms = 1  # number of inner products in a score; the softmax scale is 1/sqrt(n_terms * head_dim)

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Inputs (b t d) with absolute positions added."""
        return x

    def place(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries or keys (b h n e) of the n latest tokens with their positions; keys are stored in this form."""
        return x

    def term(self, q: Tensor, context: AttentionContext) -> tuple[Tensor, ScoreTerm | None]:
        """Queries (b h t e), and a second score term or None."""
        return q, None

    def shifted(self, q: Tensor, context: AttentionContext) -> ShiftedTerm | None:
        """A second score term by the distance, for queries (b h t e), or None."""
        return None

    def at_clamp(self, q: Tensor, context: AttentionContext) -> Tensor:
        """Queries (b h t e) for keys without positions, as if these were at the largest distance."""
        return q

    def far(self, q: Tensor, k: Tensor, context: AttentionContext) -> FarKeys | None:
        """Other products for keys that are far from queries (b h t e) and keys (b h s e) in stored form, or None."""
        return None

    def bias(self, q: Tensor, k: Tensor, context: AttentionContext, rule: ScoreRule) -> Tensor | None:
        """Addition (b h t s) or (h t s) to the scaled scores of queries (b h t e) and keys (b h s e), or None."""
        return None

    def value_bias(self, context: AttentionContext) -> Callable[[Tensor], Tensor] | None:
        """Function from the attention weights (b h t s) to an addition (b h t e) to the output, or None."""
        return None
