"""Pairs of texts: how often a model gives the first one the higher probability.

The texts of a pair are successive documents, each scored as if it were alone, with its line end. Two comparisons: of
probabilities, and of means per token, which do not prefer the shorter text. Equal ones count half.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.evaluation.text import TokenizedText
from xlcli.events import PairScore, PairShare, Row
from xlcli.metrics import LN2, share_interval


class Pairs:
    """The pairs of a text.

    Args:
        by: Key of a row that names its group; None for no groups.
    """

    def __init__(self, by: str | None) -> None:
        self.by = by
        self._wins: dict[str | None, tuple[int, float, float]] = {}

    def compare(self, text: TokenizedText, nats: NDArray[Any]) -> Iterator[Row | PairScore]:
        """Each pair after its row, which has the key `by`, given the surprisal of each token (n)."""
        bits = np.add.reduceat(nats, text.documents, dtype=np.float64) / LN2
        sizes = np.diff(text.documents, append=len(nats))
        for i, (_, fields) in enumerate(text.part.corpus.rows()):
            if i % 2 == 0:
                continue
            (first, second), (n_first, n_second) = bits[i - 1 : i + 1].tolist(), sizes[i - 1 : i + 1].tolist()
            won = (1.0 + float(np.sign(second - first))) / 2
            won_per_token = (1.0 + float(np.sign(second / n_second - first / n_first))) / 2
            for group in (None,) if self.by is None else (None, str(fields[self.by])):
                n, wins, per_token = self._wins.get(group, (0, 0.0, 0.0))
                self._wins[group] = n + 1, wins + won, per_token + won_per_token
            yield Row(i // 2 + 1, fields)
            yield PairScore(i // 2 + 1, first, second, n_first, n_second)

    @property
    def shares(self) -> tuple[PairShare, ...]:
        """Results of all pairs compared so far, and of each group."""
        groups = self._wins.items()
        return tuple(PairShare(g, n, won / n, *share_interval(won / n, n), other / n) for g, (n, won, other) in groups)
