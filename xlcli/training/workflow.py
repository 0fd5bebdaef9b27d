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
from typing import Any

import torch
from torch import Tensor

from xlcli.config import Config, Tree
from xlcli.errors import DivergedError
from xlcli.events import Event, Notice, Plan, StoppedEarlyError
from xlcli.machine import available_bytes
from xlcli.optim import ADAM_RATE
from xlcli.ranks import SINGLE, Ranks
from xlcli.store import commit
from xlcli.store.commit import step_of
from xlcli.store.layout import CHECKPOINTS
from xlcli.store.lock import clean, lock
from xlcli.store.weights import weights as weights_of
from xlcli.store.weights import weights_bytes
from xlcli.training import checkpoint, defaults, memory
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
from xlcli.training.loop import Trainer
from xlcli.training.parallel import begin, beginning, leading
from xlcli.training.prepare import Prepared, prepare_new, prepare_resumed
from xlcli.training.run import LR_DIVISOR, TrainingRun, make_training_run
from xlcli.training.validation import describe_run

PREPARATION_SHARE = 0.1
"""Maximum share of a time budget that preparation counts for."""


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
    started = time.monotonic()
    if not ranks.is_first:
        yield from _follow(paths, folder, {}, ranks, stop)
        return
    with leading(ranks), ExitStack() as contexts:
        contexts.callback(torch.set_num_threads, torch.get_num_threads())
        model = None if init is None else load_origin(init, folder)
        if not dry_run:
            check_new(folder, overwrite=overwrite)
            yield from _lock(folder, contexts)
            check_new(folder, overwrite=overwrite)  # another run may have ended in the meantime
        try:
            ready = yield from prepare_new(paths, configs, stop, model, dry_run=dry_run, ranks=ranks)
        except StoppedEarlyError:
            yield Notice("stopped before the first step; nothing was saved, so run the same command again.", "warning")
            return
        check_texts(folder, ready)
        plan = _plan(folder, ready, 0)
        yield plan
        memory.require(ready.config, ready.runtime, plan.parameters)
        if dry_run:
            return
        weights = None if model is None else weights_of(model.network)
        run = _single_run(ready, weights)
        model = weights = None  # free before training
        record = describe_run(ready, run)
        point = write_new(commit.stage(folder), ready, run, record)
        if ranks.size > 1:
            begin(ranks, point)
            run = yield from _join_run(ready, point, allow_data_change=False)
        yield from _take_steps(run, ready, folder, record, paths, started=started, stop=stop)


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
    started = time.monotonic()
    if not ranks.is_first:
        yield from _follow(paths, folder, changes or {}, ranks, stop)
        return
    with leading(ranks), ExitStack() as contexts:
        contexts.callback(torch.set_num_threads, torch.get_num_threads())
        check_has_run(folder)
        if not dry_run:
            yield from _lock(folder, contexts)
            commit.settle(folder)
        place = commit.place_of_run(folder)
        if place != folder:
            yield Notice(f"this run is to replace the model in {folder}; to keep that model, remove {place}")
        try:
            ready = yield from prepare_resumed(
                paths, place, changes or {}, preset, init, stop, dry_run=dry_run, ranks=ranks
            )
        except StoppedEarlyError:
            yield Notice(
                "stopped before the next step; the run is unchanged, so run the same command again.", "warning"
            )
            return
        may_differ = ready.config.runtime.allow_data_change
        point, notices = newest_checkpoint(place)
        yield from notices
        plan = _plan(folder, ready, step_of(point) if point else 0)
        yield plan
        memory.require(ready.config, ready.runtime, plan.parameters)
        if dry_run:
            return
        weights = origin_again(ready.origin) if point is None and ready.origin else None
        if point is None or ranks.size == 1:
            run = _single_run(ready, weights)
            weights = None
            record = describe_run(ready, run)
        if point is None:
            point = write_new(place, ready, run, record)
        elif ranks.size == 1:
            yield from restore(point, run, ready, place, allow_data_change=may_differ)
        if ranks.size > 1:
            begin(ranks, point)
            run = yield from _join_run(ready, point, allow_data_change=may_differ)
            record = describe_run(ready, run)
        yield from _spent_budgets(run)
        yield from _take_steps(run, ready, folder, record, paths, started=started, stop=stop)


