"""Saving, loading and copying a model folder, which may be untrusted: `load` compares checksums and fingerprints."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from xlcli import files as disk
from xlcli.config import Config, InferenceConfig, WeightEncoding
from xlcli.config.inference import LearningConfig
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files.tensors import digest, read_header, write_in_order
from xlcli.machine import return_memory
from xlcli.model.decoder import Decoder, make_decoder, table_bytes, weight_bytes
from xlcli.model.lm import LanguageModel
from xlcli.ops.stored import is_finite
from xlcli.store import layout
from xlcli.store.layout import CONFIG, DOCUMENTS, HELD_OUT, SCHEMA, TOKENIZER, WEIGHTS, SavedConfig
from xlcli.store.lock import HOLDER, LOCK, MODEL, clean_models, lock
from xlcli.store.origin import imported
from xlcli.store.weights import KEEP_TOGETHER, empty_weights, encode, read_network, round_weights, stored_infos, weights
from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import load_tokenizer


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for inference."""

    folder: Path
    name: str
    # Sections model, text and train of the configuration, with the inference settings given to `load`.
    config: Config | SavedConfig
    tokenizer: Tokenizer
    network: LanguageModel  # in evaluation mode, with weights that are float32 or act so (`ops/stored.py`)
    record: dict[str, Any]  # content of `record.json`
    # SHA-256 of config, weights and tokenizer as stored, which tie a state file to this model.
    fingerprints: dict[str, str]
    warnings: tuple[str, ...] = ()  # messages to show
    # SHA-256 of tokenizer files and held-out texts by file name.
    files: Mapping[str, str] = field(default_factory=dict)
    # Number type that the weights are rounded to, as if they were stored in it; `float32` is unrounded.
    weight_dtype: WeightEncoding = "float32"
    encoding: str = "float32"  # encoding that represents the weights of the network exactly

    @cached_property
    def decoder(self) -> Decoder | LanguageModel:
        """Predictions after one token (`logits`): a `Decoder` where one applies, else the network."""
        return make_decoder(self.network, self.encoding) or self.network

    def decoder_bytes(self, n_memory: int) -> int:
        """Size in bytes of what `decoder` adds to the weights of the network, with `n_memory` tokens in memory."""
        n_bytes = table_bytes(self.network, n_memory)
        is_made = "decoder" in vars(self)
        if not is_made:
            n_bytes += weight_bytes(self.network, self.encoding)
        return n_bytes

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a text, as the source of an imported model says."""
        value = imported(self.record).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        return [each for each in ids if type(each) is int and 0 <= each < self.tokenizer.vocab_size]

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name, as the source of an imported model has them."""
        found = imported(self.record).get("chat_templates")
        if isinstance(found, dict):
            return {key: text for key, text in found.items() if isinstance(text, str)}
        return {}

    def held_out(self, split: Literal["valid", "test"]) -> Path | None:
        """The validation or test text in the model folder, if there is one; `CheckpointError` if it has changed."""
        path = self.folder / HELD_OUT[split]
        has_checksum = path.name in self.files
        if not path.is_file():
            return None
        if has_checksum:
            layout.verify_file(self.folder, path.name, self.files)
        elif path.is_symlink():  # it may lead to any file
            return None
        return path

    def held_out_documents(self, split: Literal["valid", "test"]) -> list[int] | None:
        """Reads where the documents of a held-out text begin; None without documents, `CheckpointError` for damage."""
        text, path = self.held_out(split), self.folder / DOCUMENTS[split]
        if text is None or path.name not in self.files:
            return None
        layout.verify_file(self.folder, path.name, self.files)
        size = text.stat().st_size
        try:
            starts = [int(line) for line in disk.read_bounded(path, 16 * size + 16).splitlines()]
        except ValueError:
            starts = []
        begin_with_text = starts[:1] == [0]
        are_ascending = all(earlier < later for earlier, later in pairwise(starts))
        if not begin_with_text or not are_ascending or starts[-1] >= max(size, 1):
            raise CheckpointError(f"{path} does not list the documents of {HELD_OUT[split]}.", disk.RESTORE)
        return starts

    def learning(self, options: InferenceConfig) -> LearningConfig:
        """What the model learns while it reads with these options; a rate that they leave open is the default."""
        learning = options.learning
        if learning.adapt_lr is not None:
            return learning
        rate = IMPORTED_ADAPTATION_RATE if imported(self.record) else ADAPTATION_RATE
        return learning.model_copy(update={"adapt_lr": rate})

    def check_settings(self, options: InferenceConfig) -> None:
        """`ConfigError` if a setting does not apply to the model, or differs from the one it was loaded with."""
        options.check_model(self.config.model)
        is_same = options.shape(self.config.model) == self.config.model
        clamp_len = self.network.clamp_len or self.network.full_len or "none"
        if not is_same or options.clamp_len not in (None, clamp_len):
            raise ConfigError("steps, hash rounds and clamp_len are fixed by loading a model.", "Give them to load().")
        if options.weight_dtype not in ("auto", self.weight_dtype):
            raise ConfigError("weights are rounded when a model is loaded.", "Give weight_dtype to load().")


