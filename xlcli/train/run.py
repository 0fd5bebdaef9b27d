"""One training run in memory: model, optimizers, lanes of text, their memory, counters; and one step of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from xlcli.config import Config
from xlcli.errors import DivergedError
from xlcli.model.build import build_model
from xlcli.model.lm import LanguageModel
from xlcli.optim import Optimizers, schedule
from xlcli.parallel import Runtime, has_bfloat16_units
from xlcli.state import State
from xlcli.text.segments import Lanes, Scan
from xlcli.text.tokens import TokenFile

WARMUP_STEPS = 40
"""Default warm-up; a tenth of a budget given in steps when that is shorter."""


VALIDATION_TOKENS = 2**15
"""Held-out tokens scored in the middle of a run; its end scores more."""


@dataclass
class Run:
    """Everything that changes while training. `seconds` is the time spent before this process began."""

    config: Config
    runtime: Runtime
    model: LanguageModel
    optimizers: Optimizers
    lanes: Lanes
    states: list[State]
    bytes_per_token: float
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_bits: float = math.inf
    best_step: int | None = None
    warmup_steps: int = field(init=False)

    def __post_init__(self) -> None:
        train = self.config.train
        limit = WARMUP_STEPS if train.max_steps is None else min(WARMUP_STEPS, train.max_steps // 10)
        self.warmup_steps = limit if train.warmup_steps is None else train.warmup_steps

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

    def take_step(self, fraction: float) -> tuple[float, float, float]:
        """One update. Returns mean nats a token, gradient norm and learning-rate factor.

        Raises:
            DivergedError: Loss or gradient is not finite; weights, optimizers and memory on disk are untouched by it.
        """
        train = self.config.train
        tokens, targets = (torch.from_numpy(array).to(self.runtime.device) for array in self.lanes.next())
        self.model.train()
        self.optimizers.zero_grad()
        count = tokens.numel()
        nats = torch.zeros((), device=self.runtime.device)
        groups = zip(tokens.tensor_split(train.grad_accum), targets.tensor_split(train.grad_accum), strict=True)
        for group, (x, y) in enumerate(groups):
            with self.runtime.autocast():
                nll, self.states[group] = self.model.nll(x, y, self.states[group])
            loss = nll.sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            nats += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip or math.inf)
        if not (math.isfinite(nats.item()) and math.isfinite(norm.item())):
            raise DivergedError(
                f"the loss or its gradient is no longer a finite number at step {self.step + 1}.",
                "Resume from the last checkpoint with --resume and a lower --lr.",
            )
        factor = schedule(fraction, self.step, warmup_steps=self.warmup_steps, decay=train.decay, final=train.final_lr)
        self.optimizers.step(factor)
        self.step += 1
        self.tokens += count
        return nats.item(), norm.item(), factor

    def held_out_bits(self, held_out: TokenFile) -> float | None:
        """Bits per byte of the first `VALIDATION_TOKENS` of a text, with memory as in evaluation; None if it is empty.

        In the number type of training, and with the text's average bytes a token: a quick guide, not the score.
        """
        train = self.config.train
        ids = held_out.ids[:VALIDATION_TOKENS]
        if len(ids) == 0:
            return None
        scan = Scan(ids, batch_size=8, segment_len=train.segment_len, warm=0, start_id=self.lanes.start_id)
        total = 0.0
        self.model.eval()
        with torch.inference_mode(), self.runtime.autocast():
            state = self.model.start(scan.batch_size, mem_len=train.mem_len, segment_len=train.segment_len)
            for window in scan:
                x, y = (torch.from_numpy(array).to(self.runtime.device) for array in (window.tokens, window.targets))
                nll, state = self.model.nll(x, y, state)
                total += nll.double().cpu().masked_select(torch.from_numpy(window.scored)).sum().item()
        return total / len(ids) / math.log(2) * len(held_out) / held_out.n_bytes


def make_run(config: Config, runtime: Runtime, train_ids: TokenFile, start_id: int) -> Run:
    """A run that has taken no step: freshly initialised, at the beginning of the text, with empty memory."""
    torch.manual_seed(config.runtime.seed)
    model = build_model(config.model).to(runtime.device)
    train = config.train
    assert train.lr is not None
    native = has_bfloat16_units(runtime.device)
    return Run(
        config=config,
        runtime=runtime,
        model=model,
        optimizers=Optimizers(model, train, lr=train.lr, native_bfloat16=native),
        lanes=Lanes(train_ids.ids, batch_size=train.batch_size, segment_len=train.segment_len, start_id=start_id),
        states=start_states(model, config),
        bytes_per_token=train_ids.n_bytes / len(train_ids),
    )


def start_states(model: LanguageModel, config: Config) -> list[State]:
    """Empty training memory, one state for each group of lanes."""
    train = config.train
    rows = [len(part) for part in torch.arange(train.batch_size).tensor_split(train.grad_accum)]
    return [
        model.start(n, mem_len=train.mem_len, segment_len=train.segment_len, span=train.span, memory="hidden")
        for n in rows
    ]
