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
        self._wins: dict[str | None, list[tuple[float, float]]] = {None: []}

    def compare(self, text: TokenizedText, nats: NDArray[Any]) -> Iterator[Row | PairScore]:
        """Each pair behind its row, which has the key `by`, given the surprisal of each token (n)."""
        bits = np.add.reduceat(nats, text.documents, dtype=np.float64) / LN2
        sizes = np.diff(text.documents, append=len(nats))
        for i, (_, fields) in enumerate(text.part.corpus.rows()):
            if i % 2 == 0:
                continue
            first, second = (float(bits[j]) for j in (i - 1, i))
            n_first, n_second = (int(sizes[j]) for j in (i - 1, i))
            number, won = i // 2 + 1, (_won(first, second), _won(first / n_first, second / n_second))
            self._wins[None].append(won)
            if self.by is not None:
                self._wins.setdefault(str(fields[self.by]), []).append(won)
            yield Row(number, fields)
            yield PairScore(number, first, second, n_first, n_second)

    @property
    def shares(self) -> tuple[PairShare, ...]:
        """Results of all pairs compared so far, and of each group."""
        found = []
        for group, wins in self._wins.items():
            share, per_token = np.mean(wins, axis=0).tolist()
            found.append(PairShare(group, len(wins), share, *share_interval(share, len(wins)), per_token))
        return tuple(found)


def _won(first: float, second: float) -> float:
    return 1.0 if first < second else 0.5 if first == second else 0.0
