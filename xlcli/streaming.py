"""Streaming: scores text as it arrives, in constant RAM. The scores do not depend on how the text arrives.

Text is scored as soon as its score can be output: a line when its end arrives, a word when it is complete if tokens are
output. Calls of the model are as large as the text that has arrived allows, so throughput grows with the rate of input.
A line of more than `LINE_LIMIT` bytes is output in parts: several `LineScore` with the same `line` and growing `byte`.

With `reset_on_document` the memory is cleared before each document; a portion of type `Document` begins one. No token
is in two documents then. With `each_line` it is cleared before each line.

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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xlcli.config import StreamConfig
from xlcli.config.base import compile_pattern
from xlcli.errors import DataError
from xlcli.events import LineScore, Notice, Prediction, Row, StreamStats, TokenScore, WordScore
from xlcli.inference import TOKENS_PER_CALL, InferenceSession, SaveState, compile_cache, window_notice
from xlcli.metrics import LN2
from xlcli.store.state_files import PendingText, SessionState, StreamPosition, WordPosition
from xlcli.text.documents import Document, plain
from xlcli.text.formats import CRLF_NOTICE, LineEnds
from xlcli.text.pretokenize import PreTokenizer
from xlcli.text.tokenizers import n_unknown, unknown_notice
from xlcli.words import Predictions, Words

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel

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

    Yields:
        Scores as `options.emit`, `min_bits` and `top` say, totals about once a second, and the final totals last.

    Raises:
        StateError: `resume` does not fit `options`.
    """
    scorer = _Scorer(model, options, runtime, resume)
    told: list[Notice] = []
    saved = time.monotonic()

    def is_due() -> bool:
        """True if it is time to save, and there is something new to save."""
        is_time = options.save_every is not None and time.monotonic() - saved >= options.save_every
        return save is not None and is_time and scorer.has_new_text

    def save_now() -> None:
        nonlocal saved
        if save:
            saved, scorer.has_new_text = time.monotonic(), False
            save(scorer.session_state())

    if resume is None and options.save_every is not None:
        save_now()  # so that a stream that is killed early knows where it began
    yield from compile_cache(scorer.session.options, stop)
    if scorer.words and scorer.words.at.document:
        yield Row(scorer.words.at.document, scorer.words.at.fields)
    for portion, is_end in itertools.chain(((portion, False) for portion in portions), [(None, True)]):
        if not is_end:
            had_crlf = scorer.line_ends.replaced
            scorer.receive(portion)
            if scorer.line_ends.replaced and not had_crlf:
                yield Notice(f"{CRLF_NOTICE}; --binary keeps them")
        else:
            # A line that ends is scored before the state is saved, so that its row does not come again.
            ends_line = scorer.pretokenizer.pending.endswith(b"\n") and not stop()
            if not ends_line:
                save_now()
            if stop():
                break
            scorer.is_ended = True
            scorer.arrived += scorer.line_ends.feed(b"", final=True)
        while not stop() and (n := scorer.next_call(to_line_end=(due := is_due()))):
            started = time.perf_counter()
            nats, features = scorer.session.score(scorer.ids[:n], scorer.predictions)
            scorer.model_seconds += time.perf_counter() - started
            scorer.model_tokens += n
            scorer.n_unknown += n_unknown(scorer.ids[:n], scorer.tokenizer.unknown_id)
            yield from scorer.output(nats / LN2, features, on_token)
            if not told:
                told = window_notice(scorer.session.state.span, scorer.session.options, scorer.session.state.seen)
                yield from told
            if time.monotonic() - scorer.last_stats >= STATS_SECONDS:
                scorer.last_stats = time.monotonic()
                yield scorer.stats(final=False)
            if due:
                save_now()
        if is_end:
            if ends_line:
                save_now()
            if scorer.n_bytes > scorer.line_start:  # an unfinished line
                yield from scorer.end_line_part()
                scorer.n_lines += 1
            yield from scorer.end_words()
            break
        if stop():
            save_now()
            break
        if scorer.flush_due:
            scorer.flush_due = False
            yield from scorer.end_line_part()
        if is_due():
            save_now()
    yield from map(Notice, scorer.tokenizer.take_notices())
    yield from unknown_notice(scorer.n_unknown, scorer.model_tokens)
    yield scorer.stats(final=True)


