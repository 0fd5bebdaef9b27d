"""Optimizers and learning-rate schedule.

Muon (Jordan 2024) updates the matrices of blocks, AdamW embeddings, head, norms and biases; both are PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from xlcli.config import TrainConfig
from xlcli.errors import CheckpointError
from xlcli.files.tensors import prefixed
from xlcli.ranks import SINGLE, Ranks, divided, local, whole

ADAM_RATE = 1e-2  # default learning rate of AdamW beside Muon
WARMUP_STEPS = 40  # default warmup in steps
WARMUP_SHARE = 0.1  # maximum share of the budget of the default warmup
MUON_BATCH = {"cpu": 2**19, "cuda": 2**26}
"""Maximum number of matrix elements that are orthogonalized at once, by device type (measured on a CPU)."""
POLYNOMIALS = ((8.09337, -23.62043, 17.44615), (3.63659, -2.72193, 0.53655), (2.6613, -1.97715, 0.45262))
"""Coefficients of x, x^3 and x^5 for each iteration of `orthogonalize`: the polynomial that is nearest to 1 on the
interval from 0.01 to 1, and on those that it becomes (Amsel et al. 2025, "The Polar Express", section 3)."""
ADAM_UPDATE = 0.2  # root mean square of the elements of an update, as of AdamW (`match_rms_adamw` of PyTorch)
AVERAGE = "average"  # quantity of an optimizer's state: the average of the weight
_ANEW = "Train again with --overwrite."


class BatchedMuon(Muon):
    """PyTorch's Muon with the same state, better polynomials, and matrices of one shape orthogonalized together.

    `dtype` is the number type of the orthogonalization. PyTorch's is always bfloat16, which a CPU without bfloat16
    units multiplies at a fifth of the float32 rate. Of several ranks, each orthogonalizes a part of the matrices.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, dtype: torch.dtype, ranks: Ranks = SINGLE, **settings: Any
    ) -> None:
        super().__init__(parameters, adjust_lr_fn="match_rms_adamw", **settings)
        self.dtype = dtype
        self.ranks = ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for parameters in batches_of_one_shape(with_gradient, self.ranks.size):
                updates = torch.stack([whole(update) for update in self._nesterov(parameters, group["momentum"])])
                directions = self._directions(updates.to(self.dtype), group)
                # Each rank changes its part of divided parameters.
                weights, steps = [], []
                for parameter, direction in zip(parameters, directions, strict=True):
                    weights.append(local(parameter))
                    steps.append(local(divided(direction, parameter)))
                scale = ADAM_UPDATE * math.sqrt(max(parameters[0].shape))
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, steps, alpha=-group["lr"] * scale)

    def _directions(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Orthogonal matrices (n r c) for the updates (n r c), of which each rank makes a part."""
        n_each = math.ceil(len(updates) / self.ranks.size)
        first = self.ranks.rank * n_each
        matrices = orthogonalize(updates[first : first + n_each], group["eps"])
        n_missing = n_each - len(matrices)
        if n_missing:  # ranks exchange tensors of one shape
            matrices = torch.cat((matrices, updates.new_zeros(n_missing, *updates.shape[1:])))
        return self.ranks.gather_rows(matrices, everywhere=True)[: len(updates)]

    def _nesterov(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Gradients with Nesterov momentum (r c); updates the momentum buffers, which the first step makes."""
        gradients, buffers = [], []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            gradients.append(parameter.grad)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, buffers, momentum))


