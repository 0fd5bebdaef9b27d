"""Atomic changes of a model folder: checkpoints, and runs that replace a model. Imports no torch.

    commit   writes each file in .tmp-xlcli-<random>/, then manifest.json with sizes and SHA-256, each durably; renames
             the folder to step-<step>/, syncs the parent, replaces LATEST, removes the oldest checkpoints
    latest   verifies checkpoints against their manifests, newest first, and takes the first undamaged one

LATEST contains the name of the newest checkpoint, for people only. After any kill, disk error or bit flip an undamaged
checkpoint is found; one that differs from its manifest is a `CheckpointError`.

A new run is written in .tmp-xlcli-<random>/ and renamed to .replacement/, beside the model that it is to replace. When
it has weights, the old files go and the new ones are moved up, the configuration first. A kill therefore leaves

    .replacement/ with a configuration     a whole run, which `--resume` continues; the old model is whole or going
    .replacement/ without a configuration  the rest of the run in the folder above, if that has no weights yet

Functions that write expect the caller to hold the lock of the model folder, and raise errors as `files.cannot_write`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xlcli import files
from xlcli.errors import CheckpointError, XLError
from xlcli.store.layout import BEST, CHECKPOINTS, CONFIG, LATEST, MANIFEST, SCHEMA, STEP, TENSORBOARD, WEIGHTS
from xlcli.store.lock import HOLDER, LOCK, RUN_FILES, STAGED, clean, is_unfinished, remove

# Checkpoints

_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class Latest(NamedTuple):
    """The newest undamaged checkpoint, or None, and the damage of each damaged newer one."""

    path: Path | None
    rejected: dict[Path, str]


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Number of training steps before this checkpoint."""
    return int(path.name.removeprefix("step-").removesuffix("~"))


def commit(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Adds the checkpoint after `step` steps to a folder of checkpoints, and returns its path; it is durable then.

    `write` gets an empty folder, into which it writes the files durably. An older checkpoint of this step is replaced.
    Then all but the newest `keep` are removed, and those of later steps, which a resumed run has undone.
    """
    temporary = files.temporary_path(folder)
    final = folder / step_name(step)
    replaced = final.with_name(f"{final.name}~")
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link.", "Put a folder there, or link the whole model folder.")
    try:
        files.make_folder(folder)
        with suppress(XLError):
            clean(folder)
        temporary.mkdir()
        try:
            write(temporary)
            _seal(temporary)
            if final.is_dir():  # `latest` finds it under its other name until it is replaced
                remove(replaced)
                final.rename(replaced)
            temporary.rename(final)
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise
        files.sync_folder(folder)
    except OSError as error:
        raise files.cannot_write(final, error) from error
    files.write_atomic(folder / LATEST, f"{final.name}\n".encode())
    with suppress(OSError):
        _prune(folder, final, keep)
    return final


def latest(folder: Path) -> Latest:
    """The newest checkpoint in a folder of checkpoints that `verify` accepts, and the damaged ones before it."""
    rejected: dict[Path, str] = {}
    try:
        candidates = checkpoints(folder)
    except OSError as error:
        raise files.cannot_read(folder, error) from None
    for path in candidates:
        try:
            verify(path)
        except CheckpointError as error:
            rejected[path] = error.message
        else:
            return Latest(path, rejected)
    return Latest(None, rejected)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, newest first, damaged ones too; a replaced one (`~`) after its replacement."""
    if not _is_folder(folder):
        return []
    paths = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and _is_folder(path)]
    return sorted(paths, key=lambda path: (step_of(path), not path.name.endswith("~")), reverse=True)


def verify(path: Path) -> None:
    """Raises `CheckpointError` if a file of a checkpoint, other than `BEST`, differs from its manifest."""
    for name, (size, digest) in manifest(path).items():
        if name == BEST:
            continue
        with files.open_regular(path / name) as (file, status):
            if status.st_size != size:
                raise CheckpointError(f"{path / name} has {status.st_size:,} bytes of {size:,}.")
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise CheckpointError(f"{path / name} does not match its checksum.")


def _seal(folder: Path) -> None:
    """Writes the manifest, which marks the checkpoint as complete."""
    entries: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.name] = {"bytes": file.tell(), "sha256": digest}
    files.write_atomic(folder / MANIFEST, (json.dumps({"schema": SCHEMA, "files": entries}, indent=2) + "\n").encode())


def manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Reads size and SHA-256 of each file of a checkpoint; no other may be read. `CheckpointError` for damage."""
    tree = files.read_json(path / MANIFEST)
    if tree.get("schema") != SCHEMA:
        raise CheckpointError(f"{path / MANIFEST} has format {tree.get('schema')!r}, not {SCHEMA}.")
    entries = tree.get("files")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{path / MANIFEST} lists no files.")
    result: dict[str, tuple[int, str]] = {}
    for name, entry in entries.items():
        match entry if _FILE.fullmatch(name) else None:
            case {"bytes": int(size), "sha256": str(digest), **others} if not others and type(size) is int:
                result[name] = (size, digest)
            case _:
                raise CheckpointError(f"{path / MANIFEST} has an invalid entry: {name[:80]!a}.")
    return result


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints, and those of later steps than `newest`, as far as it can."""
    kept_steps = {step_of(newest)}
    for path in checkpoints(folder):
        step = step_of(path)
        if path == newest:
            continue
        is_undone = step > step_of(newest)
        is_replaced = step in kept_steps
        if is_undone or is_replaced or len(kept_steps) >= keep:
            with suppress(OSError):
                _discard(path)
        else:
            kept_steps.add(step)


def _discard(path: Path) -> None:
    """Renames a checkpoint before removing it, so that a crash leaves no half-removed one under its name."""
    aside = files.temporary_path(path.parent)
    path.rename(aside)
    remove(aside)


# Runs that replace a model


def holds_run(folder: Path) -> bool:
    """True if a folder has a model or run, maybe damaged; a staged one without weights has taken no step."""
    staged = folder / STAGED
    return _is_run(folder) or (_is_folder(staged) and (staged / WEIGHTS).is_file())


def foreign_entry(folder: Path) -> str | None:
    """Name of an entry of a folder without a run that xlcli did not write, or None; `CheckpointError` if unreadable."""
    if not folder.is_dir():
        return None
    try:
        for path in sorted(folder.iterdir()):
            is_lock = path.name == HOLDER or (path.name == LOCK and path.lstat().st_size == 0)
            if not (is_lock or _is_staged_run(path) or is_unfinished(path)):
                return path.name
    except OSError as error:
        raise files.cannot_read(folder, error) from None
    return None


def _is_staged_run(path: Path) -> bool:
    """True if an entry of a model folder is a staged run, or the rest of one, and holds nothing else."""
    if path.name != STAGED or not _is_folder(path):
        return False
    return all(entry.name in (*RUN_FILES, TENSORBOARD) or is_unfinished(entry) for entry in path.iterdir())


def belongs_to_run(folder: Path, path: Path) -> bool:
    """True if replacing the run in `folder` would remove the file `path`."""
    file = path.resolve()
    return any(file.is_relative_to((folder / name).resolve()) for name in (STAGED, *RUN_FILES))


def place_of_run(folder: Path) -> Path:
    """Folder of the run that `--resume` continues, which is a staged one if there is one."""
    staged = folder / STAGED
    is_whole = _is_folder(staged) and (staged / CONFIG).is_file()
    return staged if is_whole else folder


def stage_run(folder: Path, written: Path) -> None:
    """Moves a new run to where it waits for its first weights; one that waits there is removed or placed."""
    staged = folder / STAGED
    waits_for_weights = (staged / CONFIG).is_file() and not (staged / WEIGHTS).is_file()
    if not waits_for_weights:
        finish_replacement(folder)
    try:
        remove(staged)
        written.rename(staged)
        files.sync_folder(folder)
    except OSError as error:
        raise files.cannot_write(staged, error) from error


def finish_replacement(folder: Path) -> None:
    """Moves a staged run to its place in `folder`, if there is one and it has weights or replaces no other run.

    After a kill it does what is left to do: the staged run may be whole, or moved in part (see the top of this file).
    """
    staged = folder / STAGED
    if not _is_folder(staged):
        return
    is_whole = (staged / CONFIG).is_file()  # the file that is moved first
    has_weights = (staged / WEIGHTS).is_file()
    if is_whole and not has_weights and _is_run(folder):
        return
    try:
        if is_whole:
            # Weights come last in `RUN_FILES`. They go first and come last, so that no model without them is found.
            for name in reversed(RUN_FILES):
                if os.path.lexists(folder / name):
                    (folder / name).rename(files.temporary_path(folder))  # which `clean` removes
            files.sync_folder(folder)
        if not (folder / WEIGHTS).is_file():
            for name in RUN_FILES:
                if os.path.lexists(staged / name):
                    (staged / name).replace(folder / name)
                    files.sync_folder(folder)  # so that a power loss keeps the order, too
        remove(staged)
        clean(folder)
    except OSError as error:
        raise files.cannot_write(folder, error) from error


def _is_run(folder: Path) -> bool:
    """True if a folder holds a configuration or a checkpoint of xlcli."""
    if not _is_folder(folder):
        return False
    with suppress(CheckpointError):
        if {"schema", "model", "sha256"} <= files.read_json(folder / CONFIG).keys():
            return True
    with suppress(OSError):
        return any((path / MANIFEST).is_file() for path in checkpoints(folder / CHECKPOINTS))
    return False


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
