"""The most probable words in the place of each word of a text, with their probabilities: what a cloze test measures.

Words are those of `xlcli.words`. The probability of one is the sum over the sequences of tokens that spell it, and that
the next token ends, given that the word before has ended. Sequences are searched from short to long. One that is less
probable than the last of the words asked for is not continued, so no word that has a more probable sequence is missed.
What is not continued belongs to `rest`, the probability of all other words.

`Found.entropy` is the entropy of the next word, with bounds.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xlcli.evaluation.passes import Pass
from xlcli.files import as_utf8
from xlcli.metrics import LN2
from xlcli.state import State
from xlcli.text.loaders import inputs_and_targets
from xlcli.words import BLANKS, Predictions, is_ended

ROWS = 16  # maximum number of sequences per call of the model
LEAST = 1e-5  # probability below which no sequence is continued
LINE_END = "\n"  # stands for the end of a line or of the text in the place of a word


class _Beginning(NamedTuple):
    """Probability, tokens and text of the beginning of a word."""

    probability: float
    ids: tuple[int, ...]
    text: bytes


@dataclass
class Found:
    """What a search has found. The probability of a word lacks that of spellings that were not continued."""

    words: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # probability of each word
    longer: list[_Beginning] = field(default_factory=list)  # beginnings of further words, to be continued
    rest: float = 0.0  # probability of the beginnings that are not continued
    rest_entropy: float = 0.0  # the sum of -p·log2(p) over their probabilities p

    def leave(self, p: Tensor) -> None:
        """Does not continue beginnings of these probabilities (n)."""
        self.rest += float(p.sum())
        self.rest_entropy += _entropy_bits(p)

    def entropy(self, vocab_size: int) -> dict[str, float]:
        """Columns of the entropy H of the next word, in bits. Let h(p) = -p·log2(p), a the `words`, R the `rest`.

        word_entropy       The sum of h(a) and `rest_entropy`, which takes each beginning that is not continued for one
                           word. It grows to H with the number of words searched for.
        word_entropy_low   H is at least that, always. The mass R belongs to words in a way that is not known. Entropy
                           is concave, so it is least if one word has all of R, and h(a + R) - h(a) is least for the
                           largest a. The bound is the sum of h(a), where R is added to the largest a.
        word_entropy_high  H is at most word_entropy + R·C, by the chain rule: C is the mean entropy of how those
                           beginnings go on. No mass alone bounds C, since words have any length. The column has
                           C = log2(v): as much as one token that is drawn evenly from all v of the vocabulary.
        """
        p = torch.tensor([0.0, *self.words.values()], dtype=torch.float64)
        entropy = _entropy_bits(p) + self.rest_entropy
        high = entropy + self.rest * math.log2(vocab_size)
        p[p.argmax()] += self.rest
        return {"word_entropy": entropy, "word_entropy_low": _entropy_bits(p), "word_entropy_high": high}


def _entropy_bits(p: Tensor) -> float:
    """The sum of -p·log2(p) over probabilities (n); that of a certain word may be more than 1 by rounding."""
    return float(torch.special.entr(p.clamp(max=1.0)).sum()) / LN2


class NextWords:
    """`alternatives` (word to probability) and `rest`, or `entropy`, of each word; reads the text once more."""

    def __init__(self, run: Pass, predictions: Predictions) -> None:
        self._run, self._predictions = run, predictions
        self._state, self._n_read = run.lengths.init_state(run.model.network, np.zeros(1, np.int64)), 0

    @torch.inference_mode()
    def __call__(self, token: int, text: bytes, last: int | None) -> dict[str, Any]:
        """Returns the columns of the word that begins with this token; arguments as of `Search`. Reads up to there."""
        if b"\n" in text and not text.strip():  # no word
            return {}
        p = self._read(token)
        if last is not None:  # a word ended before this token, so only tokens that begin a word are possible
            begins = self._predictions.boundary_ids(last)
            p = torch.zeros_like(p).index_copy(0, begins, p[begins] / p[begins].sum())
        found = Found()
        self._lengthen(_Beginning(1.0, (), b""), p, LEAST, found)
        while found.longer:
            # The most probable ones first: the words that they spell raise the bar for the others.
            beginnings = sorted(found.longer, reverse=True)
            found.longer = []
            for first in range(0, len(beginnings), ROWS):
                self._continue(beginnings[first : first + ROWS], found)
        return self._columns(found)

    def _continue(self, beginnings: Sequence[_Beginning], found: Found) -> None:
        """Adds to `found` the words that these beginnings, the most probable one first, spell or begin."""
        least = self._least(found.words)
        probable = [beginning for beginning in beginnings if beginning.probability >= least]
        left_out = [beginning.probability for beginning in beginnings[len(probable) :]]
        found.leave(torch.tensor(left_out, dtype=torch.float64))
        for beginning, p in zip(probable, self._after(probable), strict=True):
            ends_word = self._predictions.boundary_ids(self._predictions.boundaries.last(beginning.text))
            if len(ends_word):
                found.words[_word(beginning.text)] += beginning.probability * float(p[ends_word].sum())
            self._lengthen(beginning, p.index_fill(0, ends_word, 0.0), least, found)

    def _columns(self, found: Found) -> dict[str, Any]:
        """The columns that are asked for."""
        asked, words = self._predictions.asked, found.words
        columns: dict[str, Any] = {}
        if asked.alternatives:
            best = heapq.nlargest(asked.alternatives, words, key=words.__getitem__)
            columns["alternatives"] = {word: words[word] for word in best}
            columns["rest"] = found.rest + sum(words[word] for word in words.keys() - best)
        if asked.word_entropy:
            columns |= found.entropy(self._predictions.tokenizer.vocab_size)
        return columns

    def _lengthen(self, beginning: _Beginning, p: Tensor, least: float, found: Found) -> None:
        """Adds what a beginning and each next token, of probabilities (v), make, if it is as probable as `least`."""
        texts, last = self._predictions.tokenizer.texts, self._predictions.boundaries.last
        p = beginning.probability * p
        is_probable = p >= least
        is_probable[len(texts) :] = False  # ids that no token has
        for i in is_probable.nonzero()[:, 0].tolist():
            text = beginning.text + texts[i]
            if is_ended(last(text)):  # whatever comes next
                found.words[_word(text)] += float(p[i])
            else:
                found.longer.append(_Beginning(float(p[i]), (*beginning.ids, i), text))
        found.leave(p[~is_probable])

    def _least(self, words: dict[str, float]) -> float:
        """Probability of the last of the words asked for so far; what is less probable is not continued."""
        n = self._predictions.asked.n_searched
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
    return as_utf8(text.decode("utf-8", "surrogateescape").strip(BLANKS)) or LINE_END
