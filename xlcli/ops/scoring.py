"""What scores of softmax attention depend on beside the products of queries and keys: a second term, far keys, sinks.

Heads of keys and values may serve several successive heads of queries each (grouped-query attention, Ainslie et al.
2023): `share` and `product` multiply them without copies of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xlcli.ops.positions import Positions


def share(x: Tensor, keys: Tensor) -> Tensor:
    """Joins rows of heads of x (... h t e) that share keys (... g s e): (... g h/g·t e), a view if x is contiguous."""
    *rows, h, t, e = x.shape
    g = keys.shape[-3]
    if h == g:
        return x
    return x.reshape(*rows, g, h // g * t, e)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Product (... h t s) of each head of x (... h t e) with its head of y (... g e s)."""
    return (share(x, y) @ y).view(*x.shape[:-1], y.shape[-1])


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

    def scaled(self, scale: float) -> ScoreTerm:
        clamp = self.clamp
        if clamp is not None:
            clamp = clamp._replace(scores=clamp.scores * scale)
        return ScoreTerm(self.queries * scale, self.keys, clamp)


class ShiftedTerm(NamedTuple):
    """Second score term by the distance: queries (b h t e), and keys (h d e) of the distances d - 1 to 0.

    The scores of keys further back are not defined, as no query sees them.
    """

    queries: Tensor
    keys: Tensor


def distance_scores(queries: Tensor, keys: Tensor, n_keys: int) -> Tensor:
    """Products (... h t s) of queries (... h t e) and the keys (h d e) of the distances d - 1 to 0; s is `n_keys`.

    Columns are the distances s - 1 to 0: those of the s keys from the last query. `shifted` moves the rows of earlier
    queries, which are nearer to each key. Distances of d or more, which no query sees, get 0.
    """
    keys = keys[:, -n_keys:]
    n_unseen = n_keys - keys.shape[1]
    keys = F.pad(keys, (0, 0, n_unseen, 0))  # zeros before the first key of each head
    return queries @ keys.mT


