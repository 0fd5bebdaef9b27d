"""Several streams at a time: tokens of all streams that have any are scored in one call of the model.

Each stream has its own session, and its scores are those of the text alone. Streams whose memories can be joined
(`State.join_keys`) are the sequences of a batch, which stays together as long as the same streams have tokens. A call
is as long as the fewest tokens of its streams; the other tokens follow in the next call. A stream with a hash table,
with pooled blocks or in independent segments is joined with others at the same place only, one that learns with none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xlcli.config import GenerateConfig, StreamConfig
from xlcli.errors import DataError, XLError
from xlcli.events import Notice
from xlcli.inference import InferenceSession, SaveState
from xlcli.metrics import LN2
from xlcli.store.state_files import SessionState
from xlcli.streaming.scorer import Request, Scorer, Signal, Steps, StreamEvent
from xlcli.streaming.steps import steps

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.store.loaded import LoadedModel


@dataclass(frozen=True)
class Input:
    """A stream to be read.

    Attributes:
        name: Name in events.
        portions: Bytes as they arrive, as for `stream`. None means that nothing has arrived yet; an iterator that waits
            instead makes the other streams wait.
        open_states: Returns `resume` and `save`, as for `stream`.
    """

    name: str
    portions: Iterator[bytes | None]
    open_states: Callable[[], tuple[SessionState | None, SaveState | None]] = lambda: (None, None)


class Inputs(Protocol):
    """Source of streams."""

    def appeared(self) -> Sequence[Input]:
        """Streams that have appeared since the last call."""

    def wait(self) -> None:
        """Waits until a stream has bytes or another stream may have appeared, or for a short time."""


class InputEvent(NamedTuple):
    """Event of the stream `name`."""

    name: str
    event: StreamEvent


@dataclass(eq=False)
class _Stream:
    """An open stream, its next request, and the streams that share its session, in the order of the rows."""

    name: str
    scorer: Scorer
    steps: Steps
    request: Request | None = None
    answer: NDArray[np.float64] | None = None
    batch: list[_Stream] = field(init=False)

    def __post_init__(self) -> None:
        self.batch = [self]

    @property
    def session(self) -> InferenceSession:
        """Session of the batch."""
        return self.scorer.session

    @property
    def key(self) -> Hashable:
        """Streams with equal keys can be joined; None: this one cannot."""
        return self.session.state.join_keys[self.batch.index(self)]


def stream_several(
    model: LoadedModel,
    inputs: Inputs,
    options: StreamConfig,
    runtime: Runtime,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[InputEvent]:
    """Scores several texts as they arrive, until the last stream has ended.

    A stream that cannot be opened, read or saved ends with a warning, and the others go on.

    Args:
        model: The model.
        inputs: The streams.
        options: As for `stream`, without `continue_tokens`.
        runtime: Device and number type.
        stop: As for `stream`; all streams are saved.

    Yields:
        Events of each stream in its order, as `stream` yields them.

    Raises:
        DataError: After the end of all streams: some failed.
    """
    streams: list[_Stream] = []
    n_failed = 0
    while True:
        for each in () if stop() else inputs.appeared():
            try:
                resume, save = each.open_states()
                scorer = Scorer(model, options, runtime, resume)
            except XLError as error:
                n_failed += 1
                yield InputEvent(each.name, _failure(error))
                continue
            own = steps(scorer, each.portions, save, stop, GenerateConfig(), None)
            streams.append(_Stream(each.name, scorer, own))
        if not streams:
            break
        is_idle = True
        for stream in list(streams):
            while stream.request is None:
                try:
                    step = stream.steps.send(stream.answer)
                except (StopIteration, XLError) as ended:
                    streams.remove(stream)
                    _separate(stream)
                    if isinstance(ended, XLError):
                        n_failed += 1
                        yield InputEvent(stream.name, _failure(ended))
                    is_idle = False
                    break
                stream.answer = None
                if step is Signal.SAVES:
                    _separate(stream)
                elif isinstance(step, Request):
                    stream.request, is_idle = step, False
                elif isinstance(step, Signal):
                    break
                else:
                    yield InputEvent(stream.name, step)
        _answer(streams)
        if is_idle and not stop():
            inputs.wait()
    if n_failed:
        raise DataError(f"{n_failed} of the inputs failed.", "The warnings above say why, and the remedy.")


def _failure(error: XLError) -> Notice:
    return Notice(str(error), "warning")


def _answer(streams: Sequence[_Stream]) -> None:
    """Answers the request of each stream that has one, at least in part, in as few calls of the model as possible.

    If all streams have requests, the batch will persist. Otherwise it is only worth its copies if it answers at least
    half of each request.
    """
    groups: dict[Hashable, list[_Stream]] = {}
    longest = max((len(stream.request.ids) for stream in streams if stream.request), default=0)
    persists = all(stream.request for stream in streams)
    for stream in streams:
        if stream.request is None:
            continue
        if stream.request.is_reset:
            _separate(stream)
            stream.session.reset()
        key = stream.key if persists or 2 * len(stream.request.ids) >= longest else None
        groups.setdefault(stream if key is None else key, []).append(stream)
    for group in groups.values():
        size = group[0].session.max_rows(None)
        for first in range(0, len(group), size):
            _score(group[first : first + size])


def _score(streams: Sequence[_Stream]) -> None:
    """Answers the requests of streams that can be joined in one call."""
    streams = _together(streams)
    requests = [stream.request for stream in streams if stream.request is not None]
    n = min(len(request.ids) for request in requests)
    started = time.perf_counter()
    bits = streams[0].session.score(np.stack([request.ids[:n] for request in requests])) / LN2
    seconds = time.perf_counter() - started
    for stream, own in zip(streams, bits, strict=True):
        stream.scorer.model_seconds += seconds
        stream.request, stream.answer = None, own


def _together(streams: Sequence[_Stream]) -> list[_Stream]:
    """Makes the streams one batch, without any other; in the order of its rows."""
    parts: dict[int, list[_Stream]] = {}
    for stream in streams:
        parts.setdefault(id(stream.session), []).append(stream)
    sessions = [_taken(members) for members in parts.values()]
    joined = [stream for members in parts.values() for stream in members]
    _share(joined, InferenceSession.join(sessions) if len(sessions) > 1 else sessions[0])
    return joined


def _taken(members: list[_Stream]) -> InferenceSession:
    """Session of some streams of a batch alone, whose order they take; the others remain a batch."""
    session, batch = members[0].session, members[0].batch
    if len(batch) > 1:
        members.sort(key=batch.index)
        others = [stream for stream in batch if stream not in members]
        if others:
            taken = session.select([batch.index(stream) for stream in members])
            _share(others, session.select([batch.index(stream) for stream in others]))
            session = taken
    return session


def _share(streams: list[_Stream], session: InferenceSession) -> None:
    """Gives the streams a session that has a row for each."""
    if len(streams) == 1 and len(streams[0].batch) > 1:
        session = session.alone(0)
    for stream in streams:
        stream.scorer.session, stream.batch = session, streams


def _separate(stream: _Stream) -> None:
    """Gives a stream a session of its own."""
    _together([stream])