class _Scorer:
    """A running stream: the session, the text that waits to be scored, the line being assembled, totals.

    Text passes from `arrived` (bytes) through `pretokenizer` (the unfinished word at its end) to the queue (`ids` and
    `sizes` of tokens, and their `text`), and from there to the model; the first `n_ready` tokens of the queue may.
    """

    def __init__(
        self, model: LoadedModel, options: StreamConfig, runtime: Runtime, resume: SessionState | None
    ) -> None:
        self.session = InferenceSession.open(model, runtime, options, resume, predicts=False)
        self.tokenizer = model.tokenizer
        self.options = options
        reset_on = "" if options.each_line else options.reset_on  # which matches every line
        self.reset_on_document = options.reading(model.config.model, model.config.train).reset_on_document
        self.reset_pattern = None if reset_on is None else compile_pattern(reset_on, "stream.reset_on")
        pending = resume.pending if resume else PendingText(b"", np.empty(0, np.int32), np.empty(0, np.int32))
        rest = pending.data[pending.n_tokenized :]
        self.arrived = rest if options.binary else rest.removesuffix(b"\r")  # what came before it has been decided
        self.line_ends = LineEnds(rest[len(self.arrived) :])
        self.pretokenizer = PreTokenizer(self.tokenizer.splitter, by_line=self.reset_pattern is not None)
        self.ids, self.sizes, self.text = pending.ids, pending.sizes, pending.data[: pending.n_tokenized]
        self.n_ready = 0
        # Offsets in the unscored text before which the memory is to be cleared.
        self.documents = deque(pending.documents)
        position = resume.stream if resume and resume.stream else StreamPosition(0, 0, 0, 0.0, 0, ())
        self.n_lines, self.n_bytes, self.n_tokens = position.n_lines, position.n_bytes, position.n_tokens
        self.first_line = self.n_lines
        self.bits = position.bits
        self.predictions = self.words = None
        if options.emit == "words" or options.logprobs is not None:
            self.predictions = Predictions(self.tokenizer, options, runtime.device)
        if options.emit == "words" and self.predictions:
            at = position.words or WordPosition(last=self.tokenizer.decode(self.session.last_tokens))
            self.words = Words(self.predictions.boundaries, at.copy(), by_line=options.each_line)
        self.selection = Selection(options, position.recent.get(options.emit, ()), position.n_shown)
        self.line_start = position.line_start
        self.line, self.line_tokens = list(position.scored), position.line_tokens
        self.line_bytes = sum(len(text) for text, _ in self.line)
        self.has_new_text = self.flush_due = self.is_ended = False
        self.started = self.last_arrival = self.last_stats = time.monotonic()
        self.model_seconds, self.model_tokens, self.n_unknown = 0.0, 0, 0

    def receive(self, portion: bytes | None) -> None:
        """Appends bytes that have arrived; None means that nothing has arrived for a while."""
        now = time.monotonic()
        flush_ms = self.options.flush_ms
        if portion is None:
            self.flush_due = flush_ms is not None and now - self.last_arrival >= flush_ms / 1000 - 1e-3
            return
        if isinstance(portion, Document) and (self.reset_on_document or self.words):
            self.arrived += self.line_ends.feed(b"", final=True)
            start = self._n_tokenized + len(self.arrived)
            if self.reset_on_document and (not self.documents or self.documents[-1] < start):  # no other begins here
                self.documents.append(start)
            if self.words:
                self.words.at.begin(self.n_bytes + start, plain(portion.fields))
            self.has_new_text = True
        if portion:
            self.last_arrival = now
            self.arrived += portion if self.options.binary else self.line_ends.feed(portion)
            self.has_new_text = True

    def next_call(self, *, to_line_end: bool) -> int:
        """Number of queued tokens to score in one call, after tokenizing what has arrived; 0 if none can be output now.

        Resets the session before the first of them if `reset_on` or a document says so. `to_line_end`: the last of them
        ends a line, if one of them does.
        """
        while not self.n_ready:
            if self.arrived:
                self._feed()
                continue
            if self.is_ended or self.flush_due:
                self._enqueue(self.pretokenizer.finish() if self.is_ended else self.pretokenizer.flush())
                self.n_ready = len(self.ids)
            if not self.n_ready:
                return 0
        n, is_reset = self._n_before_reset(min(self.n_ready, TOKENS_PER_CALL))
        if is_reset:
            self.session.reset()
            if self.words:
                self.words.at.last = b"\n"
        line_end = self.text.rfind(b"\n", 0, int(self.sizes[:n].sum())) + 1 if to_line_end else 0
        return self._n_tokens_begun(line_end) or n

    @property
    def _n_tokenized(self) -> int:
        """Number of unscored bytes that the pre-tokenizer has taken."""
        return len(self.text) + len(self.pretokenizer.pending)

    def _feed(self) -> None:
        """Tokenizes at most `BLOCK_BYTES` of the bytes that have arrived, up to the next document."""
        start = self._n_tokenized
        if start in self.documents:
            self._enqueue(self.pretokenizer.finish())
        stop = min((at - start for at in self.documents if at > start), default=BLOCK_BYTES)
        stop = min(stop, BLOCK_BYTES)
        self._enqueue(self.pretokenizer.feed(self.arrived[:stop]))
        self.arrived = self.arrived[stop:]
        self.n_ready = self._n_ready()

    def stats(self, *, final: bool) -> StreamStats:
        """Totals so far."""
        seconds = time.monotonic() - self.started
        return StreamStats(
            lines=self.n_lines,
            bytes=self.n_bytes,
            tokens=self.n_tokens,
            bits=self.bits,
            bits_per_byte=self.bits / self.n_bytes if self.n_bytes else 0.0,
            seconds=seconds,
            lines_per_second=(self.n_lines - self.first_line) / seconds if seconds else 0.0,
            tokens_per_second=self.model_tokens / self.model_seconds if self.model_seconds else 0.0,
            mem_len=self.session.state.span.mem_len,
            state_bytes=self.session.state.bytes,
            final=final,
            shown=self.selection.n_shown if self.options.selects else None,
            crlf=self.line_ends.replaced,
        )

    def session_state(self) -> SessionState:
        """State from which another stream continues exactly."""
        data = self.text + self.pretokenizer.pending + self.arrived + self.line_ends.held
        unscored = PendingText(data, self.ids, self.sizes, tuple(self.documents))
        scored, n_shown, latest = tuple(self.line), self.selection.n_shown, tuple(self.selection.recent)
        recent = {str(self.options.emit): latest} if latest else {}
        counters = self.n_lines, self.n_bytes, self.n_tokens, self.bits, self.line_start
        words = self.words.at.copy() if self.words else None
        position = StreamPosition(*counters, scored, n_shown, recent, words, self.line_tokens)
        return SessionState(self.session.state, self.session.last_tokens[0], unscored, None, position)

    def _enqueue(self, words: bytes) -> None:
        """Tokenizes whole words and appends them to the queue; before a line that may be a reset, a token ends."""
        by_line = self.reset_pattern is not None and not self.tokenizer.splitter.ends_at_lines
        for part in _LINE.findall(words) if by_line else filter(None, [words]):
            ids, sizes = self.tokenizer.tokens(part, self.n_bytes + len(self.text))
            if not len(ids) and not self.is_ended:
                raise DataError(f"the line at byte {self.n_bytes + len(self.text)} has no tokens.", "Leave it out.")
            self.ids = np.concatenate((self.ids, ids))
            self.sizes = np.concatenate((self.sizes, sizes))
            self.text += part

    def _n_ready(self) -> int:
        """Number of queued tokens to score now."""
        line_end = self.text.rfind(b"\n") + 1
        n_in_lines = self._n_tokens_begun(line_end)
        if self.reset_pattern is not None:
            return len(self.ids) if len(self.text) - line_end >= LINE_LIMIT else n_in_lines
        if self.options.emit in ("tokens", "words"):
            return len(self.ids)
        if self.options.emit == "none":
            n_in_lines = 0
        return n_in_lines + (len(self.ids) - n_in_lines) // TOKENS_PER_CALL * TOKENS_PER_CALL

    def _n_before_reset(self, n: int) -> tuple[int, bool]:
        """Number of the first `n` queued tokens before the next document or line that matches `reset_on`, at least one.

        Also whether the queue begins with such a document or line, before which the session is reset.
        """
        is_reset = bool(self.documents) and not self.documents[0]
        if is_reset:
            self.documents.popleft()
        if self.documents:
            n = min(n, self._n_tokens_within(self.documents[0]))
        if self.reset_pattern is None:
            return n, is_reset
        n_bytes = int(self.sizes[:n].sum())
        start = 0 if self.n_bytes == self.line_start else self.text.find(b"\n") + 1 or n_bytes
        while start < n_bytes:
            end = self.text.find(b"\n", start) + 1 or len(self.text)
            if self.reset_pattern.search(self.text[start : min(end, start + LINE_LIMIT)].rstrip(b"\r\n")):
                if start:
                    return max(1, self._n_tokens_within(start)), is_reset
                is_reset = True
            start = end
        return n, is_reset

    def _n_tokens_within(self, n_bytes: int) -> int:
        """Number of queued tokens that lie within the first `n_bytes` bytes of the queue."""
        return int(np.searchsorted(np.cumsum(self.sizes), n_bytes, side="right"))

    def _n_tokens_begun(self, n_bytes: int) -> int:
        """Number of queued tokens that hold the first `n_bytes` bytes of the queue."""
        return int(np.searchsorted(np.cumsum(self.sizes), n_bytes)) + 1 if n_bytes else 0

    def output(
        self,
        bits: NDArray[np.float64],
        features: NDArray[np.float64] | None,
        on_token: Callable[[TokenScore], None] | None,
    ) -> Iterator[StreamEvent]:
        """Takes scored tokens from the queue, counts them, and outputs them, or words or lines that they complete."""
        n = len(bits)
        self.has_new_text = True
        sizes, emit = self.sizes[:n], self.options.emit
        n_bytes = int(sizes.sum())
        text = self.text[:n_bytes]
        self.ids, self.sizes, self.text = self.ids[n:], self.sizes[n:], self.text[n_bytes:]
        self.documents = deque(at - n_bytes for at in self.documents)
        self.n_ready -= n
        self.n_tokens += n
        self.bits += float(bits.sum())
        start = 0
        predictions = self._predictions(features)
        for size, token_bits, prediction in zip(sizes.tolist(), bits.tolist(), predictions, strict=False):
            token = text[start : start + size]
            start += size
            self.line_tokens += emit == "lines"
            score = TokenScore(self.n_lines + 1, self.n_bytes, token, token_bits, prediction)
            if on_token:
                on_token(score)
            if emit == "tokens":
                if self.selection.shows(token_bits):
                    yield score
            elif self.words:
                yield from self._selected(self.words.feed(score))
            for piece in _LINE.findall(token) or [
                token
            ]:  # one with two line ends counts for the line that it begins in
                if emit == "lines" and (piece or not self.line):
                    self.line.append((piece, token_bits))
                elif emit == "lines":
                    self.line[-1] = self.line[-1][0], self.line[-1][1] + token_bits
                self.line_bytes += len(piece) * (emit == "lines")
                token_bits = 0.0
                self.n_bytes += len(piece)
                if piece.endswith(b"\n"):
                    yield from self.end_line_part()
                    self.n_lines += 1
                    self.line_start = self.n_bytes
                elif self.line_bytes >= LINE_LIMIT:
                    yield from self.end_line_part()

    def end_words(self) -> Iterator[Row | WordScore]:
        """Outputs the last word, at the end of the text."""
        if self.words and self.words.at.text:
            _, features = self.session.score(np.array([self.tokenizer.start_id]), self.predictions)
            yield from self._selected(self.words.end(self.n_bytes, next(self._predictions(features))))

    def _predictions(self, features: NDArray[np.float64] | None) -> Iterator[Prediction | None]:
        """The predictions that features (t f) stand for; None for any number of tokens without."""
        if features is None or self.predictions is None:
            return itertools.repeat(None)
        return map(self.predictions.value, features.tolist())

    def _selected(self, events: Iterator[Row | WordScore]) -> Iterator[Row | WordScore]:
        return (event for event in events if isinstance(event, Row) or self.selection.shows(event.bits))

    def end_line_part(self) -> Iterator[LineScore]:
        """Outputs the line being assembled, or a part of it, unless it is empty."""
        spans, n_bytes, n_tokens = tuple(self.line), self.line_bytes, self.line_tokens
        self.line, self.line_bytes, self.line_tokens = [], 0, 0
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


