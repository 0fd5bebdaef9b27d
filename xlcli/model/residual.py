"""Normalization layers, and residual connections: the input of a branch, and its sum with the stream x.

pre        x + branch(norm(x))              Xiong et al. 2020
post       norm(x + branch(x))              Vaswani et al. 2017, and the published Transformer-XL
sandwich   x + norm(branch(norm(x)))        Ding et al. 2021
rezero     x + alpha branch(x)              Bachlechner et al. 2021; alpha is learned and starts at 0
parallel   x + attention(norm(x)) + feedforward(norm(x)), with a norm for each (Black et al. 2022, GPT-NeoX)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlcli.ops.layers import Dropout


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # The kernel of LayerNorm, with a mean of zero. It subtracts the mean of grad · weight, which is added again.
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        return d_x.add_(scale * (grad @ weight)[..., None] / len(weight)), d_weight, None


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis (Ba et al. 2016). 16-bit parameters are widened: a rank may have such ones."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input (... d)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(wide), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + epsilon) · weight over the last axis (Zhang and Sennrich 2019).

    On a CPU the backward pass takes few operators; PyTorch takes ten. A weight of 16 bits is widened: a rank may
    have gathered it so.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input (... d)."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        trains = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == weight.dtype
        if trains and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
        return F.rms_norm(x, weight.shape, weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm of queries or keys (... e), computed in float32 or wider: under autocast the input is 16-bit."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalized input, in the type of the input."""
        return super().forward(x.to(torch.promote_types(self.weight.dtype, torch.float32))).to(x.dtype)


class Residual(nn.Module):
    """A branch joined to the stream, by the formula of its placement."""

    def __init__(self, placement: str, make_norm: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.placement = placement
        self.dropout = Dropout(dropout)
        self.norm = make_norm()
        self.last_norm: nn.Module = nn.Identity()
        self.alpha: nn.Parameter | None = None
        if placement == "sandwich":
            self.last_norm = make_norm()
        elif placement == "rezero":
            self.norm, self.alpha = nn.Identity(), nn.Parameter(torch.empty(()))
            self.initial_constants = {"alpha": 0.0}

    def pre(self, x: Tensor) -> Tensor:
        """Input of the branch (b t d)."""
        return x if self.placement == "post" else self.norm(x)

    def post(self, y: Tensor) -> Tensor:
        """Addition to the stream (b t d), from the output of the branch."""
        y = self.last_norm(y)
        return self.dropout(y if self.alpha is None else self.alpha * y)  # type: ignore[no-any-return]

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Stream (b t d) after the branch."""
        x = x + self.post(y)
        return self.norm(x) if self.placement == "post" else x
