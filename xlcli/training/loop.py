"""The loop of a run: steps, validations and checkpoints until its budget is spent, and the way back if it diverges."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xlcli.errors import DivergedError
from xlcli.events import Event, Notice, Saved, Step, Validation
from xlcli.store import layout
from xlcli.store.commit import latest, place_of_run
from xlcli.training import defaults
from xlcli.training.folder import keep_points, keep_weights, restore, save
from xlcli.training.prepare import Prepared
from xlcli.training.run import LR_DIVISOR, TrainingRun, Update
from xlcli.training.schedule import Clock, Counters, IntervalTrigger, overfits
from xlcli.training.validation import MOST_RESERVED, check_finite, seconds_at_end, validation_bits

VALIDATION_SHARE = 0.1  # maximum share of a time budget for validation at the default interval
OVERFITS = (
    "the model overfits: since step {} (weights kept), validation has risen while the training loss fell; "
    "try more text, --set model.dropout=0.2 or --patience 3"
)

SLOW_VALIDATION = (
    "a validation takes {:.2g} s, much of the time budget of {:.15g} s: few steps remain, and the score at the end may "
    "be missing; use a longer --max-time or a shorter text in --valid"
)


class Loop:
    """Trains until the budget is spent or the run is to be stopped, and saves it.

    `run` is as in its latest checkpoint. The caller has locked the model `folder`, where a staged run gets its place.
    """

    def __init__(self, run: TrainingRun, data: Prepared, folder: Path, clock: Clock) -> None:
        self.run, self.data, self.folder, self.clock = run, data, folder, clock
        self.saved = run.counters.progress
        self.validations = IntervalTrigger(run.config.train.eval_every, parts=defaults.VALIDATIONS)
        self.checkpoints = IntervalTrigger(run.config.train.save_every or defaults.SAVE_SECONDS)

    def events(self) -> Iterator[Event]:
        """Trains; `DivergedError` if the run has diverged, and may not or cannot go back to its latest checkpoint."""
        while True:
            try:
                yield from self._train()
                break
            except DivergedError as error:
                yield from self._roll_back(error)
        counters, ranks = self.run.counters, self.run.runtime.ranks
        is_unvalidated = counters.best_step is None and counters.step > 0
        # A run that is stopped so early does not replace a model yet.
        if is_unvalidated and not ranks.broadcast(place_of_run(self.folder) != self.folder):
            with self.run.optimizers.averaged():
                keep_weights(self.run, self.data, self.folder, None)

    def _train(self) -> Iterator[Event]:
        """Takes one step after the other until the run is over, and validates and saves between them."""
        self.clock.synchronize()
        # Intervals that ended before this process are not due again.
        for trigger in (self.validations, self.checkpoints):
            self._take_ended(trigger)
        is_over = yield from self._validate_and_save()
        beginning = self.run.counters.model_copy(update={"seconds": self.clock.now()})
        while not is_over:
            tokens_before = self.run.counters.tokens
            update = self.run.train_step(self.run.fraction(self.clock.seconds))
            yield self._log_step(update, beginning)
            yield from keep_points(self.run, self.data, self.folder, tokens_before)
            is_over = yield from self._validate_and_save()

    def _validate_and_save(self) -> Generator[Event, None, bool]:
        """Validates the weights and writes a checkpoint, each if it is due. Returns whether the run is over."""
        run, clock = self.run, self.clock
        clock.synchronize()
        is_spent = run.fraction(clock.seconds) == 1.0  # the budget, before a validation
        has_interval_ended = self._take_ended(self.validations)
        if has_interval_ended and not is_spent and not self._exceeds_share():
            run.count(validation_due=True)  # in a checkpoint, too, until the weights are validated
        is_last_validation_due = is_spent and not run.counters.is_validated
        validates = run.counters.validation_due or is_last_validation_due
        if validates:
            check_finite(run)
            yield from self._validate()
            self._take_ended(self.validations)  # intervals that ended during it are not due again
        is_over = run.fraction(clock.seconds) == 1.0 or clock.stops  # also if validation has used up the time
        is_checkpoint_due = self._take_ended(self.checkpoints) and not is_spent
        has_changed = self.saved != run.counters.progress
        if has_changed and (is_over or is_checkpoint_due):
            if not validates:
                check_finite(run)
            yield self._save()
        return is_over

    def _save(self) -> Saved:
        """Writes a checkpoint of the present state, which is finite."""
        self.run.count(seconds=self.clock.seconds)
        path = save(self.run, self.data, place_of_run(self.folder))
        self.saved = self.run.counters.progress
        return Saved(self.run.counters.step, path)

    def _take_ended(self, trigger: IntervalTrigger) -> bool:
        """Moves a trigger on to the present step and time; returns whether an interval of it has ended meanwhile."""
        seconds = self.clock.seconds
        return trigger.move_on(self.run.counters.step, seconds, self.run.fraction(seconds))

    def _exceeds_share(self) -> bool:
        """True if validation takes too much of a time budget."""
        # A run must not depend on the clock while a budget in steps or tokens will be spent before the time.
        run, seconds = self.run, self.clock.seconds
        is_interval_given = run.config.train.eval_every is not None
        depends_on_clock = run.fraction(seconds) != run.fraction(0.0)
        if is_interval_given or not depends_on_clock:
            return False
        return self.clock.validation > VALIDATION_SHARE * seconds

    def _validate(self) -> Iterator[Event]:
        """Scores the weights on the validation text, and saves them as the model if no earlier ones were better.

        The caller has checked that they are finite. Without a validation text they are saved without a score. With
        `average_share` it is their averages that are scored and saved. If the run is to be stopped meanwhile, nothing
        is saved, and validation stays due.
        """
        run, valid = self.run, self.data.valid_ids
        began = self.clock.now()
        bits = None  # per byte of the validation text
        with run.optimizers.averaged():
            if len(valid):
                bits = validation_bits(run, valid, self.clock.stop)
                if bits is None:  # the run is to be stopped
                    self.clock.synchronize()
                    return
            best_bits = run.counters.best_bits
            is_best = bits is None or best_bits is None or bits < best_bits
            if is_best:
                keep_weights(run, self.data, self.folder, bits)
                run.count(best_bits=bits, best_step=run.counters.step)
        is_first = run.counters.validated_step is None
        run.count(validated_step=run.counters.step, validation_due=False)
        seconds = self.clock.synchronize(self.clock.now() - began)
        reserve = seconds_at_end(run, valid, seconds)  # what the end of the run will need of a time budget
        run.count(reserve=reserve)
        max_time = run.config.train.max_time
        if is_first and max_time is not None and reserve == MOST_RESERVED * max_time:
            yield Notice(SLOW_VALIDATION.format(seconds, max_time), "warning")
        if bits is not None:
            yield from self._judge(bits, is_best=is_best)

    def _judge(self, bits: float, *, is_best: bool) -> Iterator[Event]:
        """Logs a validation, which patience counts, and says if it shows that the run should end or overfits."""
        run, before = self.run, self.run.counters
        share_spent = run.spent(self.clock.seconds)
        if share_spent < 1.0:
            run.count(**run.patience.observe(share_spent, best=is_best))
        self._log({"step": before.step, "tokens": before.tokens, "validation_bits_per_byte": bits, "best": is_best})
        yield Validation(before.step, before.tokens, self.clock.seconds, bits, is_best)
        has_patience_run_out = run.counters.plateau != before.plateau
        if has_patience_run_out:
            yield Notice(run.patience.describe())
        writes_metrics = run.runtime.ranks.is_first
        if writes_metrics and not is_best and overfits(layout.read_metrics(place_of_run(self.folder))):
            yield Notice(OVERFITS.format(run.counters.best_step))

    def _log_step(self, update: Update, beginning: Counters) -> Step:
        """Appends the step just taken to the metrics, and returns it; its pace is that since `beginning`."""
        run, counters = self.run, self.run.counters
        seconds = self.clock.now()
        elapsed = max(seconds - beginning.seconds, 1e-9)
        n_steps = counters.step - beginning.step
        n_tokens = counters.tokens - beginning.tokens
        # The run ends with the budget that is spent first at this pace.
        seconds_per_unit = {"max_steps": elapsed / n_steps, "max_tokens": elapsed / n_tokens, "max_time": 1.0}
        seconds_left = math.inf
        for key, budget in run.budgets(seconds).items():
            units_left = run.patience.end * budget.limit - budget.used  # steps, tokens or seconds
            seconds_left = min(seconds_left, units_left * seconds_per_unit[key])
        seconds_left = max(0.0, seconds_left)
        step = Step(
            step=counters.step,
            tokens=counters.tokens,
            seconds=seconds,
            bits_per_byte=update.nats / math.log(2) / run.bytes_per_token,
            tokens_per_second=n_tokens / elapsed,
            fraction=run.fraction(seconds),
            eta_seconds=seconds_left,
            last_step=counters.step + round(seconds_left * n_steps / elapsed),
            **update._asdict(),
        )
        row = {key: value for key, value in asdict(step).items() if value is not None}
        row["seconds"] = round(seconds, 3)
        row["tokens_per_second"] = round(step.tokens_per_second, 1)
        del row["fraction"], row["eta_seconds"], row["last_step"]  # which are for the screen
        if counters.rollbacks:
            row["rollbacks"] = counters.rollbacks
        self._log(row)
        return step

    def _log(self, row: Mapping[str, Any]) -> None:
        if self.run.runtime.ranks.is_first:
            layout.append_metrics(place_of_run(self.folder), row)

    def _roll_back(self, error: DivergedError) -> Iterator[Notice]:
        """Takes a run that has diverged back to its latest checkpoint, with lower rates, behind the text it has read.

        The time that was spent stays spent. The next checkpoint has the new rates; a run that is killed before it
        diverges again and is rolled back in the same way, so that it equals an uninterrupted one. Raises `error`, the
        divergence, if the settings forbid it, the run was rolled back before, or there is no checkpoint.
        """
        run, ranks = self.run, self.run.runtime.ranks
        was_rolled_back = run.counters.rollbacks > 0
        if run.config.train.on_divergence == "stop" or was_rolled_back:
            raise error
        place = place_of_run(self.folder)
        newest = None
        if ranks.is_first:  # it alone verifies files, and tells the others
            newest = latest(place / layout.CHECKPOINTS).path
        path = ranks.broadcast(None if newest is None else str(newest))
        if path is None:
            raise error
        n_read = run.counters.n_read
        yield from restore(run, self.data, Path(path))
        run.count(rollbacks=1, seconds=self.clock.seconds)
        run.skip_to(n_read)
        step = run.counters.step
        if ranks.is_first:
            layout.trim_metrics(place, step, validated=run.counters.is_validated)
        self.saved = run.counters.progress
        problem = error.message.rstrip(".")
        yield Notice(f"{problem}; back to step {step}, with the learning rates divided by {LR_DIVISOR:g}.", "warning")
