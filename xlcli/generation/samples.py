"""Samples of a batch, each with its own random-number generator.

They are output in order: the text of a sample is held back until all samples before it have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from xlcli.config import GenerateConfig
from xlcli.events import Generated, GeneratedText, Notice, TokenLogprob
from xlcli.generation.prompt import Prompt
from xlcli.inference import InferenceSession
from xlcli.sampling import SampleRNG, StreamingDetokenizer, log_probabilities, sample_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.text.tokenizers.registry import Tokenizer

StopReason = Literal["length", "stop", "interrupted"]


@dataclass
class Sample:
    """A sample being generated; `unshown` is the part of `text` that has not been output."""

    prompt: Prompt
    number: int
    rng: SampleRNG
    detokenizer: StreamingDetokenizer
    text: bytearray = field(default_factory=bytearray)
    unshown: bytes = b""
    n_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seconds: float = 0.0
    stop_reason: StopReason | None = None

    def add(self, text: bytes) -> None:
        """Appends text that can be shown."""
        self.text += text
        self.unshown += text

    def end(self, reason: StopReason, seconds: float) -> None:
        """Ends the sample after `seconds` of sampling."""
        self.add(self.detokenizer.finish())
        self.stop_reason, self.seconds = reason, seconds


def sample_batch(
    session: InferenceSession,
    samples: list[Sample],
    options: GenerateConfig,
    stop: Callable[[], bool],
    logits: Tensor | None,
) -> Iterator[GeneratedText | Generated | Notice]:
    """Generates a batch of samples; `session` has one row per sample, whose first logits (b v, or 1 v) may be given."""
    started = time.perf_counter()
    sampling = options.sampling(session.model.tokenizer.kind)
    running, unfinished = samples, deque(samples)
    while True:
        _end_samples(running, options, stop, time.perf_counter() - started)
        rows = [row for row, sample in enumerate(running) if sample.stop_reason is None]
        if 0 < len(rows) < len(running):
            session = session.select(rows)
        running = [running[row] for row in rows]
        while unfinished:
            sample = unfinished[0]
            if sample.unshown:
                yield GeneratedText(sample.number, sample.unshown)
                sample.unshown = b""
            if sample.stop_reason is None:
                break
            result = _result(sample, sample.stop_reason)
            yield result if options.logprobs is None else replace(result, logprobs=tuple(sample.logprobs))
            unfinished.popleft()
        if not running:
            return
        if logits is None:
            if notice := session.compilation():
                yield notice
            logits = session.predict()
        logits = logits.expand(len(running), -1)
        session.last_tokens = sample_tokens(logits, [sample.rng for sample in running], sampling)
        for row, (sample, token) in enumerate(zip(running, session.last_tokens, strict=True)):
            sample.n_tokens += 1
            if options.logprobs is not None:
                sample.logprobs.append(_logprob(session.model.tokenizer, logits[row], token, options.logprobs))
            sample.add(sample.detokenizer.feed(session.model.tokenizer.decode([token])))
        logits = None


def _logprob(tokenizer: Tokenizer, logits: Tensor, token: int, n_best: int) -> TokenLogprob:
    logprob, best = log_probabilities(logits, token, n_best)
    others = tuple(TokenLogprob(other, tokenizer.decode([other]), value) for other, value in best)
    return TokenLogprob(token, tokenizer.decode([token]), logprob, others)


def _end_samples(samples: list[Sample], options: GenerateConfig, stop: Callable[[], bool], seconds: float) -> None:
    """Ends the samples that are complete."""
    interrupted = stop()
    for sample in samples:
        if sample.detokenizer.stopped:
            sample.end("stop", seconds)
        elif sample.n_tokens >= options.max_new_tokens:
            sample.end("length", seconds)
        elif interrupted:
            sample.end("interrupted", seconds)


def _result(sample: Sample, reason: StopReason) -> Generated:
    return Generated(
        sample=sample.number,
        prompt=sample.prompt.text.decode("utf-8", "replace"),
        text=sample.text.decode("utf-8", "replace"),
        tokens=sample.n_tokens,
        seed=sample.rng.seed,
        stop_reason=reason,
        prompt_tokens_per_second=sample.prompt.tokens_per_second,
        tokens_per_second=sample.n_tokens / sample.seconds if sample.seconds else 0.0,
    )
