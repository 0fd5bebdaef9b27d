"""Spread of a score over documents, and comparisons of two evaluations of the same documents or pairs.

A 95 % interval reaches from the 2.5 % to the 97.5 % quantile over resamples of the documents, drawn with replacement
(percentile bootstrap, Efron 1979). Two evaluations are compared on the same resamples, so what makes a document hard
for both cancels. Documents are those that were scored each as if alone: rows, files, lines, or rows between two resets.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.events import Comparison, Discordance, PairShare, Score, Spread
from xlcli.metrics import LN2

RESAMPLES = 10_000
FEWEST_RESAMPLES, MOST_DRAWS = 1_000, 10**8
"""Of very many documents there are fewer resamples, in which no more documents are drawn, but at least so many."""
BLOCK = 2**20
"""Number of documents that are drawn at a time."""


def spread(sums: NDArray[Any], less: NDArray[Any] | None = None) -> Spread:
    """Spread of an evaluation, given bits and bytes of each document (d 2), or of its difference to another one."""
    columns = [column for each in (sums, less) if each is not None for column in (*each.T, each[:, 0] / each[:, 1])]
    n = len(sums)
    n_resamples = max(FEWEST_RESAMPLES, min(RESAMPLES, MOST_DRAWS // n))
    totals = np.vstack((np.sum(columns, axis=1), resampled(columns, n_resamples)))
    means = _means(totals[:, :3], n) - (0.0 if less is None else _means(totals[:, 3:], n))
    (low, document_low), (high, document_high) = np.quantile(means[1:], (0.025, 0.975), axis=0).tolist()
    bits_per_byte, document_mean = means[0].tolist()
    return Spread(n, n_resamples, bits_per_byte, low, high, document_mean, document_low, document_high)


def resampled(columns: list[NDArray[Any]], n_resamples: int) -> NDArray[np.float64]:
    """Sums (r k) of k columns (d) over resamples of the documents, which depend on the number of documents only."""
    n, random = len(columns[0]), np.random.default_rng(0)
    rows, parts = max(1, BLOCK // n), []
    for start in range(0, n_resamples, rows):
        drawn = random.integers(n, size=(min(rows, n_resamples - start), n))
        parts.append(np.stack([column[drawn].sum(1) for column in columns], 1))
    return np.concatenate(parts)


def _means(sums: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Bits per byte of the text and their mean over documents (r 2), given sums of bits, bytes, bits per byte (r 3)."""
    return np.stack((sums[:, 0] / sums[:, 1], sums[:, 2] / n), 1)


def compare(score: Score, other: Score) -> Comparison | None:
    """A score less another one of the same documents or pairs; None if they are others, or if it is a single one."""
    names = (score.model, score.mem_len, other.model, other.mem_len)
    if score.pairs and other.pairs:
        return Comparison(*names, pairs=tuple(map(discordance, score.pairs, other.pairs)))
    if score.sums is None or other.sums is None or len(score.sums) != len(other.sums):
        return None
    return Comparison(*names, spread=spread(score.sums, other.sums))


def discordance(pairs: PairShare, other: PairShare) -> Discordance:
    """The pairs that another model orders the other way round."""
    reversed_by = Counter(sign for sign, its in zip(pairs.signs, other.signs, strict=True) if sign * its < 0)
    return Discordance(pairs.group, reversed_by[1], reversed_by[-1], mcnemar(reversed_by[1], reversed_by[-1]))


def mcnemar(n: int, m: int) -> float:
    """Two-sided p value of n and m discordant pairs: the exact test, of a binomial distribution (McNemar 1947)."""
    terms = (math.lgamma(n + m + 1) - math.lgamma(i + 1) - math.lgamma(n + m - i + 1) for i in range(min(n, m) + 1))
    return min(1.0, 2 * math.fsum(math.exp(term - (n + m) * LN2) for term in terms))
