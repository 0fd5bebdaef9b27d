"""Training on several ranks: the rows of a batch are divided among them, and gradients are averaged over them.

By default each rank has the whole model (`DistributedDataParallel`). With `runtime.shard` parameters, gradients and
optimizer states are divided among the ranks (`fully_shard`: FSDP2), and a block gathers its parameters when it is used.
Memory never leaves the rank of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xlcli.config import Config
from xlcli.config.attention.softmax import CompressiveAttentionConfig
from xlcli.model.attention.full import FullAttention
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.ops.dropout import Dropout, Share
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime


@dataclass(frozen=True)
class Parallel:
    """The call of a model in training, and when its gradients are averaged.

    Attributes:
        score: `LanguageModel.score`.
        delayed: Context of the forward and backward passes of a microbatch that is not the last of its step: gradients
            are added up, and averaged over the ranks with those of the last one.
    """

    score: Callable[..., ScoreOutput]
    delayed: Callable[[], AbstractContextManager[Any]] = nullcontext


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
        return Parallel(replica, replica.no_sync)
    from xlcli.training.shard import shard

    delayed = shard(model, runtime)  # replaces model.score
    return Parallel(model.score, delayed)


def own_rows(config: Config, ranks: Ranks) -> NDArray[np.int64] | None:
    """Numbers of the sequences of this rank, its part of each microbatch in turn; None: all."""
    if ranks.size == 1:
        return None
    parts = np.array_split(np.arange(config.train.batch_size), config.train.grad_accum)
    return np.concatenate([part[ranks.rows(len(part))] for part in parts])
