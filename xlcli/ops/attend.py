"""Softmax attention behind one narrow function, with a fused and a plain kernel that agree."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v over the visible keys.

    Args:
        q: Queries (b h t e).
        k: Keys (b h s e).
        v: Values (b h s w), any width.
        visible: Boolean mask (t s), or None when all keys are visible. Every query must see at least one key.
        scale: Factor on the inner products.
        bias: Added to the scores (b h t s), or None.
        dropout: Rate of dropping attention weights.

    Returns:
        (b h t w)
    """
    kernel = attend_plain if _plain_is_faster(q) else attend_fused
    return kernel(q, k, v, visible=visible, scale=scale, bias=bias, dropout=dropout)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same by its definition; holds the scores (b h t s) in memory."""
    scores = (q * scale) @ k.mT
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        # Adding costs nothing backwards; masked_fill would pass over the scores once more.
        scores = scores + torch.zeros_like(visible, dtype=scores.dtype).masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights.to(v.dtype) @ v


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The same by PyTorch's fused kernels. They want one width for q, k and v, so the narrower side is padded."""
    width = v.shape[-1]
    pad = q.shape[-1] - width
    if pad > 0:
        v = F.pad(v, (0, pad))
    elif pad < 0:
        q, k = F.pad(q, (0, -pad)), F.pad(k, (0, -pad))
    mask = visible
    if bias is not None:
        mask = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout)
    return out[..., :width]


def attend_one(q: Tensor, k: Tensor, v: Tensor, *, term: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Attention of a single new token with a second score term whose keys all heads share, without copying any key.

    Args:
        q: Queries (b h 1 e).
        k: Keys (b h s e), all visible.
        v: Values (b h s e).
        term: Queries (b h 1 f) and keys (s f) of the second term.
        scale: Factor on the sum of both scores.
    """
    query, key = term
    scores = q @ k.mT
    scores = scores + rearrange(rearrange(query, "b h 1 f -> (b h) f") @ key.mT, "(b h) s -> b h 1 s", h=q.shape[1])
    return (scores * scale).softmax(-1).to(v.dtype) @ v


def _plain_is_faster(q: Tensor) -> bool:
    """Measured on two cores with bf16 units: the fused CPU kernel runs bf16 at float32's rate, matmul at 4 times it."""
    return q.device.type == "cpu" and (q.dtype == torch.bfloat16 or q.shape[-2] == 1)
