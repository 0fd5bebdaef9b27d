"""RMSNorm (Zhang and Sennrich 2019) with a backward pass in few operators on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, for x (... d) and weight (d).

    A weight of 16 bits is widened: a rank may have gathered it so.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    trains = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == weight.dtype
    if trains and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    return rms_norm_plain(x, weight, eps)


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` by PyTorch, whose gradient on a CPU is that of its ten elementary operators."""
    return F.rms_norm(x, weight.shape, weight, eps)


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
