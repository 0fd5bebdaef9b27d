"""A cache of what followed the same contexts before, which corrects predictions by `xlcli.kernels.mixture`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.memory.context_cache import ContextCache, new_index, new_learned
from xlcli.memory.online import UNKNOWN
from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.state import State

if TYPE_CHECKING:
    from xlcli.online import Scorer

MOST_LOGITS = 2**21  # number of log-probabilities in RAM at once, if a step of the scorer does not have more


@dataclass(frozen=True)
class CachedModel:
    """Scorer of one sequence with a cache over another scorer."""

    inner: Scorer  # scorer whose predictions are corrected
    settings: Mapping[str, Any]  # a saved state must have the same; `context_cache` is the number of latest tokens
    line_ends: NDArray[np.bool_]  # true for those of the ids (v) that end a line
    step: int = 1  # number of tokens that the scorer takes at once; it is called with multiples

    def init_state(self, batch: int, **options: Any) -> State:
        index = new_index(self.settings["context_cache"])
        cache = ContextCache(self.settings, new_learned(len(self.line_ends)), index)
        return replace(self.inner.init_state(batch, **options), cache=cache)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        n_tokens = tokens.shape[1]
        n_unscored = n_tokens - targets.shape[1]
        followers = torch.cat((tokens[:, 1 : n_unscored + 1], targets), dim=1)
        part_len = self.step * max(1, MOST_LOGITS // (len(self.line_ends) * self.step))
        outs = []
        for start in range(0, n_tokens, part_len):
            part = slice(start, start + part_len)
            first_scored = max(0, n_unscored - start)
            out = self._score_part(tokens[:, part], followers[:, part], first_scored, state, readout)
            state = out.state
            outs.append(out)
        return ScoreOutput.join(outs)

    def _score_part(
        self, tokens: Tensor, targets: Tensor, first_scored: int, state: State, readout: Readout | None
    ) -> ScoreOutput:
        """`score` of a part that fits into RAM: tokens (1 t) and what follows each; changes the cache in place.

        Those before `first_scored` are stored, but neither predicted nor learned from.
        """
        out = self.inner.score(tokens, targets, state, readout=Readout())
        assert out.readout is not None
        if out.nll.isnan().any():  # weights have diverged; nothing is learned from them
            return out._replace(nll=out.nll[:, first_scored:], readout=None)
        texts = torch.cat((tokens, targets))
        nats, features = self.mix(state, texts, out.readout[:, first_scored:], readout)
        return ScoreOutput(nats.to(out.nll), out.state, out.ponder, features)

    def mix(
        self, state: State, texts: Tensor, predictions: Tensor, readout: Readout | None
    ) -> tuple[Tensor, Tensor | None]:
        """Reads texts (2 t), tokens and what follows each, into the cache of a state, in place.

        `predictions` (1 n v) are log-probabilities by the other scorer of what follows the last n tokens. Returns
        surprisal (1 n) of these followers, and what `readout` keeps of each mixed prediction.
        """
        mixed = self._read(texts, predictions, state)
        targets = texts[None, 1, texts.shape[1] - mixed.shape[1] :].cpu()
        nats = -mixed.gather(2, targets[..., None])[..., 0]
        return nats, None if readout is None else readout(mixed, targets)

    def _read(self, texts: Tensor, predictions: Tensor, state: State) -> Tensor:
        """Mixed log-probabilities (1 n v); arguments as for `mix`, but followers may be `UNKNOWN`."""
        from xlcli.kernels.mixture import read

        cache = state.cache
        assert isinstance(cache, ContextCache)
        if cache.unread:
            no_predictions = np.empty((0, len(self.line_ends)))
            read(cache.index, cache.learned, self.line_ends, cache.unread.pop(), no_predictions)
        tokens_and_followers = np.ascontiguousarray(texts.cpu().numpy())
        mixed = np.array(predictions[0].double().cpu().numpy(), order="C")
        read(cache.index, cache.learned, self.line_ends, tokens_and_followers, mixed)
        return torch.from_numpy(mixed)[None]

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities (1 v) of the next token after tokens (1 t), and the new state."""
        logits, after = self.inner.logits(tokens, state)
        texts = torch.cat((tokens, torch.full_like(tokens, UNKNOWN)))
        mixed = self._read(texts, logits[None].double().log_softmax(-1), after)
        return mixed[0].to(logits.device), after

    def reset(self, state: State) -> State:
        """State with empty memory at the beginning of a text; the cache remains."""
        return self.inner.reset(state)
