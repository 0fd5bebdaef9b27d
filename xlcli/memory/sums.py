"""Memory of linear attention: running sums of constant size (Choromanski et al. 2021, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.base import Memory


@dataclass(frozen=True)
class Sums(Memory):
    """Sums over all tokens read: s (b h f e) of key features times values, z (b h f) of key features."""

    s: Tensor
    z: Tensor
    kind = "sums"
    axes: ClassVar[Mapping[str, str]] = {"s": "bhfe", "z": "bhf"}
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"s": torch.float64, "z": torch.float64}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Sums:
        """Memory of s and z."""
        return Sums(tensors["s"], tensors["z"])

    def tensors(self) -> dict[str, Tensor]:
        """The sums s and z."""
        return {"s": self.s, "z": self.z}

    def empty(self) -> Sums:
        """Sums over no tokens."""
        return self.map(torch.zeros_like)
