"""Vectors of absolute positions that are added to inputs, or to queries and keys.

Positions count from the beginning of the text, or of a window of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.errors import DataError
from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies


class AddedPosition(Position):
    """Base of vectors that are added to inputs or, with `in_heads`, to the queries and keys of a layer."""

    def __init__(self, *, in_heads: bool) -> None:
        super().__init__()
        self.in_heads = in_heads

    def vectors(self, n: int, width: int, context: AttentionContext) -> Tensor:
        """Vectors (b n d) of the n latest tokens, or (1 n d) for all sequences; d is `width` or that of all heads."""
        raise NotImplementedError

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        if self.in_heads:
            return x
        return x + self.vectors(x.shape[1], x.shape[2], context).to(x.dtype)

    def place(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries or keys plus vectors, of all heads alike or a part for each head."""
        if not self.in_heads:
            return x
        n, e = x.shape[2:]
        vectors = context.learned((self, n, e), lambda: self.vectors(n, e, context))
        return x + rearrange(vectors, "b n (h e) -> b h n e", e=e).to(x.dtype)


class SinusoidalPosition(AddedPosition):
    """Sinusoids times `amplitude` (Vaswani et al. 2017, section 3.5), with exact angles for positions of any size."""

    def __init__(self, *, amplitude: float, in_heads: bool = False) -> None:
        super().__init__(in_heads=in_heads)
        self.amplitude = amplitude

    def vectors(self, n: int, width: int, context: AttentionContext) -> Tensor:
        key = "sinusoids", n, width
        return self.amplitude * context.constant(key, lambda: sinusoids(context.positions.latest(n), width))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines (... width) of positions (...), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class AxialPosition(AddedPosition):
    """Concatenated vectors of the digits of a position: for shape (n1, n2), the digits (p div n2, p mod n2).

    Kitaev et al. 2020. With a single axis, a table of learned positions (Gehring et al. 2017). Beyond the last vector
    positions wrap around or raise an error.
    """

    def __init__(self, *, shape: Sequence[int], dims: Sequence[int], wraps: bool, in_heads: bool = False) -> None:
        super().__init__(in_heads=in_heads)
        self.shape = tuple(shape)
        self.wraps = wraps
        self.axes = nn.ModuleList(nn.Embedding(n, width) for n, width in zip(shape, dims, strict=True))

    def vectors(self, n: int, width: int, context: AttentionContext) -> Tensor:
        key = "digits", self.shape, self.wraps, n
        digits = context.constant(key, lambda: self._digits(context.positions.latest(n)))
        return torch.cat([axis(digit) for axis, digit in zip(self.axes, digits, strict=True)], dim=-1)

    def _digits(self, positions: Tensor) -> list[Tensor]:
        """Digits (b n) of positions (b n), most significant first; `DataError` if a position has no vector."""
        total = math.prod(self.shape)
        last = total - 1 if self.wraps else int(positions.max())
        if last >= total:
            raise DataError(
                f"position {last:,} is beyond the {total:,} learned positions of this model.",
                "Train with --set model.position.overflow=wrap, or read this text with --mem-len 0.",
            )
        quotient = positions % total
        digits = []
        for n in reversed(self.shape):
            digits.append(quotient % n)
            quotient = quotient // n
        return digits[::-1]
