"""A cache over what was read: tokens that followed the same contexts before, mixed with the model's predictions.

As in compressors of the PAQ family, contexts of several lengths and the model vote in the logistic domain with weights
that are learned online. `xlcli.kernels.mixture` has the arithmetic and its sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.memory.context_cache import N_COUNTED, N_READ, ContextCache, n_leaves, new_index, new_mixer
from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.state import State
from xlcli.text.base import Tokenizer

if TYPE_CHECKING:
    from xlcli.online import Scorer

MOST_LOGITS = 2**21  # number of log-probabilities in RAM at once, if a step of the scorer does not have more
NO_ID = -1


class Spelling:
    """Order of a vocabulary, and its line end. Ids whose text depends on their place are in their own order.

    Attributes:
        leaf_of: Leaf (v) of each id in a binary tree, as a number of a node: children of n are 2n and 2n + 1.
        line_end: Id of a line end, `NO_ID` if it is no id of its own.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        order = np.arange(vocab_size)
        if tokenizer.id_sizes is None:
            self.line_end = tokenizer.start_id
        else:
            # A model may have more ids than the tokenizer, as padding of its table; they come last.
            n = min(tokenizer.vocab_size, vocab_size)
            order[:n] = sorted(range(n), key=tokenizer.texts.__getitem__)
            ids = tokenizer.encode(b"\n")
            self.line_end = int(ids[0]) if len(ids) == 1 else NO_ID
        self.leaf_of: NDArray[np.int64] = np.empty(vocab_size, np.int64)
        self.leaf_of[order] = n_leaves(vocab_size) + np.arange(vocab_size)


