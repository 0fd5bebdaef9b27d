"""Training from Python: events of new and resumed runs, also as one of the processes that `torchrun` has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xlcli import training
from xlcli.api.arguments import Place, Source, path_of, paths, public
from xlcli.config import RuntimeConfig, Tree, validate
from xlcli.errors import ConfigError
from xlcli.events import Event
from xlcli.ranks import join
from xlcli.store.discover import find
from xlcli.store.origin import NEW, configurations


@public()
def train_events(
    text: Source,
    folder: Place,
    *,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    init: Place | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Events of a run that trains a model on `text` and saves it in `folder`; it goes on as they are asked for.

    Raises the same errors as `xlcli.training.train`.

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
    if preset is not None and not isinstance(preset, str):
        raise ConfigError(f"preset is a name, not {type(preset).__name__}.", "xlcli.list_presets() has the names.")
    start = None if init is None else path_of(init, "init")
    model = None if start in (None, NEW) else find(start)
    changes = _tables(settings)
    configs = configurations(changes, preset, model, or_bundled=start is None)
    texts, place = paths(text), Path(path_of(folder, "folder"))
    run = partial(training.train, texts, place, configs, init=model, overwrite=overwrite, dry_run=dry_run)
    return _on_ranks(changes, partial(run, stop=stop))


@public()
def resume_events(
    text: Source,
    folder: Place,
    *,
    settings: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Events of the run in `folder` from its newest checkpoint on; errors as of `xlcli.training.resume`.

    Args:
        text: Training text of the run.
        folder: Model folder.
        settings: Settings that replace saved ones, such as a new budget.
        stop: As in `train_events`.
    """
    changes, place = _tables(settings), Path(path_of(folder, "folder"))
    return _on_ranks(changes, partial(training.resume, paths(text), place, changes, stop=stop))


def _on_ranks(settings: Mapping[str, Any], run: Callable[..., Iterator[Event]]) -> Iterator[Event]:
    """Events of a run on the processes that `torchrun` has started; without them, on this one."""
    runtime = validate(RuntimeConfig, dict(settings.get("runtime", {})))
    with join(runtime.timeout, "If there is a checkpoint, xlcli.resume continues from it.") as ranks:
        if runtime.nproc not in (None, ranks.size):
            raise ConfigError(
                f"runtime.nproc is {runtime.nproc}, but here are {ranks.size}.", "Start them with torchrun."
            )
        yield from run(ranks=ranks)
        ranks.barrier()  # all processes find the finished model


def _tables(settings: Mapping[str, Any] | None) -> Tree:
    """A copy of the settings of a run; `ConfigError` unless they are tables by name."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or not all(isinstance(table, Mapping) for table in settings.values()):
        problem = "settings are tables of a configuration file, in a dictionary."
        raise ConfigError(problem, "Give them as {'train': {'max_steps': 100}}.")
    return dict(settings)
