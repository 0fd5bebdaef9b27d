"""Softmax attention over a band of keys for some queries of a call, in groups of equal size.

The queries of a block are packed in the order of time, and a group of them is one product with all keys of the block.
The place of a query in its group depends on no later query, so results before a change keep every bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xlcli.ops.attend_blocks import Band, blocks

GROUP = 64
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
    k, v = k.to(q.dtype), v.to(q.dtype)
    groups = list(_groups(needed, band))
    index = torch.cat([group for group, _, _ in groups], dim=1)
    rows = (index + q.shape[2] * torch.arange(len(q))[:, None]).flatten()
    packed = rearrange(q * scale, "b h t e -> (b t) h e").index_select(0, rows)
    packed = rearrange(packed, "(b g) h e -> b h g e", b=len(q))
    parts = torch.split(packed, [group.shape[1] for group, _, _ in groups], dim=2)
    outputs = []
    for part, (group, new, seen) in zip(parts, groups, strict=True):
        place, (last, first) = group - new.start, band.edges(new.start, q[:, :, new])
        hidden = last[place][:, None], None if first is None else first[place][:, None]
        given = part, k[:, :, seen], v[:, :, seen], *hidden
        outputs.append(checkpoint(_attend, *given, use_reentrant=False) if recompute else _attend(*given))
    y = rearrange(torch.cat(outputs, dim=2), "b h g w -> (b g) h w")
    out = y.new_zeros(q.shape[0] * q.shape[2], *y.shape[1:]).index_copy(0, rows, y)
    return rearrange(out, "(b t) h w -> b h t w", b=len(q))


def _groups(needed: Tensor, band: Band) -> Iterator[tuple[Tensor, slice, slice]]:
    """Groups (b g) of queries, those that are needed first, with the queries and keys of their block."""
    for new, seen in blocks(needed.shape[1], band):
        order = needed[:, new].byte().argsort(dim=1, descending=True, stable=True) + new.start
        most = int(needed[:, new].sum(1).max())
        for group in torch.split(order, GROUP, dim=1)[: -(-most // GROUP)]:
            yield group, new, seen


def _attend(q: Tensor, k: Tensor, v: Tensor, last: Tensor, first: Tensor | None) -> Tensor:
    """Attention output; `last` and `first` (b 1 t n) are added to the last and first n scores."""
    scores = q @ k.mT
    with torch.no_grad():  # the gradient of an addition of constants is the identity
        scores[..., -last.shape[-1] :] += last
        if first is not None:
            scores[..., : first.shape[-1]] += first
    return scores.softmax(-1) @ v
