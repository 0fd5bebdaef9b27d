"""Generation: reads a prompt in large calls, then samples one token per call.

Samples of a batch continue copies of the state after the prompt, each with its own random-number generator. They are
output in order: the text of a sample is held back until all samples before it have ended.

Of many prompts, each is read alone, and its first token predicted alone; then prompts of any length are the sequences
of a batch. A prompt gives the same text as when run alone with the same seed: compiled kernels compute a sequence to
the bit as alone, modules up to rounding. States that cannot be joined (`State.join_keys`) are continued apart.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from xlcli.config import GenerateConfig
from xlcli.errors import ConfigError, named
from xlcli.events import Generated, GeneratedText, Notice, TokenLogprob
from xlcli.inference import InferenceSession, SaveState, compile_cache, window_notice
from xlcli.runtime import Runtime
from xlcli.sampling import REPETITION_WINDOW, SampleRNG, StreamingDetokenizer, log_probabilities, sample_tokens
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import PendingText, SamplerState, SessionState
from xlcli.text.oddities import Oddities
from xlcli.text.tokenizers import Coverage

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
    yield from _odd_prompts([prompt], model)
    yield from compile_cache(options, stop, resume)
    text = read_prompt(model, prompt, options, runtime, seed=seed, resume=resume, stop=stop)
    session = text.session
    is_one = options.num_samples == 1
    yield from window_notice(session.state.span, session.options, text.n_tokens)
    yield from session.compile(options.max_new_tokens, stop)
    logits = None
    if not is_one and options.max_new_tokens and not stop():
        # Once, in a batch of one sequence: rounding may depend on the batch, and each sample can be repeated alone.
        logits = session.predict()
    batch_size = session.max_rows(text.n_tokens)
    for first in range(0, options.num_samples, batch_size):
        if first and stop():
            break
        samples = text.samples(range(first, min(first + batch_size, options.num_samples)), options, logits)
        branch = session if is_one else session.select([0] * len(samples))
        yield from _sample_batch(branch, samples, options, stop)
    if save:
        rng = text.rng
        sampler = SamplerState(rng.seed, rng.generator.get_state().numpy().tobytes(), tuple(rng.recent))
        save(SessionState(session.state, session.last_tokens[0], text.unread, sampler))


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

    Args as for `generate`; `prompts` are taken as they are needed, and every one has the same `seed` and `resume`.

    Yields:
        The results of each prompt, one for each sample, in the order of the prompts; and notices.
    """
    yield from compile_cache(options, stop, resume)
    waiting: list[Sample] = []
    texts: list[bytes] = []
    for text in prompts:
        if stop():
            break
        texts.append(text)
        start = None if resume is None else resume.fork()
        prompt = read_prompt(model, text, options, runtime, seed=seed, resume=start, stop=stop)
        yield from prompt.session.compile(options.max_new_tokens, stop)
        # Samples wait until a batch is full: its longest text decides how many texts fit.
        longest = max([prompt.n_tokens, *(sample.prompt.n_tokens for sample in waiting)])
        if waiting and len(waiting) + options.num_samples > prompt.session.max_rows(longest):
            yield from _generated(waiting, options, stop)
            waiting = []
        logits = None
        if options.max_new_tokens and not stop():
            logits = prompt.session.predict()
        waiting += prompt.samples(range(options.num_samples), options, logits)
    yield from _generated(waiting, options, stop)
    yield from _odd_prompts(texts, model)


def _odd_prompts(prompts: Sequence[bytes], model: LoadedModel) -> Iterator[Notice]:
    """Yields notices on prompts with tags, with what nobody sees or means, or with words that the vocabulary lacks."""
    tokenizer = model.tokenizer
    tags = [name for name in tokenizer.special_names if any(name.encode() in prompt for prompt in prompts)]
    if tags:
        remark = f"{named(tags, most=3)} in a prompt: read as text, not as the special token of that name"
        if model.chat_templates:
            remark += f"; to chat, export the model (xlcli export {shlex.quote(model.name)} -o FOLDER)"
            remark += " and use apply_chat_template of transformers there"
        yield Notice(remark)
    pieces = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
    begins_with_blank = any(len(piece) > 1 and piece.startswith(b" ") for piece in pieces)  # soon found, if at all
    oddities = Oddities("prompt", "prompt" if begins_with_blank else "line")
    coverage = Coverage(tokenizer, model.name)
    for prompt in prompts:
        oddities.begin()
        oddities.search(prompt)
        coverage.add(*tokenizer.tokens(prompt))
    yield from oddities.notices()
    yield from coverage.notices()


