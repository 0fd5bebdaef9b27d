"""A model that begins each text in the same state, the baseline, and learns nothing from one for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xlcli.memory.context_cache import ContextCache
from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.online.adaptation import AdaptiveModel
from xlcli.online.mixture import CachedModel
from xlcli.state import State

if TYPE_CHECKING:
    from xlcli.online import Scorer


class FrozenModel:
    """Scorer whose `reset` returns to a state, which it takes over, at a cost that its cache does not change.

    In a text memory and context cache go on as in a copy of the baseline; adapted weights stand still.
    """

    def __init__(self, scorer: Scorer, state: State) -> None:
        self._scorer = _with_fixed_weights(scorer, state)
        # Without unused rows, so that no call writes into the buffers of the baseline.
        self._live = state.map(lambda tensor: tensor)
        self.baseline = self._live  # the state, for saving; its cache shares tables with the live one, but no values
        if self._live.cache is not None:
            self.baseline = replace(self._live, cache=self._live.cache.snapshot())

    def init_state(self, batch: int, *args: Any, **settings: Any) -> State:
        return self._scorer.init_state(batch, *args, **settings)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        return self._scorer.score(tokens, targets, state, readout=readout)

    def score_each(
        self, texts: Sequence[Tensor], first_token: int, *, readout: Readout | None = None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Scores each text (t) from the same state, in one call of the model: surprisal (1 t) and features (1 t f).

        It is as if each were read after `reset`, with `first_token` before it. The state does not change.
        """
        n_tokens = 1 + max(map(len, texts))
        # A row for each text. What stands behind a shorter text changes none of its scores.
        rows = texts[0].new_full((len(texts), n_tokens), first_token)
        for row, text in zip(rows, texts, strict=True):
            row[1 : 1 + len(text)] = text
        state = self._live.map(lambda tensor: tensor.expand(len(texts), *tensor.shape[1:]))
        scorer = self._scorer
        cached: CachedModel | None = None
        readout_of_network = readout
        if isinstance(scorer, CachedModel):
            # The cache reads one text at a time, and needs all predictions of the network.
            cached, scorer, readout_of_network = scorer, scorer.inner, Readout()
        out = scorer.score(rows[:, :-1], rows[:, 1:], state, readout=readout_of_network)
        scores = []
        for number, text in enumerate(texts):
            row_of_text = (slice(number, number + 1), slice(len(text)))
            nats = out.nll[row_of_text]
            features = None if out.readout is None else out.readout[row_of_text]
            have_weights_diverged = bool(nats.isnan().any())
            if cached is not None and features is not None and not have_weights_diverged:
                tokens_and_targets = torch.stack((rows[number, : len(text)], text))
                nats, features = cached.mix(self._live, tokens_and_targets, features, readout)
                self._restore_cache(len(text))
            scores.append((nats, features))
        return scores

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        return self._scorer.logits(tokens, state)

    def reset(self, state: State) -> State:
        """The baseline; `state`, which came from it, must not be used any more."""
        self._restore_cache(state.seen - self.baseline.seen)
        return self._live

    def _restore_cache(self, n_tokens: int) -> None:
        """Makes the live cache, which has read `n_tokens` since, equal to that of the baseline."""
        live, before = self._live.cache, self.baseline.cache
        if isinstance(live, ContextCache) and isinstance(before, ContextCache):
            live.go_back(before, n_tokens)


def _with_fixed_weights(scorer: Scorer, state: State) -> Scorer:
    """The scorer with the adapted weights of a state, which do not change any more."""
    if isinstance(scorer, CachedModel):
        return replace(scorer, inner=_with_fixed_weights(scorer.inner, state), step=1)
    if isinstance(scorer, AdaptiveModel):
        return scorer.network_of(state)
    return scorer
