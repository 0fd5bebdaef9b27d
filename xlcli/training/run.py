"""A training run in memory: model, optimizers, loader, memory states and counters, and the training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xlcli.config import Config, UniversalStackConfig
from xlcli.errors import DivergedError
from xlcli.model.build import build_model
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.optim import Optimizers, lr_factor
from xlcli.ranks import Ranks, local
from xlcli.runtime import Runtime, compile_stack, has_bfloat16_units
from xlcli.state import State
from xlcli.store.weights import weights as weights_of
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults
from xlcli.training.parallel import Parallel, own_rows, parallel
from xlcli.training.schedule import Lengths, Patience, lengths, restored, shortened

LR_DIVISOR = 3.0
"""Divisor of the learning rates at each roll-back, and in the remedy for a run that diverged."""
LEAST_SCALE = 1.0
"""Loss scale in float16 below which a run counts as diverged."""


class StepResult(NamedTuple):
    """Result of a training step.

    Mean nats per token, gradient norm before clipping (None if the step was skipped), learning-rate factor, mean
    adaptive steps or None, loss scale of the next step in float16 or None, and sums of the votes of all ranks.
    """

    nats: float
    grad_norm: float | None
    lr_factor: float
    mean_steps: float | None
    loss_scale: float | None = None
    votes: tuple[float, ...] = ()


@dataclass
class TrainingRun:
    """Model, optimizers, loader, memory of each microbatch, and counters.

    Of several ranks, each has the loader and memory of its own sequences; the rest of the run is equal on all of them.

    Attributes:
        parallel: Call of the model in training.
        bytes_per_token: Mean over the training text.
        step: Steps taken.
        tokens: Tokens trained on.
        seconds: Time spent before this process started.
        best_bits: Bits per byte of the best validation.
        best_step: Step of the best validation.
        validated_step: Step of the last validation.
        validation_due: Whether a validation is due that has not been completed.
        anchor: Step of the checkpoint that a roll-back restores: the latest that was due, whether the run was stopped
            since or not.
        rollbacks: Number of roll-backs; each divides the learning rates by `LR_DIVISOR`.
        skipped: Number of steps that were skipped because a scaled gradient overflowed in float16.
    """

    config: Config
    runtime: Runtime
    model: LanguageModel
    parallel: Parallel
    optimizers: Optimizers
    loader: TrainLoader
    states: list[State]
    bytes_per_token: float
    patience: Patience
    scaler: torch.amp.GradScaler
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_bits: float = math.inf
    best_step: int | None = None
    validated_step: int | None = None
    validation_due: bool = False
    anchor: int = 0
    rollbacks: int = 0
    skipped: int = 0

    @property
    def ranks(self) -> Ranks:
        """Processes of the run."""
        return self.runtime.ranks

    def fraction(self, seconds: float) -> float:
        """Share of the run that is done, 0 to 1, after `seconds` of training: of its budget, or of a shortened one."""
        return self.patience.fraction(self.spent(seconds))

    def spent(self, seconds: float) -> float:
        """Share of the budget spent, 0 to 1, after `seconds` of training."""
        train = self.config.train
        spent = [0.0]
        if train.max_steps is not None:
            spent.append(self.step / train.max_steps)
        if train.max_tokens is not None:
            spent.append(self.tokens / train.max_tokens)
        if train.max_time is not None:
            spent.append(seconds / train.max_time)
        return min(1.0, max(spent))

    def remaining(self, seconds: float, n_steps: int, n_tokens: int, elapsed: float) -> float:
        """Expected seconds until the first budget is spent, after `seconds` of training.

        Args:
            seconds: Seconds spent on the run.
            n_steps: Number of the latest steps, whose speed is assumed for the rest.
            n_tokens: Their tokens.
            elapsed: Their seconds.
        """
        train, end = self.config.train, self.patience.end
        left = [math.inf]
        if train.max_steps is not None:
            left.append((end * train.max_steps - self.step) * elapsed / n_steps)
        if train.max_tokens is not None:
            left.append((end * train.max_tokens - self.tokens) * elapsed / n_tokens)
        if train.max_time is not None:
            left.append(end * train.max_time - seconds)
        return max(0.0, min(left))

    def train_step(self, fraction: float, votes: Sequence[float] = ()) -> StepResult:
        """Forward and backward pass of each microbatch, gradient clipping, and one optimizer step.

        In float16 the loss is multiplied by a scale before the backward pass and gradients are divided by it. If they
        overflow, the optimizer step is skipped, and the next scale is half as large.

        Args:
            fraction: Share of the budget spent, for the learning-rate schedule.
            votes: Numbers to sum over all ranks.

        Raises:
            DivergedError: Loss or gradient is not finite; weights and optimizers are unchanged.
        """
        train = self.config.train
        self._redraw_features()
        drawn = self.next_lengths()
        microbatches = self.next_batch(drawn)
        count = len(self.loader.starts) * drawn.segment_len
        self.model.train()
        self.optimizers.zero_grad()
        nats, steps = torch.zeros((2,), device=self.runtime.device)
        for i, (x, y, documents) in enumerate(microbatches):
            with self.parallel.delayed() if i + 1 < len(microbatches) else nullcontext():
                with self.runtime.autocast():
                    out = self.score(x, y, self.states[i], documents, drawn, self.parallel.score)
                    nll, self.states[i], ponder, auxiliary = out
                loss = nll.sum() / count
                nats += loss.detach()
                if ponder is not None:
                    loss = loss + self._ponder_weight * ponder.cost.sum() / count
                    steps += ponder.steps.sum() / count
                if auxiliary is not None:
                    loss = loss + auxiliary * (nll.numel() / count)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self.states[i] = self.states[i].overwrite_earlier()
        scales = self._unscale()
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        nats, steps, norm, votes = self._over_ranks(nats, steps, norm, votes)
        # Waits for the device: weights must not change before the loss is known to be finite.
        loss_now, norm_now, steps_now, *scales_now = torch.stack((nats, norm, steps, *scales)).tolist()
        overflow = math.isfinite(loss_now) and _overflowed(scales_now)
        if not overflow and not (math.isfinite(loss_now) and math.isfinite(norm_now)):
            raise DivergedError(f"the loss or its gradient is not finite at step {self.step + 1}.")
        if train.grad_clip and norm_now > train.grad_clip and not overflow:
            torch._foreach_mul_(gradients, (train.grad_clip / (norm + 1e-6)).to(gradients[0].dtype))
        warmup = defaults.warmup_steps(train)
        factor = lr_factor(
            fraction,
            self.step,
            warmup_steps=warmup,
            lr_schedule=train.lr_schedule,
            min_lr_ratio=train.min_lr_ratio,
            decay_fraction=train.decay_fraction,
        )
        factor /= LR_DIVISOR**self.rollbacks
        if overflow:
            self.skipped += 1
        else:
            self.optimizers.step(factor)
        self.step += 1
        self.tokens += train.batch_size * drawn.segment_len
        scale = scales_now[-1] if scales_now else None
        norm_found = None if overflow else norm_now
        return StepResult(loss_now, norm_found, factor, steps_now or None, scale, tuple(votes))

    def skip_to(self, n_read: int) -> None:
        """Continues after `n_read` tokens of each sequence of the loader, with empty memory."""
        self.loader.n_read = n_read
        self.states = init_states(self.model, self.config, (self.loader.starts + n_read).tolist())

    def _over_ranks(
        self, nats: torch.Tensor, steps: torch.Tensor, norm: torch.Tensor, votes: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[float]]:
        """Mean of `nats` and `steps` over all ranks, norm of the whole gradient, and sums of votes: one message."""
        ranks = self.ranks
        if ranks.size == 1:
            return nats, steps, norm, votes
        own = torch.stack((nats.double(), steps.double(), norm.double().square()))
        sums = ranks.sum(torch.cat((own, own.new_tensor(votes))))
        nats, steps = (sums[:2] / ranks.size).unbind()
        whole = sums[2].sqrt() if self.config.runtime.shard else norm.double()
        return nats, steps, whole, sums[3:].tolist()

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
        every = {i: a.redraw_interval for i, a in enumerate(self.config.model.attentions)}
        due = {i for i, steps in every.items() if steps and self.step and self.step % steps == 0}
        if due:
            self.model.stack.redraw(due, torch.Generator().manual_seed((self.config.runtime.seed or 0) + self.step))
            self.states = [self.model.reset_layers(state, due) for state in self.states]

    @property
    def _ponder_weight(self) -> float:
        stack = self.config.model.stack
        return stack.ponder_weight if isinstance(stack, UniversalStackConfig) else 0.0

    def next_lengths(self) -> Lengths:
        """Segment and memory length of the next step."""
        return lengths(self.config.train, self.config.runtime.seed or 0, self.step)

    def score(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        state: State,
        documents: torch.Tensor | None,
        drawn: Lengths,
        score: Callable[..., ScoreOutput],
    ) -> ScoreOutput:
        """`LanguageModel.score` with these lengths."""
        if not self.config.train.random_lengths:
            return score(x, y, state, documents)
        output = score(x, y, shortened(state, drawn), documents)
        return output._replace(state=restored(output.state, state.span))

    def next_batch(self, drawn: Lengths) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Inputs, targets and document positions (b t; on the CPU) of each microbatch of the next step."""
        batch, n = self.loader.next(drawn.segment_len), self.config.train.grad_accum
        x, y = (torch.from_numpy(array).to(self.runtime.device).tensor_split(n) for array in batch[:2])
        documents = None if batch.documents is None else torch.from_numpy(batch.documents).tensor_split(n)
        return list(zip(x, y, documents or [None] * n, strict=True))


