"""LSH attention: a query attends to keys of its own hash buckets only (Kitaev et al. 2020, Reformer).

In each hash round a query sees the latest `bucket_size` earlier keys of its bucket. It attends to the union over all
rounds, each key once, and to itself only if that union is empty. The visible keys therefore depend neither on later
tokens, as they do in implementations that sort the whole sequence into chunks, nor on how the text is cut into calls.

In each round a token has a global rank: its bucket times `RANKS_PER_BUCKET`, plus the number of earlier tokens in that
bucket. Query i sees key j in a round if rank_i - rank_j is in 1..bucket_size. A key seen in several rounds counts in
the first of these rounds.

Further axes: n bucket, c slot of a bucket or token of a chunk, m chunk or bucket of a list.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, flat_index, write

CHECKPOINT_SCORES = 2**24
"""Number of scores from which a round is recomputed in the backward pass instead of stored."""

MAX_FLOATS = 2**23
"""Maximum size of the queries, keys and values rearranged at once, unless one head is larger. glibc returns larger
blocks to the system, which clears every page again."""

MAX_SCORES = 2**18
"""Number of scores computed at once."""


class KeyWindow(NamedTuple):
    """Positions of visible keys for a query at position `start`: from `oldest`, at most `limit` back (None: any)."""

    start: int
    oldest: int
    limit: int | None


def attend_hashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    *,
    bucket_size: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """LSH attention of new tokens over the table and themselves, at a cost linear in their number.

    In each round the tokens of a bucket are cut into chunks in their order, and each chunk attends to itself and the
    previous chunk, or to the table. Later tokens do not change the chunk of a token or its place in it.

    Args:
        q: Queries (b h t e).
        k: Keys (b h t e).
        v: Values (b h t w).
        ranks: Buckets and ranks of the new tokens.
        table: Earlier tokens, without gradient; None if they are not visible.
        key_window: Positions of visible keys; `start` is the position of the first new token.
        bucket_size: Largest number of keys that a query sees in a round.
        scale: Factor on the inner products.
        dropout: Dropout rate of the weights.

    Returns:
        (b h t w)
    """
    h, floats_per_head = q.shape[1], k[:, :1].numel() * 2 + v[:, :1].numel()
    if h > 1 and h * floats_per_head > MAX_FLOATS:
        settings = {"bucket_size": bucket_size, "scale": scale, "dropout": dropout}
        n = max(1, MAX_FLOATS // floats_per_head)
        slices = [slice(i, i + n) for i in range(0, h, n)]
        return torch.cat([_attend_heads(q, k, v, ranks, table, key_window, part, **settings) for part in slices], dim=1)
    x = torch.cat((q * scale, k, v), dim=-1).flatten(0, 2)
    call = _Call(x, q.shape[-1], ranks, _codes(ranks, bucket_size), table, key_window, bucket_size, dropout)
    rounds: list[tuple[Tensor, Tensor]] = []
    for r, n_chunks in enumerate(_n_chunks(ranks, bucket_size)):
        if torch.is_grad_enabled() and n_chunks * bucket_size**2 >= CHECKPOINT_SCORES:
            rounds.append(checkpoint(_attend_round, call, r, n_chunks, use_reentrant=False))
        else:
            rounds.append(_attend_round(call, r, n_chunks))
    weights = torch.stack([weight for _, weight in rounds])
    alone = (weights == -torch.inf).all(0)
    weights = weights.masked_fill(alone, 0.0).softmax(0)
    y = rounds[0][0] * weights[0]
    for (round_y, _), weight in zip(rounds[1:], weights[1:], strict=True):
        y = torch.addcmul(y, round_y, weight)
    return y.where(~alone, v.flatten(0, 2)).view_as(v)


def _n_chunks(ranks: BucketRanks, size: int) -> list[int]:
    """Number of chunks of `size` tokens in each round. Fake tensors have no values, so even hashing is assumed."""
    b, h, n_rounds, n = ranks.sizes.shape
    if isinstance(ranks.sizes, FakeTensor):
        tokens = ranks.buckets.shape[-1] / n  # per bucket; its last chunk is half full on average
        return [round(b * h * n * max(tokens / size + 0.5, 1 - math.exp(-tokens)))] * n_rounds
    counts: list[int] = (-(-ranks.sizes // size)).sum((0, 1, 3)).tolist()
    return counts


def _attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    heads: slice,
    **settings: Any,
) -> Tensor:
    """`attend_hashed` of a slice of heads."""
    q, k, v = (part[:, heads] for part in (q, k, v))
    ranks = BucketRanks(*(part[:, heads] for part in ranks))
    table = None if table is None else Table(*(part[:, heads] for part in table))
    return attend_hashed(q, k, v, ranks, table, key_window, **settings)


class _Call(NamedTuple):
    """Values shared by the rounds of a call.

    x           (b·h·t 2e+w)  scaled queries, keys and values
    width                     width of keys, e
    ranks                     buckets and ranks of the new tokens
    codes                     ranks as small floats
    table                     earlier tokens
    key_window                positions of visible keys
    size                      number of tokens of a chunk
    dropout                   dropout rate of the weights
    """

    x: Tensor
    width: int
    ranks: BucketRanks
    codes: _Codes
    table: Table | None
    key_window: KeyWindow
    size: int
    dropout: float


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
    exact = torch.float32 if ranks.buckets.shape[-1] + steps.shape[-1] * (2 * size + 2) < 2**24 else torch.float64
    return _Codes(first.to(exact), (first.gather(-1, ranks.buckets) + ranks.ranks).to(exact))


def _attend_round(call: _Call, r: int, n_chunks: int) -> tuple[Tensor, Tensor]:
    """Attention (b·h·t w) to the keys first seen in round r, in `n_chunks` chunks, and the log of its total weight.

    The log (b·h·t 1) is -inf for a query without visible keys.
    """
    x, width, ranks, codes, table, key_window, size, dropout = call
    b, h, n_rounds, t = ranks.buckets.shape
    n = ranks.sizes.shape[-1]
    sizes = ranks.sizes[:, :, r].flatten()
    chunks = -(-sizes // size)
    begins = chunks.cumsum(0) - chunks + 1
    cells = flat_index(ranks.buckets, b, h) * n + ranks.buckets[:, :, r]
    place = (begins[cells] * size + ranks.ranks[:, :, r]).flatten()
    # Chunk 0 and the places after the last token of a bucket hold arbitrary tokens, which are never visible.
    order = place.new_zeros((n_chunks + 1) * size).index_copy_(0, place, torch.arange(len(place), device=x.device))

    def map_chunks(rows: Tensor) -> Tensor:
        return rearrange(rows.index_select(0, order), "(m c) f -> m c f", c=size)

    limit = None if table is None and (key_window.limit or 0) >= t - 1 else key_window.limit
    marks = rearrange(codes.own[:, :, :r], "b h r t -> (b h t) r")
    if limit is not None:
        far = torch.float32 if key_window.start - key_window.oldest + t < 2**24 else torch.float64
        position = repeat(torch.arange(t, device=x.device, dtype=far), "t -> (b h t) 1", b=b, h=h)
        marks = torch.cat((position, marks.to(torch.promote_types(far, marks.dtype))), 1)
    rows, row_marks = map_chunks(x), map_chunks(marks)
    own, own_marks = rows[1:], row_marks[1:]
    before, before_marks = rows[:-1, :, width:], row_marks[:-1]
    exists = torch.ones(n_chunks, size, dtype=torch.bool, device=x.device)
    nonempty = sizes.nonzero().squeeze(1)
    first = begins[nonempty] - 1
    if table is None:
        exists[first] = False
    else:
        entries, global_ranks, age, known = _entries(
            table, (nonempty // n * n_rounds + r) * n + nonempty % n, key_window
        )
        theirs = _codes_of(global_ranks[..., :r], codes, table, nonempty // n)
        if limit is not None:
            theirs = torch.cat((age.unsqueeze(-1).to(marks.dtype), theirs.to(marks.dtype)), -1)
        before = before.index_copy(0, first, entries.to(x.dtype))
        before_marks = before_marks.index_copy(0, first, theirs)
        exists[first] = known
    # A single group of fake tensors has fewer operators to trace.
    group = n_chunks if isinstance(x, FakeTensor) else max(1, MAX_SCORES // size**2)
    parts = zip(*(torch.split(part, group) for part in (own, before, own_marks, before_marks, exists)), strict=True)
    mixed = zip(*(_mix(*part, limit=limit, dropout=dropout) for part in parts), strict=True)
    y, weight = (torch.cat(part).flatten(0, 1).index_select(0, place - size) for part in mixed)
    return y, weight


def _entries(table: Table, bucket_ids: Tensor, key_window: KeyWindow) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entries of the buckets `bucket_ids` (m) of a table.

    Returns:
        Keys and values (m c e+w), global ranks (m c r), positions relative to the first new token (m c; negative), and
        a mask (m c) of the visible entries.
    """
    keys, values, positions, global_ranks, exists = _latest(table, bucket_ids, table.counts.flatten()[bucket_ids])
    known = exists & (positions >= key_window.oldest)
    return torch.cat((keys, values), -1), global_ranks, positions - key_window.start, known


