"""Training on several ranks: the rows of a batch are divided among them, and gradients are averaged over them.

By default each rank has the whole model (`DistributedDataParallel`). With `runtime.shard` parameters, gradients and
optimizer states are divided among the ranks (`fully_shard`: FSDP2), and a block gathers its parameters when it is used.
Memory never leaves the rank of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xlcli.config import Config, UniversalStackConfig
from xlcli.config.attention.random import LSHAttentionConfig
from xlcli.config.attention.softmax import CompressiveAttentionConfig
from xlcli.errors import ConfigError
from xlcli.model.attention.full import FullAttention
from xlcli.model.dropout import Dropout
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.ops.dropout import Share
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime
from xlcli.training.balance import WorkTimer


@dataclass(frozen=True)
class Parallel:
    """The call of a model in training, and when its gradients are averaged.

    Attributes:
        score: `LanguageModel.score`.
        delayed: Context of the forward and backward passes of a microbatch that is not the last of its step: gradients
            are added up, and averaged over the ranks with those of the last one.
        timer: Own work of this rank in a step.
    """

    score: Callable[..., ScoreOutput]
    delayed: Callable[[], AbstractContextManager[Any]] = nullcontext
    timer: WorkTimer = field(default_factory=WorkTimer)


class _Score(nn.Module):
    """`LanguageModel.score` as a module."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> ScoreOutput:
        return self.model.score(*arguments)


def parallel(model: LanguageModel, config: Config, runtime: Runtime) -> Parallel:
    """Prepares a model, which is equal on all ranks, for training on them. Optimizers are made afterwards."""
    ranks = runtime.ranks
    if ranks.size == 1:
        return Parallel(model.score)
    share = Share(ranks.rank, ranks.size)
    for module in model.modules():
        if isinstance(module, Dropout | FullAttention):
            module.share = share
    if not config.runtime.shard:
        from torch.nn.parallel import DistributedDataParallel

        pools = any(isinstance(layer, CompressiveAttentionConfig) for layer in config.model.attentions)
        replica = DistributedDataParallel(
            _Score(model),
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=pools,  # the first segments have no block to pool
        )
        return Parallel(replica, replica.no_sync, WorkTimer(runtime.device))
    from xlcli.training.shard import shard

    timer = WorkTimer(runtime.device)
    delayed = shard(model, runtime, timer)
    return Parallel(model.score, delayed, timer)


def check_text(paths: Sequence[str], ranks: Ranks) -> None:
    """`ConfigError` if the text is standard input, which only one process can read."""
    if ranks.size > 1 and "-" in paths:
        raise ConfigError("several processes cannot read standard input.", "Give the text as a file.")


def check(config: Config, ranks: Ranks) -> None:
    """`ConfigError` if a run with this configuration cannot be divided among the ranks."""
    if ranks.size == 1:
        return
    train, model, n = config.train, config.model, ranks.size
    unit = n * train.grad_accum
    if train.batch_size % unit:
        below = train.batch_size // unit * unit
        nearest = f"--batch-size {below} or {below + unit}" if below else f"--batch-size {unit}"
        parts = f"{n} processes" + (f" with {train.grad_accum} microbatches" if train.grad_accum > 1 else "")
        reason = f"is {train.batch_size}, which {parts} cannot divide equally"
        raise ConfigError(f"train.batch_size {reason}.", f"Use {nearest}.", key="train.batch_size", reason=reason)
    if isinstance(model.stack, UniversalStackConfig) and model.stack.act and any(model.dropout.model_dump().values()):
        _refuse("model.dropout", "with adaptive computation time depends on the number of processes", "Set it to 0")
    hashed = any(isinstance(layer, LSHAttentionConfig) for layer in model.attentions)
    if hashed and model.dropout.attention:
        _refuse("model.dropout.attention", "with LSH attention depends on the number of processes", "Set it to 0")
    if not config.runtime.shard:
        return
    if config.runtime.compile:
        _refuse("runtime.shard", "and runtime.compile exclude each other", "Leave one of them out")
    if config.runtime.dtype == "float16":
        _refuse("runtime.shard", "cannot scale the loss of float16", "Use --dtype bfloat16")
    if model.norm.placement == "rezero":
        _refuse("runtime.shard", "cannot divide the factors of ReZero", "Use another model.norm.placement")


def _refuse(key: str, reason: str, remedy: str) -> None:
    raise ConfigError(f"{key} {reason}.", f"{remedy}, or train in a single process.", key=key, reason=reason)


def own_rows(config: Config, ranks: Ranks) -> NDArray[np.int64] | None:
    """Numbers of the sequences of this rank, its part of each microbatch in turn; None: all."""
    if ranks.size == 1:
        return None
    parts = np.array_split(np.arange(config.train.batch_size), config.train.grad_accum)
    return np.concatenate([part[ranks.rows(len(part))] for part in parts])
