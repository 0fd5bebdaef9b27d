"""Token-wise functions computed in chunks, so that the intermediate values of only one chunk are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def map_chunks(function: Callable[..., Tensor], parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Concatenation (b t ...) of the results (b c ...) of `function` for each part.

    Only the parts are saved for the backward pass, which recomputes each result with the same dropout.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts], dim=1)
    # With its cache, autocast would share one 16-bit copy of a weight among parts and sum its gradients in 16 bits.
    with torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    ):
        return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], dim=1)
