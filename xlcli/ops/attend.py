"""Softmax attention: `attend` takes the fastest kernel that a call allows. All give the results of `attend_plain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from xlcli.ops.attend_blocks import COMPUTED_BY_BLOCKS, attend_band, attend_blocks, attend_rows
from xlcli.ops.context import Mask, VisibleKeys
from xlcli.ops.layers import ALL_ROWS, Share, cast_for_products
from xlcli.ops.layers import dropout as drop
from xlcli.ops.scoring import ScoreTerm, Scoring, Sinks, product


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: VisibleKeys,
    scoring: Scoring,
    *,
    dropout: float = 0.0,
    share: Share = ALL_ROWS,
    needed: Tensor | None = None,
) -> Tensor:
    """Computes softmax((q kᵀ + q' k'ᵀ) · scale + bias) v over the visible keys, by the fastest kernel that can do it.

    Queries q (b h t e), keys k (b g s e) and values v (b g s w) give (b h t w); h/g heads of queries share each head of
    keys. q' and k' are those of the term in `scoring`, if it has one, and the bias is the sum of its other additions.
    `dropout` is the rate at which weights are dropped, by a mask drawn for the part `share` of the rows of a batch.
    `needed` is a boolean mask (b t) of the queries whose output is needed; None: all. Others may be left out.
    """
    scoring = scoring.joined()
    is_on_cpu = q.device.type == "cpu"
    n_new = q.shape[-2]
    has_one_query = n_new == 1
    can_use_blocks = is_on_cpu and n_new > 1 and not dropout and not torch.compiler.is_compiling()
    if can_use_blocks and isinstance(visible, Mask):
        out = _attend_in_blocks(q, k, v, visible, scoring, needed)
        if out is not None:
            return out
    has_only_term = scoring.given == {"term"}
    if has_one_query and has_only_term and not dropout and visible.visible is None:
        return _attend_one(q, k, v, scoring)

    # The other kernels know one product of queries and keys, and one addition to the scores.
    bias = scoring.additions(q, k)
    if scoring.term is not None and scoring.clamp is None:
        q, k = _append_term(q, k, scoring.term)
    is_mask_shared = dropout > 0 and share.parts > 1
    only_plain_can = scoring.sinks is not None or scoring.value_bias is not None or is_mask_shared
    fused_would_copy_keys = has_one_query and k.shape[1] < q.shape[1]
    is_plain_faster = is_on_cpu and (q.dtype == torch.bfloat16 or has_one_query or dropout > 0)  # measured
    common: dict[str, Any] = {"visible": visible, "scale": scoring.scale, "bias": bias, "dropout": dropout}
    if only_plain_can or fused_would_copy_keys or is_plain_faster:
        return attend_plain(q, k, v, scoring.sinks, value_bias=scoring.value_bias, share=share, **common)
    return attend_fused(q, k, v, **common)


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring, needed: Tensor | None
) -> Tensor | None:
    """Computes `attend` on a CPU by a kernel that divides the queries into blocks; None if no such kernel can.

    Only `attend_band` hides earlier documents. It and `attend_rows`, which have gradients, add nothing but a term.
    """
    has_only_products = scoring.given <= {"term"}  # and nothing is added to them
    hides_documents = mask.reach is not None
    if needed is not None and has_only_products and not hides_documents:
        if scoring.term is not None:
            q, k = _append_term(q, k, scoring.term)
        return attend_rows(q, k, v, needed, mask.band, scale=scoring.scale)
    at_inference = torch.is_inference_mode_enabled()
    if at_inference and scoring.given <= COMPUTED_BY_BLOCKS and not hides_documents:
        return attend_blocks(q, k, v, mask.band, scoring)
    if not at_inference and has_only_products and needed is None:
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
    visible: VisibleKeys,
    scale: float,
    bias: Tensor | None = None,
    value_bias: Callable[[Tensor], Tensor] | None = None,
    dropout: float = 0.0,
    share: Share = ALL_ROWS,
) -> Tensor:
    """Computes `attend` by its definition, without a second term; all scores (b h t s) are in memory at once."""
    scores = product(q * scale, k.mT)
    if bias is not None:
        scores = scores + bias
    hidden = visible.addition(scores.dtype)
    if hidden is not None:
        scores = scores + hidden
    if sinks is not None:  # they come before the other keys
        scores = torch.cat((sinks.scores(scale), scores), -1)
        v = torch.cat((sinks.values.to(v.dtype), v), 2)
    weights = scores.softmax(-1)
    if dropout:
        weights = drop(weights, dropout, share)
    out = product(weights.to(v.dtype), v)
    if value_bias is not None:
        out = out + value_bias(weights).to(out.dtype)
    return out


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: VisibleKeys,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention by PyTorch's fused kernels: queries (b h t e), keys (b g s e), values (b g s w) to (b h t w).

    `scale` multiplies the products of queries and keys; `bias`, (b h t s) or (h t s), is added to them after that.
    """
    value_width = v.shape[-1]
    q, k, v = _shaped_for_fused(q, k, v)
    # On a GPU the fastest kernel takes no tensor as mask, but knows queries that see all keys up to themselves.
    is_on_gpu = q.device.type == "cuda"
    if is_on_gpu and bias is None and isinstance(visible, Mask) and visible.sees_all_earlier:
        # Autocast passes over a mask that is no plain tensor, so the types of the products are chosen here.
        q, k, v = cast_for_products(q), cast_for_products(k), cast_for_products(v)
        addition: Tensor | None = visible.causal_bias
    else:
        addition = visible.addition(q.dtype)  # 0, or -inf where hidden; None: every query sees every key
        if bias is not None:
            addition = bias if addition is None else bias + addition
            addition = addition.expand(*q.shape[:-1], k.shape[-2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=addition, scale=scale, dropout_p=dropout)
    return out[..., :value_width]


def _shaped_for_fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values with equally many heads and equal widths, as PyTorch's fused kernels need them.

    A head of keys is repeated for each head of queries that shares it. What is narrower gets zeros, which change no
    product; if these are the values, the output gets as many more columns, which the caller must cut off.
    """
    n_shared = q.shape[1] // k.shape[1]
    if n_shared > 1:
        k, v = k.repeat_interleave(n_shared, dim=1), v.repeat_interleave(n_shared, dim=1)
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[-1] < width:
        q, k = F.pad(q, (0, width - q.shape[-1])), F.pad(k, (0, width - k.shape[-1]))
    if v.shape[-1] < width:
        v = F.pad(v, (0, width - v.shape[-1]))
    return q, k, v


def _append_term(q: Tensor, k: Tensor, term: ScoreTerm) -> tuple[Tensor, Tensor]:
    """Queries and keys with the second term appended to each, so that one inner product is the sum of both."""
    keys = repeat(term.keys, "s f -> b g s f", b=k.shape[0], g=k.shape[1])
    return torch.cat((q, term.queries), dim=-1), torch.cat((k, keys), dim=-1)
