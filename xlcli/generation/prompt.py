"""A prompt that has been read: the session after it, and the random-number generator of its first sample."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xlcli.config import GenerateConfig
from xlcli.inference import InferenceSession
from xlcli.sampling import REPETITION_WINDOW, SampleRNG
from xlcli.store.state_files import PendingText, SamplerState, SessionState
from xlcli.text.pretokenize import whole_words

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.store.loaded import LoadedModel
    from xlcli.text.tokenizers.registry import Tokenizer


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
