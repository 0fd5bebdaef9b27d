"""A model in training: its optimizers, loader, memory states and counters; its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.config import Config, RandomAttentionConfig, Tree, UniversalStackConfig, validate
from xlcli.errors import DivergedError, StateError
from xlcli.files.tensors import TensorInfo, prefixed, type_name, with_prefix
from xlcli.model.build import build_model
from xlcli.ops.layers import has_bfloat16_units
from xlcli.optim import Optimizers, ends_with_budget, lr_factor
from xlcli.ranks import divided, local
from xlcli.runtime import Runtime, compile_stack
from xlcli.state import State
from xlcli.store.weights import weights as weights_of
from xlcli.text.loaders import TrainLoader
from xlcli.text.tokens import TokenFile
from xlcli.training.checkpoint import Checkpoint, gathered, generator_states
from xlcli.training.defaults import BUDGETS
from xlcli.training.narrow import narrow_weights
from xlcli.training.parallel import own_rows, parallel
from xlcli.training.schedule import Counters, Patience

LR_DIVISOR = 3.0  # divisor of the learning rates after a roll-back, and in the remedy for a run that diverged
Microbatch = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets and document positions (b t; on the CPU)


class Update(NamedTuple):
    """Figures of one step; see `events.Step`."""

    nats: float
    lr: float
    grad_norm: float
    mean_steps: float | None


class Budget(NamedTuple):
    """What is used up of a budget in steps, tokens or seconds, and the budget."""

    used: float
    limit: float


class TrainingRun:
    """A model in training.

    Each of several ranks has the loader and memory of its sequences; the rest is equal on all of them.

    `config` is complete (`defaults.fill_in`), `start_id` the input at the beginning of the text, and `line_ends` (v) is
    true for the ids that end a line, for `TrainConfig.line_share`. If `weights` are given, the run starts from them and
    validates them before the first step, so the kept ones are never worse.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        train_ids: TokenFile,
        start_id: int,
        line_ends: NDArray[np.bool_] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        train, ranks = config.train, runtime.ranks
        seed = config.runtime.seed or 0
        assert train.lr is not None
        self.config, self.runtime = config, runtime
        # The order counts: new weights are drawn from this seed, and parameters are divided among the ranks before
        # optimizers are made for them.
        torch.manual_seed(seed)
        self.model = build_model(config.model).to(runtime.device)
        if weights is not None:
            with torch.no_grad():
                for name, tensor in weights_of(self.model).items():
                    tensor.copy_(weights[name])
        self.score, self.delayed = parallel(self.model, config, runtime)
        self.narrow_weights = narrow_weights(self.model, config, runtime)
        # Ranks may have different processors, but need one number type of Muon.
        native_bfloat16 = all(ranks.gather(has_bfloat16_units(runtime.device)))
        self.optimizers = Optimizers(self.model, train, lr=train.lr, native_bfloat16=native_bfloat16, ranks=ranks)
        self.model.stack.recompute_activations = train.recompute_activations
        if config.runtime.compile:
            compile_stack(self.model.stack)
        self.loader = TrainLoader(
            train_ids.ids,
            batch_size=train.batch_size,
            start_id=start_id,
            documents=train_ids.documents,
            rows=own_rows(config, ranks),
            seed=seed if train.shuffle else None,
            pieces_apart=config.reads_pieces_apart,
            line_share=train.line_share,
            line_ends=line_ends,
        )
        self.bytes_per_token = train_ids.n_bytes / len(train_ids)
        self._ahead: dict[int, list[Microbatch]] = {}  # batches on their way to a GPU, by what was read before them
        self.counters = Counters(validation_due=weights is not None)
        self.skip_to(0)  # sets `states`

    def count(self, **changes: object) -> None:
        self.counters = self.counters.model_copy(update=changes)

    # Steps

    def train_step(self, fraction: float) -> Update:
        """Trains on the next batch of text by one step of the optimizers, and returns the figures of the step.

        `fraction` is the share of the budget that is spent: the schedule sets the learning rate by it. The memory in
        `states` and the counters move on. `DivergedError` if loss or gradient is not finite: weights and optimizers are
        then unchanged, but the text counts as read, so that a run which goes back skips it.
        """
        train, counters = self.config.train, self.counters
        self._redraw_features()
        microbatches = self.next_batch()
        self.count(n_read=counters.n_read + train.segment_len)
        mean_nats, mean_steps = self._compute_gradients(microbatches)
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.runtime.ranks.size > 1:
            mean_nats, mean_steps, norm = self._over_ranks(mean_nats, mean_steps, norm)
        if self.runtime.device.type == "cuda":  # a GPU still computes this batch while the next one is loaded
            self._ahead = {self.counters.n_read: self._load_batch(self.counters.n_read)}
        # This waits for the device: weights must not change before the loss is known to be finite.
        nats, grad_norm, ponder_steps = torch.stack((mean_nats, norm, mean_steps)).tolist()
        if not math.isfinite(nats) or not math.isfinite(grad_norm):
            raise DivergedError(f"the loss or its gradient is not finite at step {counters.step + 1}.")
        if train.grad_clip and grad_norm > train.grad_clip:
            factor = train.grad_clip / (norm + 1e-6)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        lr_share = lr_factor(train, fraction, counters.step) / LR_DIVISOR**counters.rollbacks
        self.optimizers.step(lr_share, counters.step)
        self.count(step=counters.step + 1, tokens=counters.tokens + train.batch_size * train.segment_len)
        return Update(nats, lr=(train.lr or 0.0) * lr_share, grad_norm=grad_norm, mean_steps=ponder_steps or None)

    def _over_ranks(self, nats: Tensor, steps: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means of loss and ponder steps over all ranks, which must all call it, and norm of the whole gradient."""
        ranks = self.runtime.ranks
        sums = ranks.sum(torch.stack((nats.double(), steps.double(), norm.double().square())))
        mean_nats, mean_steps = (sums[:2] / ranks.size).unbind()
        if self.config.runtime.shard:  # each rank has a part of the gradient, so their squares add up
            return mean_nats, mean_steps, sums[2].sqrt()
        return mean_nats, mean_steps, norm.double()

    def _gradients(self) -> list[Tensor]:
        """Gradients of the parameters, of divided ones the part of this rank."""
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _compute_gradients(self, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor]:
        """Replaces the gradients by those of these microbatches, and `states` by the memory after them.

        Returns the mean loss in nats of the tokens of this rank, and the mean number of ponder steps: blocks that a
        universal stack applied to a token, 0 in another stack.
        """
        n_tokens = len(self.loader.starts) * self.config.train.segment_len
        stack = self.config.model.stack
        self.model.train()
        if self.runtime.device.type == "cuda" and self.runtime.ranks.size == 1:
            self.model.zero_grad(set_to_none=True)  # gradients are then written, instead of added to zeros
        else:
            torch._foreach_zero_(self._gradients())
        mean_nats, mean_steps = torch.zeros((2,), device=self.runtime.device)
        for i, (inputs, targets, documents) in enumerate(microbatches):
            is_last = i + 1 == len(microbatches)
            exchange = nullcontext if is_last else self.delayed  # ranks average their gradients once, at the end
            with exchange(), self.narrow_weights():
                with self.runtime.autocast():
                    nll, state, ponder, _ = self.score(inputs, targets, self.states[i], documents)
                loss = nll.sum() / n_tokens
                mean_nats += loss.detach()
                if ponder is not None and isinstance(stack, UniversalStackConfig):
                    loss = loss + stack.ponder_weight * ponder.cost.sum() / n_tokens
                    mean_steps += ponder.steps.sum() / n_tokens
                loss.backward()  # type: ignore[no-untyped-call]
                self.states[i] = state.overwrite_earlier()
        for parameter in self.model.parameters():
            if parameter.grad is None:  # nothing in this batch depends on it
                parameter.grad = torch.zeros_like(parameter)
        return mean_nats, mean_steps

    def next_batch(self) -> list[Microbatch]:
        """The batch after what was read, in microbatches."""
        n_read = self.counters.n_read
        return self._ahead.pop(n_read, None) or self._load_batch(n_read)

    def _load_batch(self, n_read: int) -> list[Microbatch]:
        """The batch after `n_read` tokens of each sequence. Nothing waits until it is on a GPU."""
        n_parts, device = self.config.train.grad_accum, self.runtime.device
        batch = self.loader.batch(n_read, self.config.train.segment_len)
        inputs = self._from_host(batch.inputs).to(device, non_blocking=True).tensor_split(n_parts)
        targets = self._from_host(batch.targets).to(device, non_blocking=True).tensor_split(n_parts)
        documents: list[Tensor | None] = [None] * n_parts
        if batch.documents is not None:
            documents = [*self._from_host(batch.documents).tensor_split(n_parts)]
        return list(zip(inputs, targets, documents, strict=True))

    def _from_host(self, values: NDArray[Any]) -> Tensor:
        """Tensor of an array, in pinned memory if the device is a GPU, which copies it without a wait."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.runtime.device.type == "cuda" else tensor

    def skip_to(self, n_read: int) -> None:
        """Continues after `n_read` tokens of each sequence of the loader, with empty memory."""
        train = self.config.train
        self.count(n_read=n_read)
        self.states: list[State] = []  # memory of each microbatch
        for starts in torch.from_numpy(self.loader.starts).tensor_split(train.grad_accum):
            offsets = (starts + n_read).tolist()
            state = self.model.init_state(
                len(starts), memory=train.memory, offsets=offsets, **train.reading.init_arguments
            )
            self.states.append(state)

    def _redraw_features(self) -> None:
        """Draws new random features in the layers whose redraw interval has ended, and empties their memories."""
        step = self.counters.step
        if step == 0:
            return
        due_layers: set[int] = set()
        for i, layer in enumerate(self.config.model.attentions):
            if isinstance(layer, RandomAttentionConfig) and layer.redraw_every and step % layer.redraw_every == 0:
                due_layers.add(i)
        if due_layers:
            seed = (self.config.runtime.seed or 0) + step  # so that all ranks, and a resumed run, draw the same
            self.model.stack.redraw(due_layers, torch.Generator().manual_seed(seed))
            self.states = [self.model.reset_layers(state, due_layers) for state in self.states]

    # Budget

    @property
    def patience(self) -> Patience:
        train = self.config.train
        decay = train.decay_fraction if ends_with_budget(train) else 0.0
        return Patience(train.patience, decay, self.counters)

    def fraction(self, seconds: float) -> float:
        """Share of the run that is done, 0 to 1, after `seconds` of training: of its budget, or of a shortened one."""
        return self.patience.fraction(self.spent(seconds))

    def spent(self, seconds: float) -> float:
        """Share of the budget spent, 0 to 1, after `seconds` of training."""
        shares = [budget.used / budget.limit for budget in self.budgets(seconds).values()]
        return min(1.0, max(shares, default=0.0))

    def budgets(self, seconds: float) -> dict[str, Budget]:
        """The budgets by their keys in `train`, after `seconds` of training; time reserved for the end is used."""
        used = {
            "max_steps": self.counters.step,
            "max_tokens": self.counters.tokens,
            "max_time": seconds + self.counters.reserve,
        }
        budgets: dict[str, Budget] = {}
        for key in BUDGETS:
            limit = getattr(self.config.train, key)
            if limit is not None:
                budgets[key] = Budget(used[key], limit)
        return budgets

    # Checkpoints

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint by its files, whole on the first rank; all ranks must call it."""
        ranks = self.runtime.ranks
        memory: dict[str, Tensor] = {}
        for i, state in enumerate(self.states):
            if ranks.size > 1:  # in RAM, of which the first rank needs as much as all devices have memory of sequences
                state = state.map(Tensor.cpu).map(ranks.gather_rows)
            memory |= prefixed(f"{i}.", state.tensors())
        return {
            "weights": gathered(weights_of(self.model), ranks),
            "optimizer": gathered(self.optimizers.tensors(), ranks),
            "memory": memory,
            "random": generator_states(),
        }

    def describe(self) -> Tree:
        """Entries of `state.json` that belong to the tensors: counters, and metadata of the states."""
        states = [state.describe() for state in self.states]
        return {**self.counters.model_dump(), "states": states}

    def restore(self, saved: Checkpoint) -> None:
        """Replaces weights, optimizer state, memory and counters by those of a checkpoint of the same configuration.

        Random-number generators stay as they are. `StateError` if the memory does not fit the model, `CheckpointError`
        if a tensor is damaged; built-in errors if an entry is missing or malformed.
        """
        present = weights_of(self.model)
        expected = {name: TensorInfo(type_name(tensor.dtype), (*tensor.shape,)) for name, tensor in present.items()}
        saved_weights = saved.tensors("weights", expected)
        with torch.no_grad():
            for name, tensor in present.items():
                # Each rank reads the whole weight, and keeps its part.
                whole = saved_weights[name].to(tensor.device)
                local(tensor).copy_(local(divided(whole, tensor)))
        self.optimizers.load(saved.tensors("optimizer"))
        memory = saved.tensors("memory")
        descriptions = saved.facts["states"]
        for i, description in zip(range(len(self.states)), descriptions, strict=True):  # one for each microbatch
            state = State.restore(with_prefix(f"{i}.", memory), description).map(self._on_this_rank)
            if not self.model.is_compatible(state):
                raise StateError("the memory does not fit the model.", "Train again with --overwrite.")
            self.states[i] = state
        self.counters = validate(Counters, {name: saved.facts[name] for name in Counters.model_fields})

    def _on_this_rank(self, tensor: Tensor) -> Tensor:
        """Rows of this rank of a tensor that has one for each sequence of the run, on its device."""
        ranks = self.runtime.ranks
        if ranks.size > 1:
            tensor = tensor[ranks.rows(len(tensor))].clone()
        return tensor.to(self.runtime.device)
