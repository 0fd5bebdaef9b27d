"""Softmax attention over a band of keys, in blocks of queries whose scores stay in the cache of a CPU.

A block reads the keys that its queries see and no others, so a band costs its own area, and no mask of the whole call
exists, unless documents hide keys in training. Else only the first and last columns of the scores of a block, as many
as it has queries, can be hidden.

`attend_blocks` is for inference, `BandAttention` and `attend_rows` have gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from xlcli.ops.scoring import FarPart, ScoreTerm, Scoring, ShiftedTerm, distance_scores, product, share

BLOCK = 256  # number of queries of a block (measured)
SCORES = 2**21  # number of scores in memory at once, unless one head has more (measured)


class Band(NamedTuple):
    """Visible keys: query i sees the keys up to `n_memory` + i, at most `max_distance` back (None: any distance).

    Keys where the boolean mask `hidden` (b t s) is true are not visible all the same; None: no others.
    """

    n_memory: int
    max_distance: int | None
    hidden: Tensor | None = None

    def first(self, query: int) -> int:
        """First key that the query sees."""
        if self.max_distance is None:
            return 0
        return max(0, query + self.n_memory - self.max_distance)

    def edges(self, query: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Additions (t t) to the last and to the first t scores of t queries from `query` on: 0, or -inf where hidden.

        `like` (... t n) has their number and type. The second is None if all first keys are visible. Example of 3
        queries that see equally many keys, with - for -inf: (0 - -, 0 0 -, 0 0 0), and (0 0 0, - 0 0, - - 0).
        """
        n_queries = like.shape[-2]
        hidden = like.new_full((n_queries, n_queries), float("-inf"))
        later = hidden.triu(1)
        position_of_last = query + n_queries - 1 + self.n_memory
        if self.max_distance is None or position_of_last <= self.max_distance:
            return later, None
        # If the first query could see further than to the oldest key, so many later ones still see all first keys.
        n_seen_back = query + self.n_memory - self.first(query)
        n_more_in_reach = self.max_distance - n_seen_back
        return later, hidden.tril(-1 - n_more_in_reach)


