"""Rounding to int8 with one scale for each row: of stored weights, and of keys and values in memory."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_INT = 127
"""Maximum magnitude of an int8 value; -128 is not used."""
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**121
"""Limits of the scales that `quantize` chooses: a normal number, and `MAX_INT * MAX_SCALE` is finite in float32."""


def quantize(x: Tensor, scale_type: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows `... n` as int8 values `... n` from -127 to 127 and scales `...`, rounded to nearest.

    The scale is the largest magnitude of the row divided by 127, at least 2^-126. A row depends on no other row.

    A bfloat16 number has 8 significant bits, so its product with an int8 value is exact in float32, and quantizing
    dequantized rows with bfloat16 scales gives the same values and scales.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / MAX_INT).clamp(MIN_SCALE, MAX_SCALE).to(scale_type)
    values = (x / scale.float().unsqueeze(-1)).round().clamp(-MAX_INT, MAX_INT)
    return values.to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Rows `... n` in float32 of int8 values `... n` and scales `...`."""
    return values.float() * scale.float().unsqueeze(-1)
