"""Weights of a network: their names, their encodings, and reading them from a model folder, which may be untrusted.

docs/developers/format.md specifies the encodings. `read_network` checks sizes before it allocates: the network is
built on the meta device, its shapes are compared with the file, then tensors are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from xlcli.config import ModelConfig
from xlcli.errors import CheckpointError
from xlcli.files import RESTORE
from xlcli.files.tensors import TensorInfo, n_bytes, read_header, read_tensors, torch_type, type_name
from xlcli.machine import require_memory
from xlcli.model.build import build_on_meta
from xlcli.model.lm import LanguageModel
from xlcli.ops.layers import quantize
from xlcli.ops.stored import HALVES, StoredMatrix, widened
from xlcli.store.layout import CONFIG, ENCODINGS, SCALE, SMALLEST_STORED, WEIGHTS


def stored_infos(tensors: Mapping[str, Tensor], encoding: str) -> dict[str, TensorInfo]:
    """Type and shape of every stored tensor of a network with these tensors, which may be on the meta device."""
    infos = {}
    for name, tensor in tensors.items():
        shape, stored_type = tuple(tensor.shape), ENCODINGS[encoding]
        is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2
        if not tensor.is_floating_point():
            stored_type = type_name(tensor.dtype)
        elif encoding == "int8" and is_matrix:
            infos[name + SCALE] = TensorInfo("BF16", shape[:-1])
        elif encoding == "int8":  # vectors are small, and need more than 8 bits
            stored_type = "F32"
        infos[name] = TensorInfo(stored_type, shape)
    return infos


def encode(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Tensors to store in the types of `stored_infos`; `CheckpointError` if one is not a finite number there."""
    stored: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        dtype = torch_type(infos[name])
        scale = None  # of the rows of a matrix in int8, which is stored beside them
        if isinstance(weight, StoredMatrix) and weight.rows.dtype == dtype:  # it is in this encoding already
            rows, scale = weight.rows, weight.scale
        elif name + SCALE in infos:
            _check_finite(name, weight, "int8")
            rows, scale = quantize(weight.detach())
        else:
            rows = weight.detach().to(dtype)
            if weight.dtype != dtype:  # a number may have become infinite
                _check_finite(name, rows, str(dtype).removeprefix("torch."))
        stored[name] = rows
        if scale is not None:
            stored[name + SCALE] = scale
    return stored


def encode_in_order(
    tensors: Iterable[tuple[str, Tensor]], model: ModelConfig, encoding: str
) -> Iterator[tuple[str, Tensor]]:
    """`encode` for the weights of a model, with their names, one after the other, all in alphabetical order."""
    infos = stored_infos(empty_weights(model), encoding)
    remaining = iter(tensors)
    waiting: dict[str, Tensor] = {}  # what is encoded, but whose turn has not come: scales follow other names
    for name in sorted(infos):
        if name not in waiting:
            name_of_weight, weight = next(remaining)
            waiting |= encode({name_of_weight: weight}, infos)
        yield name, waiting.pop(name)


