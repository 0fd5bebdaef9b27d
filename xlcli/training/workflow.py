"""The training workflow: from text to a model folder. A stopped run is saved and can be resumed.

With a fixed number of CPU threads the resumed run equals the uninterrupted one to the bit, unless it diverges: it goes
back to its latest checkpoint, which a stop may have written.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from xlcli.config import Config, Tree
from xlcli.errors import CheckpointError, ConfigError, DivergedError, InvalidSettingError
from xlcli.events import VALIDATION_TOKENS, Event, Notice, Plan, StoppedEarlyError, Stopping, until
from xlcli.files import temporary_path
from xlcli.machine import available_bytes
from xlcli.model.build import build_on_meta
from xlcli.optim import ADAM_RATE
from xlcli.ranks import SINGLE, Ranks
from xlcli.store import commit, layout
from xlcli.store import folder as store
from xlcli.store.layout import CHECKPOINTS
from xlcli.store.lock import clean, lock
from xlcli.store.weights import weights as weights_of
from xlcli.store.weights import weights_bytes
from xlcli.training import defaults, memory
from xlcli.training.folder import restore, save, write_held_out
from xlcli.training.loop import Loop
from xlcli.training.parallel import announce_start, wait_for_start
from xlcli.training.prepare import Prepared, prepare_new, prepare_resumed
from xlcli.training.run import LR_DIVISOR, TrainingRun
from xlcli.training.schedule import Clock
from xlcli.training.validation import describe_run, final_evaluation, finish

PASSES_OF_STEP = 3.0  # time of a step in passes through the network without gradients
PREPARATION_SHARE = 0.1  # maximum share of a time budget that preparation counts for
Run = tuple[TrainingRun, Prepared]
Setup = Generator[Event, None, Run | None]  # preparation of a run; None if none is to be trained


def train(
    paths: Sequence[str],
    folder: Path,
    configs: Mapping[str, Config],
    *,
    init: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    paused: Callable[[], float] = lambda: 0.0,
    ranks: Ranks = SINGLE,
) -> Iterator[Event]:
    """Trains a model. Saves the best weights in `folder`, and checkpoints in its subfolder.

    Args:
        paths: Files, folders or `-`.
        folder: Model folder; refused when it holds a model, unless `overwrite` is set.
        configs: Preset name to configuration, from `store.origin.configurations`. The preset is chosen by text and
            device; the configurations may differ in model and training settings only.
        init: Folder of a model whose weights and vocabulary the run starts from.
        overwrite: Replace the model in `folder` as soon as the new run has weights to keep; until then it stays, and
            the new run is in a subfolder, where `resume` finds it.
        dry_run: End with the plan, whose sizes are estimates for a long text; nothing is written.
        stop: Called between steps; when true, the run is saved and ends.
        paused: Seconds for which this process was suspended so far, which count for no budget.
        ranks: Processes that train together, from `ranks.join`. The first one prepares and writes the run; the others
            follow it. If the launcher has started all of them again, a run that had begun is resumed.

    Raises:
        CheckpointError: The model in `init` is missing or damaged.
        ConfigError, DataError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """
    has_replacement = commit.place_of_run(folder) != folder
    has_begun = has_replacement or (commit.holds_run(folder) and not overwrite)
    if ranks.restarts and has_begun:
        return resume(paths, folder, dry_run=dry_run, stop=stop, paused=paused, ranks=ranks)

    def set_up(contexts: ExitStack) -> Setup:
        load = partial(_load_origin, folder=folder)
        model = load(init) if init is not None else None
        if not dry_run:
            _check_new(folder, overwrite=overwrite)
            yield from _lock(folder, contexts)
            _check_new(folder, overwrite=overwrite)  # another run may have ended in the meantime
        data = yield from until(stop, prepare_new(paths, configs, model, load, dry_run=dry_run, ranks=ranks))
        _check_texts(folder, data)
        yield from _plan(folder, data, 0)
        if not dry_run:
            return (yield from _new_run(data, folder))
        if model is not None or data.origin:
            yield from _pace(data)
        return None

    return _run(set_up, paths, folder, {}, stop, paused, ranks)


def resume(
    paths: Sequence[str],
    folder: Path,
    changes: Tree | None = None,
    *,
    preset: str | None = None,
    init: str | None = None,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    paused: Callable[[], float] = lambda: 0.0,
    ranks: Ranks = SINGLE,
) -> Iterator[Event]:
    """Continues the run in `folder` from its newest undamaged checkpoint.

    The arguments are those of `train`. `changes` are settings that replace saved ones; only keys in
    `defaults.CHANGEABLE` may differ. `preset` and `init`, the name or folder of a model, are refused unless the run
    has begun with them. The number of ranks may differ from the run so far.

    Raises:
        CheckpointError: There is no run, or every checkpoint is damaged.
        ConfigError, DataError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """

    def set_up(contexts: ExitStack) -> Setup:
        if not commit.holds_run(folder) and commit.place_of_run(folder) == folder:
            remedy = "Drop --resume, or give its folder with -o."
            raise CheckpointError(f"there is no run to resume in {folder}.", remedy)
        if not dry_run:
            yield from _lock(folder, contexts)
            commit.finish_replacement(folder)
        place = commit.place_of_run(folder)
        if place != folder:
            yield Notice(f"this run will replace the model in {folder}; to keep that model, remove {place}")
        preparation = prepare_resumed(paths, place, changes or {}, preset, init, dry_run=dry_run, ranks=ranks)
        data = yield from until(stop, preparation)
        checkpoint_folder = yield from _newest_checkpoint(place)
        yield from _plan(folder, data, commit.step_of(checkpoint_folder))
        if dry_run:
            return None
        run = yield from _continued_run(data, place, checkpoint_folder)
        yield from _spent_budgets(run[0])
        return run

    return _run(set_up, paths, folder, changes or {}, stop, paused, ranks)


def _run(
    set_up: Callable[[ExitStack], Setup],
    paths: Sequence[str],
    folder: Path,
    changes: Tree,
    stop: Callable[[], bool],
    paused: Callable[[], float],
    ranks: Ranks,
) -> Iterator[Event]:
    """Runs the training that `set_up` prepares: until the budget is spent or `stop` is true; then scores the model.

    `set_up` is called on the first rank alone; the other ranks join the run that it begins. It returns None if there is
    nothing to train. The other arguments are those of `train`; `changes` are those of `resume`.
    """
    started = time.monotonic() - paused()
    with ExitStack() as contexts:
        # Preparation sets the threads of the process, which has its own again at the end.
        contexts.callback(torch.set_num_threads, torch.get_num_threads())
        if ranks.is_first:
            contexts.enter_context(announce_start(ranks))
            preparation = set_up(contexts)
        else:
            preparation = _join_run(paths, changes, stop, ranks)
        try:
            prepared = yield from preparation
        except StoppedEarlyError:
            if ranks.is_first:
                yield Notice(
                    "stopped before the next step; nothing has changed, so run the same command again.", "warning"
                )
            return
        if prepared is None:
            return
        run, data = prepared
        max_time = run.config.train.max_time
        if max_time is not None:
            # The budget begins later if preparation took too large a share.
            started = max(started, time.monotonic() - paused() - PREPARATION_SHARE * max_time)
        clock = Clock(ranks, run.counters.seconds, lambda: time.monotonic() - paused() - started, stop)
        if ranks.is_first:
            commit.finish_replacement(folder)  # a run that replaces nothing is put in place before its first step
        try:
            yield from Loop(run, data, folder, clock).events()
        except DivergedError as error:
            raise DivergedError(error.message, _lower_rate(run, paths, folder)) from None
        if ranks.size > 1 and clock.stops:
            yield Stopping()
        if ranks.is_first:
            yield from _end(run, data, folder, clock)


def _end(run: TrainingRun, data: Prepared, folder: Path, clock: Clock) -> Iterator[Event]:
    """Completes the record of a run that has ended on all ranks; scores its model if its budget is spent."""
    is_spent = run.fraction(clock.seconds) == 1.0
    if not (is_spent and run.counters.is_validated):
        yield finish(run, data, folder, stopped=True)
        return
    commit.finish_replacement(folder)
    finish(run, data, folder)  # a kill during the evaluation leaves a finished run
    yield (yield from final_evaluation(run, data, folder, clock))


def _join_run(paths: Sequence[str], changes: Tree, stop: Callable[[], bool], ranks: Ranks) -> Setup:
    """Takes part in a run that the first rank has begun or resumed, from the checkpoint that it has chosen."""
    checkpoint_folder = wait_for_start(ranks, stop)
    if checkpoint_folder is None:
        return None
    place = checkpoint_folder.parent.parent
    # A signal from here on stops all ranks after the same step.
    data = yield from prepare_resumed(paths, place, changes, None, None, ranks=ranks)
    return (yield from _continued_run(data, place, checkpoint_folder))


def _pace(data: Prepared) -> Iterator[Notice]:
    """Measures a step, on a model that nobody keeps, and says how many fit into the time budget, if any."""
    train = data.config.train
    if train.max_time is None:
        return
    run = _build_run(data, SINGLE, data.weights)
    run.train_step(0.0)  # the first step allocates
    began = time.monotonic()
    run.train_step(0.0)
    seconds = time.monotonic() - began
    n_tokens = train.batch_size * train.segment_len
    budgets = [train.max_time / seconds]  # in steps
    if train.max_tokens is not None:
        budgets.append(train.max_tokens / n_tokens)
    if train.max_steps is not None:
        budgets.append(train.max_steps)
    pace = f"a step of {n_tokens:,} tokens takes {seconds:.2g} s"
    pace += f": about {min(budgets):,.0f} steps fit into the budget"
    valid = data.valid_ids
    if len(valid):
        n_valid = len(valid) * data.parts.valid.n_bytes / valid.n_bytes  # the tokens may be those of a sample
        validation_seconds = min(VALIDATION_TOKENS, n_valid) / n_tokens * seconds / PASSES_OF_STEP
        pace += f", fewer with validations of about {validation_seconds:.2g} s each"
    yield Notice(pace)


def _new_run(data: Prepared, folder: Path) -> Generator[Event, None, Run]:
    """Writes a new run on the first rank and stages it in `folder`; the run of all ranks, which begins there."""
    run = _build_run(data, SINGLE, data.weights)
    written = temporary_path(folder)
    name = save(run, data, written).name  # makes the folder
    data.tokenizer.save(written)
    layout.write_record(written, describe_run(run, data) | {"finished": False})
    _write_texts(written, data, run)
    commit.stage_run(folder, written)
    if data.runtime.ranks.size == 1:
        return run, replace(data, weights=None)
    place = commit.place_of_run(folder)
    return (yield from _continued_run(data, place, place / CHECKPOINTS / name))


def _continued_run(data: Prepared, place: Path, checkpoint_folder: Path) -> Generator[Event, None, Run]:
    """The run in `place` from this checkpoint, of which the first rank tells the others."""
    ranks = data.runtime.ranks
    if ranks.is_first:
        ranks.publish("run", {"checkpoint": str(checkpoint_folder.absolute())})
    run = _build_run(data, ranks)
    yield from restore(run, data, checkpoint_folder)
    if ranks.is_first:
        _write_texts(place, data, run)
    return run, replace(data, weights=None)


def _build_run(data: Prepared, ranks: Ranks, weights: Mapping[str, Tensor] | None = None) -> TrainingRun:
    """A run that has taken no step, from these weights or new ones."""
    tokenizer = data.tokenizer
    line_ends = tokenizer.line_ends if data.config.train.line_share else None
    if line_ends is not None and not line_ends.any():
        reason = "needs lines, but no token of the vocabulary ends one"
        raise InvalidSettingError("train.line_share", reason, "Leave it out, or use another vocabulary.")
    runtime = replace(data.runtime, ranks=ranks)
    return TrainingRun(data.config, runtime, data.train_ids, tokenizer.start_id, line_ends, weights)


def _write_texts(place: Path, data: Prepared, run: TrainingRun) -> None:
    """Writes held-out texts, metrics up to the present step, and the configuration."""
    write_held_out(place, data)
    layout.trim_metrics(place, run.counters.step, validated=run.counters.is_validated)
    layout.write_config(place, data.config, encoding=data.config.train.weights)


def _load_origin(init: Path, folder: Path) -> store.LoadedModel:
    """The model in `init`, checked: a run in `folder` can start from it."""
    if init.resolve() == folder.resolve() or commit.belongs_to_run(folder, init):
        raise ConfigError(f"{folder} holds the model that the run starts from.", "Choose another folder with -o NAME.")
    model = store.load(init)
    for name, tensor in weights_of(model.network).items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"weights of {init} hold NaN or infinity, first in '{name}'.", "Use another model.")
    return model


def _check_new(folder: Path, *, overwrite: bool) -> None:
    """Refuses a folder in which a new run would replace a model or a file of the user."""
    if commit.holds_run(folder):
        if overwrite:
            return
        problem = f"{folder} already holds a model."
        raise ConfigError(problem, "Add --resume to continue it, --overwrite to replace it, or -o NAME.")
    name = commit.foreign_entry(folder)
    if name is not None:
        problem = f"{folder} is not a model folder and is not empty: it contains {name}."
        raise ConfigError(problem, "Choose a new or empty folder with -o NAME.")


def _check_texts(folder: Path, data: Prepared) -> None:
    """Refuses a text that is a file of the model in `folder`, with which it would be removed."""
    parts = data.parts
    for corpus in (parts.train.corpus, parts.valid.corpus, parts.test.corpus):
        for source in corpus.sources:
            is_file = source.spool is None  # else it is a copy of a pipe
            if is_file and commit.belongs_to_run(folder, source.path):
                raise ConfigError(
                    f"{source.name} belongs to the model in {folder}, which this run would replace.",
                    "Copy the text to another folder first, or choose another model folder with -o NAME.",
                )


def _newest_checkpoint(folder: Path) -> Generator[Notice, None, Path]:
    """The newest undamaged checkpoint of the run in `folder`."""
    newest, damaged = commit.latest(folder / CHECKPOINTS)
    if newest is None and damaged:
        raise CheckpointError(f"every checkpoint in {folder} is damaged.", "Train again with --overwrite.")
    if newest is None:
        problem = f"{folder} holds a model but no checkpoint to resume from."
        raise CheckpointError(problem, "Train again with --overwrite, or into another folder with -o NAME.")
    for path, reason in damaged.items():
        yield Notice(f"{path} is damaged and was skipped: {reason}", "warning")
    return newest


def _lock(folder: Path, contexts: ExitStack) -> Iterator[Notice]:
    """Locks the folder until `contexts` closes, and removes what crashed runs left."""
    warning = contexts.enter_context(lock(folder))
    if warning:
        yield Notice(warning, "warning")
    clean(folder)


def _spent_budgets(run: TrainingRun) -> Iterator[Notice]:
    """Remarks on budgets and patience of a resumed run that its earlier part has spent, so that no step remains."""
    seconds = run.counters.seconds
    for key, budget in run.budgets(round(seconds, 1)).items():
        unit = {"max_steps": "steps", "max_tokens": "tokens", "max_time": "s"}[key]
        if budget.used >= budget.limit:
            yield Notice(
                f"the run has used its budget of {budget.limit:,.15g} {unit} ({budget.used:,} {unit}); "
                f"continue it with a larger --{key.replace('_', '-')} or another budget"
            )
    is_budget_left = run.spent(seconds) < 1.0
    is_over = run.fraction(seconds) == 1.0
    if run.counters.plateau is not None and is_over and is_budget_left:
        yield Notice("--patience ended the run early; continue it with a larger one or another budget")


def _lower_rate(run: TrainingRun, paths: Sequence[str], folder: Path) -> str:
    """Remedy for a run that diverged: the command that resumes it at a lower learning rate."""
    train = run.config.train
    assert train.lr is not None
    divisor = LR_DIVISOR ** (run.counters.rollbacks + 1)
    lr = min(train.lr / divisor, defaults.RATES[train.optimizer])  # the user's rate may be far too high
    rates = ["--lr", f"{lr:.2g}"]
    if train.optimizer == "muon":
        adam_lr = min((train.adam_lr or ADAM_RATE) / divisor, ADAM_RATE)
        rates += ["--set", f"train.adam_lr={adam_lr:.2g}"]
    command = shlex.join(["xlcli", "train", *paths, "-o", str(folder), "--resume", *rates])
    return f"Continue from the last checkpoint at a lower learning rate: {command}"


def _plan(folder: Path, data: Prepared, resumed_at: int) -> Iterator[Plan]:
    """The plan; raises `ResourceError` after it if the run cannot fit the machine."""
    config, parts, runtime = data.config, data.parts, data.runtime
    n_parameters = build_on_meta(config.model).n_parameters
    stored_bytes = weights_bytes(config.model, config.train.weights)
    left_out = dict.fromkeys((*parts.train.corpus.left_out, *parts.valid.corpus.left_out))
    yield Plan(
        folder=folder,
        corpus=parts.train.corpus.name,
        train_bytes=parts.train.n_bytes,
        valid_bytes=parts.valid.n_bytes,
        test_bytes=parts.test.n_bytes,
        train_tokens=data.n_train_tokens,
        estimated=data.train_ids.n_bytes != parts.train.n_bytes,
        tokenizer=data.tokenizer.kind,
        vocab_size=data.tokenizer.vocab_size,
        preset=data.preset,
        parameters=n_parameters,
        needed_bytes=memory.needed_bytes(config, runtime, n_parameters),
        available_bytes=available_bytes(str(runtime.device)),
        weights=config.train.weights,
        weights_bytes=stored_bytes,
        checkpoint_bytes=memory.checkpoint_bytes(config, n_parameters, stored_bytes),
        checkpoints=config.train.keep_checkpoints,
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        threads=runtime.threads,
        budget=defaults.budget_in_words(config, data.n_train_tokens),
        resumed_at=resumed_at,
        init=data.origin.get("model"),
        n_ranks=runtime.ranks.size,
        rows=config.train.batch_size // runtime.ranks.size,
        valid_from_end=parts.valid.corpus is parts.train.corpus and not parts.drawn,
        left_out=tuple(left_out),
        held_out_files=parts.drawn,
    )
    memory.require([config], runtime, n_parameters)
