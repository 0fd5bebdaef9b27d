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
Zero-width spaces, which divide words of Thai and Khmer, count as white space.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import re2
import torch
from torch import Tensor

from xlcli.config import EvalConfig, StreamConfig
from xlcli.errors import shortened
from xlcli.events import E, Notice, Prediction, Row, TokenLogprob, TokenScore, WordScore
from xlcli.files import as_utf8
from xlcli.metrics import LN2
from xlcli.model.head import Readout
from xlcli.store.state_files import WordPosition
from xlcli.text.base import Tokenizer
from xlcli.text.pretokenize import whole_characters

BLANK, LINE_END, LETTER, PUNCTUATION, CHARACTER = range(5)  # kinds of characters; CHARACTER is a word by itself
LONGEST = 2**14  # number of bytes from which a word is cut, so that RAM stays bounded

_SINGLE = re2.compile(r"[\p{Han}\p{Hiragana}\x{3001}-\x{303f}\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff20}]")
_ZERO_WIDTH_SPACE = "\u200b"  # divides words of Thai and Khmer
BLANKS = "".join(filter(str.isspace, map(chr, range(0x3001)))) + _ZERO_WIDTH_SPACE
"""All characters that divide words."""
_INSIDE = "'’-\u2010\u2011_"  # punctuation marks that count as letters, with two hyphens
_MARKS = re2.compile(rf"[^\p{{L}}\p{{M}}\p{{N}}\p{{C}}\s{re2.escape(_INSIDE)}]+")


class Boundaries:
    """Kinds of the characters at which words begin and end; `punctuation` marks are words of their own, if true."""

    def __init__(self, *, punctuation: bool) -> None:
        self._punctuation = punctuation

    def first(self, text: bytes) -> int:
        """Kind of the first character of a token; LETTER if the token begins within a character."""
        if not text:
            return LETTER
        return _kind(text[:4].decode("utf-8", "surrogateescape")[0], punctuation=self._punctuation)

    def last(self, text: bytes) -> int:
        """Kind of the last character of a word so far; LINE_END if white space follows it already."""
        if not text:
            return LINE_END
        kind = _kind(text[-4:].decode("utf-8", "surrogateescape")[-1], punctuation=self._punctuation)
        if kind == BLANK and text.decode("utf-8", "replace").strip(BLANKS):
            return LINE_END
        return kind


@cache  # every token begins and ends with a character
def _kind(char: str, *, punctuation: bool) -> int:
    if char in BLANKS:
        return LINE_END if char == "\n" else BLANK
    if char.isprintable() and _SINGLE.match(char):
        return CHARACTER
    is_letter = char.isalnum() or char in _INSIDE or unicodedata.category(char)[0] in "MC"
    return LETTER if is_letter or not punctuation else PUNCTUATION


def ends(last: int, first: int) -> bool:
    """True if a word ends between characters of these kinds. White space belongs to the next word."""
    return last != BLANK and (is_ended(last) or first != last)


def is_ended(last: int) -> bool:
    """True if a word ends after a character of this kind, whatever follows."""
    return last in (LINE_END, CHARACTER)


class Features(NamedTuple):
    """What is kept of a prediction by one layer, in nats: lists of tensors (b t), or of the numbers of one token."""

    word_ends: Sequence[Any]  # log-probability that a word ends after a letter and, if marks are divided, after a mark
    entropy: Sequence[Any]  # one
    token: Sequence[Any]  # log-probability of the token that came
    rank: Sequence[Any]  # its rank, from 1, if it is asked for
    renyi: Sequence[Any]  # Rényi entropy of each order that is asked for
    tempered: Sequence[Any]  # at each temperature that is asked for, `token` and `word_ends`
    best_ids: Sequence[Any]  # the most probable tokens
    best_logprobs: Sequence[Any]  # their log-probabilities

    def pack(self) -> Tensor:
        """All of them as one tensor (b t f)."""
        (entropy,) = self.entropy
        return torch.stack([each.to(entropy.dtype) for each in chain.from_iterable(self)], dim=-1)

    @classmethod
    def unpack(cls, numbers: Sequence[float], sizes: Sequence[int]) -> Features:
        """The lists of these sizes, whose numbers follow one another."""
        rest = iter(numbers)
        return cls(*(tuple(islice(rest, size)) for size in sizes))


