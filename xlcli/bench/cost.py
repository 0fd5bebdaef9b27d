"""Operations that a call computes, counted as it is executed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
OPERATIONS = flop_registry | {
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Floating-point operations of each matrix product, a multiplication with its addition as two: those of PyTorch's
`FlopCounterMode` and more."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of matrix products in PyTorch, forward and backward, while it is active.

    A multiplication with its addition counts as two. Unlike `FlopCounterMode` it has no hooks on modules, which warn
    when activations are computed again.

    Attributes:
        total: Number of operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Result of the operator."""
        kwargs = kwargs or {}
        formula = OPERATIONS.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)  # in inference mode matmul, for example, is not yet split
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def count_operations(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call, without those of compiled kernels."""
    counter = OperationCounter()
    with counter:
        call()
    return counter.total
