"""Key/value cache. Keys are stored after their rotation, which later tokens never change, so the cache is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.base import Project, TokenMemory

MAX_SLACK = 1024
"""Maximum number of unused rows in a buffer. A larger number wastes memory, a smaller one moves rows more often."""
ALIGNMENT = 64
"""Alignment of buffer rows in bytes: that of PyTorch's CPU allocator, and the size of a 512-bit vector register."""


@dataclass(frozen=True)
class KeyValue(TokenMemory):
    """Past keys and values (b h m e): rows `start` to `stop` of two buffers with unused rows at the end.

    In training, memory is detached from the graph, and was projected with the weights of earlier steps. Under inference
    mode `extend` writes into the buffers, so the old memory must not be used any more; copy it with
    `State.fork` to continue it twice.
    """

    keys: Tensor
    values: Tensor
    start: int
    stop: int
    kind = "keyvalue"
    axes: ClassVar[Mapping[str, str]] = {"k": "bhme", "v": "bhmw"}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> KeyValue:
        """Memory of k and v without unused rows."""
        return KeyValue(tensors["k"], tensors["v"], 0, tensors["k"].shape[2])

    def tensors(self) -> dict[str, Tensor]:
        """Keys k and values v without unused rows."""
        return {"k": self._rows(self.keys), "v": self._rows(self.values)}

    def empty(self) -> KeyValue:
        """Memory of no tokens."""
        (b, h, _, e), w = self.keys.shape, self.values.shape[3]
        return KeyValue(self.keys.new_empty(b, h, 0, e), self.values.new_empty(b, h, 0, w), 0, 0)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, KeyValue]:
        """Projects and appends the new inputs only: amortized O(1) per token, and keys to read are one slice."""
        k, v = project(x)
        new = k.shape[2]
        if not torch.is_inference_mode_enabled():
            if self.length:
                k = torch.cat((self._rows(self.keys).to(k.dtype), k), dim=2)
                v = torch.cat((self._rows(self.values).to(v.dtype), v), dim=2)
            # Copies: views would keep the keys and values of the whole call alive.
            keys, values = (part[:, :, part.shape[2] - keep :].detach().clone() for part in (k, v))
            return k, v, KeyValue(keys, values, 0, keep)
        keys, values, start, stop = self._reserve(new, keep, k, v)
        keys[:, :, stop : stop + new] = k
        values[:, :, stop : stop + new] = v
        stop += new
        return keys[:, :, start:stop], values[:, :, start:stop], KeyValue(keys, values, stop - keep, stop)

    def _rows(self, buffer: Tensor) -> Tensor:
        return buffer[:, :, self.start : self.stop]

    def _reserve(self, new: int, keep: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """Buffers with `new` unused rows after the memory, and its start and stop; moves or replaces full buffers."""
        capacity = self.keys.shape[2]
        if self.stop + new <= capacity:
            return self.keys, self.values, self.start, self.stop
        length = self.length
        slack = max(new, min(max(keep, length), MAX_SLACK))
        needed = length + new + slack
        keys, values = self.keys, self.values
        if not (length + new <= capacity <= 2 * needed and self.start >= length):
            keys, values = _aligned_buffer(k, needed), _aligned_buffer(v, needed)
        keys[:, :, :length] = self._rows(self.keys)
        values[:, :, :length] = self._rows(self.values)
        return keys, values, 0, length


def _aligned_buffer(like: Tensor, capacity: int) -> Tensor:
    """Buffer (b h capacity e) in which every row begins at a multiple of `ALIGNMENT` bytes.

    Matrix products (MKL, cuBLAS) sum in an order that depends on the alignment of their operands. With packed rows of
    width 41, for example, results would depend on `start`, which differs between a memory and its copy.
    """
    width = like.shape[3]
    step = ALIGNMENT // like.element_size()
    return like.new_empty((*like.shape[:2], capacity, -(-width // step) * step))[..., :width]
