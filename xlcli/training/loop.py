"""The trainer: the training loop with validation, checkpoints and metrics, and the end of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from xlcli.errors import CheckpointError, DivergedError
from xlcli.events import Event, Notice, Saved, ScoredText, Step, Stopping, Trained, Validation
from xlcli.files import sync_file
from xlcli.store import folder as store
from xlcli.store import layout
from xlcli.store.commit import latest, settle, step_name, verify
from xlcli.store.layout import BEST, CHECKPOINTS
from xlcli.store.weights import weights as weights_of
from xlcli.training import checkpoint, defaults
from xlcli.training.prepare import Prepared
from xlcli.training.run import LR_DIVISOR, TrainingRun
from xlcli.training.schedule import Clock, IntervalTrigger
from xlcli.training.validation import check_finite, final_evaluation, validation_bits

MAX_ROLLBACKS = 3
"""Maximum number of roll-backs of a run that diverges."""
VALIDATION_SHARE = 0.1
"""Maximum share of a time budget for validation at the default interval."""


class Trainer:
    """Trains a run and keeps its model folder, to which only the first rank writes.

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
        self.folder = settle(folder) if run.ranks.is_first else folder
        self.record = record
        self.clock = Clock(run.ranks, run.seconds, started)
        self.saved_at = (run.step, run.validated_step)
        self.saved_seconds = run.seconds
        self.checked_step = run.step

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Trains until the budget is spent or `stop` is true, evaluates and saves.

        Raises:
            DivergedError: The run diverged, and is not to be rolled back or was too often.
        """
        self.clock.stop = stop
        self.clock.meet()
        while True:
            try:
                yield from self._train()
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
        found = run.ranks.broadcast(str(self._anchor() or "") if run.ranks.is_first else None)
        point = Path(found) if found else None
        n_rollbacks, n_read = run.rollbacks + 1, run.loader.n_read
        if run.config.train.on_divergence == "stop" or n_rollbacks > MAX_ROLLBACKS or point is None:
            raise error
        warnings = checkpoint.load(
            run,
            point,
            self.folder,
            self.prepared.tokenizer,
            corpus=self.prepared.identity,
            allow_data_change=True,
        )
        checkpoint.agree(run)
        run.rollbacks = n_rollbacks
        run.skip_to(n_read)
        if run.ranks.is_first:
            layout.trim_metrics(self.folder, run.step, validated=run.validated_step == run.step)
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

    def _train(self) -> Iterator[Event]:
        """Trains until the budget is spent or the run is to be stopped."""
        run, train, clock = self.run, self.run.config.train, self.clock
        validate = IntervalTrigger(train.eval_every, parts=defaults.VALIDATIONS)
        save = IntervalTrigger(defaults.SAVE_SECONDS if train.save_every is None else train.save_every)
        if run.validation_due:
            yield from self._validate()
        for trigger in (validate, save):
            trigger.reset(run.step, clock.seconds, run.fraction(clock.seconds))
        loop = _LoopStart(time.monotonic(), run.step, run.tokens)
        while run.fraction(started := clock.seconds) < 1.0 and not clock.stops:
            yield from self._train_step(started, loop)
            fraction = run.fraction(clock.seconds)
            if fraction == 1.0:
                break
            due = validate.due(run.step, clock.seconds, fraction)
            if due and not _exceeds_share(run, clock):
                run.validation_due, had_patience = True, run.patience.plateau is None
                yield from self._validate()
                if had_patience and run.patience.plateau is not None:  # the rest of the run is another part of it
                    validate.reset(run.step, clock.seconds, run.fraction(clock.seconds))
            if save.due(run.step, clock.seconds, fraction):
                run.anchor = run.step
                if not clock.stops:
                    yield self._save()

    def _finish(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Validates, saves and evaluates the best weights; a run that was stopped is only saved."""
        run = self.run
        spent = run.fraction(self.clock.seconds) == 1.0
        if spent and run.validated_step != run.step:
            yield from self._validate()
        if self.saved_at != (run.step, run.validated_step):
            yield self._save()
        if run.best_step is None and run.step:
            self._keep_weights(None)
        if run.ranks.size > 1 and self.clock.stops:
            yield Stopping()
        if not run.ranks.is_first:
            return
        final = None
        if spent and run.validated_step == run.step:
            final = yield from final_evaluation(self.folder, run.runtime, run.config.runtime.seed or 0, stop)
        score, sample = final or (None, "")
        bits = score.bits_per_byte if score else None
        scored = ScoredText(score.bytes, self.prepared.parts.valid.n_bytes, score.mem_len) if score else None
        self.record |= {
            "steps": run.step,
            "tokens": run.tokens,
            "seconds": round(self.saved_seconds, 1),
            "bits_per_byte": bits,
            "scored": asdict(scored) if scored else None,
            "best_step": run.best_step,
            "finished": final is not None,
        }
        if run.rollbacks:
            self.record["rollbacks"] = run.rollbacks
        if run.patience.end < 1.0:
            self.record["stopped_early"] = True
        layout.write_record(self.folder, self.record)
        yield Trained(
            folder=self.model_folder,
            step=run.step,
            tokens=run.tokens,
            seconds=self.saved_seconds,
            bits_per_byte=bits,
            best_step=run.best_step,
            stopped=final is None,
            sample=sample,
            scored=scored,
        )

    def _train_step(self, started: float, loop: _LoopStart) -> Iterator[Event]:
        """One training step after `started` seconds, logged to the metrics."""
        run = self.run
        result = run.train_step(run.fraction(started), self.clock.votes())
        nats, grad_norm, lr_factor, mean_steps, loss_scale, votes = result
        self.clock.agree(votes)
        seconds = self.clock.seconds
        elapsed = max(time.monotonic() - loop.monotonic, 1e-9)
        step = Step(
            step=run.step,
            tokens=run.tokens,
            seconds=seconds,
            nats=nats,
            bits_per_byte=nats / math.log(2) / run.bytes_per_token,
            lr=(run.config.train.lr or 0.0) * lr_factor,
            grad_norm=grad_norm,
            tokens_per_second=(run.tokens - loop.tokens) / elapsed,
            fraction=run.fraction(seconds),
            eta_seconds=run.remaining(seconds, run.step - loop.step, run.tokens - loop.tokens, elapsed),
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
        }
        self._log(row)
        yield step

    def _validate(self) -> Iterator[Event]:
        """Validates, and keeps the weights if they are the best so far or there is no validation text.

        If the run is to be stopped, validation stays due.
        """
        run, bits = self.run, None
        with self.clock.validation():
            if len(self.prepared.valid_ids):
                bits = validation_bits(run, self.prepared.valid_ids, self.clock.stop)
                if bits is None:
                    return
            best = bits is None or bits < run.best_bits
            if best:
                self._keep_weights(bits)
                run.best_bits, run.best_step = math.inf if bits is None else bits, run.step
        self.clock.meet()
        run.validated_step, run.validation_due = run.step, False
        spent = run.spent(self.clock.seconds)
        impatient = bits is not None and spent < 1.0 and run.patience.observe(spent, best=best)
        if bits is not None:
            row = {"step": run.step, "tokens": run.tokens, "validation_bits_per_byte": bits, "best": best}
            self._log(row)
            yield Validation(run.step, run.tokens, self.clock.seconds, bits, best)
        if impatient:
            yield Notice(run.patience.describe(run.step))

    def _keep_weights(self, bits: float | None) -> None:
        """Writes the present weights as the weights of the model."""
        run = self.run
        self._check_finite()
        weights = checkpoint.gathered(weights_of(run.model), run.ranks)
        if not run.ranks.is_first:
            return
        metadata = {"step": str(run.step), "validation_bits_per_byte": "" if bits is None else f"{bits:.6f}"}
        store.save_model(
            self.folder, run.config, weights, self.prepared.tokenizer, metadata, encoding=run.config.train.weights
        )
        self.folder = settle(self.model_folder)

    def _log(self, row: Mapping[str, Any]) -> None:
        """Appends a row to the metrics."""
        if self.run.ranks.is_first:
            layout.append_metrics(self.folder, row)

    def _save(self) -> Saved:
        self._check_finite()
        if self.run.ranks.is_first:
            sync_file(self.folder / layout.METRICS)
        self.saved_seconds = self.clock.seconds
        path = checkpoint.save(self.run, self.folder, seconds=self.saved_seconds, corpus=self.prepared.identity)
        self.clock.meet()
        self.saved_at = (self.run.step, self.run.validated_step)
        return Saved(self.run.step, path)

    def _check_finite(self) -> None:
        """`validation.check_finite`, once per step: a step may be validated and saved."""
        if self.checked_step != self.run.step:
            check_finite(self.run)
            self.checked_step = self.run.step


class _LoopStart(NamedTuple):
    """Time, step and tokens at which a loop of training steps began."""

    monotonic: float
    step: int
    tokens: int


def _exceeds_share(run: TrainingRun, clock: Clock) -> bool:
    """Whether validation takes too much of a time budget.

    A run must not depend on the clock while a budget in steps or tokens will be spent before the time.
    """
    if run.config.train.eval_every is not None or run.fraction(clock.seconds) == run.fraction(0.0):
        return False
    return clock.validation_seconds > VALIDATION_SHARE * clock.seconds
