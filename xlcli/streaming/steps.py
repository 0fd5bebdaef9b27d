"""Steps of a stream from its first portion to its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from xlcli.config import GenerateConfig
from xlcli.events import GeneratedText, Notice
from xlcli.inference import InferenceSession, SaveState
from xlcli.sampling import SampleRNG, StreamingDetokenizer, sample_tokens
from xlcli.streaming.scorer import Scorer, Signal, Steps


def steps(
    scorer: Scorer,
    portions: Iterable[bytes | None],
    save: SaveState | None,
    stop: Callable[[], bool],
    sampling: GenerateConfig,
    seed: int | None,
) -> Steps:
    """Steps of a stream; arguments as for `stream`."""
    options = scorer.options
    saved = time.monotonic()
    for portion in portions:
        scorer.receive(portion)
        yield from scorer.score_arrived(stop)
        if stop():
            break
        if save and options.save_every is not None and time.monotonic() - saved >= options.save_every:
            saved = time.monotonic()
            if scorer.has_new_text:
                yield Signal.SAVES
                save(scorer.session_state())
                scorer.has_new_text = False
        if portion is None:
            yield Signal.IDLE
    stopped = stop()
    if save:
        yield Signal.SAVES
        save(scorer.session_state())
    if not stopped:
        yield from scorer.score_end(stop)
        if options.continue_tokens:
            yield from _continue_text(scorer.session, options.continue_tokens, sampling, seed, stop)
    yield scorer.stats(final=True)


def _continue_text(
    session: InferenceSession, n_tokens: int, options: GenerateConfig, seed: int | None, stop: Callable[[], bool]
) -> Iterator[GeneratedText | Notice]:
    """Samples `n_tokens` tokens that continue the text."""
    rng = SampleRNG.seeded(secrets.randbits(31) if seed is None else seed)
    detokenizer = StreamingDetokenizer(options.stop)
    sampling = options.sampling(session.model.tokenizer.kind)
    for _ in range(n_tokens):
        if stop() or detokenizer.stopped:
            break
        if notice := session.compilation():
            yield notice
        session.last_tokens = sample_tokens(session.predict(), [rng], sampling)
        if text := detokenizer.feed(session.model.tokenizer.decode(session.last_tokens)):
            yield GeneratedText(0, text)
    if text := detokenizer.finish():
        yield GeneratedText(0, text)