class Selection:
    """Selects scores (bits per byte of a line, or bits of a word or token) that `min_bits` and `top` both let pass.

    `top` compares a score with the `RECENT` before it: fewer than this share of them are as high. It selects none
    until the share is one whole score, the first 100 of them for 1 %.

    Args:
        options: Their values.
        recent: Latest scores, the oldest one first.
        n_shown: Number of scores selected so far.
    """

    def __init__(self, options: StreamConfig, recent: Sequence[float] = (), n_shown: int = 0) -> None:
        self.min_bits, self.top, self.n_shown = options.min_bits, options.top, n_shown
        self.recent = deque(recent, RECENT)
        self._sorted = sorted(self.recent)

    def shows(self, score: float) -> bool:
        """True if the next score is selected."""
        is_shown = self.min_bits is None or score >= self.min_bits
        if self.top is not None:
            score = round(score, 3)  # equal lines may differ by rounding errors
            share = self.top * len(self._sorted)
            n_higher = len(self._sorted) - bisect_left(self._sorted, score)
            is_shown = is_shown and share >= 1 and n_higher < share
            if len(self._sorted) == RECENT:
                del self._sorted[bisect_left(self._sorted, self.recent[0])]
            self.recent.append(score)
            insort(self._sorted, score)
        self.n_shown += is_shown
        return is_shown
