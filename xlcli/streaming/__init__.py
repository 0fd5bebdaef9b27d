"""Streaming: scores text as it arrives, in constant memory. The scores do not depend on how the text arrives.

Text is scored as soon as its score can be output: a line when its end arrives, a word when it is complete if tokens are
output. Calls of the model are as large as the text that has arrived allows, so throughput grows with the rate of input.
A line of more than `LINE_LIMIT` bytes is output in parts: several `LineScore` with the same `line` and growing `byte`.

With `reset_on_document` the memory is cleared before each document; a portion of type `Document` begins one. No token
is in two documents then.

A session is saved as it was before the unfinished end of the text, together with the bytes of that end. The end is
scored and output when the input ends, and again, together with new text, by a stream that resumes. Two streams
connected by a saved session thus give the scores of one stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from xlcli.config import GenerateConfig, StreamConfig
from xlcli.inference import SaveState
from xlcli.metrics import LN2
from xlcli.store.state_files import SessionState
from xlcli.streaming.scorer import Request, Scorer, Signal, Steps
from xlcli.streaming.scorer import StreamEvent as StreamEvent
from xlcli.streaming.steps import steps

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.store.loaded import LoadedModel


def stream(
    model: LoadedModel,
    portions: Iterable[bytes | None],
    options: StreamConfig,
    runtime: Runtime,
    *,
    resume: SessionState | None = None,
    save: SaveState | None = None,
    stop: Callable[[], bool] = lambda: False,
    sampling: GenerateConfig | None = None,
    seed: int | None = None,
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
        save: Called every `save_every` seconds if text has arrived, and at the end.
        stop: Called between calls of the model. Once true, unscored text is saved with the session and not scored.
        sampling: Options of the `continue_tokens` sampled after the text; by default those of `generate`.
        seed: Seed of that sampling; random by default.

    Yields:
        Scores as `options.emit` says, totals about once a second, and the final totals last.

    Raises:
        StateError: `resume` does not fit `options`.
    """
    scorer = Scorer(model, options, runtime, resume)
    yield from _answered(steps(scorer, portions, save, stop, sampling or GenerateConfig(), seed), scorer)


def _answered(steps: Steps, scorer: Scorer) -> Iterator[StreamEvent]:
    """Events of a stream whose requests its own session answers."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Request):
            if step.is_reset:
                scorer.session.reset()
            started = time.perf_counter()
            answer = scorer.session.score(step.ids) / LN2
            scorer.model_seconds += time.perf_counter() - started
        elif not isinstance(step, Signal):
            yield step
