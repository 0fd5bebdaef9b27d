"""16-bit copies of the matrices of all blocks, made at once: on a GPU each operator costs the host microseconds.

Autocast makes a copy for each matrix, and widens each of its gradients, which takes two operators for every product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xlcli.config import Config
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel
from xlcli.model.position.xl import XLBiases
from xlcli.runtime import Runtime


def narrow_weights(
    model: LanguageModel, config: Config, runtime: Runtime
) -> Callable[[], AbstractContextManager[None]]:
    """Chooses the context in which forward and backward pass run: that of `copied` where copies save time, else none.

    They save time with 16-bit products on a GPU, unless the compiler joins them with other operators. They cannot be
    used where ranks exchange gradients during the backward pass, because those of copies are complete at its end only.
    """
    is_narrow_on_gpu = runtime.device.type == "cuda" and runtime.dtype != torch.float32
    exchanges_gradients = runtime.ranks.size > 1
    modules = modules_of_products(model)
    if not is_narrow_on_gpu or not modules or config.runtime.compile or exchanges_gradients:
        return nullcontext
    return partial(copied, modules, runtime.dtype)


@contextmanager
def copied(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Gives modules copies of their parameters in another number type, until the body of the `with` ends.

    One operator makes all copies. A backward pass in the body gives gradients to the parameters.
    """
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in modules:
        originals += [(module, name, parameter) for name, parameter in module.named_parameters(recurse=False)]
    copies = _Copies.apply(dtype, *(parameter for _, _, parameter in originals))  # type: ignore[no-untyped-call]
    for (module, name, _), copy in zip(originals, copies, strict=True):
        module._parameters[name] = copy  # `setattr` would refuse a tensor that is no parameter
    try:
        yield
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter


def modules_of_products(model: LanguageModel) -> list[nn.Module]:
    """Modules of the blocks that use their parameters once, and in 16 bits under autocast.

    Gradients of a copy are summed in 16 bits, so there is none for what a segment uses several times: shared blocks,
    biases of several blocks, and branches that compute it in parts. Hashed attention computes in float32.
    """
    users: Counter[nn.Module] = Counter()
    for block in model.stack.blocks:
        users.update(module for module in block.modules() if isinstance(module, nn.Linear | XLBiases))
        in_parts = block.feedforward.chunk_len is not None
        if in_parts or model.stack.n_steps > 1 or isinstance(block.attention, LSHAttention):
            return []
    return [module for module, n_users in users.items() if n_users == 1]


class _Copies(torch.autograd.Function):
    """Copies of parameters in another number type by one operator, and their gradients by another one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = parameters[0].dtype
        copies = tuple(torch.empty_like(parameter, dtype=dtype) for parameter in parameters)
        torch._foreach_copy_(copies, parameters)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wide = [torch.empty_like(gradient, dtype=ctx.dtype) for gradient in gradients]
        torch._foreach_copy_(wide, gradients)
        return None, *wide
