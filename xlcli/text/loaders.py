"""Loaders: batches of input and target ids for training and for evaluation.

The target at position p is token p, the input is token p - 1, and the input at position 0 is `start_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import DataError

Ids = NDArray[Any]
"""Token ids of any integer type, one axis; may be memory-mapped."""


def inputs_and_targets(
    ids: Ids, positions: NDArray[np.int64], start_id: int, starts: NDArray[np.int64] | int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs (b t) and targets (b t) at these positions (b t) of a text, whose documents begin at `starts` (b t)."""
    inputs = ids[np.maximum(positions - 1, 0)].astype(np.int64)
    inputs[positions == starts] = start_id
    return inputs, ids[np.minimum(positions, len(ids) - 1)].astype(np.int64)  # the end of a text has any target


class TrainBatch(NamedTuple):
    """One segment of each sequence.

    inputs     (b t)
    targets    (b t)
    documents  (b t)  position of each input in its document or piece; None: a sequence is one document
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64] | None


class _Pass(NamedTuple):
    """Pieces of a pass, in the order in which each sequence reads them.

    begins   (b piece)  position in the text of their first tokens
    by_line  (b piece)  True for those whose lines are read apart
    """

    number: int
    begins: NDArray[np.int64]
    by_line: NDArray[np.bool_]


PIECE_LEN = 4096
"""Approximate number of tokens of the pieces of a shuffled text, of which each sequence has at least one in a pass."""


class TrainLoader:
    """Training batches: `batch_size` sequences that start evenly spaced in the text and wrap around at its end.

    Each segment of a sequence continues the previous one, so memory carries over. With `seed` the text is cut into
    pieces, at other places in each pass, and the sequences read all pieces of a pass in random order.

    Args:
        ids: Tokens of the text, at least one.
        start_id: Input at the beginning of the text, and of each document.
        documents: First token of each document, ascending from 0; None if the text is one document.
        rows: Numbers of the sequences that this loader reads; None: all.
        seed: Of the order of the pieces; None: the text is read in order.
        pieces_apart: The pieces of a text without documents count as documents, so that each is read from empty
            memory; its first input is the token before it. Those of a text with documents always do.
        line_share: Share of the pieces whose lines count as documents; empty lines belong to the line before.
        line_ends: True for the ids that end a line (v); None: no piece is read by line.

    Attributes:
        starts: Position in the text at which each sequence starts (b), if it is read in order.

    Raises:
        DataError: The text is empty.
    """

    def __init__(
        self,
        ids: Ids,
        batch_size: int,
        start_id: int,
        documents: NDArray[np.int64] | None = None,
        rows: NDArray[np.int64] | None = None,
        seed: int | None = None,
        pieces_apart: bool = False,
        line_share: float = 0.0,
        line_ends: NDArray[np.bool_] | None = None,
    ) -> None:
        if len(ids) == 0:
            raise DataError("the training text is empty.", "Give a file that contains text.")
        self.ids = ids
        self.start_id = start_id
        self.documents = documents
        self.seed = seed
        self.pieces_apart = pieces_apart
        self.line_share, self.line_ends = line_share, line_ends
        self.rows = np.arange(batch_size) if rows is None else rows
        starts = np.arange(batch_size, dtype=np.int64) * len(ids) // batch_size
        self.starts = starts[self.rows]
        n_pieces = max(1, round(len(ids) / (batch_size * PIECE_LEN)))
        self.pieces = batch_size, n_pieces
        """Number of sequences, and of the pieces of each in a pass."""
        self.piece_len = -(-len(ids) // (batch_size * n_pieces))
        self.drawn = _Pass(-1, np.empty((0, 0), np.int64), np.empty((0, 0), bool))
        """The latest pass."""

    def batch(self, n_read: int, segment_len: int) -> TrainBatch:
        """The next `segment_len` tokens after `n_read` tokens of each sequence."""
        read = n_read + np.arange(segment_len)
        if self.seed is None:
            positions = (self.starts[:, None] + read) % len(self.ids)
        else:
            positions = self._shuffled(read)[0]
        starts: NDArray[np.int64] | int = 0
        within = None
        if self.documents is not None:
            starts = self.documents[np.searchsorted(self.documents, positions, side="right") - 1]
            within = positions - starts
        inputs, targets = inputs_and_targets(self.ids, positions, self.start_id, starts)
        if self.seed is not None and (within is not None or self.pieces_apart):
            piece = np.tile(read % self.piece_len, (len(positions), 1))
            within = piece if within is None else np.minimum(within, piece)
            if self.line_ends is not None:
                lines = self._within_lines(read)
                inputs[lines == 0] = self.start_id
                within = np.minimum(within, lines)
        return TrainBatch(inputs, targets, within)

    def _within_lines(self, read: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions (b t) of tokens (t) of each sequence in their lines; large where a piece is not read by line."""
        assert self.line_ends is not None
        since = np.arange(read[0] - read[0] % self.piece_len, read[-1] + 1)
        positions, by_line = self._shuffled(since)
        rows = by_line.any(axis=1)
        positions, by_line = positions[rows], by_line[rows]
        is_after_line = self.line_ends[self.ids[positions - 1]] | (positions == 0)
        begins = by_line & is_after_line & ~self.line_ends[self.ids[positions]]
        latest = np.maximum.accumulate(np.where(begins, since, -self.piece_len), axis=1)
        within = np.full((len(self.rows), len(read)), self.piece_len)
        within[rows] = (since - latest)[:, -len(read) :]
        return within

    def _shuffled(self, read: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions (b t) in the text of tokens (t) of each sequence; True for those that are read by line."""
        assert self.seed is not None
        numbers, within = np.divmod(read, self.piece_len)
        passes, numbers = np.divmod(numbers, self.pieces[1])
        positions = np.empty((len(self.rows), len(read)), np.int64)
        by_line = np.empty(positions.shape, bool)
        for number in range(passes[0], passes[-1] + 1):
            if number != self.drawn.number:
                draw = np.random.default_rng((self.seed, int(number)))
                first = draw.integers(len(self.ids))
                order = draw.permutation(np.prod(self.pieces)).reshape(self.pieces)[self.rows]
                by_line_drawn = draw.random(self.pieces)[self.rows] < self.line_share
                self.drawn = _Pass(number, first + order * self.piece_len, by_line_drawn)
            of_pass = passes == number
            positions[:, of_pass] = self.drawn.begins[:, numbers[of_pass]] + within[of_pass]
            by_line[:, of_pass] = self.drawn.by_line[:, numbers[of_pass]]
        return positions % len(self.ids), by_line


class EvalBatch(NamedTuple):
    """One segment of each sequence.

    inputs     (b t)
    targets    (b n)  of the last n inputs
    scored     (b n)  True where a target counts: it is neither warmup nor beyond the end of the text
    positions  (b)    position in the text of the first target of each sequence
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    scored: NDArray[np.bool_]
    positions: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EvalLoader:
    """Evaluation batches of sequences that are read one segment at a time, each from empty memory.

    Attributes:
        ids: Tokens of the text; may be empty.
        starts: Position in the text at which each sequence starts (b), and `ends`, at which it ends.
        start_id: Input at the beginning of a text.
        offsets: Position of each start in its text (b), from which absolute positions count; 0: it begins there.
        warmup_len: Number of tokens that are not scored of each sequence that does not begin its text.
        reads_end: Also read the last token, whose target is none; `positions` then reach `ends`.
    """

    ids: Ids
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    segment_len: int
    start_id: int
    offsets: NDArray[np.int64]
    warmup_len: int = 0
    reads_end: bool = False

    @property
    def batch_size(self) -> int:
        return len(self.starts)

    @property
    def sequence_len(self) -> int:
        """Tokens of the longest sequence."""
        return int((self.ends - self.starts).max()) + self.reads_end

    def __iter__(self) -> Iterator[EvalBatch]:
        """Batches of at most `segment_len` tokens per sequence; targets begin where one of a batch counts."""
        starts, ends, begins = self.starts[:, None], self.ends[:, None], (self.starts - self.offsets)[:, None]
        for done in range(0, self.sequence_len, self.segment_len):
            read = np.arange(done, min(done + self.segment_len, self.sequence_len))
            positions = starts + read
            scored = (positions < ends) & ((read >= self.warmup_len) | (starts == begins))
            read_to = np.minimum(positions, ends - 1 + self.reads_end)
            inputs, targets = inputs_and_targets(self.ids, read_to, self.start_id, begins)
            column = int(scored.any(0).argmax())
            yield EvalBatch(inputs, targets[:, column:], scored[:, column:], positions[:, column])


def text_loader(ids: Ids, batch_size: int, segment_len: int, warmup_len: int, start_id: int) -> EvalLoader:
    """Loader of one text in several sequences: every token is scored exactly once, in order within each sequence.

    The first sequence starts with the text. The others start with `warmup_len` tokens that are not scored, so that
    their memory is as full as in one pass over the text. All start at multiples of `segment_len`, like the segments of
    one pass. Fewer sequences than `batch_size` are used if warmup would be half of the tokens or more.
    """
    n = len(ids)

    def stride_of(sequences: int) -> int:
        """Tokens between the starts of sequences: the smallest multiple of `segment_len` that covers the text."""
        return -(-max(n - warmup_len, 1) // (sequences * segment_len)) * segment_len

    sequences = max(1, min(batch_size, -(-n // segment_len)))
    while sequences > 1 and stride_of(sequences) <= warmup_len:
        sequences -= 1
    stride = stride_of(sequences)
    # Rounding up to whole segments may leave nothing to score for the last sequences.
    sequences = max(1, min(sequences, -(-(n - warmup_len) // stride)))
    starts = np.arange(sequences, dtype=np.int64) * stride
    ends = np.minimum(starts + stride + warmup_len, n)
    return EvalLoader(ids, starts, ends, segment_len, start_id, starts, warmup_len)


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
    order = np.argsort(lengths, kind="stable")
    first = 0
    for stop in range(1, len(order) + 1):
        if stop < len(order) and stop - first < batch_size:
            longest = min(int(lengths[order[stop]]), segment_len)  # of the batch with the next document
            if n_tokens is None or (stop + 1 - first) * longest <= n_tokens:
                continue
        chosen = order[first:stop]
        starts = documents[chosen]
        yield EvalLoader(ids, starts, starts + lengths[chosen], segment_len, start_id, np.zeros_like(starts))
        first = stop
