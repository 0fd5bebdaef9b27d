"""Compressive memory: the tokens and pooled blocks that a call attends to, and the contexts of attention over them.

Blocks of `rate` tokens are counted from the beginning of the text, so no result depends on the division of a text into
calls or batches. A query at position i attends to the tokens from the first one of block b(i) = (i - mem_len) div rate
on, and to the `n_compressed` pooled blocks before block b(i). With a growing span, i is the first position of the call.

Here the block of the first new token is block 0, and begins `begun` tokens before the call.
Keys are pooled blocks, then tokens. A block has the position of its last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import Positions

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class Tiers:
    """Extents of both tiers in a call, with memory."""

    call: AttentionContext
    rate: int
    n_compressed: int
    begun: int

    def reached(self, place: Number) -> Number:
        """First block within the memory length before this place, counted from the first new token."""
        return (place + self.begun - self.call.span.mem_len) // self.rate

    def border(self, query: int) -> int:
        """First block whose tokens the query attends to."""
        return self.reached(query if self.call.span.kind == "uniform" else 0)

    @property
    def n_complete(self) -> int:
        """Number of blocks that end in this call."""
        return (self.begun + self.call.n_new) // self.rate

    @property
    def n_slots(self) -> int:
        """Number of pooled blocks in memory, those included whose tokens are attended to."""
        return self.n_compressed - -self.call.span.longest // self.rate

    @property
    def n_kept(self) -> int:
        """Number of tokens in memory after the call, in the same number for every place of a sequence in its text."""
        return min(self.call.start + self.call.n_new, self.call.span.longest + self.rate - 1)

    @property
    def oldest(self) -> int:
        """First block of the text that begins in it."""
        return -((self.call.start - self.begun) // self.rate)

    @property
    def blocks(self) -> range:
        """Blocks that some query attends to: those that have been read completely."""
        first = max(self.border(0) - self.n_compressed, self.oldest)
        return range(first, max(first, self.border(self.call.n_new - 1)))

    @property
    def tokens(self) -> range:
        """Tokens, counted from the first new one, that some query attends to."""
        return range(max(-self.call.start, self.rate * self.border(0) - self.begun), self.call.n_new)

    @property
    def leaving(self) -> range:
        """Blocks whose tokens the first query of this call attends to, but not the first query of the next call."""
        first = max(self.border(0), self.oldest)
        return range(first, max(first, self.reached(self.call.n_new)))

    def end(self, block: int) -> int:
        """Position of the last token of a block, counted from the first new token."""
        return self.rate * (block + 1) - 1 - self.begun

    def visible(self, device: torch.device) -> Tensor | None:
        """Boolean mask (t s), true where the query attends to the block or token; None if to all."""
        if self.call.n_new == 1:
            return None
        query = torch.arange(self.call.n_new, device=device)[:, None]
        border = self.reached(query if self.call.span.kind == "uniform" else torch.zeros_like(query))
        block = torch.arange(self.blocks.start, self.blocks.stop, device=device)
        token = torch.arange(self.tokens.start, self.tokens.stop, device=device)
        blocks = (block < border) & (block >= border - self.n_compressed)
        return torch.cat((blocks, (token <= query) & (token >= self.rate * border - self.begun)), dim=1)


class CompressedCall(NamedTuple):
    """Contexts of a call for the sequences that stand at the same place in a block.

    Attributes:
        tiers: Extents of the tiers.
        rows: Indices of these sequences, or None if they are the whole batch.
        new: Context of the projection of tokens.
        pooled: Context of the projection of pooled blocks, which have the positions of their last tokens.
        keys: Context of attention, whose keys are pooled blocks, then tokens.
    """

    tiers: Tiers
    rows: Tensor | None
    new: AttentionContext
    pooled: AttentionContext
    keys: AttentionContext

    @property
    def visible(self) -> Tensor | None:
        """Boolean mask (t s), true where the query attends to the block or token; None if to all."""
        return self.keys.constant("visible", lambda: self.tiers.visible(self.keys.positions.device))


def compressed_calls(call: AttentionContext, rate: int, n_compressed: int) -> list[CompressedCall]:
    """Contexts of all sequences of a call, by their place in a block."""

    def part(begun: int, rows: Tensor | None) -> CompressedCall:
        tiers = Tiers(call, rate, n_compressed, begun)

        def derived(name: str, n_memory: int) -> AttentionContext:
            return call.derive(("compressed", rate, n_compressed, begun, name), n_memory, call.keep, sequences=rows)

        pooled, keys = derived("pooled", 0), derived("keys", len(tiers.blocks) + len(tiers.tokens) - call.n_new)
        pooled.positions = _BlockPositions(**vars(pooled.positions), tiers=tiers)
        keys.positions = _TierPositions(**vars(keys.positions), tiers=tiers)
        new = call.for_rows(None) if rows is None else derived("new", call.n_memory)
        return CompressedCall(tiers, rows, new, pooled, keys)

    def parts() -> list[CompressedCall]:
        if call.positions.offsets is None:
            return [part(call.start % rate, None)]
        places = (call.positions.offsets + call.start) % rate
        first, *others = sorted(set(map(int, places.tolist())))
        if not others:
            return [part(first, None)]
        return [part(place, (places == place).nonzero()[:, 0]) for place in (first, *others)]

    return call.constant(("compressed", rate, n_compressed), parts)


@dataclass(eq=False, kw_only=True)
class _TierPositions(Positions):
    """Positions whose keys are pooled blocks, then tokens."""

    tiers: Tiers

    @property
    def is_consecutive(self) -> bool:
        """True if there are no blocks."""
        return not self.tiers.blocks

    def farthest(self, max_distance: int | None) -> int:
        """Distance of the last query and the first block or token, whichever is further back."""
        blocks, tokens = self.tiers.blocks, self.tiers.tokens
        return self.n_new - 1 - min(tokens.start, self.tiers.end(blocks.start) if blocks else 0)

    @cached_property
    def keys(self) -> Tensor:
        """Positions (s) of the last tokens of blocks, and of tokens, relative to the first new token."""
        blocks, tokens = self.tiers.blocks, self.tiers.tokens
        first, stop = self.tiers.end(blocks.start), self.tiers.end(blocks.stop)
        of_blocks = torch.arange(first, stop, self.tiers.rate, device=self.device)
        return torch.cat((of_blocks, torch.arange(tokens.start, tokens.stop, device=self.device)))


class _BlockPositions(_TierPositions):
    """Positions of blocks instead of tokens."""

    def latest(self, n: int) -> Tensor:
        """Positions (b n) in their texts of the last tokens of the n latest blocks, or (1 n) if all sequences agree."""
        last = self.first + self.tiers.end(self.tiers.n_complete - 1)
        positions = last - self.tiers.rate * torch.arange(n - 1, -1, -1, device=self.device)
        return positions[None] if self.offsets is None else self.offsets[:, None] + positions
