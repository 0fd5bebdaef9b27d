"""Text on its way to the model: bytes arrive in portions of any size, tokens leave in calls of the model."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlcli.config import StreamConfig
from xlcli.config.base import compile_pattern
from xlcli.errors import DataError
from xlcli.inference import TOKENS_PER_CALL
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import PendingText, SessionState, StreamPosition
from xlcli.text.formats import LineEnds
from xlcli.text.pretokenize import PreTokenizer

BLOCK_BYTES = 2**14  # number of bytes tokenized at a time
LINE_LIMIT = 2**14
"""Number of bytes after which a line is output in parts, and up to which `reset_on` is searched for in a line."""
LINE = re.compile(rb"[^\n]*\n|[^\n]+")  # a line with its end, or the rest of a text


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
    """Text on its way to the model: from `_arrived` (bytes) through `_pretokenizer` to the queue of tokens."""

    def __init__(
        self, model: LoadedModel, options: StreamConfig, position: StreamPosition, resume: SessionState | None
    ) -> None:
        """Makes an intake that begins with the text that waited when the session of `resume` was saved, if any did."""
        self._options = options
        self._tokenizer = model.tokenizer
        # The bytes of a text that is given as bytes have tokens of their own, or none.
        self._tokens = model.tokenizer.tokens if options.binary else model.tokenizer.any_tokens
        self._reset_pattern = None  # of the lines before which the memory is cleared
        clears_at_each_line = options.each_line or (options.frozen and not position.records)
        if clears_at_each_line:
            self._reset_pattern = compile_pattern("", "stream.reset_on")  # which matches every line
        elif options.reset_on is not None:
            self._reset_pattern = compile_pattern(options.reset_on, "stream.reset_on")
        self.resets_at_documents = options.reading(model.config.model, model.config.train.reading).reset_on_document
        # The text that waits: tokens in the queue, then an unfinished word, then bytes that were not looked at yet.
        pending = PendingText(b"", np.empty(0, np.int32), np.empty(0, np.int32))
        if resume is not None:
            pending = resume.pending
        self._queue = Tokens(pending.ids, pending.sizes, pending.data[: pending.n_tokenized])
        self._pretokenizer = PreTokenizer(self._tokenizer.splitter, by_line=self._reset_pattern is not None)
        rest = pending.data[pending.n_tokenized :]
        # A CR at the end waits for what follows it; those before it have been decided.
        self._arrived = rest if options.binary else rest.removesuffix(b"\r")
        self.line_ends = LineEnds(rest[len(self._arrived) :])  # reads CR LF as LF
        self._documents = deque(pending.documents)  # offsets in the text that waits
        self._offset = position.n_bytes  # of the queue in the whole text
        self._at_line_start = position.n_bytes == position.line_start
        self._n_ready = self._n_complete()  # tokens at the beginning of the queue that can be output
        self.has_stand_ins = False  # true if a byte had no token
        self.n_received = 0  # number of bytes and documents that have arrived
        self._last_arrival = time.monotonic()
        self._is_ended = False

    @property
    def pending(self) -> PendingText:
        ids, sizes, text, _ = self._queue
        data = text + self._pretokenizer.pending + self._arrived + self.line_ends.held
        return PendingText(data, ids, sizes, tuple(self._documents))

    @property
    def end_offset(self) -> int:
        """Offset in the whole text at which the text that has arrived ends."""
        return self._offset + self._n_tokenized + len(self._arrived)

    @property
    def ends_line(self) -> bool:
        """True if the unfinished word ends a line, which only lacks what may follow."""
        return self._pretokenizer.pending.endswith(b"\n")

    @property
    def is_within_line(self) -> bool:
        """True if the text that waits ends within a line."""
        for text in (self._arrived, self._pretokenizer.pending, self._queue.text):
            if text:
                return not text.endswith(b"\n")
        return False

    def begin_document(self, *, is_reset: bool) -> int:
        """Begins a document, before which the memory may be cleared; returns its offset in the whole text."""
        self._arrived += self.line_ends.feed(b"", final=True)
        start = self._n_tokenized + len(self._arrived)
        is_first_here = not self._documents or self._documents[-1] < start
        if self.resets_at_documents and is_reset and is_first_here:
            self._documents.append(start)
        if self._options.frozen:  # rows are scored one by one, not their lines
            self._reset_pattern = None
            self._pretokenizer.by_line = False
        self.n_received += 1
        return self._offset + start

    def receive(self, portion: bytes | None) -> bool:
        """Takes bytes that arrived, or None for a pause; returns whether the pause makes an unfinished line ready."""
        if portion:
            self._last_arrival = time.monotonic()
            self._arrived += portion if self._options.binary else self.line_ends.feed(portion)
            self.n_received += len(portion)
        pause_ms = self._options.pause_ms
        if portion is not None or pause_ms is None:
            return False
        wait = pause_ms / 1000 - 1e-3  # a wait may end that much early
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
        """Removes the tokens of the next call, up to the last line end if `to_line_end`; None if none can be output."""
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
            tokens, _ = self._queue.divide(n)
            line_end = tokens.text.rfind(b"\n") + 1
            n = self._queue.n_begun(line_end) or n
        tokens, self._queue = self._queue.divide(n)
        if self._documents and self._documents[0] == 0:  # it has begun with these tokens
            self._documents.popleft()
        # All that is counted from the beginning of the queue moves with it.
        self._n_ready -= len(tokens.ids)
        self._offset += len(tokens.text)
        self._at_line_start = tokens.text.endswith(b"\n")
        self._documents = deque(at - len(tokens.text) for at in self._documents)
        return tokens._replace(is_reset=is_reset)

    def take_lines(self, most: int, *, to_line_end: bool) -> list[Tokens]:
        """Texts to score in one call of the model, which leave the queue; empty if none can be output now.

        The first is what `take` gives. If each line is scored after a reset, whole lines follow it, up to `most` texts
        that together, padded to the longest of them, have at most `TOKENS_PER_CALL` tokens.
        """
        first = self.take(to_line_end=to_line_end)
        if first is None:
            return []
        texts = [first]
        if self._reset_pattern is None:  # rows, which may have several lines, are scored one by one
            return texts
        longest = len(first.ids)
        while len(texts) < most:
            is_whole_line = texts[-1].is_reset and self._at_line_start  # from a reset to a line end
            if not is_whole_line:
                break  # what follows depends on the memory after this text
            n_next = self._queue.n_within(_line_end(self._queue.text, 0))  # tokens of the next line
            if self._n_ready == 0 or n_next > self._n_ready:
                break  # the next line is not complete yet
            longest = max(longest, n_next)
            if longest * (len(texts) + 1) > TOKENS_PER_CALL:
                break  # with the next line, the padded texts are more than a call may have
            line = self.take(to_line_end=False)
            assert line is not None  # since it is ready
            texts.append(line)
        return texts

    @property
    def _n_tokenized(self) -> int:
        return len(self._queue.text) + len(self._pretokenizer.pending)

    def _feed(self) -> None:
        """Tokenizes at most `BLOCK_BYTES` of the bytes that have arrived, up to the next document."""
        start = self._n_tokenized  # offset of these bytes, as documents have
        if start in self._documents:
            self._enqueue(self._pretokenizer.finish())
        n_bytes = BLOCK_BYTES
        for document in self._documents:
            if document > start:
                n_bytes = min(n_bytes, document - start)
        self._enqueue(self._pretokenizer.feed(self._arrived[:n_bytes]))
        self._arrived = self._arrived[n_bytes:]
        self._n_ready = self._n_complete()

    def _enqueue(self, words: bytes) -> None:
        """Tokenizes whole words and appends them to the queue; before a line that may be a reset, a token ends."""
        if not words:
            return
        by_line = self._reset_pattern is not None and not self._tokenizer.splitter.ends_at_lines
        for part in LINE.findall(words) if by_line else [words]:
            byte = self._offset + len(self._queue.text)
            ids, sizes = self._tokens(part, byte)
            if not len(ids) and not self._is_ended:
                raise DataError(f"the line at byte {byte} has no tokens.", "Leave it out.")
            stands_in = (ids == self._tokenizer.stand_in) & (sizes == 1)
            self.has_stand_ins = self.has_stand_ins or bool(stands_in.any())
            self._queue += Tokens(ids, sizes, part)

    def _n_complete(self) -> int:
        """Returns how many tokens at the beginning of the queue can be output: lines, or full calls of the model."""
        n_tokens = len(self._queue.ids)
        n_bytes_in_lines = self._queue.text.rfind(b"\n") + 1
        n_in_lines = self._queue.n_begun(n_bytes_in_lines)
        if self._reset_pattern is not None:
            # An unfinished line may clear the memory, until it is too long.
            may_be_reset = len(self._queue.text) - n_bytes_in_lines < LINE_LIMIT
            return n_in_lines if may_be_reset else n_tokens
        if self._options.emit in ("tokens", "words"):
            return n_tokens
        if self._options.emit == "none":  # no line is awaited, so calls are full
            n_in_lines = 0
        n_full_calls = (n_tokens - n_in_lines) // TOKENS_PER_CALL
        return n_in_lines + n_full_calls * TOKENS_PER_CALL

    def _n_before_reset(self, n: int) -> tuple[int, bool]:
        """Returns how many of the first `n` queued tokens come before the next reset, and if the queue begins with one.

        A reset is a document, or a line that matches `reset_on`. The number is at least one.
        """
        is_reset = bool(self._documents) and self._documents[0] == 0
        for document in self._documents:
            if document > 0:
                n = min(n, self._queue.n_within(document))
                break  # the next document is before all others
        if self._reset_pattern is None:
            return n, is_reset

        text = self._queue.text
        n_bytes = int(self._queue.sizes[:n].sum())
        line_start = 0
        if not self._at_line_start:  # the queue begins within a line, which was looked at before
            line_start = _line_end(text, 0)
        while line_start < n_bytes:
            line_end = _line_end(text, line_start)
            line = text[line_start : min(line_end, line_start + LINE_LIMIT)].rstrip(b"\r\n")
            is_match = self._reset_pattern.search(line) is not None
            if is_match and line_start > 0:
                return max(1, self._queue.n_within(line_start)), is_reset
            is_reset = is_reset or is_match
            line_start = line_end
        return n, is_reset


def _line_end(text: bytes, start: int) -> int:
    """Where the line that begins at `start` ends, behind its line end if it has one."""
    line_feed = text.find(b"\n", start)
    return len(text) if line_feed < 0 else line_feed + 1
