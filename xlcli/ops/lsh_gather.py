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

from xlcli.ops.lsh_table import BucketRanks, Entries, Table, flat_index, latest, seen_before

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
    """Computes `attend_hashed` by gathering, in the backward pass again: until then the table must not change."""
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
        self.table, self.key_window, self.bucket_size = lookup.table, lookup.key_window, lookup.bucket_size
        ranks = lookup.ranks
        b, h, r, t = ranks.buckets.shape
        device = ranks.buckets.device
        n_buckets = ranks.sizes.shape[-1]
        cells = flat_index(ranks.buckets, b, h, r) * n_buckets + ranks.buckets  # (b h r t)
        sizes = ranks.sizes.flatten()
        begins = (sizes.cumsum(0) - sizes)[cells]
        # In each round a token has its place in `order` behind the earlier tokens of its bucket.
        tokens = flat_index(ranks.buckets, b, h, 1) * t + torch.arange(t, device=device)  # (b h 1 t)
        self.order = cells.new_empty(cells.numel())
        self.order[(begins + ranks.ranks).flatten()] = tokens.expand_as(cells).flatten()

        one_axis = "b h r t -> (b h t) r"
        self.cells, self.begins = rearrange(cells, one_axis), rearrange(begins, one_axis)
        self.ranks, self.global_ranks = rearrange(ranks.ranks, one_axis), rearrange(ranks.global_ranks, one_axis)
        self.positions = self.key_window.start + torch.arange(t, device=device).repeat(b * h)

    def parts(self, width: int) -> list[slice]:
        """Queries whose keys, of this width, are gathered at once."""
        n_tokens, r = self.cells.shape
        floats_per_query = r * self.bucket_size * width
        n = max(1, PART_FLOATS // floats_per_query)
        return [slice(i, i + n) for i in range(0, n_tokens, n)]

    def keys(self, part: slice, k: Tensor, v: Tensor) -> _Keys:
        """Gathers the keys that the queries `part` may see, from the table and from the tokens of the call.

        The keys of the call are k (p e), its values v (p w). In each round a query has a slot for each of the latest
        `bucket_size` tokens of its bucket, the earliest first, so those of the call are in the last slots.
        """
        cells, ranks, table, size = self.cells[part], self.ranks[part], self.table, self.bucket_size
        slots = torch.arange(size, device=cells.device)
        is_of_call = slots >= size - ranks.unsqueeze(-1)  # (p r c)
        places = is_of_call.flatten().nonzero().squeeze(1)
        # The tokens of a bucket are adjacent in `order`.
        place_of_query = (self.begins[part] + ranks).unsqueeze(-1)
        places_in_order = place_of_query - size + slots
        sources = self.order[places_in_order.flatten()[places]]

        # All slots are read from the table, then those of the call are written over them.
        tokens_of_call = k, v, self.positions, self.global_ranks
        if table is None:
            no_tokens = [x.new_zeros(*is_of_call.shape, *x.shape[1:]) for x in tokens_of_call]
            no_tokens.append(torch.zeros_like(is_of_call))  # no slot is used
            entries = Entries(*no_tokens)
        else:
            entries = latest(table, cells, table.counts.flatten()[cells] + ranks)
        is_remembered = entries.is_used & (entries.positions >= self.key_window.oldest)
        for slot_values, of_call in zip(entries[: len(tokens_of_call)], tokens_of_call, strict=True):
            slot_values.flatten(0, 2).index_copy_(0, places, of_call[sources].to(slot_values.dtype))

        # A key that several rounds find counts in the first of them.
        is_repeated = seen_before(self.global_ranks[part], entries.global_ranks, size)
        seen = (is_of_call | is_remembered) & ~is_repeated
        if self.key_window.limit is not None:
            seen &= entries.positions >= self.positions[part, None, None] - self.key_window.limit
        return _Keys(entries.keys.flatten(1, 2), entries.values.flatten(1, 2), seen.flatten(1), places, sources)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: Lookup, dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes the outputs (p w) of queries (p e) with keys (p e) and values (p w), some queries at a time."""
        call = _Call(lookup)
        n_keys = call.cells.shape[1] * call.bucket_size
        out, weights = torch.empty_like(v), q.new_empty(len(q), n_keys)
        dropout_factors = q.new_empty(len(q) if dropout else 0, n_keys)
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            # (p 1 e) times (p e s): a product with a column on the right would be eight times as slow.
            scores = (q[part, None] @ keys.k.mT).squeeze(1).masked_fill(~keys.seen, -torch.inf)
            is_alone = ~keys.seen.any(-1, keepdim=True)
            kept_weights = scores.softmax(-1).masked_fill(is_alone, 0.0)  # (p s)
            weights[part] = kept_weights
            if dropout:
                dropout_factors[part] = F.dropout(torch.ones_like(kept_weights), dropout)
                kept_weights = kept_weights * dropout_factors[part]
            # A query that sees no other token attends to itself.
            out[part] = torch.where(is_alone, v[part], (kept_weights.unsqueeze(1) @ keys.v).squeeze(1))
        ctx.save_for_backward(q, k, v, weights, dropout_factors)
        ctx.lookup = lookup
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients by queries, keys and values from `grad` (p w), that by the output."""
        q, k, v, weights, dropout_factors = ctx.saved_tensors
        grad, call = grad.contiguous(), _Call(ctx.lookup)
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            w = weights[part]  # (p s), before dropout
            kept_weights = w
            d_w = (grad[part, None] @ keys.v.mT).squeeze(1)
            if len(dropout_factors):
                kept_weights = w * dropout_factors[part]
                d_w = d_w * dropout_factors[part]
            d_scores = torch._softmax_backward_data(d_w, w, -1, w.dtype)
            d_q[part] = (d_scores.unsqueeze(1) @ keys.k).squeeze(1)
            # Keys of the call get gradients from each query that sees them; those of the table, which is memory, none.
            queries = part.start + keys.places // w.shape[1]
            d_k.index_add_(0, keys.sources, d_scores.flatten()[keys.places, None] * q[queries])
            d_v.index_add_(0, keys.sources, kept_weights.flatten()[keys.places, None] * grad[queries])
            is_alone = ~keys.seen.any(-1, keepdim=True)
            d_v[part] += grad[part] * is_alone
        return None, None, d_q, d_k, d_v