def decode(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, floats in float32, rounded matrices as stored; `ValueError` for -128 or an illegal scale."""
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        scale = stored.get(name + SCALE)
        if scale is not None:
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise ValueError(f"tensor '{name}{SCALE}' has a scale that is not a positive number")
            if tensor.numel() and int(tensor.min()) == -128:
                raise ValueError(f"tensor '{name}' holds -128")
            weights[name] = StoredMatrix(tensor, scale)
        elif tensor.dtype in HALVES and tensor.ndim >= 2:
            weights[name] = StoredMatrix(tensor)
        elif tensor.is_floating_point():
            weights[name] = tensor.float()
        else:
            weights[name] = tensor
    return weights


def _check_finite(name: str, tensor: Tensor, encoding: str) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        problem = f"weight '{name}' holds NaN, infinity or a number too large for {encoding}."
        raise CheckpointError(problem, "Keep the weights in float32.")


KEEP_TOGETHER = "The files belong to different models: keep each model's files together."


def weights(network: nn.Module) -> dict[str, Tensor]:
    """Tensors to save of a network: parameters, shared ones once, and persistent buffers."""
    saved = network.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in saved}
    return {**dict(network.named_parameters()), **buffers}


def empty_weights(model: ModelConfig) -> dict[str, Tensor]:
    """`weights` of a model on the meta device: shapes without memory."""
    return weights(build_on_meta(model))


def weights_bytes(model: ModelConfig, encoding: str) -> int:
    """Size of the stored weights of a model in bytes, without the header of their file (less than 1 MiB)."""
    return sum(map(n_bytes, stored_infos(empty_weights(model), encoding).values()))


def round_weights(network: nn.Module, encoding: str) -> None:
    """Rounds the weights, as if they were stored in this encoding; `CheckpointError` if it cannot represent one."""
    rounded: dict[str, Tensor] = {}
    for name, tensor in weights(network).items():
        one = {name: tensor}
        rounded |= decode(encode(one, stored_infos(one, encoding)))
    _fill(network, rounded, next(network.parameters()).device)


def read_weights(path: Path, network: nn.Module, encoding: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of the file of a network; `CheckpointError` if it is damaged, or of another one."""
    stored, metadata = read_tensors(path, expected=stored_infos(weights(network), encoding))
    try:
        return decode(stored), metadata
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", RESTORE) from None


def read_network(
    folder: Path, model: ModelConfig, encoding: str, device: str | torch.device
) -> tuple[LanguageModel, dict[str, str]]:
    """The network in a model folder, in evaluation mode, and the metadata of its weights file.

    Rounded matrices of a model of at least `SMALLEST_STORED` weights stay as they are stored on a CPU; all others are
    float32. Errors as of `read_weights`; `ResourceError` if the weights do not fit the machine.
    """
    network = _empty_network(model, folder)
    n_weights = sum(tensor.numel() for tensor in weights(network).values())
    file_bytes = (folder / WEIGHTS).stat().st_size
    float32_bytes = 4 * n_weights
    if file_bytes >= n_weights:  # read_weights refuses a smaller file, which is damaged
        for place in {"cpu", str(device)}:
            needed = min(file_bytes, float32_bytes) if place == "cpu" else float32_bytes
            require_memory(f"model {folder.resolve().name}", needed, "Use a smaller model.", place)
    tensors, metadata = read_weights(folder / WEIGHTS, network, encoding)
    _fill(network, tensors, device)
    return network.eval(), metadata


def _empty_network(model: ModelConfig, folder: Path) -> LanguageModel:
    """The network on the meta device, after a check that it is no larger than the weights file.

    Even on the meta device modules take time and memory, and buffers are computed.
    """
    problem = f"{folder / CONFIG} describes a larger network than {folder / WEIGHTS} holds."
    mismatch = CheckpointError(problem, KEEP_TOGETHER)
    n_tensors = len(read_header(folder / WEIGHTS)[0])
    file_bytes = (folder / WEIGHTS).stat().st_size
    # Each of these has at least one tensor, and each weight at least one byte.
    least_tensors = model.n_layers + len(model.cutoffs)
    largest_matrix = model.dim * max(model.ffn_dim, model.attention.n_heads * model.head_dim)
    if largest_matrix > file_bytes or least_tensors > n_tensors:
        raise mismatch
    try:
        return build_on_meta(model)
    except (RuntimeError, OverflowError, ValueError, MemoryError):
        raise mismatch from None


def _fill(network: nn.Module, tensors: Mapping[str, Tensor], device: str | torch.device) -> None:
    """Replaces the tensors of the network by `tensors`; shared parameters stay shared. Small models become float32."""
    filled: dict[int, Tensor] = {}
    is_small = sum(tensor.numel() for tensor in tensors.values()) < SMALLEST_STORED
    for name, empty in weights(network).items():
        tensor = tensors[name].to(device)
        if is_small:
            tensor = widened(tensor)
        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=not isinstance(tensor, StoredMatrix))
        filled[id(empty)] = tensor
    saved = network.state_dict(keep_vars=True).items()
    network.load_state_dict({name: filled[id(empty)] for name, empty in saved}, assign=True)
