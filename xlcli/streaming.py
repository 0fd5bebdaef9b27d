"""Streaming: scores text as it arrives, in constant RAM. The scores do not depend on how the text arrives.

Text is scored as soon as its score can be output: a line when its end arrives, a word when it is complete if tokens are
output. Calls of the model are as large as the text that has arrived allows, so throughput grows with the rate of input.
A line of more than `LINE_LIMIT` bytes is output in parts: several `LineScore` with the same `line` and growing `byte`.

With `reset_on_document` the memory is cleared before each document; a portion of type `Document` begins one. No token
is in two documents then. `reset_on_change` clears it where this field changes, `each_line` before each line.

Without `binary`, CR LF is read as LF; a CR that arrives last waits for the next byte.

A session is saved as it was before the unfinished end of the text, together with the bytes of that end. The end is
scored and output when the input ends, and again, together with new text, by a stream that resumes. Two streams
connected by a saved session thus give the scores of one stream.
"""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlcli.config import StreamConfig
from xlcli.config.base import compile_pattern
from xlcli.errors import DataError
from xlcli.events import LineScore, Notice, Prediction, Row, StreamStats, TokenScore, WordScore
from xlcli.inference import TOKENS_PER_CALL, InferenceSession, SaveState, compile_cache, window_notice
from xlcli.metrics import LN2
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import PendingText, SessionState, StreamPosition, WordPosition
from xlcli.text.documents import Document, plain
from xlcli.text.formats import CRLF_NOTICE, LineEnds
from xlcli.text.oddities import Oddities
from xlcli.text.pretokenize import PreTokenizer
from xlcli.text.tokenizers import n_unknown, unknown_notice
from xlcli.words import Predictions, Words

BLOCK_BYTES = 2**14
"""Number of bytes tokenized at a time."""
LINE_LIMIT = 2**14
"""Number of bytes after which a line is output in parts, and up to which `reset_on` is searched for in a line."""
STATS_SECONDS = 1.0
"""Time between two `StreamStats`."""
RECENT = 1000
"""Number of latest scores that `top` compares the next one with."""
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")

StreamEvent = LineScore | WordScore | Row | TokenScore | StreamStats | Notice


def stream(
    model: LoadedModel,
    portions: Iterable[bytes | None],
    options: StreamConfig,
    runtime: Runtime,
    *,
    resume: SessionState | None = None,
    save: SaveState | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_token: Callable[[TokenScore], None] | None = None,
    on_word: Callable[[WordScore], None] | None = None,
    saves_start: bool = False,
) -> Iterator[StreamEvent]:
    """Scores text as it arrives.

    Args:
        model: The model.
        portions: Bytes as they arrive, divided anywhere; a `Document` begins a document. None means that nothing has
            arrived for a while; only then is an unfinished line scored early (`flush_ms`). The next portion is taken
            when the last one has been scored. A stopped stream saves the unscored bytes of the last one, whatever its
            size.
        options: Output, flushing, saving and resets.
        runtime: Device and number type.
        resume: Saved session. Line numbers, byte offsets and totals continue from it.
        save: Called every `save_every` seconds at the end of a line, if text was read since, and at the end.
        stop: Called between calls of the model. Once true, unscored text is saved with the session and not scored.
        on_token: Called with each token when it is scored, whatever is yielded.
        on_word: Called with each word after the token that ends it, whatever is yielded.
        saves_start: Save a new session before its text is read, too, for text that cannot be read again from its start.

    Yields:
        Scores as `options.emit`, `min_bits` and `top` say, totals about once a second, and the final totals last.

    Raises:
        StateError: `resume` does not fit `options`.
    """
    running = _Stream(model, options, runtime, resume, save, stop, on_token, on_word)
    oddities = Oddities("line", "row" if options.each_line else "line", running.output.n_lines)
    if options.text_field:
        oddities = Oddities("row", "row")
    if not options.binary and model.tokenizer.kind != "ids":
        portions = oddities.watched(portions)
    if resume is None and saves_start:
        running.save()
    yield from compile_cache(running.session.options, stop)
    words = running.output.position.words
    if words is not None and words.document:  # a row of a table in which the stream continues
        yield Row(words.document, words.fields)
    yield from running.run(portions)
    yield from oddities.notices()
    yield from map(Notice, model.tokenizer.take_notices())
    yield from unknown_notice(running.meter.n_unknown, running.meter.n_tokens)
    yield running.stats(final=True)