def make_training_run(
    config: Config,
    runtime: Runtime,
    train_ids: TokenFile,
    start_id: int,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> TrainingRun:
    """A new run: model with these weights (None: new ones), empty memory, loader at its start.

    Given weights are validated before the first step, so that the kept ones are never worse.
    """
    torch.manual_seed(config.runtime.seed or 0)
    model = build_model(config.model).to(runtime.device)
    if weights is not None:
        with torch.no_grad():
            for name, tensor in weights_of(model).items():
                tensor.copy_(weights[name])
    train = config.train
    assert train.lr is not None
    call = parallel(model, config, runtime)
    native = all(runtime.ranks.gather(has_bfloat16_units(runtime.device)))  # one number type of Muon on all ranks
    optimizers = Optimizers(model, train, lr=train.lr, native_bfloat16=native, ranks=runtime.ranks)
    model.stack.recompute_activations = train.recompute_activations
    if config.runtime.compile:
        compile_stack(model.stack)
    loader = TrainLoader(
        train_ids.ids,
        batch_size=train.batch_size,
        segment_len=train.segment_len,
        start_id=start_id,
        documents=train_ids.documents,
        alignment=config.model.alignment,
        rows=own_rows(config, runtime.ranks),
    )
    return TrainingRun(
        config=config,
        runtime=runtime,
        model=model,
        parallel=call,
        optimizers=optimizers,
        loader=loader,
        states=init_states(model, config, loader.starts.tolist()),
        bytes_per_token=train_ids.n_bytes / len(train_ids),
        patience=Patience.of(train),
        scaler=torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16),
        validation_due=weights is not None,
    )


def _overflowed(scales: list[float]) -> bool:
    """Whether scaled gradients overflowed: the next loss scale is below the present one, and not below the least."""
    return len(scales) == 2 and LEAST_SCALE <= scales[1] < scales[0]


def init_states(model: LanguageModel, config: Config, offsets: list[int]) -> list[State]:
    """Empty training memory of each microbatch, for sequences that start at these positions of the text."""
    train = config.train
    return [
        model.init_state(
            len(part),
            mem_len=train.mem_len,
            segment_len=train.segment_len,
            span=train.span,
            memory=train.memory,
            offsets=part.tolist(),
        )
        for part in torch.tensor(offsets).tensor_split(train.grad_accum)
    ]
