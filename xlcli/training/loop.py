"""The trainer: the training loop with validation, checkpoints and metrics, and the end of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xlcli.errors import CheckpointError, DivergedError
from xlcli.events import Event, Notice, Saved, ScoredText, Step, Trained, Validation
from xlcli.runtime import parallel_loop_seconds
from xlcli.store import folder as store
from xlcli.store import records
from xlcli.store.commit import latest, step_name, verify
from xlcli.store.layout import BEST, CHECKPOINTS
from xlcli.store.staging import settle
from xlcli.store.weights import weights as weights_of
from xlcli.training import checkpoint, defaults
from xlcli.training.final import final_evaluation
from xlcli.training.prepare import Prepared
from xlcli.training.run import LR_DIVISOR, TrainingRun
from xlcli.training.threads import ThreadTuner, thread_changes

MAX_ROLLBACKS = 3
"""Maximum number of roll-backs of a run that diverges."""
VALIDATION_SHARE = 0.1
"""Maximum share of a time budget for validation at the default interval."""
MAX_WARMUP_STEPS = 16
"""Maximum number of steps for which the choice of threads waits until memory is full, because steps become longer."""


class Trainer:
    """Trains a run and keeps its model folder.

    Args:
        run: The run, new or restored; its present state is already saved.
        prepared: Inputs of the run.
        folder: Model folder, locked by the caller. A staged run is put in place there once it has weights.
        record: Contents of `record.json` so far.
        started: Start of the time budget in this process, by `time.monotonic`.
    """

    def __init__(
        self, run: TrainingRun, prepared: Prepared, folder: Path, *, record: dict[str, Any], started: float
    ) -> None:
        self.run = run
        self.prepared = prepared
        self.model_folder = folder
        self.folder = settle(folder)
        self.record = record
        self.started = started
        self.saved_at = (run.step, run.validated_step)
        self.checked_step = run.step
        self.tuner = _make_tuner(run)
        self.validation_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time spent on this run, in this process and before it was resumed."""
        return self.run.seconds + time.monotonic() - self.started

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Trains until the budget is spent or `stop` is true, evaluates and saves.

        Raises:
            DivergedError: The run diverged, and is not to be rolled back or was too often.
        """
        while True:
            try:
                yield from self._train(stop)
                yield from self._finish(stop)
                return
            except DivergedError as error:
                yield from self._roll_back(error)

    def _roll_back(self, error: DivergedError) -> Iterator[Notice]:
        """Restores the latest checkpoint that was due, with lower learning rates and at the present place in the text.

        The time that was spent stays spent. The next checkpoint has the new rates; a run that is killed before it
        diverges again and is rolled back in the same way, so that it equals an uninterrupted one.
        """
        run = self.run
        point = self._anchor()
        n_rollbacks, n_read = run.rollbacks + 1, run.loader.n_read
        if run.config.train.on_divergence == "stop" or n_rollbacks > MAX_ROLLBACKS or point is None:
            raise error
        seconds = self.seconds
        warnings = checkpoint.load(
            run,
            point,
            self.folder,
            self.prepared.tokenizer,
            corpus=self.prepared.identity,
            allow_data_change=True,
        )
        run.rollbacks, run.seconds, self.started = n_rollbacks, seconds, time.monotonic()
        run.skip_to(n_read)
        records.trim_metrics(self.folder, run.step, validated=run.validated_step == run.step)
        self.saved_at, self.checked_step = (run.step, run.validated_step), run.step
        rates = f"the learning rates are divided by {LR_DIVISOR**n_rollbacks:g}"
        yield from (Notice(warning, "warning") for warning in warnings)
        yield Notice(
            f"{error.message.rstrip('.')}; back to step {run.step}, {rates} (roll-back {n_rollbacks} of "
            f"{MAX_ROLLBACKS}).",
            "warning",
        )

    def _anchor(self) -> Path | None:
        """The checkpoint that a roll-back restores; if it is damaged, the newest undamaged one."""
        folder = self.folder / CHECKPOINTS
        with suppress(CheckpointError):
            verify(folder / step_name(self.run.anchor), {BEST})
            return folder / step_name(self.run.anchor)
        return latest(folder, spare={BEST}).path

    def _train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Trains until the budget is spent or `stop` is true."""
        run, train = self.run, self.run.config.train
        validate = IntervalTrigger(train.eval_every, parts=defaults.VALIDATIONS)
        save = IntervalTrigger(defaults.SAVE_SECONDS if train.save_every is None else train.save_every)
        if run.validation_due:
            yield from self._validate(stop)
        for trigger in (validate, save):
            trigger.reset(run.step, self.seconds, run.fraction(self.seconds))
        loop_started, tokens_before = time.monotonic(), run.tokens
        while run.fraction(started := self.seconds) < 1.0 and not stop():
            yield from self._train_step(started, loop_started, tokens_before)
            fraction = run.fraction(self.seconds)
            if fraction == 1.0:
                break
            due = validate.due(run.step, self.seconds, fraction)
            if due and not _exceeds_share(run, self.validation_seconds, self.seconds):
                run.validation_due, had_patience = True, run.patience.plateau is None
                yield from self._validate(stop)
                if had_patience and run.patience.plateau is not None:  # the rest of the run is another part of it
                    validate.reset(run.step, self.seconds, run.fraction(self.seconds))
            if save.due(run.step, self.seconds, fraction):
                run.anchor = run.step
                if not stop():
                    yield self._save()

    def _finish(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Validates, saves and evaluates the best weights; a run that was stopped is only saved."""
        run = self.run
        if self.tuner:
            run.set_threads(self.tuner.chosen)
        spent = run.fraction(self.seconds) == 1.0
        if spent and run.validated_step != run.step:
            yield from self._validate(stop)
        if self.saved_at != (run.step, run.validated_step):
            yield self._save()
        if run.best_step is None and run.step:
            self._keep_weights(None)
        final = None
        if spent and run.validated_step == run.step:
            final = yield from final_evaluation(self.folder, run.runtime, run.config.runtime.seed or 0, stop)
        score, sample = final or (None, "")
        bits = score.bits_per_byte if score else None
        scored = ScoredText(score.bytes, self.prepared.parts.valid.n_bytes, score.mem_len) if score else None
        self.record |= {
            "steps": run.step,
            "tokens": run.tokens,
            "seconds": round(self.seconds, 1),
            "bits_per_byte": bits,
            "scored": asdict(scored) if scored else None,
            "best_step": run.best_step,
            "finished": final is not None,
        }
        if run.rollbacks:
            self.record["rollbacks"] = run.rollbacks
        if run.patience.end < 1.0:
            self.record["stopped_early"] = True
        if changes := thread_changes(records.read_metrics(self.folder)):
            self.record["threads"] = changes
        records.write_record(self.folder, self.record)
        yield Trained(
            folder=self.model_folder,
            step=run.step,
            tokens=run.tokens,
            seconds=self.seconds,
            bits_per_byte=bits,
            best_step=run.best_step,
            stopped=final is None,
            sample=sample,
            scored=scored,
        )

    def _train_step(self, started: float, loop_started: float, tokens_before: int) -> Iterator[Event]:
        """One training step after `started` seconds of training, logged to the metrics, and the threads for the next.

        The loop started after `tokens_before` tokens.
        """
        run = self.run
        before = run.tokens
        nats, grad_norm, lr_factor, mean_steps, loss_scale = run.train_step(run.fraction(started))
        seconds = self.seconds
        spent = run.fraction(seconds)
        step = Step(
            step=run.step,
            tokens=run.tokens,
            seconds=seconds,
            nats=nats,
            bits_per_byte=nats / math.log(2) / run.bytes_per_token,
            lr=(run.config.train.lr or 0.0) * lr_factor,
            grad_norm=grad_norm,
            tokens_per_second=(run.tokens - tokens_before) / max(time.monotonic() - loop_started, 1e-9),
            fraction=spent,
            eta_seconds=seconds * (1 - spent) / spent if spent else math.inf,
            mean_steps=mean_steps,
            loss_scale=loss_scale,
            skipped=None if loss_scale is None else run.skipped,
        )
        row = {
            "step": step.step,
            "tokens": step.tokens,
            "seconds": round(seconds, 3),
            "nats": nats,
            "bits_per_byte": step.bits_per_byte,
            "lr": step.lr,
            "grad_norm": grad_norm,
            "tokens_per_second": round(step.tokens_per_second, 1),
            **({} if mean_steps is None else {"mean_steps": mean_steps}),
            **({} if loss_scale is None else {"loss_scale": loss_scale, "skipped": run.skipped}),
            **({"rollbacks": run.rollbacks} if run.rollbacks else {}),
            **({"threads": run.runtime.threads, "trial": self.tuner.trying} if self.tuner else {}),
        }
        records.append_metrics(self.folder, row)
        yield step
        if self.tuner:
            nominal = defaults.tokens_per_step(run.config.train) / (run.tokens - before)  # lengths may be random
            trial = self.tuner.observe((seconds - started) * nominal)
            if self.tuner.threads != run.runtime.threads:
                run.set_threads(self.tuner.threads)
            if trial:
                yield Notice(f"step {run.step}  {trial.describe()}", "info" if trial.adopted else "detail")

    def _validate(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Validates, and keeps the weights if they are the best so far or there is no validation text.

        If `stop` becomes true, validation stays due.
        """
        run, bits, started = self.run, None, time.monotonic()
        if len(self.prepared.valid_ids):
            bits = run.validation_bits(self.prepared.valid_ids, stop)
            if bits is None:
                return
        best = bits is None or bits < run.best_bits
        if best:
            self._keep_weights(bits)
            run.best_bits, run.best_step = math.inf if bits is None else bits, run.step
        self.validation_seconds += time.monotonic() - started
        run.validated_step, run.validation_due = run.step, False
        spent = run.spent(self.seconds)
        impatient = bits is not None and spent < 1.0 and run.patience.observe(spent, best=best)
        if bits is not None:
            row = {"step": run.step, "tokens": run.tokens, "validation_bits_per_byte": bits, "best": best}
            records.append_metrics(self.folder, row)
            yield Validation(run.step, run.tokens, self.seconds, bits, best)
        if impatient:
            yield Notice(run.patience.describe(run.step))

    def _keep_weights(self, bits: float | None) -> None:
        """Writes the present weights as the weights of the model."""
        run = self.run
        self._check_finite()
        metadata = {"step": str(run.step), "validation_bits_per_byte": "" if bits is None else f"{bits:.6f}"}
        store.save_model(
            self.folder,
            run.config,
            weights_of(run.model),
            self.prepared.tokenizer,
            metadata,
            encoding=run.config.train.weights,
        )
        self.folder = settle(self.model_folder)

    def _save(self) -> Saved:
        self._check_finite()
        records.sync_metrics(self.folder)
        path = checkpoint.save(self.run, self.folder, seconds=self.seconds, corpus=self.prepared.identity)
        self.saved_at = (self.run.step, self.run.validated_step)
        return Saved(self.run.step, path)

    def _check_finite(self) -> None:
        """`TrainingRun.check_finite`, once per step: a step may be validated and saved."""
        if self.checked_step != self.run.step:
            self.run.check_finite()
            self.checked_step = self.run.step


class IntervalTrigger:
    """Triggers an action at regular intervals.

    Args:
        every: Interval in steps (int) or seconds (float); None divides the budget into `parts` intervals.
        parts: Number of intervals.
    """

    def __init__(self, every: int | float | None, *, parts: int = 1) -> None:
        self.every = every
        self.parts = parts
        self.elapsed = 0

    def reset(self, step: int, seconds: float, fraction: float) -> None:
        """Ignores the intervals that ended before this point of the run."""
        self.elapsed = self._intervals(step, seconds, fraction)

    def due(self, step: int, seconds: float, fraction: float) -> bool:
        """Whether an interval has ended since the last call. Intervals in steps do not depend on the clock."""
        before, self.elapsed = self.elapsed, self._intervals(step, seconds, fraction)
        return self.elapsed > before

    def _intervals(self, step: int, seconds: float, fraction: float) -> int:
        if self.every is None:
            return int(fraction * self.parts)
        return int((step if isinstance(self.every, int) else seconds) // self.every)


def _exceeds_share(run: TrainingRun, validation_seconds: float, seconds: float) -> bool:
    """Whether validation takes too much of a time budget.

    A run must not depend on the clock while a budget in steps or tokens will be spent before the time.
    """
    if run.config.train.eval_every is not None or run.fraction(seconds) == run.fraction(0.0):
        return False
    return validation_seconds > VALIDATION_SHARE * seconds


def _make_tuner(run: TrainingRun) -> ThreadTuner | None:
    """A tuner if the number of threads is measured; sets its first number. Steps are measured once memory is full."""
    if not run.runtime.threads_measured:
        return None
    train = run.config.train
    filling = min(MAX_WARMUP_STEPS, math.ceil(train.mem_len / train.segment_len))
    limit = run.runtime.threads
    tuner = ThreadTuner(limit, lambda threads: parallel_loop_seconds(threads, limit), warmup_steps=filling + 1)
    run.set_threads(tuner.threads)
    return tuner
