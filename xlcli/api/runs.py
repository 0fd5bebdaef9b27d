"""Training from Python: `train` and `resume`, also as one of the processes that `torchrun` has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xlcli import training
from xlcli.config import RuntimeConfig, validate
from xlcli.errors import ConfigError
from xlcli.events import Event
from xlcli.ranks import join
from xlcli.store.discover import find
from xlcli.store.origin import NEW, configurations

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Path of a file or folder, or several paths, read as one text."""


def train(
    text: Source,
    folder: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    init: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Trains a model on `text` and saves it in `folder`; see `xlcli.training.train`.

    Args:
        text: Training text: files or folders.
        folder: Model folder.
        settings: Tables of a configuration file, as `{"train": {"max_steps": 100}}`; they override the preset.
        preset: Preset by name; None chooses one by text size and device.
        init: Name or folder of a model whose weights, vocabulary and shape the run starts from; "none" for new weights.
            By default from the bundled model, if preset, model and vocabulary are open and the text resembles its own.
        overwrite: Replace the model in `folder`.
        dry_run: End with the `Plan`.
        stop: Called between steps; once it returns True, the run is saved and ends.
    """
    model = None if init in (None, NEW) else find(os.fspath(init))
    changes = dict(settings or {})
    configs = configurations(changes, preset, model, or_bundled=init is None)
    run = partial(training.train, paths(text), Path(folder), configs, init=model, overwrite=overwrite, dry_run=dry_run)
    return _on_ranks(changes, partial(run, stop=stop))


def resume(
    text: Source,
    folder: str | os.PathLike[str],
    *,
    settings: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Continues the run in `folder` from its newest checkpoint; see `xlcli.training.resume`.

    Args:
        text: Training text of the run.
        folder: Model folder.
        settings: Settings that replace saved ones, such as a new budget.
        stop: As in `train`.
    """
    changes = dict(settings or {})
    return _on_ranks(changes, partial(training.resume, paths(text), Path(folder), changes, stop=stop))


def _on_ranks(settings: Mapping[str, Any], run: Callable[..., Iterator[Event]]) -> Iterator[Event]:
    """Events of a run on the processes that `torchrun` has started; without them, on this one."""
    runtime = validate(RuntimeConfig, dict(settings.get("runtime", {})))
    with join(runtime.timeout, "If there is a checkpoint, xlcli.resume continues from it.") as ranks:
        if runtime.nproc not in (None, ranks.size):
            raise ConfigError(
                f"runtime.nproc is {runtime.nproc}, but here are {ranks.size}.", "Start them with torchrun."
            )
        yield from run(ranks=ranks)


def paths(text: Source) -> list[str]:
    if isinstance(text, str | os.PathLike):
        return [os.fspath(text)]
    if not isinstance(text, Iterable):
        raise ConfigError(f"a file is named by a str or path, not {type(text).__name__}.", "Pass its name.")
    return [os.fspath(path) for path in text]
