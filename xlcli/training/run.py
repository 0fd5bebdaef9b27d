"""One training run in memory: model, optimizers, lanes of text, their memory, counters; and one step of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xlcli.config import Config, UniversalStackConfig
from xlcli.errors import DivergedError
from xlcli.model.build import build_model
from xlcli.model.init import redraw
from xlcli.model.lm import LanguageModel
from xlcli.optim import Optimizers, lr_factor
from xlcli.runtime import Runtime, compile_stack, has_bfloat16_units
from xlcli.state import State
from xlcli.text.loaders import EvalLoader, TrainLoader
from xlcli.text.tokens import TokenFile
from xlcli.training import defaults

ABSURD_NATS = 100.0
"""A loss that no working model has: that of giving every token the probability e^-100."""
VALIDATION_TOKENS = 2**15
"""Held-out tokens scored in the middle of a run; its end scores more."""


class StepResult(NamedTuple):
    """Mean nats a token, gradient norm, learning-rate factor, and mean steps where positions decide on them."""

    nats: float
    grad_norm: float
    factor: float
    mean_steps: float | None


@dataclass
class TrainingRun:
    """Everything that changes while training.

    `seconds` is the time spent before this process began, `best_bits` and `best_step` the best validation so far,
    `validated_step` the latest one. `validation_due` is set while one is due that has not been made.
    """

    config: Config
    runtime: Runtime
    model: LanguageModel
    optimizers: Optimizers
    lanes: TrainLoader
    states: list[State]
    bytes_per_token: float
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_bits: float = math.inf
    best_step: int | None = None
    validated_step: int | None = None
    validation_due: bool = False

    def fraction(self, seconds: float) -> float:
        """Share of the budget spent, 0 to 1, `seconds` after the run began (stops not counted)."""
        train = self.config.train
        spent = [0.0]
        if train.max_steps is not None:
            spent.append(self.step / train.max_steps)
        if train.max_tokens is not None:
            spent.append(self.tokens / train.max_tokens)
        if train.max_time is not None:
            spent.append(seconds / train.max_time)
        return min(1.0, max(spent))

    def train_step(self, fraction: float) -> StepResult:
        """One update.

        Raises:
            DivergedError: Loss or gradient is not finite; weights and optimizers are as they were.
        """
        train = self.config.train
        self._redraw_when_due()
        groups = self._next_groups()
        count = defaults.tokens_per_step(train)
        self.model.train()
        self.optimizers.zero_grad()
        nats, steps = torch.zeros((2,), device=self.runtime.device)
        for group, (x, y) in enumerate(groups):
            with self.runtime.autocast():
                nll, self.states[group], ponder = self.model.score(x, y, self.states[group])
            loss = nll.sum() / count
            nats += loss.detach()
            if ponder is not None:
                loss = loss + self._ponder_weight * ponder.cost.sum() / count
                steps += ponder.steps.sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.grad_clip or math.inf)
        if not (math.isfinite(nats.item()) and math.isfinite(norm.item())):
            raise DivergedError(f"the loss or its gradient is no longer a finite number at step {self.step + 1}.")
        warmup = defaults.warmup_steps(train)
        factor = lr_factor(
            fraction, self.step, warmup_steps=warmup, lr_schedule=train.lr_schedule, min_lr_ratio=train.min_lr_ratio
        )
        self.optimizers.step(factor)
        self.step += 1
        self.tokens += count
        return StepResult(nats.item(), norm.item(), factor, steps.item() or None)

    def _redraw_when_due(self) -> None:
        """Fresh features and directions where it is time, from seed and step; what was made of the old is forgotten."""
        every = {i: getattr(a, "redraw_every", None) for i, a in enumerate(self.config.model.attentions)}
        due = {i for i, steps in every.items() if steps and self.step and self.step % steps == 0}
        if due:
            redraw(self.model.stack, due, torch.Generator().manual_seed((self.config.runtime.seed or 0) + self.step))
            self.states = [self.model.reset_layers(state, due) for state in self.states]

    @property
    def _ponder_weight(self) -> float:
        stack = self.config.model.stack
        return stack.ponder_weight if isinstance(stack, UniversalStackConfig) else 0.0

    def _next_groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets (b t) of the next step, in the parts that are computed one after the other."""
        tokens, targets = (torch.from_numpy(array).to(self.runtime.device) for array in self.lanes.next())
        parts = self.config.train.grad_accum
        return list(zip(tokens.tensor_split(parts), targets.tensor_split(parts), strict=True))

    def _next_nats(self) -> float:
        """Mean nats a token that the next step would find without dropout; the run stays where it is."""
        position = self.lanes.position
        groups = self._next_groups()
        self.lanes.position = position
        self.model.eval()
        with torch.inference_mode(), self.runtime.autocast():
            # Forks, because reading under inference mode may write into the memory it is given.
            states = [state.fork() for state in self.states]
            nats = [self.model.nll(x, y, state)[0].sum() for (x, y), state in zip(groups, states, strict=True)]
        return torch.stack(nats).sum().item() / defaults.tokens_per_step(self.config.train)

    def validation_bits(self, held_out: TokenFile, stop: Callable[[], bool]) -> float | None:
        """Bits per byte of the first `VALIDATION_TOKENS` of a text that is not empty, with memory as in evaluation.

        In the number type of training, and with the text's average bytes a token: a quick guide, not the score. None
        when stopped.

        Raises:
            DivergedError: The weights give no finite score.
        """
        train = self.config.train
        ids = held_out.ids[:VALIDATION_TOKENS]
        scan = EvalLoader(ids, batch_size=8, segment_len=train.segment_len, warm=0, start_id=self.lanes.start_id)
        total = 0.0
        self.model.eval()
        with torch.inference_mode(), self.runtime.autocast():
            state = self.model.init_state(
                scan.batch_size,
                mem_len=train.mem_len,
                segment_len=train.segment_len,
                offsets=scan.starts.tolist(),
            )
            for window in scan:
                if stop():
                    return None
                x, y = (torch.from_numpy(array).to(self.runtime.device) for array in (window.tokens, window.targets))
                nll, state = self.model.nll(x, y, state)
                total += nll.double().cpu().masked_select(torch.from_numpy(window.scored)).sum().item()
        if not math.isfinite(total):
            raise DivergedError(f"held-out text has no finite score after step {self.step}.")
        return total / len(ids) / math.log(2) * len(held_out) / held_out.n_bytes

    def check_finite(self) -> None:
        """Refuses to let anything be saved that training could not go on from.

        Raises:
            DivergedError: A weight, or what optimizers or lanes remember, is NaN or infinite, or the loss of the next
                step would be absurd: the weights may have left all bounds before the loss shows it.
        """
        kept: dict[str, dict[str, torch.Tensor]] = {
            "weights": dict(self.model.named_parameters()),
            "optimizer state": self.optimizers.tensors(),
            "memory": {f"{i}.{name}": t for i, state in enumerate(self.states) for name, t in state.tensors().items()},
        }
        for what, tensors in kept.items():
            for name, tensor in tensors.items():
                if not bool(tensor.isfinite().all()):
                    raise DivergedError(f"the {what} of '{name}' is no longer finite after step {self.step}.")
        if self.step and not (nats := self._next_nats()) < ABSURD_NATS:
            raise DivergedError(f"the loss has risen to {nats:.3g} nats a token after step {self.step}.")


