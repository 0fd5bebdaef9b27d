"""Scored tokens on their way out: as they are, joined to words, or assembled to lines."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.config import StreamConfig
from xlcli.events import LineScore, Prediction, RecordScore, Row, TokenScore, WordScore
from xlcli.inference import InferenceSession
from xlcli.store.state_files import StreamPosition, WordPosition
from xlcli.streaming.intake import LINE, LINE_LIMIT, Tokens
from xlcli.streaming.records import Records, fields_of
from xlcli.text.documents import Document
from xlcli.words import Predictions, Words

RECENT = 1000  # number of latest scores that `top` compares the next one with
FAR_SPAN = 256  # number of bytes up to which tokens are joined, far behind the beginning of a record


ScoredEvent = LineScore | WordScore | Row | TokenScore


class StreamOutput:
    """Scored tokens on their way out: as they are, joined to words, or assembled to lines."""

    def __init__(
        self,
        options: StreamConfig,
        position: StreamPosition,
        predictions: Predictions | None,
        before: bytes,
        on_token: Callable[[TokenScore], None] | None,
        on_word: Callable[[WordScore], None] | None,
    ) -> None:
        self.options = options
        self.predictions = predictions  # what is kept of the prediction of each token, if any of it is output
        self._on_token = on_token
        self._on_word = on_word
        # Complete lines, bytes and tokens so far, and the sum of their surprisals:
        self.n_lines = position.n_lines
        self.n_bytes = position.n_bytes
        self.n_tokens = position.n_tokens
        self.bits = position.bits
        self.words = None  # the words, if they are output
        if predictions and (options.emit == "words" or on_word):
            word = WordPosition(last=before, starts=deque())
            if options.emit == "words" and position.words is not None:
                word = position.words.copy()
            self.words = Words(predictions.boundaries, word, by_line=options.each_line)
        self.selection = Selection(options, position.recent.get(options.emit, ()))  # selects what is output
        # Records of the text, which are output in place of its lines.
        self.records = Records(position, has_events=options.event_start is not None)
        # The unfinished line, whose beginning may have been output as a part, or the unfinished record:
        self._line_start = position.line_start
        self._line = list(position.scored)
        self._line_bytes = sum(len(text) for text, _ in self._line)
        self._line_tokens = position.line_tokens

    @property
    def position(self) -> StreamPosition:
        """The place from which another stream continues."""
        emit = str(self.options.emit)
        recent = tuple(self.selection.recent)
        words = None
        if emit == "words" and self.words is not None:
            words = self.words.at.copy()
        return StreamPosition(
            n_lines=self.n_lines,
            n_bytes=self.n_bytes,
            n_tokens=self.n_tokens,
            bits=self.bits,
            line_start=self._line_start,
            scored=tuple(self._line),
            recent={emit: recent} if recent else {},
            words=words,
            line_tokens=self._line_tokens,
            records=tuple(self.records.waiting),
            input_line=self.records.input_line,
            stream=self.records.stream,
            unfinished=self.records.unfinished,
            reads=self.options.reads,
        )

    def feed(
        self, tokens: Tokens, bits: NDArray[np.float64], features: NDArray[np.float64] | None
    ) -> Iterator[ScoredEvent]:
        """Yields the next tokens with their surprisals (t) and features (t f), or the words or lines they complete."""
        self.n_tokens += len(bits)
        self.bits += float(bits.sum())
        emit = self.options.emit
        predictions = self._values(features)
        start = 0
        # Not strict: without features there is None for any number of tokens.
        for size, token_bits, prediction in zip(tokens.sizes.tolist(), bits.tolist(), predictions, strict=False):
            token = tokens.text[start : start + size]
            start += size
            if emit == "lines":
                self._line_tokens += 1
            score = TokenScore(self.n_lines + 1, self.n_bytes, token, token_bits, prediction)
            if self._on_token is not None:
                self._on_token(score)
            if self.words is not None:
                yield from self._listed(self.words.feed(score))
            if emit == "tokens" and self.selection.take(token_bits):
                yield score
            yield from self._add_to_line(token, token_bits)

    def end_line_part(self) -> Iterator[LineScore]:
        """Yields the score of the line or record assembled so far, if it is selected, and begins a new one."""
        spans = tuple(self._line)
        n_bytes, n_tokens = self._line_bytes, self._line_tokens
        self._line = []
        self._line_bytes = self._line_tokens = 0
        if n_bytes == 0:
            return
        record = self.records.waiting.popleft() if self.records.covers(self.n_bytes) else None
        text = b"".join(text for text, _ in spans)
        bits = sum(bits for _, bits in spans)
        bits_per_byte = bits / n_bytes
        is_blank = not text.strip()
        if is_blank and self.options.top is not None:  # cheap or dear, a blank line is none of the oddest
            return
        if not self.selection.take(bits_per_byte):
            return
        values: dict[str, Any] = {"byte": self.n_bytes - n_bytes, "bytes": n_bytes, "text": text, "tokens": n_tokens}
        values |= {"bits": bits, "bits_per_byte": bits_per_byte, "spans": spans}
        if record is None:
            yield LineScore(line=self.n_lines + 1, **values)
        else:
            yield RecordScore(line=record.line, fields=fields_of(record, text), **values)

    def end_record(self) -> Iterator[LineScore]:
        """Outputs the record being assembled, if its lines are complete: nothing is added to it any more."""
        if self.records.covers(self.n_bytes) and self.n_bytes == self._line_start:
            yield from self.end_line_part()

    def begin_record(self, start: int, document: Document) -> Iterator[LineScore]:
        """Begins a record at this byte, after the output of the one before it, if that is scored."""
        if self.n_bytes == start:
            yield from self.end_record()
        if document and self.options.emit == "lines":
            self.records.begin(start, document)

    def end(self, session: InferenceSession) -> Iterator[ScoredEvent]:
        yield from self.end_line_part()
        if self.n_bytes > self._line_start:
            self.n_lines += 1
        yield from self.end_word(session)

    def end_word(self, session: InferenceSession) -> Iterator[ScoredEvent]:
        """Outputs the unfinished word, if there is one, which ends if the next token is one that begins a text."""
        if self.words and self.words.at.text:
            _, features = session.score(np.array([session.model.tokenizer.start_id]), self.predictions)
            yield from self._listed(self.words.end(self.n_bytes, next(self._values(features))))

    def _add_to_line(self, token: bytes, bits: float) -> Iterator[LineScore]:
        """Adds a token to the line in which it begins; yields the score of each line or record that it completes."""
        for piece in LINE.findall(token) or [token]:
            if self.options.emit == "lines":
                self._add_span(piece, bits)
            bits = 0.0  # the pieces after the first one cost nothing
            self.n_bytes += len(piece)
            ends_line = piece.endswith(b"\n")
            if self.records.covers(self.n_bytes):
                is_complete = ends_line and self.records.ends_at(self.n_bytes)
            else:
                is_complete = ends_line or self._line_bytes >= LINE_LIMIT
            if is_complete:
                yield from self.end_line_part()
            if ends_line:
                self.n_lines += 1
                self._line_start = self.n_bytes

    def _add_span(self, text: bytes, bits: float) -> None:
        """Adds text to the line being assembled; a token without text counts with the one before it.

        Behind the first `LINE_LIMIT` bytes of a record, tokens are joined, which saves memory.
        """
        self._line_bytes += len(text)
        is_far = self._line_bytes > LINE_LIMIT and bool(self._line) and len(self._line[-1][0]) < FAR_SPAN
        if self._line and (is_far or not text):
            text_before, bits_before = self._line.pop()
            text = text_before + text
            bits += bits_before
        self._line.append((text, bits))

    def _values(self, features: NDArray[np.float64] | None) -> Iterator[Prediction | None]:
        """The predictions that features (t f) stand for; None for any number of tokens without."""
        if features is None or self.predictions is None:
            return itertools.repeat(None)
        return map(self.predictions.value, features.tolist())

    def _listed(self, events: Iterator[Row | WordScore]) -> Iterator[Row | WordScore]:
        """Hands words to `on_word`, and yields those that are selected if words are listed."""
        for event in events:
            if self._on_word and isinstance(event, WordScore):
                self._on_word(event)
            if self.options.emit == "words" and (isinstance(event, Row) or self.selection.take(event.bits)):
                yield event


class Selection:
    """Selects scores (bits per byte of a line, or bits of a word or token) that `min_bits` and `top` both let pass.

    `top` compares a score with the `RECENT` before it: fewer than this share of them are as high. It selects none
    until the share is one whole score, the first 100 of them for 1 %.

    `recent` are the latest scores, the oldest one first. `n_shown` counts those that were selected.
    """

    def __init__(self, options: StreamConfig, recent: Sequence[float] = ()) -> None:
        self.min_bits = options.min_bits
        self.top = options.top
        self.n_shown = 0
        self.recent = deque(recent, RECENT)

    def take(self, score: float) -> bool:
        """Takes the next score, and remembers it for `top`. True if it is selected, which is counted."""
        is_selected = self.min_bits is None or score >= self.min_bits
        if self.top is not None:
            score = round(score, 3)  # equal lines may differ by rounding errors
            n_as_high = sum(other >= score for other in self.recent)
            n_top = self.top * len(self.recent)
            is_selected = is_selected and n_top >= 1 and n_as_high < n_top
            self.recent.append(score)  # which forgets the oldest one if there are `RECENT`
        if is_selected:
            self.n_shown += 1
        return is_selected
