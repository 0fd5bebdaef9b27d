"""Loaders: batches of input and target ids for training and for evaluation.

The target at position p is token p, the input is token p - 1, and the input at position 0 is `start_id`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import DataError

Ids = NDArray[Any]  # token ids of any integer type, one axis; may be memory-mapped


def inputs_and_targets(
    ids: Ids, positions: NDArray[np.int64], start_id: int, starts: NDArray[np.int64] | int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs (b t) and targets (b t) at these positions (b t) of a text, whose documents begin at `starts` (b t)."""
    inputs = ids[np.maximum(positions - 1, 0)].astype(np.int64)
    inputs[positions == starts] = start_id
    return inputs, ids[np.minimum(positions, len(ids) - 1)].astype(np.int64)  # the end of a text has any target


class TrainBatch(NamedTuple):
    """One segment of each sequence (b t)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64] | None  # position of each input in its document or piece; None: there is one


class _Pass(NamedTuple):
    """Pieces of a pass, in the order in which each sequence reads them (b piece)."""

    number: int
    begins: NDArray[np.int64]  # position in the text of their first tokens
    by_line: NDArray[np.bool_]  # true for those whose lines are read apart


PIECE_LEN = 4096
"""Approximate number of tokens of the pieces of a shuffled text, of which each sequence has at least one in a pass."""


@dataclass(eq=False)
class TrainLoader:
    """Training batches: `batch_size` sequences that start evenly spaced in the text and wrap around at its end.

    Each segment of a sequence continues the previous one, so memory carries over. With `seed` the text is cut into
    pieces, at other places in each pass, and the sequences read all pieces of a pass in random order.

    With `pieces_apart` the pieces of a text without documents count as documents, so that each is read from empty
    memory; its first input is the token before it. Those of a text with documents always do. `DataError` if the text is
    empty.
    """

    ids: Ids
    batch_size: int
    start_id: int  # input at the beginning of the text, and of each document
    documents: NDArray[np.int64] | None = None  # first token of each, ascending from 0; None: the text is one
    # Numbers of the sequences that this loader reads; all unless they are given.
    rows: NDArray[np.int64] | slice = field(default_factory=lambda: slice(None))
    seed: int | None = None  # of the order of the pieces; None: the text is read in order
    pieces_apart: bool = False
    line_share: float = 0.0  # share of the pieces whose lines count as documents; empty ones end the line before
    line_ends: NDArray[np.bool_] | None = None  # true for the ids that end a line (v); None: no piece is read by line

    def __post_init__(self) -> None:
        n_tokens = len(self.ids)
        if n_tokens == 0:
            raise DataError("the training text is empty.", "Give a file that contains text.")
        starts = np.arange(self.batch_size, dtype=np.int64) * n_tokens // self.batch_size
        self.starts = starts[self.rows]  # position at which each sequence starts (b), if the text is read in order
        n_pieces = max(1, round(n_tokens / (self.batch_size * PIECE_LEN)))
        self.pieces = self.batch_size, n_pieces  # number of sequences, and of the pieces of each in a pass
        self.piece_len = math.ceil(n_tokens / (self.batch_size * n_pieces))
        self.drawn = _Pass(-1, np.empty((0, 0), np.int64), np.empty((0, 0), bool))  # the latest pass

    def batch(self, n_read: int, segment_len: int) -> TrainBatch:
        """The next `segment_len` tokens after `n_read` tokens of each sequence."""
        read = n_read + np.arange(segment_len)  # numbers of the tokens, in the order in which a sequence reads them
        if self.seed is None:
            positions = (self.starts[:, None] + read) % len(self.ids)
        else:
            positions, _ = self._shuffled(read)
        starts: NDArray[np.int64] | int = 0
        within = None
        if self.documents is not None:
            starts = self.documents[np.searchsorted(self.documents, positions, side="right") - 1]
            within = positions - starts
        inputs, targets = inputs_and_targets(self.ids, positions, self.start_id, starts)
        if self.seed is not None and (within is not None or self.pieces_apart):
            within_piece = np.tile(read % self.piece_len, (len(positions), 1))
            within = within_piece if within is None else np.minimum(within, within_piece)
            if self.line_ends is not None:
                within_line = self._within_lines(read)
                inputs[within_line == 0] = self.start_id
                within = np.minimum(within, within_line)
        return TrainBatch(inputs, targets, within)

    def _within_lines(self, read: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions (b t) of the tokens `read` (t) in their lines; at least `piece_len` in pieces not read by line."""
        assert self.line_ends is not None
        first_of_piece = read[0] - read[0] % self.piece_len  # the line of the first token may have begun there
        since = np.arange(first_of_piece, read[-1] + 1)
        positions, by_line = self._shuffled(since)
        rows = by_line.any(axis=1)  # sequences that read any of these pieces by line; the others need no look
        positions = positions[rows]
        is_line_end = self.line_ends[self.ids[positions]]
        is_after_line_end = self.line_ends[self.ids[positions - 1]] | (positions == 0)
        begins_line = by_line[rows] & is_after_line_end & ~is_line_end
        latest_begin = np.maximum.accumulate(np.where(begins_line, since, -self.piece_len), axis=1)
        within = np.full((len(self.starts), len(read)), self.piece_len)
        within[rows] = (since - latest_begin)[:, -len(read) :]
        return within

    def _shuffled(self, read: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions (b t) of the tokens `read` (t) in the text, and which are read by line; draws their passes."""
        _, n_pieces = self.pieces
        piece_read, within_piece = np.divmod(read, self.piece_len)
        number_of_pass, piece_of_pass = np.divmod(piece_read, n_pieces)
        positions = np.empty((len(self.starts), len(read)), np.int64)
        by_line = np.empty(positions.shape, bool)
        for number in range(number_of_pass[0], number_of_pass[-1] + 1):
            if number != self.drawn.number:
                self.drawn = self._draw(number)
            of_pass = number_of_pass == number
            pieces = piece_of_pass[of_pass]
            positions[:, of_pass] = self.drawn.begins[:, pieces] + within_piece[of_pass]
            by_line[:, of_pass] = self.drawn.by_line[:, pieces]
        return positions % len(self.ids), by_line

    def _draw(self, number: int) -> _Pass:
        """The pass of this number, which depends on nothing but the seed; its pieces may go on after the text's end."""
        assert self.seed is not None
        draw = np.random.default_rng((self.seed, number))
        first = draw.integers(len(self.ids))
        order = draw.permutation(np.prod(self.pieces)).reshape(self.pieces)[self.rows]
        by_line = draw.random(self.pieces)[self.rows] < self.line_share
        return _Pass(number, first + order * self.piece_len, by_line)


class EvalBatch(NamedTuple):
    """One segment of each sequence."""

    inputs: NDArray[np.int64]  # (b t)
    targets: NDArray[np.int64]  # (b n) of the last n inputs
    scored: NDArray[np.bool_]  # (b n) true where a target counts: it is neither warmup nor beyond the text's end
    positions: NDArray[np.int64]  # (b) position in the text of the first target of each sequence


@dataclass(frozen=True, eq=False)
class EvalLoader:
    """Evaluation batches of sequences that are read one segment at a time, each from empty memory."""

    ids: Ids  # tokens of the text; may be empty
    # Position in the text at which each sequence starts (b), and `ends`, at which it ends.
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    segment_len: int
    start_id: int  # input at the beginning of a text
    # Position of each start in its text (b), from which absolute positions count; 0: it begins there.
    offsets: NDArray[np.int64]
    warmup_len: int = 0  # number of tokens that are not scored of each sequence that does not begin its text
    reads_end: bool = False  # also read the last token, whose target is none; `positions` then reach `ends`

    @property
    def batch_size(self) -> int:
        return len(self.starts)

    @property
    def sequence_len(self) -> int:
        """Tokens of the longest sequence."""
        return int((self.ends - self.starts).max()) + self.reads_end

    def __iter__(self) -> Iterator[EvalBatch]:
        """Batches of at most `segment_len` tokens per sequence; targets begin where one of a batch counts."""
        # Of each sequence (b 1), to be compared with positions (b t).
        starts = self.starts[:, None]
        ends = self.ends[:, None]
        text_starts = starts - self.offsets[:, None]
        last_read = ends - 1 + self.reads_end
        for n_read in range(0, self.sequence_len, self.segment_len):
            read = np.arange(n_read, min(n_read + self.segment_len, self.sequence_len))
            positions = starts + read
            is_warm = (read >= self.warmup_len) | (starts == text_starts)
            scored = is_warm & (positions < ends)
            # Sequences that have ended repeat their last token until the longest one ends.
            positions_read = np.minimum(positions, last_read)
            inputs, targets = inputs_and_targets(self.ids, positions_read, self.start_id, text_starts)
            first_scored = int(scored.any(axis=0).argmax())
            part = slice(first_scored, None)
            yield EvalBatch(inputs, targets[:, part], scored[:, part], positions[:, first_scored])


def text_loader(ids: Ids, batch_size: int, segment_len: int, warmup_len: int, start_id: int) -> EvalLoader:
    """Loader of one text in several sequences: every token is scored exactly once, in order within each sequence.

    The first sequence starts with the text. The others start with `warmup_len` tokens that are not scored, so that
    their memory is as full as in one pass over the text. All start at multiples of `segment_len`, like the segments of
    one pass. Fewer sequences than `batch_size` are used if warmup would be half of the tokens or more.
    """
    n_tokens = len(ids)
    n_after_warmup = n_tokens - warmup_len

    def stride_of(n_sequences: int) -> int:
        """Tokens between the starts of sequences: the smallest multiple of `segment_len` that covers the text."""
        return segment_len * math.ceil(max(n_after_warmup, 1) / (n_sequences * segment_len))

    n_sequences = max(1, min(batch_size, math.ceil(n_tokens / segment_len)))
    while n_sequences > 1 and stride_of(n_sequences) <= warmup_len:
        n_sequences -= 1
    stride = stride_of(n_sequences)
    # Rounding up to whole segments may leave nothing to score for the last sequences.
    n_sequences = max(1, min(n_sequences, math.ceil(n_after_warmup / stride)))
    starts = np.arange(n_sequences, dtype=np.int64) * stride
    ends = np.minimum(starts + stride + warmup_len, n_tokens)
    return EvalLoader(ids, starts, ends, segment_len, start_id, offsets=starts, warmup_len=warmup_len)


def document_loaders(
    ids: Ids,
    documents: NDArray[np.int64],
    *,
    batch_size: int,
    segment_len: int,
    start_id: int,
    n_tokens: int | None = None,
) -> Iterator[EvalLoader]:
    """Loaders of all documents, in order of length, so that a batch has documents of about the same length.

    A batch has at most `batch_size` documents, and several only if a segment has at most `n_tokens` tokens of them all
    (None: any number). `documents` are the first tokens of the documents, ascending from 0.
    """
    lengths = np.diff(documents, append=len(ids))

    def loader(batch: list[int]) -> EvalLoader:
        starts = documents[batch]
        return EvalLoader(ids, starts, starts + lengths[batch], segment_len, start_id, offsets=np.zeros_like(starts))

    batch: list[int] = []
    for document in np.argsort(lengths, kind="stable").tolist():
        n_documents = len(batch) + 1
        n_in_segment = n_documents * min(int(lengths[document]), segment_len)  # as it would be the longest one
        has_room = n_documents <= batch_size and (n_tokens is None or n_in_segment <= n_tokens)
        if batch and not has_room:
            yield loader(batch)
            batch = []
        batch.append(document)
    if batch:
        yield loader(batch)
