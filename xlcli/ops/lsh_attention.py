"""LSH attention: a query attends to keys of its own hash buckets only (Kitaev et al. 2020, Reformer).

In each hash round a query sees the latest `bucket_size` earlier keys of its bucket. It attends to the union over all
rounds, each key once, and to itself only if that union is empty. The visible keys therefore depend neither on later
tokens, as they do in implementations that sort the whole sequence into chunks, nor on how the text is cut into calls.

In each round a token has a global rank: its bucket times `RANKS_PER_BUCKET`, plus the number of earlier tokens in that
bucket. Query i sees key j in a round if rank_i - rank_j is in 1..bucket_size. A key seen in several rounds counts in
the first of these rounds.

Many tokens of a bucket are computed in tiles: queries with the same number of keys before them.

Further axes: n bucket or key before a tile, c slot of a bucket or token of a tile, m tile or bucket of a list, p place
in the order of the tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.ops.lsh_gather import KeyWindow, attend_gathered
from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, flat_index, latest, seen_before, write

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
    qkv = tuple(part.flatten(0, 2) for part in (q, k, v))
    call = _Call(qkv, large if large.any() else None, ranks, table, key_window, bucket_size, tile, dropout)
    rounds: list[Sums] = []
    for r, n_tiles in enumerate((-(-ranks.sizes // tile)).sum((0, 1, 3)).tolist()):
        if torch.is_grad_enabled() and n_tiles * tile * bucket_size >= CHECKPOINT_SCORES:
            rounds.append(Sums(*checkpoint(call.attend, r, n_tiles, use_reentrant=False)))
        else:
            rounds.append(call.attend(r, n_tiles))
    y, total = add_rounds(rounds)
    alone = (total == 0).to(total.dtype)
    return torch.addcmul(y / (total + alone), v.flatten(0, 2), alone).view_as(v)


class _Tiles(NamedTuple):
    """Tiles of one round.

    sizes   (b·h·n)  number of tokens of each bucket
    place   (b·h·t)  place of each token
    order   (p)      token at each place; any, never visible, before the first bucket and after the last token of one
    bucket  (m)      bucket of each tile
    before  (m n)    ranks of the keys before each tile, counted from the first new token of the bucket: negative in the
                     table
    """

    sizes: Tensor
    place: Tensor
    order: Tensor
    bucket: Tensor
    before: Tensor


class _Call(NamedTuple):
    """Tokens of a call, in tiles of `tile` tokens of a bucket; others as for `attend_hashed`.

    qkv    (b·h·t ...)  queries, keys and values
    large  (b·h·t)      mask of queries whose scores may exceed `MAX_LOG_WEIGHT`; None: no query has such
    """

    qkv: Sequence[Tensor]
    large: Tensor | None
    ranks: BucketRanks
    table: Table | None
    key_window: KeyWindow
    size: int
    tile: int
    dropout: float

    def attend(self, r: int, n_tiles: int) -> Sums:
        """Attention (b·h·t ...) to the keys first seen in round r, which has `n_tiles` tiles."""
        tiles, t = self.tiles(r, n_tiles), self.ranks.buckets.shape[-1]
        order, tile, size = tiles.order, self.tile, self.size
        limit = None if self.table is None and (self.key_window.limit or 0) >= t - 1 else self.key_window.limit
        marks = [self.ranks.global_ranks[:, :, i].flatten().index_select(0, order) for i in range(r)]
        if limit is not None:
            marks.append(order % t)
        new = [*(arrange(part, order, tiles.place) for part in self.qkv), *marks]
        exists = tiles.before >= 0
        if self.table is None:
            past = [windows(part, None, None, size=size, tile=tile) for part in new[1:]]
        else:
            known, *old = self.earlier(self.table, tiles.sizes, r, limit)
            first = len(order) + ((tiles.sizes > 0).cumsum(0)[tiles.bucket] * size).unsqueeze(1)
            places = torch.arange(0, n_tiles * tile, tile, device=order.device).unsqueeze(1)
            places = places + torch.arange(size, device=order.device)
            index = torch.where(exists, places, first + tiles.before)
            exists |= torch.cat((exists.new_zeros(len(order)), known.flatten()))[index]
            past = [
                windows(part, entries.flatten(0, 1).to(part.dtype), index, size=size, tile=tile)
                for part, entries in zip(new[1:], old, strict=True)
            ]
        own = [rearrange(part[size:], "(m c) ... -> m c ...", c=tile) for part in new]
        group = max(1, MAX_SCORES // (tile * size))
        groups = zip(*(torch.split(part, group) for part in (*own, *past, exists)), strict=True)
        of_groups: Iterable[Tensor | None] = itertools.repeat(None)
        if self.large is not None:
            of_groups = torch.split(rearrange(self.large[order[size:]], "(m c) -> m c 1", c=tile), group)
        sums = [
            mix(parts[: len(own)], parts[len(own) : -1], parts[-1], rows, limit=limit, dropout=self.dropout)
            for parts, rows in zip(groups, of_groups, strict=False)
        ]
        parts = [torch.cat(part) for part in zip(*sums, strict=True) if part[0] is not None]
        return Sums(*(part.flatten(0, 1).index_select(0, tiles.place - size) for part in parts))

    def tiles(self, r: int, n_tiles: int) -> _Tiles:
        """The tiles of round r."""
        ranks, tile = self.ranks, self.tile
        b, h, _, _ = ranks.buckets.shape
        n, device = ranks.sizes.shape[-1], ranks.sizes.device
        sizes = ranks.sizes[:, :, r].flatten()
        counts = -(-sizes // tile)
        begins = counts.cumsum(0) - counts
        cells = flat_index(ranks.buckets, b, h) * n + ranks.buckets[:, :, r]
        place = (begins[cells] * tile + ranks.ranks[:, :, r]).flatten() + self.size
        order = place.new_zeros(self.size + n_tiles * tile)
        order.index_copy_(0, place, torch.arange(len(place), device=device))
        bucket = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=n_tiles)
        tile_ids, slots = torch.arange(n_tiles, device=device), torch.arange(self.size, device=device)
        before = ((tile_ids - begins[bucket]) * tile - self.size).unsqueeze(1) + slots
        return _Tiles(sizes, place, order, bucket, before)

    def earlier(self, table: Table, sizes: Tensor, r: int, limit: int | None) -> list[Tensor]:
        """Tokens (m c ...) in the table, of the buckets of round r that have new ones.

        A mask of those that exist, keys, values, global ranks in earlier rounds, and positions if there is a limit.
        """
        n_rounds, n = table.counts.shape[2:]
        nonempty = sizes.nonzero().squeeze(1)
        bucket_ids = (nonempty // n * n_rounds + r) * n + nonempty % n
        keys, values, positions, global_ranks, known = latest(table, bucket_ids, table.counts.flatten()[bucket_ids])
        found = [known & (positions >= self.key_window.oldest), keys, values, *global_ranks[..., :r].unbind(-1)]
        if limit is not None:
            found.append((positions - self.key_window.start).clamp(min=-limit - 1))
        return found


class Sums(NamedTuple):
    """Sums of one round over the visible keys of each query; 0 if there are none.

    y      (... w)  values times weights
    total  (... 1)  weights
    shift  (... 1)  number subtracted from scores before exponentiation; None if it is 0 for all queries
    """

    y: Tensor
    total: Tensor
    shift: Tensor | None = None


def add_rounds(rounds: list[Sums]) -> tuple[Tensor, Tensor]:
    """Sums of all rounds: values times weights, and weights."""
    if rounds[0].shift is not None:
        most = torch.stack([sums.shift for sums in rounds if sums.shift is not None]).amax(0)
        factors = [(sums.shift - most).exp() for sums in rounds if sums.shift is not None]
        rounds = [Sums(s.y * factor, s.total * factor) for s, factor in zip(rounds, factors, strict=True)]
    y, total, _ = rounds[0]
    for sums in rounds[1:]:
        y, total = y + sums.y, total + sums.total
    return y, total


def arrange(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Rows (n ...) of `x` in the order `order` (p), where row i is at `place[i]` and other places have no gradient."""
    y: Tensor = _Arrange.apply(x, order, place)  # type: ignore[no-untyped-call]
    return y


