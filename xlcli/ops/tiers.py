"""Tiers of compressive memory: the tokens and the pooled blocks that the queries of a call attend to.

Blocks of `rate` tokens are counted from the beginning of the text, so no result depends on the division of a text into
calls or batches. A query at position i attends to the tokens from the first one of block b(i) = (i - mem_len) div rate
on, and to the `n_compressed` pooled blocks before block b(i). With a growing span, i is the first position of the call.

Here blocks are counted from that of the first new token, which is block 0 and begins `begun` tokens before the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiers:
    """Extents of both tiers in a call of `n_new` tokens after `start` tokens, with memory.

    `keep` is the number of tokens that memory keeps at least, `mem_len` the number that this call reads at least.
    """

    rate: int
    n_compressed: int
    begun: int
    start: int
    n_new: int
    mem_len: int
    keep: int
    uniform: bool

    def border(self, query: int) -> int:
        """First block whose tokens the query attends to."""
        return ((query if self.uniform else 0) + self.begun - self.mem_len) // self.rate

    @property
    def n_complete(self) -> int:
        """Number of blocks that end in this call."""
        return (self.begun + self.n_new) // self.rate

    @property
    def n_slots(self) -> int:
        """Number of pooled blocks in memory, those included whose tokens are attended to."""
        return self.n_compressed - -self.keep // self.rate

    @property
    def n_kept(self) -> int:
        """Number of tokens in memory after the call, in the same number for every place of a sequence in its text."""
        return min(self.start + self.n_new, self.keep + self.rate - 1)

    @property
    def blocks(self) -> range:
        """Blocks that some query attends to: those that have been read completely."""
        oldest = -((self.start - self.begun) // self.rate)
        first = max(self.border(0) - self.n_compressed, oldest)
        return range(first, max(first, self.border(self.n_new - 1)))

    @property
    def tokens(self) -> range:
        """Tokens, counted from the first new one, that some query attends to."""
        return range(max(-self.start, self.rate * self.border(0) - self.begun), self.n_new)

    @property
    def leaving(self) -> range:
        """Blocks whose tokens the first query of this call attends to, and that of the next call does not."""
        oldest = -((self.start - self.begun) // self.rate)
        border = (self.n_new + self.begun - self.mem_len) // self.rate
        return range(max(self.border(0), oldest), max(self.border(0), oldest, border))

    def end(self, block: int) -> int:
        """Position of the last token of a block, counted from the first new token."""
        return self.rate * (block + 1) - 1 - self.begun

    def visible(self, device: torch.device) -> Tensor | None:
        """Boolean mask (t s), true where the query attends to the block or token; None if to all."""
        if self.n_new == 1:
            return None
        query = torch.arange(self.n_new, device=device)[:, None]
        border = ((query if self.uniform else 0 * query) + self.begun - self.mem_len) // self.rate
        block = torch.arange(self.blocks.start, self.blocks.stop, device=device)
        token = torch.arange(self.tokens.start, self.tokens.stop, device=device)
        blocks = (block < border) & (block >= border - self.n_compressed)
        return torch.cat((blocks, (token <= query) & (token >= self.rate * border - self.begun)), dim=1)