ADAPTATION_RATE = 6e-4  # default of `adapt_lr`, for models that xlcli trained
IMPORTED_ADAPTATION_RATE = 1e-4  # for imported models, and those trained from one (benchmarks/log)
ATTEMPTS = 5  # maximum number of times that a model is read whose files are replaced meanwhile
RETRY_SECONDS = 0.05  # time between two attempts


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

    `network_state` is `weights(network)` or a `state_dict()`, `metadata` are further entries for the metadata of the
    weights, and `encoding` is a key of `ENCODINGS`. `CheckpointError` if `network_state` lacks a tensor of the network,
    or has it in another shape, or the encoding cannot represent it.
    """
    needed = empty_weights(config.model)
    for name, tensor in needed.items():
        given = network_state.get(name)
        if given is None or given.shape != tensor.shape:
            problem = "is missing" if given is None else f"has shape {list(given.shape)}"
            message = f"weight '{name}' {problem}; the configuration needs {list(tensor.shape)}."
            raise CheckpointError(message, KEEP_TOGETHER)
    tensors = encode({name: network_state[name] for name in needed}, stored_infos(needed, encoding))
    save_in_order(folder, config, sorted(tensors.items()), tokenizer, metadata, encoding=encoding)


def save_in_order(
    folder: Path,
    config: Config | SavedConfig,
    stored: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    metadata: Mapping[str, str],
    *,
    encoding: str,
) -> None:
    """`save_model` of tensors as in `stored_infos`, sorted by name; each is written before the next is asked for."""
    infos = stored_infos(empty_weights(config.model), encoding)
    # Metadata that ties the weights to configuration and tokenizer.
    required = {
        "schema": str(SCHEMA),
        "encoding": encoding,
        "config": layout.config_fingerprint(folder, config.model),
        "tokenizer": tokenizer.fingerprint,
    }
    try:
        disk.make_folder(folder)
        present: dict[str, str] = {}
        with suppress(CheckpointError):
            present = read_header(folder / WEIGHTS)[1]
        is_same_model = required.items() <= present.items() and (folder / CONFIG).is_file()
        if not is_same_model:
            (folder / WEIGHTS).unlink(missing_ok=True)
            tokenizer.save(folder)
        layout.write_config(folder, config, encoding=encoding)
    except OSError as error:
        raise disk.cannot_write(folder, error) from error
    write_in_order(folder / WEIGHTS, infos, stored, {**metadata, **required})


def load(folder: Path, options: InferenceConfig | None = None, *, device: str | torch.device = "cpu") -> LoadedModel:
    """The model in `folder`, verified, with float32 weights.

    Of `options`, the settings of the stack, the layers and the position encoding apply, and the number type that the
    weights are rounded to, as if they were stored in it; None is as trained. `ConfigError` if the model has no such
    setting; `CheckpointError` if a file is missing, damaged, or of another model or format, or a weight cannot be
    rounded; `ResourceError` if the weights do not fit the machine.
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
    """Reads the model in `folder` once; an error may mean that training has replaced one of its files meanwhile."""
    header = layout.read_config_file(folder)
    for name in TOKENIZER:
        if name in header.files:
            layout.verify_file(folder, name, header.files)
    trained = header.config.model
    shape = options.shape(trained)
    # The tokenizer first: the weights then take the memory that it was made from.
    tokenizer = load_tokenizer(folder)
    network, metadata = read_network(folder, shape, header.encoding, device)
    network.limit_distances(*header.config.train.limits(trained, options.clamp_len))
    _check_belong_together(folder, header, metadata, tokenizer)
    name, warnings = folder.resolve().name, []
    not_finite = [key for key, tensor in weights(network).items() if not is_finite(tensor)]
    if not_finite:
        problem = f"weights of {name} hold NaN or infinity, first in '{not_finite[0]}'"
        warnings.append(f"{problem}; its output will make no sense.")
    weight_dtype, encoding = options.weights, header.encoding
    if weight_dtype != "float32":
        round_weights(network, weight_dtype)
        encoding = weight_dtype
    record: dict[str, Any] = {}
    try:
        record = layout.read_record(folder)
    except CheckpointError as error:  # it changes no number
        warnings.append(f"{error.message.rstrip('.')}; the model is used without it.")
    fingerprints = {"config": header.fingerprint, "weights": metadata["sha256"], "tokenizer": tokenizer.fingerprint}
    return_memory()  # of what the tokenizer was made from
    return LoadedModel(
        folder=folder,
        name=name,
        config=header.config.model_copy(update={"model": shape}),
        tokenizer=tokenizer,
        network=network,
        record=record,
        fingerprints=fingerprints,
        warnings=tuple(warnings),
        files=header.files,
        weight_dtype=weight_dtype,
        encoding=encoding,
    )


