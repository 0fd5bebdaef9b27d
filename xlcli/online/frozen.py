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

    Within a text the memory moves on and the context cache learns, as they do in a copy of the baseline. Adapted
    weights stand still.
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
        """Surprisal (1 t) and features (1 t f) of each text (t), as after `reset` with `first_token` unread.

        The model reads all texts in one call, each as a row from the same memory. The state is the baseline before and
        after.
        """
        n_tokens = 1 + max(map(len, texts))
        rows = texts[0].new_full((len(texts), n_tokens), first_token)  # what stands behind a text changes no score
        for row, text in zip(rows, texts, strict=True):
            row[1 : 1 + len(text)] = text
        state = self._live.map(lambda tensor: tensor.expand(len(texts), *tensor.shape[1:]))
        cached = self._scorer if isinstance(self._scorer, CachedModel) else None
        network = self._scorer if cached is None else cached.inner
        kept = readout if cached is None else Readout()
        out = network.score(rows[:, :-1], rows[:, 1:], state, readout=kept)
        scores = []
        for number, text in enumerate(texts):
            place = (slice(number, number + 1), slice(len(text)))
            features = None if out.readout is None else out.readout[place]
            nats = out.nll[place]
            if cached is not None and features is not None and not nats.isnan().any():
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
