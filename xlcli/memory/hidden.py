"""Memory of layer inputs, projected again at every call (Dai et al. 2019, section 3.2). Used for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.base import Project, TokenMemory


@dataclass(frozen=True)
class Hidden(TokenMemory):
    """Past inputs h (b m d) of an attention branch, detached from the graph."""

    h: Tensor
    kind = "hidden"
    axes: ClassVar[Mapping[str, str]] = {"h": "bmd"}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Hidden:
        """Memory of h."""
        return Hidden(tensors["h"])

    def tensors(self) -> dict[str, Tensor]:
        """The tensor h."""
        return {"h": self.h}

    def empty(self) -> Hidden:
        """Memory of no tokens."""
        return Hidden(self.h.new_empty(len(self.h), 0, self.h.shape[2]))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.h.shape[1]

    def extend(self, x: Tensor, project: Project, keep: int, read: int | None = None) -> tuple[Tensor, Tensor, Hidden]:
        """Projects memory and new inputs together."""
        both = torch.cat((self.h.to(x.dtype), x), dim=1) if self.length else x
        unread = 0 if read is None else self.length - read
        k, v = project(both[:, unread:] if unread else both)
        # A copy: a view would keep the inputs of the whole call alive.
        return k, v, Hidden(both[:, both.shape[1] - keep :].detach().clone())
