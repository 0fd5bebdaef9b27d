"""Sinusoids of the absolute position (Vaswani et al. 2017, section 3.5): sines of all frequencies, then cosines."""

from __future__ import annotations

import torch
from torch import Tensor

from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies


class SinusoidalPosition(Position):
    """Added to x, `amplitude` times; computed in float64, so that positions of any size are exact."""

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.amplitude = amplitude

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """(b t d) with the signal added."""
        width = x.shape[-1]
        signal = context.cache.constant(("sinusoids", width), lambda: sinusoids(context.positions.absolute, width))
        return x + (self.amplitude * signal).to(x.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines (... width) of positions (...), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)
