"""Generation after many prompts, in batches.

Each prompt is read alone, and its first token predicted alone; then prompts of any length are the sequences of a
batch. A result is that of the prompt alone with the same seed: compiled kernels compute a sequence to the bit as alone,
modules up to rounding. States that cannot be joined (`State.join_keys`) are continued in batches of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xlcli.config import GenerateConfig
from xlcli.events import Generated, Notice
from xlcli.generation.prompt import read_prompt
from xlcli.generation.samples import Sample, sample_batch
from xlcli.inference import InferenceSession
from xlcli.sampling import StreamingDetokenizer
from xlcli.store.state_files import SessionState

if TYPE_CHECKING:
    from torch import Tensor

    from xlcli.runtime import Runtime
    from xlcli.store.loaded import LoadedModel


@dataclass(frozen=True)
class _Row:
    """A sample to be generated, and the first logits (1 v) after its prompt; None if no token follows."""

    sample: Sample
    logits: Tensor | None


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
    rows: list[_Row] = []
    for text in prompts:
        if stop():
            break
        start = None if resume is None else resume.fork()
        prompt = read_prompt(model, text, options, runtime, seed=seed, resume=start, stop=stop)
        limit = min(prompt.session.max_rows(each.n_tokens) for each in (prompt, *(row.sample.prompt for row in rows)))
        if rows and len(rows) + options.num_samples > limit:
            yield from _generated(rows, options, stop)
            rows = []
        logits = prompt.session.predict() if options.max_new_tokens and not stop() else None
        samples = [
            Sample(prompt, i, prompt.rng_of(i), StreamingDetokenizer(options.stop)) for i in range(options.num_samples)
        ]
        rows += [_Row(sample, logits) for sample in samples]
    yield from _generated(rows, options, stop)


def _generated(
    rows: list[_Row], options: GenerateConfig, stop: Callable[[], bool]
) -> Iterator[tuple[Generated, ...] | Notice]:
    """Results of the prompts of all rows."""
    groups: dict[Hashable, list[_Row]] = {}
    for row in rows:
        key = row.sample.prompt.session.state.join_keys[0] if row.logits is not None else None
        groups.setdefault(id(row) if key is None else key, []).append(row)
    found: dict[int, Generated] = {}
    for group in groups.values():
        limit = min(row.sample.prompt.session.max_rows(row.sample.prompt.n_tokens) for row in group)
        for first in range(0, len(group), limit):
            batch = group[first : first + limit]
            samples = [row.sample for row in batch]
            logits = [row.logits for row in batch if row.logits is not None]
            done = iter(samples)
            for event in sample_batch(
                _session(samples, options), samples, options, stop, torch.cat(logits) if logits else None
            ):
                if isinstance(event, Generated):
                    found[id(next(done))] = event
                elif isinstance(event, Notice):
                    yield event
    results = [found[id(row.sample)] for row in rows]
    for first in range(0, len(results), options.num_samples):
        yield tuple(results[first : first + options.num_samples])


def _session(samples: list[Sample], options: GenerateConfig) -> InferenceSession:
    """Session whose rows continue the prompts of the samples; of a prompt with several samples a copy."""
    sessions = [sample.prompt.session for sample in samples]
    if len(sessions) > 1:
        return InferenceSession.join(sessions)
    return sessions[0].fork() if options.num_samples > 1 else sessions[0]
