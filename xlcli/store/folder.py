"""A model is a folder: how it is written, and how it is loaded when somebody else may have written it.

Nothing is believed: limits first, then shapes derived from the configuration, then checksums and fingerprints. Other
names of the store are here too, so that this is the one place to import from. Torch is imported only to load and save.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.config import Config, ModelConfig
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import cannot_write, make_folder, read_header, read_tensors, write_tensors
from xlcli.files.plain import TEMPORARY
from xlcli.files.tensors import TensorFacts
from xlcli.store.discover import ModelSummary as ModelSummary
from xlcli.store.discover import bundled_models as bundled_models
from xlcli.store.discover import find as find
from xlcli.store.discover import local_models as local_models
from xlcli.store.discover import summarize as summarize
from xlcli.store.layout import CHECKPOINTS, CONFIG, HELD_OUT, WEIGHTS, config_fingerprint, write_config
from xlcli.store.layout import held_out as held_out
from xlcli.store.layout import is_model as is_model
from xlcli.store.layout import read_config as read_config
from xlcli.store.lock import lock as lock
from xlcli.store.records import METRICS, RECORD
from xlcli.store.records import append_metrics as append_metrics
from xlcli.store.records import read_metrics as read_metrics
from xlcli.store.records import read_record as read_record
from xlcli.store.records import trim_metrics as trim_metrics
from xlcli.store.records import write_record as write_record

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from xlcli.model.lm import LanguageModel
    from xlcli.text.tokenizers.registry import Tokenizer

_FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for use.

    `config` has the inference settings that the model was loaded with; `fingerprints` are those of the stored files and
    tie a saved state to this model; `warnings` are messages to show.
    """

    folder: Path
    name: str
    config: Config
    tokenizer: Tokenizer
    network: LanguageModel
    record: dict[str, Any]
    fingerprints: dict[str, str]
    warnings: tuple[str, ...] = ()

    def check_settings(self, n_steps: int | None, n_hashes: int | None) -> None:
        """`ConfigError` unless the model was loaded with these inference settings; None accepts any value."""
        if self.config.model.for_inference(n_steps, n_hashes) != self.config.model:
            raise ConfigError("n_steps and n_hashes are fixed when a model is loaded.", "Give them to load().")


def weights(network: torch.nn.Module) -> dict[str, Tensor]:
    """What is saved of a network: its parameters, shared ones once, and its persistent buffers."""
    kept = network.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in kept}
    return {**dict(network.named_parameters()), **buffers}


def save_model(
    folder: Path, config: Config, network_state: Mapping[str, Tensor], tokenizer: Tokenizer, metadata: Mapping[str, str]
) -> None:
    """Makes `folder` a model with these weights; the caller holds its lock.

    Weights that are there already stay whole until they are replaced in one move; weights of another configuration or
    tokenizer are removed first, so that no mixture is ever left behind.

    Args:
        folder: Made if missing.
        config: Resolved configuration.
        network_state: `weights(network)` or a `state_dict()`, of any float type.
        tokenizer: What turned text into the ids these weights know.
        metadata: Further texts for the file.
    """
    ties = {"format": "xlcli-1", "config": config_fingerprint(config), "tokenizer": tokenizer.fingerprint}
    names = weights(_on_meta(config.model)).keys()
    try:
        make_folder(folder)
        if not ties.items() <= _metadata(folder).items() or not (folder / CONFIG).is_file():
            (folder / WEIGHTS).unlink(missing_ok=True)
            tokenizer.save(folder)
        write_config(folder, config)
    except OSError as error:
        raise cannot_write(folder, error) from error
    write_tensors(folder / WEIGHTS, {name: network_state[name] for name in names}, {**metadata, **ties})


def load(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tensors: str = WEIGHTS,
    n_steps: int | None = None,
    n_hashes: int | None = None,
) -> LoadedModel:
    """The model in `folder`, verified: limits first, then shapes against the configuration, then checksums.

    Args:
        folder: A model folder, from `find`.
        device: Where the network goes.
        dtype: Number type of the network; float32 when None.
        tensors: Which file of the folder holds the weights.
        n_steps: Number of times a universal stack applies its blocks; None uses the trained value.
        n_hashes: Number of hash rounds of LSH attention; None uses the trained value.

    Raises:
        ConfigError: The model has no such setting.
        CheckpointError: Something is missing, damaged, of another model or of a newer format.
    """
    import torch

    from xlcli.text.tokenizers.registry import load_tokenizer

    path = folder / tensors
    config = read_config(folder)
    facts, _ = read_header(path)
    shape = config.model.for_inference(n_steps, n_hashes)
    network = _empty_network(shape, facts, folder)
    expected = {
        name: (_stored_type(facts.get(name), tensor), tuple(tensor.shape)) for name, tensor in weights(network).items()
    }
    found, metadata = read_tensors(path, expected=expected)
    tokenizer = load_tokenizer(folder)
    _check_ties(path, config, tokenizer, metadata)
    fingerprints = {
        "config": config_fingerprint(config),
        "weights": metadata["sha256"],
        "tokenizer": tokenizer.fingerprint,
    }
    _fill(network, found, torch.device(device), dtype or torch.float32)
    network.eval()
    name = folder.resolve().name
    config = config.model_copy(update={"model": shape})
    return LoadedModel(
        folder, name, config, tokenizer, network, read_record(folder), fingerprints, _suspicions(name, found)
    )


