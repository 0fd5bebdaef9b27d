"""Key/value cache. Keys are stored after their rotation, which later tokens never change, so the cache is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.base import Project
from xlcli.memory.token_buffers import TokenBuffers


@dataclass(frozen=True)
class KeyValue(TokenBuffers):
    """Past keys (b h m e) and values (b h m w), in the type in which they are computed or in a narrower one.

    At inference a memory in 16 bits stays in 16 bits. In training, memory is detached from the graph, and was projected
    with the weights of earlier steps.
    """

    keys: Tensor
    values: Tensor
    start: int
    stop: int
    kind = "keyvalue"
    axes: ClassVar[Mapping[str, str]] = {"k": "bhme", "v": "bhmw"}

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys and values."""
        return self.keys, self.values

    @staticmethod
    def encode(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Unchanged: writing into the buffers rounds."""
        return k, v

    def decode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Slices of the buffers, or copies of them in a wider type."""
        keys, values = self.rows()
        return keys.to(k.dtype), values.to(v.dtype)

    def extend(
        self, x: Tensor, project: Project, keep: int, read: int | None = None
    ) -> tuple[Tensor, Tensor, KeyValue]:
        """As in the base class; in training without rounding and with gradients of the new tokens."""
        if torch.is_inference_mode_enabled():
            return super().extend(x, project, keep, read)
        k, v = project(x)
        if self.length:
            past_k, past_v = self.rows()
            k, v = torch.cat((past_k.to(k.dtype), k), dim=2), torch.cat((past_v.to(v.dtype), v), dim=2)
        # Copies: views would keep the keys and values of the whole call alive.
        keys, values = (part[:, :, part.shape[2] - keep :].detach().clone() for part in (k, v))
        unread = 0 if read is None else self.length - read
        return k[:, :, unread:], v[:, :, unread:], KeyValue(keys, values, 0, keep)
