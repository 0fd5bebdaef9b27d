"""The course of one run: steps until the budget is spent or somebody asks to stop, and what is done between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xlcli.config import TrainConfig
from xlcli.events import Event, Saved, Step, Trained, Validation
from xlcli.store import folder as store
from xlcli.training import checkpoint, defaults
from xlcli.training.final import final_evaluation
from xlcli.training.prepare import Prepared
from xlcli.training.run import TrainingRun

VALIDATION_SHARE = 0.1
"""Most of a time budget that validation takes unless it was said how often."""


class Trainer:
    """A run, the folder it is kept in, and the loop over its steps.

    Args:
        run: The run, new or restored.
        ready: What it was made from.
        folder: The model folder; the caller holds its lock.
        about: For `record.json`.
        began: When this process began to spend the budget, by `time.monotonic`.

    The run as it is now has been saved.
    """

    def __init__(self, run: TrainingRun, ready: Prepared, folder: Path, *, about: dict[str, Any], began: float) -> None:
        self.run = run
        self.ready = ready
        self.folder = folder
        self.about = about
        self.began = began
        self.saved_at = (run.step, run.validated_step)

    @property
    def seconds(self) -> float:
        """Time spent on this run, in this process and before."""
        return self.run.seconds + time.monotonic() - self.began

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Steps until the budget is spent or `stop` says so."""
        run, train = self.run, self.run.config.train
        validate = IntervalTrigger(train.eval_every, parts=defaults.VALIDATIONS)
        save = IntervalTrigger(defaults.SAVE_SECONDS if train.save_every is None else train.save_every)
        for rhythm in (validate, save):
            rhythm.start(run.step, self.seconds, run.fraction(self.seconds))
        began, tokens_before, validating = time.monotonic(), run.tokens, 0.0
        if run.validation_due:
            yield from self._validate(stop)
        while (fraction := run.fraction(self.seconds)) < 1.0 and not stop():
            yield self._step(fraction, began, tokens_before)
            spent = run.fraction(self.seconds)
            if spent == 1.0:
                break
            if validate.due(run.step, self.seconds, spent) and not _too_costly(train, validating, self.seconds):
                run.validation_due = True
                before = time.monotonic()
                yield from self._validate(stop)
                validating += time.monotonic() - before
            if not stop() and save.due(run.step, self.seconds, spent):
                yield self._save()

    def finish(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Last validation, checkpoint, the exact score of the kept weights and a sample; only saves when stopped."""
        run = self.run
        spent = run.fraction(self.seconds) == 1.0
        if spent and run.validated_step != run.step:
            yield from self._validate(stop)
        if self.saved_at != (run.step, run.validated_step):
            yield self._save()
        if run.best_step is None and run.step:
            self._keep_weights(None)
        verdict = None
        if spent and run.validated_step == run.step:
            verdict = yield from final_evaluation(self.folder, run.runtime, run.config.runtime.seed or 0, stop)
        bits, sample = verdict or (None, "")
        self.about |= {"steps": run.step, "tokens": run.tokens, "seconds": round(self.seconds, 1)}
        self.about |= {"bits_per_byte": bits, "best_step": run.best_step, "finished": verdict is not None}
        store.write_record(self.folder, self.about)
        yield Trained(
            folder=self.folder,
            step=run.step,
            tokens=run.tokens,
            seconds=self.seconds,
            bits_per_byte=bits,
            best_step=run.best_step,
            stopped=verdict is None,
            sample=sample,
        )

    def _save(self) -> Saved:
        path = checkpoint.save(self.run, self.folder, seconds=self.seconds, corpus=self.ready.identity)
        self.saved_at = (self.run.step, self.run.validated_step)
        return Saved(self.run.step, path)

    def _step(self, fraction: float, began: float, tokens_before: int) -> Step:
        """One step, its row in the curve, and its event. The loop began at `began` with `tokens_before` read."""
        run = self.run
        nats, norm, factor, mean_steps = run.train_step(fraction)
        seconds = self.seconds
        spent = run.fraction(seconds)
        step = Step(
            step=run.step,
            tokens=run.tokens,
            seconds=seconds,
            nats=nats,
            bits_per_byte=nats / math.log(2) / run.bytes_per_token,
            lr=(run.config.train.lr or 0.0) * factor,
            grad_norm=norm,
            tokens_per_second=(run.tokens - tokens_before) / max(time.monotonic() - began, 1e-9),
            fraction=spent,
            eta_seconds=seconds * (1 - spent) / spent if spent else math.inf,
            mean_steps=mean_steps,
        )
        row = {
            "step": step.step,
            "tokens": step.tokens,
            "seconds": round(seconds, 3),
            "nats": nats,
            "bits_per_byte": step.bits_per_byte,
            "lr": step.lr,
            "grad_norm": norm,
            "tokens_per_second": round(step.tokens_per_second, 1),
            **({} if mean_steps is None else {"mean_steps": mean_steps}),
        }
        store.append_metrics(self.folder, row)
        return step

    def _validate(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Scores held-out text and keeps the weights when they are the best so far; without any, the latest are.

        When stopped, validation stays due.
        """
        run, bits = self.run, None
        if len(self.ready.valid_ids):
            bits = run.validation_bits(self.ready.valid_ids, stop)
            if bits is None:
                return
        best = bits is None or bits < run.best_bits
        if best:
            self._keep_weights(bits)
            run.best_bits, run.best_step = math.inf if bits is None else bits, run.step
        run.validated_step, run.validation_due = run.step, False
        if bits is not None:
            row = {"step": run.step, "tokens": run.tokens, "validation_bits_per_byte": bits, "best": best}
            store.append_metrics(self.folder, row)
            yield Validation(run.step, run.tokens, self.seconds, bits, best)

    def _keep_weights(self, bits: float | None) -> None:
        """Makes the weights those of the model."""
        run = self.run
        run.check_finite()
        facts = {"step": str(run.step), "validation_bits_per_byte": "" if bits is None else f"{bits:.6f}"}
        store.save_model(self.folder, run.config, store.weights(run.model), self.ready.tokenizer, facts)


class IntervalTrigger:
    """Says when something is due that happens every so many steps (a whole number) or seconds.

    Where `every` is None it happens `parts` times, evenly over the budget.
    """

    def __init__(self, every: int | float | None, *, parts: int = 1) -> None:
        self.every = every
        self.parts = parts
        self.beats = 0

    def start(self, step: int, seconds: float, fraction: float) -> None:
        """What fell due up to here is past."""
        self.beats = self._count(step, seconds, fraction)

    def due(self, step: int, seconds: float, fraction: float) -> bool:
        """Whether it has fallen due since last asked; on steps and tokens it depends on nothing but where they are."""
        before, self.beats = self.beats, self._count(step, seconds, fraction)
        return self.beats > before

    def _count(self, step: int, seconds: float, fraction: float) -> int:
        if self.every is None:
            return int(fraction * self.parts)
        return int((step if isinstance(self.every, int) else seconds) // self.every)


def _too_costly(train: TrainConfig, validating: float, seconds: float) -> bool:
    """Whether validation must be left out lest it eat a time budget; elsewhere it may not depend on a clock."""
    if train.eval_every is not None or train.max_steps is not None or train.max_tokens is not None:
        return False
    return validating > VALIDATION_SHARE * seconds
