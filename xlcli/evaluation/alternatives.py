"""The most probable words in the place of each word of a text, with their probabilities: what a cloze test measures.

Words are those of `xlcli.words`. The probability of one is the sum over the sequences of tokens that spell it, and that
the next token ends, given that the word before has ended. Sequences are searched from short to long. One that is less
probable than the last of the words asked for is not continued, so no word that has a more probable sequence is missed.
What is not continued belongs to `rest`, the probability of all other words.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xlcli.evaluation.passes import Pass
from xlcli.files import as_utf8
from xlcli.state import State
from xlcli.text.loaders import inputs_and_targets
from xlcli.words import Predictions, is_ended

ROWS = 16  # maximum number of sequences per call of the model
LEAST = 1e-5  # probability below which no sequence is continued
LINE_END = "\n"  # stands for the end of a line or of the text in the place of a word


class _Beginning(NamedTuple):
    """Probability, tokens and text of the beginning of a word."""

    probability: float
    ids: tuple[int, ...]
    text: bytes


class NextWords:
    """Columns `alternatives`, from word to probability, and `rest` of the words of a text, in order.

    Reads the text once more, in one sequence.
    """

    def __init__(self, run: Pass, predictions: Predictions) -> None:
        self._run, self._predictions = run, predictions
        self._state, self._n_read = run.lengths.init_state(run.model.network, np.zeros(1, np.int64)), 0

    @torch.inference_mode()
    def __call__(self, token: int, text: bytes, last: int | None) -> dict[str, Any]:
        """Columns of the word that begins with this token; arguments as of `Search`."""
        if b"\n" in text and not text.strip():  # no word
            return {}
        p = self._read(token)
        if last is not None:  # a word ended before this token, so only tokens that begin a word are possible
            begins = self._predictions.boundary_ids(last)
            p = torch.zeros_like(p).index_copy(0, begins, p[begins] / p[begins].sum())
        words: dict[str, float] = defaultdict(float)
        longer: list[_Beginning] = []
        rest = self._lengthen(_Beginning(1.0, (), b""), p, LEAST, words, longer)
        while longer:
            # The most probable ones first: the words that they spell raise the bar for the others.
            beginnings = sorted(longer, reverse=True)
            longer = []
            for first in range(0, len(beginnings), ROWS):
                batch = beginnings[first : first + ROWS]
                least = self._least(words)
                probable = [beginning for beginning in batch if beginning.probability >= least]
                rest += sum(beginning.probability for beginning in batch[len(probable) :])
                for beginning, p in zip(probable, self._after(probable), strict=True):
                    ends_word = self._predictions.boundary_ids(self._predictions.boundaries.last(beginning.text))
                    if len(ends_word):
                        words[_word(beginning.text)] += beginning.probability * float(p[ends_word].sum())
                    p_within_word = p.index_fill(0, ends_word, 0.0)
                    rest += self._lengthen(beginning, p_within_word, least, words, longer)
        best = heapq.nlargest(self._predictions.asked.alternatives, words, key=words.__getitem__)
        rest += sum(words[word] for word in words.keys() - best)
        return {"alternatives": {word: words[word] for word in best}, "rest": rest}

    def _lengthen(
        self, beginning: _Beginning, p: Tensor, least: float, words: dict[str, float], longer: list[_Beginning]
    ) -> float:
        """Probability of what is not continued of a beginning, by the probabilities (v) of the next token in the word.

        What is at least as probable as `least` is added to `longer`, or to `words` if the word ends after that token,
        whatever comes next.
        """
        texts, last = self._predictions.tokenizer.texts, self._predictions.boundaries.last
        p = beginning.probability * p
        is_probable = p >= least
        is_probable[len(texts) :] = False  # ids that no token has
        for i in is_probable.nonzero()[:, 0].tolist():
            text = beginning.text + texts[i]
            if is_ended(last(text)):
                words[_word(text)] += float(p[i])
            else:
                longer.append(_Beginning(float(p[i]), (*beginning.ids, i), text))
        return float(p[~is_probable].sum())

    def _least(self, words: dict[str, float]) -> float:
        """Probability of the last of the words asked for so far; what is less probable is not continued."""
        n = self._predictions.asked.alternatives
        if len(words) < n:
            return LEAST
        return max(LEAST, heapq.nlargest(n, words.values())[-1])

    def _read(self, token: int) -> Tensor:
        """Probabilities (v) in the place of a token, after the tokens before it, which are read."""
        run, documents = self._run, self._run.text.documents
        start = int(documents[np.searchsorted(documents, token, "right") - 1])
        if start and start >= self._n_read:  # another document begins, from empty memory
            self._state, self._n_read = run.lengths.init_state(run.model.network, np.zeros(1, np.int64)), start
        positions = np.arange(self._n_read, token + 1)[None]
        inputs, _ = inputs_and_targets(run.text.tokens.ids, positions, run.model.tokenizer.start_id, start)
        self._n_read = token + 1
        p, self._state = self._predict(inputs, self._state)
        return p[0]

    def _after(self, beginnings: Sequence[_Beginning]) -> Tensor:
        """Probabilities (b v) after beginnings of the same number of tokens."""
        if not beginnings:
            return torch.empty(0)
        tokens = [beginning.ids for beginning in beginnings]
        return self._predict(tokens, self._state.select([0] * len(beginnings)))[0]

    def _predict(self, tokens: Any, state: State) -> tuple[Tensor, State]:
        """Probabilities (b v) after tokens (b t), and the new state."""
        run = self._run
        with run.runtime.autocast():
            logits, state = run.model.network.logits(torch.as_tensor(tokens, device=run.runtime.device), state)
        return logits.double().softmax(-1).cpu(), state


def _word(text: bytes) -> str:
    return as_utf8(text.decode("utf-8", "surrogateescape").strip()) or LINE_END
