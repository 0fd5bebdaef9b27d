"""Scores text as it arrives, for ever, in constant memory. The scores do not depend on how the text arrives.

    portions ─▶ PreTokenizer ─▶ waiting tokens ─▶ model, at most CALL tokens a call ─▶ lines, tokens, totals

What has arrived is scored as soon as it can matter: a line when its end arrives, a word when it is whole if tokens are
asked for. Calls are as large as what has arrived allows, so speed grows with the rate of the pipe. A line of more than
`LINE_LIMIT` bytes is answered in parts: several `LineScore` with the same `line` and growing `byte`.

The state that is saved is the one before the unfinished end of the text, and the bytes of that end travel with it. They
are scored and shown when the input ends, but a stream that resumes reads them again together with what follows them:
two streams with a state between them give the numbers of one.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xlcli.config import GenerateConfig, StreamConfig
from xlcli.events import GeneratedText, LineScore, StreamStats, TokenScore
from xlcli.inference import CALL, Carry, InferenceSession, PendingText, Save, damaged, pack, unpack
from xlcli.metrics import LN2
from xlcli.sampling import SampleRNG, StreamingDetokenizer, sample_tokens
from xlcli.text.pretokenize import PreTokenizer

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

BLOCK = 2**14
"""Bytes tokenized at a time."""
LINE_LIMIT = 2**14
"""Bytes after which a line is answered in parts, and beyond which `reset_on` does not look into it."""
BACKLOG = 2**17
"""Most bytes that a stopped stream leaves to its state; what arrived beyond is scored first."""
STATS_EVERY = 1.0
"""Seconds between the totals given while working."""

StreamEvent = LineScore | TokenScore | GeneratedText | StreamStats


def stream(
    model: LoadedModel,
    portions: Iterable[bytes | None],
    options: StreamConfig,
    runtime: Runtime,
    *,
    resume: tuple[State, Carry] | None = None,
    save: Save | None = None,
    stop: Callable[[], bool] = lambda: False,
    sampling: GenerateConfig | None = None,
    seed: int | None = None,
) -> Iterator[StreamEvent]:
    """Scores a pipe.

    Args:
        model: The model.
        portions: Bytes as they arrive, in any portions; None when nothing has arrived for a while, which is when an
            unfinished line may be flushed (`flush_ms`) and the state saved (`save_every`).
        options: What to emit; when to flush, save and start afresh.
        runtime: Where to compute.
        resume: A saved state and what it carries. Line numbers, byte offsets and totals count on from there.
        save: Called every `save_every` seconds when something new was read, and at the end.
        stop: Asked between calls of the model. Once true, what has arrived and is not scored is left to the state.
        sampling: How to sample_tokens the `continue_tokens` that follow the text; as `generate` does by default.
        seed: Of those choices; random when None.

    Yields:
        Scores as `options.emit` says, totals about once a second, and the final totals last of all.

    Raises:
        StateError: The state to resume is damaged or does not fit what is asked for.
    """
    pipe = _Pipe(model, options, runtime, resume)
    saved = time.monotonic()
    for portion in portions:
        pipe.take(portion)
        yield from pipe.work(stop)
        if stop():
            break
        if save and options.save_every is not None and time.monotonic() - saved >= options.save_every:
            saved = time.monotonic()
            if pipe.changed:
                save(pipe.reader.state, pipe.carry())
                pipe.changed = False
    stopped = stop()
    if save:
        save(pipe.reader.state, pipe.carry())
    if not stopped:
        yield from pipe.finish(stop)
        if options.continue_tokens:
            yield from pipe.go_on(sampling or GenerateConfig(), seed, stop)
    yield pipe.stats(final=True)


class _Pipe:
    """Everything a running stream holds; all of it bounded."""

    def __init__(
        self, model: LoadedModel, options: StreamConfig, runtime: Runtime, resume: tuple[State, Carry] | None
    ) -> None:
        self.reader = InferenceSession.open(model, runtime, options, resume)
        self.tokenizer = model.tokenizer
        self.options = options
        self.fresh = re.compile(options.reset_on.encode()) if options.reset_on is not None else None
        self.changed = self.flushing = False
        self.began = self.arrived_at = self.told = time.monotonic()
        self.busy = 0.0
        self.n_new = 0
        carry: Carry = resume[1] if resume else {}
        unread = PendingText.restore(carry, self.tokenizer.vocab_size)
        self.ids, self.text = unread.ids, unread.data[: unread.covered]
        self.sizes = self.tokenizer.sizes(self.ids, self.text)
        self.arrived = unread.data[unread.covered :]
        self.cutter = PreTokenizer()
        try:
            self.lines, self.byte = int(carry.get("lines", "0")), int(carry.get("bytes", "0"))
            self.tokens, self.bits = int(carry.get("tokens", "0")), float(carry.get("bits", "0"))
            self.line_start = int(carry.get("line_start", str(self.byte)))
            self.spans = _restore_spans(carry.get("spans"))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(error) from None
        self.n_open = sum(len(text) for text, _ in self.spans)

    def take(self, portion: bytes | None) -> None:
        """Receives bytes, or the news that none have come."""
        now = time.monotonic()
        flush_ms = self.options.flush_ms
        if portion is None:
            self.flushing = flush_ms is not None and now - self.arrived_at >= flush_ms / 1000 - 1e-3
        elif portion:
            self.arrived_at = now
            self.arrived += portion
            self.changed = True

    def work(self, stop: Callable[[], bool]) -> Iterator[StreamEvent]:
        """Scores what is ready of what has arrived."""
        halt = self._halts(stop)
        while self.arrived and not halt():
            self._queue(self.cutter.feed(self.arrived[:BLOCK]))
            self.arrived = self.arrived[BLOCK:]
            yield from self._score(self._ready(), halt)
        if self.flushing and not halt():
            self.flushing = False
            self._queue(self.cutter.flush())
            yield from self._score(len(self.ids), halt)
            yield from self._end_part()

    def finish(self, stop: Callable[[], bool]) -> Iterator[StreamEvent]:
        """Scores the unfinished end of the text."""
        self._queue(self.cutter.finish())
        yield from self._score(len(self.ids), self._halts(stop))
        if self.byte > self.line_start:
            yield from self._end_part()
            self.lines += 1

    def go_on(self, options: GenerateConfig, seed: int | None, stop: Callable[[], bool]) -> Iterator[GeneratedText]:
        """Continues the text by `continue_tokens` drawn tokens."""
        dice, outlet = SampleRNG.of(secrets.randbits(31) if seed is None else seed), StreamingDetokenizer(options.stop)
        for _ in range(self.options.continue_tokens):
            if stop() or outlet.stopped:
                break
            self.reader.last = sample_tokens(self.reader.predict(), [dice], options)
            text = outlet.feed(self.tokenizer.decode(self.reader.last))
            if text:
                yield GeneratedText(0, text)
        rest = outlet.finish()
        if rest:
            yield GeneratedText(0, rest)

    def stats(self, *, final: bool) -> StreamStats:
        """Totals so far."""
        return StreamStats(
            lines=self.lines,
            bytes=self.byte,
            tokens=self.tokens,
            bits=self.bits,
            bits_per_byte=self.bits / self.byte if self.byte else 0.0,
            seconds=time.monotonic() - self.began,
            tokens_per_second=self.n_new / self.busy if self.busy else 0.0,
            mem_len=self.reader.state.span.mem_len,
            state_bytes=self.reader.state.bytes,
            final=final,
        )

    def carry(self) -> dict[str, str]:
        """Everything but the model's memory that going on exactly needs."""
        unread = PendingText(self.ids, len(self.text), self.text + self.cutter.pending + self.arrived)
        return {
            "last": str(self.reader.last[0]),
            **unread.save(),
            "lines": str(self.lines),
            "bytes": str(self.byte),
            "tokens": str(self.tokens),
            "bits": repr(self.bits),
            "line_start": str(self.line_start),
            "spans": _save_spans(self.spans),
        }

    def _halts(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: len(self.arrived) <= BACKLOG and stop()

    def _queue(self, words: bytes) -> None:
        """Tokenizes whole words and puts them behind what is waiting."""
        if words:
            ids = self.tokenizer.encode(words)
            self.ids = np.concatenate((self.ids, ids))
            self.sizes = np.concatenate((self.sizes, self.tokenizer.sizes(ids, words)))
            self.text += words

    def _ready(self) -> int:
        """How many waiting tokens to score now."""
        whole_lines = self.text.rfind(b"\n") + 1
        n_lines = int(np.searchsorted(np.cumsum(self.sizes), whole_lines, side="right"))
        if self.fresh is not None:
            return len(self.ids) if len(self.text) - whole_lines >= LINE_LIMIT else n_lines
        if self.options.emit == "tokens":
            return len(self.ids)
        if self.options.emit == "none":
            n_lines = 0
        return n_lines + (len(self.ids) - n_lines) // CALL * CALL

    def _score(self, n_ready: int, halt: Callable[[], bool]) -> Iterator[StreamEvent]:
        """Scores the first `n_ready` waiting tokens, in calls as large as allowed."""
        while n_ready and not halt():
            n = self._until_fresh_line(min(n_ready, CALL))
            size = int(self.sizes[:n].sum())
            ids, sizes, text = self.ids[:n], self.sizes[:n], self.text[:size]
            started = time.perf_counter()
            bits = self.reader.nats(ids) / LN2
            self.busy += time.perf_counter() - started
            self.ids, self.sizes, self.text = self.ids[n:], self.sizes[n:], self.text[size:]
            n_ready -= n
            self.n_new += n
            self.tokens += n
            self.bits += float(bits.sum())
            yield from self._emit(sizes, text, bits)
            if time.monotonic() - self.told >= STATS_EVERY:
                self.told = time.monotonic()
                yield self.stats(final=False)

    def _until_fresh_line(self, n: int) -> int:
        """How many of the first `n` waiting tokens come before a line that starts afresh; does so at such a line."""
        if self.fresh is None:
            return n
        size = int(self.sizes[:n].sum())
        at = 0 if self.byte == self.line_start else self.text.find(b"\n") + 1 or size
        while at < size:
            end = self.text.find(b"\n", at) + 1 or len(self.text)
            if self.fresh.search(self.text[at : min(end, at + LINE_LIMIT)].rstrip(b"\r\n")):
                if at:
                    return int(np.searchsorted(np.cumsum(self.sizes), at, side="right"))
                self.reader.reset()
            at = end
        return n

    def _emit(self, sizes: NDArray[np.int32], text: bytes, bits: NDArray[np.float64]) -> Iterator[StreamEvent]:
        """Counts scored tokens and answers what they complete."""
        if self.options.emit in ("stats", "none"):
            self.lines += text.count(b"\n")
            last_line = text.rfind(b"\n") + 1
            self.line_start = self.byte + last_line if last_line else self.line_start
            self.byte += len(text)
            return
        at = 0
        for size, cost in zip(sizes.tolist(), bits.tolist(), strict=True):
            piece = text[at : at + size]
            at += size
            if self.options.emit == "tokens":
                yield TokenScore(self.byte, piece, cost)
            else:
                self.spans.append((piece, cost))
                self.n_open += size
            self.byte += size
            if piece.endswith(b"\n"):
                yield from self._end_part()
                self.lines += 1
                self.line_start = self.byte
            elif self.n_open >= LINE_LIMIT:
                yield from self._end_part()

    def _end_part(self) -> Iterator[LineScore]:
        """Answers the line, or the part of it, that is being gathered."""
        spans, size = tuple(self.spans), self.n_open
        self.spans, self.n_open = [], 0
        if spans:
            bits = sum(cost for _, cost in spans)
            yield LineScore(
                line=self.lines + 1,
                byte=self.byte - size,
                bytes=size,
                tokens=len(spans),
                bits=bits,
                bits_per_byte=bits / size,
                text=b"".join(text for text, _ in spans),
                spans=spans,
            )


def _save_spans(spans: list[tuple[bytes, float]]) -> str:
    return json.dumps(
        {
            "text": pack(b"".join(text for text, _ in spans)),
            "sizes": pack(np.array([len(text) for text, _ in spans], dtype="<i4").tobytes()),
            "bits": pack(np.array([bits for _, bits in spans], dtype="<f8").tobytes()),
        }
    )


def _restore_spans(saved: str | None) -> list[tuple[bytes, float]]:
    if saved is None:
        return []
    table = json.loads(saved)
    text, spans, at = unpack(table["text"]), [], 0
    sizes = np.frombuffer(unpack(table["sizes"]), dtype="<i4").tolist()
    for size, bits in zip(sizes, np.frombuffer(unpack(table["bits"]), dtype="<f8").tolist(), strict=True):
        spans.append((text[at : at + size], bits))
        at += size
    return spans
