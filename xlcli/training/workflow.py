"""`train`: text in, a model folder out, events on the way. Stops when asked, after saving; resumes to the bit."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from xlcli.config import Config, TrainConfig, Tree
from xlcli.errors import CheckpointError, ConfigError, DivergedError
from xlcli.events import Event, Notice, Plan
from xlcli.files import write_atomic
from xlcli.store import folder as store
from xlcli.store.commit import latest, step_of
from xlcli.store.layout import CHECKPOINTS, CONFIG, HELD_OUT, WEIGHTS, write_config
from xlcli.training import checkpoint, defaults, memory
from xlcli.training.final import describe_run
from xlcli.training.loop import Trainer
from xlcli.training.prepare import PreparationStoppedError, Prepared, prepare_new, prepare_resumed
from xlcli.training.run import TrainingRun, make_training_run

PREPARATION_SHARE = 0.1
"""Reading the text counts towards a time budget, but takes no more of it than this."""
LOWER = 3.0
"""A run that diverged is to be tried again at its learning rate divided by this."""


def train(
    tree: Tree,
    paths: Sequence[str],
    folder: Path,
    *,
    preset: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    allow_data_change: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Trains a model and leaves it in `folder`, the best weights in front, checkpoints beside them.

    Args:
        tree: What the user set, above any preset.
        paths: Files, folders or `-`.
        folder: The model folder; refused when it holds a model, unless resumed or overwritten.
        preset: A preset by name; None chooses by text and device.
        resume: Continue from the newest good checkpoint. Shape and text must be the same; budgets may differ.
        overwrite: Remove the model in `folder`, once all is ready for the first step of the new one.
        dry_run: End with the plan; nothing is written but the token cache.
        allow_data_change: Resume on another text.
        stop: Asked between pieces of work; true saves and ends.

    Raises:
        ConfigError, DataError, CheckpointError, ResourceError, BusyError, DivergedError: See `xlcli.errors`.
    """
    began = time.monotonic()
    with ExitStack() as held:
        if resume or not dry_run:
            _check_folder(folder, resume=resume, overwrite=overwrite)
        if not dry_run:
            if warning := held.enter_context(store.lock(folder)):
                yield Notice(warning, "warning")
            _check_folder(folder, resume=resume, overwrite=overwrite)  # another run may have just ended
        try:
            if resume:
                ready = yield from prepare_resumed(tree, paths, preset, folder, stop)
            else:
                ready = yield from prepare_new(tree, paths, preset, stop)
        except PreparationStoppedError:
            yield Notice("stopped before the first step; nothing was changed.", "warning")
            return
        point = None
        if resume:
            point, notices = _newest_checkpoint(folder)
            yield from notices
        yield _plan(folder, ready, step_of(point) if point else 0)
        if dry_run:
            return
        run = make_training_run(ready.config, ready.runtime, ready.train_ids, ready.tokenizer.start_id)
        about = describe_run(ready, run)
        if point is None:
            if overwrite:
                store.clear(folder)
            _write_beginnings(folder, ready, run, about)
        else:
            yield from _return_to(point, run, ready, folder, allow_data_change=allow_data_change)
        course = Trainer(run, ready, folder, about=about, began=_start_of_budget(began, ready.config))
        try:
            yield from course.train(stop)
            yield from course.finish(stop)
        except DivergedError as error:
            raise DivergedError(error.message, _lower_rate(ready.config, paths, folder)) from None


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuses what would lose a model or somebody's files."""
    if resume and overwrite:
        raise ConfigError("a run cannot be both resumed and overwritten.", "Give --resume or --overwrite.")
    begun = any((folder / name).exists() for name in (CONFIG, WEIGHTS, CHECKPOINTS))
    if resume and not (folder / CONFIG).exists():
        raise CheckpointError(f"there is no run to resume in {folder}.", "Drop --resume, or give its folder with -o.")
    if begun and not resume and not overwrite:
        raise ConfigError(
            f"{folder} already holds a model.", "Add --resume to continue it, --overwrite to replace it, or -o NAME."
        )
    theirs = [name for name in HELD_OUT.values() if (folder / name).exists()]
    if theirs and not begun and not any(folder.glob("tokenizer.*")):
        raise ConfigError(
            f"{folder} is no model folder and holds a file {theirs[0]}, which would be lost.",
            "Choose another folder with -o NAME.",
        )


