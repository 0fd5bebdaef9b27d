"""A training run: model, optimizers, loader, memory states and counters; its steps, and the folder that it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from xlcli.config import Config, RandomAttentionConfig, UniversalStackConfig
from xlcli.errors import CheckpointError, DivergedError
from xlcli.events import Event, Notice, Saved, Score, ScoredText, Step, Trained, Validation
from xlcli.files import sync_file
from xlcli.model.build import build_model
from xlcli.ops.layers import has_bfloat16_units
from xlcli.ops.span import Span
from xlcli.optim import BUDGET_SCHEDULES, Optimizers, lr_factor
from xlcli.ranks import local
from xlcli.runtime import Runtime, compile_stack
from xlcli.state import State
from xlcli.store import folder as store
from xlcli.store import layout
from xlcli.store.commit import latest, settle, step_name, verify
from xlcli.store.weights import weights as weights_of
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokens import TokenFile
from xlcli.training import checkpoint
from xlcli.training.parallel import own_rows, parallel
from xlcli.training.prepare import Prepared
from xlcli.training.schedule import Clock, Counters, Patience, drawn_span, with_span
from xlcli.training.validation import describe_run, validation_bits

LR_DIVISOR = 3.0
"""Divisor of the learning rates at each roll-back, and in the remedy for a run that diverged."""
LEAST_SCALE = 1.0
"""Loss scale in float16 below which a run counts as diverged."""
MAX_ROLLBACKS = 3
"""Maximum number of roll-backs of a run that diverges."""
VALIDATION_SHARE = 0.1
"""Maximum share of a time budget for validation at the default interval."""


class TrainingRun:
    """A training run, new or restored by `checkpoint.load`.

    Each of several ranks has the loader and memory of its sequences; the rest of the run is equal on all of them.

    Args:
        config: Complete settings; see `defaults.fill_in`.
        runtime: Device, number type, threads and ranks.
        train_ids: Tokens of the training text.
        start_id: Input at its beginning.
        weights: Weights to start from, which are validated before the first step, so that the kept ones are never
            worse; None: new ones.

    Attributes:
        score: Call of the model in training.
        states: Memory of each microbatch.
        bytes_per_token: Mean over the training text.
        data: Inputs of a run that is kept in a folder.
        model_folder: Model folder, from `start` on.
        began: Seconds, step and tokens at the first step of this process, or after a roll-back.
        folder: Folder of this run: the model folder, or a staged one in it until the run has weights.
    """

    data: Prepared
    model_folder: Path
    folder: Path

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        train_ids: TokenFile,
        start_id: int,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        train = config.train
        assert train.lr is not None
        self.config, self.runtime, self.ranks = config, runtime, runtime.ranks
        torch.manual_seed(config.runtime.seed or 0)
        self.model = build_model(config.model).to(runtime.device)
        if weights is not None:
            with torch.no_grad():
                for name, tensor in weights_of(self.model).items():
                    tensor.copy_(weights[name])
        stack = config.model.stack
        self.ponder_weight = stack.ponder_weight if isinstance(stack, UniversalStackConfig) else 0.0
        self.score, self.delayed = parallel(self.model, config, runtime)
        native = all(self.ranks.gather(has_bfloat16_units(runtime.device)))  # one number type of Muon on all ranks
        self.optimizers = Optimizers(self.model, train, lr=train.lr, native_bfloat16=native, ranks=self.ranks)
        self.model.stack.recompute_activations = train.recompute_activations
        if config.runtime.compile:
            compile_stack(self.model.stack)
        self.loader = TrainLoader(
            train_ids.ids,
            batch_size=train.batch_size,
            start_id=start_id,
            documents=train_ids.documents,
            rows=own_rows(config, self.ranks),
            seed=config.runtime.seed or 0 if train.shuffle else None,
            pieces_apart=config.model.can_hide_documents and not config.model.position.is_absolute,
        )
        self.skip_to(0)
        self.bytes_per_token = train_ids.n_bytes / len(train_ids)
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
        self.counters = Counters(validation_due=weights is not None)
        self.clock = Clock(self.ranks, 0.0, time.monotonic)
        self.began = self.clock.now(), 0, 0

    def start(self, folder: Path, running: Callable[[], float], stop: Callable[[], bool]) -> Clock:
        """Prepares for steps from a checkpoint of the present state; returns the clock of the run.

        Args:
            folder: Model folder, locked by the caller. A staged run is put in place there once it has weights.
            running: Seconds since the start of the time budget in this process.
            stop: Asked between steps.
        """
        self.model_folder = folder
        self.folder = settle(folder) if self.ranks.is_first else folder
        self.clock = Clock(self.ranks, self.counters.seconds, running, stop)
        self.saved_at = self.progress_key
        return self.clock

    @property
    def progress_key(self) -> tuple[int, int | None]:
        """Step, and step of the last validation."""
        return self.counters.step, self.counters.validated_step

    @property
    def is_validated(self) -> bool:
        """True if a validation followed the last step."""
        return self.counters.validated_step == self.counters.step

    def train_step(self, fraction: float) -> Step:
        """Forward and backward pass of each microbatch, gradient clipping, and one optimizer step.

        In float16 the loss is multiplied by a scale before the backward pass and gradients are divided by it. If they
        overflow, the optimizer step is skipped, and the next scale is half as large.

        Args:
            fraction: Share of the budget spent, for the learning-rate schedule.

        Raises:
            DivergedError: Loss or gradient is not finite; weights and optimizers are unchanged.
        """
        train = self.config.train
        self._redraw_features()
        span, microbatches = self.next_batch()
        count = len(self.loader.starts) * span.segment_len
        self.model.train()
        torch._foreach_zero_(self._gradients())
        nats, steps = torch.zeros((2,), device=self.runtime.device)
        for i, (x, y, documents) in enumerate(microbatches):
            with self.delayed() if i + 1 < len(microbatches) else nullcontext():
                with self.runtime.autocast():
                    state = with_span(self.states[i], span) if train.random_lengths else self.states[i]
                    nll, state, ponder, _ = self.score(x, y, state, documents)
                loss = nll.sum() / count
                nats += loss.detach()
                if ponder is not None:
                    loss = loss + self.ponder_weight * ponder.cost.sum() / count
                    steps += ponder.steps.sum() / count
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                if train.random_lengths:
                    state = with_span(state, self.states[i].span)
                self.states[i] = state.overwrite_earlier()
        scales = self._unscale()
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.ranks.size > 1:  # means over all ranks, and the norm of the whole gradient
            sums = self.ranks.sum(torch.stack((nats.double(), steps.double(), norm.double().square())))
            nats, steps = (sums[:2] / self.ranks.size).unbind()
            norm = sums[2].sqrt() if self.config.runtime.shard else norm.double()
        # Waits for the device: weights must not change before the loss is known to be finite.
        loss_now, norm_now, steps_now, *scales_now = torch.stack((nats, norm, steps, *scales)).tolist()
        # Scaled gradients overflowed if the next loss scale is below the present one, and not below the least.
        overflow = math.isfinite(loss_now) and len(scales_now) == 2 and LEAST_SCALE <= scales_now[1] < scales_now[0]
        if not overflow and not (math.isfinite(loss_now) and math.isfinite(norm_now)):
            raise DivergedError(f"the loss or its gradient is not finite at step {self.counters.step + 1}.")
        if train.grad_clip and norm_now > train.grad_clip and not overflow:
            torch._foreach_mul_(gradients, (train.grad_clip / (norm + 1e-6)).to(gradients[0].dtype))
        factor = lr_factor(train, fraction, self.counters.step) / LR_DIVISOR**self.counters.rollbacks
        if overflow:
            self.counters.skipped += 1
        else:
            self.optimizers.step(factor, self.counters.step)
        self.counters.step += 1
        self.counters.tokens += train.batch_size * span.segment_len
        seconds = self.clock.now()
        tokens_per_second, eta_seconds = self._pace(seconds)
        return Step(
            step=self.counters.step,
            tokens=self.counters.tokens,
            seconds=seconds,
            nats=loss_now,
            bits_per_byte=loss_now / math.log(2) / self.bytes_per_token,
            lr=(train.lr or 0.0) * factor,
            grad_norm=None if overflow else norm_now,
            tokens_per_second=tokens_per_second,
            fraction=self.fraction(seconds),
            eta_seconds=eta_seconds,
            mean_steps=steps_now or None,
            loss_scale=scales_now[-1] if scales_now else None,
            skipped=self.counters.skipped if scales_now else None,
        )

    def _gradients(self) -> list[torch.Tensor]:
        """Gradients of the parameters, of divided ones the part of this rank."""
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def fraction(self, seconds: float) -> float:
        """Share of the run that is done, 0 to 1, after `seconds` of training: of its budget, or of a shortened one."""
        return self.patience.fraction(self.spent(seconds))

    def spent(self, seconds: float) -> float:
        """Share of the budget spent, 0 to 1, after `seconds` of training."""
        return min(1.0, max((used / budget for used, budget in self.budgets(seconds).values()), default=0.0))

    def budgets(self, seconds: float) -> dict[str, tuple[float, float]]:
        """What is used up of each given budget after `seconds` of training, and the budget, by its key."""
        used = {"max_steps": self.counters.step, "max_tokens": self.counters.tokens, "max_time": seconds}
        given = {key: getattr(self.config.train, key) for key in used}
        return {key: (used[key], budget) for key, budget in given.items() if budget is not None}

    @property
    def patience(self) -> Patience:
        """Early stopping, by the present counters."""
        train = self.config.train
        decay = train.decay_fraction if train.lr_schedule in BUDGET_SCHEDULES else 0.0
        return Patience(train.patience, decay, self.counters)

    def next_batch(self) -> tuple[Span, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
        """Span of the next step; inputs, targets and document positions (b t; on the CPU) of its microbatches."""
        span, n = self.states[0].span, self.config.train.grad_accum
        if self.config.train.random_lengths:
            span = drawn_span(span, self.config.runtime.seed or 0, self.counters.step)
        batch = self.loader.next(span.segment_len)
        x, y = (torch.from_numpy(array).to(self.runtime.device).tensor_split(n) for array in batch[:2])
        documents = None if batch.documents is None else torch.from_numpy(batch.documents).tensor_split(n)
        return span, list(zip(x, y, documents or [None] * n, strict=True))

    def skip_to(self, n_read: int) -> None:
        """Continues after `n_read` tokens of each sequence of the loader, with empty memory."""
        train = self.config.train
        self.loader.n_read = n_read
        self.states: list[State] = [
            self.model.init_state(
                len(starts), memory=train.memory, offsets=(starts + n_read).tolist(), **train.reading.state
            )
            for starts in torch.from_numpy(self.loader.starts).tensor_split(train.grad_accum)
        ]

    def _unscale(self) -> tuple[torch.Tensor, ...]:
        """Divides the gradients by the loss scale. Scales of this and of the next step in float16, else nothing."""
        if not self.scaler.is_enabled():
            return ()
        one = torch.ones((), device=self.runtime.device)
        before = self.scaler.scale(one)
        for optimizer, _ in self.optimizers.optimizers:
            self.scaler.unscale_(optimizer)
        self.scaler.update()
        return before, self.scaler.scale(one)

    def _redraw_features(self) -> None:
        """Draws new random features in the layers whose redraw interval has ended, and empties their memories."""
        step, layers = self.counters.step, enumerate(self.config.model.attentions)
        every = {i: layer.redraw_every for i, layer in layers if isinstance(layer, RandomAttentionConfig)}
        due = {i for i, steps in every.items() if steps and step and step % steps == 0}
        if due:
            self.model.stack.redraw(due, torch.Generator().manual_seed((self.config.runtime.seed or 0) + step))
            self.states = [self.model.reset_layers(state, due) for state in self.states]

    def _pace(self, seconds: float) -> tuple[float, float]:
        """Tokens per second, and seconds until the first budget, if any, is spent after `seconds`."""
        counters, (began, first_step, first_token) = self.counters, self.began
        elapsed = max(seconds - began, 1e-9)
        n_steps, n_tokens = counters.step - first_step, counters.tokens - first_token
        pace = {"max_steps": elapsed / n_steps, "max_tokens": elapsed / n_tokens, "max_time": 1.0}
        end = self.patience.end
        left = [(end * budget - used) * pace[key] for key, (used, budget) in self.budgets(seconds).items()]
        return n_tokens / elapsed, max(0.0, min(left, default=math.inf))

    def log_step(self, step: Step) -> Step:
        """Appends a step to the metrics, and returns it."""
        row = {key: value for key, value in asdict(step).items() if value is not None or key == "grad_norm"}
        row |= {"seconds": round(step.seconds, 3), "tokens_per_second": round(step.tokens_per_second, 1)}
        del row["fraction"], row["eta_seconds"]
        self._log(row | ({"rollbacks": self.counters.rollbacks} if self.counters.rollbacks else {}))
        return step

    def _log(self, row: Mapping[str, Any]) -> None:
        """Appends a row to the metrics."""
        if self.ranks.is_first:
            layout.append_metrics(self.folder, row)

    @property
    def exceeds_share(self) -> bool:
        """True if validation takes too much of a time budget.

        A run must not depend on the clock while a budget in steps or tokens will be spent before the time.
        """
        seconds = self.clock.seconds
        if self.config.train.eval_every is not None or self.fraction(seconds) == self.fraction(0.0):
            return False
        return self.clock.validation > VALIDATION_SHARE * seconds

    def validate(self) -> Iterator[Event]:
        """Validates the weights, which are finite; keeps them if they are the best so far, or without validation text.

        With `average_share` these are their averages. If the run is to be stopped, validation stays due.
        """
        counters, bits, began = self.counters, None, self.clock.now()
        with self.optimizers.averaged():
            if len(self.data.valid_ids):
                bits = validation_bits(self, self.data.valid_ids, self.clock.stop)
                if bits is None:
                    self.clock.meet()
                    return
            best = bits is None or counters.best_bits is None or bits < counters.best_bits
            if best:
                self.keep_weights(bits)
                counters.best_bits, counters.best_step = bits, counters.step
        self.clock.meet(self.clock.now() - began)
        counters.validated_step, counters.validation_due = counters.step, False
        spent = self.spent(self.clock.seconds)
        impatient = bits is not None and spent < 1.0 and self.patience.observe(spent, best=best)
        if bits is not None:
            row = {"step": counters.step, "tokens": counters.tokens, "validation_bits_per_byte": bits, "best": best}
            self._log(row)
            yield Validation(counters.step, counters.tokens, self.clock.seconds, bits, best)
        if impatient:
            yield Notice(self.patience.describe())

    def keep_weights(self, bits: float | None) -> None:
        """Writes the present weights, which are finite, as the weights of the model."""
        weights = checkpoint.gathered(weights_of(self.model), self.ranks)
        if not self.ranks.is_first:
            return
        metadata = {
            "step": str(self.counters.step),
            "validation_bits_per_byte": "" if bits is None else f"{bits:.6f}",
        }
        encoding = self.config.train.weights
        store.save_model(self.folder, self.config, weights, self.data.tokenizer, metadata, encoding=encoding)
        self.folder = settle(self.model_folder)

    def save(self) -> Saved:
        """Writes a checkpoint of the present state, which is finite."""
        if self.ranks.is_first:
            sync_file(self.folder / layout.METRICS)
        self.counters.seconds = self.clock.seconds
        path = checkpoint.save(self, self.folder)
        self.saved_at = self.progress_key
        return Saved(self.counters.step, path)

    def roll_back(self, error: DivergedError) -> Generator[Notice, None, bool]:
        """Restores the latest checkpoint that was due, with lower learning rates and at the present place in the text.

        False if the run is not to be rolled back, or was too often.

        The time that was spent stays spent. The next checkpoint has the new rates; a run that is killed before it
        diverges again and is rolled back in the same way, so that it equals an uninterrupted one.
        """
        found = self.ranks.broadcast(str(self._anchor() or "") if self.ranks.is_first else None)
        n_rollbacks, n_read = self.counters.rollbacks + 1, self.loader.n_read
        if self.config.train.on_divergence == "stop" or n_rollbacks > MAX_ROLLBACKS or not found:
            return False
        warnings = checkpoint.load(self, Path(found), allow_data_change=True)
        counters = self.counters
        counters.rollbacks, counters.seconds = n_rollbacks, self.clock.seconds
        self.skip_to(n_read)
        if self.ranks.is_first:
            layout.trim_metrics(self.folder, counters.step, validated=self.is_validated)
        self.saved_at = self.progress_key
        rates = f"the learning rates are divided by {LR_DIVISOR**n_rollbacks:g}"
        yield from warnings
        yield Notice(
            f"{error.message.rstrip('.')}; back to step {counters.step}, {rates} (roll-back {n_rollbacks} of "
            f"{MAX_ROLLBACKS}).",
            "warning",
        )
        return True

    def _anchor(self) -> Path | None:
        """The checkpoint that a roll-back restores; if it is damaged, the newest undamaged one."""
        folder = self.folder / layout.CHECKPOINTS
        with suppress(CheckpointError):
            verify(folder / step_name(self.counters.anchor))
            return folder / step_name(self.counters.anchor)
        return latest(folder).path

    def finish(self, score: Score | None = None, *, stopped: bool = False) -> Trained:
        """Completes the record of a run that is saved, was `stopped` or not, and may have a score."""
        counters = self.counters
        bits = score.bits_per_byte if score else None
        scored = ScoredText(score.bytes, self.data.parts.valid.n_bytes, score.mem_len) if score else None
        record = describe_run(self) | {
            "steps": counters.step,
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 1),
            "bits_per_byte": bits,
            "scored": asdict(scored) if scored else None,
            "best_step": counters.best_step,
            "finished": not stopped,
        }
        if counters.rollbacks:
            record["rollbacks"] = counters.rollbacks
        if self.patience.end < 1.0:
            record["stopped_early"] = True
        layout.write_record(self.folder, record)
        return Trained(
            folder=self.model_folder,
            step=counters.step,
            tokens=counters.tokens,
            seconds=counters.seconds,
            bits_per_byte=bits,
            best_step=counters.best_step,
            stopped=stopped,
            sample="",
            scored=scored,
        )
