"""Normalisation layers by name."""

from __future__ import annotations

from torch import nn

NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""


def build_norm(kind: str, dim: int, *, bias: bool) -> nn.Module:
    """A norm over the last axis of width `dim`."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=1e-5, bias=bias)
    return nn.RMSNorm(dim, eps=1e-5)
