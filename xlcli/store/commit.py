"""Checkpoints that a crash cannot spoil: after any kill, disk error or bit flip a good one is found again. No torch.

    commit   .tmp-<step>-<pid>/  each file written and synced, manifest.json with SHA-256 last, folder synced
             -> renamed to step-<step>/, parent synced -> LATEST replaced -> the oldest removed
    latest   downwards from the newest; the first whose manifest verifies wins. LATEST is a hint for people

Every function that writes expects the caller to hold the model folder's lock. Errors in writing are those of
`files.cannot_write`; a checkpoint that is not what its manifest says is a `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from xlcli.errors import CheckpointError
from xlcli.files.plain import (
    TEMPORARY,
    cannot_read,
    cannot_write,
    make_folder,
    open_regular,
    read_json,
    sha256,
    sync_folder,
    write_atomic,
)
from xlcli.store.layout import SCHEMA

MANIFEST = "manifest.json"
LATEST = "LATEST"

_STEP = re.compile(r"step-(\d{8,18})(~?)")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class Rejected(NamedTuple):
    """A damaged checkpoint and what is wrong with it."""

    path: Path
    reason: str


class Latest(NamedTuple):
    """The newest good checkpoint, or None, and the damaged newer ones; warn of each."""

    path: Path | None
    rejected: tuple[Rejected, ...]


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Steps done when this checkpoint was taken."""
    return _order(path)[0]


def commit(folder: Path, name: str, write: Callable[[Path], None], keep: int) -> Path:
    """Makes what `write` puts into an empty folder the newest checkpoint, durably, and returns its path.

    Args:
        folder: The folder of checkpoints; made if missing.
        name: `step_name(step)`. An older checkpoint of this name is replaced, and later ones, which belong to a course
            that was given up, are removed.
        write: Fills the folder it is given with plain files.
        keep: How many of the newest to keep, at least 1. Until this one is durable all are kept.
    """
    if not (match := _STEP.fullmatch(name)) or match[2] or keep < 1:
        raise ValueError(f"not a checkpoint name, or nothing to keep: {name!r}, {keep}")
    temporary = folder / f"{TEMPORARY}{name.removeprefix('step-')}-{os.getpid()}"
    final = folder / name
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a symbolic link.", "Put a folder there, or link the whole model folder.")
    try:
        make_folder(folder)
        with suppress(OSError):
            _sweep(folder)
        temporary.mkdir()
        try:
            write(temporary)
            _seal(temporary)
            _displace(final)
            temporary.rename(final)
        except BaseException:
            with suppress(OSError):
                _remove(temporary)
            raise
        sync_folder(folder)
    except OSError as error:
        raise cannot_write(final, error) from error
    write_atomic(folder / LATEST, f"{name}\n".encode())
    with suppress(OSError):
        _prune(folder, final, keep)
    return final


def latest(folder: Path) -> Latest:
    """The newest checkpoint whose every file is as it was written; damaged ones are passed over and reported."""
    rejected: list[Rejected] = []
    try:
        candidates = _checkpoints(folder)
    except OSError as error:
        raise cannot_read(folder, error) from None
    for path in candidates:
        try:
            verify(path)
        except CheckpointError as error:
            rejected.append(Rejected(path, error.message))
        else:
            return Latest(path, tuple(rejected))
    return Latest(None, tuple(rejected))


def verify(path: Path) -> tuple[str, ...]:
    """Names of the checkpoint's files, after comparing each with the manifest: name, size, SHA-256."""
    files = _manifest(path)
    for name, (size, digest) in files.items():
        with open_regular(path / name) as (_, facts):
            found = facts.st_size
        if found != size:
            raise CheckpointError(f"{path / name} has {found:,} bytes of {size:,}.")
        if sha256(path / name) != digest:
            raise CheckpointError(f"{path / name} does not match its checksum.")
    return tuple(files)


def clean(folder: Path) -> None:
    """Removes what crashed runs left unfinished in this folder."""
    try:
        _sweep(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _sweep(folder: Path) -> None:
    for path in _entries(folder):
        if path.name.startswith(TEMPORARY):
            _remove(path)


def _seal(folder: Path) -> None:
    """Syncs every file and then writes the manifest, whose presence says that the rest is complete."""
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(_entries(folder)):
        if not _FILE.fullmatch(path.name) or path.name == MANIFEST or not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"a checkpoint holds plain files with plain names, not {path.name!r}")
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.name] = {"bytes": file.tell(), "sha256": digest}
    write_atomic(folder / MANIFEST, (json.dumps({"schema": SCHEMA, "files": files}, indent=2) + "\n").encode())


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    tree = read_json(path / MANIFEST)
    if tree.get("schema") != SCHEMA:
        raise CheckpointError(f"{path / MANIFEST} has format {tree.get('schema')!r}, not {SCHEMA}.")
    files = tree.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path / MANIFEST} lists no files.")
    result: dict[str, tuple[int, str]] = {}
    for name, entry in files.items():
        if not _FILE.fullmatch(name) or not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            raise CheckpointError(f"{path / MANIFEST} has an entry that makes no sense: {name[:80]!a}.")
        result[name] = (entry["bytes"], entry["sha256"])
    return result


def _displace(final: Path) -> None:
    """Makes room for a checkpoint of the same name; the old one stays findable until the new one is in its place."""
    if not final.is_dir():
        return
    backup = final.with_name(final.name + "~")
    if backup.is_dir():
        try:
            verify(final)
        except CheckpointError:
            _discard(final)
            return
        _discard(backup)
    final.rename(backup)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes what `keep` newer complete checkpoints make needless, and what belongs to a course that was given up.

    An incomplete one does not count, and stays until it is needless: it may only have been unreadable for a moment. A
    failure to remove is mended by the next commit.
    """
    kept = {step_of(newest)}
    for path in _checkpoints(folder):
        step = step_of(path)
        if path == newest:
            continue
        if step >= step_of(newest) or step in kept or len(kept) >= keep:
            with suppress(OSError):
                _discard(path)
        elif _looks_complete(path):
            kept.add(step)


def _looks_complete(path: Path) -> bool:
    try:
        return all((path / name).lstat().st_size == size for name, (size, _) in _manifest(path).items())
    except (CheckpointError, OSError):
        return False


def _discard(path: Path) -> None:
    """Renames before removing, so that a crash in the middle leaves nothing that looks like a checkpoint."""
    aside = path.with_name(f"{TEMPORARY}old-{path.name}-{os.getpid()}")
    _remove(aside)
    path.rename(aside)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first; a replaced one (`~`) after the one that replaced it."""
    found = [path for path in _entries(folder) if _STEP.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=_order, reverse=True)


def _order(path: Path) -> tuple[int, bool]:
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"not a checkpoint: {path}")
    return int(match[1]), not match[2]


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir() or folder.is_symlink():
        return []
    return list(folder.iterdir())
