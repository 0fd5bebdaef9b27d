"""Softmax attention over a band of keys for some queries of a call, in groups of equal size.

The queries of a block are packed in the order of time, and a group of them is one product with all keys of the block.
The place of a query in its group depends on no later query, so results before a change keep every bit.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlcli.ops.attend_blocks import Band, blocks

GROUP = 32
"""Number of queries of a sequence in a product."""
SAVED_SCORES = 2**23
"""Maximum number of scores of all queries of a call for which weights are saved for the backward pass."""


def attend_rows(q: Tensor, k: Tensor, v: Tensor, needed: Tensor, band: Band, *, scale: float) -> Tensor:
    """Attention output (b h t w) of the queries where the boolean mask `needed` (b t) is true; elsewhere undefined.

    Args:
        q: Queries (b h t e).
        k: Keys (b h s e).
        v: Values (b h s w).
        needed: Boolean mask (b t), true for one query at least.
        band: Visible keys.
        scale: Factor on the inner products.
    """
    recompute = torch.is_grad_enabled() and q[..., 0].numel() * k.shape[2] > SAVED_SCORES
    q, k, v = q * scale, k.to(q.dtype), v.to(q.dtype)
    places, outputs = [], []
    for new, seen in blocks(q.shape[2], band):
        order = needed[:, new].byte().argsort(dim=1, descending=True, stable=True)
        most = int(needed[:, new].sum(1).max())
        for group in order.split(GROUP, dim=1)[: -(-most // GROUP)]:
            index = repeat(group + new.start, "b g -> b h g e", h=q.shape[1], e=q.shape[3])
            hidden = [None if edge is None else edge[group][:, None] for edge in band.edges(new.start, q[:, :, new])]
            given = q.gather(2, index), k[:, :, seen], v[:, :, seen], *hidden
            outputs.append(checkpoint(_attend, *given, use_reentrant=False) if recompute else _attend(*given))
            places.append(group + new.start)
    index = repeat(torch.cat(places, dim=1), "b g -> b h g w", h=q.shape[1], w=v.shape[3])
    return v.new_zeros(*q.shape[:3], v.shape[3]).scatter(2, index, torch.cat(outputs, dim=2))


def _attend(q: Tensor, k: Tensor, v: Tensor, last: Tensor, first: Tensor | None) -> Tensor:
    """Attention output; `last` and `first` (b 1 t n) are added to the last and first n scores."""
    scores = q @ k.mT
    with torch.no_grad():  # the gradient of an addition of constants is the identity
        scores[..., -last.shape[-1] :] += last
        if first is not None:
            scores[..., : first.shape[-1]] += first
    return scores.softmax(-1) @ v
