"""Rotary encoding (Su et al. 2021): pairs of features of queries and keys are rotated by their position.

The rotation uses absolute positions, but inner products depend on the distance only, so a key is rotated once. A key
that is rounded afterwards has the same value in every batch, because positions count from the beginning of the text.
Angles are computed in float64, exact for positions of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.model.position import Position
from xlcli.ops.attend_blocks import FarKeys
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies

Layout = Literal["half", "interleaved"]
"""Features of a pair: `half` f and f + e/2, `interleaved` 2f and 2f + 1."""


class RopePosition(Position):
    """Rotation of queries and keys in every layer."""

    def __init__(self, *, layout: Layout, base: float) -> None:
        super().__init__()
        self.layout = layout
        self.base = base

    def place(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Rotated queries or keys (b h n e) of the n latest tokens."""
        n, width = x.shape[-2:]

        def make() -> tuple[Tensor, Tensor]:
            return rope_angles(context.positions.latest(n)[:, None], width, self.base)

        return apply_rope(x, *context.constant(("rope_angles", n, width, self.base), make), self.layout)

    def far(self, q: Tensor, k: Tensor, context: AttentionContext) -> FarKeys | None:
        """Queries rotated by the largest distance, and keys that are not rotated.

        Keys are stored rotated by their positions, so these rotations are taken back.
        """
        limit, positions = context.clamp_len, context.positions
        if limit is None:
            return None
        width = q.shape[-1]

        def turned(x: Tensor, name: str, by: Callable[[], Tensor]) -> Tensor:
            angles = context.constant((name, width, self.base), lambda: rope_angles(by()[:, None], width, self.base))
            return apply_rope(x, *angles, self.layout)

        queries = turned(q, "far queries", lambda: limit - positions.absolute)
        keys = turned(k, "far keys", lambda: -positions.absolute_keys)
        return FarKeys(queries, keys, limit, positions)


class RopeEmbedding(RopePosition):
    """Rotation of the embedding, an ablation: not relative, because projections do not commute with the rotation."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Rotated input (b t d)."""
        return apply_rope(x, *rope_angles(context.positions.absolute, x.shape[-1], self.base), self.layout)


def rope_angles(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Sine and cosine (... width/2) of positions (...) times the frequencies base^(-2f/width), in float64."""
    angle = positions[..., None].double() * frequencies(width, positions.device, base)
    return angle.sin(), angle.cos()


def apply_rope(x: Tensor, sin: Tensor, cos: Tensor, layout: Layout) -> Tensor:
    """Rotation of the pairs of x (... n e) by the angles (... n e/2), computed in at least float32; type of x."""
    exact = torch.promote_types(x.dtype, torch.float32)
    sin, cos = sin.to(exact), cos.to(exact)
    pairs = "... (two f) -> two ... f" if layout == "half" else "... (f two) -> two ... f"
    a, b = rearrange(x.to(exact), pairs, two=2)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin))
    left, _, right = pairs.partition(" -> ")
    return rearrange(rotated, f"{right} -> {left}").to(x.dtype)
