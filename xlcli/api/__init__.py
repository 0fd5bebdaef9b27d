"""Python interface: `load` a model, then score, read and continue texts; the four workflows as functions.

`train` and `resume` return a model. `evaluate`, `generate` and `stream`, and `train_events` and `resume_events` in
`runs`, are the generators of events behind the commands. Texts are `str`, which is encoded as UTF-8, or `bytes`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, AnyStr, Literal, get_args, overload

from xlcli import evaluation, generation, streaming
from xlcli.api.arguments import (
    LOAD_SETTINGS,
    OF_EVENTS,
    Place,
    Source,
    Text,
    encoded,
    encoded_texts,
    is_several,
    path_of,
    paths,
    public,
)
from xlcli.api.progress import ProgressLine
from xlcli.api.runs import resume_events, train_events
from xlcli.api.values import TextScore, TextScores, TextState, resumed, saving
from xlcli.config import (
    EvalConfig,
    GenerateConfig,
    InferenceConfig,
    OnlineConfig,
    RuntimeConfig,
    StreamConfig,
    WeightEncoding,
    validate,
)
from xlcli.errors import ConfigError
from xlcli.events import Event, Generated, GeneratedText, Notice, Progress, Step, TokenScore, WordScore
from xlcli.runtime import Runtime, make_runtime
from xlcli.store import folder as store
from xlcli.store.discover import find, is_state_file
from xlcli.store.layout import read_config
from xlcli.store.state_files import load_state, save_state
from xlcli.text.oddities import Oddities
from xlcli.text.tokenizers import Coverage

LONGEST_NAME = 255  # bytes of the name of a file


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model ready for use; made by `load`.

    A setting that is None is as in the state, else as in training. All methods raise
    `ConfigError` for an illegal option, and `StateError` for a state of another model or memory length.
    """

    loaded: store.LoadedModel
    """Configuration, tokenizer, network (`torch.nn.Module`) and training record."""
    runtime: Runtime
    """Device, number type and threads."""

    def __getattr__(self, name: str) -> Any:
        """Called for what a model does not have: names the function that has it."""
        remedy = f": use xlcli.{name}(model, ...)" if name in ("stream", "evaluate", "generate_prompts") else ""
        raise AttributeError(f"a Model has no {name}{remedy}")

    def __repr__(self) -> str:
        return f"Model({self.loaded.name!r}, {self.runtime.device}, {self.runtime.dtype_name})"

    @overload
    def score(
        self, text: Text, *, state: TextState | None = None, progress: bool = True, **settings: Any
    ) -> TextScore: ...
    @overload
    def score(
        self, text: Iterable[Text], *, state: TextState | None = None, progress: bool = True, **settings: Any
    ) -> list[TextScore]: ...
    @public(OnlineConfig)
    def score(
        self, text: Text | Iterable[Text], *, state: TextState | None = None, progress: bool = True, **settings: Any
    ) -> TextScore | list[TextScore]:
        """Surprisal of every token of `text`, given everything read before in `state` (default: nothing).

        Lines and bytes count from the start of `text`. A token that begins in the unread end of the state and ends in
        `text` is scored with `text`; its `byte` is negative. Words of that end count in `number`. Settings are those of
        `OnlineConfig`, such as `adapt`.

        Several texts have a list of scores, each as of the text alone; in batches, but for `state` and what learns.
        With `progress` a call of more than a second shows how far it is, in a terminal or notebook.

        Warns (`UserWarning`) of what nobody sees, of a vocabulary without pieces for the text, and of names of files.
        """
        if not is_several(text):
            data = encoded(text)
            _warn_of([data], "line", self.loaded)
            with ProgressLine(len(data), wanted=progress) as line:
                return self._score(data, state, settings, line)
        texts = [*encoded_texts(text)]
        kinds = "row" if state is None else "line"  # what continues a state may begin with a blank
        _warn_of(texts, kinds, self.loaded)
        chosen = validate(OnlineConfig, settings)
        with ProgressLine(sum(map(len, texts)), wanted=progress) as line:
            if state is not None or chosen.online_option is not None:
                return TextScores(self._score(data, state, settings, line) for data in texts)
            options = validate(EvalConfig, chosen.model_dump(exclude_unset=True))
            scores = TextScores()
            for event in evaluation.score_texts(self.loaded, texts, options, self.runtime):
                if isinstance(event, Progress):
                    line.show(event)
                else:
                    scores.append(_text_score(event))
            return scores

    def _score(self, text: bytes, state: TextState | None, settings: dict[str, Any], line: ProgressLine) -> TextScore:
        """Score of one text after `state`, in lines and bytes of the text; adds each token to the progress `line`."""
        n_lines = n_bytes = 0  # before the text
        if state is not None:
            n_lines, n_bytes = state.n_lines, state.n_bytes
        tokens: list[TokenScore] = []

        def add(token: TokenScore) -> None:
            tokens.append(token)
            line.read(len(token.text))

        events = self._stream([text], state, _stream_settings(settings, emit="words"), on_token=add)
        words = [event for event in events if isinstance(event, WordScore)]  # `add` gets the tokens on the way
        # The unread end of the state is scored, too; what ends before the text begins is not of this text.
        new_tokens = [token for token in tokens if token.byte + len(token.text) > n_bytes]
        new_words = [word for word in words if word.byte + len(word.word.encode()) > n_bytes]
        return _text_score([*new_tokens, *new_words], n_lines, n_bytes)

    @public(OnlineConfig)
    def read(self, text: Text, *, state: TextState | None = None, progress: bool = True, **settings: Any) -> TextState:
        """State after `state` (default: nothing) and `text`; settings and `progress` as for `score`."""
        data = encoded(text)
        saved: list[TextState] = []
        is_read = False

        def portions() -> Iterator[bytes]:
            nonlocal is_read
            yield data
            is_read = True  # so that the stream stops, and saves the unfinished end unread

        tokens = self._stream(portions(), state, _stream_settings(settings), save=saved.append, stop=lambda: is_read)
        with ProgressLine(len(data), wanted=progress) as line:
            for token in tokens:
                if isinstance(token, TokenScore):
                    line.read(len(token.text))
        return saved[-1]

    @public(GenerateConfig, LOAD_SETTINGS | OF_EVENTS)
    def generate(
        self, prompt: AnyStr, *, state: TextState | None = None, seed: int | None = None, **settings: Any
    ) -> AnyStr:
        """Continuation of `state` and `prompt`, without the prompt; arguments as for `stream_generate`."""
        encoded(prompt)
        return prompt[:0].join(self.stream_generate(prompt, state=state, seed=seed, **settings))

    @public(GenerateConfig, LOAD_SETTINGS | OF_EVENTS)
    def stream_generate(
        self, prompt: AnyStr, *, state: TextState | None = None, seed: int | None = None, **settings: Any
    ) -> Iterator[AnyStr]:
        """Continuation of `state` and `prompt` in pieces of whole characters; arguments as for `xlcli.generate`.

        The pieces are of the type of the prompt: `str`, in which invalid UTF-8 is U+FFFD, or `bytes`.
        """
        for event in generate(self, prompt, state=state, seed=seed, **settings):
            if isinstance(event, GeneratedText):
                yield event.text if isinstance(prompt, bytes) else event.text.decode("utf-8", "replace")
            elif isinstance(event, Notice) and event.level == "warning":
                warnings.warn(event.text, stacklevel=2)

    @public()
    def save_state(self, state: TextState, path: Place) -> None:
        """Writes a state file, as `--state-out` does. It replaces a state file or an empty file.

        Raises:
            ConfigError: `path` is another kind of file, such as a text or the weights of a model.
        """
        place = Path(path_of(path, "path"))
        is_empty = place.is_file() and place.stat().st_size == 0
        if place.exists() and not (is_empty or is_state_file(place)):
            raise ConfigError(f"{place} exists and is no state file.", "Choose another file, or remove it first.")
        save_state(place, state.session, model=self.loaded)

    @public()
    def load_state(self, path: Place) -> TextState:
        """State of a file that `save_state` or `--state-out` wrote; `StateError` if it cannot be used."""
        session = load_state(Path(path_of(path, "path")), model=self.loaded, device=str(self.runtime.device))
        return TextState(session, self.loaded.fingerprints)

    def _stream(
        self,
        portions: Iterable[bytes | None],
        state: TextState | None,
        options: StreamConfig,
        *,
        save: Callable[[TextState], None] | None = None,
        **arguments: Any,
    ) -> Iterator[streaming.StreamEvent]:
        resume, saves = resumed(state, self.loaded), saving(save, self.loaded)
        return streaming.stream(self.loaded, portions, options, self.runtime, resume=resume, save=saves, **arguments)


