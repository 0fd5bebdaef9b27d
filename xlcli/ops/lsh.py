"""Hashed attention: a query looks only at keys of its own hash buckets (Kitaev et al. 2020, Reformer).

In each of several rounds a query sees the most recent `bucket_size` earlier keys of its own bucket. It attends to the
union over rounds, each key once; to itself only when that is empty. What a query sees thus never depends on later
tokens, as it does where the whole sequence is sorted into chunks, nor on how the text is cut into calls.

Each token draws in each round a ticket: its bucket, and how many tokens that bucket had before it. Key j is in i's set
of a round exactly when ticket_i - ticket_j lies in 1..bucket_size, whichever round they are compared in; a pair that
meets in several rounds counts in the first of them.

Further axes: r hash round, n bucket, c slot of a bucket (or place in a chunk of as many tokens).
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlcli.ops.attend import attend_plain
from xlcli.ops.hashing import TICKETS, Line, Table, numbers, write

LARGE = 2**22
"""Scores from which on a round is computed once more in the backward pass, rather than kept."""

GROUP = 2**18
"""Scores computed at once."""


class Reach(NamedTuple):
    """Which keys a query may see besides: those from position `oldest` on, at most `limit` before it (None: any)."""

    start: int
    oldest: int
    limit: int | None


def attend_hashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Line,
    table: Table | None,
    reach: Reach,
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
        line: The same tokens at their buckets.
        table: What arrived before them, without gradient; None when nothing may be seen.
        reach: Bounds on what is seen.
        bucket_size: Keys seen in a round.
        scale: Factor on the inner products.
        dropout: Rate of dropping attention weights.

    Returns:
        (b h t w)
    """
    x = torch.cat((q * scale, k, v), dim=-1).flatten(0, 2)
    one_round = partial(
        _attend_round, line=line, table=table, reach=reach, width=q.shape[-1], size=bucket_size, dropout=dropout
    )
    rounds = []
    for r, n_chunks in enumerate((-(-line.sizes // bucket_size)).sum((0, 1, 3)).tolist()):
        if torch.is_grad_enabled() and 2 * n_chunks * bucket_size**2 >= LARGE:
            rounds.append(checkpoint(one_round, x, r, n_chunks, use_reentrant=False))
        else:
            rounds.append(one_round(x, r, n_chunks))
    weights = torch.stack([weight for _, weight in rounds])
    alone = (weights == -torch.inf).all(0)
    weights = weights.masked_fill(alone, 0.0).softmax(0)
    y = torch.stack([y for y, _ in rounds]).mul(weights).sum(0)
    return y.where(~alone, v.flatten(0, 2)).view_as(v)


def _attend_round(
    x: Tensor,
    r: int,
    n_chunks: int,
    *,
    line: Line,
    table: Table | None,
    reach: Reach,
    width: int,
    size: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attention (b·h·t w) to the keys first met in round r, and the logarithm (b·h·t 1) of its weight in all.

    Args:
        x: Scaled queries, keys and values (b·h·t 2e+w).
        r: The round.
        n_chunks: Chunks in it.
        line: The tokens at their buckets.
        table: What arrived before them.
        reach: Bounds on what is seen.
        width: That of keys, e.
        size: Tokens of a chunk.
        dropout: Rate of dropping attention weights.
    """
    b, h, n_rounds, t = line.buckets.shape
    n = line.sizes.shape[-1]
    sizes = line.sizes[:, :, r].flatten()
    chunks = -(-sizes // size)
    begins = chunks.cumsum(0) - chunks
    cells = numbers(line.buckets, b, h) * n + line.buckets[:, :, r]
    place = (begins[cells] * size + line.ranks[:, :, r]).flatten()

    def in_chunks(rows: Tensor) -> Tensor:
        blank = rows.new_zeros(n_chunks * size, rows.shape[-1])
        return rearrange(blank.index_copy_(0, place, rows), "(m c) f -> m c f", c=size)

    position = repeat(torch.arange(t, device=x.device), "t -> (b h t) 1", b=b, h=h)
    marks = torch.cat((position, rearrange(line.tickets[:, :, :r], "b h r t -> (b h t) r")), 1)
    own, own_marks = in_chunks(x), in_chunks(marks.double())
    # The first chunk of a bucket gets another bucket's last one here, which is then replaced or hidden.
    before, before_marks = (part.roll(1, 0) for part in (own[..., width:], own_marks))
    there = torch.ones(n_chunks, size, dtype=torch.bool, device=x.device)
    busy = sizes.nonzero().squeeze(1)
    first = begins[busy]
    if table is None:
        there[first] = False
    else:
        entries, marks, known = _entries(table, (busy // n * n_rounds + r) * n + busy % n, reach)
        before.index_copy_(0, first, entries.to(x.dtype))
        before_marks.index_copy_(0, first, marks[..., : r + 1].double())
        there[first] = known
    limit = None if table is None and (reach.limit or 0) >= t - 1 else reach.limit
    group = max(1, GROUP // (2 * size * size))
    parts = zip(*(torch.split(part, group) for part in (own, before, own_marks, before_marks, there)), strict=True)
    mixed = torch.cat([_mix(*part, limit=limit, dropout=dropout) for part in parts])
    return rearrange(mixed, "m c f -> (m c) f").index_select(0, place).tensor_split((-1,), dim=1)  # type: ignore[return-value]


def _entries(table: Table, homes: Tensor, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (m c e+w), positions and tickets (m c 1+r) of buckets (m) of a table, and which of them count."""
    size = table.positions.shape[-1]
    slots = torch.arange(size, device=homes.device)
    count = table.counts.flatten()[homes, None]
    # In order of arrival: the oldest is where the next will lie.
    places = homes[:, None] * size + (count + slots) % size
    keys, values, positions, tickets = (
        part.flatten(0, 4)[places] for part in (table.keys, table.values, table.positions.unsqueeze(-1), table.tickets)
    )
    known = (count - size + slots >= 0) & (positions.squeeze(-1) >= reach.oldest)
    return torch.cat((keys, values), -1), torch.cat((positions - reach.start, tickets), -1), known


def _mix(
    own: Tensor,
    before: Tensor,
    own_marks: Tensor,
    before_marks: Tensor,
    there: Tensor,
    *,
    limit: int | None,
    dropout: float,
) -> Tensor:
    """Attention of m chunks of queries to their own and earlier keys, then the logarithm of its weight (m c w+1).

    Args:
        own: Queries, keys and values (m c 2e+w).
        before: Earlier keys and values (m c e+w).
        own_marks: Positions and tickets of earlier rounds (m c 1+r), in a type that subtracts fast.
        before_marks: Those of the earlier keys.
        there: Which earlier keys there are (m c).
        limit: Greatest distance seen.
        dropout: Rate of dropping weights.
    """
    size = own.shape[1]
    width = own.shape[2] - before.shape[2]
    keys, values = torch.cat((before, own[..., width:]), dim=1).tensor_split((width,), dim=-1)
    age = torch.arange(size, 2 * size, device=own.device)[:, None] - torch.arange(2 * size, device=own.device)
    visible = (age >= 1) & (age <= size) & F.pad(there, (0, size), value=True).unsqueeze(1)
    sides = own_marks.unsqueeze(2), torch.cat((before_marks, own_marks), dim=1).unsqueeze(1)
    distance, *tickets = (mine - theirs for mine, theirs in zip(*(side.unbind(-1) for side in sides), strict=True))
    if limit is not None:
        visible &= distance <= limit
    if tickets:
        # Those of an earlier token are lower by at least one, or of another bucket.
        visible &= reduce(torch.minimum, (apart.abs_() for apart in tickets)) > size
    # Finite, so that a query without any key has weights, which then do not count, rather than NaN.
    barrier = torch.finfo(own.dtype).max / 2
    scores = torch.baddbmm((visible.to(own.dtype) - 1.0) * barrier, own[..., :width], keys.mT)
    top, best = scores.max(-1, keepdim=True)
    weights = scores.softmax(-1)
    total = (top - weights.gather(-1, best).log()).masked_fill(top < -barrier / 2, -torch.inf)
    return torch.cat((F.dropout(weights, dropout) @ values, total), dim=-1)


def attend_hashed_one(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, table: Table, reach: Reach, *, scale: float
) -> Tensor:
    """Attention of one new token (b h 1 w), which is then written into the table; without gradient.

    Args:
        q: Query (b h 1 e).
        k: Key (b h 1 e).
        v: Value (b h 1 w).
        buckets: Its buckets (b h r 1).
        table: What arrived before it; changed in place.
        reach: Bounds on what is seen.
        scale: Factor on the inner products.
    """
    b, h, r, n, size, _ = table.keys.shape
    homes = (numbers(buckets, b, h, r) * n + buckets).squeeze(-1)
    counts = table.counts.flatten()[homes]
    ticket = buckets.squeeze(-1) * TICKETS + counts
    slots = torch.arange(size, device=q.device)
    # In order of arrival, so that not even the rounding depends on what has been displaced.
    places = homes.unsqueeze(-1) * size + (counts.unsqueeze(-1) + slots) % size
    parts = (table.keys, table.values, table.positions.unsqueeze(-1), table.tickets)
    keys, values, positions, tickets = (part.flatten(0, 4)[places] for part in parts)
    oldest = reach.oldest if reach.limit is None else max(reach.oldest, reach.start - reach.limit)
    met = (rearrange(ticket, "b h r -> b h 1 1 r") - tickets).abs() <= size
    earlier = torch.ones(r, r, dtype=torch.bool, device=q.device).tril(-1).unsqueeze(1)
    seen = (counts.unsqueeze(-1) - size + slots >= 0) & (positions.squeeze(-1) >= oldest) & ~(met & earlier).any(-1)
    seen = seen.flatten(2)
    scores = (keys.flatten(2, 3) @ (q.mT * scale)).squeeze(-1).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).unsqueeze(2) @ values.flatten(2, 3)
    write(
        table,
        homes.flatten(),
        counts.flatten(),
        repeat(k, "b h 1 e -> (b h r) e", r=r),
        repeat(v, "b h 1 e -> (b h r) e", r=r),
        reach.start,
        repeat(ticket, "b h s -> (b h r) s", r=r),
    )
    table.counts.view(-1)[homes.flatten()] += 1
    return y.where(seen.any(-1)[..., None, None], v)


def attended(buckets: Tensor, *, bucket_size: int, limit: int | None = None) -> Tensor:
    """The set by its definition (b h t t), true where the query sees the key, of tokens in buckets (b h r t)."""
    t = buckets.shape[-1]
    mates = (buckets.unsqueeze(-1) == buckets.unsqueeze(-2)).tril(-1)
    rank = mates.flip(-1).cumsum(-1).flip(-1)
    seen = (mates & (rank <= bucket_size)).any(2)
    if limit is not None:
        seen = seen.triu(-limit)
    return seen | (torch.eye(t, dtype=torch.bool, device=seen.device) & ~seen.any(-1, keepdim=True))


def attend_hashed_plain(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, *, bucket_size: int, limit: int | None = None, scale: float
) -> Tensor:
    """`attend_hashed` from an empty table by its definition: full attention, masked; holds all scores (b h t t)."""
    return attend_plain(q, k, v, visible=attended(buckets, bucket_size=bucket_size, limit=limit), scale=scale)


def meet(tickets_q: Tensor, tickets: Tensor, bucket_size: int) -> Tensor:
    """True (b h s t) where queries with tickets (b h r s) see, in some round, the keys with tickets (b h r t)."""
    apart = tickets_q.unsqueeze(-1) - tickets.unsqueeze(-2)
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
