"""Before the first step: the text is looked through, cut, given a vocabulary and turned into tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from xlcli import config as settings
from xlcli import presets
from xlcli.config import Config, TextConfig, Tree
from xlcli.errors import ConfigError, DataError
from xlcli.events import Progress
from xlcli.runtime import Runtime, make_runtime
from xlcli.store import folder as store
from xlcli.store.layout import read_config_file
from xlcli.text.corpus import Corpus, open_corpus
from xlcli.text.heldout import Split, split
from xlcli.text.tokenizers.registry import SAMPLE_BYTES, Tokenizer, choose_tokenizer, load_tokenizer, train_tokenizer
from xlcli.text.tokens import TokenFile, token_file
from xlcli.training import defaults

T = TypeVar("T")


class PreparationStoppedError(Exception):
    """Somebody asked to stop before there was anything to save."""


@dataclass(frozen=True)
class Prepared:
    """Everything a run is made from. `preset` is the name of the one used."""

    config: Config
    runtime: Runtime
    preset: str
    parts: Split
    tokenizer: Tokenizer
    train_ids: TokenFile
    valid_ids: TokenFile

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same when the run is resumed."""
        return {"sha256": self.parts.train.key, "valid": self.parts.valid.key, "tokenizer": self.tokenizer.fingerprint}


def prepare_new(
    tree: Tree, paths: Sequence[str], preset: str | None, stop: Callable[[], bool]
) -> Generator[Progress, None, Prepared]:
    """What a new run is made from; see `train` for the arguments.

    Raises:
        PreparationStoppedError: `stop` became true; nothing was written but token files.
    """
    given = settings.make(presets.read_preset(preset) if preset else {}, tree)
    runtime = make_runtime(given.runtime, training=True)
    parts = yield from _read(paths, given.text, stop)
    preset = preset or defaults.choose_preset(parts.train.n_bytes, runtime.device)
    text = settings.make(presets.read_preset(preset), tree).text
    tokenizer = _learn_vocabulary(text, parts)
    config = defaults.decide(
        tree, preset, tokenizer=tokenizer.kind, vocab_size=tokenizer.vocab_size, device=runtime.device
    )
    return (yield from _tokenize(config, runtime, preset, parts, tokenizer, stop))


def prepare_resumed(
    tree: Tree, paths: Sequence[str], preset: str | None, folder: Path, stop: Callable[[], bool]
) -> Generator[Progress, None, Prepared]:
    """What the run in `folder` goes on from.

    Raises:
        PreparationStoppedError: `stop` became true; nothing was written but token files.
        ConfigError: Something was asked for that only a new run can have.
    """
    record = store.read_record(folder)
    saved = read_config_file(folder, strict=True).config
    begun = settings.make(saved.model_dump(mode="json"), {"runtime": record.get("runtime", {})})
    config = defaults.resumed(begun, tree)
    begun_with = str(record.get("preset") or preset or "")
    if preset not in (None, begun_with):
        raise ConfigError(
            f"this run was begun with the preset {begun_with}, which cannot change when it is resumed.",
            "Leave --preset out, or train a new model with -o NAME.",
        )
    runtime = make_runtime(config.runtime, training=True)
    parts = yield from _read(paths, config.text, stop)
    return (yield from _tokenize(config, runtime, begun_with, parts, load_tokenizer(folder), stop))


def _read(paths: Sequence[str], text: TextConfig, stop: Callable[[], bool]) -> Generator[Progress, None, Split]:
    corpus: Corpus = open_corpus(paths)
    yield from _until(stop, _whole(corpus))
    parts = split(corpus, text.valid, text.test)
    if parts.train.n_bytes == 0:
        raise DataError("the held-out parts leave nothing to train on.", "Give a longer text or a smaller --valid.")
    return parts


def _whole(corpus: Corpus) -> Generator[Progress, None, None]:
    yield from corpus.scan()


def _learn_vocabulary(text: TextConfig, parts: Split) -> Tokenizer:
    kind, size = choose_tokenizer(text.tokenizer, text.vocab_size, parts.train.corpus.facts, parts.train.n_bytes)
    if kind != "bytes":
        _require_utf8(parts)
    portions = parts.train.read() if kind == "words" else parts.train.sample(SAMPLE_BYTES)
    return train_tokenizer(kind, portions, size)


def _tokenize(
    config: Config,
    runtime: Runtime,
    preset: str,
    parts: Split,
    tokenizer: Tokenizer,
    stop: Callable[[], bool],
) -> Generator[Progress, None, Prepared]:
    if tokenizer.kind != "bytes":
        _require_utf8(parts)
    train_ids = yield from _until(stop, token_file(parts.train, tokenizer))
    valid_ids = yield from _until(stop, token_file(parts.valid, tokenizer))
    return Prepared(config, runtime, preset, parts, tokenizer, train_ids, valid_ids)


def _require_utf8(parts: Split) -> None:
    for part in (parts.train, parts.valid, parts.test):
        part.corpus.require_utf8()


def _until(stop: Callable[[], bool], work: Generator[Progress, None, T]) -> Generator[Progress, None, T]:
    """The events and the result of `work`, given up as soon as `stop` says so."""
    while not stop():
        try:
            event = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield event
    work.close()
    raise PreparationStoppedError
