"""Buckets of distances: exact near by, log-spaced farther away (Raffel et al. 2020, section 2.1, causal form)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bucket(distance: Tensor, *, n_buckets: int, max_distance: int) -> Tensor:
    """The bucket (int64, any shape) of each distance; those in the future are put into bucket 0.

    Distances below n_buckets // 2 have a bucket each; the others share what is left, log-spaced up to `max_distance`,
    and the last bucket takes all farther ones.
    """
    return torch.bucketize(distance, _edges(n_buckets, max_distance).to(distance.device), right=True)


def _edges(n_buckets: int, max_distance: int) -> Tensor:
    """The least distance (int64) of each bucket but the first."""
    exact = n_buckets // 2
    wide = n_buckets - exact
    ratio = max_distance / exact
    edges = list(range(1, exact + 1))
    for i in range(1, wide):
        edge = exact * ratio ** (i / wide)
        # A border that is a whole number but for rounding belongs to the bucket that begins there.
        edges.append(math.ceil(edge - 16 * math.ulp(edge)))
    return torch.tensor(edges)
