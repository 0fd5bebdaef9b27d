"""The one writer of a model folder: its lock, and what killed writers left unfinished. Imports no torch.

The operating system releases the lock when the process dies. Unfinished files and folders are

    .tmp-xlcli-HHHHHHHHHHHHHHHH        beside the file that is being written, and in a model folder and its checkpoints
    .tmp-xlcli-model-HHHHHHHHHHHHHHHH  a model that is being copied, beside models; it holds its own lock

H are hexadecimal digits, of a hash in names of files, random in those of folders. Nothing is removed by its name alone.
The next writer of a file removes what an earlier one has left if nobody holds its lock (`files.write_atomic`). In a
model folder, under its lock, all of the first kind are removed: files, and folders in which every name is one that
xlcli gives. The second kind is such a folder with the note of a holder, whose lock is free, or one that has been empty
for a minute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xlcli.errors import BusyError, CheckpointError, XLError
from xlcli.files import TEMPORARY, TEMPORARY_NAME, cannot_write, make_folder, read_json, remove_empty, write_atomic
from xlcli.store import layout
from xlcli.store.layout import CHECKPOINTS, CONFIG, KEPT, METRICS, POINT, RECORD, STEP, WEIGHTS

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"
HOLDER = ".lock.json"
"""File with the process id and host of the holder, separate from the lock file, which locking may truncate."""
_ATTEMPTS = 10


class Holder(NamedTuple):
    """Process that holds a lock, or held it when it was killed."""

    pid: int
    host: str


@contextmanager
def lock(folder: Path) -> Iterator[str]:
    """Locks the model folder.

    A missing folder is made with its parents, and removed with them at the end if nothing was written in it.

    Yields:
        A warning to show if the file system has no locks, else "".

    Raises:
        BusyError: Another process holds the lock; raised within a second.
    """
    from filelock import FileLock, Timeout

    path, guard = folder / LOCK, FileLock(folder / LOCK)
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _acquire(guard, path)
    except Timeout:
        raise _busy(folder) from None
    except OSError as error:
        remove_empty(missing)
        raise cannot_write(path, error) from error
    try:
        write_atomic(folder / HOLDER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n")
        yield (
            f"the file system of {folder} has no locks, so a second writer may not be noticed; "
            f"after a crash remove {path}."
            if caught
            else ""
        )
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
            if missing and not caught and list(folder.iterdir()) == [path]:
                path.unlink()  # by its holder: a lock of a removed file is not valid
                remove_empty(missing)
        guard.release()


@contextmanager
def lock_state(path: Path) -> Iterator[None]:
    """Locks a state file by the file `.NAME.lock` beside it, which is removed at the end.

    Raises:
        BusyError: Another process holds the lock.
    """
    from filelock import FileLock, Timeout

    name = path.with_name(f".{path.name}.lock")
    guard = FileLock(name)
    try:
        guard.acquire(timeout=0)
    except Timeout:
        raise BusyError(f"{path} is in use by another process.", "Wait for it, or choose another --state.") from None
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield
    finally:
        name.unlink(missing_ok=True)  # by its holder: a lock of a removed file is not valid
        guard.release()


def _acquire(guard: FileLock, path: Path) -> None:
    """Takes the lock; makes its folder, again if the last holder has just removed it."""
    for attempt in range(_ATTEMPTS):
        try:
            make_folder(path.parent)
            if path.is_symlink():
                raise CheckpointError(f"{path} is a symbolic link.", "Remove it.")
            guard.acquire(timeout=0)
            return
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            if attempt == _ATTEMPTS - 1:
                raise


def holder(folder: Path) -> Holder | None:
    """The last holder of the lock that has not released it; None if there is none or its file is unreadable."""
    try:
        tree = read_json(folder / HOLDER)
    except CheckpointError:
        return None
    pid, host = tree.get("pid"), tree.get("host")
    return Holder(pid, host) if type(pid) is int and 0 < pid < 2**31 and isinstance(host, str) else None


def _busy(folder: Path) -> BusyError:
    """The error for a folder in use, which names the holder unless that is a process of this host that has ended."""
    found = holder(folder)
    if found is not None and found.host == socket.gethostname():
        try:
            os.kill(found.pid, 0)
        except ProcessLookupError:
            found = None
        except OSError:
            pass
    if found is None:
        return BusyError(f"{folder} is in use by another process.", "Wait for it, or train into another folder.")
    return BusyError(
        f"{folder} is in use by process {found.pid} on {found.host[:64]!a}.".replace("'", ""),
        "Wait for it, stop it, or train into another folder with --out.",
    )


# Unfinished files and folders


STAGED = ".replacement"
INSTALLING = ".installing"

RUN_FILES = (CONFIG, *layout.CHECKED, RECORD, METRICS, KEPT, CHECKPOINTS, WEIGHTS)
"""Everything that belongs to a run, in the order in which it is put in place and in the opposite order removed. Without
weights a reader finds no model; without a configuration a corpus reader would take the texts for its own."""

_OF_CHECKPOINTS = (layout.MANIFEST, layout.LATEST, *layout.CHECKPOINT_FILES, layout.BEST)
_OF_EXPORTS = ("xlcli", "vocab.txt", "tokenizer_config.json")
_FILES = {*RUN_FILES, *_OF_CHECKPOINTS, *_OF_EXPORTS, LOCK, HOLDER} - {CHECKPOINTS, KEPT}
_FOLDERS = {CHECKPOINTS, KEPT, STAGED, INSTALLING, layout.TENSORBOARD, *_OF_EXPORTS}
MODEL = f"{TEMPORARY}model-"
_MODEL_NAME = re.compile(re.escape(MODEL) + "[0-9a-f]{16}")


def is_own(path: Path) -> bool:
    """True if a path is a regular file, or a folder of files and folders with names that xlcli gives, at any depth."""
    if path.is_symlink() or not path.is_dir():
        return path.is_file() and not path.is_symlink()
    for entry in path.iterdir():
        if entry.is_dir():
            is_named = entry.name in _FOLDERS or any(name.fullmatch(entry.name) for name in (STEP, POINT))
        else:
            is_named = entry.name in _FILES or entry.name.startswith(layout.EVENTS)
        if not (is_named or TEMPORARY_NAME.fullmatch(entry.name)) or not is_own(entry):
            return False
    return True


def is_unfinished(path: Path) -> bool:
    """True if an entry of a model folder, or of its checkpoints, is an unfinished file or folder of xlcli."""
    return TEMPORARY_NAME.fullmatch(path.name) is not None and is_own(path)


def clean(folder: Path) -> None:
    """Removes the unfinished files and folders of crashed runs from a model folder or its checkpoints.

    The caller holds the lock of the model folder.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        for path in list(folder.iterdir()):
            if is_unfinished(path):
                remove(path)
    except OSError as error:
        raise cannot_write(folder, error) from error


def clean_models(folder: Path) -> None:
    """Removes models beside others that were being copied by processes that have ended.

    One that cannot be removed stays.
    """
    for path in list(folder.iterdir()):
        with suppress(OSError, XLError):
            if _MODEL_NAME.fullmatch(path.name) and is_own(path) and (holder(path) or _is_begun(path)):
                with lock(path):
                    for entry in list(path.iterdir()):
                        if entry.name not in (LOCK, HOLDER):
                            remove(entry)
                    for name in (LOCK, HOLDER):  # the note of the holder last, so that a kill leaves it
                        (path / name).unlink(missing_ok=True)
                    path.rmdir()


def _is_begun(path: Path) -> bool:
    """True if a process had a minute to write its note into a folder in which there is nothing else."""
    is_empty = all(entry.name == LOCK or TEMPORARY_NAME.fullmatch(entry.name) for entry in path.iterdir())
    return is_empty and time.time() - path.stat().st_mtime > 60


def remove(path: Path) -> None:
    """Removes a folder with its content, or a file; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
