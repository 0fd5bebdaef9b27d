"""Saving and loading a model folder, which may be untrusted. Torch is imported only in `save_model` and `load`.

`load` checks sizes before it allocates: the network is built on the meta device, its shapes are compared with the file,
then tensors are read and checksums and fingerprints compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xlcli.config import Config, ModelConfig, WeightEncoding
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import cannot_write, make_folder, read_header, read_tensors, write_tensors
from xlcli.files.plain import RESTORE, read_bounded
from xlcli.machine import require_memory
from xlcli.store.encodings import decode, encode, n_bytes, stored_infos
from xlcli.store.layout import (
    CONFIG,
    DOCUMENTS,
    HELD_OUT,
    SCHEMA,
    TOKENIZER,
    WEIGHTS,
    SavedConfig,
    config_fingerprint,
    read_config_file,
    verify_file,
    write_config,
)
from xlcli.store.records import read_record

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from xlcli.config import InferenceConfig
    from xlcli.model.decoder import Decoder
    from xlcli.model.lm import LanguageModel
    from xlcli.text.tokenizers.registry import Tokenizer

ATTEMPTS = 5
"""Maximum number of times that a model is read whose files are replaced meanwhile."""
RETRY_SECONDS = 0.05
"""Time between two attempts."""
_KEEP_TOGETHER = "The files belong to different models: keep each model's files together."


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for inference.

    Attributes:
        folder: The model folder.
        name: Name of the folder.
        config: Sections model, text and train of the configuration, with the inference settings given to `load`.
        tokenizer: The model's tokenizer.
        network: In evaluation mode, with float32 weights.
        record: Content of `record.json`.
        fingerprints: SHA-256 of config, weights and tokenizer as stored, which tie a state file to this model.
        warnings: Messages to show.
        files: SHA-256 of tokenizer files and held-out texts by file name.
        weight_dtype: Number type that the weights are rounded to, as if they were stored in it; `float32` is unrounded.
        encoding: Encoding that represents the weights of the network exactly.
    """

    folder: Path
    name: str
    config: Config | SavedConfig
    tokenizer: Tokenizer
    network: LanguageModel
    record: dict[str, Any]
    fingerprints: dict[str, str]
    warnings: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    weight_dtype: WeightEncoding = "float32"
    encoding: str = "float32"

    @cached_property
    def decoder(self) -> Decoder | LanguageModel:
        """Predictions after one token (`logits`): a `Decoder` where one applies, else the network."""
        from xlcli.model.decoder import make_decoder

        return make_decoder(self.network, self.encoding) or self.network

    def held_out(self, split: Literal["valid", "test"]) -> Path | None:
        """The validation or test text in the model folder, if there is one; `CheckpointError` if it has changed."""
        path = self.folder / HELD_OUT[split]
        if not path.is_file() or path.is_symlink():
            return None
        if path.name in self.files:
            verify_file(self.folder, path.name, self.files)
        return path

    def held_out_documents(self, split: Literal["valid", "test"]) -> list[int] | None:
        """Offsets at which the documents of a held-out text begin, ascending from 0.

        None if there is no such text, or its documents were not separated.

        Raises:
            CheckpointError: A file is damaged.
        """
        text, path = self.held_out(split), self.folder / DOCUMENTS[split]
        if text is None or path.name not in self.files:
            return None
        verify_file(self.folder, path.name, self.files)
        size = text.stat().st_size
        try:
            starts = [int(line) for line in read_bounded(path, 16 * size + 16).splitlines()]
        except ValueError:
            starts = []
        if not starts or starts[0] or any(b <= a for a, b in pairwise(starts)) or starts[-1] >= max(size, 1):
            raise CheckpointError(f"{path} does not list the documents of {HELD_OUT[split]}.", RESTORE)
        return starts

    def unrounded(self) -> LoadedModel:
        """This model with its weights as stored; this object if they are not rounded.

        Raises:
            CheckpointError: The weights in the model folder have changed.
            ResourceError: They do not fit the machine.
        """
        if self.weight_dtype == "float32":
            return self
        device = next(self.network.parameters()).device
        network = _empty_network(self.config.model, self.folder)
        _require_memory(network, self.folder, device)
        tensors, metadata = read_weights(self.folder / WEIGHTS, network, read_config_file(self.folder).encoding)
        if metadata["sha256"] != self.fingerprints["weights"]:
            raise CheckpointError(f"the weights in {self.folder} have changed.", "Run the command again.")
        _fill(network, tensors, device)
        return replace(self, network=network.eval(), weight_dtype="float32", encoding="float32")

    def check_settings(self, options: InferenceConfig) -> None:
        """`ConfigError` if a setting does not apply to the model, or differs from the one it was loaded with."""
        options.check_model(self.config.model)
        if self.config.model.for_inference(options.n_steps, options.n_hashes) != self.config.model:
            raise ConfigError("n_steps and n_hashes are fixed when a model is loaded.", "Give them to load().")
        if options.weight_dtype not in ("auto", self.weight_dtype):
            raise ConfigError("weights are rounded when a model is loaded.", "Give weight_dtype to load().")


def weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors to save of a network: parameters, shared ones once, and persistent buffers."""
    saved = network.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in saved}
    return {**dict(network.named_parameters()), **buffers}


def save_model(
    folder: Path,
    config: Config | SavedConfig,
    network_state: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    metadata: Mapping[str, str],
    *,
    encoding: str = "float32",
) -> None:
    """Writes configuration, tokenizer and weights to a model folder. The caller holds its lock.

    Existing weights are replaced atomically. Weights of another configuration, tokenizer or encoding are removed
    first, so that a crash never leaves files of different models together.

    Args:
        folder: Made if missing.
        config: Resolved configuration.
        network_state: `weights(network)` or a `state_dict()`.
        tokenizer: The tokenizer that the weights were trained with.
        metadata: Further entries for the metadata of the weights.
        encoding: Encoding of the stored weights, a key of `ENCODINGS`.

    Raises:
        CheckpointError: `network_state` lacks a tensor of the network, or has it in another shape, or the encoding
            cannot represent it.
    """
    needed = weights(_on_meta(config.model))
    for name, tensor in needed.items():
        found = network_state[name].shape if name in network_state else None
        if found != tensor.shape:
            problem = "is missing" if found is None else f"has shape {list(found)}"
            raise CheckpointError(
                f"weight '{name}' {problem}; the configuration needs {list(tensor.shape)}.", _KEEP_TOGETHER
            )
    tensors = encode({name: network_state[name] for name in needed}, stored_infos(needed, encoding))
    required = {
        "schema": str(SCHEMA),
        "encoding": encoding,
        "config": config_fingerprint(folder, config.model),
        "tokenizer": tokenizer.fingerprint,
    }
    try:
        make_folder(folder)
        if not required.items() <= _metadata(folder).items() or not (folder / CONFIG).is_file():
            (folder / WEIGHTS).unlink(missing_ok=True)
            tokenizer.save(folder)
        write_config(folder, config, encoding=encoding)
    except OSError as error:
        raise cannot_write(folder, error) from error
    write_tensors(folder / WEIGHTS, tensors, {**metadata, **required})


def load(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    n_steps: int | None = None,
    n_hashes: int | None = None,
    weight_dtype: WeightEncoding = "float32",
) -> LoadedModel:
    """The model in `folder`, verified, with float32 weights.

    Args:
        folder: The model folder.
        device: Device of the network.
        n_steps: Number of times a universal stack applies its blocks; None uses the trained value.
        n_hashes: Number of hash rounds of LSH attention; None uses the trained value.
        weight_dtype: Number type that the weights are rounded to, as if they were stored in it.

    Raises:
        ConfigError: The model has no such setting.
        CheckpointError: A file is missing, damaged, of another model or of another format, or a weight cannot be
            rounded.
    """
    for _ in range(ATTEMPTS - 1):
        before = _versions(folder)
        try:
            return _load(folder, device, n_steps, n_hashes, weight_dtype)
        except CheckpointError:
            if _versions(folder) == before:
                raise
        time.sleep(RETRY_SECONDS)  # training has replaced a file since the first one was read
    return _load(folder, device, n_steps, n_hashes, weight_dtype)


def _load(
    folder: Path,
    device: str | torch.device,
    n_steps: int | None,
    n_hashes: int | None,
    weight_dtype: WeightEncoding,
) -> LoadedModel:
    import torch

    from xlcli.text.tokenizers.registry import load_tokenizer

    path = folder / WEIGHTS
    header = read_config_file(folder)
    for name in TOKENIZER:
        if name in header.files:
            verify_file(folder, name, header.files)
    shape = header.config.model.for_inference(n_steps, n_hashes)
    network = _empty_network(shape, folder)
    _require_memory(network, folder, device)
    tensors, metadata = read_weights(path, network, header.encoding)
    tokenizer = load_tokenizer(folder)
    if metadata.get("config", "") != header.fingerprint:
        raise CheckpointError(f"{path} was saved with another model configuration than {CONFIG}.", _KEEP_TOGETHER)
    if metadata.get("tokenizer", "") != tokenizer.fingerprint:
        raise CheckpointError(f"{path} was trained with another tokenizer than the one in {folder}.", _KEEP_TOGETHER)
    if tokenizer.vocab_size != header.config.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size:,} tokens, "
            f"its model {header.config.model.vocab_size:,}.",
            _KEEP_TOGETHER,
        )
    _fill(network, tensors, torch.device(device))
    if weight_dtype != "float32":
        round_weights(network, weight_dtype)
    network.eval()
    record: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    try:
        record = read_record(folder)
    except CheckpointError as error:  # it changes no number
        warnings = (f"{error.message.rstrip('.')}; the model is used without it.",)
    name = folder.resolve().name
    return LoadedModel(
        folder=folder,
        name=name,
        config=header.config.model_copy(update={"model": shape}),
        tokenizer=tokenizer,
        network=network,
        record=record,
        fingerprints={
            "config": header.fingerprint,
            "weights": metadata["sha256"],
            "tokenizer": tokenizer.fingerprint,
        },
        warnings=(*warnings, *_warnings(name, tensors)),
        files=header.files,
        weight_dtype=weight_dtype,
        encoding=header.encoding if weight_dtype == "float32" else weight_dtype,
    )


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


def weights_bytes(model: ModelConfig, encoding: str) -> int:
    """Size of the stored weights of a model in bytes, without the header of their file (less than 1 MiB)."""
    return n_bytes(stored_infos(weights(_on_meta(model)), encoding))


def _versions(folder: Path) -> list[tuple[int, int, int] | None]:
    """Inode, size and time of change of each file that `load` reads; None for a missing one."""
    versions: list[tuple[int, int, int] | None] = []
    for name in (CONFIG, WEIGHTS, *TOKENIZER):
        try:
            status = os.lstat(folder / name)
            versions.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            versions.append(None)
    return versions


def _metadata(folder: Path) -> dict[str, str]:
    with suppress(CheckpointError):
        return read_header(folder / WEIGHTS)[1]
    return {}


def _on_meta(model: ModelConfig) -> LanguageModel:
    """The network on the meta device: shapes without memory."""
    from xlcli.model.build import build_on_meta

    return build_on_meta(model)


def _empty_network(model: ModelConfig, folder: Path) -> LanguageModel:
    """The network on the meta device, after a check that it is no larger than the weights file.

    Even on the meta device modules take time and memory, and buffers are computed.
    """
    largest = model.dim * max(model.ffn_dim, model.attention.n_heads * model.head_dim)
    mismatch = CheckpointError(
        f"{folder / CONFIG} describes a larger network than {folder / WEIGHTS} holds.", _KEEP_TOGETHER
    )
    n_tensors = len(read_header(folder / WEIGHTS)[0])
    if largest > (folder / WEIGHTS).stat().st_size or model.n_layers + len(model.cutoffs) > n_tensors:
        raise mismatch
    try:
        return _on_meta(model)
    except (RuntimeError, OverflowError, ValueError, MemoryError):
        raise mismatch from None


def _require_memory(network: LanguageModel, folder: Path, device: str | torch.device) -> None:
    """`ResourceError` if the weights do not fit the machine."""
    path = folder / WEIGHTS
    floats = sum(tensor.numel() for tensor in weights(network).values())
    if path.is_file() and path.stat().st_size >= floats:  # read_weights refuses a smaller file, which is damaged
        for place in {"cpu", str(device)}:
            require_memory(f"model {folder.resolve().name}", 4 * floats, "Use a smaller model.", place)


def _fill(network: torch.nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> None:
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


def _warnings(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Warnings about weights that training cannot have produced."""
    import torch

    floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    bad = [key for key, tensor in floats.items() if not bool(torch.isfinite(tensor).all())]
    tiny = [key for key, tensor in floats.items() if 0 < float(tensor.abs().max()) < torch.finfo(torch.float32).tiny]
    warnings = []
    if bad:
        warnings.append(f"weights of {name} hold NaN or infinity, first in '{bad[0]}'; its output will make no sense.")
    if tiny:
        warnings.append(f"weights of {name} are almost zero throughout '{tiny[0]}'; its output may make no sense.")
    return tuple(warnings)
