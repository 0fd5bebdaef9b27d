"""Number type of matrix products under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_for_products(x: Tensor) -> Tensor:
    """Input of several matrix products in their type, so that they share one cast; unchanged without autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x
