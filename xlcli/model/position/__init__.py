"""Position encodings: how a score depends on where query and key stand.

An encoding consumes distances, never lengths, through hooks that do nothing by default. `rotate` may also return a
second score term: queries (b h t f) and keys (s f), the keys shared by all heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from xlcli.ops.span import Frame

Term = tuple[Tensor, Tensor]


class Position(nn.Module):
    """No position information; the base of every encoding. One instance a layer."""

    def rotate(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Term | None]:
        """Queries (b h t e) and keys (b h s e) as the inner product should see them, and an additional term."""
        return q, k, None

    def bias(self, q: Tensor, k: Tensor, frame: Frame) -> Tensor | None:
        """Bias (b h t s) on the unscaled scores, or None."""
        return None
