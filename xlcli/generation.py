"""Generation: reads a prompt in large calls, then samples one token per call.

Samples of a batch continue copies of the state after the prompt, each with its own random-number generator. They are
output in order: the text of a sample is held back until all samples before it have ended.

Of many prompts, each is read alone, and its first token predicted alone; then prompts of any length are the sequences
of a batch. A result is that of the prompt alone with the same seed: compiled kernels compute a sequence to the bit as
alone, modules up to rounding. States that cannot be joined (`State.join_keys`) are continued in batches of their own.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.config import GenerateConfig
from xlcli.errors import ConfigError
from xlcli.events import Generated, GeneratedText, Notice, TokenLogprob
from xlcli.inference import InferenceSession, SaveState
from xlcli.sampling import REPETITION_WINDOW, SampleRNG, StreamingDetokenizer, log_probabilities, sample_tokens
from xlcli.store.state_files import PendingText, SamplerState, SessionState
from xlcli.text.pretokenize import whole_words

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.text.tokenizers import Tokenizer

StopReason = Literal["length", "stop", "interrupted"]


def generate(
    model: LoadedModel,
    prompt: bytes,
    options: GenerateConfig,
    runtime: Runtime,
    *,
    seed: int | None = None,
    resume: SessionState | None = None,
    save: SaveState | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[GeneratedText | Generated | Notice]:
    """Continues `prompt`.

    Args:
        model: The model.
        prompt: Text to continue, which is not part of the output. May be empty.
        options: Length, sampling and stop texts.
        runtime: Device and number type.
        seed: Seed of the first sample; sample i has the seed `seed + i` and can be repeated alone with it. None
            continues the generator of `resume`, if it has one, else takes a random seed.
        resume: Session saved by `generate` or `stream`, whose text the prompt follows.
        save: Called once at the end, with the session after the last token.
        stop: Called before every call of the model; once true, the samples that have begun end as "interrupted".

    Yields:
        The text of sample 0 in pieces of whole characters, then its `Generated`, then sample 1 and so on; and notices.

    Raises:
        ConfigError: `save` is given with several samples.
        StateError: `resume` does not fit `options`.
    """
    if save and options.num_samples > 1:
        raise ConfigError("one state cannot hold several samples.", "Use --num-samples 1 with --state-out.")
    text = read_prompt(model, prompt, options, runtime, seed=seed, resume=resume, stop=stop)
    session, several = text.session, options.num_samples > 1
    # Once, in a batch of one sequence: rounding may depend on the batch, and each sample can be repeated alone.
    logits = session.predict() if several and options.max_new_tokens and not stop() else None
    batch_size = session.max_rows(text.n_tokens)
    for first in range(0, options.num_samples, batch_size):
        if first and stop():
            break
        samples = [
            Sample(text, i, text.rng_of(i), StreamingDetokenizer(options.stop), logits)
            for i in range(first, min(first + batch_size, options.num_samples))
        ]
        branch = session.select([0] * len(samples)) if several else session
        yield from _sample_batch(branch, samples, options, stop)
    if save:
        save(text.saved())


def generate_prompts(
    model: LoadedModel,
    prompts: Iterable[bytes],
    options: GenerateConfig,
    runtime: Runtime,
    *,
    seed: int | None = None,
    resume: SessionState | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Generated, ...] | Notice]:
    """Continues each prompt as `generate` continues it alone.

    Args:
        model: The model.
        prompts: Texts to continue, which may be empty; taken as they are needed.
        options: Length, sampling and stop texts.
        runtime: Device and number type.
        seed: Seed of the first sample of every prompt; None takes a random one for each.
        resume: Saved session, whose text every prompt follows.
        stop: Called before every call of the model; once true, samples in progress end as "interrupted".

    Yields:
        The results of each prompt, one for each sample, in the order of the prompts; and notices.
    """
    waiting: list[Sample] = []
    for text in prompts:
        if stop():
            break
        start = None if resume is None else resume.fork()
        prompt = read_prompt(model, text, options, runtime, seed=seed, resume=start, stop=stop)
        limit = min(prompt.session.max_rows(each.n_tokens) for each in (prompt, *(row.prompt for row in waiting)))
        if waiting and len(waiting) + options.num_samples > limit:
            yield from _generated(waiting, options, stop)
            waiting = []
        logits = prompt.session.predict() if options.max_new_tokens and not stop() else None
        waiting += [
            Sample(prompt, i, prompt.rng_of(i), StreamingDetokenizer(options.stop), logits)
            for i in range(options.num_samples)
        ]
    yield from _generated(waiting, options, stop)


def _generated(
    samples: list[Sample], options: GenerateConfig, stop: Callable[[], bool]
) -> Iterator[tuple[Generated, ...] | Notice]:
    """Results of the prompts of all samples."""
    groups: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        key = None if sample.logits is None else sample.prompt.session.state.join_keys[0]
        groups.setdefault(id(sample) if key is None else key, []).append(sample)
    found: dict[int, Generated] = {}
    for group in groups.values():
        limit = min(sample.prompt.session.max_rows(sample.prompt.n_tokens) for sample in group)
        for first in range(0, len(group), limit):
            batch = group[first : first + limit]
            done = iter(batch)
            for event in _sample_batch(_session(batch, options), batch, options, stop):
                if isinstance(event, Generated):
                    found[id(next(done))] = event
                elif isinstance(event, Notice):
                    yield event
    results = [found[id(sample)] for sample in samples]
    for first in range(0, len(results), options.num_samples):
        yield tuple(results[first : first + options.num_samples])


def _session(samples: list[Sample], options: GenerateConfig) -> InferenceSession:
    """Session whose rows continue the prompts of the samples; of a prompt with several samples a copy."""
    sessions = [sample.prompt.session for sample in samples]
    if len(sessions) > 1:
        return InferenceSession.join(sessions)
    return sessions[0].fork() if options.num_samples > 1 else sessions[0]


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been read, unless it was interrupted.

    Attributes:
        text: The prompt.
        session: Session after the tokens that have been read.
        rng: Generator of the first sample.
        recent: Latest tokens of the prompt, for the repetition penalty.
        n_tokens: Maximum number of tokens of its text, with those of a saved state and new ones.
        tokens_per_second: Rate of reading.
        unread: Text that was not read before an interruption.
    """

    text: bytes
    session: InferenceSession
    rng: SampleRNG
    recent: tuple[int, ...]
    n_tokens: int
    tokens_per_second: float
    unread: PendingText

    def rng_of(self, sample: int) -> SampleRNG:
        """Generator of sample `sample`, with the seed of the first one plus `sample`."""
        return SampleRNG.seeded(self.rng.seed + sample, self.recent) if sample else self.rng

    def saved(self) -> SessionState:
        """The session as a value, with unread text, after the first sample."""
        rng = self.rng
        sampler = SamplerState(rng.seed, rng.generator.get_state(), tuple(rng.recent))
        return self.session.saved(self.unread, sampler=sampler)


