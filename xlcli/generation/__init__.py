"""Generation: reads a prompt in large calls, then samples one token per call.

Samples of a batch continue copies of the state after the prompt, each with its own random-number generator. They are
output in order: the text of a sample is held back until all samples before it have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from xlcli.config import GenerateConfig
from xlcli.errors import ConfigError
from xlcli.events import Generated, GeneratedText, Notice
from xlcli.generation.prompt import read_prompt
from xlcli.generation.samples import Sample, sample_batch
from xlcli.inference import SaveState
from xlcli.sampling import StreamingDetokenizer
from xlcli.store.state_files import SessionState

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.store.loaded import LoadedModel


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
        stop: Called before every call of the model; once true, all samples end as "interrupted".

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
        samples = [
            Sample(text, i, text.rng_of(i), StreamingDetokenizer(options.stop))
            for i in range(first, min(first + batch_size, options.num_samples))
        ]
        branch = session.select([0] * len(samples)) if several else session
        yield from sample_batch(branch, samples, options, stop, logits)
    if save:
        save(text.saved())
