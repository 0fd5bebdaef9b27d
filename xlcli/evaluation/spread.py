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

RESAMPLES, MOST_UNITS = 10_000, 2_000
"""Number of resamples, and of units that are drawn: documents, or random groups of them if there are more."""
BLOCK = 2**20
"""Number of units that are drawn at a time."""


def spread_of(sums: NDArray[Any], less: NDArray[Any] | None = None) -> Spread:
    """Spread of an evaluation, given bits and bytes of each document (d 2), or of its difference to another one."""
    units = np.hstack([_units(each) for each in (sums, less) if each is not None])
    totals = np.vstack((units.sum(0), resampled(units)))
    means = _means(totals[:, :4]) - (0.0 if less is None else _means(totals[:, 4:]))
    (low, mean_low), (high, mean_high) = np.quantile(means[1:], (0.025, 0.975), axis=0).tolist()
    bits_per_byte, mean = means[0].tolist()
    return Spread(len(sums), RESAMPLES, bits_per_byte, low, high, mean, mean_low, mean_high)


def resampled(units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums (r k) of the columns of units (u k) over resamples, which depend on the number of units only."""
    n, random, parts = len(units), np.random.default_rng(0), []
    for start in range(0, RESAMPLES, rows := max(1, BLOCK // n)):
        drawn = random.integers(n, size=(min(rows, RESAMPLES - start), n))
        parts.append(np.stack([column[drawn].sum(1) for column in np.ascontiguousarray(units.T)], 1))
    return np.concatenate(parts)


def _units(sums: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of bits, bytes, bits per byte and documents (u 4) of each unit, which are the same for any values."""
    n, n_units = len(sums), min(len(sums), MOST_UNITS)
    documents = np.column_stack((sums, sums[:, 0] / sums[:, 1], np.ones(n)))
    order = np.random.default_rng(0).permutation(n)
    return np.add.reduceat(documents[order], np.arange(n_units) * n // n_units, axis=0, dtype=np.float64)


def _means(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits per byte of the text, and their mean over documents (r 2), given sums as of units (r 4)."""
    return sums[:, ::2] / sums[:, 1::2]


def compare(score: Score, other: Score) -> Comparison | None:
    """A score less another one of the same documents or pairs; None if they are others, or if it is a single one."""
    if score.pairs and other.pairs:
        return Comparison(pairs=tuple(map(discordance, score.pairs, other.pairs)))
    if not score.sums or len(score.sums) != len(other.sums):
        return None
    return Comparison(spread=spread_of(np.array(score.sums), np.array(other.sums)))


def discordance(pairs: PairShare, other: PairShare) -> Discordance:
    """The pairs that another model orders the other way round."""
    reversed_by = Counter(sign for sign, its in zip(pairs.signs, other.signs, strict=True) if sign * its < 0)
    return Discordance(pairs.group, reversed_by[1], reversed_by[-1], mcnemar(reversed_by[1], reversed_by[-1]))


def mcnemar(n: int, m: int) -> float:
    """Two-sided p value of n and m discordant pairs: the exact test, of a binomial distribution (McNemar 1947)."""
    terms = (math.lgamma(n + m + 1) - math.lgamma(i + 1) - math.lgamma(n + m - i + 1) for i in range(min(n, m) + 1))
    return min(1.0, 2 * math.fsum(math.exp(term - (n + m) * LN2) for term in terms))
