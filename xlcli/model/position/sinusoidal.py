"""Sinusoids of the absolute position (Vaswani et al. 2017, section 3.5): sines of all frequencies, then cosines."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies


class SinusoidalPosition(Position):
    """Sinusoids times `amplitude`, added to x. Angles are computed in float64, exact for positions of any size."""

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.amplitude = amplitude

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Input (b t d) plus sinusoids."""
        width = x.shape[-1]
        signal = context.constant(("sinusoids", width), lambda: sinusoids(context.positions.absolute, width))
        return x + (self.amplitude * signal).to(x.dtype)


class SinusoidalHeadPosition(SinusoidalPosition):
    """Sinusoids of the width of a head, added to the queries and keys of every head of a layer."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Input unchanged."""
        return x

    def place(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries or keys (b h n e) plus sinusoids."""
        n, width = x.shape[-2:]
        signal = context.constant(("sinusoids", n, width), lambda: sinusoids(context.positions.latest(n), width))
        return x + rearrange(self.amplitude * signal, "b n e -> b 1 n e").to(x.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines (... width) of positions (...), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)
