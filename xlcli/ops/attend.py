"""Softmax attention: `attend` takes the fastest kernel that a call allows. All give the results of `attend_plain`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from xlcli.ops.attend_blocks import COMPUTED_BY_BLOCKS, attend_band, attend_blocks, attend_rows
from xlcli.ops.context import Mask, VisibleKeys, hidden_scores
from xlcli.ops.layers import ALL_ROWS, Share, cast_for_products
from xlcli.ops.layers import dropout as drop
from xlcli.ops.scoring import ScoreTerm, Scoring, Sinks, product


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | VisibleKeys | None,
    scoring: Scoring,
    *,
    dropout: float = 0.0,
    share: Share = ALL_ROWS,
    needed: Tensor | None = None,
) -> Tensor:
    """softmax((q kᵀ + q' k'ᵀ) · scale + bias) v over the visible keys, with q' and k' of the term of `scoring`.

    Args:
        q: Queries (b h t e).
        k: Keys (b g s e); h/g heads of queries share each of the g heads of keys and values.
        v: Values (b g s w), any width.
        visible: Boolean mask, (t s) or with further axes before them, or None if all keys are visible, or the mask of
            a context, whose tensor is made only where it is read. A query without visible keys gets zeros, which only
            a boolean mask may have.
        scoring: Everything else that scores and output depend on.
        dropout: Dropout rate of the weights.
        share: This part of the rows of the batch.
        needed: Boolean mask (b t) of the queries whose output is needed; None: all. Others may be left out.

    Returns:
        (b h t w)
    """
    scoring = scoring.joined()
    on_cpu, n_new = q.device.type == "cpu", q.shape[-2]
    if isinstance(visible, Mask):
        if on_cpu and n_new > 1 and not dropout and not torch.compiler.is_compiling():
            out = _attend_in_blocks(q, k, v, visible, scoring, needed)
            if out is not None:
                return out
        if n_new == 1 and visible.visible is None:
            visible = None
    if n_new == 1 and visible is None and scoring.given == {"term"} and not dropout:
        return _attend_one(q, k, v, scoring)
    bias = scoring.additions(q, k)
    if scoring.term is not None and scoring.clamp is None:
        q, k = _append_term(q, k, scoring.term)
    shares_keys = k.shape[1] < q.shape[1]
    plain_is_faster = on_cpu and (q.dtype == torch.bfloat16 or n_new == 1 or dropout > 0)  # measured
    plain_is_faster = plain_is_faster or (n_new == 1 and shares_keys)  # no copy of the keys
    needs_plain = scoring.sinks is not None or scoring.value_bias is not None or (dropout > 0 and share.parts > 1)
    if plain_is_faster or needs_plain:
        return attend_plain(
            q,
            k,
            v,
            scoring.sinks,
            visible=visible,
            scale=scoring.scale,
            bias=bias,
            value_bias=scoring.value_bias,
            dropout=dropout,
            share=share,
        )
    return attend_fused(q, k, v, visible=visible, scale=scoring.scale, bias=bias, dropout=dropout)


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring, needed: Tensor | None
) -> Tensor | None:
    """`attend` of a call on a CPU by a kernel of blocks; None if none of them computes it.

    Only `attend_band` hides earlier documents. It and `attend_rows`, which have gradients, add nothing but a term.
    """
    has_only_products = scoring.given <= {"term"}
    hides_documents = mask.reach is not None
    if needed is not None and has_only_products and not hides_documents:
        if scoring.term is not None:
            q, k = _append_term(q, k, scoring.term)
        return attend_rows(q, k, v, needed, mask.band, scale=scoring.scale)
    if torch.is_inference_mode_enabled():
        if scoring.given <= COMPUTED_BY_BLOCKS and not hides_documents:
            return attend_blocks(q, k, v, mask.band, scoring)
        return None
    if has_only_products and (needed is None or not hides_documents):
        return attend_band(q, k.to(q.dtype), v.to(q.dtype), mask.band, scoring.term, scoring.scale)
    return None


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """`attend` of one query that sees all keys, with a term whose keys are not copied for each head."""
    assert scoring.term is not None
    query = rearrange(scoring.term.queries, "b h 1 f -> (b h) f")
    scores = product(q, k.mT) + rearrange(query @ scoring.term.keys.mT, "(b h) s -> b h 1 s", h=q.shape[1])
    return product((scores * scoring.scale).softmax(-1).to(v.dtype), v)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Sinks | None = None,
    *,
    visible: Tensor | VisibleKeys | None,
    scale: float,
    bias: Tensor | None = None,
    value_bias: Callable[[Tensor], Tensor] | None = None,
    dropout: float = 0.0,
    share: Share = ALL_ROWS,
) -> Tensor:
    """`attend` without a second term, as defined there; holds all scores (b h t s) in memory."""
    scores = product(q * scale, k.mT)
    if bias is not None:
        scores = scores + bias
    hidden, without_keys = _hidden_keys(visible, scores.dtype)
    if hidden is not None:
        scores = scores + hidden
    if sinks is not None:
        scores, v = torch.cat((sinks.scores(scale), scores), -1), torch.cat((sinks.values.to(v.dtype), v), 2)
    weights = scores.softmax(-1)
    if dropout:
        weights = drop(weights, dropout, share)
    out = product(weights.to(v.dtype), v)
    if value_bias is not None:
        out = out + value_bias(weights).to(out.dtype)
    if without_keys is not None:
        out = out.masked_fill(without_keys, 0.0)
    return out


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | VisibleKeys | None,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attend` by PyTorch's fused kernels. They need equal widths of q, k and v, so the narrower side is padded.

    On a GPU the fastest one takes no mask, but knows queries that see all keys up to themselves.
    """
    width = v.shape[-1]
    n_shared = q.shape[1] // k.shape[1]
    if n_shared > 1:
        k, v = k.repeat_interleave(n_shared, dim=1), v.repeat_interleave(n_shared, dim=1)
    pad = q.shape[-1] - width
    if pad > 0:
        v = F.pad(v, (0, pad))
    elif pad < 0:
        q, k = F.pad(q, (0, -pad)), F.pad(k, (0, -pad))
    mask: Tensor | None
    without_keys = None
    is_on_gpu = q.device.type == "cuda"
    if is_on_gpu and isinstance(visible, Mask) and visible.sees_all_earlier and bias is None:
        # Autocast passes over a mask that is no plain tensor, so the types of the products are chosen here.
        q, k, v = cast_for_products(q), cast_for_products(k), cast_for_products(v)
        mask = visible.causal_bias
    else:
        mask, without_keys = _hidden_keys(visible, q.dtype)
        if bias is not None:
            mask = bias if mask is None else bias + mask
            mask = mask.expand(*q.shape[:-1], k.shape[-2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout)
    out = out[..., :width]
    if without_keys is not None:
        out = out.masked_fill(without_keys, 0.0)
    return out


def _append_term(q: Tensor, k: Tensor, term: ScoreTerm) -> tuple[Tensor, Tensor]:
    """Queries and keys with the second term appended to each, so that one inner product is the sum of both."""
    keys = repeat(term.keys, "s f -> b g s f", b=k.shape[0], g=k.shape[1])
    return torch.cat((q, term.queries), dim=-1), torch.cat((k, keys), dim=-1)


def _hidden_keys(visible: Tensor | VisibleKeys | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Addition to scores that hides keys, or None, and boolean mask (... t 1) of queries without keys, or None.

    Such queries see all keys in the addition, because a softmax of nothing is not a number.
    """
    if visible is None:
        return None, None
    if isinstance(visible, VisibleKeys):
        return visible.addition(dtype), None
    without_keys = ~visible.any(-1, keepdim=True)
    return hidden_scores(~(visible | without_keys), dtype), without_keys
