"""Training on several ranks: the first one prepares the run, rows of a batch are divided, and gradients are averaged.

By default each rank has the whole model (`DistributedDataParallel`). With `runtime.shard` parameters, gradients and
optimizer states are divided among the ranks (`fully_shard`: FSDP2), and a block gathers its parameters when it is used.
Memory never leaves the rank of its sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xlcli import errors
from xlcli.config import Config
from xlcli.errors import ConfigError, InvalidSettingError, XLError
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel, ScoreOutput
from xlcli.model.reversible import ReversibleStack
from xlcli.model.stack import AdaptiveStack
from xlcli.ops.layers import Dropout, Share
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime


class _Score(nn.Module):
    """`LanguageModel.score` as a module."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> ScoreOutput:
        return self.model.score(*arguments)


def parallel(
    model: LanguageModel, config: Config, runtime: Runtime
) -> tuple[Callable[..., ScoreOutput], Callable[[], AbstractContextManager[Any]]]:
    """Prepares a model, which is equal on all ranks, for training on them. Optimizers must be made afterwards.

    Changes the model: its dropout draws the part of this rank of a mask for all rows, and with `runtime.shard` this
    rank keeps a part of each parameter.

    Returns two functions. The first is `LanguageModel.score` in training. The second makes a context for the passes of
    a microbatch that is not the last of its step: gradients are averaged over the ranks after the last one only.
    """
    ranks = runtime.ranks
    if ranks.size == 1:
        return model.score, nullcontext
    share = Share(ranks.rank, ranks.size)
    for module in model.modules():
        if isinstance(module, Dropout | FullAttention):
            module.share = share
    if config.runtime.shard:
        delayed = shard(model, runtime)
        return model.score, delayed  # `shard` has replaced the method
    from torch.nn.parallel import DistributedDataParallel

    replica = DistributedDataParallel(_Score(model), gradient_as_bucket_view=True)
    replica.broadcast_buffers = False  # as an argument it has another name in torch 2.11 than in 2.13
    return replica, replica.no_sync


def own_rows(config: Config, ranks: Ranks) -> NDArray[np.int64]:
    """Numbers of the sequences of this rank, its part of each microbatch in turn."""
    parts = np.array_split(np.arange(config.train.batch_size), config.train.grad_accum)
    return np.concatenate([part[ranks.rows(len(part))] for part in parts])


def shard(model: LanguageModel, runtime: Runtime) -> Callable[[], AbstractContextManager[None]]:
    """Divides the parameters of each block, and the other ones; or the parameters of the whole model at once.

    Replaces `model.score` by a method that gathers them.

    Some blocks are gathered with the rest of the model, for its whole forward or backward pass: blocks that share a
    parameter, blocks of a reversible stack, whose branches are called apart, and blocks of an adaptive stack, which run
    until every token has halted.

    If products are in bfloat16, blocks are gathered so, and their gradients are averaged in float32. Tables of token
    vectors, whose gradients are sums over all tokens of one kind, and hashed attention, whose products are in float32,
    remain in float32. Returns the context of `parallel`.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Autocast chooses the types of activations.
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = runtime.ranks.mesh(runtime.device.type)
    calls_blocks_whole = not isinstance(model.stack, ReversibleStack | AdaptiveStack)
    if calls_blocks_whole and not _share_parameters(model):
        for block in model.stack.blocks:
            policy = MixedPrecisionPolicy()
            if runtime.dtype == torch.bfloat16 and not isinstance(block.attention, LSHAttention):
                policy = narrow
                if block.vectors is not None:  # remains in float32
                    fully_shard(block.vectors, mesh=mesh)
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # averages are copied into the parts
    register_fsdp_forward_method(model, "score")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    assert isinstance(model, FSDPModule)
    root: FSDPModule = model

    @contextmanager
    def delayed() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    return delayed


def _share_parameters(model: LanguageModel) -> bool:
    """True if a parameter of a block also belongs to another module."""
    owners: dict[Tensor, str] = {}  # block of each parameter, "" for those of the rest of the model
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = re.match(r"stack\.blocks\.\d+\.", name)
        owner = "" if block is None else block[0]
        if owners.setdefault(parameter, owner) != owner:
            return True
    return False


@contextmanager
def announce_start(ranks: Ranks) -> Iterator[None]:
    """Context in which the first rank prepares a run, while the others are in `wait_for_start`.

    It publishes the checkpoint as soon as there is one. If the context ends first, the others get its error from here,
    or an empty entry, which says that there is no run.
    """
    ranks.withdraw("run")  # what an earlier run has published
    ranks.barrier()
    end: dict[str, str] = {}
    try:
        yield
    except XLError as error:
        # The other ranks make the error again from its sentence. That of an `InvalidSettingError` is finished here.
        kind = type(error)
        if isinstance(error, InvalidSettingError):
            kind = ConfigError
        end = {"error": kind.__name__, "message": error.message, "remedy": error.remedy}
        raise
    finally:
        ranks.publish("run", end)


def wait_for_start(ranks: Ranks, stop: Callable[[], bool]) -> Path | None:
    """Checkpoint with which to begin, on another rank than the first; waits for it. None: there is no run.

    Raises the error of the first rank, or `StoppedEarlyError` if `stop` became true.
    """
    ranks.barrier()
    started = ranks.published("run", stop)
    if "error" in started:
        error: XLError = getattr(errors, started["error"])(started["message"], started["remedy"])
        error.is_of_first_rank = True
        raise error
    if "checkpoint" not in started:
        return None
    return Path(started["checkpoint"])
