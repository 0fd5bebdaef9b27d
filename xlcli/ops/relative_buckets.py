"""Relative buckets of distances: exact for short, log-spaced for long ones (Raffel et al. 2020, sec. 2.1, causal)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_bucket(distance: Tensor, *, n_buckets: int, max_distance: int) -> Tensor:
    """Relative bucket (int64, any shape) of each distance; negative distances are in bucket 0.

    Each distance below n_buckets // 2 has a bucket of its own. The other buckets are log-spaced up to `max_distance`,
    and the last one contains all longer distances.
    """
    return torch.bucketize(distance, _edges(n_buckets, max_distance).to(distance.device), right=True)


def _edges(n_buckets: int, max_distance: int) -> Tensor:
    """Shortest distance (int64) of each bucket except the first."""
    exact = n_buckets // 2
    wide = n_buckets - exact
    ratio = max_distance / exact
    edges = list(range(1, exact + 1))
    for i in range(1, wide):
        edge = exact * ratio ** (i / wide)
        # An edge that is an integer up to rounding errors starts a bucket at that integer.
        edges.append(math.ceil(edge - 16 * math.ulp(edge)))
    return torch.tensor(edges)
