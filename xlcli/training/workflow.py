"""The training workflow: from text to a model folder. A stopped run is saved and can be resumed.

With a fixed number of CPU threads the resumed run equals the uninterrupted one to the bit.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from xlcli.config import Config, Tree
from xlcli.errors import DivergedError
from xlcli.events import Event, Notice, Plan, StoppedEarlyError
from xlcli.machine import available_bytes
from xlcli.model.build import build_on_meta
from xlcli.optim import ADAM_RATE
from xlcli.ranks import SINGLE, Ranks
from xlcli.store import commit
from xlcli.store.commit import step_of
from xlcli.store.layout import CHECKPOINTS
from xlcli.store.lock import clean, lock
from xlcli.store.weights import weights as weights_of
from xlcli.store.weights import weights_bytes
from xlcli.training import defaults, memory
from xlcli.training.folder import (
    check_has_run,
    check_new,
    check_texts,
    load_origin,
    newest_checkpoint,
    origin_again,
    restore,
    write_new,
)
from xlcli.training.parallel import beginning, leading
from xlcli.training.prepare import Prepared, prepare_new, prepare_resumed
from xlcli.training.run import LR_DIVISOR, TrainingRun

PREPARATION_SHARE = 0.1
"""Maximum share of a time budget that preparation counts for."""
Beginning = Generator[Event, None, tuple[Prepared, TrainingRun] | None]
"""Preparation of a run, with the run and its inputs; None if none is to be trained."""


def train(
    paths: Sequence[str],
    folder: Path,
    configs: Mapping[str, Config],
    *,
    init: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = SINGLE,
) -> Iterator[Event]:
    """Trains a model. Saves the best weights in `folder`, and checkpoints in its subfolder.

    Args:
        paths: Files, folders or `-`.
        folder: Model folder; refused when it holds a model, unless `overwrite` is set.
        configs: Preset name to configuration, from `presets.configurations`. The preset is chosen by text size and
            device; the configurations may differ in model and training settings only.
        init: Folder of a model whose weights and vocabulary the run starts from; `configs` is then from
            `store.origin.configurations`.
        overwrite: Replace the model in `folder` as soon as the new run has weights to keep; until then it stays, and
            the new run is in a subfolder, where `resume` finds it.
        dry_run: End with the plan, whose sizes are estimates for a long text; nothing is written.
        stop: Called between steps; when true, the run is saved and ends.
        ranks: Processes that train together, from `ranks.join`. The first one prepares and writes the run; the others
            follow it.

    Raises:
        CheckpointError: The model in `init` is missing or damaged.
        ConfigError, DataError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """

    def begin(contexts: ExitStack) -> Beginning:
        model = None if init is None else load_origin(init, folder)
        if not dry_run:
            check_new(folder, overwrite=overwrite)
            yield from _lock(folder, contexts)
            check_new(folder, overwrite=overwrite)  # another run may have ended in the meantime
        ready = yield from prepare_new(paths, configs, stop, model, dry_run=dry_run, ranks=ranks)
        check_texts(folder, ready)
        yield from _plan(folder, ready, 0)
        if dry_run:
            return None
        weights = None if model is None else weights_of(model.network)
        return (yield from _make_run(ready, commit.stage(folder), None, weights))

    return _run(begin, paths, folder, {}, stop, ranks)


def resume(
    paths: Sequence[str],
    folder: Path,
    changes: Tree | None = None,
    *,
    preset: str | None = None,
    init: str | None = None,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = SINGLE,
) -> Iterator[Event]:
    """Continues the run in `folder` from its newest undamaged checkpoint.

    Args:
        paths: The text of the run.
        folder: Model folder.
        changes: Settings that replace saved ones; only keys in `defaults.CHANGEABLE` may differ.
        preset: Refused unless the run uses it.
        init: Name or folder of a model; refused unless the run started from it.
        dry_run: As in `train`.
        stop: As in `train`.
        ranks: As in `train`; their number may differ from that of the run so far.

    Raises:
        CheckpointError: There is no run, or every checkpoint is damaged.
        ConfigError, DataError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """

    def begin(contexts: ExitStack) -> Beginning:
        check_has_run(folder)
        if not dry_run:
            yield from _lock(folder, contexts)
            commit.settle(folder)
        place = commit.place_of_run(folder)
        if place != folder:
            yield Notice(f"this run is to replace the model in {folder}; to keep that model, remove {place}")
        ready = yield from prepare_resumed(
            paths, place, changes or {}, preset, init, stop, dry_run=dry_run, ranks=ranks
        )
        point, notices = newest_checkpoint(place)
        yield from notices
        yield from _plan(folder, ready, step_of(point) if point else 0)
        if dry_run:
            return None
        weights = origin_again(ready.origin) if point is None and ready.origin else None
        may_differ = bool((changes or {}).get("runtime", {}).get("allow_data_change"))
        _, run = yield from _make_run(ready, place, point, weights, allow_data_change=may_differ)
        yield from _spent_budgets(run)
        return ready, run

    return _run(begin, paths, folder, changes or {}, stop, ranks)


def _run(
    begin: Callable[[ExitStack], Beginning],
    paths: Sequence[str],
    folder: Path,
    changes: Tree,
    stop: Callable[[], bool],
    ranks: Ranks,
) -> Iterator[Event]:
    """Begins a run on the first rank, which the others follow, and trains."""
    started = time.monotonic()
    with ExitStack() as contexts:
        contexts.callback(torch.set_num_threads, torch.get_num_threads())
        if ranks.is_first:
            contexts.enter_context(leading(ranks))
        try:
            begun = yield from (begin(contexts) if ranks.is_first else _follow(paths, changes, stop, ranks))
        except StoppedEarlyError:
            if ranks.is_first:
                message = "stopped before the first step; nothing was saved, so run the same command again."
                yield Notice(message, "warning")
            return
        if begun is None:
            return
        ready, run = begun
        if run.config.train.max_time is not None:  # the budget begins later if preparation took too large a share
            started = max(started, time.monotonic() - PREPARATION_SHARE * run.config.train.max_time)
        try:
            yield from run.train(ready, folder, started=started, stop=stop)
        except DivergedError as error:
            raise DivergedError(error.message, _lower_rate(run, paths, folder)) from None


def _follow(paths: Sequence[str], changes: Tree, stop: Callable[[], bool], ranks: Ranks) -> Beginning:
    """Takes part in a run that the first rank has begun or resumed, from the checkpoint that it has chosen."""
    point = beginning(ranks, stop)
    if point is None:
        return None
    place = point.parent.parent
    # A signal from here on stops all ranks after the same step.
    ready = yield from prepare_resumed(paths, place, changes, None, None, lambda: False, ranks=ranks)
    return (yield from _make_run(ready, place, point, None, allow_data_change=True))


def _make_run(
    ready: Prepared,
    place: Path,
    point: Path | None,
    weights: Mapping[str, Tensor] | None,
    *,
    allow_data_change: bool = False,
) -> Generator[Event, None, tuple[Prepared, TrainingRun]]:
    """The run of all ranks, restored from a checkpoint; without one the first rank writes a new run in `place`."""
    ranks, inputs = ready.runtime.ranks, (ready.train_ids, ready.tokenizer.start_id)
    if point is None:
        run = TrainingRun(ready.config, replace(ready.runtime, ranks=SINGLE), *inputs, weights)
        point = write_new(place, ready, run)
        if ranks.size == 1:
            return ready, run
    if ranks.is_first:
        ranks.publish("run", {"point": str(point.absolute())})
    run = TrainingRun(ready.config, ready.runtime, *inputs)
    yield from restore(run, point, ready, allow_data_change=allow_data_change)
    return ready, run


def _lock(folder: Path, contexts: ExitStack) -> Iterator[Notice]:
    """Locks the folder until `contexts` closes, and removes what crashed runs left."""
    if warning := contexts.enter_context(lock(folder)):
        yield Notice(warning, "warning")
    clean(folder)
    clean(folder / CHECKPOINTS)


def _spent_budgets(run: TrainingRun) -> Iterator[Notice]:
    """Remarks on budgets and patience of a resumed run that its earlier part has spent, so that no step remains."""
    seconds = run.counters.seconds
    for key, (used, budget) in run.budgets(round(seconds, 1)).items():
        unit = "s" if key == "max_time" else key.removeprefix("max_")
        if used >= budget:
            yield Notice(
                f"the budget of {budget:,.15g} {unit} was used up by the earlier part of the run ({used:,} {unit}); "
                f"a larger --{key.replace('_', '-')} or another budget continues it"
            )
    if run.counters.plateau is not None and run.spent(seconds) < 1.0 == run.fraction(seconds):
        yield Notice("the run ended early by --patience; a larger one, or another budget, continues it")


def _lower_rate(run: TrainingRun, paths: Sequence[str], folder: Path) -> str:
    """Remedy for a run that diverged: the command that resumes it at a lower learning rate."""
    train = run.config.train
    assert train.lr is not None
    divisor = LR_DIVISOR ** (run.counters.rollbacks + 1)
    rates = ["--lr", f"{min(train.lr / divisor, defaults.RATES[train.optimizer]):.2g}"]
    if train.optimizer == "muon":
        rates += ["--set", f"train.adam_lr={min((train.adam_lr or ADAM_RATE) / divisor, ADAM_RATE):.2g}"]
    command = shlex.join(["xlcli", "train", *paths, "-o", str(folder), "--resume", *rates])
    return f"Continue from the last checkpoint at a lower learning rate: {command}"


def _plan(folder: Path, ready: Prepared, resumed_at: int) -> Iterator[Plan]:
    """The plan; raises `ResourceError` after it if the run cannot fit the machine."""
    config, parts, runtime = ready.config, ready.parts, ready.runtime
    n_parameters = build_on_meta(config.model).n_parameters
    yield Plan(
        folder=folder,
        corpus=parts.train.corpus.name,
        train_bytes=parts.train.n_bytes,
        valid_bytes=parts.valid.n_bytes,
        test_bytes=parts.test.n_bytes,
        train_tokens=ready.n_train_tokens,
        estimated=ready.train_ids.n_bytes != parts.train.n_bytes,
        tokenizer=ready.tokenizer.kind,
        vocab_size=ready.tokenizer.vocab_size,
        preset=ready.preset,
        parameters=n_parameters,
        memory_bytes=memory.memory_bytes(config, runtime, n_parameters),
        available_bytes=available_bytes(str(runtime.device)),
        weights=config.train.weights,
        weights_bytes=weights_bytes(config.model, config.train.weights),
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        threads=runtime.threads,
        budget=defaults.budget_in_words(config, ready.n_train_tokens),
        resumed_at=resumed_at,
        init=ready.origin["model"] if ready.origin else None,
        n_ranks=runtime.ranks.size,
        n_local_ranks=runtime.ranks.local_size,
        rows=config.train.batch_size // runtime.ranks.size,
    )
    memory.require([config], runtime, n_parameters)
