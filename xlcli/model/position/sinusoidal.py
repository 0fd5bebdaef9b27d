"""Sinusoids of the absolute position (Vaswani et al. 2017, section 3.5): sines of all frequencies, then cosines."""

from __future__ import annotations

import torch
from torch import Tensor

from xlcli.model.position import AddedPosition
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies


class SinusoidalPosition(AddedPosition):
    """Sinusoids times `amplitude`, for heads of their width. Angles are in float64, exact for positions of any size."""

    def __init__(self, *, amplitude: float, in_heads: bool = False) -> None:
        super().__init__(in_heads=in_heads)
        self.amplitude = amplitude

    def vectors(self, n: int, width: int, context: AttentionContext) -> Tensor:
        """Sinusoids (b n width)."""
        key = "sinusoids", n, width
        return self.amplitude * context.constant(key, lambda: sinusoids(context.positions.latest(n), width))


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines (... width) of positions (...), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)
