"""Banded softmax attention: a token sees itself and the `window` tokens before it. Cost is linear in the length.

Queries are cut into blocks of `window` tokens, each of which sees its own keys and those of the block before, and
blocks become rows: distances are the same in every block, so any encoding of distances serves as it is.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from xlcli.memory import Memory
from xlcli.model.attention.full import FullAttention
from xlcli.model.position import Position
from xlcli.ops.span import AttentionContext


class LocalAttention(FullAttention):
    """Remembers at most `window` tokens."""

    def __init__(
        self, *, dim: int, n_heads: int, head_dim: int, position: Position, scale: float, dropout: float, window: int
    ) -> None:
        super().__init__(dim=dim, n_heads=n_heads, head_dim=head_dim, position=position, scale=scale, dropout=dropout)
        self.window = window

    def receptive_field(self, mem_len: int) -> int | None:
        """How many tokens back a token sees."""
        return min(mem_len, self.window)

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Branch output (b t d) for input x (b t d), and the memory after it."""
        return super().forward(x, memory, context.narrow(self.window))

    def update_memory(self, x: Tensor, memory: Memory, context: AttentionContext) -> Memory:
        """The memory after x (b t d), when nobody asks for the output."""
        return super().update_memory(x, memory, context.narrow(self.window))

    def mix_call(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Values (b h t e) for all queries of a call, in blocks when there are many."""
        if context.n_new <= 2 * self.window:
            return super().mix_call(q, k, v, context)
        return self._mix_blocks(q, k, v, context)

    def _mix_blocks(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """As `mix`, in blocks of w = `window` queries and 2w keys."""
        b, window = q.shape[0], self.window
        n_blocks = -(-context.n_new // window)
        tail = n_blocks * window - context.n_new
        # Keys begin one window before the first query: what memory does not fill is padded and masked.
        pad = (0, 0, window - context.n_memory, tail)
        keys, values = (_overlapping(F.pad(part, pad), window) for part in (k, v))
        queries = rearrange(F.pad(q, (0, 0, 0, tail)), "b h (c w) e -> (b c) h w e", w=window)
        block = context.cached("block", lambda: self._block(context))
        seen = context.cached("blocks", lambda: self._visible(context, block, n_blocks))
        visible = seen.repeat(b, 1, 1, 1)
        y = self.mix(queries, keys, values, block, visible)
        return rearrange(y, "(b c) h w e -> b h (c w) e", b=b)[:, :, : context.n_new]

    def _block(self, context: AttentionContext) -> AttentionContext:
        """The context of any block: a window of memory and a window of new tokens."""
        return AttentionContext(
            context.span, n_memory=self.window, n_new=self.window, keep=0, device=context.device, window=self.window
        )

    def _visible(self, context: AttentionContext, block: AttentionContext, n_blocks: int) -> Tensor:
        """Boolean mask (c 1 w 2w): in the band, and not padding before the oldest key."""
        first = torch.arange(n_blocks, device=context.device)[:, None] * self.window - self.window
        exists = first + torch.arange(2 * self.window, device=context.device) >= -context.n_memory
        exists = rearrange(exists, "c s -> c 1 1 s")
        return exists if block.visible is None else block.visible & exists


def _overlapping(x: Tensor, window: int) -> Tensor:
    """Blocks of two windows, each beginning one window after the last: (b h (c+1)w e) to ((b c) h 2w e)."""
    return rearrange(x.unfold(2, 2 * window, window), "b h c e s -> (b c) h s e")