@dataclass(frozen=True)
class CachedModel:
    """Scorer of one sequence with a cache over another scorer.

    Attributes:
        inner: Reader whose predictions are mixed with the cache's.
        step: Number of tokens that the scorer takes at once; it is called with multiples.
        settings: Keys of the configuration by which a saved state must be continued, and their values;
            `context_cache` is the number of latest tokens that count.
        spelling: Order of the vocabulary.
    """

    inner: Scorer
    settings: Mapping[str, Any]
    spelling: Spelling
    step: int = 1

    def init_state(self, batch: int, **options: Any) -> State:
        vocab_size = len(self.spelling.leaf_of)
        index = new_index(self.settings["context_cache"], vocab_size)
        value = ContextCache(self.settings, new_mixer(vocab_size), index)
        return replace(self.inner.init_state(batch, **options), cache=value)

    def score(self, tokens: Tensor, targets: Tensor, state: State, *, readout: Readout | None = None) -> ScoreOutput:
        n_unscored = tokens.shape[1] - targets.shape[1]
        followers = torch.cat((tokens[:, 1 : n_unscored + 1], targets), dim=1)
        return ScoreOutput.join(self._score_parts(tokens, followers, n_unscored, state, readout))

    def _score_parts(
        self, tokens: Tensor, targets: Tensor, n_unscored: int, state: State, readout: Readout | None
    ) -> Iterator[ScoreOutput]:
        """`score` of tokens (1 t) in parts that fit into RAM."""
        logits_per_step = len(self.spelling.leaf_of) * self.step
        part_len = self.step * max(1, MOST_LOGITS // logits_per_step)
        for start in range(0, tokens.shape[1], part_len):
            part = slice(start, start + part_len)
            out = self._score_part(tokens[:, part], targets[:, part], n_unscored - start, state, readout)
            state = out.state
            yield out

    def _score_part(
        self, tokens: Tensor, targets: Tensor, n_unscored: int, state: State, readout: Readout | None
    ) -> ScoreOutput:
        """`score` of tokens (1 t) and what follows each.

        The first `n_unscored` are stored, but neither predicted nor learned from by the mixer; it may be negative. The
        kernels change index and mixer of the cache in place.
        """
        kernels, cache = self._filled(state)
        out = self.inner.score(tokens, targets, state, readout=Readout())
        assert out.readout is not None
        first_scored = min(max(0, n_unscored), tokens.shape[1])
        if out.nll.isnan().any():  # weights have diverged; nothing is learned from them
            return out._replace(nll=out.nll[:, first_scored:], readout=None)
        texts = torch.cat((tokens, targets))
        unscored = texts[:, :first_scored].cpu().numpy()
        kernels.fill(cache.index, self.spelling.leaf_of, self.spelling.line_end, *unscored)
        nats, features = self.mix(state, texts[:, first_scored:], out.readout[:, first_scored:], readout)
        return ScoreOutput(nats.to(out.nll), out.state, out.ponder, features)

    def mix(
        self, state: State, texts: Tensor, predictions: Tensor, readout: Readout | None
    ) -> tuple[Tensor, Tensor | None]:
        """Surprisal (1 t) of the second row of `texts` (2 t), and what `readout` keeps of each mixed prediction.

        The first row are the tokens before; `predictions` (1 t v) are log-probabilities of the other scorer. The
        kernels change index and mixer of the cache of `state` in place.
        """
        kernels, cache = self._filled(state)
        leaf_of, line_end = self.spelling.leaf_of, self.spelling.line_end
        tokens_and_targets = np.ascontiguousarray(texts.cpu().numpy())
        log_p = predictions[0].double().cpu().numpy()
        nats = np.empty(len(log_p))
        if readout is None:
            is_read = False
            kernels.score(cache.index, cache.mixer, leaf_of, line_end, log_p, tokens_and_targets, is_read, nats)
            return torch.from_numpy(nats)[None], None
        features = []
        for i in range(len(nats)):
            place = slice(i, i + 1)
            pair = np.ascontiguousarray(tokens_and_targets[:, place])
            kernels.read(cache.index, leaf_of, line_end, pair[0])
            mixed = kernels.distribution(cache.index, cache.mixer, leaf_of, log_p[i])
            features.append(readout(torch.from_numpy(mixed)[None, None], torch.from_numpy(pair[1:])))
            is_read = True
            kernels.score(cache.index, cache.mixer, leaf_of, line_end, log_p[place], pair, is_read, nats[place])
        return torch.from_numpy(nats)[None], torch.cat(features, dim=1) if features else None

    def logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities (1 v) of the next token after tokens (1 t), and the new state."""
        kernels, cache = self._filled(state)
        leaf_of, line_end = self.spelling.leaf_of, self.spelling.line_end
        logits, state = self.inner.logits(tokens, state)
        kernels.read(cache.index, leaf_of, line_end, tokens[0].cpu().numpy())
        log_p = logits[0].double().cpu().log_softmax(-1)
        mixed = log_p
        if not log_p.isnan().any():
            mixed = torch.from_numpy(kernels.distribution(cache.index, cache.mixer, leaf_of, log_p.numpy()))
        return mixed[None].to(logits.device), state

    def reset(self, state: State) -> State:
        """State with empty memory at the beginning of a text; the cache remains."""
        return self.inner.reset(state)

    def restore(self, cache: ContextCache, before: ContextCache, n_tokens: int) -> None:
        """Makes a cache, which has read `n_tokens` since, equal to its snapshot `before`, in place."""
        from xlcli.kernels import mixture as kernels

        if cache.unread:  # nothing was read since it was loaded
            return
        index, texts = cache.index, before.unread[0]
        if index.sizes[N_READ] == texts.shape[1] + n_tokens:
            kernels.take_back(index, self.spelling.leaf_of, n_tokens)
        else:  # a long text left no room, so that older tokens were forgotten
            for array in (index.owners, index.latest, index.earlier, index.counts):
                array[:] = 0
            index.sizes[[N_READ, N_COUNTED]] = 0
            kernels.fill(index, self.spelling.leaf_of, self.spelling.line_end, *texts.astype(np.int64))
        for array, saved in zip(cache.mixer, before.mixer, strict=True):
            array[...] = saved

    def _filled(self, state: State) -> tuple[ModuleType, ContextCache]:
        """The kernels, and the cache of a state; tokens that a saved state left unread are read into its tables."""
        from xlcli.kernels import mixture as kernels

        cache = state.cache
        assert isinstance(cache, ContextCache)
        if cache.unread:
            texts = cache.unread.pop().astype(np.int64)
            kernels.fill(cache.index, self.spelling.leaf_of, self.spelling.line_end, *texts)
        return kernels, cache