def _latest(table: Table, bucket_ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Entries of the buckets `bucket_ids` (...), after `counts` (...) tokens have been written to each.

    Entries are in order of arrival, so that rounding does not depend on overwritten entries.

    Returns:
        Keys (... c e), values (... c w), positions (... c), global ranks (... c r), and a mask (... c) of used slots.
    """
    size = table.n_slots
    slots = torch.arange(size, device=bucket_ids.device)
    counts = counts.unsqueeze(-1)
    places = bucket_ids.unsqueeze(-1) * size + (counts + slots) % size
    parts = (table.keys, table.values, table.positions.unsqueeze(-1), table.global_ranks)
    keys, values, positions, global_ranks = (part.flatten(0, 4)[places] for part in parts)
    return keys, values, positions.squeeze(-1), global_ranks, counts - size + slots >= 0


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


def _mix(
    own: Tensor,
    before: Tensor,
    own_marks: Tensor,
    before_marks: Tensor,
    exists: Tensor,
    *,
    limit: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attention (m c w) of m chunks to their own and the previous keys, and the log of its total weight (m c 1).

    Query i of a chunk sees the keys before i in its chunk, and the keys from i on in the previous chunk. These are c
    keys together, so one square of scores holds both.

    Args:
        own: Queries, keys and values (m c 2e+w).
        before: Previous keys and values (m c e+w).
        own_marks: Positions, if there is a limit, and codes in earlier rounds (m c r).
        before_marks: Positions and codes of the previous keys.
        exists: Mask (m c) of the previous keys that exist.
        limit: Largest distance of a visible key; None: any.
        dropout: Dropout rate of the weights.
    """
    size = own.shape[1]
    width = own.shape[2] - before.shape[2]
    q, k, v = own.tensor_split((width, 2 * width), dim=-1)
    k_before, v_before = before.tensor_split((width,), dim=-1)
    near = torch.ones(size, size, dtype=torch.bool, device=own.device).tril(-1)
    hidden = ~(near | exists.unsqueeze(1))
    for i, (mine, theirs) in enumerate(zip(own_marks.unbind(-1), before_marks.unbind(-1), strict=True)):
        difference = mine.unsqueeze(2) - torch.where(near, mine.unsqueeze(1), theirs.unsqueeze(1))
        hidden |= difference > limit if limit is not None and not i else difference.abs_() <= size
    # Finite, so that a query without visible keys gets arbitrary weights, ignored later, instead of NaN.
    large = torch.finfo(own.dtype).max / 2
    scores = torch.where(near, q @ k.mT, q @ k_before.mT).masked_fill(hidden, -large)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    weights = F.dropout(weights, dropout) if dropout else weights
    y = torch.baddbmm(weights.masked_fill(near, 0.0) @ v_before, weights * near, v) / total
    return y, (top + total.log()).masked_fill(top < -large / 2, -torch.inf)


def attend_hashed_one(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, key_window: KeyWindow, *, scale: float
) -> Tensor:
    """LSH attention (b h 1 w) of one new token, without gradient. The token is then written into the table.

    Args:
        q: Query (b h 1 e).
        k: Key (b h 1 e).
        v: Value (b h 1 w).
        buckets: Buckets of the token (b h r 1).
        table: Earlier tokens; changed in place.
        key_window: Positions of visible keys.
        scale: Factor on the inner products.
    """
    b, h, r, n, size, _ = table.keys.shape
    bucket_ids = (flat_index(buckets, b, h, r) * n + buckets).squeeze(-1)
    counts = table.counts.flatten()[bucket_ids]
    global_rank = buckets.squeeze(-1) * RANKS_PER_BUCKET + counts
    keys, values, positions, global_ranks, exists = _latest(table, bucket_ids, counts)
    oldest = (
        key_window.oldest if key_window.limit is None else max(key_window.oldest, key_window.start - key_window.limit)
    )
    met = (rearrange(global_rank, "b h r -> b h 1 1 r") - global_ranks).abs() <= size
    earlier = torch.ones(r, r, dtype=torch.bool, device=q.device).tril(-1).unsqueeze(1)
    seen = exists & (positions >= oldest) & ~(met & earlier).any(-1)
    seen = seen.flatten(2)
    scores = (keys.flatten(2, 3) @ (q.mT * scale)).squeeze(-1).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ values.flatten(2, 3)
    write(
        table,
        bucket_ids.flatten(),
        counts.flatten(),
        repeat(k, "b h 1 e -> (b h r) e", r=r),
        repeat(v, "b h 1 e -> (b h r) e", r=r),
        key_window.start,
        repeat(global_rank, "b h s -> (b h r) s", r=r),
    )
    table.counts.view(-1)[bucket_ids.flatten()] += 1
    return y.where(seen.any(-1)[..., None, None], v)


def share_bucket(query_ranks: Tensor, key_ranks: Tensor, bucket_size: int) -> Tensor:
    """Mask (b h s t) of the keys that a query sees in any round, from global ranks (b h r s) and (b h r t)."""
    difference = query_ranks.unsqueeze(-1) - key_ranks.unsqueeze(-2)
    return ((difference >= 1) & (difference <= bucket_size)).any(2)


def recall(q: Tensor, k: Tensor, found: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """Share (b h s), 0 to 1, of the weight of full attention that falls on the keys found by LSH attention.

    Args:
        q: Queries (b h s e).
        k: Keys (b h t e).
        found: Mask (b h s t) of the keys that LSH attention sees.
        visible: Mask (s t) of the keys that full attention sees, at least one per query.
        scale: Factor on the inner products.
    """
    weights = (q @ k.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights * found).sum(-1)
