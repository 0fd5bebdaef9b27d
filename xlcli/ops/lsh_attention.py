"""Hashed attention: a query looks only at keys of its own hash buckets (Kitaev et al. 2020, Reformer).

In each of several rounds a query sees the most recent `bucket_size` earlier keys of its own bucket. It attends to the
union over rounds, each key once; to itself only when that is empty. What a query sees thus never depends on later
tokens, as it does where the whole sequence is sorted into chunks, nor on how the text is cut into calls.

Each token draws in each round a global_rank: its bucket, and how many tokens that bucket had before it. Key j is in i's set
of a round exactly when ticket_i - ticket_j lies in 1..bucket_size, whichever round they are compared in; a pair that
meets in several rounds counts in the first of them.

Further axes: r hash round, n bucket, c slot of a bucket (or place in a chunk of as many tokens), m chunk.
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

from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, numbers, write

LARGE = 2**24
"""Scores from which on a round is computed once more in the backward pass, rather than kept."""

BLOCK = 2**23
"""Numbers of queries, keys and values arranged at once, if they are of several heads: larger blocks are never reused
by the C library, and page after page must be cleared first."""

GROUP = 2**18
"""Scores computed at once."""


class KeyWindow(NamedTuple):
    """Which keys a query may see besides: those from position `oldest` on, at most `limit` before it (None: any)."""

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
    """Attention of new tokens over the table and themselves, at a cost linear in their number.

    In each round the tokens of a bucket are cut into chunks in order of arrival, and each chunk sees itself and the one
    before, or the table. Where a token stands in its chunk, and what stands around it, later tokens cannot change.

    Args:
        q: Queries (b h t e).
        k: Keys (b h t e) of the same tokens.
        v: Values (b h t w).
        ranks: The same tokens at their buckets.
        table: What arrived before them, without gradient; None when nothing may be seen.
        key_window: Bounds on what is seen.
        bucket_size: Keys seen in a round.
        scale: Factor on the inner products.
        dropout: Rate of dropping attention weights.

    Returns:
        (b h t w)
    """
    h, numbers_of_head = q.shape[1], k[:, :1].numel() * 2 + v[:, :1].numel()
    if h > 1 and h * numbers_of_head > BLOCK:
        settings = {"bucket_size": bucket_size, "scale": scale, "dropout": dropout}
        n = max(1, BLOCK // numbers_of_head)
        some = [slice(i, i + n) for i in range(0, h, n)]
        return torch.cat([_of_heads(q, k, v, ranks, table, key_window, heads, **settings) for heads in some], dim=1)
    x = torch.cat((q * scale, k, v), dim=-1).flatten(0, 2)
    call = _Call(x, q.shape[-1], ranks, _codes(ranks, bucket_size), table, key_window, bucket_size, dropout)
    rounds: list[tuple[Tensor, Tensor]] = []
    for r, n_chunks in enumerate(_n_chunks(ranks, bucket_size)):
        if torch.is_grad_enabled() and n_chunks * bucket_size**2 >= LARGE:
            rounds.append(checkpoint(_attend_round, call, r, n_chunks, use_reentrant=False))
        else:
            rounds.append(_attend_round(call, r, n_chunks))
    weights = torch.stack([weight for _, weight in rounds])
    alone = (weights == -torch.inf).all(0)
    weights = weights.masked_fill(alone, 0.0).softmax(0)
    y = rounds[0][0] * weights[0]
    for (of_round, _), weight in zip(rounds[1:], weights[1:], strict=True):
        y = torch.addcmul(y, of_round, weight)
    return y.where(~alone, v.flatten(0, 2)).view_as(v)


def _n_chunks(ranks: BucketRanks, size: int) -> list[int]:
    """Chunks of `size` tokens in each round. Fake tensors, which have no values, count as hashed evenly."""
    b, h, n_rounds, n = ranks.sizes.shape
    if isinstance(ranks.sizes, FakeTensor):
        tokens = ranks.buckets.shape[-1] / n  # of a bucket; its last chunk is half full on average
        return [round(b * h * n * max(tokens / size + 0.5, 1 - math.exp(-tokens)))] * n_rounds
    counts: list[int] = (-(-ranks.sizes // size)).sum((0, 1, 3)).tolist()
    return counts


def _of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    heads: slice,
    **settings: Any,
) -> Tensor:
    """`attend_hashed` of some heads."""
    q, k, v = (part[:, heads] for part in (q, k, v))
    ranks = BucketRanks(*(part[:, heads] for part in ranks))
    table = None if table is None else Table(*(part[:, heads] for part in table))
    return attend_hashed(q, k, v, ranks, table, key_window, **settings)


class _Call(NamedTuple):
    """What the rounds of a call have in common.

    x        (b·h·t 2e+w)  scaled queries, keys and values
    width                  that of keys, e
    ranks                   the tokens at their buckets
    codes                  how to tell who meets
    table                  what arrived before them
    key_window                  bounds on what is seen
    size                   tokens of a chunk
    dropout                rate of dropping attention weights
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
    """Tickets of one call as small numbers, in a type that subtracts fast.

    They differ by at most `size` where global_ranks do: successive ones in a bucket, one for all that arrived more than
    `size` before the call, and more than `size` between buckets.

    first   (b h r n)  that of the first token of the call in each bucket
    own     (b h r t)  those of the tokens of the call
    """

    first: Tensor
    own: Tensor