def blocks(n_new: int, band: Band) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see."""
    for start in range(0, n_new, BLOCK):
        stop = min(start + BLOCK, n_new)
        yield slice(start, stop), slice(band.first(start), stop + band.n_memory)


class Part(NamedTuple):
    """Scores of some heads and some successive queries, as slices."""

    rows: slice  # sequences
    heads: slice  # heads of queries
    key_heads: slice  # heads of keys, which these share
    new: slice  # queries, which are those of the new tokens
    seen: slice  # keys that they see
    place: slice  # these scores among those of all parts, one after the other

    def queries(self, x: Tensor) -> Tensor:
        """Part (n t e) of x (b h t e): these queries of n heads."""
        return x[self.rows, self.heads, self.new].flatten(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        """Part (n s e) of x (b g s e): the keys that they see."""
        return x[self.rows, self.key_heads, self.seen].flatten(0, 1)

    def write(self, x: Tensor, values: Tensor) -> None:
        """Writes values (n t e) of the queries to x (b h t e)."""
        target = x[self.rows, self.heads, self.new]
        target.copy_(values.view(target.shape))

    def write_to_keys(self, x: Tensor, values: Tensor) -> None:
        """Writes values (n s e) of the keys to x (b g s e)."""
        target = x[self.rows, self.key_heads, self.seen]
        target.copy_(values.view(target.shape))

    def add_to_keys(self, x: Tensor, values: Tensor) -> None:
        """Adds values (n s e) of the keys to x (b g s e), in place."""
        target = x[self.rows, self.key_heads, self.seen]
        target += values.view(target.shape)

    @property
    def size(self) -> int:
        return int(self.place.stop - self.place.start)

    def scores(self, room: Tensor) -> Tensor:
        """Scores (n t s) in the first elements of a flat tensor."""
        return room[: self.size].view(-1, self.new.stop - self.new.start, self.seen.stop - self.seen.start)


def parts(q: Tensor, k: Tensor, band: Band, limit: int) -> Iterator[Part]:
    """Divides the scores of queries (b h t e) and keys (b g s e) into parts that are small enough to stay in a cache.

    A part has at most `limit` scores, unless one head has more: whole sequences, or some heads of one sequence, of a
    block of queries. Its heads are whole groups that share a head of keys, unless it has one head only.
    """
    n_sequences, n_heads, n_new, _ = q.shape
    group_size = n_heads // k.shape[1]  # heads of queries that share a head of keys
    n_scores_before = 0  # in all earlier parts
    for queries, keys in blocks(n_new, band):
        scores_per_head = (queries.stop - queries.start) * (keys.stop - keys.start)
        most_heads = max(1, limit // scores_per_head)
        sequences_at_once = max(1, most_heads // n_heads)
        heads_at_once = 1
        if most_heads >= group_size:
            heads_at_once = min(most_heads, n_heads) // group_size * group_size
        first_sequences, first_heads = range(0, n_sequences, sequences_at_once), range(0, n_heads, heads_at_once)
        for first_sequence, first_head in itertools.product(first_sequences, first_heads):
            rows = slice(first_sequence, min(first_sequence + sequences_at_once, n_sequences))
            heads = slice(first_head, min(first_head + heads_at_once, n_heads))
            last_head = heads.stop - 1
            key_heads = slice(first_head // group_size, last_head // group_size + 1)
            n_scores = (rows.stop - rows.start) * (heads.stop - heads.start) * scores_per_head
            place = slice(n_scores_before, n_scores_before + n_scores)
            yield Part(rows, heads, key_heads, new=queries, seen=keys, place=place)
            n_scores_before += n_scores


def add_edges(scores: Tensor, last: Tensor, first: Tensor | None) -> None:
    """Adds the results of `Band.edges` to the last and first scores (... s), in place."""
    scores[..., -last.shape[-1] :] += last
    if first is not None:
        scores[..., : first.shape[-1]] += first


COMPUTED_BY_BLOCKS = frozenset({"term", "clamp", "shifted", "far", "far_bias", "sinks"})  # fields of `Scoring`


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, band: Band, scoring: Scoring) -> Tensor:
    """Computes `attend` for inference: the output (b h t w) of queries that see the keys in the band.

    Queries are (b h t e), keys (b g s e), values (b g s w); keys and values may have any floating-point type. Of the
    additions of `scoring` only `COMPUTED_BY_BLOCKS` may be given. All parts of the scores use one buffer in turn.
    """
    assert scoring.given <= COMPUTED_BY_BLOCKS
    n_sequences, n_heads, n_new, _ = q.shape
    # In memory the heads of a token are neighbors, as the projection of the output reads them.
    out = q.new_empty(n_sequences, n_new, n_heads, v.shape[-1]).transpose(1, 2)
    sinks = scoring.sinks
    sink_scores = None if sinks is None else sinks.scores(scoring.scale)
    # The scale is multiplied into the queries once, instead of into the scores of each part.
    q = q * scoring.scale
    scoring = _scaled(scoring)
    all_parts = list(parts(q, k, band, SCORES))
    buffer = q.new_empty(max(part.size for part in all_parts))
    for new, parts_of_block in itertools.groupby(all_parts, lambda part: part.new):
        last_edge, first_edge = band.edges(new.start, q[:, :, new])
        for part in parts_of_block:
            keys, values = part.keys(k).to(q.dtype), part.keys(v).to(q.dtype)  # (n s e), (n s w)
            scores = part.scores(buffer)  # (n t s)
            _write_scores(scores, part, q, keys, band, scoring)
            add_edges(scores, last_edge, first_edge)
            if sinks is not None and sink_scores is not None:  # sinks come before the other keys
                sink_values = sinks.values[part.rows, part.key_heads].flatten(0, 1).to(q.dtype)
                scores = torch.cat((part.queries(sink_scores), scores), -1)
                values = torch.cat((sink_values, values), 1)
            weights = torch.softmax(scores, -1, out=scores)
            part.write(out, torch.bmm(share(weights, keys), values))
    return out


def _scaled(scoring: Scoring) -> Scoring:
    """The terms of a scoring, multiplied by its factor, for queries that are multiplied by it as well."""
    term, shifted, far = scoring.term, scoring.shifted, scoring.far
    if term is not None:
        term = term.scaled(scoring.scale)
    if shifted is not None:
        shifted = shifted._replace(queries=shifted.queries * scoring.scale)
    if far is not None:
        far = far._replace(queries=far.queries * scoring.scale)
    return scoring._replace(scale=1.0, term=term, shifted=shifted, far=far)


def _write_scores(scores: Tensor, part: Part, q: Tensor, keys: Tensor, band: Band, scoring: Scoring) -> None:
    """Overwrites `scores` (n t s) with the scores of the queries and keys of a part; sinks are not among its keys.

    `q` (b h t e) are the queries of the whole call, `keys` (n s e) the keys of the part. The caller has multiplied the
    queries, and those of the terms in `scoring`, by the scale.
    """
    term, shifted, far, far_bias = scoring.term, scoring.shifted, scoring.far, scoring.far_bias
    queries = part.queries(q)  # (n t e)
    far_keys = None  # those of the part that have products of their own
    if far is not None:
        far_keys = _far_keys(part, band, far.max_distance)
    if term is not None or shifted is not None:
        # The position scores are written first, then the products of queries and keys are added to them.
        if term is not None:
            _write_term(scores, part, band, term)
        elif shifted is not None:
            _write_shifted(scores, part, shifted)
        share(scores, keys).baddbmm_(share(queries, keys), keys.mT)
    elif far is not None and far_keys is not None:
        far_keys.write_products(queries, keys, part.queries(far.queries), part.keys(far.keys).to(q.dtype), scores)
    else:
        torch.bmm(share(queries, keys), keys.mT, out=share(scores, keys))
    if far_bias is not None:
        keys_with_bias = _far_keys(part, band, far_bias.max_distance)
        if keys_with_bias is not None:
            keys_with_bias.add_bias(scores, far_bias.bias)


def _write_term(scores: Tensor, part: Part, band: Band, term: ScoreTerm) -> None:
    """Writes what a second term adds to the scores (n t s) of a part."""
    queries, keys = part.queries(term.queries), term.keys[part.seen]
    if term.clamp is not None:
        far_keys = _far_keys(part, band, term.clamp.max_distance)
        if far_keys is not None:
            far_keys.write_term(queries, keys, part.queries(term.clamp.scores), scores)
            return
    torch.mm(queries.flatten(0, 1), keys.T, out=scores.flatten(0, 1))


def _far_keys(part: Part, band: Band, max_distance: int) -> FarPart | None:
    """The keys of a part that are further back than this from some query; None if there are none."""
    # Place among the keys of the part of the first query itself, and of the last one.
    first_query = part.new.start + band.n_memory - part.seen.start
    last_query = first_query + part.new.stop - part.new.start - 1
    if last_query <= max_distance:
        return None
    return FarPart(first_query - max_distance)


def _write_shifted(scores: Tensor, part: Part, term: ShiftedTerm) -> None:
    """Writes a term by the distance to the scores (n t s) of a part: `scoring.shifted` without a copy between."""
    queries = term.queries[part.rows, part.heads, part.new]
    by_distance = distance_scores(queries, term.keys[part.heads], scores.shape[-1]).flatten(0, 1)
    n, t, s = by_distance.shape
    # Row i moves to the left by t - 1 - i, so each row begins s - 1 numbers after the one before it, instead of s.
    scores.copy_(by_distance.as_strided((n, t, s), (t * s, s - 1, 1), storage_offset=t - 1))


GROUP = 64  # number of queries of a sequence in a product
SAVED_BYTES = 2**25  # maximum size in bytes of the weights of a call that are saved for the backward pass


def attend_rows(q: Tensor, k: Tensor, v: Tensor, needed: Tensor, band: Band, *, scale: float) -> Tensor:
    """Computes the output (b h t w) of those queries q (b h t e) alone that are needed, with gradients.

    The boolean mask `needed` (b t) is true for these, one at least; the others cost nothing, and their output is 0.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    n_sequences, n_new = needed.shape
    groups = list(_query_groups(needed, band))  # the same number of queries of each sequence
    group_sizes = [group.queries.shape[1] for group in groups]

    # One gather for all groups. Its rows are the tokens of all sequences: token t of sequence b is row b · n_new + t.
    first_rows = n_new * torch.arange(n_sequences)[:, None]
    rows = (first_rows + torch.cat([group.queries for group in groups], dim=1)).flatten()
    rows_of_q = rearrange(q * scale, "b h t e -> (b t) h e")
    gathered = rearrange(rows_of_q.index_select(0, rows), "(b n) h e -> b h n e", b=n_sequences)

    attend_group = _attend
    n_bytes = q[..., 0].numel() * k.shape[2] * q.element_size()
    if torch.is_grad_enabled() and n_bytes > SAVED_BYTES:  # the backward pass computes the weights again
        attend_group = partial(checkpoint, _attend, use_reentrant=False)
    outputs = []
    for queries, group in zip(torch.split(gathered, group_sizes, dim=2), groups, strict=True):
        last, first = group.edges(band, q)
        outputs.append(attend_group(queries, k[:, :, group.seen], v[:, :, group.seen], last, first))

    # The way back: each output to the row of its token.
    computed = rearrange(torch.cat(outputs, dim=2), "b h n w -> (b n) h w")
    out = computed.new_zeros(n_sequences * n_new, *computed.shape[1:]).index_copy(0, rows, computed)
    return rearrange(out, "(b t) h w -> b h t w", b=n_sequences)