class Predictions(Readout):
    """What is kept of the prediction of each token, as `size` numbers: a readout for `Scorer.score`, and values."""

    def __init__(
        self, tokenizer: Tokenizer, options: EvalConfig | StreamConfig, device: torch.device, layers: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.asked = options.asked
        self.layers = layers
        self.boundaries = Boundaries(punctuation=options.split_punctuation)
        firsts = [self.boundaries.first(text) for text in tokenizer.texts]
        for i in tokenizer.separate_ids:
            firsts[i] = BLANK
        kinds = (LETTER, PUNCTUATION) if options.split_punctuation else (LETTER,)
        self._boundary_ids = []
        for kind in kinds:
            ids = [i for i, first in enumerate(firsts) if first != kind]
            self._boundary_ids.append(torch.tensor(ids, device=device))
        self.n_best = min(self.asked.logprobs, tokenizer.vocab_size)
        n_ends, n_renyi = len(kinds), len(self.asked.renyi)
        n_tempered = len(self.asked.temperature) * (1 + n_ends)
        # In the order of `Features`; entropy and token are one number.
        self._sizes = (n_ends, 1, 1, int(self.asked.rank), n_renyi, n_tempered, self.n_best, self.n_best)
        self.size = sum(self._sizes) * (len(layers) + 1)

    def __call__(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """Features (b t f) of log-probabilities (b t v) and the tokens that came (b t), by one layer."""
        token = log_p.gather(-1, targets[..., None])
        rank = []
        if self.asked.rank:  # one more reading of all log-probabilities
            rank.append(1 + (log_p > token).sum(-1, dtype=log_p.dtype))
        tempered = []
        for temperature in self.asked.temperature:
            tempered_log_p = (log_p / temperature).log_softmax(-1)
            tempered.append(tempered_log_p.gather(-1, targets[..., None]).squeeze(-1))
            tempered += self._word_ends(tempered_log_p)
        best = log_p.topk(self.n_best, dim=-1)
        return Features(
            word_ends=self._word_ends(log_p),
            entropy=[_renyi_entropy(log_p, 1.0)],
            token=[token.squeeze(-1)],
            rank=rank,
            renyi=[_renyi_entropy(log_p, order) for order in self.asked.renyi],
            tempered=tempered,
            best_ids=best.indices.unbind(-1),
            best_logprobs=best.values.unbind(-1),
        ).pack()

    def _word_ends(self, log_p: Tensor) -> list[Tensor]:
        """Log-probabilities (b t) that a word ends after a letter, and after a mark if marks are divided."""
        return [log_p[..., ids.to(log_p.device)].logsumexp(-1) for ids in self._boundary_ids]

    def value(self, features: Sequence[float]) -> Prediction:
        """Returns the prediction of one token in bits, with the columns that are asked for, from its features (f)."""
        layer_size = sum(self._sizes)
        layers = []
        for start in range(0, self.size, layer_size):
            layers.append(Features.unpack(features[start : start + layer_size], self._sizes))
        *inner_layers, last = layers
        entropy = last.entropy[0] / LN2
        columns: dict[str, Any] = {}
        if self.asked.rank:
            columns["rank"] = int(last.rank[0])
        if self.asked.entropy:
            columns["entropy"] = entropy
        if self.asked.logprobs:
            best = zip(map(int, last.best_ids), last.best_logprobs, strict=True)
            columns["logprobs"] = tuple(TokenLogprob(i, self.tokenizer.texts[i], logprob) for i, logprob in best)
        for order, nats in zip(self.asked.renyi, last.renyi, strict=True):
            columns[f"token_renyi_{order:g}"] = nats / LN2
        # Temperatures and inner layers make other predictions: log-probabilities of the token, and that a word ends.
        others: dict[str, Sequence[float]] = {}
        n_numbers = 1 + len(last.word_ends)
        for i, temperature in enumerate(self.asked.temperature):
            others[f"temperature_{temperature:g}"] = last.tempered[i * n_numbers : (i + 1) * n_numbers]
        for number, layer in zip(self.layers, inner_layers, strict=True):
            others[f"layer_{number}"] = [*layer.token, *layer.word_ends]
        column_ends = {}
        for name, (token, *word_ends) in others.items():
            columns[name] = -token / LN2
            column_ends[name] = tuple(nats / LN2 for nats in word_ends)
        return Prediction(tuple(nats / LN2 for nats in last.word_ends), entropy, columns, column_ends)

    def boundary_ids(self, last: int) -> Tensor:
        """Ids (n) before which a word ends after a character of this kind, on the CPU."""
        if last == LETTER:
            return self._boundary_ids[0].cpu()
        if last == PUNCTUATION:
            return self._boundary_ids[1].cpu()
        if is_ended(last):
            return torch.arange(self.tokenizer.vocab_size)
        return torch.arange(0)


def _renyi_entropy(log_p: Tensor, order: float) -> Tensor:
    """Rényi entropy (b t) in nats of log-probabilities (b t v): log(Σ p^order) / (1 - order); of order 1 Shannon's."""
    if order == 1:
        return -(log_p.exp() * log_p).sum(-1)
    return (order * log_p).logsumexp(-1) / (1 - order)


@dataclass
class Words:
    """Joins tokens to words, with the columns of their first token; columns of other predictions add up as bits do."""

    boundaries: Boundaries
    at: WordPosition  # the present place, with the tokens of the unfinished word
    by_line: bool = False  # every line is a document
    _columns: dict[str, Any] = field(default_factory=dict, init=False)

    def reset(self) -> None:
        self.at = replace(self.at, last=b"\n", number=0)

    def feed(
        self, token: TokenScore, further: Callable[[int | None], Mapping[str, Any]] | None = None
    ) -> Iterator[Row | WordScore]:
        """The words that end before or with this token, the next one of the text, and the rows that they begin.

        `further` gives columns of a word that begins with it, by the kind of the last character if a word ended there.
        """
        assert token.prediction is not None
        last = self.boundaries.last(self.at.text or self.at.last)
        ends_before = ends(last, self.boundaries.first(token.text))
        if ends_before or not self.at.text:
            yield from self.end(token.byte, token.prediction)
            self._begin(token, last if ends_before else None, further)
        # The token belongs to the word that is now unfinished.
        for name in token.prediction.column_ends:
            self._columns[name] += token.prediction.columns[name]
        text = self.at.text + token.text
        bits = self.at.bits + token.bits
        ends_here = is_ended(self.boundaries.last(text))
        last_text = b"\n" if ends_here else token.text  # a character may have several tokens
        self.at = replace(self.at, text=text, bits=bits, tokens=self.at.tokens + 1, last=last_text)
        is_too_long = len(text) >= LONGEST and whole_characters(text) == len(text)
        if ends_here or is_too_long:
            yield from self.end(token.byte + len(token.text), None)

    def _begin(
        self, token: TokenScore, ended: int | None, further: Callable[[int | None], Mapping[str, Any]] | None
    ) -> None:
        """Begins a word with a token; `ended` is the kind of the character that ended a word before it, if any."""
        assert token.prediction is not None
        prediction = token.prediction
        self._columns = dict(prediction.columns)
        self._columns.pop("entropy", None)  # every word has it, as `token_entropy`
        for name, word_ends in prediction.column_ends.items():
            self._columns[name] = _end_bits(ended, word_ends)
        if further is not None:
            self._columns |= further(ended)
        self.at = replace(
            self.at,
            before=_end_bits(ended, prediction.word_ends),
            entropy=prediction.entropy,
            line=token.line,
            number=self.at.number if token.line == self.at.line else 0,
        )

    def end(self, byte: int, prediction: Prediction | None) -> Iterator[Row | WordScore]:
        """The unfinished word, if there is one, which ends before this byte of the text.

        `prediction` is that of the next token; None if there is none, or the word ends whatever it is.
        """
        text = self.at.text.decode("utf-8", "surrogateescape")
        word = text.lstrip(BLANKS)
        start = byte - len(word.encode("utf-8", "surrogateescape"))
        yield from self._begin_rows(start)
        line = self.at.line
        number = self.at.number  # of the word in its line
        if word:
            # The first token of the word may begin in a line before.
            n_line_ends = text.count("\n", 0, len(text) - len(word))
            line += n_line_ends
            number = 1 if n_line_ends else number + 1
            document = line if self.by_line else self.at.document
            yield self._score(document, line, number, start, word, prediction)
        self.at = replace(self.at, text=b"", bits=0.0, tokens=0, line=line, number=number)

    def _begin_rows(self, start: int) -> Iterator[Row]:
        """The rows with text that begin up to this byte of the text. The last of them becomes the present one."""
        starts = self.at.starts
        while starts and starts[0][0] <= start:
            begin, fields = starts.popleft()
            self.at = replace(self.at, document=self.at.document + 1, fields=fields)
            has_text = not starts or starts[0][0] > begin
            if has_text:
                yield Row(self.at.document, fields)

    def _score(
        self, document: int, line: int, number: int, start: int, word: str, prediction: Prediction | None
    ) -> WordScore:
        """Bits of the tokens and of the end before them, less those of the end after them, as the module says."""
        at = self.at
        columns = dict(self._columns)
        after = 0.0
        next_entropy = None
        if prediction is not None:
            next_entropy = prediction.entropy
            last = self.boundaries.last(at.text)
            after = _end_bits(last, prediction.word_ends)
            for name, word_ends in prediction.column_ends.items():
                columns[name] -= _end_bits(last, word_ends)
        bits = at.bits + at.before - after
        return WordScore(
            document=document,
            line=line,
            number=number,
            byte=start,
            word=as_utf8(word.rstrip(BLANKS)),
            bits=bits,
            naive_bits=at.bits,
            token_entropy=at.entropy,
            tokens=at.tokens,
            columns=columns,
            next_entropy=next_entropy,
        )


def split_words(text: str, *, punctuation: bool = False) -> list[str]:
    """The words of a text: what stands between blanks, and single characters, or marks, that are words."""
    text = _SINGLE.sub(r" \g<0> ", text.replace(_ZERO_WIDTH_SPACE, " "))
    if punctuation:
        text = _MARKS.sub(r" \g<0> ", text)
    return text.split()


def with_remark_on_rows(events: Iterable[E], *, punctuation: bool) -> Iterator[E | Notice]:
    """The events, and after them a warning if the `WordScore` of some are of several words that tokens do not divide.

    `punctuation`: marks are words.
    """
    n_joined = 0
    first = ""
    for event in events:
        yield event
        if isinstance(event, WordScore) and len(split_words(event.word, punctuation=punctuation)) > 1:
            n_joined += 1
            first = first or event.word
    if n_joined:
        remark = f"{n_joined:,} rows have several words, which tokens do not divide (first: '{shortened(first, 40)}')"
        yield Notice(f"{remark}: do not compare `number` between sentences or models", "warning")


def _end_bits(last: int | None, word_ends: Sequence[float]) -> float:
    """log2 of the probability that a word ends after a character of this kind; 0 if it does anyway, or if none ends."""
    if last is None or is_ended(last):
        return 0.0
    return word_ends[1] if last == PUNCTUATION else word_ends[0]