@public(InferenceConfig, InferenceConfig.model_fields.keys() - LOAD_SETTINGS)
def load(
    model: Place | None = None,
    *,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    threads: int | None = None,
    **settings: Any,
) -> Model:
    """Loads a model.

    Args:
        model: Name or folder. Default: `XLCLI_MODEL`, else the newest finished one in `./models`, else the bundled one.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: Number type of matrix products; `auto` is float32.
        threads: Number of CPU threads of the process; None keeps the current number.
        settings: `LOAD_SETTINGS` of `InferenceConfig`; what is left out is as trained.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        ConfigError: The device does not exist, or the model has no such setting.
    """
    runtime = make_runtime(validate(RuntimeConfig, {"device": device, "dtype": dtype, "threads": threads}))
    chosen = validate(InferenceConfig, settings)
    folder = find(None if model is None else path_of(model, "model"))
    chosen.check_model(read_config(folder).model)  # before the weights, which take time
    loaded = store.load(folder, chosen, device=runtime.device)
    for warning in loaded.warnings:
        warnings.warn(warning, stacklevel=3)  # the line that calls `load`, before the one of the decorator
    return Model(loaded, runtime)


@public()
def copy_model(model: Place, folder: Place, *, weights: WeightEncoding | None = None) -> None:
    """Copies a model, by name or folder, without its checkpoints to `folder`, which must not exist.

    `weights` is the encoding of the weights of the copy; None keeps the present one.
    """
    if weights is not None and weights not in get_args(WeightEncoding):
        raise ConfigError(f"weights is {weights!r}.", "Pass 'float32', 'bfloat16' or 'int8'.")
    store.copy_model(find(path_of(model, "model")), Path(path_of(folder, "folder")), weights)


