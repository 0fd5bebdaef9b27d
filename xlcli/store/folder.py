"""Saving and loading a model folder, which may be untrusted. Torch is imported only in `save_model` and `load`.

`load` compares checksums and fingerprints; `read_network` checks sizes before it allocates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.config import Config, InferenceConfig
from xlcli.errors import CheckpointError
from xlcli.files import cannot_write, make_folder
from xlcli.files.tensors import read_header, write_tensors
from xlcli.store.encodings import encode, stored_infos
from xlcli.store.layout import (
    CONFIG,
    SCHEMA,
    TOKENIZER,
    WEIGHTS,
    SavedConfig,
    config_fingerprint,
    read_config_file,
    verify_file,
    write_config,
)
from xlcli.store.loaded import LoadedModel
from xlcli.store.records import read_record
from xlcli.store.weights import KEEP_TOGETHER, empty_weights, read_network, round_weights, weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from xlcli.text.tokenizers.registry import Tokenizer

ATTEMPTS = 5
"""Maximum number of times that a model is read whose files are replaced meanwhile."""
RETRY_SECONDS = 0.05
"""Time between two attempts."""


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
    needed = empty_weights(config.model)
    for name, tensor in needed.items():
        found = network_state[name].shape if name in network_state else None
        if found != tensor.shape:
            problem = "is missing" if found is None else f"has shape {list(found)}"
            raise CheckpointError(
                f"weight '{name}' {problem}; the configuration needs {list(tensor.shape)}.", KEEP_TOGETHER
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


def load(folder: Path, options: InferenceConfig | None = None, *, device: str | torch.device = "cpu") -> LoadedModel:
    """The model in `folder`, verified, with float32 weights.

    Args:
        folder: The model folder.
        options: Settings of the stack, the layers and the position encoding, and number type that the weights are
            rounded to, as if they were stored in it; None is as trained.
        device: Device of the network.

    Raises:
        ConfigError: The model has no such setting.
        CheckpointError: A file is missing, damaged, of another model or of another format, or a weight cannot be
            rounded.
    """
    options = options or InferenceConfig()
    for _ in range(ATTEMPTS - 1):
        before = _versions(folder)
        try:
            return _load(folder, options, device)
        except CheckpointError:
            if _versions(folder) == before:
                raise
        time.sleep(RETRY_SECONDS)  # training has replaced a file since the first one was read
    return _load(folder, options, device)


def _load(folder: Path, options: InferenceConfig, device: str | torch.device) -> LoadedModel:
    from xlcli.text.tokenizers.registry import load_tokenizer

    path = folder / WEIGHTS
    header = read_config_file(folder)
    for name in TOKENIZER:
        if name in header.files:
            verify_file(folder, name, header.files)
    trained = header.config.model
    shape = options.shape(trained)
    weight_dtype, _ = options.dtypes(shape)
    network, metadata = read_network(folder, shape, header.encoding, device)
    network.clamp_len, network.far_len = header.config.train.limits(trained, options.clamp_len)
    tokenizer = load_tokenizer(folder)
    if metadata.get("config", "") != header.fingerprint:
        raise CheckpointError(f"{path} was saved with another model configuration than {CONFIG}.", KEEP_TOGETHER)
    if metadata.get("tokenizer", "") != tokenizer.fingerprint:
        raise CheckpointError(f"{path} was trained with another tokenizer than the one in {folder}.", KEEP_TOGETHER)
    if tokenizer.vocab_size != header.config.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size:,} tokens, "
            f"its model {header.config.model.vocab_size:,}.",
            KEEP_TOGETHER,
        )
    warnings = _warnings(folder.resolve().name, network)
    if weight_dtype != "float32":
        round_weights(network, weight_dtype)
    record: dict[str, Any] = {}
    try:
        record = read_record(folder)
    except CheckpointError as error:  # it changes no number
        warnings = (f"{error.message.rstrip('.')}; the model is used without it.", *warnings)
    return LoadedModel(
        folder=folder,
        name=folder.resolve().name,
        config=header.config.model_copy(update={"model": shape}),
        tokenizer=tokenizer,
        network=network,
        record=record,
        fingerprints={
            "config": header.fingerprint,
            "weights": metadata["sha256"],
            "tokenizer": tokenizer.fingerprint,
        },
        warnings=warnings,
        files=header.files,
        weight_dtype=weight_dtype,
        encoding=header.encoding if weight_dtype == "float32" else weight_dtype,
    )


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


def _warnings(name: str, network: torch.nn.Module) -> tuple[str, ...]:
    """Warnings about weights that training cannot have produced."""
    import torch

    floats = {
        key: tensor.detach()
        for key, tensor in weights(network).items()
        if tensor.is_floating_point() and tensor.numel()
    }
    bad = [key for key, tensor in floats.items() if not bool(torch.isfinite(tensor).all())]
    tiny = [key for key, tensor in floats.items() if 0 < float(tensor.abs().max()) < torch.finfo(torch.float32).tiny]
    warnings = []
    if bad:
        warnings.append(f"weights of {name} hold NaN or infinity, first in '{bad[0]}'; its output will make no sense.")
    if tiny:
        warnings.append(f"weights of {name} are almost zero throughout '{tiny[0]}'; its output may make no sense.")
    return tuple(warnings)
