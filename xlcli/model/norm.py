"""Normalization layers."""

from __future__ import annotations

from torch import Tensor, nn

from xlcli.ops.rms_norm import rms_norm

EPSILON = 1e-5
"""Addition to the mean square."""


def build_norm(kind: str, dim: int, *, bias: bool) -> nn.Module:
    """Norm over the last axis: LayerNorm (Ba et al. 2016), or RMSNorm, which has no bias (Zhang and Sennrich 2019)."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=EPSILON, bias=bias)
    return RMSNorm(dim, eps=EPSILON)


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input (... d)."""
        return rms_norm(x, self.weight, EPSILON)


class HeadNorm(RMSNorm):
    """RMSNorm of queries or keys (... e), computed in the type of its weight: under autocast the input is 16-bit."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input, in the type of the input."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
