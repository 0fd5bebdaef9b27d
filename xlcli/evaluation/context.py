"""Loss by context length, with confidence intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.events import ContextBin
from xlcli.metrics import LN2, bits_per, context_bin_edges, half_width

LEAST_SEQUENCES = 5
"""Number of sequences with tokens in a bin from which its uncertainty is estimated."""


class ContextSums:
    """Sums by context bin, for contexts of up to `longest` tokens.

    The margin of a bin comes from the standard error of a ratio of two sums over sequences that start with empty memory
    (Cochran 1977, Sampling Techniques, section 6.4). Tokens of one sequence are no independent samples.
    """

    def __init__(self, longest: int) -> None:
        self.edges = context_bin_edges(longest)
        n_bins = len(self.edges) - 1
        self.nats, self.n_bytes, self.n_tokens, self.n_sequences = np.zeros((4, n_bins))
        self.products = np.zeros((3, n_bins))
        """Sums over sequences of nats squared, nats times bytes, and bytes squared."""
        self._open = np.zeros((3, 0, n_bins))
        """Nats, bytes and tokens of the sequences being read (b) in each bin."""

    def start(self, batch_size: int) -> None:
        """Begins a batch of sequences."""
        x, y, n = self._open
        totals = (self.nats, self.n_bytes, self.n_tokens, self.n_sequences, *self.products)
        for total, part in zip(totals, (x, y, n, n > 0, x * x, x * y, y * y), strict=True):
            total += part.sum(0)
        self._open = np.zeros((3, batch_size, len(self.nats)))

    def add(self, first: int, nats: NDArray[np.float64], n_bytes: NDArray[Any], n_tokens: NDArray[Any]) -> None:
        """Adds values (b t) of the next tokens; those of the first column have a context of `first` + 1 tokens.

        Tokens with a longer context than `longest` are left out.
        """
        contexts = np.arange(first + 1, min(first + nats.shape[1], self.edges[-1] - 1) + 1)
        if not len(contexts):
            return
        bins, columns = np.unique(np.searchsorted(self.edges, contexts, "right") - 1, return_index=True)
        for total, part in zip(self._open, (nats, n_bytes, n_tokens), strict=True):
            total[:, bins] += np.add.reduceat(part[:, : len(contexts)], columns, axis=1, dtype=np.float64)

    def bins(self) -> tuple[ContextBin, ...]:
        """The loss in each context bin that has tokens."""
        self.start(0)
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
        """Half the width of the 95 % confidence interval of bin `i`; None if it has too few sequences."""
        n, n_bytes = int(self.n_sequences[i]), float(self.n_bytes[i])
        if n < LEAST_SEQUENCES or not n_bytes:
            return None
        ratio = float(self.nats[i]) / n_bytes
        squares = max(0.0, float(np.dot(self.products[:, i], (1.0, -2 * ratio, ratio * ratio))))
        return half_width(math.sqrt(squares * n / (n - 1)) / n_bytes / LN2, n - 1)
