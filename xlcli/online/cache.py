"""A cache over what was read: tokens that followed the same context before.

After Grave et al. 2017, "Improving Neural Language Models with a Continuous Cache", with exact contexts, as in
prediction by partial matching (Cleary and Witten 1984), in place of similar hidden states. The distribution p_0 of the
model is mixed with the distributions c_k of the tokens that followed the last k tokens before, of ascending order k:

    p_k = (1 - w) p_{k-1} + w c_k

The weight w depends on the order, the number of followers, and how many of them differ. After each token of the text it
moves towards the posterior probability w c_k / p_k of the token, which is online expectation maximization.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xlcli.memory.context_cache import N_DISTINCT, N_TOTALS, ORDERS, ContextCache, ContextIndex, Followers
from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.state import State

if TYPE_CHECKING:
    from xlcli.online import Reader

INITIAL_WEIGHT = 0.1
"""Weight of every class before the first token."""
INITIAL_UPDATES = 8.0
"""Number of updates that the initial weight stands for."""
RATE = 0.02
"""Minimum share of a posterior probability in an update; earlier ones have the mean of all updates."""
LIMITS = 1e-4, 0.9995
"""Minimum and maximum of a weight."""


@dataclass(frozen=True)
class CachedModel:
    """Reader of one sequence with a cache over another reader.

    Attributes:
        inner: Reader whose predictions are mixed with the cache's.
        settings: Keys of the configuration by which a saved state must be continued, and their values;
            `context_cache` is the number of latest tokens that count.
    """

    inner: Reader
    settings: Mapping[str, Any]

    def init_state(self, batch: int, **options: Any) -> State:
        """State before the first token, with an empty cache; arguments as for `LanguageModel.init_state`."""
        initial = torch.tensor((INITIAL_WEIGHT, INITIAL_UPDATES), dtype=torch.float64)
        weights = initial[:, None, None, None].repeat(1, len(ORDERS), N_TOTALS, N_DISTINCT)
        none = torch.empty(0, dtype=torch.float64)
        value = ContextCache(self.settings, ContextIndex(self.settings["context_cache"]), weights, none)
        return replace(self.inner.init_state(batch, **options), cache=value)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        """Surprisal in nats of each target (1 n) after its token, the last n of tokens (1 t), and the new state."""
        value = _value(state)
        out = self.inner.score(tokens, targets, state, readout=None if readout is None else lambda log_p: log_p)
        weights, index = value.weights.numpy(), value.index
        n_unscored = tokens.shape[1] - targets.shape[1]
        read, known = tokens[0].tolist(), targets[0].tolist()
        for token, target in itertools.pairwise(read[: n_unscored + 1]):
            index.read(token)
            index.learn(target)
        own, kept = out.nll[0].double().neg().exp().tolist(), []
        for i, (token, target) in enumerate(zip(read[n_unscored:], known, strict=True)):
            index.read(token)
            if readout is not None and out.readout is not None:
                kept.append(readout(_mixed(out.readout[0, i].double().cpu(), value)[None, None]))
            own[i] = _update(weights, index, own[i], target)
            index.learn(target)
        nll = -torch.tensor([own], dtype=torch.float64, device=out.nll.device).log()
        state = replace(out.state, cache=replace(value, predicted=value.predicted[:0]))
        return out._replace(nll=nll.to(out.nll.dtype), state=state, readout=torch.cat(kept, dim=1) if kept else None)

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities (1 v) of the next token after tokens (1 t), and the new state."""
        value = _value(state)
        logits, state = self.inner.logits(tokens, state)
        for token in tokens[0].tolist():
            value.index.read(token)
        own = logits[0].double().cpu().log_softmax(-1)
        state = replace(state, cache=replace(value, predicted=own))
        return _mixed(own, value)[None].to(logits.device), state

    def observe(self, targets: Tensor, state: State) -> State:
        """State after the target (1) of the last prediction is known."""
        value, target = _value(state), int(targets)
        _update(value.weights.numpy(), value.index, float(value.predicted[target].exp()), target)
        value.index.learn(target)
        return replace(self.inner.observe(targets, state), cache=replace(value, predicted=value.predicted[:0]))

    def reset(self, state: State) -> State:
        """State with empty memory at the beginning of a text; the cache remains."""
        return self.inner.reset(state)


def _value(state: State) -> ContextCache:
    assert isinstance(state.cache, ContextCache)
    return state.cache


def _mixed(own: Tensor, value: ContextCache) -> Tensor:
    """Log-probabilities (v) of the next token by the mixture, given the model's in float64."""
    mixed, weights = own.exp(), value.weights.numpy()
    for followers in value.index.followers():
        weight = float(weights[0][_class(followers)])
        mixed *= 1 - weight
        share = weight / followers.total
        for token, count in followers.counts.items():
            mixed[token] += share * count
    return mixed.clamp_min(sys.float_info.min).log()


def _class(followers: Followers) -> tuple[int, int, int]:
    """Index of the weight of a context."""
    n_bits = followers.total.bit_length()
    return followers.order, min(n_bits, N_TOTALS - 1), min(len(followers.counts), N_DISTINCT) - 1


def _update(weights: Any, index: ContextIndex, probability: float, target: int) -> float:
    """Probability of the target by the mixture, given the model's; the weights (2 o n d) are updated."""
    low, high = LIMITS
    probability = max(probability, sys.float_info.min)
    for followers in index.followers():
        at = _class(followers)
        weight, n_updates = float(weights[0][at]), float(weights[1][at])
        share = weight * followers.counts.get(target, 0) / followers.total
        probability = (1 - weight) * probability + share
        rate = max(RATE, 1 / (n_updates + 1))
        weights[0][at] = min(max(weight + rate * (share / probability - weight), low), high)
        weights[1][at] = n_updates + 1
    return probability
