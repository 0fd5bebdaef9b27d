"""Tokens in hash buckets: which bucket, how many arrived before, and a table of the latest ones.

Axes besides the project's: r hash round, n bucket, c slot of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

RANKS_PER_BUCKET = 2**36
"""Tickets of a bucket: so many tokens may arrive in one."""


def draw_rotations(
    n_rounds: int, factors: Sequence[int], head_dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """Random directions (r f e): n/2 of them in each round for each of the `factors` n of the number of buckets."""
    shape = (n_rounds, sum(n // 2 for n in factors), head_dim)
    device = generator.device if generator else None
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).float()


@torch.no_grad()
def hash_buckets(x: Tensor, rotations: Tensor, factors: Sequence[int]) -> Tensor:
    """Buckets (b h r t) of vectors x (b h t e): argmax([xR; -xR]) (Andoni et al. 2015), which their norm cannot change.

    Args:
        x: Queries or keys.
        rotations: Random directions (r f e); all heads share them.
        factors: Even numbers, each with its own n/2 directions: the digits of a bucket, the last one running fastest.
            None at all is a single bucket.
    """
    return torch.stack([_buckets(x, directions, factors) for directions in rotations], dim=2)


def _buckets(x: Tensor, directions: Tensor, factors: Sequence[int]) -> Tensor:
    """Buckets (b h t) of one round, with directions (f e)."""
    buckets = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    parts = torch.split(F.linear(x, directions), [n // 2 for n in factors], dim=-1)
    for part, n in zip(parts, factors, strict=True):
        place = part.abs().max(-1).indices
        opposite = part.gather(-1, place.unsqueeze(-1)).squeeze(-1) < 0
        buckets = buckets * n + place + opposite * (n // 2)
    return buckets


class Table(NamedTuple):
    """The last `bucket_size` tokens of every bucket; the one that arrived a-th lies in slot a modulo `bucket_size`.

    keys        (b h r n c e)
    values      (b h r n c w)
    positions   (b h r n c)    tokens read before it
    global_ranks     (b h r n c r)  in every round
    counts      (b h r n)      tokens that have arrived
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    global_ranks: Tensor
    counts: Tensor

    @staticmethod
    def empty(like: Tensor, batch: int, n_heads: int, n_rounds: int, n_buckets: int, bucket_size: int = 0) -> Table:
        """A table that nothing has arrived in, for keys and values as wide as `like` (... e), of its type.

        Without slots it takes next to no memory, and must be copied before it is written.
        """
        shape = (batch, n_heads, n_rounds, n_buckets, bucket_size)
        whole = partial(torch.zeros, dtype=torch.int64, device=like.device)
        keys = like.new_zeros((*shape, like.shape[-1]))
        return Table(keys, torch.zeros_like(keys), whole(shape), whole((*shape, n_rounds)), whole(shape[:-1]))

    @property
    def n_slots(self) -> int:
        """Tokens that a bucket holds; none as long as nothing has arrived."""
        return self.positions.shape[-1]

    def copy(self, bucket_size: int) -> Table:
        """The same in memory of its own, with so many slots."""
        if not self.n_slots:
            b, h, r, n = self.counts.shape
            return Table.empty(self.keys, b, h, r, n, bucket_size)
        return Table(*(t.clone() for t in self))


class BucketRanks(NamedTuple):
    """New tokens lined up at their buckets.

    buckets   (b h r t)
    ranks     (b h r t)  tokens before it in its bucket, in this call
    sizes     (b h r n)  tokens of this call in each bucket
    global_ranks   (b h r t)
    """

    buckets: Tensor
    ranks: Tensor
    sizes: Tensor
    global_ranks: Tensor


def rank_in_buckets(buckets: Tensor, counts: Tensor) -> BucketRanks:
    """Lines up tokens with these buckets (b h r t) where so many (b h r n) have arrived before."""
    b, h, r, _ = buckets.shape
    n = counts.shape[-1]
    cells = (numbers(buckets, b, h, r) * n + buckets).flatten()
    arrived, order = cells.sort(stable=True)
    sizes = torch.bincount(cells, minlength=b * h * r * n)
    first = sizes.cumsum(0) - sizes
    ranks = torch.empty_like(cells)
    ranks[order] = torch.arange(len(cells), device=cells.device) - first[arrived]
    ranks = ranks.view_as(buckets)
    return BucketRanks(
        buckets, ranks, sizes.view_as(counts), buckets * RANKS_PER_BUCKET + counts.gather(-1, buckets) + ranks
    )


@torch.no_grad()
def insert(table: Table, line: BucketRanks, k: Tensor, v: Tensor, start: int) -> None:
    """Writes new tokens, the first of them at position `start`, into the table, which is changed in place.

    Args:
        table: What arrived before them.
        line: The tokens at their buckets.
        k: Keys (b h t e).
        v: Values (b h t w).
        start: Tokens read before them.
    """
    r, t = line.buckets.shape[2:]
    n, size = table.positions.shape[-2:]
    left = (line.sizes.gather(-1, line.buckets) - line.ranks <= size).flatten().nonzero().squeeze(1)
    homes = left // t * n + line.buckets.flatten()[left]
    tokens = left // (r * t) * t + left % t
    counts = table.counts.flatten()[homes] + line.ranks.flatten()[left]
    global_ranks = rearrange(line.global_ranks, "b h r t -> (b h t) r")[tokens]
    write(table, homes, counts, k.flatten(0, 2)[tokens], v.flatten(0, 2)[tokens], start + tokens % t, global_ranks)
    table.counts.add_(line.sizes)


def write(
    table: Table, homes: Tensor, counts: Tensor, k: Tensor, v: Tensor, position: Tensor | int, global_ranks: Tensor
) -> None:
    """Puts tokens into the slots of their buckets (m) where so many (m) have arrived before."""
    size = table.positions.shape[-1]
    slots = homes * size + counts % size
    for part, rows in ((table.keys, k), (table.values, v), (table.global_ranks, global_ranks)):
        part.view(-1, part.shape[-1]).index_copy_(0, slots, rows.to(part.dtype))
    table.positions.view(-1)[slots] = position


def numbers(like: Tensor, *shape: int) -> Tensor:
    """0, 1, 2, ... in this shape and one more axis of one."""
    return torch.arange(math.prod(shape), device=like.device).view(*shape, 1)