def _check_belong_together(
    folder: Path, header: layout.ConfigFile, metadata: Mapping[str, str], tokenizer: Tokenizer
) -> None:
    """`CheckpointError` if configuration, weights and tokenizer are of different models: each alone would load."""
    path, vocab_size = folder / WEIGHTS, header.config.model.vocab_size
    if metadata.get("config", "") != header.fingerprint:
        raise CheckpointError(f"{path} was saved with another model configuration than {CONFIG}.", KEEP_TOGETHER)
    if metadata.get("tokenizer", "") != tokenizer.fingerprint:
        raise CheckpointError(f"{path} was trained with another tokenizer than the one in {folder}.", KEEP_TOGETHER)
    if tokenizer.vocab_size != vocab_size:
        problem = f"the tokenizer in {folder} has {tokenizer.vocab_size:,} tokens, its model {vocab_size:,}."
        raise CheckpointError(problem, KEEP_TOGETHER)


def _versions(folder: Path) -> dict[str, tuple[int, int, int]]:
    """`files.version` of each file that `load` reads, if it is there."""
    versions = {}
    for name in (CONFIG, WEIGHTS, *TOKENIZER):
        with suppress(OSError):
            versions[name] = disk.version((folder / name).stat())
    return versions


def copy_model(source: Path, target: Path, encoding: WeightEncoding | None = None) -> None:
    """Copies configuration, tokenizer, weights, held-out texts and record of a model.

    The copy is made under a temporary name and then renamed; unfinished copies of killed processes beside it are
    removed. Weights are rounded to the encoding; converting rounded weights back to float32 does not restore them. The
    record loses its `bits_per_byte` if a weight changes. Without `encoding` the present one is kept.

    `CheckpointError` if the model is damaged or the encoding cannot represent a weight, `ConfigError` if `target`
    exists, `ResourceError` if the disk is full or fails.
    """
    require_free(target)
    model = load(source)
    copied = [source / CONFIG]
    splits: tuple[Literal["valid", "test"], ...] = ("valid", "test")
    for split in splits:
        text = model.held_out(split)
        if text is not None:
            copied.append(text)
        if model.held_out_documents(split) is not None:
            copied.append(source / DOCUMENTS[split])
    with new_folder(target) as temporary:
        # The stored model section must stay as it is, since its fingerprint ties state files to the model.
        for path in copied:
            disk.write_atomic(temporary / path.name, disk.read_blocks(path))
        save_model(
            temporary,
            model.config,
            weights(model.network),
            model.tokenizer,
            read_header(source / WEIGHTS)[1],
            encoding=encoding or model.encoding,
        )
        record = dict(model.record)
        if digest(weights(load(temporary).network)) != digest(weights(model.network)):
            for key in ("bits_per_byte", "scored"):
                record.pop(key, None)
        if record:
            layout.write_record(temporary, record)


def require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", "Choose another name, or remove it first.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Makes the folder `target` with all that the body of the `with` writes, or not at all.

    The body gets an empty folder with a temporary name, in which it writes durable files. At its end the folder is
    renamed to `target`; after an error it is removed, and so are parents made here. It is locked, because every process
    removes the unlocked rest of others, as this one does at first. `ConfigError` if `target` exists, `ResourceError` if
    the disk is full or fails.
    """
    require_free(target)
    temporary = disk.temporary_path(target.parent, MODEL)
    missing_parents = [path for path in target.parents if not os.path.lexists(path)]
    try:
        disk.make_folder(target.parent)
        clean_models(target.parent)
        temporary.mkdir()
        try:
            with lock(temporary):
                yield temporary
                _rename_to_free(temporary, target)
                for name in (HOLDER, LOCK):  # they have moved, too
                    with suppress(OSError):
                        (target / name).unlink()
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(temporary)
                disk.remove_empty(missing_parents)
            raise
        disk.sync_folder(target.parent)
    except OSError as error:
        raise disk.cannot_write(target, error) from error


def _rename_to_free(folder: Path, target: Path) -> None:
    """Renames a folder; `ConfigError` if `target` exists, also if another process has made it at this moment."""
    require_free(target)
    try:
        folder.rename(target)
    except OSError:
        require_free(target)
        raise
