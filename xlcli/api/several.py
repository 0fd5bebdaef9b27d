"""Many texts at a time in batches: continuations of prompts, and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Unpack

from xlcli.api import Model, Text, encoded
from xlcli.api.values import TextState, resumed, saving
from xlcli.config import GenerateConfig, StreamConfig, validate
from xlcli.config.keywords import GenerateOptions, StreamOptions
from xlcli.events import Generated, Notice
from xlcli.generation import prompts as generation
from xlcli.inference import SaveState
from xlcli.store.state_files import SessionState
from xlcli.streaming import several as streaming


def generate_prompts(
    model: Model,
    prompts: Iterable[Text],
    *,
    state: TextState | None = None,
    seed: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[tuple[Generated, ...] | Notice]:
    """Continues many prompts in batches; see `xlcli.generation.prompts.generate_prompts`.

    Args:
        model: Model.
        prompts: Texts to continue; may be empty.
        state: State that every prompt continues (default: nothing read).
        seed: Seed of the first sample of every prompt, as of `generate`. None takes a random one for each.
        options: Keys of `GenerateConfig`.

    Yields:
        The samples of each prompt, in the order of the prompts, and notices.
    """
    texts, resume = map(encoded, prompts), resumed(state, model.loaded)
    chosen = validate(GenerateConfig, options)
    return generation.generate_prompts(model.loaded, texts, chosen, model.runtime, seed=seed, resume=resume)


def stream_several(
    model: Model,
    texts: Mapping[str, Iterable[Text | None]],
    *,
    states: Mapping[str, TextState] | None = None,
    save: Callable[[str, TextState], None] | None = None,
    **options: Unpack[StreamOptions],
) -> Iterator[streaming.InputEvent]:
    """Scores several texts as they arrive, in batches; see `xlcli.streaming.several.stream_several`.

    Args:
        model: Model.
        texts: Name to the parts of a text in order. None in place of a part means that none has arrived yet, so that
            the other texts do not wait.
        states: Name to the state to continue, if any.
        save: Called with a name every `save_every` seconds and at the end with its state.
        options: Keys of `StreamConfig`, without `continue_tokens`.

    Yields:
        Name and event.
    """

    def open_states(name: str) -> tuple[SessionState | None, SaveState | None]:
        of_text = None if save is None else partial(save, name)
        return resumed((states or {}).get(name), model.loaded), saving(of_text, model.loaded)

    inputs = [
        streaming.Input(name, (None if part is None else encoded(part) for part in parts), partial(open_states, name))
        for name, parts in texts.items()
    ]
    return streaming.stream_several(model.loaded, _Given(inputs), validate(StreamConfig, options), model.runtime)


class _Given:
    """Inputs that are all known."""

    def __init__(self, inputs: Sequence[streaming.Input]) -> None:
        self._inputs = inputs

    def appeared(self) -> Sequence[streaming.Input]:
        """All at the first call."""
        inputs, self._inputs = self._inputs, ()
        return inputs

    def wait(self) -> None:
        """Returns at once."""