class _Stream:
    """A running stream: text comes in, the session scores it, results go out, and the session is saved when due."""

    def __init__(
        self,
        model: LoadedModel,
        options: StreamConfig,
        runtime: Runtime,
        resume: SessionState | None,
        save: SaveState | None,
        stop: Callable[[], bool],
        on_token: Callable[[TokenScore], None] | None,
        on_word: Callable[[WordScore], None] | None,
    ) -> None:
        self.session = InferenceSession.open(model, runtime, options, resume, predicts=False)
        position = StreamPosition() if resume is None else resume.stream
        self.intake = Intake(model, options, position, resume)
        predicts = options.emit == "words" or bool(options.columns) or on_word is not None
        layers = options.asked.layers_of(model.config.model, self.session.options.learning)
        predictions = Predictions(model.tokenizer, options, runtime.device, layers) if predicts else None
        before = model.tokenizer.decode(self.session.last_tokens)
        self.output = Output(options, position, predictions, before, on_token, on_word)
        self.meter = Meter(position.n_lines)
        self._options, self.story = options, position.story
        self._every, self._save, self._stop = options.save_every, save, stop
        self._saved, self._saved_mark = time.monotonic(), (0, 0)
        self._said = set[str]()  # texts of notices

    def run(self, portions: Iterable[bytes | None]) -> Iterator[StreamEvent]:
        """Scores all portions, and the end of the text, until `stop`."""
        for portion in portions:
            self.begin_document(portion)
            is_flushed = self.intake.receive(portion)
            yield from self.score()
            if self._stop():
                self.save()
                return
            if is_flushed:
                yield from self.output.end_line_part()
            if self.is_due():
                self.save()
        yield from self.end()

    def begin_document(self, portion: bytes | None) -> None:
        """Begins a document if the portion does. The memory is kept for one with the story of the document before."""
        key, words = self._options.reset_on_change, self.output.words
        is_document = isinstance(portion, Document)
        fields = plain(portion.fields) if isinstance(portion, Document) else {}
        story = self.story
        if portion and key is not None and (is_document or story is None):
            if key not in fields:
                raise DataError(f"the text has no rows, or a row has no '{key}'.", "Name a key that all rows have.")
            story = str(fields[key])
        is_reset = key is None or story != self.story
        self.story = story
        if is_document and (self.intake.resets_at_documents or self._options.emit == "words"):
            start = self.intake.begin_document(is_reset=is_reset)
            if words is not None:
                words.at.begin(start, fields)
        elif portion and words is not None and not words.at.n_begun:  # the text before the first row
            words.at.begin(0, {})

    def score(self) -> Iterator[StreamEvent]:
        session, output, meter = self.session, self.output, self.meter
        while not self._stop():
            is_due = self.is_due()
            tokens = self.intake.take(to_line_end=is_due)  # a session is saved at the end of a line
            if tokens is None:
                return
            if tokens.is_reset:
                # The last word of the document ends as the document does, with the memory of the document.
                yield from output.end_word(session)
                session.reset()
                if output.words:
                    output.words.reset()
            started = time.perf_counter()
            nats, features = session.score(tokens.ids, output.predictions)
            unknown = n_unknown(tokens.ids, session.model.tokenizer.unknown_id)
            meter.add(time.perf_counter() - started, len(tokens.ids), unknown)
            yield from output.feed(tokens, nats / LN2, features)
            if self.intake.line_ends.replaced:
                yield from self._once([Notice(f"{CRLF_NOTICE}; --binary keeps them")])
            yield from self._once(window_notice(session.state.span, session.options, session.state.seen))
            if meter.is_due():
                yield self.stats(final=False)
            if is_due:
                self.save()

    def end(self) -> Iterator[StreamEvent]:
        """Scores the lines that wait for others, and the unfinished end of the text."""
        self.intake.release_lines()
        yield from self.score()
        # A line that ends is scored before the state is saved, so that its row does not come again.
        ends_line = self.intake.ends_line and not self._stop()
        if not ends_line:
            self.save()
        if self._stop():
            return
        self.intake.end()
        yield from self.score()
        if ends_line:
            self.save()
        yield from self.output.end(self.session)

    def _once(self, notices: Iterable[Notice]) -> Iterator[Notice]:
        for notice in notices:
            if notice.text not in self._said:
                self._said.add(notice.text)
                yield notice

    @property
    def _mark(self) -> tuple[int, int]:
        """Text that has arrived, and tokens that were scored."""
        return self.intake.n_received, self.output.n_tokens

    def is_due(self) -> bool:
        """True if it is time to save, and text has arrived or was scored since."""
        if self._save is None or self._every is None:
            return False
        return time.monotonic() - self._saved >= self._every and self._mark != self._saved_mark

    def save(self) -> None:
        if self._save is not None:
            self._saved, self._saved_mark = time.monotonic(), self._mark
            session, position = self.session, replace(self.output.position, story=self.story)
            self._save(SessionState(session.state, session.last_tokens[0], self.intake.pending, None, position))

    def stats(self, *, final: bool) -> StreamStats:
        output, span = self.output, self.session.state.span
        return StreamStats(
            lines=output.n_lines,
            bytes=output.n_bytes,
            tokens=output.n_tokens,
            bits=output.bits,
            bits_per_byte=output.bits / max(1, output.n_bytes),
            **self.meter.speed(output.n_lines),
            mem_len=span.mem_len,
            state_bytes=self.session.state.bytes,
            final=final,
            shown=output.selection.n_shown if output.options.selects else None,
            crlf=self.intake.line_ends.replaced,
        )


