"""A function of every token by itself, computed some tokens at a time, so that its inner values are never all alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def map_chunks(function: Callable[..., Tensor], parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """`function` of each part in turn, its results (b c ...) joined to (b t ...).

    For the backward pass nothing but the parts is kept: each is computed once more, with the same dropout.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts], dim=1)
    # Autocast would share one 16-bit copy of a weight among the parts and so add up their gradients in 16 bit.
    with torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    ):
        return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], dim=1)