def _newest_checkpoint(folder: Path) -> tuple[Path | None, list[Notice]]:
    found = latest(folder / CHECKPOINTS)
    notices = [Notice(f"{bad.path} is damaged and was passed over: {bad.reason}", "warning") for bad in found.rejected]
    if found.path is None:
        if found.rejected:
            raise CheckpointError(f"every checkpoint in {folder} is damaged.", "Train anew with --overwrite.")
        if (folder / WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} holds a model but no checkpoint to go on from.",
                "Train anew with --overwrite, or into another folder with -o NAME.",
            )
        notices.append(Notice("the run had taken no step yet; it begins anew"))
    return found.path, notices


def _write_beginnings(folder: Path, ready: Prepared, run: TrainingRun, about: dict[str, Any]) -> None:
    """Makes the folder one that can be resumed, which it is as soon as it holds `config.json`."""
    ready.tokenizer.save(folder)
    _write_held_out(folder, ready)
    store.trim_metrics(folder, -1)
    store.write_record(folder, about | {"finished": False})
    write_config(folder, ready.config)
    checkpoint.save(run, folder, seconds=0.0, corpus=ready.identity)


def _return_to(
    point: Path, run: TrainingRun, ready: Prepared, folder: Path, *, allow_data_change: bool
) -> Iterator[Notice]:
    """Puts run and folder where they were at a checkpoint."""
    warnings = checkpoint.load(run, point, folder, corpus=ready.identity, allow_data_change=allow_data_change)
    yield from (Notice(warning, "warning") for warning in warnings)
    if allow_data_change:
        _write_held_out(folder, ready)
    store.trim_metrics(folder, run.step)
    write_config(folder, ready.config)


def _write_held_out(folder: Path, ready: Prepared) -> None:
    for name, part in (("valid", ready.parts.valid), ("test", ready.parts.test)):
        if part.n_bytes:
            write_atomic(folder / HELD_OUT[name], part.read())
        else:
            (folder / HELD_OUT[name]).unlink(missing_ok=True)


def _start_of_budget(began: float, config: Config) -> float:
    """When the budget began to be spent: with the program, unless that would leave too little for training."""
    if config.train.max_time is None:
        return began
    return max(began, time.monotonic() - PREPARATION_SHARE * config.train.max_time)


def _lower_rate(config: Config, paths: Sequence[str], folder: Path) -> str:
    """The command that goes on more carefully after a run has diverged."""
    train = config.train
    assert train.lr is not None
    rates = ["--lr", f"{min(train.lr / LOWER, defaults.RATES[train.optimizer]):.2g}"]
    if train.optimizer == "muon":
        rates += ["--set", f"train.adam_lr={min(train.adam_lr / LOWER, TrainConfig().adam_lr):.2g}"]
    command = shlex.join(["xlcli", "train", *paths, "-o", str(folder), "--resume", *rates])
    return f"Go on from the last checkpoint, more slowly: {command}"


def _plan(folder: Path, ready: Prepared, resumed_at: int) -> Plan:
    config, parts, runtime = ready.config, ready.parts, ready.runtime
    return Plan(
        folder=folder,
        corpus=parts.train.corpus.name,
        train_bytes=parts.train.n_bytes,
        valid_bytes=parts.valid.n_bytes,
        test_bytes=parts.test.n_bytes,
        train_tokens=len(ready.train_ids),
        tokenizer=ready.tokenizer.kind,
        vocab_size=ready.tokenizer.vocab_size,
        preset=ready.preset,
        parameters=memory.n_parameters(config.model),
        memory_bytes=memory.memory_bytes(config, runtime),
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        threads=runtime.threads,
        budget=defaults.budget_in_words(config),
        resumed_at=resumed_at,
    )
