"""Softmax attention over a band of keys, in blocks of queries whose scores stay in the cache of a CPU.

A block reads the keys that its queries see and no others, so a band costs its own area, and no mask of the whole call
exists, unless documents hide keys in training. Else only the first and last columns of the scores of a block, as many
as it has queries, can be hidden.

`attend_blocks` is for inference, `BandAttention` and `attend_rows` have gradients. Heads of keys and values may serve
several successive heads of queries each (grouped-query attention, Ainslie et al. 2023).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from xlcli.ops.context import Positions


def share(x: Tensor, keys: Tensor) -> Tensor:
    """Rows of the heads of x (... h t e) joined to those of the g heads of keys (... g s e): (... g h/g·t e).

    A view if x is contiguous or every head has its own keys.
    """
    *rows, h, t, e = x.shape
    g = keys.shape[-3]
    return x if h == g else x.reshape(*rows, g, h // g * t, e)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Product (... h t s) of each head of x (... h t e) with its head of y (... g e s)."""
    return (share(x, y) @ y).view(*x.shape[:-1], y.shape[-1])


BLOCK = 256
"""Number of queries of a block (measured)."""
SCORES = 2**21
"""Number of scores in memory at once, unless one head has more (measured)."""


class Clamp(NamedTuple):
    """Scores (b h t 1) that a second term has for all keys further back than `max_distance`, one for each query."""

    scores: Tensor
    max_distance: int


class ScoreTerm(NamedTuple):
    """Second score term: queries (b h t f), and keys (s f) shared by all sequences and heads.

    Far keys have the scores of `clamp`, if there is one.
    """

    queries: Tensor
    keys: Tensor
    clamp: Clamp | None = None


class FarKeys(NamedTuple):
    """Queries (b h t e) and keys (b h s e) whose products are the scores of keys further back than `max_distance`."""

    queries: Tensor
    keys: Tensor
    max_distance: int
    positions: Positions


class FarBias(NamedTuple):
    """Addition to the scores of the keys further back than `max_distance`."""

    bias: float
    max_distance: int
    positions: Positions


class Sinks(NamedTuple):
    """The first tokens of a text, which stay visible besides the latest ones (Xiao et al. 2024).

    Queries (b h t e), and keys (b g n e) and values (b g n w), which they see where `visible` (b 1 t n) is true.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor

    def scores(self, scale: float) -> Tensor:
        """Scores (b h t n), -inf where hidden."""
        scores = product(self.queries * scale, self.keys.to(self.queries.dtype).mT)
        return scores.masked_fill(~self.visible, float("-inf"))


class Scoring(NamedTuple):
    """Scores of queries (b h t e) and keys (b g s e): products times `scale`, and additions that are None if absent.

    `bias` is (b h t s) or (h t s). `value_bias` gives an addition (b h t w) to the output for weights (b h t s). `far`
    is not together with a term, nor are sinks with a value bias.
    """

    scale: float
    term: ScoreTerm | None = None
    far: FarKeys | None = None
    far_bias: FarBias | None = None
    sinks: Sinks | None = None
    bias: Tensor | None = None
    value_bias: Callable[[Tensor], Tensor] | None = None

    @property
    def clamp(self) -> Clamp | None:
        """Scores of the term for far keys."""
        return self.term and self.term.clamp

    @property
    def has_far(self) -> bool:
        """True if some keys have scores of their own."""
        return any(part is not None for part in (self.far, self.far_bias, self.sinks, self.clamp))

    def joined(self) -> Scoring:
        """The same scores, with the addition for far keys in those of the term if both begin at one distance."""
        far_bias, clamp = self.far_bias, self.clamp
        if not (self.term and clamp and far_bias and clamp.max_distance == far_bias.max_distance):
            return self
        clamp = clamp._replace(scores=clamp.scores + far_bias.bias / self.scale)
        return self._replace(term=self.term._replace(clamp=clamp), far_bias=None)

    def additions(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Sum of all additions to the scaled products of queries and keys, a term with far keys among them, or None."""
        parts = [self.bias]
        if self.far is not None:
            difference = (product(self.far.queries, self.far.keys.mT) - product(q, k.mT)) * self.scale
            parts.append(torch.where(self.far.positions.distance > self.far.max_distance, difference, 0.0))
        if self.far_bias is not None:
            is_far = self.far_bias.positions.distance > self.far_bias.max_distance
            parts.append(is_far * q.new_tensor(self.far_bias.bias))
        if self.term is not None and self.clamp is not None:
            parts.append(clamped_scores(self.term.queries * self.scale, self.term.keys, self.clamp, self.scale))
        given = [part for part in parts if part is not None]
        return functools.reduce(torch.add, given) if given else None


