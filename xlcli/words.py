"""Surprisal of words, from tokens that are parts of words.

A word is what is separated by white space. A token has the blank before its word, so the tokens of " dog" do not say
that the word ends there: " doggy" may begin with the same token. The probability of a word is therefore that of its
tokens, times the probability that it ends after them, divided by the probability that the word before it ended, which
its first token contains (Pimentel and Meister 2024, arXiv 2406.14561; Oh and Schuler 2024, arXiv 2406.10851). A word
ends if the next token begins with white space: the sum of the probabilities of all such tokens. After a line end, and
at the beginning of a text, a word begins whatever the next token is.

Chinese characters, Hiragana and their punctuation are words of their own, as by the default word boundaries of Unicode
(UAX 29), because such text has no blanks. `punctuation` also divides a word where a letter meets a punctuation mark.
Only boundaries between tokens count: a word that ends within a token is joined with the next one, and never divided.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import re2
import torch
from torch import Tensor

from xlcli.config import EvalConfig, StreamConfig
from xlcli.events import Prediction, Row, TokenLogprob, TokenScore, WordScore
from xlcli.files import as_utf8
from xlcli.metrics import LN2
from xlcli.model.head import Readout
from xlcli.store.state_files import WordPosition
from xlcli.text.base import Tokenizer
from xlcli.text.pretokenize import whole_characters

BLANK, LINE_END, LETTER, PUNCTUATION, CHARACTER = range(5)
"""Kinds of characters; CHARACTER is a word by itself."""
LONGEST = 2**14
"""Number of bytes from which a word is cut, so that RAM stays bounded."""

_SINGLE = re2.compile(r"[\p{Han}\p{Hiragana}\x{3001}-\x{303f}\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff20}]")
_INSIDE = "'’-\u2010\u2011_"
"""Punctuation marks that count as letters, with two hyphens."""
_MARKS = re2.compile(rf"[^\p{{L}}\p{{M}}\p{{N}}\p{{C}}\s{re2.escape(_INSIDE)}]+")


class Boundaries:
    """Kinds of the characters at which words begin and end; `punctuation` marks are words of their own, if true."""

    def __init__(self, *, punctuation: bool) -> None:
        self._punctuation = punctuation
        self._ascii = [self._kind(chr(code)) for code in range(128)]

    def first(self, text: bytes) -> int:
        """Kind of the first character of a token; LETTER if the token begins within a character."""
        if text[:1] < b"\x80":
            return self._ascii[text[0]] if text else LETTER
        return self._kind(text[:4].decode("utf-8", "surrogateescape")[0])

    def last(self, text: bytes) -> int:
        """Kind of the last character of a word so far; LINE_END if white space follows it already."""
        if text[-1:] < b"\x80":
            kind = self._ascii[text[-1]] if text else LINE_END
        else:
            kind = self._kind(text[-4:].decode("utf-8", "surrogateescape")[-1])
        return LINE_END if kind == BLANK and text.decode("utf-8", "replace").strip() else kind

    def _kind(self, char: str) -> int:
        if char.isspace():
            return LINE_END if char == "\n" else BLANK
        if char.isprintable() and _SINGLE.match(char):
            return CHARACTER
        is_letter = char.isalnum() or char in _INSIDE or unicodedata.category(char)[0] in "MC"
        return LETTER if is_letter or not self._punctuation else PUNCTUATION


def ends(last: int, first: int) -> bool:
    """True if a word ends between characters of these kinds. White space belongs to the next word."""
    return last != BLANK and (is_ended(last) or first != last)


def is_ended(last: int) -> bool:
    """True if a word ends after a character of this kind, whatever follows."""
    return last in (LINE_END, CHARACTER)


class Predictions(Readout):
    """What is kept of the prediction of each token: a readout for `Reader.score`, and its features as values.

    Features are log-probabilities that a word ends here after a letter and, if marks are divided, after a punctuation
    mark; the entropy; log-probability and rank of the token; ids and log-probabilities of the most probable tokens. All
    are in nats. With those of each layer they are `size` numbers.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: EvalConfig | StreamConfig, device: torch.device, layers: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.asked, self.layers = tokenizer, options.asked, layers
        self.n_best = min(self.asked.logprobs, tokenizer.vocab_size)
        self.boundaries = Boundaries(punctuation=options.split_punctuation)
        firsts = [self.boundaries.first(text) for text in tokenizer.texts]
        for i in tokenizer.separate_ids:
            firsts[i] = BLANK
        kinds = (LETTER, PUNCTUATION)[: 1 + options.split_punctuation]
        enders = [[i for i, first in enumerate(firsts) if first != kind] for kind in kinds]
        self._enders = [torch.tensor(ids, device=device) for ids in enders]
        self.size = (len(self._enders) + 3 + 2 * self.n_best) * (len(layers) + 1)

    def __call__(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """Features (b t f) of log-probabilities (b t v) and the tokens that came (b t), by one layer."""
        masses = [log_p[..., ids.to(log_p.device)].logsumexp(-1) for ids in self._enders]
        best = log_p.topk(self.n_best, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        own = log_p.gather(-1, targets[..., None])
        rank = torch.zeros_like(entropy)
        if self.asked.rank:  # one more reading of all log-probabilities
            rank = 1 + (log_p > own).sum(-1, dtype=log_p.dtype)
        single = torch.stack((*masses, entropy, own.squeeze(-1), rank), dim=-1)
        return torch.cat((single, best.indices.to(log_p.dtype), best.values), dim=-1)

    def value(self, features: Sequence[float]) -> Prediction:
        """The features (f) of one token."""
        n, size = len(self._enders), self.size // (len(self.layers) + 1)
        *inner, last = (features[i : i + size] for i in range(0, self.size, size))
        ids, logprobs = last[n + 3 : n + 3 + self.n_best], last[n + 3 + self.n_best :]
        best = [TokenLogprob(int(i), self.tokenizer.texts[int(i)], p) for i, p in zip(ids, logprobs, strict=True)]
        known = {"rank": int(last[n + 2]), "entropy": last[n] / LN2, "logprobs": tuple(best)}
        columns: dict[str, Any] = {name: value for name, value in known.items() if getattr(self.asked, name)}
        layers = {f"layer_{number}": values for number, values in zip(self.layers, inner, strict=True)}
        columns |= {name: -values[n + 1] / LN2 for name, values in layers.items()}
        layer_ends = {name: tuple(mass / LN2 for mass in values[:n]) for name, values in layers.items()}
        return Prediction(tuple(mass / LN2 for mass in last[:n]), last[n] / LN2, columns, layer_ends)

    def enders(self, last: int) -> Tensor:
        """Ids (n) before which a word ends after a character of this kind, on the CPU."""
        if last in (LETTER, PUNCTUATION):
            return self._enders[last == PUNCTUATION].cpu()
        return torch.arange(self.tokenizer.vocab_size if is_ended(last) else 0)


class Words:
    """Joins scored tokens to words.

    `at` is the present place, with the tokens of the unfinished word; `by_line`: every line is a document. A word has
    the columns of its first token, but those of layers add up as its bits do.
    """

    def __init__(self, boundaries: Boundaries, at: WordPosition, *, by_line: bool = False) -> None:
        self.boundaries = boundaries
        self.at = at
        self.by_line = by_line
        self._columns: dict[str, Any] = {}

    def reset(self) -> None:
        """The next word begins a text."""
        self.at = replace(self.at, last=b"\n", number=0)

    def feed(
        self, token: TokenScore, further: Callable[[int | None], Mapping[str, Any]] | None = None
    ) -> Iterator[Row | WordScore]:
        """The words that end before or with this token, the next one of the text, and the rows that they begin.

        `further` gives columns of a word that begins with it, by the kind of the last character if a word ended there.
        """
        assert token.prediction is not None
        prediction = token.prediction
        last = self.boundaries.last(self.at.text or self.at.last)
        is_new = ends(last, self.boundaries.first(token.text))
        if is_new or not self.at.text:
            yield from self.end(token.byte, prediction)
            at, entropy = self.at, prediction.entropy
            ended = last if is_new else None
            before = _mass(ended, prediction.word_ends)
            layers = {name: _mass(ended, each) for name, each in prediction.layer_ends.items()}
            self._columns = {**prediction.columns, **layers}
            if further is not None:
                self._columns |= further(ended)
            number = at.number if token.line == at.line else 0
            self.at = replace(at, before=before, entropy=entropy, line=token.line, number=number)
        for name in prediction.layer_ends:
            self._columns[name] += prediction.columns[name]
        text, bits = self.at.text + token.text, self.at.bits + token.bits
        ends_here = is_ended(self.boundaries.last(text))
        rest = b"\n" if ends_here else token.text  # a character may have several tokens
        self.at = replace(self.at, text=text, bits=bits, tokens=self.at.tokens + 1, last=rest)
        if ends_here or (len(text) >= LONGEST and whole_characters(text) == len(text)):
            yield from self.end(token.byte + len(token.text), None)

    def end(self, byte: int, prediction: Prediction | None) -> Iterator[Row | WordScore]:
        """The unfinished word, if there is one, which ends before this byte of the text.

        `prediction` is that of the next token; None if there is none, or the word ends whatever it is.
        """
        at = self.at
        word = at.text.decode("utf-8", "surrogateescape").lstrip()
        start = byte - len(word.encode("utf-8", "surrogateescape"))
        document, fields, line, number = at.document, at.fields, at.line, at.number
        while at.starts and at.starts[0][0] <= start:
            document, (begin, fields) = document + 1, at.starts.popleft()
            if not (at.starts and at.starts[0][0] == begin):  # else it has no text
                yield Row(document, fields)
        if word:
            if n := at.text[: len(at.text) - len(at.text.lstrip())].count(b"\n"):  # a token begins in the line before
                line, number = line + n, 0
            number += 1
            last, columns, after = self.boundaries.last(at.text), dict(self._columns), 0.0
            if prediction is not None:
                after = _mass(last, prediction.word_ends)
                columns |= {name: columns[name] - _mass(last, each) for name, each in prediction.layer_ends.items()}
            place = line if self.by_line else document, line, number, start
            word = as_utf8(word.rstrip())
            yield WordScore(*place, word, at.bits + at.before - after, at.bits, at.entropy, at.tokens, columns)
        unread = replace(at, text=b"", bits=0.0, tokens=0)
        self.at = replace(unread, document=document, fields=fields, line=line, number=number)


def split_words(text: str, *, punctuation: bool = False) -> list[str]:
    """The words of a text, where every blank and every character that is a word is a token of its own.

    With `punctuation`, so are marks that follow one another.
    """
    for pattern in (_SINGLE, _MARKS)[: 1 + punctuation]:
        text = pattern.sub(r" \g<0> ", text)
    return text.split()


def _mass(last: int | None, word_ends: Sequence[float]) -> float:
    """log2 of the probability that a word ends after a character of this kind; 0 if there is no such word."""
    return 0.0 if last is None or is_ended(last) else word_ends[last == PUNCTUATION]
