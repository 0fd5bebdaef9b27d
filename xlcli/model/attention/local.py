"""Banded softmax attention over a token and the `window` tokens before it. Cost is linear in the length.

Queries are cut into blocks of `window` tokens. A block attends to its own keys and to the keys of the previous block.
Blocks are computed as sequences of a batch: distances are equal in all blocks, so any encoding of distances applies.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from xlcli.memory import Memory, TokenMemory
from xlcli.model.attention.full import FullAttention
from xlcli.ops.context import AttentionContext, VisibleKeys


class LocalAttention(FullAttention):
    """Remembers at most `window` tokens."""

    def __init__(self, *, window: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.window = window

    def receptive_field(self, n_memory: int) -> int | None:
        return min(n_memory, self.window)

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Computes the output (b t d) for input x (b t d), and the new memory.

        Many queries are divided into blocks of w = `window`, each of which reads the keys of two windows. Clamped
        distances need absolute positions, which blocks do not have.
        """
        context = context.narrow(self.window)
        has_few_queries = context.n_new <= 2 * self.window
        has_clamp = context.clamp_len is not None
        if has_few_queries or has_clamp or not context.needs_output:
            return super().forward(x, memory, context)
        assert isinstance(memory, TokenMemory)
        q = self.queries(x, context)
        k, v, memory = memory.extend(x, partial(self.project, context=context), context.keep)
        b, window = q.shape[0], self.window
        n_blocks = math.ceil(context.n_new / window)
        n_after = n_blocks * window - context.n_new  # padding behind the last query
        n_before = window - context.n_memory  # padding before the oldest key in memory, which is masked

        def to_blocks(x: Tensor) -> Tensor:
            """Keys or values (b·c h 2w e) of each block: those of its own window and of the one before it."""
            padded = F.pad(x, (0, 0, n_before, n_after))
            return rearrange(padded.unfold(2, 2 * window, window), "b h c e s -> (b c) h s e")

        keys, values = to_blocks(k), to_blocks(v)
        queries = rearrange(F.pad(q, (0, 0, 0, n_after)), "b h (c w) e -> (b c) h w e", w=window)
        block, reach = context.block(window), context.mask.reach

        def visible_in_blocks() -> VisibleKeys:
            """Masks (b·c 1 w 2w) of the keys that the queries of each block may see."""
            mask = block_mask(block, n_blocks, context.n_memory)
            if reach is None:  # the same for all sequences
                return VisibleKeys(mask.repeat(b, 1, 1, 1))
            reach_in_blocks = rearrange(F.pad(reach, (0, n_after)), "b (c w) -> b c 1 w 1", w=window)
            is_of_document = block.positions.distance <= reach_in_blocks
            return VisibleKeys(rearrange(mask & is_of_document, "b c h w s -> (b c) h w s"))

        in_blocks = context.constant("block mask", visible_in_blocks)
        y = self.attend(queries, keys, values, in_blocks, block)
        y = rearrange(y, "(b c) h w e -> b h (c w) e", b=b)[:, :, : context.n_new]
        return context.apply(self.output, rearrange(y, "b h t e -> b t (h e)")), memory


def block_mask(block: AttentionContext, n_blocks: int, n_memory: int) -> Tensor:
    """Boolean mask (c 1 w 2w) of all blocks: keys in the band that are not padding before the oldest of the memory."""
    window, device = block.n_new, block.positions.device
    # Positions of the keys of each block, from the first new token on: a window of the block before comes first.
    first_keys = torch.arange(n_blocks, device=device)[:, None] * window - window
    keys = first_keys + torch.arange(2 * window, device=device)
    exists = rearrange(keys >= -n_memory, "c s -> c 1 1 s")
    if block.mask.visible is None:
        return exists
    return block.mask.visible & exists
