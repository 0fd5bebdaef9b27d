"""Loaders: training sequences that wrap around the text, evaluation sequences that score every token once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlcli.errors import DataError
from xlcli.text import loaders
from xlcli.text.loaders import TrainLoader, document_loaders, text_loader

START = 999
ENDS = np.arange(START + 1) == START


@given(n=st.integers(1, 50), batch_size=st.integers(1, 6), segment_len=st.integers(1, 12), steps=st.integers(1, 20))
def test_training_sequences_wrap_around_the_text(n: int, batch_size: int, segment_len: int, steps: int) -> None:
    ids = np.arange(n, dtype=np.uint16)
    loader = TrainLoader(ids, batch_size, START)
    both = [loader.batch(step * segment_len, segment_len) for step in range(steps)]
    inputs, targets = (np.concatenate([batch[i] for batch in both], axis=1) for i in (0, 1))
    for i in range(batch_size):
        positions = (i * n // batch_size + np.arange(steps * segment_len)) % n
        assert targets[i].tolist() == positions.tolist()
        assert inputs[i].tolist() == [START if position == 0 else position - 1 for position in positions]
    assert inputs.dtype == targets.dtype == np.int64


def test_training_continues_at_any_position() -> None:
    loader = TrainLoader(np.arange(10, dtype=np.uint16), 2, START)
    assert loader.batch(4 * 10**12, 4)[1].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]


def test_all_sequences_together_cover_the_text() -> None:
    loader = TrainLoader(np.arange(48), 4, START)
    seen = np.concatenate([loader.batch(n_read, 4)[1].ravel() for n_read in (0, 4, 8)])
    assert sorted(seen.tolist()) == list(range(48))


@given(
    n=st.integers(1, 400), batch_size=st.integers(1, 4), segment_len=st.integers(1, 30), piece_len=st.integers(3, 60)
)
def test_a_shuffled_pass_reads_pieces_of_the_whole_text(
    n: int, batch_size: int, segment_len: int, piece_len: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "PIECE_LEN", piece_len)
        loader, twin, other = (
            TrainLoader(np.arange(n), batch_size, START, seed=seed, pieces_apart=apart)
            for seed, apart in ((0, True), (0, False), (1, False))
        )
    per_pass = loader.pieces[1] * loader.piece_len
    assert n <= batch_size * per_pass < n + batch_size * loader.pieces[1]
    length = 3 * per_pass + segment_len
    batches = [loader.batch(n_read, segment_len) for n_read in range(0, length, segment_len)]
    inputs, targets = (np.concatenate([batch[i] for batch in batches], axis=1) for i in (0, 1))
    assert (inputs == np.where(targets == 0, START, targets - 1)).all()
    within = np.concatenate([batch.documents for batch in batches], axis=1)
    assert (within == np.arange(within.shape[1]) % loader.piece_len).all()
    for i in range(3):
        read = targets[:, i * per_pass : (i + 1) * per_pass]
        assert set(read.ravel().tolist()) == set(range(n))
        pieces = read.reshape(-1, loader.piece_len)
        assert ((pieces - pieces[:, :1] - np.arange(loader.piece_len)) % n == 0).all()
    alike = twin.batch(0, length)
    assert (targets[:, :length] == alike.targets).all()
    assert alike.documents is None
    if n > 50:
        assert (targets[:, :length] != other.batch(0, length).targets).any()
        assert (targets[:, :per_pass] != targets[:, per_pass : 2 * per_pass]).any()


@given(position=st.integers(0, 10**6))
def test_a_shuffled_text_is_read_by_several_ranks_and_from_any_position(position: int) -> None:
    ids = np.where(np.arange(40_000) % 37, np.arange(40_000) % START, START)
    options = {"seed": 3, "pieces_apart": True, "line_share": 0.5, "line_ends": ENDS}
    whole, through = TrainLoader(ids, 4, START, **options), TrainLoader(ids, 4, START, **options)
    parts = [TrainLoader(ids, 4, START, rows=np.array(rows), **options) for rows in ([0, 1], [2, 3])]
    expected = whole.batch(position, 300)
    found = [part.batch(position, 300) for part in parts]
    later = through.batch(position - position % 7, position % 7 + 300)
    for i, of_whole in enumerate(expected):
        assert (np.concatenate([batch[i] for batch in found]) == of_whole).all()
        assert (later[i][:, position % 7 :] == of_whole).all()


def test_an_empty_training_text_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        TrainLoader(np.array([], np.uint16), 1, START)


@given(
    n=st.integers(0, 300),
    batch_size=st.integers(1, 9),
    segment_len=st.integers(1, 40),
    warmup_len=st.integers(0, 60),
)
def test_every_token_is_scored_once_with_its_whole_context(
    n: int, batch_size: int, segment_len: int, warmup_len: int
) -> None:
    loader = text_loader(np.arange(n, dtype=np.uint16), batch_size, segment_len, warmup_len, START)
    assert 1 <= loader.batch_size <= batch_size
    scored: list[int] = []
    read: list[list[int]] = [[] for _ in range(loader.batch_size)]
    for batch in loader:
        assert batch.inputs.shape == batch.targets.shape == batch.scored.shape
        assert len(batch.inputs) == loader.batch_size
        for i in range(loader.batch_size):
            positions = batch.positions[i] + np.arange(batch.inputs.shape[1])
            for token, target, counts, position in zip(
                batch.inputs[i], batch.targets[i], batch.scored[i], positions, strict=True
            ):
                if position < n:
                    assert target == position
                    assert token == (position - 1 if position else START)
                if counts:
                    scored.append(int(target))
                    before = len(read[i])
                    assert before >= min(warmup_len, position), "memory is as full as in one pass"
                read[i].append(int(target))
    assert sorted(scored) == list(range(n))
    assert all(tokens[0] % segment_len == 0 for tokens in read if tokens), "segments start where those of one pass do"


def test_there_is_one_sequence_if_warmup_would_be_half_of_the_work() -> None:
    assert text_loader(np.arange(1000), 8, 10, 0, START).batch_size == 8
    assert text_loader(np.arange(1000), 8, 10, 100, START).batch_size == 8
    assert text_loader(np.arange(1000), 8, 10, 400, START).batch_size == 1


def test_one_sequence_is_read_in_order() -> None:
    batches = list(text_loader(np.arange(10, 20), 1, 4, 100, START))
    assert [batch.targets[0].tolist() for batch in batches] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert [batch.positions.tolist() for batch in batches] == [[0], [4], [8]]
    assert batches[0].inputs[0].tolist() == [START, 10, 11, 12]


documents = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(documents, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_positions_of_a_shuffled_text_begin_anew_in_each_piece(
    sizes: list[int], batch_size: int, segment_len: int, steps: int
) -> None:
    starts = np.cumsum([0, *sizes])
    ids, within = np.arange(starts[-1]), np.concatenate([np.arange(size) for size in sizes])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "PIECE_LEN", 7)
        loader = TrainLoader(ids, batch_size, START, starts[:-1], seed=0)
    for step in range(steps):
        batch = loader.batch(step * segment_len, segment_len)
        assert batch.documents is not None
        in_piece = (step * segment_len + np.arange(segment_len)) % loader.piece_len
        assert (batch.documents == np.minimum(within[batch.targets], in_piece)).all()


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=60),
    st.sampled_from([0.3, 1.0]),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_positions_of_pieces_that_are_read_by_line_begin_anew_in_each_line(
    tokens: list[int], line_share: float, batch_size: int, segment_len: int
) -> None:
    ids, ends = np.array(tokens), np.arange(5) > 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "PIECE_LEN", 11)
        plain, loader = (
            TrainLoader(ids, batch_size, 0, seed=0, pieces_apart=True, line_share=line_share, line_ends=line_ends)
            for line_ends in (None, ends)
        )
    length = 4 * loader.piece_len
    batches = [loader.batch(n_read, segment_len) for n_read in range(0, length, segment_len)]
    inputs, targets, documents = (np.concatenate(parts, axis=1)[:, :length] for parts in zip(*batches, strict=True))
    before = plain.batch(0, length)
    assert (targets == before.targets).all()
    n_by_line = 0
    for i in range(batch_size):
        for begin in range(0, length, loader.piece_len):
            piece = slice(begin, begin + loader.piece_len)
            by_line, whole = [], []
            for position, (last, target) in enumerate(zip(before.inputs[i, piece], targets[i, piece], strict=True)):
                begins = (last == 0 or ends[last]) and not ends[target]
                by_line.append((0, 0) if begins else (by_line[-1][0] + 1 if position else 0, last))
                whole.append((position, last))
            found = list(zip(documents[i, piece], inputs[i, piece], strict=True))
            assert found in (by_line, whole)
            n_by_line += found == by_line
    assert line_share < 1 or n_by_line == 4 * batch_size


@pytest.mark.parametrize("line_share", [0.0, 0.25])
def test_a_share_of_the_pieces_is_read_by_line(line_share: float) -> None:
    ids = np.tile(np.array([1, 2, START]), 2**19)
    loader = TrainLoader(ids, 4, START, seed=0, pieces_apart=True, line_share=line_share, line_ends=ENDS)
    longest = np.array([loader.batch(loader.piece_len * i, loader.piece_len).documents.max(axis=1) for i in range(96)])
    by_line = longest <= 3
    assert (by_line | (longest == loader.piece_len - 1)).all()
    assert abs(by_line.mean() - line_share) < 0.07


@given(documents, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_training_positions_begin_anew_in_each_document(
    sizes: list[int], batch_size: int, segment_len: int, steps: int
) -> None:
    starts = np.cumsum([0, *sizes])
    ids, within = np.arange(starts[-1]), np.concatenate([np.arange(size) for size in sizes])
    loader = TrainLoader(ids, batch_size, START, starts[:-1])
    for step in range(steps):
        batch = loader.batch(step * segment_len, segment_len)
        assert batch.documents is not None
        assert (batch.documents == within[batch.targets]).all()
        assert (batch.inputs == np.where(batch.documents == 0, START, batch.targets - 1)).all()


@given(documents, st.integers(1, 9), st.integers(1, 40), st.none() | st.integers(1, 60))
def test_every_document_is_read_from_its_beginning(
    sizes: list[int], batch_size: int, segment_len: int, n_tokens: int | None
) -> None:
    starts = np.cumsum([0, *sizes])
    ids = np.arange(starts[-1])
    read: dict[int, list[int]] = {}
    loaders = document_loaders(
        ids, starts[:-1], batch_size=batch_size, segment_len=segment_len, start_id=START, n_tokens=n_tokens
    )
    for loader in loaders:
        assert loader.batch_size <= batch_size
        assert loader.batch_size == len(loader.starts) > 0
        assert not loader.offsets.any()
        for inputs, targets, scored, positions in loader:
            assert inputs.shape == targets.shape == scored.shape
            assert inputs.shape[1] <= segment_len
            assert n_tokens is None or inputs.size <= n_tokens or loader.batch_size == 1
            for i, start in enumerate(loader.starts.tolist()):
                found = read.setdefault(start, [])
                kept = targets[i][scored[i]].tolist()
                assert not kept or positions[i] == start + len(found)
                assert inputs[i][scored[i]].tolist() == [START if t == start else t - 1 for t in kept]
                found += kept
    assert read == {start: list(range(start, start + n)) for start, n in zip(starts.tolist(), sizes, strict=False)}
