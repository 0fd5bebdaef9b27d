"""Linear layers. PyTorch computes the product of one row with a matrix on one thread; here it uses all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST = 2**16
"""Smallest number of weights that are worth more than one thread (measured)."""


class Linear(nn.Linear):
    """`nn.Linear` with the product of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Output (... o) for input (... i)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for inputs (... i) and weights (o i).

    At inference on a CPU a single row is multiplied by a batch of equal parts of the matrix, one per thread.
    """
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