class QueryGroup(NamedTuple):
    """Some queries (b n) of a block, by their place in the call; the slices of the block and of the keys it sees."""

    queries: Tensor
    new: slice
    seen: slice

    def edges(self, band: Band, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """`Band.edges` of the block (t t), of which each query of the group gets its row: (b 1 n t)."""
        last, first = band.edges(self.new.start, q[:, :, self.new])
        place_in_block = self.queries - self.new.start
        first_rows = None if first is None else first[place_in_block][:, None]
        return last[place_in_block][:, None], first_rows


def _query_groups(needed: Tensor, band: Band) -> Iterator[QueryGroup]:
    """Groups with all needed queries, of `GROUP` in each sequence at most.

    A sequence that needs fewer in a block than another one fills its groups with queries that it does not need.
    """
    for new, seen in blocks(needed.shape[1], band):
        is_needed = needed[:, new]
        needed_first = is_needed.byte().argsort(dim=1, descending=True, stable=True) + new.start
        n_groups = math.ceil(int(is_needed.sum(1).max()) / GROUP)
        for queries in torch.split(needed_first, GROUP, dim=1)[:n_groups]:
            yield QueryGroup(queries, new, seen)


def _attend(q: Tensor, k: Tensor, v: Tensor, last: Tensor, first: Tensor | None) -> Tensor:
    """Attention output; `last` and `first` (b 1 t n) are added to the last and first n scores."""
    scores = product(q, k.mT)
    with torch.no_grad():  # the gradient of an addition of constants is the identity
        add_edges(scores, last, first)
    return product(scores.softmax(-1), v)


PART_BYTES = 2**22  # maximum size of the scores of a part, unless one head and block of queries has more (measured)


def _write_weights(out: Tensor, part: Part, q: Tensor, k: Tensor, band: Band, term: ScoreTerm | None) -> Tensor:
    """Writes the attention weights (n t s) of a part to `out`, and returns it; queries and term are scaled already."""
    _write_scores(out, part, q, part.keys(k), band, Scoring(1.0, term=term))
    add_edges(out, *band.edges(part.new.start, out))
    if band.hidden is not None:
        hidden = band.hidden[part.rows, None, part.new, part.seen]
        out.view(len(hidden), -1, *out.shape[1:]).masked_fill_(hidden, float("-inf"))
    return torch.softmax(out, -1, out=out)


def attend_band(q: Tensor, k: Tensor, v: Tensor, band: Band, term: ScoreTerm | None, scale: float) -> Tensor:
    """`attend` over the keys in the band with gradients, and with a term without clamp; its keys get no gradient.

    Queries, keys, values and term have one type.
    """
    term_tensors = (None, None) if term is None else (term.queries, term.keys)
    return BandAttention.apply(scale, band, q, k, v, *term_tensors)  # type: ignore[no-any-return, no-untyped-call]


class BandAttention(torch.autograd.Function):
    """The function of `attend_band`, which saves the weights for the backward pass if they are few."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        band: Band,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        term_queries: Tensor | None,
        term_keys: Tensor | None,
    ) -> Tensor:
        """Computes the output (b h t w) part by part; arguments as for `attend_band`, the term as its two tensors."""
        q = _contiguous_product(q, scale)
        term = None
        if term_queries is not None and term_keys is not None:
            term_queries = _contiguous_product(term_queries, scale)
            term = ScoreTerm(term_queries, term_keys)
        all_parts = list(parts(q, k, band, PART_BYTES // q.element_size()))
        n_scores = all_parts[-1].place.stop
        # Few weights are saved for the backward pass; if there are more, it computes them again.
        is_saved = n_scores * q.element_size() <= SAVED_BYTES
        saved_weights = q.new_empty(n_scores if is_saved else 0)
        # In memory (b t h w), as the next projection reads it.
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for part in all_parts:
            memory = saved_weights[part.place] if is_saved else q.new_empty(part.size)
            weights = _write_weights(part.scores(memory), part, q, k, band, term)  # (n t s)
            values = part.keys(v)  # (n s w)
            part.write(out, torch.bmm(share(weights, values), values))
        ctx.save_for_backward(q, k, v, term_queries, term_keys, saved_weights)
        ctx.scale, ctx.band, ctx.parts = scale, band, all_parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by the arguments of `forward`, from `grad` (b h t w), that by its output.

        The forward pass divided the scores into parts: some heads, some successive queries, and the keys that these
        see. Each query is in one part, which writes its gradient. A key may be in several parts: then they add to it.
        """
        # Queries and those of the term were saved after their multiplication by the scale.
        q, k, v, term_queries, term_keys, saved_weights = ctx.saved_tensors
        term = None if term_queries is None else ScoreTerm(term_queries, term_keys)
        d_q = q.new_empty(q.shape)
        d_term_queries = None if term is None else term.queries.new_empty(term.queries.shape)
        if _has_each_key_once(ctx.parts, q, k):
            give_to_keys = Part.write_to_keys
            d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
        else:
            give_to_keys = Part.add_to_keys
            d_k, d_v = k.new_zeros(k.shape), v.new_zeros(v.shape)
        for part in ctx.parts:
            if len(saved_weights):
                weights = part.scores(saved_weights[part.place])
            else:  # there were too many to save
                weights = _write_weights(part.scores(q.new_empty(part.size)), part, q, k, ctx.band, term)
            keys, values = part.keys(k), part.keys(v)
            # `share` makes the heads of queries that have a head of keys in common rows of one matrix.
            queries, d_out = share(part.queries(q), keys), share(part.queries(grad), keys)
            weights = share(weights, keys)
            give_to_keys(part, d_v, torch.bmm(weights.mT, d_out))
            d_weights = torch.bmm(d_out, values.mT)
            # The gradient by the scores takes the place of that by the weights, which saves a tensor of this size.
            d_scores = d_weights
            torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=d_scores)
            give_to_keys(part, d_k, torch.bmm(d_scores.mT, queries))
            part.write(d_q, torch.bmm(d_scores, keys))
            if term is not None:
                part.write(d_term_queries, d_scores.flatten(0, 1) @ term.keys[part.seen])
        d_q *= ctx.scale
        if d_term_queries is not None:
            d_term_queries *= ctx.scale
        return None, None, d_q, d_k, d_v, d_term_queries, None


def _has_each_key_once(parts: Sequence[Part], q: Tensor, k: Tensor) -> bool:
    """True if no key of a head is in two of these parts of a call, so that its gradient is not a sum over parts."""
    is_one_block = parts[-1].new.start == 0
    sees_all_keys = parts[0].seen.start == 0
    n_shared = q.shape[1] // k.shape[1]  # heads of queries for each head of keys
    has_whole_groups: bool = parts[0].heads.stop % n_shared == 0
    return is_one_block and sees_all_keys and has_whole_groups


def _contiguous_product(queries: Tensor, scale: float) -> Tensor:
    """Scaled queries in the order of their axes: every part of them is then a view."""
    return torch.mul(queries, scale, out=queries.new_empty(queries.shape))
