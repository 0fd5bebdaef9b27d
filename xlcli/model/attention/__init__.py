"""Attention branches. Each has a position encoding, and creates, reads and extends its memory.

A kind is one file here, a configuration class in `config/attention.py`, and an entry in `model/build.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.config import MemoryDtype
from xlcli.memory import Memory
from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import HeadNorm, Linear, cast_for_products
from xlcli.ops.span import Span


class Attention(nn.Module):
    """Base of every attention branch."""

    output: nn.Linear

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"], dtype: MemoryDtype = "float32") -> Memory:
        """Makes an empty memory of `batch` sequences; `kind` and `dtype` are for softmax attention alone."""
        raise NotImplementedError

    def accepts(self, memory: Memory, span: Span, seen: int) -> bool:
        """True if `memory` can be the memory of this layer after `seen` tokens."""
        for possible in (
            self.init_memory(0, "hidden"),
            self.init_memory(0, "keyvalue"),
            self.init_memory(0, "keyvalue", "int8"),
        ):
            if memory.kind == possible.kind and memory.shape == possible.shape:
                return True
        return False

    def receptive_field(self, n_memory: int) -> int | None:
        """Number of earlier tokens that a token can attend to with `n_memory` tokens in memory; None if unbounded."""
        return n_memory

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws new random features, if the kind has any. Memory made with the previous ones becomes invalid."""

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Output (b t d) for input x (b t d), and the new memory. The output is undefined where it is not needed."""
        raise NotImplementedError


class ProjectedAttention(Attention):
    """Attention with separate projections of queries, keys and values.

    With `qk_norm` an RMSNorm is applied to the queries and keys of each head. Heads of keys and values, `n_kv_heads` or
    as many as of queries, each serve as many successive heads of queries.
    """

    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        head_dim: int,
        position: Position,
        n_kv_heads: int | None = None,
        bias: Literal["none", "qkv", "all"] = "none",
        qk_norm: bool = False,
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__(position)
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.head_dim = head_dim
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if qk_norm:
            self.query_norm, self.key_norm = HeadNorm(head_dim, eps=epsilon), HeadNorm(head_dim, eps=epsilon)
        self.query = Linear(dim, n_heads * head_dim, bias=bias != "none")
        self.key = Linear(dim, self.n_kv_heads * head_dim, bias=bias != "none")
        self.value = Linear(dim, self.n_kv_heads * head_dim, bias=bias != "none")
        self.output = Linear(n_heads * head_dim, dim, bias=bias == "all")

    def queries(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries (b h t e) of inputs x (b t d), with their positions."""
        return self.position.place(self.query_norm(self._heads(context.apply(self.query, x))), context)

    def project(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys with their positions, and values (b h n e), of inputs x (b n d) of the n latest tokens."""
        k, v = self.unplaced(x)
        return self.position.place(k, context), v

    def unplaced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without positions, and values (b g n e), of inputs x (b n d)."""
        x = cast_for_products(x)
        return self.key_norm(self._heads(self.key(x))), self._heads(self.value(x))

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "... t (h e) -> ... h t e", e=self.head_dim)