@public()
def train(
    text: Source,
    folder: Place,
    *,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    init: Place | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Model:
    """Trains a model on `text`, saves it in `folder` and returns it; arguments and errors as of `train_events`.

    With `progress` the latest step is shown, in a terminal or notebook. Warnings are Python warnings (`UserWarning`).
    """
    events = train_events(text, folder, settings=settings, preset=preset, init=init, overwrite=overwrite)
    return _trained(events, folder, progress=progress)


@public()
def resume(text: Source, folder: Place, *, settings: Mapping[str, Any] | None = None, progress: bool = True) -> Model:
    """Continues the run in `folder` and returns its model; arguments as of `resume_events` and `train`."""
    return _trained(resume_events(text, folder, settings=settings), folder, progress=progress)


def _trained(events: Iterable[Event], folder: Place, *, progress: bool) -> Model:
    """Runs to the last of these events, and loads the model in `folder`."""
    with ProgressLine(0, wanted=progress) as line:
        for event in events:
            if isinstance(event, Step):
                line.show_step(event)
            elif isinstance(event, Notice) and event.level == "warning":
                warnings.warn(event.text, stacklevel=4)
    return load(Path(folder).absolute())


@public(EvalConfig)
def evaluate(
    model: Model,
    text: Source | None = None,
    *,
    per_token: bool = False,
    words: bool = False,
    documents: bool = False,
    **settings: Any,
) -> Iterator[Event]:
    """Scores files or folders, once per memory length; see `xlcli.evaluation.evaluate`.

    Without `text`, the validation text of the model is scored. `per_token` also yields the score of every token,
    `words` that of every word and region, or of every pair if pairs are compared, `documents` that of every row or
    file, and the rows they are in. Settings are those of `EvalConfig`.
    """
    files = None if text is None else paths(text)
    chosen, runtime = validate(EvalConfig, settings), model.runtime
    return evaluation.evaluate(
        model.loaded, files, chosen, runtime, per_token=per_token, words=words, documents=documents
    )


@public(GenerateConfig)
def generate(
    model: Model,
    prompt: Text,
    *,
    state: TextState | None = None,
    seed: int | None = None,
    save: Callable[[TextState], None] | None = None,
    **settings: Any,
) -> Iterator[GeneratedText | Generated | Notice]:
    """Continues a text; see `xlcli.generation.generate`.

    Args:
        model: Model.
        prompt: Text to continue; may be empty.
        state: State to continue (default: nothing read).
        seed: Seed of the first sample; sample i has `seed + i`. None continues the generator of `state`, if
            generation saved it, else takes a random seed.
        save: Called at the end with the state after the last token; one sample only.
        settings: Those of `GenerateConfig`.
    """
    chosen, text = validate(GenerateConfig, settings), encoded(prompt)
    resume, saves = resumed(state, model.loaded), saving(save, model.loaded)
    return generation.generate(model.loaded, text, chosen, model.runtime, seed=seed, resume=resume, save=saves)


@public(GenerateConfig)
def generate_prompts(
    model: Model, prompts: Iterable[Text], *, state: TextState | None = None, seed: int | None = None, **settings: Any
) -> Iterator[tuple[Generated, ...] | Notice]:
    """Continues many prompts in batches, each as `generate` does; see `xlcli.generation.generate_prompts`.

    Every prompt continues the same `state` with the same `seed`. Without a seed each continues the generator of the
    state, if it has one, else takes a random seed.

    Yields:
        The samples of each prompt, in the order of the prompts, and notices.
    """
    if not is_several(prompts):
        raise ConfigError(f"prompts are a list of texts, not {type(prompts).__name__}.", "Pass [prompt].")
    texts, resume = encoded_texts(prompts), resumed(state, model.loaded)
    chosen = validate(GenerateConfig, settings)
    return generation.generate_prompts(model.loaded, texts, chosen, model.runtime, seed=seed, resume=resume)


@public(StreamConfig)
def stream(
    model: Model,
    text: Text | Iterable[Text],
    *,
    state: TextState | None = None,
    save: Callable[[TextState], None] | None = None,
    **settings: Any,
) -> Iterator[streaming.StreamEvent]:
    """Scores text as it arrives; see `xlcli.streaming.stream`.

    Args:
        model: Model.
        text: A text, or its parts in order: an open file, a socket, any iterable. Scores do not depend on the division.
            CR LF is read as LF, unless `binary` is set.
        state: State to continue (default: nothing read).
        save: Called every `save_every` seconds and at the end with the state.
        settings: Those of `StreamConfig`.
    """
    portions = text if is_several(text) or hasattr(text, "readline") else [text]
    if isinstance(text, str | bytes) and _is_name_of_file(encoded(text)):
        remedy = f"Pass open({text!r}, 'rb'), or use xlcli.evaluate(model, {text!r})."
        raise ConfigError(f"the text is {text!r}, which is a file.", remedy)
    return model._stream(map(encoded, portions), state, validate(StreamConfig, settings), save=save)


def _warn_of(texts: Sequence[bytes], kinds: str, model: store.LoadedModel) -> None:
    """Warns of oddities of these `kinds` in the texts, of words that the vocabulary lacks, and of names of files."""
    oddities = Oddities("text", kinds)
    coverage = Coverage(model.tokenizer, model.name)
    for text in texts:
        oddities.begin()
        oddities.feed(text)
        coverage.add(*model.tokenizer.tokens(text))
    for notice in [*oddities.notices(), *coverage.notices()]:
        warnings.warn(notice.text, stacklevel=4)
    for text in texts:
        if _is_name_of_file(text):
            shown = text.decode(errors="replace")
            warnings.warn(f"the text is '{shown}', which is a file: pass what it holds to score that", stacklevel=4)


def _is_name_of_file(text: bytes) -> bool:
    return 0 < len(text) <= LONGEST_NAME and b"." in text and os.path.isfile(text)  # noqa: PTH113


def _stream_settings(settings: dict[str, Any], emit: str = "tokens") -> StreamConfig:
    """Settings of a stream that scores exactly the bytes given, from settings of `OnlineConfig`."""
    chosen = validate(OnlineConfig, settings).model_dump(exclude_unset=True)
    return validate(StreamConfig, chosen | {"emit": emit, "binary": True})


def _text_score(parts: Iterable[Event], lines: int = 0, start: int = 0) -> TextScore:
    """Score of a text that begins after `lines` lines, at byte `start`, with these tokens and words."""
    tokens, words = list[TokenScore](), list[WordScore]()
    for part in parts:
        if isinstance(part, TokenScore):
            tokens.append(replace(part, line=part.line - lines, byte=part.byte - start, prediction=None))
        elif isinstance(part, WordScore):
            words.append(replace(part, line=part.line - lines, byte=part.byte - start))
    return TextScore(tuple(tokens), tuple(words))