def _follow(
    paths: Sequence[str], folder: Path, changes: Tree, ranks: Ranks, stop: Callable[[], bool]
) -> Iterator[Event]:
    """Takes part in a run that the first rank has begun or resumed, from the checkpoint that it has chosen."""
    started = time.monotonic()
    try:
        point = beginning(ranks, stop)
        if point is None:
            return
        # A signal from here on stops all ranks after the same step.
        ready = yield from prepare_resumed(paths, point.parent.parent, changes, None, None, lambda: False, ranks=ranks)
    except StoppedEarlyError:
        return
    run = yield from _join_run(ready, point, allow_data_change=True)
    yield from _take_steps(run, ready, folder, {}, paths, started=started, stop=stop)


def _single_run(ready: Prepared, weights: Mapping[str, Tensor] | None) -> TrainingRun:
    """A new run of this process alone."""
    runtime = replace(ready.runtime, ranks=SINGLE)
    return make_training_run(ready.config, runtime, ready.train_ids, ready.tokenizer.start_id, weights)


def _join_run(ready: Prepared, point: Path, *, allow_data_change: bool) -> Generator[Notice, None, TrainingRun]:
    """The run of all ranks, restored from a checkpoint on each of them."""
    run = make_training_run(ready.config, ready.runtime, ready.train_ids, ready.tokenizer.start_id)
    yield from restore(point, run, ready, point.parent.parent, allow_data_change=allow_data_change)
    return run


def _lock(folder: Path, contexts: ExitStack) -> Iterator[Notice]:
    """Locks the folder until `contexts` closes, and removes what crashed runs left."""
    if warning := contexts.enter_context(lock(folder)):
        yield Notice(warning, "warning")
    clean(folder)
    clean(folder / CHECKPOINTS)


def _take_steps(
    run: TrainingRun,
    ready: Prepared,
    folder: Path,
    record: dict[str, Any],
    paths: Sequence[str],
    *,
    started: float,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    """Trains until the budget is spent or `stop` is true, then evaluates."""
    checkpoint.agree(run)
    try:
        trainer = Trainer(run, ready, folder, record=record, started=_start_of_budget(started, ready.config))
        yield from trainer.train(stop)
    except DivergedError as error:
        raise DivergedError(error.message, _lower_rate(run, paths, folder)) from None


def _spent_budgets(run: TrainingRun) -> Iterator[Notice]:
    """Remarks on budgets and patience of a resumed run that its earlier part has spent, so that no step remains."""
    train = run.config.train
    for option, budget, used, unit in (
        ("--max-time", train.max_time, round(run.seconds, 1), "s"),
        ("--max-steps", train.max_steps, run.step, "steps"),
        ("--max-tokens", train.max_tokens, run.tokens, "tokens"),
    ):
        if budget is not None and used >= budget:
            yield Notice(
                f"the budget of {budget:,.15g} {unit} was used up by the earlier part of the run ({used:,} {unit}); "
                f"a larger {option} or another budget continues it"
            )
    if run.patience.plateau is not None and run.spent(run.seconds) < 1.0 == run.fraction(run.seconds):
        yield Notice("the run ended early by --patience; a larger one, or another budget, continues it")


def _start_of_budget(started: float, config: Config) -> float:
    """Start of the time budget: the start of the workflow, or later if preparation took too large a share."""
    if config.train.max_time is None:
        return started
    return max(started, time.monotonic() - PREPARATION_SHARE * config.train.max_time)


def _lower_rate(run: TrainingRun, paths: Sequence[str], folder: Path) -> str:
    """Remedy for a run that diverged: the command that resumes it at a lower learning rate."""
    train = run.config.train
    assert train.lr is not None
    divisor = LR_DIVISOR ** (run.rollbacks + 1)
    rates = ["--lr", f"{min(train.lr / divisor, defaults.RATES[train.optimizer]):.2g}"]
    if train.optimizer == "muon":
        rates += ["--set", f"train.adam_lr={min((train.adam_lr or ADAM_RATE) / divisor, ADAM_RATE):.2g}"]
    command = shlex.join(["xlcli", "train", *paths, "-o", str(folder), "--resume", *rates])
    return f"Continue from the last checkpoint at a lower learning rate: {command}"


def _plan(folder: Path, ready: Prepared, resumed_at: int) -> Plan:
    config, parts, runtime = ready.config, ready.parts, ready.runtime
    n_parameters = memory.n_parameters(config.model)
    return Plan(
        folder=folder,
        corpus=parts.train.corpus.name,
        train_bytes=parts.train.n_bytes,
        valid_bytes=parts.valid.n_bytes,
        test_bytes=parts.test.n_bytes,
        train_tokens=ready.n_train_tokens,
        estimated=ready.is_estimated,
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
