"""LSH attention: a query attends to keys of its own hash buckets only (Kitaev et al. 2020, Reformer).

In each hash round a query sees the latest `bucket_size` earlier keys of its bucket. It attends to the union over all
rounds, each key once, and to itself only if that union is empty. The visible keys therefore depend neither on later
tokens, as they do in implementations that sort the whole sequence into chunks, nor on how the text is cut into calls.

In each round a token has a global rank: its bucket times `RANKS_PER_BUCKET`, plus the number of earlier tokens in that
bucket. Query i sees key j in a round if rank_i - rank_j is in 1..bucket_size. A key counts in the first such round.

Many tokens of a bucket are computed in tiles: queries with the same number of keys before them.

Further axes: n bucket or key before a tile, c slot of a bucket or token of a tile, m tile or bucket of a list, p place
in the order of the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.ops.lsh_gather import KeyWindow, Lookup, attend_gathered
from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, flat_index, latest, seen_before, write

CHECKPOINT_SCORES = 2**24  # number of scores from which a round is recomputed in the backward pass instead of stored
GATHERED_TOKENS = 2  # largest number of tokens per bucket with which every query gathers its keys (measured on a CPU)
MAX_FLOATS = 2**22
"""Maximum size of the queries, keys and values rearranged at once, unless one head is larger. glibc returns larger
blocks to the system, which clears every page again."""

MAX_LOG_WEIGHT = 60.0  # largest score exponentiated as it is; larger ones are reduced by the maximum of their row
MAX_SCORES = 2**18  # number of scores computed at once
TILE = 16  # maximum number of queries of a bucket that are computed together


def attend_hashed(q: Tensor, k: Tensor, v: Tensor, lookup: Lookup, dropout: float = 0.0) -> Tensor:
    """LSH attention (b h t w) of new tokens over the table and themselves, at a cost linear in their number.

    Queries are (b h t e), keys (b h t e) are not longer than 1, values are (b h t w), and `dropout` is the rate of the
    weights. In each round the tokens of a bucket are cut into tiles in their order, and each tile attends to itself and
    to the `bucket_size` tokens before it, some of which may be in the table. Later tokens do not change the tile of a
    token or its place in it. If the buckets are many for the length of the call, every query gathers its keys instead.
    """
    n_heads, n_new = q.shape[1:3]
    if n_new <= GATHERED_TOKENS * lookup.ranks.sizes.shape[-1]:
        return attend_gathered(q, k, v, lookup, dropout)
    floats_per_head = 2 * k[:, :1].numel() + v[:, :1].numel()
    if n_heads == 1 or n_heads * floats_per_head <= MAX_FLOATS:
        return _attend_tiles(q, k, v, lookup, dropout)
    heads_at_once = max(1, MAX_FLOATS // floats_per_head)
    outputs = []
    for first in range(0, n_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        y = _attend_tiles(q[:, heads], k[:, heads], v[:, heads], lookup.of_heads(heads), dropout)
        outputs.append(y.transpose(1, 2))
    # In memory the heads of a token are adjacent, as its projections are.
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, lookup: Lookup, dropout: float) -> Tensor:
    """Computes `attend_hashed` in tiles, one hash round after the other, and adds up what the rounds have found."""
    bucket_size, n_new = lookup.bucket_size, q.shape[2]
    # Gradients need the keys before each tile. If some come from the table, larger tiles have fewer of these copies.
    copies_keys = lookup.table is not None and torch.is_grad_enabled()
    tile = bucket_size if copies_keys or bucket_size % TILE else TILE
    limit = lookup.key_window.limit
    if lookup.table is None and limit is not None and limit >= n_new - 1:
        limit = None  # it reaches to the first token of the text, so no key is too far back
    is_large = (q.detach().norm(dim=-1) > MAX_LOG_WEIGHT).flatten()  # keys are not longer than 1
    call = _Call(
        qkv=(q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)),
        large=is_large if is_large.any() else None,
        codes=_codes(lookup.ranks, bucket_size),
        lookup=lookup,
        limit=limit,
        tile=tile,
        dropout=dropout,
    )
    tiles_per_bucket = (lookup.ranks.sizes + tile - 1) // tile  # rounded up: the last tile may have free places
    tiles_per_round = tiles_per_bucket.sum((0, 1, 3)).tolist()
    rounds: list[Sums] = []
    for r, n_tiles in enumerate(tiles_per_round):
        n_scores = n_tiles * tile * bucket_size
        if torch.is_grad_enabled() and n_scores >= CHECKPOINT_SCORES:
            # The backward pass computes such a round again, instead of keeping its scores.
            rounds.append(Sums(*checkpoint(call.attend, r, n_tiles, use_reentrant=False)))
        else:
            rounds.append(call.attend(r, n_tiles))
    y, total = add_rounds(rounds)  # (b·h·t w), (b·h·t 1)
    # A query without visible keys attends to itself: 0 / (0 + 1) + 1 · v. For all others `alone` is 0.
    alone = (total == 0).to(total.dtype)
    return torch.addcmul(y / (total + alone), v.flatten(0, 2), alone).view_as(v)


class _Codes(NamedTuple):
    """Global ranks as small floats, which are fast to subtract.

    Two codes differ by at most `bucket_size` exactly where the global ranks do: tokens of a bucket have successive
    codes, all tokens more than `bucket_size` before the call share one, and those of two buckets differ by more.
    Example with bucket size 1 and new tokens in buckets 0, 0, 1: their codes are 2, 3 and 8. The last earlier token of
    each bucket has 1 and 7, all before it 0 and 6.
    """

    first: Tensor  # (b h r n) code of the first token of the call in each bucket
    new: Tensor  # (b h r t) codes of the tokens of the call


def _codes(ranks: BucketRanks, bucket_size: int) -> _Codes:
    n_earlier_codes = bucket_size + 1
    codes_per_bucket = ranks.sizes + 2 * n_earlier_codes
    first = codes_per_bucket.cumsum(-1) - codes_per_bucket + n_earlier_codes
    n_new, n_buckets = ranks.buckets.shape[-1], ranks.sizes.shape[-1]
    exact = exact_floats(n_new + n_buckets * 2 * n_earlier_codes)
    return _Codes(first.to(exact), (first.gather(-1, ranks.buckets) + ranks.ranks).to(exact))


def exact_floats(largest: int) -> torch.dtype:
    """Type of floating-point numbers that hold all integers up to `largest`."""
    return torch.float32 if largest < 2**24 else torch.float64


class _Tiles(NamedTuple):
    """Tiles of one round. Places are those of the tiles in their order, behind `bucket_size` free ones.

    Example with tiles of 2 tokens, bucket size 4 and 3 new tokens in a bucket: of its two tiles the first has tokens 0
    and 1, and before it are -4 to -1, which only the table may have. The second has token 2 and a free place, and
    before it are -2 to 1, of which 0 and 1 are in the call.
    """

    bucket_sizes: Tensor  # (b·h·n) number of tokens of each bucket
    place_of_token: Tensor  # (b·h·t)
    token_at_place: Tensor  # (p) any token, which is never visible, at a free place
    bucket: Tensor  # (m) bucket of each tile
    ranks_before: Tensor  # (m n) ranks of the keys before each tile, counted from the first new token of the bucket


class _Keys(NamedTuple):
    """Keys at places (...), and what decides whether a query sees them."""

    k: Tensor  # (... e)
    v: Tensor  # (... w)
    codes: Sequence[Tensor]  # (...) codes in each earlier round
    positions: Tensor | None  # (...) counted from the first token of the call; None if all keys are near enough

    def map(self, change: Callable[[Tensor], Tensor]) -> _Keys:
        positions = None if self.positions is None else change(self.positions)
        return _Keys(change(self.k), change(self.v), [change(codes) for codes in self.codes], positions)

    def of_tiles(self, some: slice) -> _Keys:
        """The keys of some tiles."""
        return self.map(lambda x: x[some])

    def merge(self, join: Callable[[Tensor, Tensor], Tensor], other: _Keys) -> _Keys:
        """Results of a function for each tensor of both."""
        k, v = join(self.k, other.k), join(self.v, other.v)
        codes = [join(*both) for both in zip(self.codes, other.codes, strict=True)]
        positions = None
        if self.positions is not None and other.positions is not None:
            positions = join(self.positions, other.positions)
        return _Keys(k, v, codes, positions)


class _Call(NamedTuple):
    """Tokens of a call, in tiles of `tile` tokens of a bucket."""

    qkv: Sequence[Tensor]  # (b·h·t ...) queries, keys and values
    large: Tensor | None  # (b·h·t) mask of queries whose scores may exceed `MAX_LOG_WEIGHT`; None: no query has such
    codes: _Codes
    lookup: Lookup
    limit: int | None  # largest distance of a visible key; None if no query can find one that is too far back
    tile: int
    dropout: float

    def attend(self, r: int, n_tiles: int) -> Sums:
        """Computes what queries (b·h·t) get from the keys that round r, of `n_tiles` tiles, is the first to find."""
        tile, bucket_size = self.tile, self.lookup.bucket_size
        tiles = self.tiles(r, n_tiles)
        # Tokens are put in the order of the tiles (p): the tokens of a bucket are then adjacent.
        order = tiles.token_at_place
        q, k, v = (_Arrange.apply(x, order, tiles.place_of_token) for x in self.qkv)  # type: ignore[no-untyped-call]
        codes = [self.codes.new[:, :, earlier].flatten().index_select(0, order) for earlier in range(r)]
        positions = None
        if self.limit is not None:
            n_new = self.lookup.ranks.buckets.shape[-1]
            positions = (order % n_new).to(exact_floats(n_new + self.limit))
        keys = _Keys(k, v, codes, positions)
        before, exists = self._before(tiles, keys, r)

        def in_tiles(x: Tensor) -> Tensor:
            """Cuts values at places (p ...) into tiles (m c ...), without the free places before the first one."""
            return rearrange(x[bucket_size:], "(m c) ... -> m c ...", c=tile)

        queries, inside = in_tiles(q), keys.map(in_tiles)
        large = None if self.large is None else in_tiles(self.large[order]).unsqueeze(-1)
        sums = []
        tiles_at_once = max(1, MAX_SCORES // (tile * bucket_size))
        for first in range(0, n_tiles, tiles_at_once):
            some = slice(first, first + tiles_at_once)
            some_large = None if large is None else large[some]
            keys_of_some = inside.of_tiles(some), before.of_tiles(some), exists[some]
            sums.append(tile_sums(queries[some], *keys_of_some, some_large, limit=self.limit, dropout=self.dropout))
        return _join(sums, tiles.place_of_token - bucket_size)

    def _before(self, tiles: _Tiles, keys: _Keys, r: int) -> tuple[_Keys, Tensor]:
        """Collects the n keys before each tile (m n ...), and returns them with the mask (m n) of those that exist.

        A tile also attends to the `bucket_size` keys of its bucket before it. Those in this call are among `keys`, the
        keys at all places (p ...) in round r. Those of earlier calls are in the table, if there is one.
        """
        size, tile, table = self.lookup.bucket_size, self.tile, self.lookup.table
        is_in_call = tiles.ranks_before >= 0
        if table is None:
            before = keys.map(lambda x: _Windows.apply(x, None, None, size, tile))  # type: ignore[no-untyped-call]
            return before, is_in_call
        stored, is_visible = self._stored(table, tiles.bucket_sizes, r)
        # Keys are gathered from rows: first the places of the call, then `size` stored keys of each bucket with tokens.
        n_places, n_tiles = len(tiles.token_at_place), len(tiles.bucket)
        device = tiles.bucket.device
        first_places = torch.arange(0, n_tiles * tile, tile, device=device).unsqueeze(1)
        rows_in_call = first_places + torch.arange(size, device=device)
        n_buckets_so_far = (tiles.bucket_sizes > 0).cumsum(0)[tiles.bucket]
        ends_of_stored = (n_places + n_buckets_so_far * size).unsqueeze(1)
        rows_of_stored = ends_of_stored + tiles.ranks_before  # the latest stored key of a bucket has rank -1
        rows = torch.where(is_in_call, rows_in_call, rows_of_stored)

        def gather(new: Tensor, old: Tensor) -> Tensor:
            stored_rows = old.flatten(0, 1).to(new.dtype)
            return _Windows.apply(new, stored_rows, rows, size, tile)  # type: ignore[no-any-return, no-untyped-call]

        is_visible_row = torch.cat((is_visible.new_zeros(n_places), is_visible.flatten()))
        return keys.merge(gather, stored), is_in_call | is_visible_row[rows]

    def tiles(self, r: int, n_tiles: int) -> _Tiles:
        """Cuts the tokens of each bucket of round r into tiles. To count `n_tiles` here would wait for a device."""
        ranks, tile, bucket_size = self.lookup.ranks, self.tile, self.lookup.bucket_size
        b, h, _, _ = ranks.buckets.shape
        n_buckets, device = ranks.sizes.shape[-1], ranks.sizes.device
        # The places of a bucket follow those of the bucket before it, and begin with a tile of its own.
        bucket_sizes = ranks.sizes[:, :, r].flatten()  # (b·h·n)
        tiles_of_bucket = (bucket_sizes + tile - 1) // tile  # rounded up
        first_tile = tiles_of_bucket.cumsum(0) - tiles_of_bucket  # of each bucket
        bucket_of_token = flat_index(ranks.buckets, b, h) * n_buckets + ranks.buckets[:, :, r]  # (b h t)
        place_of_token = (first_tile[bucket_of_token] * tile + ranks.ranks[:, :, r]).flatten() + bucket_size
        token_at_place = place_of_token.new_zeros(bucket_size + n_tiles * tile)
        token_at_place.index_copy_(0, place_of_token, torch.arange(len(place_of_token), device=device))
        # Each tile has a bucket (m), and its first token has a rank in it, as have the tokens before the tile.
        bucket_ids = torch.arange(len(bucket_sizes), device=device)
        bucket = torch.repeat_interleave(bucket_ids, tiles_of_bucket, output_size=n_tiles)
        first_rank = (torch.arange(n_tiles, device=device) - first_tile[bucket]) * tile
        ranks_before = (first_rank - bucket_size).unsqueeze(1) + torch.arange(bucket_size, device=device)
        return _Tiles(bucket_sizes, place_of_token, token_at_place, bucket, ranks_before)

    def _stored(self, table: Table, bucket_sizes: Tensor, r: int) -> tuple[_Keys, Tensor]:
        """Reads the keys (m c ...) of earlier calls in those buckets of round r that get new tokens.

        `bucket_sizes` (b·h·n) are the numbers of new tokens. The second value is the mask (m c) of the visible keys.
        """
        key_window = self.lookup.key_window
        n_rounds, n_buckets = table.counts.shape[2:]
        nonempty = bucket_sizes.nonzero().squeeze(1)
        head, bucket = nonempty // n_buckets, nonempty % n_buckets
        bucket_ids = (head * n_rounds + r) * n_buckets + bucket
        entries = latest(table, bucket_ids, table.counts.flatten()[bucket_ids])
        codes = _codes_of(entries.global_ranks[..., :r], self.codes, table, head).unbind(-1)
        since_start = None
        if self.limit is not None:  # all that are too far back are as far back, so that the numbers stay small
            since_start = (entries.positions - key_window.start).clamp(min=-self.limit - 1)
        is_visible = entries.is_used & (entries.positions >= key_window.oldest)
        return _Keys(entries.keys, entries.values, codes, since_start), is_visible


def _codes_of(global_ranks: Tensor, codes: _Codes, table: Table, heads: Tensor) -> Tensor:
    """Codes (m c r) of earlier tokens with these global ranks (m c r); `heads` (m) counts sequences and heads."""
    buckets, n_earlier = global_ranks // RANKS_PER_BUCKET, global_ranks % RANKS_PER_BUCKET
    n_rounds, n_buckets = table.counts.shape[2:]
    rounds = torch.arange(global_ranks.shape[-1], device=heads.device)
    bucket_ids = (rearrange(heads, "m -> m 1 1") * n_rounds + rounds) * n_buckets + buckets
    # The first token of the call would be the next one of its bucket: the latest stored one is 1 before it.
    before_call = n_earlier - table.counts.flatten()[bucket_ids]
    first = codes.first.flatten()[bucket_ids]
    return first + before_call.clamp(min=-table.n_slots - 1).to(first.dtype)


class Sums(NamedTuple):
    """Sums of one round over the visible keys of each query; 0 if there are none."""

    y: Tensor  # (... w) values times weights
    total: Tensor  # (... 1) weights
    shift: Tensor | None = None  # (... 1) subtracted from scores before exponentiation; None: 0 for all queries


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


class _Arrange(torch.autograd.Function):
    """Rows (n ...) of x in the order `order` (p), where row i is at `place[i]`; other places have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Windows(torch.autograd.Function):
    """Values (m n ...) at the n = `size` places before each tile of `tile` places; n is a multiple of that.

    `new` are the values (p ...) at all places, `old` those of earlier tokens, without gradient. `index` (m n) chooses
    from both together; None: the places immediately before the tile. The gradient of `unfold` would be slow.
    """

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
    """The keys of a query of a tile: the earlier ones of its tile where `from_tile` (c c) is 1, else keys before it.

    Query i of a tile sees the keys before i in the tile, and the keys from i on before the tile. These are n keys
    together, so values of the first keys before the tile are replaced by values of its own keys.
    """

    from_tile: Tensor  # factors of 0 and 1: kernels of Boolean masks are not vectorized on the CPU

    def join(self, of_window: Tensor, of_tile: Tensor) -> Tensor:
        """Values (m c n) of the keys before a tile, the first ones replaced in place by those (m c c) of the tile."""
        tile = len(self.from_tile)
        kept = of_window[..., :tile] * (1 - self.from_tile).to(of_window.dtype)
        of_window[..., :tile] = kept + of_tile * self.from_tile.to(of_window.dtype)
        return of_window

    def distances(self, inside: Tensor, before: Tensor) -> Tensor:
        """Differences (m c n) of numbers of queries and their keys, which are inside (m c) or before the tile (m n)."""
        queries = inside.unsqueeze(2)
        return self.join(queries - before.unsqueeze(1), queries - inside.unsqueeze(1))

    def visible(self, inside: _Keys, before: _Keys, exists: Tensor, limit: int | None) -> Tensor:
        """Returns a factor (m c n) for each query and key: 1 if it is visible and no earlier round found it, else 0.

        Conditions are computed as clamped differences of whole numbers, because Boolean masks are slow on a CPU.
        """
        tile, bucket_size = len(self.from_tile), before.k.shape[1]
        exists = exists.to(self.from_tile.dtype).unsqueeze(1).repeat(1, tile, 1)
        visible = self.join(exists, torch.ones_like(self.from_tile))
        if limit is not None and inside.positions is not None and before.positions is not None:
            n_within_limit = limit + 1 - self.distances(inside.positions, before.positions)
            visible *= n_within_limit.clamp_(0, 1)
        # An earlier round found the key if the codes of query and key in it differ by at most the bucket size.
        code_distances = [self.distances(*codes).abs_() for codes in zip(inside.codes, before.codes, strict=True)]
        if code_distances:
            nearest = reduce(torch.minimum, code_distances)
            visible *= nearest.sub_(bucket_size).clamp_(0, 1)
        return visible


