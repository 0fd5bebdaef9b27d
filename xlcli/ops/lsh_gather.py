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

PART_FLOATS = 2**19
"""Maximum number of floats of keys that are gathered at once: with their values they stay in the cache (measured)."""


class KeyWindow(NamedTuple):
    """Positions of visible keys for a query at position `start`: from `oldest`, at most `limit` back (None: any)."""

    start: int
    oldest: int
    limit: int | None


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: BucketRanks,
    table: Table | None,
    key_window: KeyWindow,
    *,
    bucket_size: int,
    dropout: float,
) -> Tensor:
    """LSH attention (b h t w) of queries (b h t e), as `lsh_attention.attend_hashed`.

    The table must not change before the backward pass, which gathers the keys again.
    """
    given, qkv = (ranks, table, key_window, bucket_size), (part.flatten(0, 2) for part in (q, k, v))
    y: Tensor = _Gathered.apply(given, dropout, *qkv)  # type: ignore[no-untyped-call]
    return y.view_as(v)


class _Keys(NamedTuple):
    """Keys of some queries.

    k        (p s e)  keys
    v        (p s w)  values
    seen     (p s)    mask of the visible keys
    places   (m)      index into the axes p s
    sources  (m)      token of the call
    """

    k: Tensor
    v: Tensor
    seen: Tensor
    places: Tensor
    sources: Tensor


class _Call:
    """Tokens of a call, of all sequences and heads on one axis p, and the table of earlier ones.

    cells         (p r)    bucket, counted through all sequences, heads and rounds
    begins        (p r)    place in `order` of the first token of the bucket
    ranks         (p r)    number of earlier tokens of the call in the bucket
    order         (r·p)    tokens, sorted by bucket
    positions     (p)
    global_ranks  (p r)
    """

    def __init__(self, ranks: BucketRanks, table: Table | None, key_window: KeyWindow, size: int) -> None:
        b, h, r, t = ranks.buckets.shape
        device = ranks.buckets.device
        cells = flat_index(ranks.buckets, b, h, r) * ranks.sizes.shape[-1] + ranks.buckets
        begins = (ranks.sizes.flatten().cumsum(0) - ranks.sizes.flatten())[cells]
        tokens = flat_index(ranks.buckets, b, h, 1) * t + torch.arange(t, device=device)
        self.order = cells.new_empty(cells.numel())
        self.order[(begins + ranks.ranks).flatten()] = tokens.expand_as(cells).flatten()
        self.cells, self.begins, self.ranks, self.global_ranks = (
            rearrange(part, "b h r t -> (b h t) r") for part in (cells, begins, ranks.ranks, ranks.global_ranks)
        )
        self.table, self.key_window, self.size = table, key_window, size
        self.positions = key_window.start + torch.arange(t, device=device).repeat(b * h)

    def parts(self, width: int) -> list[slice]:
        """Queries whose keys, of this width, are gathered at once."""
        n_tokens, r = self.cells.shape
        n = max(1, PART_FLOATS // (r * self.size * width))
        return [slice(i, i + n) for i in range(0, n_tokens, n)]

    def keys(self, part: slice, k: Tensor, v: Tensor) -> _Keys:
        """Keys of the queries `part`, from the table and from the call, whose keys are k (p e) and values v (p w)."""
        cells, ranks, table = self.cells[part], self.ranks[part], self.table
        slots = torch.arange(self.size, device=cells.device)
        of_call = slots >= self.size - ranks.unsqueeze(-1)
        places = of_call.flatten().nonzero().squeeze(1)
        sources = self.order[((self.begins[part] + ranks).unsqueeze(-1) - self.size + slots).flatten()[places]]
        if table is None:
            found = [x.new_zeros(*of_call.shape, *x.shape[1:]) for x in (k, v, self.positions, self.global_ranks)]
            exists = of_call
        else:
            *found, exists = latest(table, cells, table.counts.flatten()[cells] + ranks)
            exists = of_call | (exists & (found[2] >= self.key_window.oldest))
        for all_rows, new in zip(found, (k, v, self.positions, self.global_ranks), strict=True):
            all_rows.flatten(0, 2).index_copy_(0, places, new[sources].to(all_rows.dtype))
        keys, values, positions, global_ranks = found
        seen = exists & ~seen_before(self.global_ranks[part], global_ranks, self.size)
        if self.key_window.limit is not None:
            seen &= positions >= self.positions[part, None, None] - self.key_window.limit
        return _Keys(keys.flatten(1, 2), values.flatten(1, 2), seen.flatten(1), places, sources)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: tuple[Any, ...], dropout: float, *qkv: Tensor) -> Tensor:
        call, (q, k, v) = _Call(*given), qkv
        n_keys = call.cells.shape[1] * call.size
        out, weights = torch.empty_like(v), q.new_empty(len(q), n_keys)
        kept = q.new_empty(len(q) if dropout else 0, n_keys)  # factors of dropout
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            # A product with a column on the right would be eight times as slow.
            scores = (q[part, None] @ keys.k.mT).squeeze(1).masked_fill(~keys.seen, -torch.inf)
            alone = ~keys.seen.any(-1, keepdim=True)
            w = weights[part] = scores.softmax(-1).masked_fill(alone, 0.0)
            if dropout:
                kept[part] = F.dropout(torch.ones_like(w), dropout)
                w = w * kept[part]
            out[part] = torch.where(alone, v[part], (w.unsqueeze(1) @ keys.v).squeeze(1))
        ctx.save_for_backward(*qkv, weights, kept)
        ctx.given = given
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, kept = ctx.saved_tensors
        grad, call = grad.contiguous(), _Call(*ctx.given)
        d_q, d_k, d_v = gradients = [torch.zeros_like(x) for x in (q, k, v)]
        for part in call.parts(k.shape[-1]):
            keys = call.keys(part, k, v)
            w = weights[part]
            d_w = (grad[part, None] @ keys.v.mT).squeeze(1)
            dropped = w
            if len(kept):
                d_w, dropped = d_w * kept[part], w * kept[part]
            d_scores = torch._softmax_backward_data(d_w, w, -1, w.dtype)
            d_q[part] = (d_scores.unsqueeze(1) @ keys.k).squeeze(1)
            queries = part.start + keys.places // w.shape[1]
            d_k.index_add_(0, keys.sources, d_scores.flatten()[keys.places, None] * q[queries])
            d_v.index_add_(0, keys.sources, dropped.flatten()[keys.places, None] * grad[queries])
            d_v[part] += grad[part] * ~keys.seen.any(-1, keepdim=True)
        return None, None, *gradients
