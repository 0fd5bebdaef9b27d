"""How token ids are read: training lanes around a ring, and scoring lanes that see every token once.

Every reader yields inputs and targets side by side: the target at place p is token p, its input is token p - 1, and
the input at place 0 is `start_id`. Axis letters: b lanes, t tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import DataError

Ids = NDArray[Any]
"""Token ids of any integer type, one axis; may be memory-mapped."""


class TrainLoader:
    """Training reader: `batch_size` lanes that start evenly spread and read on around the text for ever.

    A lane's next segment continues its last one, so memory carries over. `position`, the steps taken, is the whole
    state: set it to continue.

    Args:
        ids: the text, at least one token.
        batch_size: lanes.
        segment_len: tokens a step and lane.
        start_id: input at the beginning of the text.
        position: steps already taken.

    Attributes:
        starts: where in the text each lane begins [b].

    Raises:
        DataError: the text is empty.
    """

    def __init__(self, ids: Ids, batch_size: int, segment_len: int, start_id: int, position: int = 0) -> None:
        if len(ids) == 0:
            raise DataError("the training text is empty.", "Give a file with text in it.")
        self.ids = ids
        self.segment_len = segment_len
        self.start_id = start_id
        self.position = position
        self.starts = np.arange(batch_size, dtype=np.int64) * len(ids) // batch_size

    def next(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs [b t] and targets [b t] of the next step."""
        first = self.starts[:, None] + self.position * self.segment_len - 1
        places = (first + np.arange(self.segment_len + 1)) % len(self.ids)
        both = self.ids[places].astype(np.int64)
        inputs = np.where(places[:, 1:] == 0, self.start_id, both[:, :-1])
        self.position += 1
        return inputs, both[:, 1:]

    @property
    def steps_per_pass(self) -> float:
        """Steps in which the lanes together read the text once."""
        return len(self.ids) / (len(self.starts) * self.segment_len)


class Window(NamedTuple):
    """One step of a scan.

    `tokens` and `targets` are [b t] int64. `scored` [b t] marks the targets that count: neither warming up nor beyond
    the end. `positions` [b] is the place in the text of each lane's first target.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    scored: NDArray[np.bool_]
    positions: NDArray[np.int64]


class EvalLoader:
    """Evaluation reader: every token of the text is scored exactly once, in the order of the text within each lane.

    Lane 0 starts at the beginning. A later lane starts `warm` tokens before the first it scores, so that its memory is
    as full there as in one long pass. TrainLoader start at multiples of `segment_len`, so that segments begin where those of
    one long pass do. There are fewer lanes than asked for where warming up would take half of the work.

    Args:
        ids: the text; may be empty.
        batch_size: lanes at most.
        segment_len: tokens a step and lane.
        warm: tokens after which a memory is full: layers x memory length.
        start_id: input at the beginning of the text.

    Attributes:
        starts: where in the text each lane begins [b].
    """

    def __init__(self, ids: Ids, batch_size: int, segment_len: int, warm: int, start_id: int) -> None:
        self.ids = ids
        self.segment_len = segment_len
        self.start_id = start_id
        self.warm = warm
        n = len(ids)
        lanes = max(1, min(batch_size, -(-n // segment_len)))
        while lanes > 1 and _stride(n, lanes, segment_len, warm) <= warm:
            lanes -= 1
        stride = _stride(n, lanes, segment_len, warm)
        # rounding up to whole segments may leave the last lanes nothing to score
        self.batch_size = max(1, min(lanes, -(-(n - warm) // stride))) if lanes > 1 else 1
        self.lane_len = n if self.batch_size == 1 else stride + warm
        self.starts = np.arange(self.batch_size, dtype=np.int64) * stride

    def __iter__(self) -> Iterator[Window]:
        """Steps of `segment_len` tokens a lane; the last one may be shorter."""
        n = len(self.ids)
        for done in range(0, self.lane_len, self.segment_len):
            length = min(self.segment_len, self.lane_len - done)
            offsets = done + np.arange(length)
            places = self.starts[:, None] + offsets
            scored = places < n
            scored[1:] &= offsets >= self.warm
            inside = np.minimum(places, n - 1)
            tokens = self.ids[np.maximum(inside - 1, 0)].astype(np.int64)
            tokens[places == 0] = self.start_id
            yield Window(tokens, self.ids[inside].astype(np.int64), scored, places[:, 0])


def _stride(n: int, lanes: int, segment_len: int, warm: int) -> int:
    """Tokens between the starts of neighboring lanes: the least multiple of `segment_len` that covers the text."""
    return -(-max(n - warm, 1) // (lanes * segment_len)) * segment_len