def _generated(
    samples: list[Sample], options: GenerateConfig, stop: Callable[[], bool]
) -> Iterator[tuple[Generated, ...]]:
    """Generates all samples, in batches; yields the results of each prompt."""
    # Only states with equal keys can be the sequences of one batch.
    groups: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        key: Hashable = None
        if sample.logits is not None:
            key = sample.prompt.session.state.join_keys[0]
        groups.setdefault(key or id(sample), []).append(sample)  # without a key, a sample is a group
    for group in groups.values():
        batch_size = min(sample.prompt.session.max_rows(sample.prompt.n_tokens) for sample in group)
        for first in range(0, len(group), batch_size):
            batch = group[first : first + batch_size]
            joined = InferenceSession.join([sample.prompt.session for sample in batch])
            for _ in _sample_batch(joined, batch, options, stop):
                pass
    results = [sample.result for sample in samples]
    for first in range(0, len(results), options.num_samples):
        yield tuple(results[first : first + options.num_samples])


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been read, unless it was interrupted."""

    text: bytes
    session: InferenceSession  # session after the tokens that have been read
    rng: SampleRNG  # generator of the first sample
    recent: tuple[int, ...]  # latest tokens of the prompt, for the repetition penalty
    n_tokens: int  # maximum number of tokens of its text, with a saved state and new ones
    unread: PendingText  # text that was not read before an interruption

    def samples(self, numbers: Iterable[int], options: GenerateConfig, logits: Tensor | None) -> list[Sample]:
        """Samples with these numbers, which are added to the seed of the first one."""
        samples = []
        for number in numbers:
            rng = SampleRNG(self.rng.seed + number, self.recent) if number else self.rng
            samples.append(Sample(self, number, rng, options, logits))
        return samples


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
    """Reads a prompt in large calls, after what a resumed session has not read; arguments as for `generate`."""
    no_numbers = np.empty(0, np.int32)
    pending = PendingText(b"", no_numbers, no_numbers)
    n_seen = 0
    if resume is not None:
        pending = resume.pending
        n_seen = resume.model_state.seen
    begins_document = bool(pending.documents)  # in the unread text; nothing before it counts
    if begins_document:
        start = pending.documents[-1]
        is_after_start = np.cumsum(pending.sizes) > start
        pending = PendingText(pending.data[start:], pending.ids[is_after_start], pending.sizes[is_after_start])
    text = pending.data + prompt
    prompt_ids, prompt_sizes = model.tokenizer.tokens(text[pending.n_tokenized :])
    ids = np.concatenate((pending.ids, prompt_ids))
    sizes = np.concatenate((pending.sizes, prompt_sizes))
    n_tokens = n_seen + len(ids) + options.max_new_tokens
    session = InferenceSession.open(model, runtime, options, resume, n_tokens)
    if options.num_samples > 1 and session.options.learning.context_cache is not None:
        raise ConfigError("a context cache continues one text, not several samples.", "Use num_samples 1.")
    if begins_document:
        session.reset()
    rng = _make_rng(seed, resume)
    n_read = session.read(ids, stop)
    rng.recent.extend(ids[max(n_read - REPETITION_WINDOW, 0) : n_read].tolist())
    # What is not read before an interruption is saved as text.
    n_bytes_read = int(sizes[:n_read].sum())
    unread = PendingText(text[n_bytes_read:], ids[n_read:], sizes[n_read:])
    return Prompt(prompt, session, rng, tuple(rng.recent), n_tokens, unread)


def _make_rng(seed: int | None, resume: SessionState | None) -> SampleRNG:
    """Returns a generator with this seed, else the saved one, else a random one; all have the saved tokens."""
    if resume is None or resume.sampler is None:
        return SampleRNG(secrets.randbits(31) if seed is None else seed)
    saved = resume.sampler
    if seed is not None:
        return SampleRNG(seed, saved.recent)
    rng = SampleRNG(saved.seed, saved.recent)
    rng.generator.set_state(torch.tensor([*saved.generator], dtype=torch.uint8))
    return rng


@dataclass(eq=False)
class Sample:
    """A sample being generated; `logits` (1 v) predict its first token, if they are known."""

    prompt: Prompt
    number: int
    rng: SampleRNG
    options: GenerateConfig
    logits: Tensor | None
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        self._detokenizer = StreamingDetokenizer(self.options.stop)
        self._is_complete = False
        self._text = bytearray()
        self._n_shown = 0  # bytes of the text
        self._n_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._seconds = 0.0
        model = self.prompt.session.model
        self._end_ids = () if model.tokenizer.kind == "words" else model.end_ids  # <eos> of words is a line end

    def feed(self, logits: Tensor, last: int, token: int) -> None:
        """Adds the token that was sampled from logits (v) after the `last` one."""
        tokenizer = self.prompt.session.model.tokenizer
        n_best = self.options.logprobs
        text = tokenizer.text_after(last, token)
        if n_best is not None:
            logprob, best = log_probabilities(logits, token, n_best)
            best_tokens = tuple(TokenLogprob(i, tokenizer.text_after(last, i), value) for i, value in best)
            self._logprobs.append(TokenLogprob(token, text, logprob, best_tokens))
        self._n_tokens += 1
        is_without_text = not text and token in tokenizer.separate_ids  # a special token, such as the end of a turn
        if token in self._end_ids or is_without_text:
            self._is_complete = True
            return
        self._text += self._detokenizer.feed(text)
        self._is_complete = self._detokenizer.stopped  # a stop text has come

    def end(self, seconds: float, *, interrupted: bool) -> None:
        """Ends the sample after this time, if it is complete or `interrupted`."""
        if self._is_complete:
            self.stop_reason = "stop"
        elif self._n_tokens >= self.options.max_new_tokens:
            self.stop_reason = "length"
        elif interrupted:
            self.stop_reason = "interrupted"
        if self.stop_reason is not None:
            self._text += self._detokenizer.finish()
            self._seconds = seconds

    def new_text(self) -> Iterator[GeneratedText]:
        unshown = bytes(self._text[self._n_shown :])
        if unshown:
            self._n_shown = len(self._text)
            yield GeneratedText(self.number, unshown)

    @property
    def result(self) -> Generated:
        assert self.stop_reason is not None
        return Generated(
            sample=self.number,
            prompt=self.prompt.text.decode("utf-8", "replace"),
            text=self._text.decode("utf-8", "replace"),
            tokens=self._n_tokens,
            seed=self.rng.seed,
            stop_reason=self.stop_reason,
            tokens_per_second=self._n_tokens / max(self._seconds, 1e-9),
            logprobs=None if self.options.logprobs is None else tuple(self._logprobs),
        )


def _sample_batch(
    session: InferenceSession, samples: list[Sample], options: GenerateConfig, stop: Callable[[], bool]
) -> Iterator[GeneratedText | Generated]:
    """Generates a batch of samples; `session` has one row per sample. Text of a sample waits for those before it."""
    first_logits = [sample.logits for sample in samples if sample.logits is not None]
    logits = torch.cat(first_logits) if first_logits else None
    sampling = options.sampling(session.model.tokenizer.kind)
    started = time.perf_counter()
    growing = samples  # those that have not ended, in the order of the rows
    not_output = deque(samples)
    while True:
        interrupted = stop()
        for sample in growing:
            sample.end(time.perf_counter() - started, interrupted=interrupted)
        # Samples that have ended leave the batch.
        rows = [row for row, sample in enumerate(growing) if sample.stop_reason is None]
        if 0 < len(rows) < len(growing):
            session = session.select(rows)
        growing = [growing[row] for row in rows]
        while not_output:
            first = not_output[0]
            yield from first.new_text()
            if first.stop_reason is None:  # later samples wait for it
                break
            yield first.result
            not_output.popleft()
        if not growing:
            return
        if logits is None:
            logits = session.predict()
        before = session.last_tokens
        session.append(sample_tokens(logits, [sample.rng for sample in growing], sampling))
        for row, (sample, last, token) in enumerate(zip(growing, before, session.last_tokens, strict=True)):
            sample.feed(logits[row], last, token)
        logits = None  # those of the next token are not known yet
