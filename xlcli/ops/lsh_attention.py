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

from collections.abc import Sequence
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
    n_new, n_buckets = q.shape[2], ranks.sizes.shape[-1]
    if n_new <= GATHERED_TOKENS * n_buckets:
        return attend_gathered(q, k, v, ranks, table, key_window, bucket_size=bucket_size, dropout=dropout)
    n_heads = q.shape[1]
    floats_per_head = 2 * k[:, :1].numel() + v[:, :1].numel()
    if n_heads == 1 or n_heads * floats_per_head <= MAX_FLOATS:
        return _attend_tiles(q, k, v, ranks, table, key_window, bucket_size, dropout)
    heads_at_once = max(1, MAX_FLOATS // floats_per_head)
    outputs = []
    for first in range(0, n_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        head_ranks = BucketRanks(*(part[:, heads] for part in ranks))
        head_table = None if table is None else Table(*(part[:, heads] for part in table))
        y = _attend_tiles(
            q[:, heads], k[:, heads], v[:, heads], head_ranks, head_table, key_window, bucket_size, dropout
        )
        outputs.append(y.transpose(1, 2))
    # In memory the heads of a token are adjacent, as its projections are.
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    bucket_size: int,
    dropout: float,
) -> Tensor:
    tile = TILE
    # With gradients, keys and values before a tile are stored if some of them are in the table.
    stores_keys = table is not None and torch.is_grad_enabled()
    if bucket_size % TILE or stores_keys:
        tile = bucket_size
    is_large = (q.detach().norm(dim=-1) > MAX_LOG_WEIGHT).flatten()
    call = _Call(
        qkv=(q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)),
        large=is_large if is_large.any() else None,
        ranks=ranks,
        codes=_codes(ranks, bucket_size),
        table=table,
        key_window=key_window,
        size=bucket_size,
        tile=tile,
        dropout=dropout,
    )
    tiles_per_round = (-(-ranks.sizes // tile)).sum((0, 1, 3)).tolist()
    rounds: list[Sums] = []
    for r, n_tiles in enumerate(tiles_per_round):
        if torch.is_grad_enabled() and n_tiles * tile * bucket_size >= CHECKPOINT_SCORES:
            rounds.append(Sums(*checkpoint(call.attend, r, n_tiles, use_reentrant=False)))
        else:
            rounds.append(call.attend(r, n_tiles))
    y, total = add_rounds(rounds)
    # A query without visible keys attends to itself.
    alone = (total == 0).to(total.dtype)
    return torch.addcmul(y / (total + alone), v.flatten(0, 2), alone).view_as(v)


class _Codes(NamedTuple):
    """Global ranks as small floats, which are fast to subtract.

    Two codes differ by at most `size` exactly where the global ranks do: tokens of a bucket have successive codes, all
    tokens more than `size` before the call share one, and codes of different buckets differ by more than `size`.

    first   (b h r n)  code of the first token of the call in each bucket
    new     (b h r t)  codes of the tokens of the call
    """

    first: Tensor
    new: Tensor


def _codes(ranks: BucketRanks, size: int) -> _Codes:
    steps = ranks.sizes + 2 * size + 2
    first = steps.cumsum(-1) - steps + size + 1
    largest = ranks.buckets.shape[-1] + steps.shape[-1] * (2 * size + 2)
    exact = torch.float32 if largest < 2**24 else torch.float64
    return _Codes(first.to(exact), (first.gather(-1, ranks.buckets) + ranks.ranks).to(exact))


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
    codes: _Codes
    table: Table | None
    key_window: KeyWindow
    size: int
    tile: int
    dropout: float

    def attend(self, r: int, n_tiles: int) -> Sums:
        """Attention (b·h·t ...) to the keys first seen in round r, which has `n_tiles` tiles."""
        tiles, limit = self.tiles(r, n_tiles), self._limit()
        q, k, v = (arrange(part, tiles.order, tiles.place) for part in self.qkv)
        marks = self._marks(tiles.order, r, limit)
        before, exists = self._before(tiles, [k, v, *marks], r, limit)
        inside = [rearrange(part[self.size :], "(m c) ... -> m c ...", c=self.tile) for part in (q, k, v, *marks)]
        large = None
        if self.large is not None:
            large = rearrange(self.large[tiles.order[self.size :]], "(m c) -> m c 1", c=self.tile)
        sums = []
        tiles_at_once = max(1, MAX_SCORES // (self.tile * self.size))
        for first in range(0, n_tiles, tiles_at_once):
            some = slice(first, first + tiles_at_once)
            sums.append(
                mix(
                    [part[some] for part in inside],
                    [part[some] for part in before],
                    exists[some],
                    None if large is None else large[some],
                    limit=limit,
                    dropout=self.dropout,
                )
            )
        return _join(sums, tiles.place - self.size)

    def _limit(self) -> int | None:
        """Largest distance of a visible key; None if all keys that a query can find are as near."""
        n_new, limit = self.ranks.buckets.shape[-1], self.key_window.limit
        sees_whole_call = limit is not None and limit >= n_new - 1
        if self.table is None and sees_whole_call:
            return None
        return limit

    def _marks(self, order: Tensor, r: int, limit: int | None) -> list[Tensor]:
        """Codes (p) in the rounds before r of the tokens at each place, and their positions if there is a limit."""
        marks = [self.codes.new[:, :, i].flatten().index_select(0, order) for i in range(r)]
        if limit is not None:
            n_new = self.ranks.buckets.shape[-1]
            exact = torch.float32 if n_new + limit < 2**24 else torch.float64
            marks.append((order % n_new).to(exact))
        return marks

    def _before(
        self, tiles: _Tiles, placed: Sequence[Tensor], r: int, limit: int | None
    ) -> tuple[list[Tensor], Tensor]:
        """Keys, values and marks (m n ...) at the n places before each tile, and the mask (m n) of those that exist.

        `placed` are those (p ...) of the call in the order of the places.
        """
        exists = tiles.before >= 0
        if self.table is None:
            return [windows(part, None, None, size=self.size, tile=self.tile) for part in placed], exists
        in_table, *of_table = self._in_table(self.table, tiles.sizes, r, limit)
        # Rows of the call come first, then those of the table, whose buckets are only those with new tokens.
        n_places, n_tiles = len(tiles.order), len(tiles.bucket)
        nonempty_before = (tiles.sizes > 0).cumsum(0)[tiles.bucket]
        in_old = (n_places + nonempty_before * self.size).unsqueeze(1) + tiles.before
        first_places = torch.arange(0, n_tiles * self.tile, self.tile, device=tiles.order.device).unsqueeze(1)
        in_new = first_places + torch.arange(self.size, device=tiles.order.device)
        index = torch.where(exists, in_new, in_old)
        exists |= torch.cat((exists.new_zeros(n_places), in_table.flatten()))[index]
        before = []
        for new, old in zip(placed, of_table, strict=True):
            old = old.flatten(0, 1).to(new.dtype)
            before.append(windows(new, old, index, size=self.size, tile=self.tile))
        return before, exists

    def tiles(self, r: int, n_tiles: int) -> _Tiles:
        ranks, tile = self.ranks, self.tile
        b, h, _, _ = ranks.buckets.shape
        n, device = ranks.sizes.shape[-1], ranks.sizes.device
        # Tiles of each bucket, rounded up, and the first one of each.
        sizes = ranks.sizes[:, :, r].flatten()
        counts = -(-sizes // tile)
        begins = counts.cumsum(0) - counts
        # Places begin with as many as are before a tile.
        cells = flat_index(ranks.buckets, b, h) * n + ranks.buckets[:, :, r]
        place = (begins[cells] * tile + ranks.ranks[:, :, r]).flatten() + self.size
        order = place.new_zeros(self.size + n_tiles * tile)
        order.index_copy_(0, place, torch.arange(len(place), device=device))
        bucket = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=n_tiles)
        tile_ids, slots = torch.arange(n_tiles, device=device), torch.arange(self.size, device=device)
        before = ((tile_ids - begins[bucket]) * tile - self.size).unsqueeze(1) + slots
        return _Tiles(sizes, place, order, bucket, before)

    def _in_table(self, table: Table, sizes: Tensor, r: int, limit: int | None) -> list[Tensor]:
        """Tokens (m c ...) in the table, of the buckets of round r that have new ones.

        A mask of those that exist, keys, values, codes in earlier rounds, and positions if there is a limit.
        """
        n_rounds, n_buckets = table.counts.shape[2:]
        nonempty = sizes.nonzero().squeeze(1)
        head, bucket = nonempty // n_buckets, nonempty % n_buckets
        bucket_ids = (head * n_rounds + r) * n_buckets + bucket
        keys, values, positions, global_ranks, known = latest(table, bucket_ids, table.counts.flatten()[bucket_ids])
        codes = _codes_of(global_ranks[..., :r], self.codes, table, head).unbind(-1)
        found = [known & (positions >= self.key_window.oldest), keys, values, *codes]
        if limit is not None:
            found.append((positions - self.key_window.start).clamp(min=-limit - 1))
        return found


def _codes_of(global_ranks: Tensor, codes: _Codes, table: Table, heads: Tensor) -> Tensor:
    """Codes (m c r) of earlier tokens with these global ranks (m c r); `heads` (m) counts sequences and heads."""
    rounds, n = global_ranks.shape[-1], table.counts.shape[-1]
    buckets, counts = global_ranks // RANKS_PER_BUCKET, global_ranks % RANKS_PER_BUCKET
    n_rounds = table.counts.shape[2]
    cells = (rearrange(heads, "m -> m 1 1") * n_rounds + flat_index(heads, rounds).squeeze(-1)) * n + buckets
    since = counts - table.counts.flatten()[cells]
    first = codes.first.flatten()[cells]
    return first + since.clamp(min=-table.positions.shape[-1] - 1).to(first.dtype)


class Sums(NamedTuple):
    """Sums of one round over the visible keys of each query; 0 if there are none.

    y      (... w)  values times weights
    total  (... 1)  weights
    shift  (... 1)  number subtracted from scores before exponentiation; None if it is 0 for all queries
    """

    y: Tensor
    total: Tensor
    shift: Tensor | None = None


def _join(sums: Sequence[Sums], order: Tensor) -> Sums:
    """Sums (m c ...) of successive tiles as those of the tokens at the places `order`."""

    def ordered(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts)).flatten(0, 1).index_select(0, order)

    shifts = [each.shift for each in sums if each.shift is not None]
    shift = ordered(shifts) if shifts else None
    return Sums(ordered([each.y for each in sums]), ordered([each.total for each in sums]), shift)


def add_rounds(rounds: list[Sums]) -> tuple[Tensor, Tensor]:
    """Sums of all rounds: values times weights, and weights."""
    shifts = [sums.shift for sums in rounds if sums.shift is not None]
    if shifts:  # either all rounds have one or none
        largest = torch.stack(shifts).amax(0)
        factors = [(shift - largest).exp() for shift in shifts]
        rounds = [Sums(sums.y * factor, sums.total * factor) for sums, factor in zip(rounds, factors, strict=True)]
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


class _Window(NamedTuple):
    """The keys of a query: the earlier ones of its tile where `from_tile` (c c) is 1, else keys before the tile.

    Factors of 0 and 1 instead of Boolean masks, whose kernels are not vectorized on the CPU.
    """

    from_tile: Tensor

    def join(self, of_window: Tensor, of_tile: Tensor) -> Tensor:
        """Values (m c n) of the keys before a tile, the first ones replaced in place by those (m c c) of the tile."""
        tile = len(self.from_tile)
        kept = of_window[..., :tile] * (1 - self.from_tile).to(of_window.dtype)
        of_window[..., :tile] = kept + of_tile * self.from_tile.to(of_window.dtype)
        return of_window


def mix(
    inside: Sequence[Tensor],
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
        inside: Queries (m c e), keys and values of the tiles, their codes in earlier rounds (m c), and their positions
            (m c) if there is a limit.
        before: Keys (m n e) and values before the tiles, their codes, and their positions.
        exists: Mask (m n) of the keys before the tiles that exist.
        large: Mask (m c 1) of the queries whose maximum score is subtracted.
        limit: Largest distance of a visible key; None: any.
        dropout: Dropout rate of the weights.
    """
    q, k, v, *marks = inside
    k_before, v_before, *marks_before = before
    tile, size = k.shape[1], k_before.shape[1]
    window = _Window(torch.ones(tile, tile, dtype=q.dtype, device=q.device).tril(-1))
    distances = []
    for mark, mark_before in zip(marks, marks_before, strict=True):
        to_window = mark.unsqueeze(2) - mark_before.unsqueeze(1)
        to_tile = mark.unsqueeze(2) - mark.unsqueeze(1)
        distances.append(window.join(to_window, to_tile))
    visible = window.join(exists.to(q.dtype).unsqueeze(1).repeat(1, tile, 1), torch.ones_like(window.from_tile))
    if limit is not None:
        positions_back = distances.pop()
        visible *= (limit + 1 - positions_back).clamp_(0, 1)
    if distances:
        # A key counts in the first round in which it is seen, where codes differ by at most `size`.
        nearest = reduce(torch.minimum, [distance.abs_() for distance in distances])
        visible *= nearest.sub_(size).clamp_(0, 1)
    scores = window.join(q @ k_before.mT, q @ k.mT)
    shift = None
    if large is not None:
        lowest = torch.finfo(scores.dtype).min
        largest = (scores.detach() + visible.log()).amax(-1, keepdim=True).clamp(min=lowest)
        shift = torch.where(large, largest, 0.0)
        scores = (scores - shift).clamp(max=0.0).where(large, scores)
    weights = scores.exp_() * visible
    total = weights.sum(-1, keepdim=True)
    if dropout:
        weights = F.dropout(weights, dropout)
    of_tile = weights[..., :tile] * window.from_tile
    weights[..., :tile] *= 1 - window.from_tile
    return Sums(torch.baddbmm(weights @ v_before, of_tile, v), total, shift)


def attend_hashed_one(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, key_window: KeyWindow) -> Tensor:
    """LSH attention (b h 1 w) of one new token in `buckets` (b h r 1), without gradient.

    The token, with key (b h 1 e) and value (b h 1 w), is then written into the table, in place.
    """
    b, h, r, n, size, _ = table.keys.shape
    bucket_ids = (flat_index(buckets, b, h, r) * n + buckets).squeeze(-1)
    counts = table.counts.flatten()[bucket_ids]
    global_rank = buckets.squeeze(-1) * RANKS_PER_BUCKET + counts
    keys, values, positions, global_ranks, exists = latest(table, bucket_ids, counts)
    oldest = key_window.oldest
    if key_window.limit is not None:
        oldest = max(oldest, key_window.start - key_window.limit)
    seen = (exists & (positions >= oldest) & ~seen_before(global_rank, global_ranks, size)).flatten(2)
    scores = (keys.flatten(2, 3) @ q.mT).squeeze(-1).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ values.flatten(2, 3)
    keys, values = (repeat(part, "b h 1 e -> (b h r) e", r=r) for part in (k, v))
    global_ranks = repeat(global_rank, "b h s -> (b h r) s", r=r)
    write(table, bucket_ids.flatten(), counts.flatten(), keys, values, key_window.start, global_ranks)
    table.counts.view(-1)[bucket_ids.flatten()] += 1
    return y.where(seen.any(-1)[..., None, None], v)
