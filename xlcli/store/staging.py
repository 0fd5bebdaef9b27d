"""New runs, kept apart from the model in their folder until they can replace it. Imports no torch.

    .replacement/  a run without weights yet, beside the model that it is to replace; `--resume` continues it
    .installing/   the same run while its files are moved up, after the old model has been moved away

A kill at any moment leaves the old model as it was, or a run that `settle` puts in its place. The caller of functions
that write holds the lock of the model folder.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from xlcli.errors import CheckpointError
from xlcli.files import cannot_read, cannot_write, read_json, sync_folder, temporary_path
from xlcli.files.tensors import read_header
from xlcli.store.commit import checkpoints
from xlcli.store.layout import CHECKPOINTS, CONFIG, MANIFEST, WEIGHTS
from xlcli.store.lock import HOLDER, LOCK
from xlcli.store.unfinished import INSTALLING, RUN_FILES, STAGED, clean, is_own, is_unfinished, remove


def holds_run(folder: Path) -> bool:
    """Whether xlcli wrote a model or a run in this folder; it may be damaged.

    A staged run without weights does not count, because without a model to replace it has taken no step.
    """
    staged = folder / STAGED
    return _is_run(folder) or _is_folder(folder / INSTALLING) or (_is_folder(staged) and (staged / WEIGHTS).is_file())


def foreign_entry(folder: Path) -> str | None:
    """Name of an entry of a folder without a run that xlcli did not write; None if there is none.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_lock = path.name in (LOCK, HOLDER) and (path.name == HOLDER or path.lstat().st_size == 0)
            if not is_lock and not is_unfinished(path) and not (path.name == STAGED and is_own(path)):
                return path.name
    except OSError as error:
        raise cannot_read(folder, error) from None
    return None


def belongs_to_run(folder: Path, path: Path) -> bool:
    """Whether replacing the run in `folder` would remove the file `path`."""
    inside = (folder / name for name in (STAGED, INSTALLING, CHECKPOINTS))
    if any(path.resolve().is_relative_to(place.resolve()) for place in inside):
        return True
    for name in RUN_FILES:
        with suppress(OSError):
            if path.samefile(folder / name):
                return True
    return False


def place_of_run(folder: Path) -> Path:
    """Folder of the run that `--resume` continues, which is a staged one if there is one."""
    staged = folder / STAGED
    return staged if _is_folder(staged) and (staged / CONFIG).is_file() else folder


def stage(folder: Path) -> Path:
    """An empty folder for a new run, instead of an earlier one that was staged; the run in `folder` stays."""
    staged = folder / STAGED
    if (staged / WEIGHTS).is_file() or _is_folder(folder / INSTALLING):
        settle(folder)
    try:
        remove(staged)
        staged.mkdir()
        sync_folder(folder)
    except OSError as error:
        raise cannot_write(staged, error) from error
    return staged


def settle(folder: Path) -> Path:
    """The folder of the run, after a staged run was put in its place if it has weights or replaces nothing."""
    staged, installing = folder / STAGED, folder / INSTALLING
    try:
        if not _is_folder(installing) and _is_folder(staged):
            if not (staged / CONFIG).is_file():
                remove(staged)  # killed before it could be resumed
            elif (staged / WEIGHTS).is_file() or not _is_run(folder):
                _move_away(folder)
                staged.rename(installing)
                sync_folder(folder)
            else:
                return staged
        if _is_folder(installing):
            _move(installing, folder, RUN_FILES)
            remove(installing)
            clean(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a configuration, weights or a checkpoint of xlcli."""
    if not _is_folder(folder):
        return False
    with suppress(CheckpointError):
        if {"schema", "model", "sha256"} <= read_json(folder / CONFIG).keys():
            return True
    with suppress(CheckpointError):
        if "metadata_sha256" in read_header(folder / WEIGHTS)[1]:
            return True
    with suppress(OSError):
        return any((path / MANIFEST).is_file() for path in checkpoints(folder / CHECKPOINTS))
    return False


def _move_away(folder: Path) -> None:
    """Moves the run in `folder` to a temporary folder, which `clean` removes."""
    clean(folder)
    aside = temporary_path(folder)
    aside.mkdir()
    _move(folder, aside, RUN_FILES[::-1])


def _move(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if os.path.lexists(source / name):
            (source / name).replace(target / name)
    sync_folder(target)
    sync_folder(source)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
