"""Normalization layers."""

from __future__ import annotations

from torch import nn


def build_norm(kind: str, dim: int, *, bias: bool) -> nn.Module:
    """Norm over the last axis: LayerNorm (Ba et al. 2016), or RMSNorm, which has no bias (Zhang and Sennrich 2019)."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=1e-5, bias=bias)
    return nn.RMSNorm(dim, eps=1e-5)
