"""Rotary encoding (Su et al. 2021): pairs of features of queries and keys are rotated by their position.

The rotation uses absolute positions, but inner products depend on the distance only, so a key is rotated once. A key
that is rounded afterwards has the same value in every batch, because positions count from the beginning of the text.
Angles are computed in float64, exact for positions of any size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.config.position import RopeScalingConfig
from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import frequencies
from xlcli.ops.scoring import FarKeys

Layout = Literal["half", "interleaved"]  # features of a pair: `half` f and f + e/2, `interleaved` 2f and 2f + 1


class RopePosition(Position):
    """Rotation of queries and keys in every layer: of the first `rotary_dim` features of each head, or of all."""

    def __init__(
        self,
        *,
        layout: Layout,
        base: float,
        scaling: RopeScalingConfig | None = None,
        clamp_len: int | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.rotary_dim = rotary_dim
        self.series = base, scaling
        self.form = repr(self.series)  # in keys of a context, because the compiler cannot hash settings
        self.clamp_len = clamp_len

    def angles(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Sine and cosine (... r/2) of positions (...) times the frequencies, in float64, for r of `width` features."""
        width = self.rotary_dim or width
        angle = positions[..., None].double() * rope_frequencies(width, positions.device, *self.series)
        return angle.sin(), angle.cos()

    def place(self, x: Tensor, context: AttentionContext) -> Tensor:
        n, width = x.shape[-2:]
        key = "rope angles", n, width, self.form
        angles = context.constant(key, lambda: self.angles(context.positions.latest(n)[:, None], width))
        return apply_rope(x, *angles, self.layout)

    def far(self, q: Tensor, k: Tensor, context: AttentionContext) -> FarKeys | None:
        """Queries rotated by the largest distance, and keys that are not rotated."""
        # Keys are stored rotated by their positions, so these rotations are taken back.
        limit, positions = context.clamp_len, context.positions
        if limit is None:
            return None
        n_keys, width = k.shape[-2:]
        key = "far keys", width, self.form
        angles = context.constant(key, lambda: self.angles(-positions.latest(n_keys)[:, None], width))
        return FarKeys(self.at_clamp(q, context), apply_rope(k, *angles, self.layout), limit, positions)

    def at_clamp(self, q: Tensor, context: AttentionContext) -> Tensor:
        """Queries rotated by the largest distance, instead of their positions."""
        return apply_rope(q, *self.clamp_angles(q.shape[-1], context), self.layout)

    def clamp_angles(self, width: int, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Angles (b 1 t r/2) from the positions of queries to the largest distance."""
        clamp_len = context.span.clamp_len or self.clamp_len or 0
        key = "far queries", width, self.form
        return context.constant(key, lambda: self.angles(clamp_len - context.positions.absolute[:, None], width))


class RopeEmbedding(RopePosition):
    """Rotation of the embedding, an ablation: not relative, because projections do not commute with the rotation."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        return apply_rope(x, *self.angles(context.positions.absolute, x.shape[-1]), self.layout)


def rope_frequencies(width: int, device: torch.device, base: float, scaling: RopeScalingConfig | None) -> Tensor:
    """Frequencies (width/2) base^(-2f/width) in float64, scaled for texts longer than those of training."""
    unscaled = frequencies(width, device, base)
    if scaling is None or scaling.kind == "none":
        return unscaled
    if scaling.kind == "linear":
        return unscaled / scaling.factor
    # llama3: high frequencies stay, low ones are divided by the factor, with means between.
    n_periods = scaling.original_len * unscaled / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_unscaled = ((n_periods - low) / (high - low)).clamp(0, 1)
    return share_unscaled * unscaled + (1 - share_unscaled) * unscaled / scaling.factor


def apply_rope(x: Tensor, sin: Tensor, cos: Tensor, layout: Layout) -> Tensor:
    """Rotates the pairs of the first r features of x (... n e) by angles (... n r/2), in at least float32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    sin, cos = sin.to(exact), cos.to(exact)
    features = "... (two f)" if layout == "half" else "... (f two)"
    first, rest = x.tensor_split([2 * sin.shape[-1]], dim=-1)
    a, b = rearrange(first.to(exact), f"{features} -> two ... f", two=2)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin))
    rotated = rearrange(rotated, f"two ... f -> {features}").to(x.dtype)
    if not rest.shape[-1]:
        return rotated
    return torch.cat((rotated, rest), dim=-1)
