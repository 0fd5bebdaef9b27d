"""Encodings of the weights in `model.safetensors`. Torch is imported in the functions that need it.

    float32 bfloat16 float16 float64   every floating-point tensor in that type
    int8                               parameters with two or more axes as rows of int8 with a scale per row, see
                                       `quantize`; all other floating-point tensors in float32

Integer tensors are stored as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from xlcli.errors import CheckpointError
from xlcli.files.tensors import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ENCODINGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int8": "I8"}
"""Name in `config.json` to safetensors type of matrices and, except for int8, of all floating-point tensors."""
SCALE = ":scale"
"""Suffix of the name of the scales of an int8 tensor."""

_TYPES = {**{stored: name for name, stored in ENCODINGS.items()}, "I64": "int64", "I32": "int32", "U8": "uint8"}
"""Safetensors type to torch type."""


def stored_infos(tensors: Mapping[str, Tensor], encoding: str) -> dict[str, TensorInfo]:
    """Type and shape of every stored tensor of a network.

    Args:
        tensors: Parameters and buffers by name; may be on the meta device.
        encoding: A key of `ENCODINGS`.
    """
    from torch import nn

    infos = {}
    for name, tensor in tensors.items():
        shape, stored = tuple(tensor.shape), ENCODINGS[encoding]
        if not tensor.is_floating_point():
            stored = next(key for key, value in _TYPES.items() if f"torch.{value}" == str(tensor.dtype))
        elif encoding == "int8" and isinstance(tensor, nn.Parameter) and tensor.ndim >= 2:
            infos[name + SCALE] = TensorInfo("BF16", shape[:-1])
        elif encoding == "int8":
            stored = "F32"
        infos[name] = TensorInfo(stored, shape)
    return infos


def n_weights(infos: Mapping[str, TensorInfo]) -> int:
    """Number of weights in a file with these tensors; scales are not counted."""
    return sum(math.prod(info.shape) for name, info in infos.items() if not name.endswith(SCALE))


def n_bytes(infos: Mapping[str, TensorInfo]) -> int:
    """Size of these tensors in a file, in bytes."""
    return sum(math.prod(info.shape) * _dtype(info).itemsize for info in infos.values())


def encode(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Tensors to store.

    Args:
        tensors: Weights by name.
        infos: The result of `stored_infos`.

    Raises:
        CheckpointError: A weight is NaN, infinite or too large, and its stored type differs from its present one.
    """
    from xlcli.ops.quantize import quantize

    stored = {}
    for name, weight in tensors.items():
        if name + SCALE in infos:
            _check_finite(name, weight, "int8")
            stored[name], stored[name + SCALE] = quantize(weight.detach())
        else:
            stored[name] = weight.detach().to(dtype := _dtype(infos[name]))
            if dtype != weight.dtype:
                _check_finite(name, stored[name], _TYPES[infos[name].dtype])
    return stored


def decode(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, floating-point tensors in float32.

    Raises:
        ValueError: An int8 tensor holds -128, or a scale is not a positive number.
    """
    from xlcli.ops.quantize import dequantize

    weights = {}
    for name, tensor in stored.items():
        if name + SCALE in stored:
            _check_int8(name, tensor, stored[name + SCALE])
            weights[name] = dequantize(tensor, stored[name + SCALE])
        elif not name.endswith(SCALE):
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return weights


def _check_int8(name: str, values: Tensor, scale: Tensor) -> None:
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"tensor '{name}{SCALE}' has a scale that is not a positive number")
    if values.numel() and int(values.min()) == -128:
        raise ValueError(f"tensor '{name}' holds -128")


def _check_finite(name: str, tensor: Tensor, encoding: str) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise CheckpointError(
            f"weight '{name}' holds NaN, infinity or a number too large for {encoding}.",
            "Keep the weights in float32.",
        )


def _dtype(info: TensorInfo) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, _TYPES[info.dtype])
    return dtype