class _Arrange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


def windows(new: Tensor, old: Tensor | None, index: Tensor | None, *, size: int, tile: int) -> Tensor:
    """Values (m n ...) at the n places before each tile. The gradient of `unfold` is slow.

    Args:
        new: Values (p ...) at all places.
        old: Values of earlier tokens, without gradient.
        index: Indices (m n) into `new` and `old` together; None: the places immediately before the tile.
        size: Number n of places before a tile, a multiple of `tile`.
        tile: Number of places of a tile.
    """
    y: Tensor = _Windows.apply(new, old, index, size, tile)  # type: ignore[no-untyped-call]
    return y


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, old: Tensor | None, index: Tensor | None, size: int, tile: int) -> Tensor:
        ctx.size, ctx.tile, ctx.index, ctx.n_places = size, tile, index, len(new)
        if old is None or index is None:
            return new[: len(new) - tile].unfold(0, size, tile).movedim(-1, 1)
        return torch.cat((new, old)).index_select(0, index.flatten()).view(*index.shape, *new.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.index is not None:
            grad = grad * (ctx.index < ctx.n_places).unsqueeze(-1)
        tiles = grad.new_zeros(ctx.n_places // ctx.tile, ctx.tile, *grad.shape[2:])
        for i, part in enumerate(torch.split(grad, ctx.tile, dim=1)):
            tiles[i : i + len(grad)] += part
        return tiles.flatten(0, 1), None, None, None, None


def mix(
    own: Sequence[Tensor],
    before: Sequence[Tensor],
    exists: Tensor,
    large: Tensor | None,
    *,
    limit: int | None,
    dropout: float,
) -> Sums:
    """Attention (m c ...) of m tiles to their own keys and to the n keys before them.

    Query i of a tile sees the keys before i in the tile, and the keys from i on before the tile. These are n keys
    together, so scores with the first keys before the tile are replaced by scores with its own keys.

    Args:
        own: Queries (m c e), keys and values of the tiles, their global ranks in earlier rounds (m c), and their
            positions (m c) if there is a limit.
        before: Keys (m n e) and values before the tiles, their global ranks, and their positions.
        exists: Mask (m n) of the keys before the tiles that exist.
        large: Mask (m c 1) of the queries whose maximum score is subtracted.
        limit: Largest distance of a visible key; None: any.
        dropout: Dropout rate of the weights.
    """
    q, k, v, *marks = own
    k_before, v_before, *marks_before = before
    tile, size = k.shape[1], k_before.shape[1]
    # Factors of 0 and 1 instead of Boolean masks, whose kernels are not vectorized on the CPU.
    near = torch.ones(tile, tile, dtype=q.dtype, device=q.device).tril(-1)
    far = 1 - near

    def join(window: Tensor, beside: Tensor) -> Tensor:
        window[..., :tile] = window[..., :tile] * far.to(window.dtype) + beside * near.to(window.dtype)
        return window

    distances = [
        join(mine.unsqueeze(2) - theirs.unsqueeze(1), mine.unsqueeze(2) - mine.unsqueeze(1))
        for mine, theirs in zip(marks, marks_before, strict=True)
    ]
    visible = join(exists.to(q.dtype).unsqueeze(1).repeat(1, tile, 1), torch.ones_like(near))
    if limit is not None:
        visible *= (limit + 1 - distances.pop()).clamp_(0, 1)
    if distances:
        visible *= reduce(torch.minimum, [distance.abs_() for distance in distances]).sub_(size).clamp_(0, 1)
    scores = join(q @ k_before.mT, q @ k.mT)
    shift = None
    if large is not None:
        top = (scores.detach() + visible.log()).amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        shift = torch.where(large, top, 0.0)
        scores = (scores - shift).clamp(max=0.0).where(large, scores)
    weights = scores.exp_() * visible
    total = weights.sum(-1, keepdim=True)
    if dropout:
        weights = F.dropout(weights, dropout)
    beside = weights[..., :tile] * near
    weights[..., :tile] *= far
    return Sums(torch.baddbmm(weights @ v_before, beside, v), total, shift)


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