def clear(folder: Path) -> None:
    """Removes the model from its folder, weights first, and nothing else; the caller holds the lock."""
    names = [WEIGHTS, CONFIG, RECORD, METRICS, *HELD_OUT.values()]
    try:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            if path.name.startswith(("tokenizer.", TEMPORARY)) and not path.is_dir():
                path.unlink(missing_ok=True)
        checkpoints = folder / CHECKPOINTS
        if checkpoints.is_dir() and not checkpoints.is_symlink():
            shutil.rmtree(checkpoints)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _metadata(folder: Path) -> dict[str, str]:
    with suppress(CheckpointError):
        return read_header(folder / WEIGHTS)[1]
    return {}


def _on_meta(model: ModelConfig) -> LanguageModel:
    """The network's shapes, without any of its numbers."""
    import torch

    from xlcli.model.build import build_model

    with torch.device("meta"):
        return build_model(model)


def _empty_network(model: ModelConfig, facts: Mapping[str, TensorFacts], folder: Path) -> LanguageModel:
    """The network without numbers, once it is certain that it is no larger than the file that claims to fill it."""
    stored = sum(math.prod(tensor.shape) for tensor in facts.values())
    width = model.attention.n_heads * model.head_dim
    largest = model.dim * max(model.ffn_dim, width)
    mismatch = CheckpointError(
        f"{folder / CONFIG} describes a larger network than {folder / WEIGHTS} holds.",
        "The files belong to different models: keep each model's files together.",
    )
    if largest > stored or model.n_layers + len(model.cutoffs) > len(facts):
        raise mismatch
    try:
        return _on_meta(model)
    except (RuntimeError, OverflowError, ValueError, MemoryError):
        raise mismatch from None


def _stored_type(fact: TensorFacts | None, tensor: Tensor) -> str:
    """Float weights may be stored in any float type; everything else only as it is."""
    if tensor.is_floating_point():
        return fact.dtype if fact is not None and fact.dtype in _FLOATS else "F32"
    return {"torch.int64": "I64", "torch.int32": "I32", "torch.uint8": "U8"}[str(tensor.dtype)]


def _check_ties(path: Path, config: Config, tokenizer: Tokenizer, metadata: Mapping[str, str]) -> None:
    remedy = "The files belong to different models: keep each model's files together."
    if metadata.get("config", "") != config_fingerprint(config):
        raise CheckpointError(f"{path} was saved with another model configuration than the {CONFIG} beside it.", remedy)
    if metadata.get("tokenizer", "") != tokenizer.fingerprint:
        raise CheckpointError(f"{path} was trained with another tokenizer than the one beside it.", remedy)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {path.parent} has {tokenizer.vocab_size:,} tokens, "
            f"its model {config.model.vocab_size:,}.",
            remedy,
        )


def _fill(network: torch.nn.Module, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Puts `tensors` in the place of the empty ones; what was shared stays shared."""
    from torch import nn

    filled: dict[int, Tensor] = {}
    for name, empty in weights(network).items():
        tensor = tensors[name].to(device, dtype if empty.is_floating_point() else empty.dtype)
        is_parameter = isinstance(empty, nn.Parameter)
        filled[id(empty)] = nn.Parameter(tensor, requires_grad=empty.requires_grad) if is_parameter else tensor
    for module in network.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, empty in own:
            setattr(module, name, filled[id(empty)])


def _suspicions(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Warnings about weights that cannot have come from healthy training."""
    import torch

    floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    bad = [key for key, tensor in floats.items() if not bool(torch.isfinite(tensor).all())]
    faint = [key for key, tensor in floats.items() if 0 < float(tensor.abs().max()) < torch.finfo(torch.float32).tiny]
    warnings = []
    if bad:
        warnings.append(f"weights of {name} hold NaN or infinity, first in '{bad[0]}'; its output will make no sense.")
    if faint:
        warnings.append(f"weights of {name} are next to zero throughout '{faint[0]}'; its output may make no sense.")
    return tuple(warnings)