def make_training_run(config: Config, runtime: Runtime, train_ids: TokenFile, start_id: int) -> TrainingRun:
    """A run that has taken no step: freshly initialized, at the beginning of the text, with empty memory."""
    torch.manual_seed(config.runtime.seed or 0)
    model = build_model(config.model).to(runtime.device)
    train = config.train
    assert train.lr is not None
    native = has_bfloat16_units(runtime.device)
    optimizers = Optimizers(model, train, lr=train.lr, native_bfloat16=native)
    if config.runtime.compile:
        compile_stack(model.stack)
    lanes = TrainLoader(train_ids.ids, batch_size=train.batch_size, segment_len=train.segment_len, start_id=start_id)
    return TrainingRun(
        config=config,
        runtime=runtime,
        model=model,
        optimizers=optimizers,
        lanes=lanes,
        states=init_states(model, config, lanes.starts.tolist()),
        bytes_per_token=train_ids.n_bytes / len(train_ids),
    )


def init_states(model: LanguageModel, config: Config, offsets: list[int]) -> list[State]:
    """Empty training memory, one state for each group of lanes, which begin at these places of the text."""
    train = config.train
    return [
        model.init_state(
            len(part),
            mem_len=train.mem_len,
            segment_len=train.segment_len,
            span=train.span,
            memory="hidden",
            offsets=part.tolist(),
        )
        for part in torch.tensor(offsets).tensor_split(train.grad_accum)
    ]
