"""Rotary encoding (Su et al. 2021): features of queries and keys are turned in pairs by their position.

Turned by absolute positions, whose inner products depend on the distance alone. Angles are computed in float64, so the
position may be of any size, and a key is turned once, when it is read.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies

Layout = Literal["half", "interleaved"]
"""Which features make a pair: f and f + e/2, or 2f and 2f + 1."""


class RopePosition(Position):
    """In the layers: queries and keys are turned, values are not."""

    def __init__(self, *, layout: Layout, base: float) -> None:
        super().__init__()
        self.layout = layout
        self.base = base

    def rotate(self, x: Tensor, context: AttentionContext) -> Tensor:
        """(b h n e) turned; the n tokens are the latest of memory and call."""
        n, width = x.shape[-2:]

        def make() -> tuple[Tensor, Tensor]:
            stop = context.positions.first + context.n_new
            return rope_angles(torch.arange(stop - n, stop, device=x.device), width, self.base)

        return apply_rope(x, *context.cache.constant(("rope_angles", n, width, self.base), make), self.layout)


class RopeEmbedding(RopePosition):
    """At the embedding: not relative, because the projections that follow do not commute with it. An ablation."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """(b t d) turned by the absolute positions."""
        return apply_rope(x, *rope_angles(context.positions.absolute, x.shape[-1], self.base), self.layout)


def rope_angles(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Sine and cosine (... width/2) of positions (...) times the frequencies base^(-2f/width), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device, base)
    return angle.sin(), angle.cos()


def apply_rope(x: Tensor, sin: Tensor, cos: Tensor, layout: Layout) -> Tensor:
    """x (... n e) with its pairs turned by the angles (... n e/2); in float32 at least, then of x's type again."""
    exact = torch.promote_types(x.dtype, torch.float32)
    sin, cos = sin.to(exact), cos.to(exact)
    pairs = "... (two f) -> two ... f" if layout == "half" else "... (f two) -> two ... f"
    a, b = rearrange(x.to(exact), pairs, two=2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin))
    left, _, right = pairs.partition(" -> ")
    return rearrange(turned, f"{right} -> {left}").to(x.dtype)
