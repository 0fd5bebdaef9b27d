"""Softmax attention over a band of keys, in blocks of queries whose scores stay in the cache of a CPU. Inference only.

A block reads the keys that its queries see and no others, so a band costs its own area, and no mask of the whole call
exists. Within a block only the first and last columns of the scores, as many as it has queries, can be hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from xlcli.ops.chunks import score_chunks

BLOCK = 256
"""Number of queries of a block (measured)."""
SCORES = 2**21
"""Number of scores in memory at once, unless those of one head are more (measured)."""


class Band(NamedTuple):
    """Visible keys: query i sees the keys up to `n_memory` + i, at most `max_distance` back (None: any distance)."""

    n_memory: int
    max_distance: int | None

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


def softmax_scores(
    queries: Tensor,
    keys: Tensor,
    term: tuple[Tensor, Tensor] | None,
    edges: tuple[Tensor, Tensor | None],
    out: Tensor,
) -> Tensor:
    """Weights (n t s), written to `out`, of queries (n t e) over keys (n s e).

    `term` is a second score term (n t f) and (s f), or None; `edges` are those of `Band.edges`.
    """
    if term is None:
        torch.bmm(queries, keys.mT, out=out)
    else:
        torch.mm(term[0].flatten(0, 1), term[1].T, out=out.flatten(0, 1))
        out.baddbmm_(queries, keys.mT)
    last, first = edges
    out[..., -len(last) :] += last
    if first is not None:
        out[..., : len(first)] += first
    return torch.softmax(out, -1, out=out)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, band: Band, *, scale: float, term: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Attention output (b h t w) of queries (b h t e) over keys (b h s e) and values (b h s w) in the band.

    Args:
        q: Queries.
        k: Keys, in any floating-point type.
        v: Values, in any floating-point type.
        band: Visible keys.
        scale: Factor on the inner products.
        term: Second score term, queries (b h t f) and keys (s f), or None.
    """
    n_rows, n_heads, n_new, _ = q.shape
    # In memory the heads of a token are neighbors, as the projection of the output reads them.
    out = q.new_empty(n_rows, n_new, n_heads, v.shape[-1]).transpose(1, 2)
    q = q * scale
    if term is not None:
        term = term[0] * scale, term[1]
    largest = max((new.stop - new.start) * (seen.stop - seen.start) for new, seen in blocks(n_new, band))
    buffer = q.new_empty(max(largest, min(SCORES, largest * n_rows * n_heads)))
    for new, seen in blocks(n_new, band):
        n, n_keys = new.stop - new.start, seen.stop - seen.start
        edges = band.edges(new.start, q[:, :, new])
        for rows, heads in score_chunks(n_rows, n_heads, n * n_keys, SCORES):
            queries, keys, values = (
                x[rows, heads, at].flatten(0, 1).to(q.dtype) for x, at in ((q, new), (k, seen), (v, seen))
            )
            own_term = term and (term[0][rows, heads, new].flatten(0, 1), term[1][seen])
            place = buffer[: len(queries) * n * n_keys].view(len(queries), n, n_keys)
            weights = softmax_scores(queries, keys, own_term, edges, out=place)
            out[rows, heads, new] = rearrange(
                torch.bmm(weights, values), "(b h) t w -> b h t w", h=heads.stop - heads.start
            )
    return out
