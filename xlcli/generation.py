"""Continues a text: the prompt read in large calls, then a token a call from the reused memory.

Samples are drawn side by side from copies of the state after the prompt, each with dice of its own, and come out in
order: the first as it is made, each later one from what has been made of it when its turn comes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from xlcli.config import GenerateConfig
from xlcli.errors import ConfigError
from xlcli.events import Generated, GeneratedText
from xlcli.inference import Carry, InferenceSession, PendingText, Save
from xlcli.sampling import REPETITION_WINDOW, SampleRNG, StreamingDetokenizer, sample_tokens
from xlcli.text.pretokenize import whole_words

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel
    from xlcli.text.tokenizers.registry import Tokenizer

SIDE_BY_SIDE = 16
"""Most samples drawn in one batch,"""
STATE_LIMIT = 2**29
"""and most bytes of memory tensors that they take together."""


def generate(
    model: LoadedModel,
    prompt: bytes,
    options: GenerateConfig,
    runtime: Runtime,
    *,
    seed: int | None = None,
    resume: tuple[State, Carry] | None = None,
    save: Save | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[GeneratedText | Generated]:
    """Continues `prompt`.

    Args:
        model: The model.
        prompt: The text to continue; it is read, not given back. May be empty.
        options: How far, how bold, when to stop.
        runtime: Where to compute.
        seed: Of the first sample; sample i has `seed + i` and comes again alone with that seed. None goes on with the
            dice of the state, or else is random.
        resume: A saved state and what it carries, from `generate` or `stream`; the prompt follows what it has read.
        save: Called once at the end, with the state after the last token.
        stop: Asked before every call of the model; once true, what there is comes out as "interrupted".

    Yields:
        The text of sample 0 in pieces of whole characters, then its `Generated`, then sample 1 and so on.

    Raises:
        ConfigError: A state is to be saved but several samples are asked for.
        StateError: The state to resume is damaged or does not fit what is asked for.
    """
    if save and options.num_samples > 1:
        raise ConfigError("one state cannot hold several samples.", "Use --num-samples 1 with --state-out.")
    reader = InferenceSession.open(model, runtime, options, resume)
    carry: Carry = resume[1] if resume else {}
    dice = SampleRNG.restore(carry, seed) or SampleRNG.of(secrets.randbits(31))
    unread = PendingText.restore(carry, model.tokenizer.vocab_size)
    text = unread.data + prompt
    ids = np.concatenate((unread.ids, *_encode(model.tokenizer, text[unread.covered :])))
    started = time.perf_counter()
    n_read = reader.read(ids, stop)
    dice.recent.extend(ids[max(n_read - REPETITION_WINDOW, 0) : n_read].tolist())
    prompt_rate = n_read / max(time.perf_counter() - started, 1e-9)
    left = text[int(model.tokenizer.sizes(ids, text)[:n_read].sum()) :]
    together = max(1, min(SIDE_BY_SIDE, STATE_LIMIT // max(reader.state.bytes, 1)))
    for first in range(0, options.num_samples, together):
        count = min(together, options.num_samples - first)
        samples = [
            _Sample(
                first + i,
                dice if first + i == 0 else dice.twin(dice.seed + first + i),
                StreamingDetokenizer(options.stop),
            )
            for i in range(count)
        ]
        branch = reader if options.num_samples == 1 else reader.select([0] * count)
        yield from _draw(branch, samples, options, stop, prompt=prompt, prompt_rate=prompt_rate)
        if save:
            waiting = PendingText(ids[n_read:], len(left), left)
            save(branch.state, {"last": str(branch.last[0]), **waiting.save(), **dice.save()})


def _encode(tokenizer: Tokenizer, text: bytes) -> Iterator[NDArray[np.int32]]:
    """Ids of a text of any length."""
    for words in whole_words(text[at : at + 2**18] for at in range(0, len(text), 2**18)):
        yield tokenizer.encode(words)


@dataclass
class _Sample:
    """One sample in the making; `waiting` has been made but not come out."""

    number: int
    dice: SampleRNG
    outlet: StreamingDetokenizer
    text: bytearray = field(default_factory=bytearray)
    waiting: bytes = b""
    tokens: int = 0
    seconds: float = 0.0
    reason: Literal["length", "stop", "interrupted"] | None = None

    def end(self, reason: Literal["length", "stop", "interrupted"], seconds: float) -> None:
        """Nothing more will be drawn."""
        self.add(self.outlet.finish())
        self.reason, self.seconds = reason, seconds

    def add(self, text: bytes) -> None:
        """Text that may come out."""
        self.text += text
        self.waiting += text


def _draw(
    reader: InferenceSession,
    samples: list[_Sample],
    options: GenerateConfig,
    stop: Callable[[], bool],
    *,
    prompt: bytes,
    prompt_rate: float,
) -> Iterator[GeneratedText | Generated]:
    """Draws all samples side by side until each has ended; `reader` has a row for each."""
    started = time.perf_counter()
    drawing, turn = list(samples), 0
    while True:
        _end_what_is_done(drawing, options, stop, time.perf_counter() - started)
        left = [i for i, sample in enumerate(drawing) if sample.reason is None]
        if len(left) < len(drawing) and left:
            reader = reader.select(left)
        drawing = [drawing[i] for i in left]
        while turn < len(samples):
            sample = samples[turn]
            if sample.waiting:
                yield GeneratedText(sample.number, sample.waiting)
                sample.waiting = b""
            if sample.reason is None:
                break
            yield _result(sample, prompt, prompt_rate)
            turn += 1
        if not drawing:
            return
        reader.last = sample_tokens(reader.predict(), [sample.dice for sample in drawing], options)
        for sample, token in zip(drawing, reader.last, strict=True):
            sample.tokens += 1
            sample.add(sample.outlet.feed(reader.model.tokenizer.decode([token])))


def _end_what_is_done(samples: list[_Sample], options: GenerateConfig, stop: Callable[[], bool], now: float) -> None:
    interrupted = stop()
    for sample in samples:
        if sample.outlet.stopped:
            sample.end("stop", now)
        elif sample.tokens >= options.max_new_tokens:
            sample.end("length", now)
        elif interrupted:
            sample.end("interrupted", now)


def _result(sample: _Sample, prompt: bytes, prompt_rate: float) -> Generated:
    assert sample.reason is not None
    return Generated(
        sample=sample.number,
        prompt=prompt.decode("utf-8", "replace"),
        text=sample.text.decode("utf-8", "replace"),
        tokens=sample.tokens,
        seed=sample.dice.seed,
        stop_reason=sample.reason,
        prompt_tokens_per_second=prompt_rate,
        tokens_per_second=sample.tokens / sample.seconds if sample.seconds else 0.0,
    )
