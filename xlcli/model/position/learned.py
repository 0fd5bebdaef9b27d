"""Learned vectors of absolute positions: one per position, or axial, one per digit of the position.

Positions count from the beginning of the text, or of a window of it. Beyond the last vector they wrap around or raise
an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xlcli.errors import DataError
from xlcli.model.position import AddedPosition
from xlcli.ops.context import AttentionContext


class AxialPosition(AddedPosition):
    """Concatenated vectors of the digits of a position: for shape (n1, n2), the digits (p div n2, p mod n2).

    Kitaev et al. 2020. With a single axis, a table of learned positions (Gehring et al. 2017).
    """

    def __init__(self, *, shape: Sequence[int], dims: Sequence[int], wraps: bool, in_heads: bool = False) -> None:
        super().__init__(in_heads=in_heads)
        self.shape = tuple(shape)
        self.wraps = wraps
        self.axes = nn.ModuleList(nn.Embedding(n, width) for n, width in zip(shape, dims, strict=True))

    def vectors(self, n: int, width: int, context: AttentionContext) -> Tensor:
        """Vectors of the digits of positions."""
        key = "digits", self.shape, self.wraps, n
        digits = context.constant(key, lambda: self._digits(context.positions.latest(n)))
        return torch.cat([axis(digit) for axis, digit in zip(self.axes, digits, strict=True)], dim=-1)

    def _digits(self, positions: Tensor) -> list[Tensor]:
        total = math.prod(self.shape)
        if not self.wraps and (last := int(positions.max())) >= total:
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
