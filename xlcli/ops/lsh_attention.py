"""LSH attention: a query attends to keys of its own hash buckets only (Kitaev et al. 2020, Reformer).

In each hash round a query sees the latest `bucket_size` earlier keys of its bucket. It attends to the union over all
rounds, each key once, and to itself only if that union is empty. The visible keys therefore depend neither on later
tokens, as they do in implementations that sort the whole sequence into chunks, nor on how the text is cut into calls.

In each round a token has a global rank: its bucket times `RANKS_PER_BUCKET`, plus the number of earlier tokens in that
bucket. Query i sees key j in a round if rank_i - rank_j is in 1..bucket_size. A key seen in several rounds counts in
the first of these rounds.

Further axes: n bucket, c slot of a bucket or token of a tile, m tile or bucket of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlcli.ops.lsh_gather import KeyWindow, attend_gathered
from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, flat_index, latest, seen_before, write
from xlcli.ops.lsh_tiles import Sums, add_rounds, arrange, mix, windows

CHECKPOINT_SCORES = 2**24
"""Number of scores from which a round is recomputed in the backward pass instead of stored."""

GATHERED_TOKENS = 2
"""Largest number of tokens of a call for each bucket with which every query gathers its keys (measured on a CPU)."""

MAX_FLOATS = 2**22
"""Maximum size of the queries, keys and values rearranged at once, unless one head is larger. glibc returns larger
blocks to the system, which clears every page again."""

MAX_LOG_WEIGHT = 60.0
"""Largest score whose exponential is summed as it is. Larger ones are reduced by the maximum of their row."""

MAX_SCORES = 2**18
"""Number of scores computed at once."""

TILE = 16
"""Maximum number of queries of a bucket that are computed together."""


def attend_hashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    *,
    bucket_size: int,
    dropout: float = 0.0,
) -> Tensor:
    """LSH attention of new tokens over the table and themselves, at a cost linear in their number.

    In each round the tokens of a bucket are cut into tiles in their order, and each tile attends to itself and to the
    `bucket_size` tokens before it, some of which may be in the table. Later tokens do not change the tile of a token or
    its place in it. If the buckets are many for the length of the call, every query gathers its keys instead.

    Args:
        q: Queries (b h t e).
        k: Keys (b h t e), not longer than 1.
        v: Values (b h t w).
        ranks: Buckets and ranks of the new tokens.
        table: Earlier tokens, without gradient; None if they are not visible.
        key_window: Positions of visible keys; `start` is the position of the first new token.
        bucket_size: Largest number of keys that a query sees in a round.
        dropout: Dropout rate of the weights.

    Returns:
        (b h t w)
    """
    if q.shape[2] <= GATHERED_TOKENS * ranks.sizes.shape[-1]:
        return attend_gathered(q, k, v, ranks, table, key_window, bucket_size=bucket_size, dropout=dropout)
    h, floats_per_head = q.shape[1], k[:, :1].numel() * 2 + v[:, :1].numel()
    if h > 1 and h * floats_per_head > MAX_FLOATS:
        n, parts = max(1, MAX_FLOATS // floats_per_head), []
        for heads in (slice(i, i + n) for i in range(0, h, n)):
            own = q[:, heads], k[:, heads], v[:, heads], BucketRanks(*(part[:, heads] for part in ranks))
            earlier = None if table is None else Table(*(part[:, heads] for part in table))
            parts.append(attend_hashed(*own, earlier, key_window, bucket_size=bucket_size, dropout=dropout))
        # In memory the heads of a token are adjacent, as its projections are.
        return torch.cat([part.transpose(1, 2) for part in parts], dim=2).transpose(1, 2)
    large = (q.detach().norm(dim=-1) > MAX_LOG_WEIGHT).flatten()
    # With gradients, keys and values before a tile are stored if some of them are in the table.
    tile = bucket_size if bucket_size % TILE or (table is not None and torch.is_grad_enabled()) else TILE
    qkv, codes = tuple(part.flatten(0, 2) for part in (q, k, v)), _codes(ranks, bucket_size)
    given = qkv, large if large.any() else None, ranks, codes, table, key_window, bucket_size, tile, dropout
    attend = partial(_attend_round, *given)
    rounds: list[Sums] = []
    for r, n_tiles in enumerate((-(-ranks.sizes // tile)).sum((0, 1, 3)).tolist()):
        if torch.is_grad_enabled() and n_tiles * tile * bucket_size >= CHECKPOINT_SCORES:
            rounds.append(Sums(*checkpoint(attend, r, n_tiles, use_reentrant=False)))
        else:
            rounds.append(attend(r, n_tiles))
    y, total = add_rounds(rounds)
    alone = (total == 0).to(total.dtype)
    return torch.addcmul(y / (total + alone), v.flatten(0, 2), alone).view_as(v)


class _Codes(NamedTuple):
    """Global ranks as small floats, which are fast to subtract.

    Two codes differ by at most `size` exactly where the global ranks do: tokens of a bucket have successive codes, all
    tokens more than `size` before the call share one, and codes of different buckets differ by more than `size`.

    first   (b h r n)  code of the first token of the call in each bucket
    own     (b h r t)  codes of the tokens of the call
    """

    first: Tensor
    own: Tensor


def _codes(ranks: BucketRanks, size: int) -> _Codes:
    steps = ranks.sizes + 2 * size + 2
    first = steps.cumsum(-1) - steps + size + 1
    largest = ranks.buckets.shape[-1] + steps.shape[-1] * (2 * size + 2)
    exact = torch.float32 if largest < 2**24 else torch.float64
    return _Codes(first.to(exact), (first.gather(-1, ranks.buckets) + ranks.ranks).to(exact))


def _attend_round(
    qkv: Sequence[Tensor],
    large: Tensor | None,
    ranks: BucketRanks,
    codes: _Codes,
    table: Table | None,
    key_window: KeyWindow,
    size: int,
    tile: int,
    dropout: float,
    r: int,
    n_tiles: int,
) -> Sums:
    """Attention (b·h·t ...) to the keys first seen in round r, in `n_tiles` tiles of `tile` tokens.

    Scores of a query may exceed `MAX_LOG_WEIGHT` where the mask `large` (b·h·t) is true; None: nowhere. Others as for
    `attend_hashed`, with queries, keys and values (b·h·t ...).
    """
    b, h, n_rounds, t = ranks.buckets.shape
    n, device = ranks.sizes.shape[-1], ranks.sizes.device
    sizes = ranks.sizes[:, :, r].flatten()
    tiles = -(-sizes // tile)
    begins = tiles.cumsum(0) - tiles
    cells = flat_index(ranks.buckets, b, h) * n + ranks.buckets[:, :, r]
    place = (begins[cells] * tile + ranks.ranks[:, :, r]).flatten() + size
    # Places before the first bucket and after the last token of a bucket hold arbitrary tokens, never visible.
    order = place.new_zeros(size + n_tiles * tile)
    order.index_copy_(0, place, torch.arange(len(place), device=device))
    limit = None if table is None and (key_window.limit or 0) >= t - 1 else key_window.limit
    marks = [codes.own[:, :, i].flatten().index_select(0, order) for i in range(r)]
    if limit is not None:
        marks.append((order % t).to(torch.float32 if t + limit < 2**24 else torch.float64))
    new = [*(arrange(part, order, place) for part in qkv), *marks]
    # Ranks of the keys before each tile, relative to the first new token of the bucket: negative in the table.
    bucket = torch.repeat_interleave(torch.arange(len(sizes), device=device), tiles, output_size=n_tiles)
    tile_ids, slots = torch.arange(n_tiles, device=device), torch.arange(size, device=device)
    before = ((tile_ids - begins[bucket]) * tile - size).unsqueeze(1) + slots
    exists = before >= 0
    if table is None:
        past = [windows(part, None, None, size=size, tile=tile) for part in new[1:]]
    else:
        nonempty = sizes.nonzero().squeeze(1)
        bucket_ids = (nonempty // n * n_rounds + r) * n + nonempty % n
        keys, values, positions, global_ranks, known = latest(table, bucket_ids, table.counts.flatten()[bucket_ids])
        known = known & (positions >= key_window.oldest)
        old = [keys, values, *_codes_of(global_ranks[..., :r], codes, table, nonempty // n).unbind(-1)]
        if limit is not None:
            old.append((positions - key_window.start).clamp(min=-limit - 1))
        first = len(order) + ((sizes > 0).cumsum(0)[bucket] * size).unsqueeze(1)
        index = torch.where(exists, (tile_ids * tile).unsqueeze(1) + slots, first + before)
        exists |= torch.cat((exists.new_zeros(len(order)), known.flatten()))[index]
        past = [
            windows(part, entries.flatten(0, 1).to(part.dtype), index, size=size, tile=tile)
            for part, entries in zip(new[1:], old, strict=True)
        ]
    own = [rearrange(part[size:], "(m c) ... -> m c ...", c=tile) for part in new]
    if large is not None:
        large = rearrange(large[order[size:]], "(m c) -> m c 1", c=tile)
    group = max(1, MAX_SCORES // (tile * size))
    groups = zip(*(torch.split(part, group) for part in (*own, *past, exists)), strict=True)
    of_groups = itertools.repeat(None) if large is None else torch.split(large, group)
    sums = [
        mix(parts[: len(own)], parts[len(own) : -1], parts[-1], rows, limit=limit, dropout=dropout)
        for parts, rows in zip(groups, of_groups, strict=False)
    ]
    parts = [torch.cat(part) for part in zip(*sums, strict=True) if part[0] is not None]
    return Sums(*(part.flatten(0, 1).index_select(0, place - size) for part in parts))


def _codes_of(global_ranks: Tensor, codes: _Codes, table: Table, heads: Tensor) -> Tensor:
    """Codes (m c r) of earlier tokens with these global ranks (m c r); `heads` (m) counts sequences and heads."""
    rounds, n = global_ranks.shape[-1], table.counts.shape[-1]
    buckets, counts = global_ranks // RANKS_PER_BUCKET, global_ranks % RANKS_PER_BUCKET
    cells = (
        rearrange(heads, "m -> m 1 1") * table.counts.shape[2] + flat_index(heads, rounds).squeeze(-1)
    ) * n + buckets
    since = counts - table.counts.flatten()[cells]
    first = codes.first.flatten()[cells]
    return first + since.clamp(min=-table.positions.shape[-1] - 1).to(first.dtype)


def attend_hashed_one(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, key_window: KeyWindow) -> Tensor:
    """LSH attention (b h 1 w) of one new token in `buckets` (b h r 1), without gradient.

    The token, with key (b h 1 e) and value (b h 1 w), is then written into the table, in place.
    """
    b, h, r, n, size, _ = table.keys.shape
    bucket_ids = (flat_index(buckets, b, h, r) * n + buckets).squeeze(-1)
    counts = table.counts.flatten()[bucket_ids]
    global_rank = buckets.squeeze(-1) * RANKS_PER_BUCKET + counts
    keys, values, positions, global_ranks, exists = latest(table, bucket_ids, counts)
    oldest = (
        key_window.oldest if key_window.limit is None else max(key_window.oldest, key_window.start - key_window.limit)
    )
    seen = (exists & (positions >= oldest) & ~seen_before(global_rank, global_ranks, size)).flatten(2)
    scores = (keys.flatten(2, 3) @ q.mT).squeeze(-1).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ values.flatten(2, 3)
    keys, values = (repeat(part, "b h 1 e -> (b h r) e", r=r) for part in (k, v))
    global_ranks = repeat(global_rank, "b h s -> (b h r) s", r=r)
    write(table, bucket_ids.flatten(), counts.flatten(), keys, values, key_window.start, global_ranks)
    table.counts.view(-1)[bucket_ids.flatten()] += 1
    return y.where(seen.any(-1)[..., None, None], v)
