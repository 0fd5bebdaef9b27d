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


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Unlike `FlopCounterMode` it has no hooks on modules, which warn when activations are computed again."""

    total: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Result of the operator."""
        kwargs = kwargs or {}
        formula = OPERATIONS.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)  # in inference mode matmul, for example, is not yet split
            return func(*args, **kwargs) if parts is NotImplemented else parts
        out = func(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=out)
        return out


def count_operations(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call, forward and backward, without compiled kernels."""
    with _OperationCounter() as counter:  # type: ignore[no-untyped-call]
        call()
    return int(counter.total)