class Meter:
    """Speed of a stream that began after `n_lines` lines."""

    def __init__(self, n_lines: int) -> None:
        self._first_line = n_lines
        self._started = self._told = time.monotonic()
        self._seconds, self.n_tokens, self.n_unknown = 0.0, 0, 0

    def add(self, seconds: float, n_tokens: int, n_unknown: int) -> None:
        self._seconds += seconds
        self.n_tokens += n_tokens
        self.n_unknown += n_unknown

    def is_due(self) -> bool:
        """True if `STATS_SECONDS` have passed since it was."""
        if time.monotonic() - self._told < STATS_SECONDS:
            return False
        self._told = time.monotonic()
        return True

    def speed(self, n_lines: int) -> dict[str, float]:
        """Fields of `StreamStats` after `n_lines` lines of the whole text."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        pace = (n_lines - self._first_line) / seconds
        token_pace = self.n_tokens / max(self._seconds, 1e-9)
        return {"seconds": seconds, "lines_per_second": pace, "tokens_per_second": token_pace}


class Tokens(NamedTuple):
    """Tokens (t) of a text, the number of bytes of each (t), and the text; `is_reset`: the memory is cleared before."""

    ids: NDArray[np.int32]
    sizes: NDArray[np.int32]
    text: bytes
    is_reset: bool = False

    def __add__(self, other: Tokens) -> Tokens:  # type: ignore[override]
        ids, sizes = np.concatenate((self.ids, other.ids)), np.concatenate((self.sizes, other.sizes))
        return Tokens(ids, sizes, self.text + other.text)

    def divide(self, n: int) -> tuple[Tokens, Tokens]:
        n_bytes = int(self.sizes[:n].sum())
        first = Tokens(self.ids[:n], self.sizes[:n], self.text[:n_bytes])
        return first, Tokens(self.ids[n:], self.sizes[n:], self.text[n_bytes:])

    def n_within(self, n_bytes: int) -> int:
        return int(np.searchsorted(np.cumsum(self.sizes), n_bytes, side="right"))

    def n_begun(self, n_bytes: int) -> int:
        return int(np.searchsorted(np.cumsum(self.sizes) - self.sizes, n_bytes))


class Intake:
    """Text on its way to the model.

    It passes from `_arrived` (bytes) through `_pretokenizer` (the unfinished word at its end) to the queue of tokens,
    whose first `_n_ready` may be scored.

    Attributes:
        line_ends: Reads CR LF as LF.
        n_received: Number of bytes and documents that have arrived.
    """

    def __init__(
        self, model: LoadedModel, options: StreamConfig, position: StreamPosition, resume: SessionState | None
    ) -> None:
        self._tokenizer, self._options = model.tokenizer, options
        self._reset_pattern = None
        if options.each_line:
            self._reset_pattern = compile_pattern("", "stream.reset_on")  # which matches every line
        elif options.reset_on is not None:
            self._reset_pattern = compile_pattern(options.reset_on, "stream.reset_on")
        self.resets_at_documents = options.reading(model.config.model, model.config.train.reading).reset_on_document
        pending = PendingText(b"", np.empty(0, np.int32), np.empty(0, np.int32))
        if resume is not None:
            pending = resume.pending
        rest = pending.data[pending.n_tokenized :]
        # A CR at the end waits for what follows it; those before it have been decided.
        self._arrived = rest if options.binary else rest.removesuffix(b"\r")
        self.line_ends = LineEnds(rest[len(self._arrived) :])
        self._pretokenizer = PreTokenizer(self._tokenizer.splitter, by_line=self._reset_pattern is not None)
        self._queue = Tokens(pending.ids, pending.sizes, pending.data[: pending.n_tokenized])
        self._documents = deque(pending.documents)  # offsets in the text that waits
        self._offset, self._at_line_start = position.n_bytes, position.n_bytes == position.line_start
        self._last_arrival, self.n_received = time.monotonic(), 0
        self._is_ended = False
        self._n_ready = self._n_complete()

    @property
    def pending(self) -> PendingText:
        ids, sizes, text, _ = self._queue
        data = text + self._pretokenizer.pending + self._arrived + self.line_ends.held
        return PendingText(data, ids, sizes, tuple(self._documents))

    @property
    def ends_line(self) -> bool:
        """True if the unfinished word ends a line, which only lacks what may follow."""
        return self._pretokenizer.pending.endswith(b"\n")

    def begin_document(self, *, is_reset: bool) -> int:
        """Begins a document, before which the memory may be cleared; returns its offset in the whole text."""
        self._arrived += self.line_ends.feed(b"", final=True)
        start = self._n_tokenized + len(self._arrived)
        is_first_here = not self._documents or self._documents[-1] < start
        if self.resets_at_documents and is_reset and is_first_here:
            self._documents.append(start)
        self.n_received += 1
        return self._offset + start

    def receive(self, portion: bytes | None) -> bool:
        """Appends bytes that have arrived. True if an unfinished line is to be output, because none have for long."""
        if portion:
            self._last_arrival = time.monotonic()
            self._arrived += portion if self._options.binary else self.line_ends.feed(portion)
            self.n_received += len(portion)
        if portion is not None or self._options.flush_ms is None:
            return False
        wait = self._options.flush_ms / 1000 - 1e-3  # a wait may end that much early
        if time.monotonic() - self._last_arrival < wait:
            return False
        self._enqueue(self._pretokenizer.flush())
        self._n_ready = len(self._queue.ids)
        return True

    def release_lines(self) -> None:
        """Makes the complete lines of the queue ready, which without output wait until a call is full."""
        self._n_ready = max(self._n_ready, self._queue.n_begun(self._queue.text.rfind(b"\n") + 1))

    def end(self) -> None:
        self._is_ended = True
        self._arrived += self.line_ends.feed(b"", final=True)

    def take(self, *, to_line_end: bool) -> Tokens | None:
        """Tokens to score in one call, which leave the queue; None if none can be output now.

        `to_line_end`: the last of them ends a line, if one of them does.
        """
        while not self._n_ready:
            if self._arrived:
                self._feed()
                continue
            if self._is_ended:
                self._enqueue(self._pretokenizer.finish())
                self._n_ready = len(self._queue.ids)
            if not self._n_ready:
                return None
        n, is_reset = self._n_before_reset(min(self._n_ready, TOKENS_PER_CALL))
        if to_line_end:
            line_end = self._queue.divide(n)[0].text.rfind(b"\n") + 1
            n = self._queue.n_begun(line_end) or n
        tokens, self._queue = self._queue.divide(n)
        # All that is counted from the beginning of the queue moves with it.
        self._n_ready -= len(tokens.ids)
        self._offset += len(tokens.text)
        self._at_line_start = tokens.text.endswith(b"\n")
        self._documents = deque(at - len(tokens.text) for at in self._documents)
        return tokens._replace(is_reset=is_reset)

    @property
    def _n_tokenized(self) -> int:
        return len(self._queue.text) + len(self._pretokenizer.pending)

    def _feed(self) -> None:
        """Tokenizes at most `BLOCK_BYTES` of the bytes that have arrived, up to the next document."""
        start = self._n_tokenized
        if start in self._documents:
            self._enqueue(self._pretokenizer.finish())
        stop = min([BLOCK_BYTES, *(at - start for at in self._documents if at > start)])
        self._enqueue(self._pretokenizer.feed(self._arrived[:stop]))
        self._arrived = self._arrived[stop:]
        self._n_ready = self._n_complete()

    def _enqueue(self, words: bytes) -> None:
        """Tokenizes whole words and appends them to the queue; before a line that may be a reset, a token ends."""
        if not words:
            return
        by_line = self._reset_pattern is not None and not self._tokenizer.splitter.ends_at_lines
        for part in _LINE.findall(words) if by_line else [words]:
            byte = self._offset + len(self._queue.text)
            ids, sizes = self._tokenizer.tokens(part, byte)
            if not len(ids) and not self._is_ended:
                raise DataError(f"the line at byte {byte} has no tokens.", "Leave it out.")
            self._queue += Tokens(ids, sizes, part)

    def _n_complete(self) -> int:
        """Number of queued tokens whose scores can be output."""
        n, line_end = len(self._queue.ids), self._queue.text.rfind(b"\n") + 1
        n_in_lines = self._queue.n_begun(line_end)
        if self._reset_pattern is not None:  # an unfinished line may be a reset, until it is too long for one
            if len(self._queue.text) - line_end < LINE_LIMIT:
                return n_in_lines
            return n
        if self._options.emit in ("tokens", "words"):
            return n
        if self._options.emit == "none":  # no line is awaited, so calls are full
            n_in_lines = 0
        return n_in_lines + (n - n_in_lines) // TOKENS_PER_CALL * TOKENS_PER_CALL

    def _n_before_reset(self, n: int) -> tuple[int, bool]:
        """Number of the first `n` queued tokens before the next document or line that matches `reset_on`, at least one.

        Also whether the queue begins with such a document or line, before which the session is reset.
        """
        is_reset = bool(self._documents) and not self._documents[0]
        if is_reset:
            self._documents.popleft()
        if self._documents:
            n = min(n, self._queue.n_within(self._documents[0]))
        if self._reset_pattern is None:
            return n, is_reset
        text, n_bytes = self._queue.text, int(self._queue.sizes[:n].sum())
        start = 0  # of the next line
        if not self._at_line_start:
            start = text.find(b"\n") + 1 or n_bytes
        while start < n_bytes:
            end = text.find(b"\n", start) + 1 or len(text)
            line = text[start : min(end, start + LINE_LIMIT)].rstrip(b"\r\n")
            is_match = self._reset_pattern.search(line) is not None
            if is_match and start:
                return max(1, self._queue.n_within(start)), is_reset
            is_reset = is_reset or is_match
            start = end
        return n, is_reset


class Output:
    """Scored tokens on their way out: as they are, joined to words, or assembled to lines.

    Attributes:
        predictions: What is kept of the prediction of each token, if any of it is output.
        words: The words, if they are output.
        selection: Selects what is output.
        n_lines, n_bytes, n_tokens, bits: Complete lines, bytes and tokens so far, and the sum of their surprisals.
    """

    def __init__(
        self,
        options: StreamConfig,
        position: StreamPosition,
        predictions: Predictions | None,
        before: bytes,
        on_token: Callable[[TokenScore], None] | None,
        on_word: Callable[[WordScore], None] | None,
    ) -> None:
        self.options, self.predictions, self._on_token, self._on_word = options, predictions, on_token, on_word
        self.n_lines, self.n_bytes, self.n_tokens = position.n_lines, position.n_bytes, position.n_tokens
        self.bits, self._line_start = position.bits, position.line_start
        self.words = None
        if predictions and (options.emit == "words" or on_word):
            at = WordPosition(last=before, starts=deque())
            if options.emit == "words" and position.words is not None:
                at = position.words.copy()
            self.words = Words(predictions.boundaries, at, by_line=options.each_line)
        self.selection = Selection(options, position.recent.get(options.emit, ()), position.n_shown)
        self._line, self._line_tokens = list(position.scored), position.line_tokens
        self._line_bytes = sum(len(text) for text, _ in self._line)

    @property
    def position(self) -> StreamPosition:
        """The place from which another stream continues."""
        emit, recent, words = str(self.options.emit), tuple(self.selection.recent), None
        if emit == "words" and self.words is not None:
            words = self.words.at.copy()
        return StreamPosition(
            n_lines=self.n_lines,
            n_bytes=self.n_bytes,
            n_tokens=self.n_tokens,
            bits=self.bits,
            line_start=self._line_start,
            scored=tuple(self._line),
            n_shown=self.selection.n_shown,
            recent={emit: recent} if recent else {},
            words=words,
            line_tokens=self._line_tokens,
        )

    def feed(
        self, tokens: Tokens, bits: NDArray[np.float64], features: NDArray[np.float64] | None
    ) -> Iterator[StreamEvent]:
        """Outputs the next tokens with their surprisals (t) and features (t f), or the words or lines they complete."""
        self.n_tokens += len(bits)
        self.bits += float(bits.sum())
        emit, start, predictions = self.options.emit, 0, self._values(features)
        # Not strict: without features there is None for any number of tokens.
        for size, token_bits, prediction in zip(tokens.sizes.tolist(), bits.tolist(), predictions, strict=False):
            token = tokens.text[start : start + size]
            start += size
            if emit == "lines":
                self._line_tokens += 1
            score = TokenScore(self.n_lines + 1, self.n_bytes, token, token_bits, prediction)
            if self._on_token:
                self._on_token(score)
            if self.words:
                yield from self._listed(self.words.feed(score))
            if emit == "tokens" and self.selection.shows(token_bits):
                yield score
            yield from self._add_to_line(token, token_bits)

    def end_line_part(self) -> Iterator[LineScore]:
        """Outputs the line being assembled, or a part of it, unless it is empty."""
        spans, n_bytes, n_tokens = tuple(self._line), self._line_bytes, self._line_tokens
        self._line, self._line_bytes, self._line_tokens = [], 0, 0
        bits = sum(span_bits for _, span_bits in spans)
        if n_bytes and self.selection.shows(bits / n_bytes):
            yield LineScore(
                line=self.n_lines + 1,
                byte=self.n_bytes - n_bytes,
                bytes=n_bytes,
                text=b"".join(text for text, _ in spans),
                tokens=n_tokens,
                bits=bits,
                bits_per_byte=bits / n_bytes,
                spans=spans,
            )

    def end(self, session: InferenceSession) -> Iterator[StreamEvent]:
        if self.n_bytes > self._line_start:
            yield from self.end_line_part()
            self.n_lines += 1
        yield from self.end_word(session)

    def end_word(self, session: InferenceSession) -> Iterator[StreamEvent]:
        """Outputs the unfinished word, if there is one, which ends if the next token is one that begins a text."""
        if self.words and self.words.at.text:
            _, features = session.score(np.array([session.model.tokenizer.start_id]), self.predictions)
            yield from self._listed(self.words.end(self.n_bytes, next(self._values(features))))

    def _add_to_line(self, token: bytes, bits: float) -> Iterator[LineScore]:
        """Adds a token to the line; one with two line ends counts for the line that it begins in."""
        for piece in _LINE.findall(token) or [token]:
            if self.options.emit == "lines":
                self._add_span(piece, bits)
            bits = 0.0
            self.n_bytes += len(piece)
            ends_line = piece.endswith(b"\n")
            if ends_line or self._line_bytes >= LINE_LIMIT:
                yield from self.end_line_part()
            if ends_line:
                self.n_lines += 1
                self._line_start = self.n_bytes

    def _add_span(self, text: bytes, bits: float) -> None:
        """Adds text to the line being assembled; a token without text counts with the one before it."""
        self._line_bytes += len(text)
        if self._line and not text:
            text, bits_before = self._line.pop()
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
            if self.options.emit == "words" and (isinstance(event, Row) or self.selection.shows(event.bits)):
                yield event


class Selection:
    """Selects scores (bits per byte of a line, or bits of a word or token) that `min_bits` and `top` both let pass.

    `top` compares a score with the `RECENT` before it: fewer than this share of them are as high. It selects none
    until the share is one whole score, the first 100 of them for 1 %.

    `recent` are the latest scores, the oldest one first; `n_shown` were selected so far.
    """

    def __init__(self, options: StreamConfig, recent: Sequence[float] = (), n_shown: int = 0) -> None:
        self.min_bits, self.top, self.n_shown = options.min_bits, options.top, n_shown
        self.recent = deque(recent, RECENT)
        self._sorted = sorted(self.recent)

    def shows(self, score: float) -> bool:
        """True if the next score is selected; counts it, and remembers it for `top`."""
        is_shown = self.min_bits is None or score >= self.min_bits
        if self.top is not None:
            score = round(score, 3)  # equal lines may differ by rounding errors
            n_top = self.top * len(self._sorted)
            n_as_high = len(self._sorted) - bisect_left(self._sorted, score)
            is_shown = is_shown and n_top >= 1 and n_as_high < n_top
            if len(self._sorted) == RECENT:
                del self._sorted[bisect_left(self._sorted, self.recent[0])]
            self.recent.append(score)  # drops the oldest one
            insort(self._sorted, score)
        self.n_shown += is_shown
        return is_shown
