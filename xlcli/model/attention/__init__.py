"""Attention branches. What they share: a position encoding, and a memory that they make, read and extend."""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.memory import Memory
from xlcli.model.position import Position
from xlcli.ops.span import AttentionContext


class Attention(nn.Module):
    """The base of every branch."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"]) -> Memory:
        """Empty memory of `batch` sequences; `kind` is the memory of softmax attention, other kinds ignore it."""
        raise NotImplementedError

    def accepts(self, memory: Memory, n_kept: int) -> bool:
        """Whether `memory` can be the memory of this layer when `n_kept` tokens should be remembered."""
        own = self.init_memory(0, "keyvalue")
        return (memory.kind, memory.shape) == (own.kind, own.shape)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features, if there are any. Memory made with the previous ones becomes invalid."""

    def receptive_field(self, mem_len: int) -> int | None:
        """How many tokens back a token sees; None when that has no limit."""
        raise NotImplementedError

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Branch output (b t d) for input x (b t d), and the memory after it."""
        raise NotImplementedError

    def update_memory(self, x: Tensor, memory: Memory, context: AttentionContext) -> Memory:
        """The memory after x (b t d), when nobody asks for the output."""
        raise NotImplementedError


class Projected(Attention):
    """A branch with queries, keys and values of its own; projections have no bias."""

    def __init__(self, *, dim: int, n_heads: int, head_dim: int, position: Position) -> None:
        super().__init__(position)
        self.n_heads = n_heads
        self.query = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.output = nn.Linear(n_heads * head_dim, dim, bias=False)

    def project(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys and values (b h n e) of the inputs x (b n d) of the n latest tokens."""
        return self.position.rotate(self._heads(self.key(x)), context), self._heads(self.value(x))

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h e) -> b h t e", h=self.n_heads)
