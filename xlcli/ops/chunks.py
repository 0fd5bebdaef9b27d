"""Chunks of tokens, whose intermediate values alone are in memory, and functions of some positions.

Some positions are packed into groups of equal size in the order of time, the last one padded, and each group is one
call. The arithmetic of a position depends on no later position, so results before a change keep every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def map_chunks(function: Callable[..., Tensor], parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Concatenation (b t ...) of the results (b c ...) of `function` for each part.

    Only the parts are saved for the backward pass, which recomputes each result with the same dropout.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts], dim=1)
    # With its cache, autocast would share one 16-bit copy of a weight among parts and sum its gradients in 16 bits.
    kind = device.type
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], dim=1)


GROUP = 128
"""Largest number of positions in one call of the function."""


class Rows:
    """Positions of a call where the boolean mask `needed` (b t) is true."""

    def __init__(self, needed: Tensor) -> None:
        self.needed = needed
        self.batch, self.length = needed.shape
        self.index = rearrange(needed, "b t -> (t b)").nonzero().squeeze(-1)

    def apply(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs) for inputs (b t ...) and a result (b t d); zero at the other positions.

        `function` computes each position independently, on tensors (1 n ...).
        """
        group = min(GROUP, self.batch * self.length)
        tail = -len(self.index) % group
        packed = [F.pad(rearrange(x, "b t d -> (t b) d")[self.index], (0, 0, 0, tail)) for x in inputs]
        groups = zip(*(torch.split(part[None], group, dim=1) for part in packed), strict=True)
        out = torch.cat([function(*group) for group in groups], dim=1)[0, : len(self.index)]
        full = out.new_zeros(self.length * self.batch, out.shape[-1]).index_copy(0, self.index, out)
        return rearrange(full, "(t b) d -> b t d", b=self.batch)
