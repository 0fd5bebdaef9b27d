"""Normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlcli.ops.rms_norm import rms_norm

EPSILON = 1e-5
"""Addition to the mean square."""


def build_norm(kind: str, dim: int, *, bias: bool) -> nn.Module:
    """Norm over the last axis: LayerNorm (Ba et al. 2016), or RMSNorm, which has no bias (Zhang and Sennrich 2019)."""
    if kind == "layer":
        return LayerNorm(dim, eps=EPSILON, bias=bias)
    return RMSNorm(dim, eps=EPSILON)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis. Parameters of 16 bits are widened: a rank may have gathered them so."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input (... d)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(wide), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input (... d)."""
        return rms_norm(x, self.weight, EPSILON)


class HeadNorm(RMSNorm):
    """RMSNorm of queries or keys (... e), computed in float32 or wider: under autocast the input is 16-bit."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input, in the type of the input."""
        return super().forward(x.to(torch.promote_types(self.weight.dtype, torch.float32))).to(x.dtype)