def shifted(products: Tensor) -> Tensor:
    """The relative shift (Dai et al. 2019, appendix B): row i of products (... t s) moved to the left by t - 1 - i.

    So columns, which were distances, become keys: query i is t - 1 - i tokens nearer to each key than the last one.
    What comes in at the right end, for keys after the query, has no meaning. Example: (a b, c d) becomes (b ?, c d).
    """
    *batch, t, s = products.shape
    # The numbers of rows of length s + 1, read in rows of length s, move by one place more in each row.
    longer_rows = F.pad(products, (1, 0)).view(*batch, s + 1, t)
    return longer_rows[..., 1:, :].reshape(*batch, t, s)


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

    A kernel that does not compute all additions names those that it does, and is only called if `given` has no others.
    """

    scale: float
    term: ScoreTerm | None = None
    shifted: ShiftedTerm | None = None
    far: FarKeys | None = None
    far_bias: FarBias | None = None
    sinks: Sinks | None = None
    bias: Tensor | None = None
    value_bias: Callable[[Tensor], Tensor] | None = None

    @property
    def given(self) -> frozenset[str]:
        """Names of the additions that are there; `clamp` is one beside `term`."""
        names = {name for name in self._fields if name != "scale" and getattr(self, name) is not None}
        if self.clamp is not None:
            names.add("clamp")
        return frozenset(names)

    @property
    def clamp(self) -> Clamp | None:
        return None if self.term is None else self.term.clamp

    def joined(self) -> Scoring:
        """The same scores, with the addition for far keys in those of the term if both begin at one distance."""
        term, clamp, far_bias = self.term, self.clamp, self.far_bias
        if term is None or clamp is None or far_bias is None:
            return self
        if clamp.max_distance != far_bias.max_distance:
            return self
        clamp = clamp._replace(scores=clamp.scores + far_bias.bias / self.scale)
        return self._replace(term=term._replace(clamp=clamp), far_bias=None)

    def additions(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Sum of all additions to the scaled products of queries and keys, a term with far keys among them, or None."""
        parts = []
        if self.bias is not None:
            parts.append(self.bias)
        if self.shifted is not None:
            queries, keys = self.shifted
            parts.append(shifted(distance_scores(queries * self.scale, keys, k.shape[-2])))
        if self.far is not None:
            difference = (product(self.far.queries, self.far.keys.mT) - product(q, k.mT)) * self.scale
            is_far = self.far.positions.distance > self.far.max_distance
            parts.append(torch.where(is_far, difference, 0.0))
        if self.far_bias is not None:
            is_far = self.far_bias.positions.distance > self.far_bias.max_distance
            parts.append(is_far * q.new_tensor(self.far_bias.bias))
        if self.term is not None and self.term.clamp is not None:
            parts.append(clamped_scores(self.term.scaled(self.scale)))
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class FarPart(NamedTuple):
    """The far keys among the successive keys of a block of queries: for query i, those before the key `first` + i."""

    first: int

    def divide(self, scores: Tensor) -> tuple[int, Tensor, Tensor]:
        """Number of keys that are far from all queries, the scores of those far from some, and their mask (t s).

        Example of 3 queries and `first` 2: keys 0 and 1 are far from all. 2 and 3 are far from some, with the mask
        (0 0, 1 0, 1 1).
        """
        n_queries, n_keys = scores.shape[1:]
        n_far = min(max(self.first, 0), n_keys)
        first_near_of_last = max(self.first + n_queries - 1, 0)
        mixed = scores[..., n_far:first_near_of_last]
        mask = torch.ones(n_queries, mixed.shape[2], dtype=torch.bool, device=scores.device)
        return n_far, mixed, mask.tril_(self.first - n_far - 1)

    def add_bias(self, scores: Tensor, bias: float) -> None:
        """Adds a number to the scores (n t s) of the far keys, in place."""
        n_far, mixed, mask = self.divide(scores)
        scores[..., :n_far] += bias
        mixed += mask.to(scores.dtype) * bias

    def write_term(self, queries: Tensor, keys: Tensor, of_far: Tensor, out: Tensor) -> None:
        """Writes scores (n t s) to `out`: of queries (n t f) and keys (s f), and `of_far` (n t 1) of the far keys."""
        n_far, mixed, mask = self.divide(out)
        torch.mm(queries.flatten(0, 1), keys[n_far:].T, out=out.flatten(0, 1)[:, n_far:])
        out[..., :n_far] = of_far
        mixed.copy_(torch.where(mask, of_far, mixed))

    def write_products(self, queries: Tensor, keys: Tensor, far_queries: Tensor, far_keys: Tensor, out: Tensor) -> None:
        """Writes scores (n t s) to `out`: of queries (n t e) and keys (g s e), or of those for far keys where far."""
        n_far, mixed, mask = self.divide(out)
        torch.bmm(share(queries, keys), keys[:, n_far:].mT, out=share(out[..., n_far:], keys))
        torch.bmm(share(far_queries, keys), far_keys[:, :n_far].mT, out=share(out[..., :n_far], keys))
        some = far_keys[:, n_far : n_far + mixed.shape[2]]
        mixed.copy_(torch.where(mask, product(far_queries, some.mT), mixed))


def clamped_scores(term: ScoreTerm) -> Tensor:
    """Scores (b h t s) of a term with a clamp, both scaled."""
    assert term.clamp is not None
    b, h, t, _ = term.queries.shape
    n_keys = len(term.keys)
    out = term.queries.new_empty(b, h, t, n_keys)
    far = FarPart(n_keys - t - term.clamp.max_distance)
    far.write_term(term.queries.flatten(0, 1), term.keys, term.clamp.scores.flatten(0, 1), out.flatten(0, 1))
    return out
