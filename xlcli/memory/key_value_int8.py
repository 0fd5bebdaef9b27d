"""Key/value cache in int8, with one scale for each token and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.token_buffers import TokenBuffers
from xlcli.ops.quantize import dequantize, quantize


@dataclass(frozen=True)
class Int8KeyValue(TokenBuffers):
    """Past keys (b h m e) and values (b h m w) in int8, and their scales (b h m) in float32. For inference."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    start: int
    stop: int
    kind = "keyvalue-int8"
    axes: ClassVar[Mapping[str, str]] = {"keys": "bhme", "values": "bhmw", "key_scales": "bhm", "value_scales": "bhm"}
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {
        **dict.fromkeys(("keys", "values"), torch.int8),
        **dict.fromkeys(("key_scales", "value_scales"), torch.float32),
    }

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys, values, and their scales."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @staticmethod
    def encode(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Rows rounded to int8."""
        (keys, key_scales), (values, value_scales) = (quantize(part, torch.float32) for part in (k, v))
        return keys, values, key_scales, value_scales

    def decode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copies in the types of `k` and `v`."""
        keys, values, key_scales, value_scales = self.rows()
        return dequantize(keys, key_scales).to(k.dtype), dequantize(values, value_scales).to(v.dtype)
