"""Softmax attention over a band of keys, with gradients, in parts whose scores stay in the cache of a CPU.

Scores are overwritten by weights. Few weights are saved for the backward pass, many are computed there again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlcli.ops.attend_blocks import Band, Part, add_edges, parts
from xlcli.ops.heads import share

PART_BYTES = 2**22
"""Maximum size in bytes of the scores of a part, unless one head and block of queries has more (measured)."""
SAVED_BYTES = 2**25
"""Maximum size in bytes of the weights of a call that are saved for the backward pass."""

QUERIES = (0, 3)
"""Places of the queries in queries, keys, values, and queries and keys of the second term."""


def _weights(part: Part, tensors: list[Tensor], saved: Tensor, band: Band) -> Tensor:
    """Attention weights (n t s) of a part, from queries, keys, values and term; in `saved` unless it is empty."""
    q, k, _, *term = tensors
    queries, keys = part.queries(q), part.keys(k)
    scores = part.scores(saved[part.place] if len(saved) else q.new_empty(part.size))
    if term:
        torch.mm(part.queries(term[0]).flatten(0, 1), term[1][part.seen].T, out=scores.flatten(0, 1))
        share(scores, keys).baddbmm_(share(queries, keys), keys.mT)
    else:
        torch.bmm(share(queries, keys), keys.mT, out=share(scores, keys))
    add_edges(scores, *band.edges(part.new.start, queries))
    return torch.softmax(scores, -1, out=scores)


class BandAttention(torch.autograd.Function):
    """`attend` over the keys in a band.

    `apply` takes the factor on the inner products, the band, queries (b h t e), keys (b g s e) and values (b g s w) of
    one type, and queries (b h t f) and keys (s f) of a second score term, if any. Keys of a term get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, band: Band, *given: Tensor) -> Tensor:
        """Output (b h t w)."""
        # Scaled and contiguous queries: every part of them is then a view.
        tensors = [torch.mul(x, scale, out=x.new_empty(x.shape)) if i in QUERIES else x for i, x in enumerate(given)]
        q, k, v, *_ = tensors
        divided = list(parts(q, k, band, PART_BYTES // q.element_size()))
        n_saved = divided[-1].place.stop
        saved = q.new_empty(n_saved if n_saved * q.element_size() <= SAVED_BYTES else 0)
        # In memory (b t h w), as the next projection reads it.
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for part in divided:
            weights = _weights(part, tensors, saved, band)
            values = part.keys(v)
            part.write(out, torch.bmm(share(weights, values), values))
        ctx.save_for_backward(*tensors, saved)
        ctx.scale, ctx.band, ctx.parts = scale, band, divided
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all arguments."""
        *tensors, saved = ctx.saved_tensors
        q, k, v, *term = tensors
        one_block = ctx.parts[-1].new.start == ctx.parts[0].seen.start == 0  # of queries, which sees every key
        once = one_block and ctx.parts[0].heads.stop % (q.shape[1] // k.shape[1]) == 0
        gradients = [x.new_empty(x.shape) if once else x.new_zeros(x.shape) for x in tensors[:4]]
        d_q, d_k, d_v, *d_query = gradients
        for part in ctx.parts:
            weights = part.scores(saved[part.place]) if len(saved) else _weights(part, tensors, saved, ctx.band)
            keys, values = part.keys(k), part.keys(v)
            weights, of_output = share(weights, keys), share(part.queries(grad), keys)
            part.write_keys(d_v, torch.bmm(weights.mT, of_output), add=not once)
            of_scores = torch.bmm(of_output, values.mT)
            torch._softmax_backward_data(of_scores, weights, -1, weights.dtype, grad_input=of_scores)
            part.write_keys(d_k, torch.bmm(of_scores.mT, share(part.queries(q), keys)), add=not once)
            part.write(d_q, torch.bmm(of_scores, keys))
            for d in d_query:
                part.write(d, of_scores.flatten(0, 1) @ term[1][part.seen])
        for d in (d_q, *d_query):
            d *= ctx.scale
        return None, None, *gradients, *[None] * (len(tensors) - len(gradients))
