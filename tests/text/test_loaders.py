"""Readers of token ids: ring lanes for training, warmed lanes for scoring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlcli.errors import DataError
from xlcli.text.loaders import EvalLoader, TrainLoader

START = 999


@given(n=st.integers(1, 50), batch_size=st.integers(1, 6), segment_len=st.integers(1, 12), steps=st.integers(1, 20))
def test_each_lane_reads_on_around_the_ring(n: int, batch_size: int, segment_len: int, steps: int) -> None:
    ids = np.arange(n, dtype=np.uint16)
    lanes = TrainLoader(ids, batch_size, segment_len, START)
    both = [lanes.next() for _ in range(steps)]
    inputs, targets = (np.concatenate(part, axis=1) for part in zip(*both, strict=True))
    for lane in range(batch_size):
        places = (lane * n // batch_size + np.arange(steps * segment_len)) % n
        assert targets[lane].tolist() == places.tolist()
        assert inputs[lane].tolist() == [START if place == 0 else place - 1 for place in places]
    assert inputs.dtype == targets.dtype == np.int64


@given(position=st.integers(0, 1000))
def test_position_is_the_whole_state(position: int) -> None:
    ids = np.arange(37, dtype=np.uint32)
    through = TrainLoader(ids, 3, 5, START)
    for _ in range(position % 40):
        through.next()
    resumed = TrainLoader(ids, 3, 5, START, position=position % 40)
    for ours, theirs in zip(through.next(), resumed.next(), strict=True):
        assert (ours == theirs).all()


def test_lanes_never_leave_the_range_of_large_positions() -> None:
    lanes = TrainLoader(np.arange(10, dtype=np.uint16), 2, 4, START, position=10**12)
    assert lanes.next()[1].max() < 10


def test_one_pass_of_all_lanes_covers_the_text() -> None:
    lanes = TrainLoader(np.arange(48), 4, 4, START)
    seen = np.concatenate([lanes.next()[1].ravel() for _ in range(int(lanes.steps_per_pass))])
    assert sorted(seen.tolist()) == list(range(48))


def test_an_empty_training_text_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        TrainLoader(np.array([], np.uint16), 1, 1, START)


@given(
    n=st.integers(0, 300),
    batch_size=st.integers(1, 9),
    segment_len=st.integers(1, 40),
    warm=st.integers(0, 60),
)
def test_every_token_is_scored_once_with_all_it_may_see(n: int, batch_size: int, segment_len: int, warm: int) -> None:
    ids = np.arange(n, dtype=np.uint16)
    scan = EvalLoader(ids, batch_size, segment_len, warm, START)
    assert 1 <= scan.batch_size <= batch_size
    scored: list[int] = []
    read: list[list[int]] = [[] for _ in range(scan.batch_size)]
    for window in scan:
        assert window.tokens.shape == window.targets.shape == window.scored.shape
        assert len(window.tokens) == scan.batch_size
        for lane in range(scan.batch_size):
            places = window.positions[lane] + np.arange(window.tokens.shape[1])
            for token, target, counts, place in zip(
                window.tokens[lane], window.targets[lane], window.scored[lane], places, strict=True
            ):
                if place < n:
                    assert target == place
                    assert token == (place - 1 if place else START)
                if counts:
                    scored.append(int(target))
                    before = len(read[lane])
                    assert before >= min(warm, place), "memory is as full as in one long pass"
                read[lane].append(int(target))
    assert sorted(scored) == list(range(n))
    assert all(lane[0] % segment_len == 0 for lane in read if lane), "segments begin where those of one pass do"


def test_lanes_are_given_up_when_warming_up_would_be_half_the_work() -> None:
    assert EvalLoader(np.arange(1000), 8, 10, 0, START).batch_size == 8
    assert EvalLoader(np.arange(1000), 8, 10, 100, START).batch_size == 8
    assert EvalLoader(np.arange(1000), 8, 10, 400, START).batch_size == 1


def test_one_lane_scans_in_order() -> None:
    windows = list(EvalLoader(np.arange(10, 20), 1, 4, 100, START))
    assert [window.targets[0].tolist() for window in windows] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert [window.positions.tolist() for window in windows] == [[0], [4], [8]]
    assert windows[0].tokens[0].tolist() == [START, 10, 11, 12]