def tile_sums(
    q: Tensor, inside: _Keys, before: _Keys, exists: Tensor, large: Tensor | None, *, limit: int | None, dropout: float
) -> Sums:
    """Computes the weighted sums of values (m c ...) for the queries (m c e) of m tiles, not divided by the weights.

    A query sees the keys before it: those of its own tile, `inside` (m c ...), and those before the tile, `before`
    (m n ...), which exist where the mask `exists` (m n) is true. No key further back than `limit` is visible. Where
    the mask `large` (m c 1) is true, scores are too large for exp as they are, so the largest one is subtracted first.
    """
    tile = q.shape[1]
    window = _Window(torch.ones(tile, tile, dtype=q.dtype, device=q.device).tril(-1))
    visible = window.visible(inside, before, exists, limit)  # (m c n), factors 0 and 1
    scores = window.join(q @ before.k.mT, q @ inside.k.mT)  # (m c n)
    shift = None
    if large is not None:
        # The logarithm is -inf for hidden keys, so these are not the largest.
        lowest = torch.finfo(scores.dtype).min
        largest = (scores.detach() + visible.log()).amax(-1, keepdim=True).clamp(min=lowest)
        shift = torch.where(large, largest, 0.0)
        scores = (scores - shift).clamp(max=0.0).where(large, scores)
    weights = scores.exp_() * visible
    total = weights.sum(-1, keepdim=True)
    if dropout:
        weights = F.dropout(weights, dropout)
    # `window.join` has put the keys of the tile in the first columns: here these are taken apart from those before.
    weights_inside = weights[..., :tile] * window.from_tile
    weights[..., :tile] *= 1 - window.from_tile
    y = torch.baddbmm(weights @ before.v, weights_inside, inside.v)  # (m c w)
    return Sums(y, total, shift)