class Far(NamedTuple):
    """Far keys of a block: those before the key `first` + i, for query i.

    Their scores are `term` (n t 1), or `products` of queries (n t e) and keys (n s e) in place of the ordinary ones.
    """

    first: int
    term: Tensor | None = None
    products: tuple[Tensor, Tensor] | None = None

    def parts(self, scores: Tensor) -> tuple[int, Tensor, Tensor]:
        """Number of keys that are far from all queries, the scores of those far from some, and their mask (t s)."""
        n_queries, n_keys = scores.shape[1:]
        n_far = min(max(self.first, 0), n_keys)
        mixed = scores[..., n_far : max(self.first + n_queries - 1, 0)]
        mask = torch.ones(n_queries, mixed.shape[2], dtype=torch.bool, device=scores.device)
        return n_far, mixed, mask.tril_(self.first - n_far - 1)


class Band(NamedTuple):
    """Visible keys: query i sees the keys up to `n_memory` + i, at most `max_distance` back (None: any distance).

    Keys where the boolean mask `hidden` (b t s) is true are not visible all the same; None: no others.
    """

    n_memory: int
    max_distance: int | None
    hidden: Tensor | None = None

    def first(self, query: int) -> int:
        """First key that the query sees."""
        return 0 if self.max_distance is None else max(0, query + self.n_memory - self.max_distance)

    def edges(self, query: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Additions (t t) to the last and to the first t scores of t queries from `query` on: 0, or -inf where hidden.

        `like` (... t e) are queries. The second is None if all first keys are visible.
        """
        n = like.shape[-2]
        hidden = like.new_full((n, n), float("-inf"))
        if self.max_distance is None or query + n - 1 + self.n_memory <= self.max_distance:
            return hidden.triu(1), None
        n_in_reach = self.max_distance - (query + self.n_memory - self.first(query))
        return hidden.triu(1), hidden.tril(-1 - n_in_reach)


def blocks(n_new: int, band: Band) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see."""
    for start in range(0, n_new, BLOCK):
        stop = min(start + BLOCK, n_new)
        yield slice(start, stop), slice(band.first(start), stop + band.n_memory)


class Part(NamedTuple):
    """Scores of some heads and some successive queries: slices of the axes, and their place among all scores."""

    rows: slice
    heads: slice
    key_heads: slice
    new: slice
    seen: slice
    place: slice

    def queries(self, x: Tensor) -> Tensor:
        """Part (n t e) of x (b h t e): these queries of n heads."""
        return x[self.rows, self.heads, self.new].flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Part (n s e) of x (b g s e): the keys that they see."""
        return x[self.rows, self.key_heads, self.seen].flatten(0, 1)

    def write(self, x: Tensor, values: Tensor) -> None:
        """Writes values (n t e) of the queries to x (b h t e)."""
        at = x[self.rows, self.heads, self.new]
        at.copy_(values.view(at.shape))

    def write_keys(self, x: Tensor, values: Tensor, *, add: bool) -> None:
        """Writes values (n s e) of the keys to x (b g s e), or adds them there."""
        at = x[self.rows, self.key_heads, self.seen]
        at.copy_(at + values.view(at.shape) if add else values.view(at.shape))

    @property
    def size(self) -> int:
        """Number of scores."""
        return int(self.place.stop - self.place.start)

    def scores(self, room: Tensor) -> Tensor:
        """Scores (n t s) in the first elements of a flat tensor."""
        return room[: self.size].view(-1, self.new.stop - self.new.start, self.seen.stop - self.seen.start)


def parts(q: Tensor, k: Tensor, band: Band, limit: int) -> Iterator[Part]:
    """All parts of the scores of queries (b h t e) and keys (b g s e): whole sequences, or some heads of one sequence.

    A part has at most `limit` scores, unless one head has more. It has all queries of each of its keys, or one head.
    """
    n_rows, n_heads, n_new, _ = q.shape
    n_shared = n_heads // k.shape[1]
    at = 0
    for new, seen in blocks(n_new, band):
        size = (new.stop - new.start) * (seen.stop - seen.start)
        at_once = max(1, limit // size)
        n, m = max(1, at_once // n_heads), min(at_once, n_heads) // n_shared * n_shared or 1
        for row, head in itertools.product(range(0, n_rows, n), range(0, n_heads, m)):
            rows, heads = slice(row, min(row + n, n_rows)), slice(head, min(head + m, n_heads))
            end = at + (rows.stop - rows.start) * (heads.stop - heads.start) * size
            key_heads = slice(heads.start // n_shared, -(-heads.stop // n_shared))
            yield Part(rows, heads, key_heads, new, seen, slice(at, end))
            at = end


def term_scores(queries: Tensor, keys: Tensor, far: Far, out: Tensor) -> None:
    """Scores (n t s), written to `out`, of queries (n t f) and keys (s f) of a second term, some of which are far."""
    assert far.term is not None
    n_far, mixed, mask = far.parts(out)
    torch.mm(queries.flatten(0, 1), keys[n_far:].T, out=out.flatten(0, 1)[:, n_far:])
    out[..., :n_far] = far.term
    mixed.copy_(torch.where(mask, far.term, mixed))


def clamped_scores(queries: Tensor, keys: Tensor, clamp: Clamp, scale: float) -> Tensor:
    """Scores (b h t s) of a second term with far keys, of scaled queries."""
    b, h, t, _ = queries.shape
    out = queries.new_empty(b, h, t, len(keys))
    far = Far(len(keys) - t - clamp.max_distance, (clamp.scores * scale).flatten(0, 1))
    term_scores(queries.flatten(0, 1), keys, far, out.flatten(0, 1))
    return out


def product_scores(queries: Tensor, keys: Tensor, far: Far, out: Tensor) -> None:
    """Scores (n t s), written to `out`, of queries (n t e) and keys (g s e), some of which are far."""
    assert far.products is not None
    n_far, mixed, mask = far.parts(out)
    far_queries, far_keys = far.products
    torch.bmm(share(queries, keys), keys[:, n_far:].mT, out=share(out[..., n_far:], keys))
    torch.bmm(share(far_queries, keys), far_keys[:, :n_far].mT, out=share(out[..., :n_far], keys))
    some = far_keys[:, n_far : n_far + mixed.shape[2]]
    mixed.copy_(torch.where(mask, product(far_queries, some.mT), mixed))


def add_edges(scores: Tensor, last: Tensor, first: Tensor | None) -> None:
    """Adds the results of `Band.edges` to the last and first scores (... s), in place."""
    scores[..., -last.shape[-1] :] += last
    if first is not None:
        scores[..., : first.shape[-1]] += first


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, band: Band, scoring: Scoring) -> Tensor:
    """`attend` over the keys in the band, without biases. Keys and values may have any floating-point type."""
    scale, term, far, far_bias, sinks, *_ = scoring
    n_rows, n_heads, n_new, _ = q.shape
    # In memory the heads of a token are neighbors, as the projection of the output reads them.
    out = q.new_empty(n_rows, n_new, n_heads, v.shape[-1]).transpose(1, 2)
    q = q * scale
    clamp = scoring.clamp
    if clamp is not None:
        clamp = clamp._replace(scores=clamp.scores * scale)
    if term is not None:
        term = term._replace(queries=term.queries * scale)
    if far is not None:
        far = far._replace(queries=far.queries * scale)
    limit = clamp or far
    of_sinks = sinks and sinks.scores(scale)
    divided = list(parts(q, k, band, SCORES))
    buffer = q.new_empty(max(part.size for part in divided))
    new = None
    for part in divided:
        if part.new is not new:  # the first part of a block
            edges = band.edges(part.new.start, q[:, :, part.new])
        new, seen = part.new, part.seen
        n, query = new.stop - new.start, new.start + band.n_memory - seen.start
        first = -n if limit is None else query - limit.max_distance
        has_far = first + n > 1
        queries, keys, values = part.queries(q), part.keys(k).to(q.dtype), part.keys(v).to(q.dtype)
        scores = part.scores(buffer)
        if term is not None:
            of_term = part.queries(term.queries)
            if clamp is not None and has_far:
                term_scores(of_term, term.keys[seen], Far(first, part.queries(clamp.scores)), scores)
            else:
                torch.mm(of_term.flatten(0, 1), term.keys[seen].T, out=scores.flatten(0, 1))
            share(scores, keys).baddbmm_(share(queries, keys), keys.mT)
        elif far is not None and has_far:
            products = part.queries(far.queries), part.keys(far.keys).to(q.dtype)
            product_scores(queries, keys, Far(first, None, products), scores)
        else:
            torch.bmm(share(queries, keys), keys.mT, out=share(scores, keys))
        if far_bias is not None and query + n - 1 > far_bias.max_distance:
            n_far, mixed, mask = Far(query - far_bias.max_distance).parts(scores)
            scores[..., :n_far] += far_bias.bias
            mixed += mask.to(scores.dtype) * far_bias.bias
        add_edges(scores, *edges)
        if sinks is not None and of_sinks is not None:
            first_values = sinks.values[part.rows, part.key_heads].flatten(0, 1).to(q.dtype)
            scores, values = torch.cat((part.queries(of_sinks), scores), -1), torch.cat((first_values, values), 1)
        part.write(out, torch.bmm(share(torch.softmax(scores, -1, out=scores), keys), values))
    return out


GROUP = 64
"""Number of queries of a sequence in a product."""
SAVED_SCORES = 2**23
"""Maximum number of scores of all queries of a call for which weights are saved for the backward pass."""


def attend_rows(q: Tensor, k: Tensor, v: Tensor, needed: Tensor, band: Band, *, scale: float) -> Tensor:
    """`attend_blocks` with gradients, where the boolean mask `needed` (b t) is true, of one query at least.

    The output for other queries is undefined.
    """
    recompute = torch.is_grad_enabled() and q[..., 0].numel() * k.shape[2] > SAVED_SCORES
    k, v = k.to(q.dtype), v.to(q.dtype)
    groups: list[tuple[Tensor, slice, slice]] = []  # queries (b g), those that are needed first, and their block
    for new, seen in blocks(needed.shape[1], band):
        order = needed[:, new].byte().argsort(dim=1, descending=True, stable=True) + new.start
        most = int(needed[:, new].sum(1).max())
        groups += [(group, new, seen) for group in torch.split(order, GROUP, dim=1)[: -(-most // GROUP)]]
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


def _attend(q: Tensor, k: Tensor, v: Tensor, last: Tensor, first: Tensor | None) -> Tensor:
    """Attention output; `last` and `first` (b 1 t n) are added to the last and first n scores."""
    scores = product(q, k.mT)
    with torch.no_grad():  # the gradient of an addition of constants is the identity
        add_edges(scores, last, first)
    return product(scores.softmax(-1), v)


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
    if band.hidden is not None:
        hidden = band.hidden[part.rows, None, part.new, part.seen]
        scores.view(len(hidden), -1, *scores.shape[1:]).masked_fill_(hidden, float("-inf"))
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
