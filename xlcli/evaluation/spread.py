"""Spread of a score over documents, and comparisons of two evaluations of the same documents or pairs.

Documents are those that were scored each as if alone: rows, files, lines, or rows between two resets. Every 95 %
interval is Student's t. The error of bits per byte, a ratio of sums, is the jackknife's (Tukey 1958), and its degrees
of freedom come from the effective number of documents (Kish 1965): a few long ones among short ones are few.
`benchmarks/intervals.py` measures how often the intervals hold. Two evaluations are compared document by document, so
what makes a document hard for both cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.events import Comparison, Discordance, PairShare, Score, Spread
from xlcli.metrics import LN2, half_width

LEAST_DOCUMENTS = 5  # fewer documents have no interval
LEAST_EXCESS = 5e-4  # bits per byte; a smaller difference of memory lengths is worth no remark
LEAST_FREEDOM = 2.0  # if one document is nearly the whole text, its interval is that of three documents of one size


def spread_of(sums: NDArray[Any], less: NDArray[Any] | None = None) -> Spread:
    """Returns bits per byte of a text, and their mean over documents (d 2: bits, bytes); `less` is subtracted."""
    ratio, changes, values = _parts(sums)
    if less is not None:
        less_ratio, less_changes, less_values = _parts(less)
        ratio -= less_ratio
        changes -= less_changes
        values -= less_values
    n = len(sums)
    mean = float(values.mean())
    if n < LEAST_DOCUMENTS:
        return Spread(n, ratio, None, None, mean, None, None)
    # The error of the whole text is the jackknife's. Its degrees of freedom are those of documents of one size.
    sizes = sums[:, 1]
    n_effective = float(sizes.sum() ** 2 / np.square(sizes).sum())
    error = math.sqrt((n - 1) / n * np.square(changes).sum())
    margin = half_width(error, max(LEAST_FREEDOM, n_effective - 1))
    # The error of the mean over documents is the usual one.
    mean_margin = half_width(float(values.std(ddof=1)) / math.sqrt(n), n - 1)
    low, mean_low = ratio - margin, mean - mean_margin
    if less is None:  # no text costs less than nothing
        low, mean_low = max(low, 0.0), max(mean_low, 0.0)
    return Spread(n, ratio, low, ratio + margin, mean, mean_low, mean + mean_margin)


def _parts(sums: NDArray[Any]) -> tuple[float, NDArray[Any], NDArray[Any]]:
    """Bits per byte of a text, their change when each document is left out (d), and those of each document (d)."""
    bits, sizes = sums.T
    ratio = float(bits.sum() / sizes.sum())
    changes = (ratio * sizes - bits) / (sizes.sum() - sizes)
    return ratio, changes, bits / sizes


def compare(score: Score, other: Score) -> Comparison | None:
    """A score less another one of the same documents or pairs; None if they are others, or if it is a single one."""
    if score.pairs and other.pairs:
        return Comparison(pairs=tuple(map(discordance, score.pairs, other.pairs)))
    if not score.sums or len(score.sums) != len(other.sums):
        return None
    return Comparison(spread=spread_of(np.array(score.sums), np.array(other.sums)))


def seed_difference(scores: Sequence[Score], others: Sequence[Score]) -> dict[str, Any]:
    """Difference of the means of two groups, each of several training seeds, with its 95 % interval (Welch 1947).

    `to` are the other models. The figure is `share` of pairs of texts, else `bits_per_byte`; `low` and `high` bound it.
    """
    figure = "share" if scores[0].pairs else "bits_per_byte"
    values = [getattr(score.pairs[0] if score.pairs else score, figure) for score in scores]
    other_values = [getattr(score.pairs[0] if score.pairs else score, figure) for score in others]
    difference = fmean(values) - fmean(other_values)
    error, other_error = variance(values) / len(values), variance(other_values) / len(other_values)  # squared
    squared_error = error + other_error
    margin = 0.0
    if squared_error > 0:
        freedom = squared_error**2 / (error**2 / (len(values) - 1) + other_error**2 / (len(other_values) - 1))
        margin = half_width(math.sqrt(squared_error), freedom)
    bounds = {"low": difference - margin, "high": difference + margin}
    return {"to": [score.model for score in others], figure: difference, **bounds}


def remark_on_memory(scores: Sequence[Score], trained: int) -> str | None:
    """Returns a sentence on a memory that costs more than the next shorter one, with the likely reason, or None."""
    within_noise = None  # a sentence on a cost that may be chance, for the case that there is no clear one
    for shorter, longer in pairwise(sorted(scores, key=lambda score: score.mem_len)):
        excess = longer.bits_per_byte - shorter.bits_per_byte
        if excess < LEAST_EXCESS or shorter.pairs:  # pairs are not compared by bits
            continue
        costs = f"a memory of {longer.mem_len} costs {excess:.4f} bits per byte more than {shorter.mem_len}"
        comparison = compare(longer, shorter)
        low = None
        if comparison is not None and comparison.spread is not None:
            low = comparison.spread.bits_per_byte_low
        is_within_noise = low is not None and low <= 0
        if is_within_noise:
            within_noise = f"{costs}, which lies within the 95 % interval of the difference"
            continue
        if shorter.mem_len == 0:
            unit = "segments" if shorter.stride is None else "overlapping windows"
            return f"{costs}: without memory a token sees those before it in {unit} of {shorter.segment_len} tokens"
        if longer.mem_len > trained:
            return f"{costs}: the model was trained with {trained}, and a longer memory need not help"
        return costs
    return within_noise


def discordance(pairs: PairShare, other: PairShare) -> Discordance:
    """The pairs that another model orders the other way round."""
    only_model = only_other = 0
    for sign, other_sign in zip(pairs.signs, other.signs, strict=True):
        only_model += sign > 0 > other_sign
        only_other += sign < 0 < other_sign
    return Discordance(pairs.group, only_model, only_other, mcnemar(only_model, only_other))


def mcnemar(n: int, m: int) -> float:
    """Two-sided p value of n and m discordant pairs: the exact test, of a binomial distribution (McNemar 1947)."""
    total = n + m
    probabilities = []
    for i in range(min(n, m) + 1):
        log_ways = math.lgamma(total + 1) - math.lgamma(i + 1) - math.lgamma(total - i + 1)  # to choose i of the total
        probabilities.append(math.exp(log_ways - total * LN2))
    return min(1.0, 2 * math.fsum(probabilities))
