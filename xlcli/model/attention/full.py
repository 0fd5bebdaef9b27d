"""Softmax attention of new tokens over memory and themselves (Vaswani et al. 2017; Dai et al. 2019, section 3.2)."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from einops import rearrange, repeat
from torch import Tensor

from xlcli.memory import Hidden, KeyValue, Memory, TokenMemory
from xlcli.model.attention import Projected
from xlcli.model.position import Position
from xlcli.ops.attend import attend, attend_one, attention_weights
from xlcli.ops.span import AttentionContext


class FullAttention(Projected):
    """Multi-head attention; projections have no bias, as in the paper. Scores are multiplied by `scale`."""

    def __init__(
        self, *, dim: int, n_heads: int, head_dim: int, position: Position, scale: float, dropout: float
    ) -> None:
        super().__init__(dim=dim, n_heads=n_heads, head_dim=head_dim, position=position)
        self.scale = scale
        self.dropout = dropout

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"]) -> Memory:
        """Empty memory of `batch` sequences: projected keys and values, or layer inputs for training."""
        like = self.key.weight
        if kind == "hidden":
            return Hidden(like.new_empty(batch, 0, like.shape[1]))
        empty = like.new_empty(batch, self.n_heads, 0, like.shape[0] // self.n_heads)
        return KeyValue(empty, empty, 0, 0)

    def accepts(self, memory: Memory, n_kept: int) -> bool:
        """Whether kind, shape and length agree."""
        if not isinstance(memory, TokenMemory):
            return False
        own = self.init_memory(0, "hidden" if isinstance(memory, Hidden) else "keyvalue")
        return memory.shape == own.shape and memory.length == self.receptive_field(n_kept)

    def receptive_field(self, mem_len: int) -> int | None:
        """How many tokens back a token sees; None when that has no limit."""
        return mem_len

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Branch output (b t d) for input x (b t d), and the memory after it."""
        q = self.position.rotate(self._heads(self.query(x)), context)
        k, v, memory = self._extend(x, memory, context)
        y = self.mix_call(q, k, v, context)
        return self.output(rearrange(y, "b h t e -> b t (h e)")), memory

    def update_memory(self, x: Tensor, memory: Memory, context: AttentionContext) -> Memory:
        """The memory after x (b t d), when nobody asks for the output."""
        return self._extend(x, memory, context)[2]

    def mix_call(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Values (b h t e) for all queries of a call."""
        return self.mix(q, k, v, context, context.visible)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, visible: Tensor | None) -> Tensor:
        """Values (b h t e) for queries (b h t e) over keys and values (b h s e), positions taken into account."""
        bias = self.position.bias(q, k, context, self._project_vectors)
        q, term = self.position.term(q, context)
        dropout = self.dropout if self.training else 0.0
        if term is not None and bias is None and q.shape[-2] == 1 and visible is None and not dropout:
            return attend_one(q, k, v, term=term, scale=self.scale)
        if term is not None:
            query, key = term
            q = torch.cat((q, query), dim=-1)
            k = torch.cat((k, repeat(key, "s f -> b h s f", b=q.shape[0], h=q.shape[1])), dim=-1)
        if not self.position.adds_values:
            return attend(q, k, v, visible=visible, scale=self.scale, bias=bias, dropout=dropout)
        weights, blind = attention_weights(q, k, visible=visible, scale=self.scale, bias=bias, dropout=dropout)
        y = weights.to(v.dtype) @ v
        extra = self.position.values(weights, context)
        y = y if extra is None else y + extra.to(y.dtype)
        return y if blind is None else y.masked_fill(blind, 0.0)

    def _extend(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Tensor, Memory]:
        assert isinstance(memory, TokenMemory)
        return memory.extend(x, partial(self.project, context=context), context.keep)

    def _project_vectors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (h n e) of vectors x (n d)."""
        queries, keys = (rearrange(part(x), "n (h e) -> h n e", h=self.n_heads) for part in (self.query, self.key))
        return queries, keys
