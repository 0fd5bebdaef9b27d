"""Surprisal of targets under logits, without a copy of all logits in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK = 2**17
"""Number of logits whose float32 values are in memory at once on a CPU: 512 KiB, which stay in its cache (measured)."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Surprisal in nats (n), in float32 or wider, of targets (n) under logits (n v) of any floating type."""
    if logits.device.type == "cpu":
        return _CrossEntropy.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]
    return cross_entropy_plain(logits, targets)


def cross_entropy_plain(logits: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy` with all logits and their gradients in float32."""
    return F.cross_entropy(logits.to(wide(logits.dtype)), targets, reduction="none")


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, other types unchanged."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        dtype = wide(logits.dtype)
        nll = logits.new_empty(len(targets), dtype=dtype)
        for rows in _chunks(logits):
            log_p = logits[rows].log_softmax(-1, dtype=dtype)
            nll[rows] = -log_p.gather(1, targets[rows, None]).squeeze(1)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            scale = grad[rows, None]
            p = logits[rows].softmax(-1, dtype=grad.dtype)
            out[rows] = p.mul_(scale).scatter_add_(1, targets[rows, None], -scale)
        return out, None


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of the rows of logits (n v), each of about `CHUNK` logits."""
    n, size = len(logits), max(1, CHUNK // logits.shape[1])
    return [slice(i, i + size) for i in range(0, n, size)]
