"""Tensors that are divided among ranks (`DTensor` of PyTorch), and plain ones, for which all functions do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether each rank has a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Part of this rank, which shares memory with the tensor; may be empty."""
    return tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """The tensor on every rank. All ranks must call it."""
    return tensor.detach().full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def divided(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, divided as `like`; without communication."""
    if not is_divided(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
