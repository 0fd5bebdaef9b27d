"""Weights of a network: their names, and reading them from a model folder, which may be untrusted.

`read_network` checks sizes before it allocates: the network is built on the meta device, its shapes are compared with
the file, then tensors are read. Torch is imported in functions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.config import ModelConfig
from xlcli.errors import CheckpointError
from xlcli.files import RESTORE
from xlcli.files.tensors import read_header, read_tensors
from xlcli.machine import require_memory
from xlcli.store.encodings import decode, encode, n_bytes, stored_infos
from xlcli.store.layout import CONFIG, WEIGHTS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from xlcli.model.lm import LanguageModel

KEEP_TOGETHER = "The files belong to different models: keep each model's files together."


def weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors to save of a network: parameters, shared ones once, and persistent buffers."""
    saved = network.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in saved}
    return {**dict(network.named_parameters()), **buffers}


def empty_weights(model: ModelConfig) -> dict[str, Tensor]:
    """`weights` of a model on the meta device: shapes without memory."""
    from xlcli.model.build import build_on_meta

    return weights(build_on_meta(model))


def weights_bytes(model: ModelConfig, encoding: str) -> int:
    """Size of the stored weights of a model in bytes, without the header of their file (less than 1 MiB)."""
    return n_bytes(stored_infos(empty_weights(model), encoding))


def round_weights(network: torch.nn.Module, encoding: str) -> None:
    """Rounds the weights of a network in place to the values that they have after they are stored in this encoding.

    Raises:
        CheckpointError: The encoding cannot represent a weight.
    """
    import torch

    with torch.no_grad():
        for name, tensor in weights(network).items():
            one = {name: tensor}
            tensor.copy_(decode(encode(one, stored_infos(one, encoding)))[name])


def read_weights(path: Path, network: torch.nn.Module, encoding: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights in float32 and metadata of a weights file, verified.

    Args:
        path: The file.
        network: The network that the weights belong to; may be on the meta device.
        encoding: Encoding of the file, a key of `ENCODINGS`.

    Raises:
        CheckpointError: The file is missing, damaged, or of another network or encoding.
    """
    stored, metadata = read_tensors(path, expected=stored_infos(weights(network), encoding))
    try:
        return decode(stored), metadata
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", RESTORE) from None


def read_network(
    folder: Path, model: ModelConfig, encoding: str, device: str | torch.device
) -> tuple[LanguageModel, dict[str, str]]:
    """The network in a model folder, in evaluation mode with float32 weights, and the metadata of its weights file.

    Args:
        folder: The model folder.
        model: Shape of the network.
        encoding: Encoding of the weights file, a key of `ENCODINGS`.
        device: Device of the network.

    Raises:
        CheckpointError: The weights file is missing, damaged, or of another network or encoding.
        ResourceError: The weights do not fit the machine.
    """
    network = _empty_network(model, folder)
    _require_memory(network, folder, device)
    tensors, metadata = read_weights(folder / WEIGHTS, network, encoding)
    _fill(network, tensors, device)
    return network.eval(), metadata


def _empty_network(model: ModelConfig, folder: Path) -> LanguageModel:
    """The network on the meta device, after a check that it is no larger than the weights file.

    Even on the meta device modules take time and memory, and buffers are computed.
    """
    from xlcli.model.build import build_on_meta

    largest = model.dim * max(model.ffn_dim, model.attention.n_heads * model.head_dim)
    mismatch = CheckpointError(
        f"{folder / CONFIG} describes a larger network than {folder / WEIGHTS} holds.", KEEP_TOGETHER
    )
    n_tensors = len(read_header(folder / WEIGHTS)[0])
    if largest > (folder / WEIGHTS).stat().st_size or model.n_layers + len(model.cutoffs) > n_tensors:
        raise mismatch
    try:
        return build_on_meta(model)
    except (RuntimeError, OverflowError, ValueError, MemoryError):
        raise mismatch from None


def _require_memory(network: LanguageModel, folder: Path, device: str | torch.device) -> None:
    """`ResourceError` if the weights do not fit the machine."""
    path = folder / WEIGHTS
    floats = sum(tensor.numel() for tensor in weights(network).values())
    if path.is_file() and path.stat().st_size >= floats:  # read_weights refuses a smaller file, which is damaged
        for place in {"cpu", str(device)}:
            require_memory(f"model {folder.resolve().name}", 4 * floats, "Use a smaller model.", place)


def _fill(network: torch.nn.Module, tensors: Mapping[str, Tensor], device: str | torch.device) -> None:
    """Replaces the meta tensors of the network by `tensors`; shared parameters stay shared."""
    from torch import nn

    filled: dict[int, Tensor] = {}
    for name, empty in weights(network).items():
        tensor = tensors[name].to(device)
        is_parameter = isinstance(empty, nn.Parameter)
        filled[id(empty)] = nn.Parameter(tensor, requires_grad=empty.requires_grad) if is_parameter else tensor
    for module in network.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, empty in own:
            setattr(module, name, filled[id(empty)])
