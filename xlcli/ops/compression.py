"""Contexts of attention over compressive memory (`ops/tiers.py`): of projections, and of queries and keys.

Keys are pooled blocks, then tokens. A block has the position of its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import Positions
from xlcli.ops.tiers import Tiers


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
        return self.keys.cache.constant("visible", lambda: self.tiers.visible(self.keys.positions.device))


def compressed_calls(call: AttentionContext, rate: int, n_compressed: int) -> list[CompressedCall]:
    """Contexts of all sequences of a call."""
    return call.cache.constant(
        ("compressed", rate, n_compressed),
        lambda: [_part(call, rate, n_compressed, *place) for place in _places(call, rate)],
    )


def _places(call: AttentionContext, rate: int) -> list[tuple[int, Tensor | None]]:
    """Each place in a block at which sequences stand, and the indices of these sequences."""
    if call.positions.offsets is None:
        return [(call.start % rate, None)]
    places = (call.positions.offsets + call.start) % rate
    low, high = int(places.min()), int(places.max())
    if low == high:
        return [(low, None)]
    found = [(place, (places == place).nonzero()[:, 0]) for place in range(low, high + 1)]
    return [(place, rows) for place, rows in found if len(rows)]


def _part(call: AttentionContext, rate: int, n_compressed: int, begun: int, rows: Tensor | None) -> CompressedCall:
    tiers = Tiers(
        rate=rate,
        n_compressed=n_compressed,
        begun=begun,
        start=call.start,
        n_new=call.n_new,
        mem_len=call.span.mem_len,
        keep=call.span.longest,
        uniform=call.span.kind == "uniform",
    )

    def derived(
        name: str, n_memory: int, positions: Callable[[Positions, Tiers], Positions] | None
    ) -> AttentionContext:
        def make() -> AttentionContext:
            offsets, tokens = call.positions.offsets, call.tokens
            context = AttentionContext(
                call.span,
                n_memory=n_memory,
                n_new=call.n_new,
                keep=call.keep,
                device=call.positions.device,
                start=call.start,
                offsets=offsets if rows is None or offsets is None else offsets[rows],
                tokens=tokens if rows is None or tokens is None else tokens[rows],
            )
            if positions is not None:
                context.positions = positions(context.positions, tiers)
            return context

        return call.derive(("compressed", rate, n_compressed, begun, name), make)

    n_memory = len(tiers.blocks) + len(tiers.tokens) - call.n_new
    return CompressedCall(
        tiers,
        rows,
        call.for_rows(None) if rows is None else derived("new", call.n_memory, None),
        derived("pooled", 0, _BlockPositions),
        derived("keys", n_memory, _TierPositions),
    )


class _TierPositions(Positions):
    """Positions whose keys are pooled blocks, then tokens."""

    def __init__(self, positions: Positions, tiers: Tiers) -> None:
        super().__init__(
            n_memory=positions.n_memory,
            n_new=positions.n_new,
            first=positions.first,
            offsets=positions.offsets,
            device=positions.device,
        )
        self.tiers = tiers

    @property
    def is_consecutive(self) -> bool:
        """Whether there are no blocks."""
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
