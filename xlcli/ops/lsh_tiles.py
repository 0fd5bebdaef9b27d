"""Tiles of LSH attention: queries of a bucket that are computed together, each with the same number of keys before it.

Axes: c token of a tile, m tile, n key before a tile, p place in the order of the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Sums(NamedTuple):
    """Sums of one round over the visible keys of each query; 0 if there are none.

    y      (... w)  values times weights
    total  (... 1)  weights
    shift  (... 1)  number subtracted from scores before exponentiation; None if it is 0 for all queries
    """

    y: Tensor
    total: Tensor
    shift: Tensor | None = None


def add_rounds(rounds: list[Sums]) -> tuple[Tensor, Tensor]:
    """Sums of all rounds: values times weights, and weights."""
    if rounds[0].shift is not None:
        most = torch.stack([sums.shift for sums in rounds if sums.shift is not None]).amax(0)
        factors = [(sums.shift - most).exp() for sums in rounds if sums.shift is not None]
        rounds = [Sums(s.y * factor, s.total * factor) for s, factor in zip(rounds, factors, strict=True)]
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


def mix(
    own: Sequence[Tensor],
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
        own: Queries (m c e), keys and values of the tiles, their codes in earlier rounds (m c), and their positions
            (m c) if there is a limit.
        before: Keys (m n e) and values before the tiles, their codes, and their positions.
        exists: Mask (m n) of the keys before the tiles that exist.
        large: Mask (m c 1) of the queries whose maximum score is subtracted.
        limit: Largest distance of a visible key; None: any.
        dropout: Dropout rate of the weights.
    """
    q, k, v, *marks = own
    k_before, v_before, *marks_before = before
    tile, size = k.shape[1], k_before.shape[1]
    # Factors of 0 and 1 instead of Boolean masks, whose kernels are not vectorized on the CPU.
    near = torch.ones(tile, tile, dtype=q.dtype, device=q.device).tril(-1)
    far = 1 - near

    def join(window: Tensor, beside: Tensor) -> Tensor:
        window[..., :tile] = window[..., :tile] * far.to(window.dtype) + beside * near.to(window.dtype)
        return window

    distances = [
        join(mine.unsqueeze(2) - theirs.unsqueeze(1), mine.unsqueeze(2) - mine.unsqueeze(1))
        for mine, theirs in zip(marks, marks_before, strict=True)
    ]
    visible = join(exists.to(q.dtype).unsqueeze(1).repeat(1, tile, 1), torch.ones_like(near))
    if limit is not None:
        visible *= (limit + 1 - distances.pop()).clamp_(0, 1)
    if distances:
        visible *= reduce(torch.minimum, [distance.abs_() for distance in distances]).sub_(size).clamp_(0, 1)
    scores = join(q @ k_before.mT, q @ k.mT)
    shift = None
    if large is not None:
        top = (scores.detach() + visible.log()).amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        shift = torch.where(large, top, 0.0)
        scores = (scores - shift).clamp(max=0.0).where(large, scores)
    weights = scores.exp_() * visible
    total = weights.sum(-1, keepdim=True)
    if dropout:
        weights = F.dropout(weights, dropout)
    beside = weights[..., :tile] * near
    weights[..., :tile] *= far
    return Sums(torch.baddbmm(weights @ v_before, beside, v), total, shift)
