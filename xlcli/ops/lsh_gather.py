"""LSH attention of a call with few tokens in each bucket: every query gathers the keys that it sees in each round.

A query costs as much as `n_rounds` times `bucket_size` keys, whatever the number of buckets. Tiles
(`ops/lsh_attention.py`) are padded, and would hold one query each.

Axes: p query, of all sequences and heads; r round; c key of a round, earliest first; s key of any round; m key that is
a token of the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlcli.ops.lsh_table import BucketRanks, Table, flat_index, latest, seen_before

PART_FLOATS = 2**19  # maximum number of floats of keys gathered at once: they and values stay in the cache (measured)


class KeyWindow(NamedTuple):
    """Positions of visible keys for a query at position `start`: from `oldest`, at most `limit` back (None: any)."""

    start: int
    oldest: int
    limit: int | None


class Lookup(NamedTuple):
    """Where the queries of a call look for their keys."""

    ranks: BucketRanks  # buckets and ranks of the new tokens
    table: Table | None  # earlier tokens, without gradient; None if they are not visible
    key_window: KeyWindow  # positions of visible keys; `start` is that of the first new token
    bucket_size: int  # largest number of keys that a query sees in a round

    def of_heads(self, heads: slice) -> Lookup:
        """The same for some heads."""
        ranks = BucketRanks(*(part[:, heads] for part in self.ranks))
        table = None if self.table is None else Table(*(part[:, heads] for part in self.table))
        return self._replace(ranks=ranks, table=table)


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, lookup: Lookup, dropout: float) -> Tensor:
    """`lsh_attention.attend_hashed` by gathering.

    The table must not change before the backward pass, which gathers the keys again.
    """
    flat_q, flat_k, flat_v = q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)
    y: Tensor = _Gathered.apply(lookup, dropout, flat_q, flat_k, flat_v)  # type: ignore[no-untyped-call]
    return y.view_as(v)


class _Keys(NamedTuple):
    """Keys of some queries."""

    k: Tensor  # (p s e) keys
    v: Tensor  # (p s w) values
    seen: Tensor  # (p s) mask of the visible keys
    places: Tensor  # (m) index into the axes p s
    sources: Tensor  # (m) token of the call


class _Call:
    """Tokens of a call, of all sequences and heads on one axis p, and the table of earlier ones.

    cells         (p r)    bucket, counted through all sequences, heads and rounds
    begins        (p r)    place in `order` of the first token of the bucket
    ranks         (p r)    number of earlier tokens of the call in the bucket
    order         (r·p)    tokens, sorted by bucket
    positions     (p)
    global_ranks  (p r)
    """

    def __init__(self, lookup: Lookup) -> None:
        self.table, self.key_window, self.size = lookup.table, lookup.key_window, lookup.bucket_size
        ranks = lookup.ranks
        b, h, r, t = ranks.buckets.shape
        device = ranks.buckets.device
        sizes = ranks.sizes.flatten()
        cells = flat_index(ranks.buckets, b, h, r) * ranks.sizes.shape[-1] + ranks.buckets
        begins = (sizes.cumsum(0) - sizes)[cells]
        # A token has a place in `order` for each round: behind the earlier tokens of its bucket.
        tokens = flat_index(ranks.buckets, b, h, 1) * t + torch.arange(t, device=device)
        self.order = cells.new_empty(cells.numel())
        self.order[(begins + ranks.ranks).flatten()] = tokens.expand_as(cells).flatten()

        one_axis = "b h r t -> (b h t) r"
        self.cells, self.begins = rearrange(cells, one_axis), rearrange(begins, one_axis)
        self.ranks, self.global_ranks = rearrange(ranks.ranks, one_axis), rearrange(ranks.global_ranks, one_axis)
        self.positions = self.key_window.start + torch.arange(t, device=device).repeat(b * h)

    def parts(self, width: int) -> list[slice]:
        """Queries whose keys, of this width, are gathered at once."""
        n_tokens, r = self.cells.shape
        floats_per_query = r * self.size * width
        n = max(1, PART_FLOATS // floats_per_query)
        return [slice(i, i + n) for i in range(0, n_tokens, n)]

    def keys(self, part: slice, k: Tensor, v: Tensor) -> _Keys:
        """Keys of the queries `part`, from the table and from the call, whose keys are k (p e) and values v (p w)."""
        cells, ranks, table = self.cells[part], self.ranks[part], self.table
        # Each query has `size` slots in each round, for the latest tokens of its bucket, the earliest first. Those of
        # the call come last.
        slots = torch.arange(self.size, device=cells.device)
        is_of_call = slots >= self.size - ranks.unsqueeze(-1)
        places = is_of_call.flatten().nonzero().squeeze(1)
        # The tokens of a bucket are adjacent in `order`.
        place_of_query = (self.begins[part] + ranks).unsqueeze(-1)
        places_in_order = place_of_query - self.size + slots
        sources = self.order[places_in_order.flatten()[places]]

        # All slots from the table, then those of the call over them.
        of_tokens = k, v, self.positions, self.global_ranks
        if table is None:
            entries = [x.new_zeros(*is_of_call.shape, *x.shape[1:]) for x in of_tokens]
            exists = is_of_call
        else:
            *entries, is_used = latest(table, cells, table.counts.flatten()[cells] + ranks)
            is_remembered = entries[2] >= self.key_window.oldest
            exists = is_of_call | (is_used & is_remembered)
        for slot_entries, new in zip(entries, of_tokens, strict=True):
            slot_entries.flatten(0, 2).index_copy_(0, places, new[sources].to(slot_entries.dtype))
        keys, values, positions, global_ranks = entries

        # A key that several rounds find counts once.
        seen = exists & ~seen_before(self.global_ranks[part], global_ranks, self.size)
        if self.key_window.limit is not None:
            seen &= positions >= self.positions[part, None, None] - self.key_window.limit
        return _Keys(keys.flatten(1, 2), values.flatten(1, 2), seen.flatten(1), places, sources)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: Lookup, dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = _Call(lookup)
        n_keys = call.cells.shape[1] * call.size
        out, weights = torch.empty_like(v), q.new_empty(len(q), n_keys)
        dropout_factors = q.new_empty(len(q) if dropout else 0, n_keys)
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            # A product with a column on the right would be eight times as slow.
            scores = (q[part, None] @ keys.k.mT).squeeze(1).masked_fill(~keys.seen, -torch.inf)
            is_alone = ~keys.seen.any(-1, keepdim=True)
            w = scores.softmax(-1).masked_fill(is_alone, 0.0)
            weights[part] = w
            if dropout:
                dropout_factors[part] = F.dropout(torch.ones_like(w), dropout)
                w = w * dropout_factors[part]
            # A query that sees no other token attends to itself.
            out[part] = torch.where(is_alone, v[part], (w.unsqueeze(1) @ keys.v).squeeze(1))
        ctx.save_for_backward(q, k, v, weights, dropout_factors)
        ctx.lookup = lookup
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, dropout_factors = ctx.saved_tensors
        grad, call = grad.contiguous(), _Call(ctx.lookup)
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            w = weights[part]
            d_w = (grad[part, None] @ keys.v.mT).squeeze(1)
            dropped = w
            if len(dropout_factors):
                d_w, dropped = d_w * dropout_factors[part], w * dropout_factors[part]
            d_scores = torch._softmax_backward_data(d_w, w, -1, w.dtype)
            d_q[part] = (d_scores.unsqueeze(1) @ keys.k).squeeze(1)
            # Keys of the call get gradients from each query that sees them; those of the table, which is memory, none.
            queries = part.start + keys.places // w.shape[1]
            d_k.index_add_(0, keys.sources, d_scores.flatten()[keys.places, None] * q[queries])
            d_v.index_add_(0, keys.sources, dropped.flatten()[keys.places, None] * grad[queries])
            is_alone = ~keys.seen.any(-1, keepdim=True)
            d_v[part] += grad[part] * is_alone
        return None, None, d_q, d_k, d_v
