"""Linear layers. PyTorch computes the product of one row with a matrix on one thread; here it uses all of them."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SMALLEST = 2**16
"""Smallest number of weights that are worth more than one thread (measured)."""


def has_bfloat16_units(device: torch.device) -> bool:
    """True if the device has native bfloat16 matrix products, which are faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Linear(nn.Linear):
    """`nn.Linear` with the product of `linear`; `gradient_dtype` as there."""

    gradient_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Output (... o) for input (... i)."""
        return linear(x, self.weight, self.bias, self.gradient_dtype)


class _RoundedGradients(torch.autograd.Function):
    """x Wᵀ + b whose gradients are products of factors in another number type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if for_bias:
            d_bias = reduce(grad, "... o -> o", "sum").to(weight.dtype)
        grad = grad.to(ctx.dtype)
        if for_x:
            d_x = (grad @ weight.to(ctx.dtype)).to(x.dtype)
        if for_weight:
            rows = rearrange(x, "... i -> (...) i").to(ctx.dtype)
            d_weight = (rearrange(grad, "... o -> o (...)") @ rows).to(weight.dtype)
        return d_x, d_weight, d_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gradient_dtype: torch.dtype | None = None) -> Tensor:
    """x Wᵀ + b for inputs (... i) and weights (o i).

    At inference on a CPU a single row is multiplied by a batch of equal parts of the matrix, one per thread.
    Gradients are products in the number type `gradient_dtype`; None: that of the arguments.
    """
    if gradient_dtype is not None and torch.is_grad_enabled():
        return _RoundedGradients.apply(x, weight, bias, gradient_dtype)  # type: ignore[no-any-return, no-untyped-call]
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or x.numel() != weight.shape[1]
        or weight.numel() < SMALLEST
        or not torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or not weight.is_contiguous()
        or (n_parts := torch.get_num_threads()) == 1
        or weight.shape[0] % n_parts
    ):
        return F.linear(x, weight, bias)
    rows = x.reshape(1, 1, -1).expand(n_parts, 1, -1)
    out = torch.bmm(rows, weight.view(n_parts, -1, weight.shape[1]).mT).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def cast_for_products(x: Tensor) -> Tensor:
    """Input of several matrix products in their type, so that they share one cast; unchanged without autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x