def _codes(ranks: BucketRanks, size: int) -> _Codes:
    apart = ranks.sizes + 2 * size + 2
    first = apart.cumsum(-1) - apart + size + 1
    exact = torch.float32 if ranks.buckets.shape[-1] + apart.shape[-1] * (2 * size + 2) < 2**24 else torch.float64
    return _Codes(first.to(exact), (first.gather(-1, ranks.buckets) + ranks.ranks).to(exact))


def _attend_round(call: _Call, r: int, n_chunks: int) -> tuple[Tensor, Tensor]:
    """Attention (b·h·t w) to the keys first met in round r, of so many chunks, and the log (b·h·t 1) of its weight."""
    x, width, ranks, codes, table, key_window, size, dropout = call
    b, h, n_rounds, t = ranks.buckets.shape
    n = ranks.sizes.shape[-1]
    sizes = ranks.sizes[:, :, r].flatten()
    chunks = -(-sizes // size)
    begins = chunks.cumsum(0) - chunks + 1
    cells = numbers(ranks.buckets, b, h) * n + ranks.buckets[:, :, r]
    place = (begins[cells] * size + ranks.ranks[:, :, r]).flatten()
    # Chunk 0 belongs to nobody, and places behind the last token of a bucket hold some token: neither is ever seen.
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
    there = torch.ones(n_chunks, size, dtype=torch.bool, device=x.device)
    busy = sizes.nonzero().squeeze(1)
    first = begins[busy] - 1
    if table is None:
        there[first] = False
    else:
        entries, global_ranks, age, known = _entries(table, (busy // n * n_rounds + r) * n + busy % n, key_window)
        theirs = _codes_of(global_ranks[..., :r], codes, table, busy // n)
        if limit is not None:
            theirs = torch.cat((age.unsqueeze(-1).to(marks.dtype), theirs.to(marks.dtype)), -1)
        before = before.index_copy(0, first, entries.to(x.dtype))
        before_marks = before_marks.index_copy(0, first, theirs)
        there[first] = known
    # Fake tensors hold no data: in one group there are fewer operators to trace.
    group = n_chunks if isinstance(x, FakeTensor) else max(1, GROUP // size**2)
    parts = zip(*(torch.split(part, group) for part in (own, before, own_marks, before_marks, there)), strict=True)
    mixed = zip(*(_mix(*part, limit=limit, dropout=dropout) for part in parts), strict=True)
    y, weight = (torch.cat(part).flatten(0, 1).index_select(0, place - size) for part in mixed)
    return y, weight


def _entries(table: Table, homes: Tensor, key_window: KeyWindow) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of buckets (m) of a table: keys and values (m c e+w), global_ranks (m c r), positions (m c), and which count (m c).

    Positions are from the first token of the call on, so below zero.
    """
    keys, values, positions, global_ranks, there = _latest(table, homes, table.counts.flatten()[homes])
    known = there & (positions >= key_window.oldest)
    return torch.cat((keys, values), -1), global_ranks, positions - key_window.start, known


def _latest(table: Table, homes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What buckets (...) of a table hold, in order of arrival, where so many (...) have arrived.

    So that not even the rounding depends on what has been displaced.

    Returns:
        Keys (... c e), values (... c w), positions (... c), global_ranks (... c r), and which slots hold a token (... c).
    """
    size = table.n_slots
    slots = torch.arange(size, device=homes.device)
    counts = counts.unsqueeze(-1)
    places = homes.unsqueeze(-1) * size + (counts + slots) % size
    parts = (table.keys, table.values, table.positions.unsqueeze(-1), table.global_ranks)
    keys, values, positions, global_ranks = (part.flatten(0, 4)[places] for part in parts)
    return keys, values, positions.squeeze(-1), global_ranks, counts - size + slots >= 0


def _codes_of(global_ranks: Tensor, codes: _Codes, table: Table, heads: Tensor) -> Tensor:
    """Codes (m c r) of earlier tokens with these global_ranks (m c r), in rows and heads numbered `heads` (m)."""
    rounds, n = global_ranks.shape[-1], table.counts.shape[-1]
    buckets, counts = global_ranks // RANKS_PER_BUCKET, global_ranks % RANKS_PER_BUCKET
    cells = (rearrange(heads, "m -> m 1 1") * table.counts.shape[2] + numbers(heads, rounds).squeeze(-1)) * n + buckets
    since = counts - table.counts.flatten()[cells]
    first = codes.first.flatten()[cells]
    return first + since.clamp(min=-table.positions.shape[-1] - 1).to(first.dtype)


def _mix(
    own: Tensor,
    before: Tensor,
    own_marks: Tensor,
    before_marks: Tensor,
    there: Tensor,
    *,
    limit: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attention (m c w) of m chunks of queries to their own and earlier keys, and the logarithm of its weight (m c 1).

    The i-th query of a chunk sees its chunk's keys before the i-th, and the chunk before from the i-th on: as many keys
    as a chunk is long, so that one square of scores holds both.

    Args:
        own: Queries, keys and values (m c 2e+w).
        before: Earlier keys and values (m c e+w).
        own_marks: Positions, if there is a limit, and codes of earlier rounds (m c r).
        before_marks: Those of the earlier keys.
        there: Which earlier keys there are (m c).
        limit: Greatest distance seen.
        dropout: Rate of dropping weights.
    """
    size = own.shape[1]
    width = own.shape[2] - before.shape[2]
    q, k, v = own.tensor_split((width, 2 * width), dim=-1)
    k_before, v_before = before.tensor_split((width,), dim=-1)
    near = torch.ones(size, size, dtype=torch.bool, device=own.device).tril(-1)
    hidden = ~(near | there.unsqueeze(1))
    for i, (mine, theirs) in enumerate(zip(own_marks.unbind(-1), before_marks.unbind(-1), strict=True)):
        apart = mine.unsqueeze(2) - torch.where(near, mine.unsqueeze(1), theirs.unsqueeze(1))
        hidden |= apart > limit if limit is not None and not i else apart.abs_() <= size
    # Finite, so that a query without any key has weights, which then do not count, rather than NaN.
    barrier = torch.finfo(own.dtype).max / 2
    scores = torch.where(near, q @ k.mT, q @ k_before.mT).masked_fill(hidden, -barrier)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    weights = F.dropout(weights, dropout) if dropout else weights
    y = torch.baddbmm(weights.masked_fill(near, 0.0) @ v_before, weights * near, v) / total
    return y, (top + total.log()).masked_fill(top < -barrier / 2, -torch.inf)


def attend_hashed_one(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, key_window: KeyWindow, *, scale: float
) -> Tensor:
    """Attention of one new token (b h 1 w), which is then written into the table; without gradient.

    Args:
        q: Query (b h 1 e).
        k: Key (b h 1 e).
        v: Value (b h 1 w).
        buckets: Its buckets (b h r 1).
        table: What arrived before it; changed in place.
        key_window: Bounds on what is seen.
        scale: Factor on the inner products.
    """
    b, h, r, n, size, _ = table.keys.shape
    homes = (numbers(buckets, b, h, r) * n + buckets).squeeze(-1)
    counts = table.counts.flatten()[homes]
    global_rank = buckets.squeeze(-1) * RANKS_PER_BUCKET + counts
    keys, values, positions, global_ranks, there = _latest(table, homes, counts)
    oldest = (
        key_window.oldest if key_window.limit is None else max(key_window.oldest, key_window.start - key_window.limit)
    )
    met = (rearrange(global_rank, "b h r -> b h 1 1 r") - global_ranks).abs() <= size
    earlier = torch.ones(r, r, dtype=torch.bool, device=q.device).tril(-1).unsqueeze(1)
    seen = there & (positions >= oldest) & ~(met & earlier).any(-1)
    seen = seen.flatten(2)
    scores = (keys.flatten(2, 3) @ (q.mT * scale)).squeeze(-1).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ values.flatten(2, 3)
    write(
        table,
        homes.flatten(),
        counts.flatten(),
        repeat(k, "b h 1 e -> (b h r) e", r=r),
        repeat(v, "b h 1 e -> (b h r) e", r=r),
        key_window.start,
        repeat(global_rank, "b h s -> (b h r) s", r=r),
    )
    table.counts.view(-1)[homes.flatten()] += 1
    return y.where(seen.any(-1)[..., None, None], v)


def meet(global_ranks_q: Tensor, global_ranks: Tensor, bucket_size: int) -> Tensor:
    """True (b h s t) where queries with global_ranks (b h r s) see, in some round, the keys with global_ranks (b h r t)."""
    apart = global_ranks_q.unsqueeze(-1) - global_ranks.unsqueeze(-2)
    return ((apart >= 1) & (apart <= bucket_size)).any(2)


def recall(q: Tensor, k: Tensor, seen: Tensor, there: Tensor, *, scale: float) -> Tensor:
    """Share (b h s) of the weight in attention to all keys there that falls on those seen.

    Args:
        q: Queries (b h s e).
        k: Keys (b h t e).
        seen: Which keys each query sees (b h s t).
        there: Which keys full attention would see (s t), for each query at least one.
        scale: Factor on the inner products.
    """
    weights = (q @ k.mT * scale).masked_fill(~there, -torch.inf).softmax(-1)
    return (weights * seen).sum(-1)
