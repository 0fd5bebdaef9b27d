"""A copy of a model folder with weights in another encoding. Torch is imported in the function."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xlcli.config import WeightEncoding
from xlcli.errors import ConfigError
from xlcli.files import cannot_write, copy_file, make_folder, sync_folder
from xlcli.files.tensors import digest, read_header
from xlcli.store.folder import load, save_model
from xlcli.store.layout import CONFIG, DOCUMENTS, WEIGHTS, read_config_file
from xlcli.store.lock import HOLDER, LOCK, lock
from xlcli.store.records import write_record
from xlcli.store.unfinished import clean_models, model_path
from xlcli.store.weights import weights


def copy_model(source: Path, target: Path, encoding: WeightEncoding | None = None) -> None:
    """Copies configuration, tokenizer, weights, held-out texts and record of a model.

    The copy is made under a temporary name and then renamed; unfinished copies of killed processes beside it are
    removed. Weights are rounded to the encoding; converting rounded weights back to float32 does not restore them. The
    record loses its `bits_per_byte` if a weight changes.

    Args:
        source: Model folder.
        target: Path of the copy; must not exist.
        encoding: Encoding of the weights of the copy; None keeps the present one.

    Raises:
        CheckpointError: The model is damaged, or has weights that the encoding cannot represent.
        ConfigError: `target` exists.
        ResourceError: The disk is full or fails.
    """
    _require_free(target)
    model = load(source)
    held_out = [path for path in (model.held_out("valid"), model.held_out("test")) if path]
    documents = {"valid": model.held_out_documents("valid"), "test": model.held_out_documents("test")}
    held_out += [source / DOCUMENTS[split] for split, starts in documents.items() if starts]
    with new_folder(target) as temporary:
        # The stored model section must stay as it is, since its fingerprint ties state files to the model.
        for path in (source / CONFIG, *held_out):
            copy_file(path, temporary / path.name)
        save_model(
            temporary,
            model.config,
            weights(model.network),
            model.tokenizer,
            read_header(source / WEIGHTS)[1],
            encoding=encoding or read_config_file(source).encoding,
        )
        record = dict(model.record)
        if digest(weights(load(temporary).network)) != digest(weights(model.network)):
            for key in ("bits_per_byte", "scored"):
                record.pop(key, None)
        if record:
            write_record(temporary, record)


def _require_free(target: Path) -> None:
    """`ConfigError` if there is a file or folder of this name."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", "Choose another name, or remove it first.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty temporary folder, which is renamed to `target` at the end of the block, or removed on an error.

    The caller makes the files inside durable. What killed processes left beside `target` is removed. The folder
    is locked, so that no other process removes it meanwhile.

    Raises:
        ConfigError: `target` exists.
        ResourceError: The disk is full or fails.
    """
    temporary = model_path(target.parent)
    try:
        make_folder(target.parent)
        clean_models(target.parent)
        temporary.mkdir()
        try:
            with lock(temporary):
                yield temporary
                _require_free(target)
                temporary.rename(target)
                for name in (HOLDER, LOCK):
                    with suppress(OSError):
                        (target / name).unlink()
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(temporary)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from error
