"""Unfinished files and folders that killed processes left: recognition and removal. Imports no torch.

    .tmp-xlcli-HHHHHHHHHHHHHHHH        in a model folder and its checkpoints; used under the lock of the model folder
    .tmp-xlcli-model-HHHHHHHHHHHHHHHH  a model that is being copied, beside models; it holds its own lock

H are random hexadecimal digits. Nothing is removed by its name alone: the first kind is a file, or a folder in which
every name is one that xlcli gives; the second kind is such a folder with the note of a holder, whose lock is free.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from xlcli.errors import XLError
from xlcli.files import TEMPORARY, TEMPORARY_NAME, cannot_write, temporary_path
from xlcli.store.layout import (
    BEST,
    CHECKPOINT_FILES,
    CHECKPOINTS,
    CONFIG,
    DOCUMENTS,
    EVENTS,
    HELD_OUT,
    LATEST,
    MANIFEST,
    STEP,
    TENSORBOARD,
    TOKENIZER,
    WEIGHTS,
)
from xlcli.store.lock import HOLDER, LOCK, holder, lock
from xlcli.store.records import METRICS, RECORD

STAGED = ".replacement"
INSTALLING = ".installing"

RUN_FILES = (CONFIG, *TOKENIZER, *HELD_OUT.values(), *DOCUMENTS.values(), RECORD, METRICS, CHECKPOINTS, WEIGHTS)
"""Everything that belongs to a run, in the order in which it is put in place and in the opposite order removed. Without
weights a reader finds no model; without a configuration a corpus reader would take the texts for its own."""

_FILES = {*RUN_FILES, LOCK, HOLDER, MANIFEST, LATEST, *CHECKPOINT_FILES, BEST} - {CHECKPOINTS}
_FOLDERS = {CHECKPOINTS, STAGED, INSTALLING, TENSORBOARD}
_MODEL = f"{TEMPORARY}model-"
_MODEL_NAME = re.compile(re.escape(_MODEL) + "[0-9a-f]{16}")


def model_path(folder: Path) -> Path:
    """A new path in a folder of models, for a model that is being copied."""
    return temporary_path(folder, _MODEL)


def is_own(path: Path) -> bool:
    """Whether a path is a regular file, or a folder of files and folders with names that xlcli gives, at any depth."""
    if path.is_symlink() or not path.is_dir():
        return path.is_file() and not path.is_symlink()
    return all(_has_own_name(entry) and is_own(entry) for entry in path.iterdir())


def is_unfinished(path: Path) -> bool:
    """Whether an entry of a model folder, or of its checkpoints, is an unfinished file or folder of xlcli."""
    return TEMPORARY_NAME.fullmatch(path.name) is not None and is_own(path)


def clean(folder: Path) -> None:
    """Removes the unfinished files and folders of crashed runs from a model folder or its checkpoints.

    The caller holds the lock of the model folder.
    """
    try:
        sweep(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def sweep(folder: Path) -> None:
    """`clean` that raises `OSError`."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in list(folder.iterdir()):
        if is_unfinished(path):
            remove(path)


def clean_models(folder: Path) -> None:
    """Removes models beside others that were being copied by processes that have ended.

    One that cannot be removed stays.
    """
    for path in list(folder.iterdir()):
        with suppress(OSError, XLError):
            if _MODEL_NAME.fullmatch(path.name) and is_own(path) and holder(path):
                with lock(path):
                    _remove_model(path)


def _remove_model(folder: Path) -> None:
    """Removes a folder whose lock the caller holds; the note of the holder goes last, so that a kill leaves it."""
    for path in list(folder.iterdir()):
        if path.name not in (LOCK, HOLDER):
            remove(path)
    for name in (LOCK, HOLDER):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def remove(path: Path) -> None:
    """Removes a folder with its content, or a file; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _has_own_name(path: Path) -> bool:
    if TEMPORARY_NAME.fullmatch(path.name):
        return True
    if path.is_dir():
        return path.name in _FOLDERS or STEP.fullmatch(path.name) is not None
    return path.name in _FILES or path.name.startswith(EVENTS)
