"""A model whose parameters, gradients and optimizer states are divided among the ranks (`fully_shard`: FSDP2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel
from xlcli.model.reversible import ReversibleStack
from xlcli.model.universal import AdaptiveStack
from xlcli.runtime import Runtime

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
"""Gathered parameters in bfloat16, gradients reduced in float32; autocast chooses the types of activations."""


def shard(model: LanguageModel, runtime: Runtime) -> Callable[[], AbstractContextManager[None]]:
    """Divides the parameters of each block, and the other ones; or those of the whole model at once.

    Blocks that share a parameter, those of a reversible stack, whose branches are called apart, and those of an
    adaptive one, which are called until every token of the rank has halted, keep theirs until the backward pass ends.

    If products are in bfloat16, blocks are gathered so, and their gradients are averaged in float32. Tables of token
    vectors, whose gradients are sums over all tokens of one kind, and hashed attention, whose products are in float32,
    remain in float32.

    Returns:
        `Parallel.delayed`.
    """
    mesh = runtime.ranks.mesh(runtime.device.type)
    if is_divided_by_block(model):
        for block in model.stack.layers():
            is_narrow = runtime.dtype == torch.bfloat16 and not isinstance(block.attention, LSHAttention)
            if is_narrow and block.vectors is not None:
                fully_shard(block.vectors, mesh=mesh)
            fully_shard(block, mesh=mesh, mp_policy=BFLOAT16 if is_narrow else MixedPrecisionPolicy())
            register_fsdp_forward_method(block, "update_memory")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
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


def is_divided_by_block(model: LanguageModel) -> bool:
    """Whether a block gathers its parameters when it is used; else the model gathers all of them once."""
    return not (isinstance(model.stack, ReversibleStack | AdaptiveStack) or _share_parameters(model))


def _share_parameters(model: LanguageModel) -> bool:
    """Whether a parameter of a block also belongs to another module."""
    blocks = list(model.stack.layers())
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [p for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)]
    users: Counter[Tensor] = Counter(p for block in blocks for p in block.parameters())
    users.update(dict.fromkeys(outside, 1))
    return max(users.values()) > 1
