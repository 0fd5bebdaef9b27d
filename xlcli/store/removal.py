"""Removal and renaming of the user's model folders. Imports no torch.

A folder is removed only if xlcli wrote everything in it. It is renamed to a hidden name first, so that a kill leaves
the whole model or a remnant that the next removal or copy in that place deletes, never half a model.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xlcli.errors import BusyError, CheckpointError, ConfigError
from xlcli.files import cannot_read, cannot_write, copy_file, make_folder, sync_folder
from xlcli.presets import models_folder
from xlcli.store.commit import checkpoints, checksums
from xlcli.store.copy import new_folder, require_free
from xlcli.store.discover import LOCAL, find, is_bundled
from xlcli.store.layout import CHECKPOINTS, EVENTS, LATEST, MANIFEST, TENSORBOARD
from xlcli.store.lock import HOLDER, LOCK, lock
from xlcli.store.staging import foreign_entry, holds_run
from xlcli.store.unfinished import INSTALLING, RUN_FILES, STAGED, clean_models, is_unfinished, model_path, remove_model


def own_model(name: str, cwd: Path | None = None) -> Path:
    """Folder of a model or run of the user: `models/NAME`, else the path `name`. Damaged models are found, too.

    Raises:
        CheckpointError: There is no such folder, or it holds no model or run of xlcli.
        ConfigError: It is a bundled model, a symbolic link, or contains the working folder.
    """
    cwd = Path.cwd() if cwd is None else cwd
    plain = Path(name).name == name and name not in (".", "..")
    places = [cwd / LOCAL / name, cwd / name] if plain else [cwd / name]
    if ".." in Path(name).parts:
        places = [places[0].resolve()]
    folder = next((place for place in places if place.is_symlink() or holds_run(place) or _is_unused(place)), None)
    if folder is None:
        found = next((place for place in places if os.path.lexists(place)), None) or find(name, cwd=cwd)
        if found.parent.resolve() != models_folder().resolve():
            raise CheckpointError(f"{_shown(found, cwd)} is not a model of xlcli.", "Remove or rename it yourself.")
        folder = found
    shown = _shown(folder, cwd)
    if folder.is_symlink():
        raise ConfigError(f"{shown} is a symbolic link.", f"Give the folder itself: {folder.resolve()}.")
    if is_bundled(folder, cwd):
        raise ConfigError(
            f"{folder.name} is bundled with xlcli and cannot be removed or renamed.",
            "Name a model that you trained or copied.",
        )
    if cwd.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{shown} contains the working folder.", "Go to another folder first: cd ..")
    return shown


def foreign_files(folder: Path) -> list[str]:
    """Entries of a model folder that xlcli did not write, as paths inside it.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    try:
        return sorted(path.relative_to(folder).as_posix() for path in _foreign(folder))
    except OSError as error:
        raise cannot_read(folder, error) from None


@contextmanager
def claimed(folder: Path) -> Iterator[str]:
    """Holds the lock of a model folder that is to be removed or renamed; yields as `lock` does.

    Raises:
        BusyError: A process writes in the folder.
    """
    try:
        with lock(folder) as warning:
            yield warning
    except BusyError as error:
        raise BusyError(error.message, "Wait for it, or stop it.") from None


def require_removable(folder: Path) -> None:
    """`ConfigError` if the folder holds anything that xlcli did not write."""
    if foreign := foreign_files(folder):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{folder} holds {foreign[0]}{more}, not written by xlcli; nothing was removed.", "Move it elsewhere first."
        )


def remove(folder: Path) -> None:
    """Removes a model folder, whose lock the caller holds.

    Raises:
        ConfigError: It holds anything that xlcli did not write; nothing was removed.
        ResourceError: The disk fails, or a file may not be removed.
    """
    require_removable(folder)
    aside = model_path(folder.parent)
    try:
        clean_models(folder.parent)
        folder.rename(aside)
        sync_folder(folder.parent)
        remove_model(aside)
        sync_folder(folder.parent)
    except OSError as error:
        raise cannot_write(folder, error) from error


def move(folder: Path, target: Path) -> None:
    """Renames a model folder, whose lock the caller holds; copies and removes it if `target` is on another disk.

    Raises:
        ConfigError: `target` exists or lies inside the folder; or it is on another disk and the folder holds anything
            that xlcli did not write.
        ResourceError: The disk is full or fails; the model is still in `folder`.
    """
    require_free(target)
    if target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{target} lies inside {folder}.", "Choose another place.")
    try:
        make_folder(target.parent)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            require_removable(folder)
            with new_folder(target) as temporary:
                _copy_files(folder, temporary)
            remove(folder)
        else:
            with suppress(OSError):
                (target / HOLDER).unlink(missing_ok=True)
            sync_folder(target.parent)
            sync_folder(folder.parent)
    except OSError as error:
        raise cannot_write(target, error) from error


def _is_unused(folder: Path) -> bool:
    """Whether a folder holds the lock of a run and nothing that a user wrote."""
    return (folder / LOCK).is_file() and foreign_entry(folder) is None


def _shown(folder: Path, cwd: Path) -> Path:
    """The path relative to the working folder, if it is inside."""
    return folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder


def _copy_files(source: Path, target: Path) -> None:
    """Copies all regular files durably, without locks and unfinished files."""
    for path in sorted(source.iterdir()):
        if path.name in (LOCK, HOLDER) or is_unfinished(path):
            continue
        if path.is_dir():
            make_folder(target / path.name)
            _copy_files(path, target / path.name)
        else:
            copy_file(path, target / path.name)


def _foreign(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if is_unfinished(path):
            continue
        if path.name in (STAGED, INSTALLING) and _is_folder(path):
            yield from _foreign(path)
        elif path.name == CHECKPOINTS and _is_folder(path):
            yield from _foreign_in_checkpoints(path)
        elif path.name == TENSORBOARD and _is_folder(path):
            yield from (file for file in path.iterdir() if not (file.name.startswith(EVENTS) and _is_file(file)))
        elif path.name == CHECKPOINTS or path.name not in (*RUN_FILES, LOCK, HOLDER) or not _is_file(path):
            yield path


def _foreign_in_checkpoints(folder: Path) -> Iterator[Path]:
    known = checkpoints(folder)
    for path in folder.iterdir():
        if path in known:
            names = {MANIFEST}
            with suppress(CheckpointError):
                names |= checksums(path).keys()
            yield from (file for file in path.iterdir() if file.name not in names or not _is_file(file))
        elif not is_unfinished(path) and (path.name != LATEST or not _is_file(path)):
            yield path


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
