"""Streaming: scores text as it arrives, in constant RAM. The scores do not depend on how the text arrives.

Text is scored as soon as its score can be output: a line when its end arrives, a word when it is complete if tokens are
output. Calls of the model are as large as the text that has arrived allows, so throughput grows with the rate of input.
A line of more than `LINE_LIMIT` bytes is output in parts: several `LineScore` with the same `line` and growing `byte`.

With `reset_on_document` the memory is cleared before each document, and no token is in two documents.

A session is saved as it was before the unfinished end of the text, together with the bytes of that end. The end is
scored and output when the input ends, and again, together with new text, by a stream that resumes. Two streams
connected by a saved session thus give the scores of one stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from xlcli.config import StreamConfig
from xlcli.errors import ConfigError, DataError, StateError
from xlcli.events import Notice, Row, StreamStats, TokenScore, WordScore
from xlcli.inference import InferenceSession, SaveState, compile_cache, window_notice
from xlcli.metrics import LN2
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import SessionState, StreamPosition
from xlcli.streaming.intake import Intake
from xlcli.streaming.output import ScoredEvent, StreamOutput
from xlcli.text.documents import Document, plain
from xlcli.text.formats import CRLF_NOTICE
from xlcli.text.oddities import Oddities
from xlcli.text.tokenizers import Coverage
from xlcli.words import Predictions, with_remark_on_rows

STATS_SECONDS = 1.0  # time between two `StreamStats`

StreamEvent = ScoredEvent | StreamStats | Notice


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
    """Scores text as it arrives. Yields scores as `options` say, and totals of this run about once a second and last.

    Args:
        model: The model that scores.
        portions: Bytes as they arrive, divided anywhere; a `Document` begins a document. None means that nothing has
            arrived for a while; only then is an unfinished line scored early (`flush_ms`). The next portion is taken
            when the last one has been scored. A stopped stream saves the unscored bytes of the last one.
        options: What is scored, yielded, cleared and saved.
        runtime: Of `make_runtime`.
        resume: Saved session, whose line numbers and byte offsets go on. `StateError` if it does not fit `options`.
        save: Called every `save_every` seconds at the end of a line, if text was read since, and at the end.
        stop: Called between calls of the model. Once true, unscored text is saved with the session and not scored.
        on_token: Called with each token when it is scored, whatever is yielded.
        on_word: Called with each word after the token that ends it, whatever is yielded.
        saves_start: Save before text is read, too: with the place in a log, where a stream that is killed goes on.
    """
    running = _Stream(model, options, runtime, resume, save, stop, on_token, on_word)
    # Advice on how texts are written is noise for whoever keeps a log, and would come at each restart.
    is_log = options.emit not in ("tokens", "words") and (options.reads != "" or saves_start)
    kinds = "any"
    if not is_log:
        kinds = "row" if options.each_line else "line"
    oddities = Oddities("line", kinds, running.output.n_lines)
    if not options.binary and model.tokenizer.kind != "ids":
        portions = oddities.watched(portions, has_rows=not is_log)
    if saves_start:
        running.save()
    if resume is not None and resume.stream.reads not in (None, options.reads):
        none = "none of --text-field, --text-regex and --event-start"
        made, given = resume.stream.reads or none, options.reads or none
        yield Notice(f"the state was made with {made}, this stream has {given}; use the same or a new state", "warning")
    yield from compile_cache(running.session.options, stop)
    words = running.output.position.words
    if words is not None and words.document:  # a row of a table in which the stream continues
        yield Row(words.document, words.fields)
    yield from with_remark_on_rows(running.run(portions), punctuation=options.split_punctuation)
    yield from oddities.notices()
    if model.tokenizer.caveat is not None:
        yield Notice(model.tokenizer.caveat)
    yield from running.coverage.notices()
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
        if options.frozen:
            if resume is None:
                remedy = "Make it: xlcli stream NORMAL.log --state-out FILE."
                raise ConfigError("--frozen needs the state of a baseline.", remedy)
            if position.n_bytes != position.line_start:
                problem = "the state ends within a line, with which no other line can begin."
                raise StateError(problem, "Let the text of the baseline end with a line end.")
            self.session.freeze()
        self.intake = Intake(model, options, position, resume)
        predicts = options.emit == "words" or bool(options.columns) or on_word is not None
        layers = options.asked.layers_of(model.config.model, self.session.options.learning.context_cache)
        predictions = Predictions(model.tokenizer, options, runtime.device, layers) if predicts else None
        before = model.tokenizer.decode(self.session.last_tokens)
        self.output = StreamOutput(options, position, predictions, before, on_token, on_word)
        self.output.records.end = self.intake.end_offset
        self.coverage = Coverage(model.tokenizer, model.name)
        self._started = self._told = time.monotonic()
        self._waiting_seconds = 0.0  # how long text was waited for
        self._start = self.output.position  # from which totals are counted
        self._n_together = 1  # lines that are scored in one call; a word ends only with the state behind its line
        if options.frozen and self.output.words is None:
            self._n_together = self.session.max_rows(None)
        self._options = options
        self._stop = stop
        self.story = position.story
        self._save = save
        self._saved_at = time.monotonic()
        self._saved_mark = (0, 0)
        self._said = set[str]()  # texts of notices

    def run(self, portions: Iterable[bytes | None]) -> Iterator[StreamEvent]:
        """Scores all portions, and the end of the text, until `stop`."""
        self._started = time.monotonic()
        for portion in self._awaited(portions):
            yield from self.begin_document(portion)
            is_flushed = self.intake.receive(portion)
            self.output.records.end = self.intake.end_offset
            yield from self.score()
            if self._stop():
                self.save()
                return
            if is_flushed:
                yield from self.output.end_line_part()
            if self.is_due():
                self.save()
        yield from self.end()

    def _awaited(self, portions: Iterable[bytes | None]) -> Iterator[bytes | None]:
        """The portions; the time until each arrives, and until they end, is counted as waiting."""
        waits_since = time.monotonic()
        for portion in portions:
            self._waiting_seconds += time.monotonic() - waits_since
            yield portion
            waits_since = time.monotonic()
        self._waiting_seconds += time.monotonic() - waits_since

    def begin_document(self, portion: bytes | None) -> Iterator[StreamEvent]:
        """Begins the document that a portion is, unless it continues the one before it; yields what this completes."""
        if not isinstance(portion, Document):
            self._begin_first(portion, {})
            return
        records, words = self.output.records, self.output.words
        records.count(portion)
        is_output = self._options.emit == "lines" and not records.waiting  # the record before, as after a pause
        if portion.continues and not is_output:
            if records.waiting:
                records.join(portion)
            self._begin_first(portion, plain(portion.fields))
            return

        fields = plain(portion.fields)
        is_reset = self._options.reset_on_change is None
        if portion:  # a row without text is of no story
            is_reset = self._begin_story(fields)
        # A saved state may end within a line whose other parts are lost: each record has lines of its own.
        if records.waiting and self.intake.is_within_line:
            self.intake.receive(b"\n")
        start = self.intake.begin_document(is_reset=is_reset)
        if portion:
            records.n_begun += 1
        yield from self.output.begin_record(start, portion)
        if words is not None:
            words.at.begin(start, fields)

    def _begin_first(self, portion: bytes | None, fields: Mapping[str, Any]) -> None:
        """Begins the first story and the first document of words with text that begins no row, if none has begun."""
        if not portion:
            return
        if self.story is None:
            self._begin_story(fields)
        words = self.output.words
        if words is not None and not words.at.n_begun:
            words.at.begin(0, {})

    def _begin_story(self, fields: Mapping[str, Any]) -> bool:
        """Sets the story by `reset_on_change`. True if it is another one than before, or there is no such option."""
        key = self._options.reset_on_change
        if key is None:
            return True
        if key not in fields:
            raise DataError(f"the text has no rows, or a row has no '{key}'.", "Name a key that all rows have.")
        story_before = self.story
        self.story = str(fields[key])
        return self.story != story_before

    def score(self) -> Iterator[StreamEvent]:
        """Scores and outputs the text that can be output by now, one call of the model after the other, until `stop`.

        Text that has left the intake is not saved with it, so it is always scored: `stop` is asked before it leaves.
        """
        output, session = self.output, self.session
        while not self._stop():
            # A save needs a line end, where the call then ends, and follows its output, which thus is never repeated.
            saves_after = self.is_due()
            texts = self.intake.take_lines(self._n_together, to_line_end=saves_after)
            if not texts:
                return
            if texts[0].is_reset:
                yield from output.end_word(session)  # scored with the memory of its text, so before the reset
                session.reset()
                if output.words is not None:
                    output.words.reset()
            if len(texts) == 1:  # it continues the session
                scores = [session.score(texts[0].ids, output.predictions)]
            else:  # each is scored as after a reset
                scores = session.score_each([text.ids for text in texts], output.predictions)
            for text, (nats, features) in zip(texts, scores, strict=True):
                self.coverage.add(text.ids, text.sizes)
                yield from output.feed(text, nats / LN2, features)
            yield from self._remarks()
            if time.monotonic() - self._told >= STATS_SECONDS:
                self._told = time.monotonic()
                yield self.stats(final=False)
            if saves_after:
                self.save()

    def _remarks(self) -> Iterator[Notice]:
        """Remarks on the text so far, each once in a stream."""
        remarks = window_notice(self.session.state.span, self.session.options, self.session.state.seen)
        if self.intake.has_stand_ins:
            remarks = [Notice("bytes for which the model has no token are read as U+FFFD"), *remarks]
        if self.intake.line_ends.replaced:
            remarks = [Notice(f"{CRLF_NOTICE}; --binary keeps them"), *remarks]
        for remark in remarks:
            if remark.text not in self._said:
                self._said.add(remark.text)
                yield remark

    def end(self) -> Iterator[StreamEvent]:
        """Scores the lines that wait for others, and the unfinished end of the text."""
        self.intake.release_lines()
        yield from self.score()
        if self._stop():
            self.save()
            return
        # What ends with the text is output before the state is saved, so that it does not come again.
        ends_line = self.intake.ends_line
        if not ends_line:
            yield from self.output.end_record()
            self.save()
        self.intake.end()
        yield from self.score()
        if ends_line:
            yield from self.output.end_record()
            self.save()
        yield from self.output.end(self.session)

    @property
    def _mark(self) -> tuple[int, int]:
        """Text that has arrived, and tokens that were scored."""
        return self.intake.n_received, self.output.n_tokens

    def is_due(self) -> bool:
        """True if it is time to save, and text has arrived or was scored since."""
        save_every = self._options.save_every
        if self._save is None or save_every is None:
            return False
        is_time = time.monotonic() - self._saved_at >= save_every
        return is_time and self._mark != self._saved_mark

    def save(self) -> None:
        if self._save is None:
            return
        self._saved_at = time.monotonic()
        self._saved_mark = self._mark
        state, last_token = self.session.resumable
        position = replace(self.output.position, story=self.story)
        self._save(SessionState(state, last_token, self.intake.pending, None, position))

    def stats(self, *, final: bool) -> StreamStats:
        output, start = self.output, self._start
        n_lines = output.n_lines - start.n_lines
        n_bytes = output.n_bytes - start.n_bytes
        n_tokens = output.n_tokens - start.n_tokens
        bits = output.bits - start.bits
        bits_per_byte = None
        if n_bytes:
            bits_per_byte = bits / n_bytes
        seconds = max(time.monotonic() - self._started, 1e-9)
        busy_seconds = max(seconds - self._waiting_seconds, 1e-9)
        return StreamStats(
            lines=n_lines,
            bytes=n_bytes,
            tokens=n_tokens,
            bits=bits,
            bits_per_byte=bits_per_byte,
            seconds=seconds,
            busy_seconds=busy_seconds,
            lines_per_second=n_lines / busy_seconds,
            tokens_per_second=n_tokens / busy_seconds,
            mem_len=self.session.state.span.mem_len,
            state_bytes=self.session.state.bytes,
            final=final,
            shown=output.selection.n_shown if output.options.selects else None,
            crlf=self.intake.line_ends.replaced,
            records=output.records.n_begun - len(output.records.waiting),
            skipped=output.records.n_skipped,
        )