def attend_hashed_one(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, key_window: KeyWindow) -> Tensor:
    """Computes LSH attention (b h 1 w) of one new token, without gradient, and writes the token into the table.

    The token has query and key (b h 1 e), value (b h 1 w), and a bucket in each round, `buckets` (b h r 1). The table
    changes in place, after it has been read.
    """
    b, h, n_rounds, n_buckets, bucket_size, _ = table.keys.shape
    bucket_ids = (flat_index(buckets, b, h, n_rounds) * n_buckets + buckets).squeeze(-1)  # (b h r)
    counts = table.counts.flatten()[bucket_ids]
    global_rank = buckets.squeeze(-1) * RANKS_PER_BUCKET + counts
    entries = latest(table, bucket_ids, counts)
    oldest = key_window.oldest
    if key_window.limit is not None:
        oldest = max(oldest, key_window.start - key_window.limit)
    # One softmax over the keys of all rounds (b h r·c). A key that several rounds find counts in the first of them.
    is_repeated = seen_before(global_rank, entries.global_ranks, bucket_size)
    is_seen = (entries.is_used & (entries.positions >= oldest) & ~is_repeated).flatten(2)
    scores = (entries.keys.flatten(2, 3) @ q.mT).squeeze(-1).masked_fill(~is_seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ entries.values.flatten(2, 3)

    new_keys, new_values = (repeat(x, "b h 1 e -> (b h r) e", r=n_rounds) for x in (k, v))
    new_ranks = repeat(global_rank, "b h s -> (b h r) s", r=n_rounds)
    written_ids = bucket_ids.flatten()
    write(table, written_ids, counts.flatten(), new_keys, new_values, key_window.start, new_ranks)
    table.counts.view(-1)[written_ids] += 1
    sees_any_key = is_seen.any(-1)[..., None, None]
    return y.where(sees_any_key, v)  # a token that sees no key attends to itself
