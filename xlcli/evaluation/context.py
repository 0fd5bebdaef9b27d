"""Loss by context length, with confidence intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.events import ContextBin
from xlcli.metrics import LN2, bits_per, context_bin_edges, half_width

BLOCK_TOKENS, LEAST_BLOCKS = 32, 5
"""Tokens of a block, and number of blocks of a bin, from which its uncertainty is estimated."""


class ContextSums:
    """Sums by context bin, for contexts of up to `longest` tokens.

    The margin of a bin comes from the standard error of a ratio of two sums over blocks (Cochran 1977, Sampling
    Techniques, section 6.4). Blocks are runs of up to `BLOCK_TOKENS` tokens, because the surprisals of neighboring
    tokens depend on each other.
    """

    def __init__(self, longest: int) -> None:
        self.edges = context_bin_edges(longest)
        self.nats, self.n_bytes, self.n_tokens, self.n_blocks = np.zeros((4, len(self.edges) - 1))
        self.products = np.zeros((3, len(self.edges) - 1))
        """Sums over blocks of nats squared, nats times bytes, and bytes squared."""

    def add(self, first: int, nats: NDArray[np.float64], n_bytes: NDArray[Any], n_tokens: NDArray[Any]) -> None:
        """Adds values (b t) of tokens; those of the first column have a context of `first` + 1 tokens.

        Tokens with a longer context than `longest` are left out.
        """
        contexts = np.arange(first + 1, min(first + nats.shape[1], self.edges[-1] - 1) + 1)
        if not len(contexts):
            return
        nats, n_bytes, n_tokens = (part[:, : len(contexts)] for part in (nats, n_bytes, n_tokens))
        bins = np.searchsorted(self.edges, contexts, "right") - 1
        starts = np.flatnonzero(np.diff(bins, prepend=-1) | ((contexts - 1) % BLOCK_TOKENS == 0))
        x, y, n = (np.add.reduceat(part, starts, axis=1, dtype=np.float64) for part in (nats, n_bytes, n_tokens))
        totals = (self.nats, self.n_bytes, self.n_tokens, self.n_blocks, *self.products)
        for total, part in zip(totals, (x, y, n, n > 0, x * x, x * y, y * y), strict=True):
            np.add.at(total, bins[starts], part.sum(0))

    def bins(self) -> tuple[ContextBin, ...]:
        """The loss in each context bin that has tokens."""
        return tuple(
            ContextBin(
                start=self.edges[i],
                stop=self.edges[i + 1],
                tokens=int(self.n_tokens[i]),
                bits_per_byte=bits_per(float(self.nats[i]), int(self.n_bytes[i])),
                margin=self._margin(i),
            )
            for i in np.flatnonzero(self.n_tokens).tolist()
        )

    def _margin(self, i: int) -> float | None:
        """Half the width of the 95 % confidence interval of bin `i`; None if it has too few blocks."""
        blocks, n_bytes = int(self.n_blocks[i]), float(self.n_bytes[i])
        if blocks < LEAST_BLOCKS or not n_bytes:
            return None
        ratio = float(self.nats[i]) / n_bytes
        squares = max(0.0, float(np.dot(self.products[:, i], (1.0, -2 * ratio, ratio * ratio))))
        return half_width(math.sqrt(squares * blocks / (blocks - 1)) / n_bytes / LN2, blocks - 1)
