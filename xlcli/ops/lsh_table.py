"""Hash buckets of tokens, ranks of tokens within their buckets, and a table of the latest tokens of every bucket.

Further axes: n bucket, c slot of a bucket.
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

RANKS_PER_BUCKET = 2**36  # between the global ranks of adjacent buckets: the maximum number of tokens of a bucket
MAX_PRODUCTS = 2**18  # number of inner products with hash directions that are computed at once


def draw_rotations(
    n_rounds: int, factors: Sequence[int], head_dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """Random directions (r f e): in each round n/2 for each factor n of the number of buckets."""
    n_directions = sum(n // 2 for n in factors)  # of each factor; the other half of its buckets are opposite
    shape = (n_rounds, n_directions, head_dim)
    device = generator.device if generator else None
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float64).float()


@torch.no_grad()
def hash_buckets(x: Tensor, rotations: Tensor, factors: Sequence[int]) -> Tensor:
    """Buckets (b h r t) of vectors x (b h t e): argmax([xR; -xR]), independent of the norm (Andoni et al. 2015).

    All heads share the directions R (r f e). Each even factor n of the number of buckets has n/2 of them, and gives a
    digit of the bucket number, least significant last; no factors mean a single bucket.
    """
    products_per_token = x.shape[0] * x.shape[1] * max(1, rotations.shape[1])
    n_tokens = max(1, MAX_PRODUCTS // products_per_token)
    parts = []
    for part in torch.split(x, n_tokens, dim=2):
        rounds = [_buckets(part, directions, factors) for directions in rotations]
        parts.append(torch.stack(rounds, dim=2))
    return torch.cat(parts, dim=-1)


def _buckets(x: Tensor, directions: Tensor, factors: Sequence[int]) -> Tensor:
    """Buckets (b h t) of one round with directions (f e)."""
    buckets = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    parts = torch.split(F.linear(x, directions), [n // 2 for n in factors], dim=-1)
    for part, n in zip(parts, factors, strict=True):
        # The direction nearest to x, or to -x: its digit is in the second half.
        nearest = _argmax(part.abs())
        is_opposite = part.gather(-1, nearest.unsqueeze(-1)).squeeze(-1) < 0
        digit = nearest + is_opposite * (n // 2)
        buckets = buckets * n + digit
    return buckets


def _argmax(x: Tensor) -> Tensor:
    """Index of the first maximum along the last axis, any index if there are NaN. Faster than `argmax` on the CPU."""
    n = x.shape[-1]
    below = (x - x.amax(-1, keepdim=True)).sign_()  # 0 at maxima, else -1
    from_end = torch.arange(n - 1, -1, -1, dtype=x.dtype, device=x.device)
    return n - 1 - below.mul_(n).add_(from_end).amax(-1).nan_to_num_().long()


class Table(NamedTuple):
    """Latest `bucket_size` tokens of every bucket. Token number a of a bucket is in slot a modulo `bucket_size`."""

    keys: Tensor  # (b h r n c e)
    values: Tensor  # (b h r n c w)
    positions: Tensor  # (b h r n c) number of tokens read before the token
    global_ranks: Tensor  # (b h r n c r) global rank of the token in every round
    counts: Tensor  # (b h r n) number of tokens written so far

    @staticmethod
    def empty(like: Tensor, batch: int, n_heads: int, n_rounds: int, n_buckets: int, bucket_size: int = 0) -> Table:
        """Empty table for keys and values of the width and type of `like` (... e).

        With bucket size 0 it takes almost no memory, and must be copied before tokens are written.
        """
        shape = (batch, n_heads, n_rounds, n_buckets, bucket_size)
        integers = partial(torch.zeros, dtype=torch.int64, device=like.device)
        keys = like.new_zeros((*shape, like.shape[-1]))
        return Table(
            keys=keys,
            values=torch.zeros_like(keys),
            positions=integers(shape),
            global_ranks=integers((*shape, n_rounds)),
            counts=integers(shape[:-1]),
        )

    @property
    def n_slots(self) -> int:
        """Number of slots per bucket; 0 in a table that has never been written."""
        return self.positions.shape[-1]

    def copy(self, bucket_size: int) -> Table:
        """Copy with `bucket_size` slots per bucket."""
        if not self.n_slots:
            b, h, r, n = self.counts.shape
            return Table.empty(self.keys, b, h, r, n, bucket_size)
        return Table(*(t.clone() for t in self))


class BucketRanks(NamedTuple):
    """Buckets of new tokens, and their ranks."""

    buckets: Tensor  # (b h r t)
    ranks: Tensor  # (b h r t) number of earlier tokens of this call in the same bucket
    sizes: Tensor  # (b h r n) number of tokens of this call in each bucket
    global_ranks: Tensor  # (b h r t) bucket times `RANKS_PER_BUCKET`, plus number of all earlier tokens in the bucket


def rank_in_buckets(buckets: Tensor, counts: Tensor) -> BucketRanks:
    """Counts, for each token with its buckets (b h r t), the tokens before it in the same bucket.

    `counts` (b h r n) are the numbers of tokens that earlier calls have put into each bucket.
    """
    b, h, r, _ = buckets.shape
    n_buckets = counts.shape[-1]
    # One number for each bucket of each sequence, head and round.
    bucket_ids = (flat_index(buckets, b, h, r) * n_buckets + buckets).flatten()
    sizes = torch.bincount(bucket_ids, minlength=b * h * r * n_buckets)
    # In the order of buckets, the rank of a token is its place less the place of the first token of its bucket.
    sorted_ids, order = bucket_ids.sort(stable=True)
    first_places = sizes.cumsum(0) - sizes
    sorted_places = torch.arange(len(bucket_ids), device=bucket_ids.device)
    ranks = torch.empty_like(bucket_ids)
    ranks[order] = sorted_places - first_places[sorted_ids]
    ranks = ranks.view_as(buckets)
    n_earlier = counts.gather(-1, buckets) + ranks
    global_ranks = buckets * RANKS_PER_BUCKET + n_earlier
    return BucketRanks(buckets=buckets, ranks=ranks, sizes=sizes.view_as(counts), global_ranks=global_ranks)


@torch.no_grad()
def insert(table: Table, ranks: BucketRanks, k: Tensor, v: Tensor, start: int) -> None:
    """Writes the tokens of a call into a table, in place, each to its bucket in every round.

    `ranks` are those of these tokens, with keys (b h t e) and values (b h t w); the first one is at position `start`.
    """
    n_rounds, n_new = ranks.buckets.shape[2:]
    n_buckets, bucket_size = table.positions.shape[-2:]
    # Only the last tokens of each bucket, since they would overwrite the others. `written` (m) indexes axes b h r t.
    n_from_token_on = ranks.sizes.gather(-1, ranks.buckets) - ranks.ranks
    written = (n_from_token_on <= bucket_size).flatten().nonzero().squeeze(1)
    round_of_head, token = written // n_new, written % n_new
    bucket_ids = round_of_head * n_buckets + ranks.buckets.flatten()[written]
    counts = table.counts.flatten()[bucket_ids] + ranks.ranks.flatten()[written]
    # The same tokens as indices of the axes b h t, which keys and values have.
    rows = round_of_head // n_rounds * n_new + token
    global_ranks = rearrange(ranks.global_ranks, "b h r t -> (b h t) r")[rows]
    write(table, bucket_ids, counts, k.flatten(0, 2)[rows], v.flatten(0, 2)[rows], start + token, global_ranks)
    table.counts.add_(ranks.sizes)


def write(
    table: Table, bucket_ids: Tensor, counts: Tensor, k: Tensor, v: Tensor, position: Tensor | int, global_ranks: Tensor
) -> None:
    """Writes a token to each bucket of `bucket_ids` (m), indices of axes b h r n, after `counts` (m) earlier tokens."""
    size = table.positions.shape[-1]
    slots = bucket_ids * size + counts % size
    for part, rows in ((table.keys, k), (table.values, v), (table.global_ranks, global_ranks)):
        part.view(-1, part.shape[-1]).index_copy_(0, slots, rows.to(part.dtype))
    table.positions.view(-1)[slots] = position


class Entries(NamedTuple):
    """The tokens in the slots of some buckets (...), in the order in which they were written."""

    keys: Tensor  # (... c e)
    values: Tensor  # (... c w)
    positions: Tensor  # (... c)
    global_ranks: Tensor  # (... c r)
    is_used: Tensor  # (... c) false for a slot that no token was written to


def latest(table: Table, bucket_ids: Tensor, counts: Tensor) -> Entries:
    """Reads the buckets `bucket_ids` (...) of a table as they are after `counts` (...) tokens were written to each.

    The order of arrival makes the rounding of sums over the slots independent of tokens that were overwritten.
    """
    size = table.n_slots
    slots = torch.arange(size, device=bucket_ids.device)
    counts = counts.unsqueeze(-1)
    # The slot of the next token has the oldest one.
    places = bucket_ids.unsqueeze(-1) * size + (counts + slots) % size

    def entries(part: Tensor) -> Tensor:
        # An index on the first axis instead would be four times as slow.
        return part.flatten(0, 4).index_select(0, places.flatten()).view(*places.shape, *part.shape[5:])

    is_used = counts - size + slots >= 0
    keys, values = entries(table.keys), entries(table.values)
    return Entries(keys, values, entries(table.positions), entries(table.global_ranks), is_used)


def seen_before(query_ranks: Tensor, key_ranks: Tensor, bucket_size: int) -> Tensor:
    """Mask (... r c) of the keys found in each round that a query sees in an earlier round, too.

    `query_ranks` (... r) are the global ranks of the query, `key_ranks` (... r c r) those of the keys. Both are in one
    bucket of a round, and near enough, if their ranks there differ by at most `bucket_size`.
    """
    r = query_ranks.shape[-1]
    is_met = (query_ranks[..., None, None, :] - key_ranks).abs() <= bucket_size
    is_earlier_round = torch.ones(r, r, dtype=torch.bool, device=query_ranks.device).tril(-1).unsqueeze(1)
    return (is_met & is_earlier_round).any(-1)


def flat_index(like: Tensor, *shape: int) -> Tensor:
    """Tensor (*shape, 1) of 0, 1, 2, ..."""
    return torch.arange(math.prod(shape), device=like.device).view(*shape, 1)