def batches_of_one_shape(parameters: Iterable[Tensor], n_ranks: int = 1) -> Iterator[list[Tensor]]:
    """Parameters of equal shape in lists of at most `MUON_BATCH` elements, or one parameter, for each of some ranks."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    for shape, matrices in by_shape.items():
        n_for_rank = max(1, MUON_BATCH[matrices[0].device.type] // shape.numel())
        n_at_once = n_for_rank * n_ranks
        for start in range(0, len(matrices), n_at_once):
            yield matrices[start : start + n_at_once]


def orthogonalize(matrices: Tensor, eps: float) -> Tensor:
    """Iteration (n r c) toward the nearest orthogonal matrices, in their type (Jordan 2024; `POLYNOMIALS`).

    Singular values begin below 1, because they are divided by the fourth root of the sum of their fourth powers. Those
    above 0.01 end within 0.27 of 1, but for rounding: in bfloat16 the largest reach 1.4, more in very small matrices.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalize(matrices.mT, eps).transpose(1, 2)
    x: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    gram = x @ x.mT
    norm = 1.01 * gram.norm(dim=(1, 2), keepdim=True).sqrt().clamp(min=eps)  # rounded products must not exceed it
    x, gram = x / norm, gram / norm.square()
    for i, (a, b, c) in enumerate(POLYNOMIALS):
        if i > 0:  # the first one is known from the norm
            gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Optimizers:
    """The optimizers of one model, the average of its weights, and their state by parameter name."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, *, lr: float, native_bfloat16: bool, ranks: Ranks = SINGLE
    ) -> None:
        ids_of_matrices = hidden_matrices(model) if config.optimizer == "muon" else set()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.average_share = config.average_share
        # Parameters by what updates them: Muon, or AdamW with and without weight decay.
        parameters = list(model.parameters())
        hidden: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for parameter in parameters:
            if id(parameter) in ids_of_matrices:
                hidden.append(parameter)
            elif parameter.ndim >= 2:
                decayed.append(parameter)
            else:
                vectors.append(parameter)
        self.optimizers: list[tuple[Optimizer, float]] = []  # each with its peak learning rate
        adam_lr = lr
        if hidden:
            dtype = torch.bfloat16 if native_bfloat16 else hidden[0].dtype
            settings = {"lr": lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
            muon = BatchedMuon(hidden, **settings, dtype=dtype, ranks=ranks)
            self.optimizers.append((muon, lr))
            adam_lr = config.adam_lr or ADAM_RATE
        groups: list[dict[str, Any]] = []
        if decayed:
            groups.append({"params": decayed, "weight_decay": config.weight_decay})
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        adamw = AdamW(groups, lr=adam_lr, betas=config.betas, fused=True)
        self.optimizers.append((adamw, adam_lr))
        for parameter in parameters:
            # Allocated now, next to each other: allocated between the activations of the first backward pass, they
            # would fragment the heap.
            parameter.grad = torch.zeros_like(parameter)

    def step(self, factor: float, n_steps: int) -> None:
        """One update at `factor` times each optimizer's own learning rate; `n_steps` were taken before.

        In the average after step t, step s counts as (s/t)^(1/share) - ((s - 1)/t)^(1/share), so most of it is the last
        `average_share` of the run so far (Karras et al. 2024, "Analyzing and Improving the Training Dynamics of
        Diffusion Models", section 3.1).
        """
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
        if self.average_share:
            weights, averages = self._averages()
            share_of_new = 1.0 - (1.0 - 1.0 / (n_steps + 1)) ** (1.0 / self.average_share)
            torch._foreach_lerp_(averages, weights, share_of_new)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the parameters have the averages of their values, if a step was averaged."""
        weights, averages = self._averages() if self.average_share else ([], [])
        if not weights:
            yield
            return
        present = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, present)

    def _averages(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters that were updated, of divided ones the part of this rank, and their averages, at first copies."""
        weights, averages = [], []
        for optimizer, _ in self.optimizers:
            for parameter, state in optimizer.state.items():
                if AVERAGE not in state:
                    state[AVERAGE] = parameter.detach().clone()
                weights.append(local(parameter.detach()))
                averages.append(local(state[AVERAGE]))
        return weights, averages

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state by name, `parameter:quantity`."""
        tensors: dict[str, Tensor] = {}
        for optimizer, _ in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= prefixed(f"{self.names[id(parameter)]}:", state)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; `CheckpointError` if it does not fit: fused optimizers do not check."""
        for optimizer, _ in self.optimizers:
            optimizer.state.clear()
            quantities = ["step", "exp_avg", "exp_avg_sq"]
            if isinstance(optimizer, Muon):
                quantities = ["momentum_buffer"]
            if self.average_share:
                quantities.append(AVERAGE)
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                name = self.names[id(parameter)]
                keys = {quantity: f"{name}:{quantity}" for quantity in quantities}
                present = [key for key in keys.values() if key in tensors]
                if not present:  # it was not updated
                    continue
                if len(present) < len(quantities):
                    raise CheckpointError(f"the optimizer state of '{name}' is incomplete.", _ANEW)
                for quantity, key in keys.items():
                    optimizer.state[parameter][quantity] = _restored(tensors[key], key, parameter)


def _restored(value: Tensor, name: str, parameter: Tensor) -> Tensor:
    """A saved quantity of a parameter on its device, divided as the parameter; `CheckpointError` if it does not fit."""
    is_step_count = name.endswith(":step")  # of fused AdamW: one number in float32, whatever the parameter
    shape = torch.Size() if is_step_count else parameter.shape
    dtype = torch.float32 if is_step_count else parameter.dtype
    if value.shape != shape or value.dtype != dtype:
        difference = f"{value.dtype} {list(value.shape)}, not {dtype} {list(shape)}"
        raise CheckpointError(f"the optimizer state '{name}' is {difference}.", _ANEW)
    return divided(value.to(parameter.device).clone(), value if is_step_count else parameter)


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the weight matrices of linear layers in the stack, which Muon updates."""
    stack = getattr(model, "stack", model)
    return {id(m.weight) for m in stack.modules() if isinstance(m, nn.Linear) and min(m.weight.shape) > 1}


def warmup_steps(train: TrainConfig) -> int:
    """Steps of learning-rate warmup. With a budget in seconds the default one may end earlier (`lr_factor`)."""
    if train.warmup_steps is not None:
        return train.warmup_steps
    n_warmup = WARMUP_STEPS
    if train.max_steps is not None:
        n_warmup = min(n_warmup, train.max_steps // 10)
    if train.max_tokens is not None:
        n_steps = train.max_tokens // (train.batch_size * train.segment_len)
        n_warmup = min(n_warmup, n_steps // 10)
    return n_warmup


def decay(train: TrainConfig, fraction: float, step: int) -> float:
    """What the schedule leaves of the learning rate, 1 at the end of the warmup; it never rises.

    After this share of the budget, 0 to 1, and this number of steps.
    """
    match train.lr_schedule:
        case "cosine":  # half a cosine over the budget
            return 0.5 * (1.0 + math.cos(math.pi * fraction))
        case "linear":
            return 1.0 - fraction
        case "wsd":  # constant, then a straight line in the last share of the budget (Hu et al. 2024, section 4)
            return min(1.0, (1.0 - fraction) / train.decay_fraction)
        case "inverse_sqrt":  # of the steps, whatever the budget (Vaswani et al. 2017, section 5.3)
            return float(min(1.0, (warmup_steps(train) + 1) / (step + 1)) ** 0.5)
        case "constant":
            return 1.0


def ends_with_budget(train: TrainConfig) -> bool:
    """True if the learning rate decays to the end of the budget. If not, patience can end the run at any step."""
    return train.lr_schedule not in ("inverse_sqrt", "constant")


def lr_factor(train: TrainConfig, fraction: float, step: int) -> float:
    """Learning rate over its peak: warmup by `step`, then decay by this share of the budget to `min_lr_ratio`."""
    warmup = min(1.0, (step + 1) / (warmup_steps(train) + 1))
    if train.warmup_steps is None and train.max_time is not None:  # its number of steps is not known
        warmup = min(1.0, max(warmup, fraction / WARMUP_SHARE))
    left = decay(train, min(max(fraction, 0.0), 1.0), step)
    return warmup * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left)