def read_prompt(
    model: LoadedModel,
    prompt: bytes,
    options: GenerateConfig,
    runtime: Runtime,
    *,
    seed: int | None,
    resume: SessionState | None,
    stop: Callable[[], bool],
) -> Prompt:
    """Reads a prompt in large calls; arguments as for `generate`."""
    pending = resume.pending if resume else PendingText(b"", np.empty(0, np.int32), 0)
    is_cleared = bool(pending.documents)
    if is_cleared:
        pending = _last_document(model.tokenizer, pending)
    text, ids = _prompt_tokens(model.tokenizer, pending, prompt)
    n_tokens = (resume.model_state.seen if resume else 0) + len(ids) + options.max_new_tokens
    session = InferenceSession.open(model, runtime, options, resume, n_tokens)
    if is_cleared:
        session.reset()
    rng = _initial_rng(resume, seed)
    started = time.perf_counter()
    n_read = session.read(ids, stop)
    rate = n_read / max(time.perf_counter() - started, 1e-9)
    rng.recent.extend(ids[max(n_read - REPETITION_WINDOW, 0) : n_read].tolist())
    unread = text[int(model.tokenizer.sizes(ids, text)[:n_read].sum()) :]
    return Prompt(
        prompt, session, rng, tuple(rng.recent), n_tokens, rate, PendingText(unread, ids[n_read:], len(unread))
    )


def _initial_rng(resume: SessionState | None, seed: int | None) -> SampleRNG:
    """The generator of the first sample, with the tokens that `resume` remembers for the repetition penalty."""
    saved = resume.sampler if resume else None
    if saved is None:
        return SampleRNG.seeded(secrets.randbits(31) if seed is None else seed)
    rng = SampleRNG.seeded(saved.seed if seed is None else seed, saved.recent)
    if seed is None:
        rng.generator.set_state(saved.generator)
    return rng


def _last_document(tokenizer: Tokenizer, pending: PendingText) -> PendingText:
    """Unread text from the beginning of its last document, before which the memory is to be cleared."""
    start = pending.documents[-1]
    sizes = tokenizer.sizes(pending.ids, pending.data[: pending.n_tokenized])
    ids = pending.ids[np.cumsum(sizes) > start]
    return PendingText(pending.data[start:], ids, max(pending.n_tokenized - start, 0))


def _prompt_tokens(tokenizer: Tokenizer, pending: PendingText, prompt: bytes) -> tuple[bytes, NDArray[np.int32]]:
    """Text to read before sampling, and its tokens (t)."""
    text = pending.data + prompt
    new = text[pending.n_tokenized :]
    portions = (new[start : start + 2**18] for start in range(0, len(new), 2**18))
    return text, np.concatenate((pending.ids, *map(tokenizer.encode, whole_words(portions))))


@dataclass
class Sample:
    """A sample being generated.

    `logits` are those (1 v) of its first token, if they are known; `unshown` is the part of `text` that has not been
    output.
    """

    prompt: Prompt
    number: int
    rng: SampleRNG
    detokenizer: StreamingDetokenizer
    logits: Tensor | None = None
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


def _sample_batch(
    session: InferenceSession, samples: list[Sample], options: GenerateConfig, stop: Callable[[], bool]
) -> Iterator[GeneratedText | Generated | Notice]:
    """Generates a batch of samples; `session` has one row per sample."""
    known = [sample.logits for sample in samples if sample.logits is not None]
    logits = torch.cat(known) if known else None
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
            yield _result(sample, sample.stop_reason, with_logprobs=options.logprobs is not None)
            unfinished.popleft()
        if not running:
            return
        if logits is None:
            if notice := session.compilation():
                yield notice
            logits = session.predict()
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


def _result(sample: Sample, reason: StopReason, *, with_logprobs: bool) -> Generated:
    return Generated(
        sample=sample.number,
        prompt=sample.prompt.text.decode("utf-8", "replace"),
        text=sample.text.decode("utf-8", "replace"),
        tokens=sample.n_tokens,
        seed=sample.rng.seed,
        stop_reason=reason,
        prompt_tokens_per_second=sample.prompt.tokens_per_second,
        tokens_per_second=sample.n_tokens / sample.seconds if sample.seconds else 0.0,
        logprobs=tuple(sample.logprobs) if with_logprobs else None,
    )
