"""Dropout whose mask uses 16 random bits per element; on a CPU that is a tenth of the time of PyTorch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LEVELS = 2**16
"""Number of values of 16 bits: on a CPU, rates are rounded to multiples of 1 / `LEVELS`."""
DISCARDED = 2**14
"""Number of random words, of 64 bits, that are drawn at once for rows that x does not have: they stay in the cache."""


class Share(NamedTuple):
    """Part number `part` of `parts` equal parts of the rows of a batch."""

    part: int = 0
    parts: int = 1


ALL_ROWS = Share()


def dropout(x: Tensor, rate: float, share: Share = ALL_ROWS) -> Tensor:
    """x (b ...) with every element set to zero with probability `rate`, and divided by 1 - `rate` otherwise.

    If x is a part of the rows of a batch, its mask is that part of the mask of all rows, which is drawn: the time is
    proportional to the number of parts.
    """
    n_dropped = round(rate * LEVELS)
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < n_dropped < LEVELS:
        if share.parts == 1:
            return F.dropout(x, rate)
        mask = F.dropout(x.new_ones(share.parts, *x.shape), rate)[share.part]
        return x * mask.clone()  # a view would keep the mask of all rows until the backward pass
    return _Dropout.apply(x, n_dropped, share)  # type: ignore[no-any-return, no-untyped-call]


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n_dropped: int, share: Share) -> Tensor:
        # Four numbers from each one of 64 bits. PyTorch draws one number for each element, and comparisons whose result
        # is Boolean are slow.
        n, first = x.numel(), share.part * x.numel()
        before, end, n_words = first // 4, -(-(first + n) // 4), -(-n * share.parts // 4)
        _discard(before)
        words = torch.empty(end - before, dtype=torch.int64).random_(-(2**63), None)
        _discard(n_words - end)
        bits = words.view(torch.int16)[first - 4 * before :][:n].view(x.shape)
        kept = torch.ge(bits, n_dropped - LEVELS // 2, out=torch.empty(x.shape, dtype=torch.uint8))
        ctx.save_for_backward(kept)
        ctx.scale = LEVELS / (LEVELS - n_dropped)
        return kept.to(x.dtype).mul_(x).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return kept.to(grad.dtype).mul_(grad).mul_(ctx.scale), None, None


def _discard(n: int) -> None:
    """Draws `n` random words."""
    words = torch.empty(min(n, DISCARDED), dtype=torch.int64)
    for i in range(0, n, DISCARDED):
        words[: n - i].random_(-(2**63), None)


class Dropout(nn.Dropout):
    """Dropout of inputs of any shape in training.

    Attributes:
        share: This rank's part of the rows of the batch.
    """

    share = ALL_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """Inputs with some elements zero, unchanged outside training."""
        return dropout(x, self.p, self.share) if self.training and self.p else x
