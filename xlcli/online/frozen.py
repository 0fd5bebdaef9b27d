"""A model that begins each text in the same state, the baseline, and learns nothing from one for the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

    Attributes:
        baseline: The state, for saving. Its cache shares tables with the live one, but none of its values.
    """

    def __init__(self, scorer: Scorer, state: State) -> None:
        self._scorer = _with_fixed_weights(scorer, state)
        # Without unused rows, so that no call writes into the buffers of the baseline.
        self._live = state.map(lambda tensor: tensor)
        self.baseline = self._live
        if self._live.cache is not None:
            self.baseline = replace(self._live, cache=self._live.cache.snapshot())

    def init_state(self, batch: int, *args: Any, **settings: Any) -> State:
        return self._scorer.init_state(batch, *args, **settings)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        return self._scorer.score(tokens, targets, state, readout=readout)

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        return self._scorer.logits(tokens, state)

    def reset(self, state: State) -> State:
        """The baseline; `state`, which came from it, must not be used any more."""
        live, before = self._live.cache, self.baseline.cache
        if isinstance(live, ContextCache) and isinstance(before, ContextCache):
            live.go_back(before, n_tokens=state.seen - self.baseline.seen)
        return self._live


def _with_fixed_weights(scorer: Scorer, state: State) -> Scorer:
    """The scorer with the adapted weights of a state, which do not change any more."""
    if isinstance(scorer, CachedModel):
        return replace(scorer, inner=_with_fixed_weights(scorer.inner, state), step=1)
    if isinstance(scorer, AdaptiveModel):
        return scorer.network_of(state)
    return scorer
