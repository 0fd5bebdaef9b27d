"""The one writer of a model folder: its lock, and what killed writers left unfinished. Imports no torch.

The operating system releases the lock when the process dies. Unfinished files and folders are

    .tmp-xlcli-HHHHHHHHHHHHHHHH        beside the file that is being written, and in a model folder and its checkpoints
    .tmp-xlcli-model-HHHHHHHHHHHHHHHH  a model that is being copied, beside models; it holds its own lock

H are hexadecimal digits, of a hash in names of files, random in those of folders. The next writer of a file removes
what an earlier one has left if nobody holds its lock (`files.write_atomic`). In a model folder, under its lock, all of
the first kind are removed; of the second kind, a folder whose lock is free and that was made more than a minute ago.
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
from typing import TYPE_CHECKING

from xlcli.errors import BusyError, CheckpointError, XLError
from xlcli.files import TEMPORARY, TEMPORARY_NAME, cannot_write, make_folder, read_json, remove_empty, write_atomic
from xlcli.store import layout
from xlcli.store.layout import CHECKPOINTS, CONFIG, KEPT, METRICS, RECORD, WEIGHTS

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"
HOLDER = ".lock.json"  # process id and host of the holder, apart from the lock file, which locking may truncate
_ATTEMPTS = 10
SECONDS_TO_LOCK = 60  # time that a process has to lock a folder that it has made


@contextmanager
def lock(folder: Path) -> Iterator[str]:
    """Locks a model folder for the body of the `with`; `BusyError`, within a second, if another process has the lock.

    A missing folder is made with its parents, and removed with them at the end if nothing was written in it. The body
    gets a warning to show if the file system has no locks, else "".
    """
    from filelock import FileLock, Timeout

    path = folder / LOCK
    guard = FileLock(path)
    missing_folders = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        with warnings.catch_warnings(record=True) as warnings_of_library:
            warnings.simplefilter("always")
            _acquire(guard, path)
    except Timeout:
        raise _busy(folder) from None
    except OSError as error:
        remove_empty(missing_folders)
        raise cannot_write(path, error) from error
    has_locks = not warnings_of_library  # it warns, and goes on, if the file system has none
    warning = ""
    if not has_locks:
        problem = f"the file system of {folder} has no locks, so a second writer may not be noticed"
        warning = f"{problem}; after a crash remove {path}."
    try:
        write_atomic(folder / HOLDER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n")
        yield warning
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
            was_made_here, is_empty = bool(missing_folders), list(folder.iterdir()) == [path]
            if was_made_here and is_empty and has_locks:
                path.unlink()  # while it is locked: a lock of a removed file is not valid
                remove_empty(missing_folders)
        guard.release()


@contextmanager
def lock_state(path: Path) -> Iterator[None]:
    """Locks a state file for the body of the `with`, by a file `.NAME.lock`; `BusyError` if another process has."""
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


def _busy(folder: Path) -> BusyError:
    """The error for a folder in use, which names the process that holds its lock, unless its note is unreadable."""
    problem = f"{folder} is in use by another process."
    remedy = "Wait for it, or train into another folder."
    with suppress(CheckpointError):
        match read_json(folder / HOLDER):
            case {"pid": int(pid), "host": str(host)} if type(pid) is int and 0 < pid < 2**31:
                shown_host = ascii(host[:64]).strip("'")  # another user may have written it
                problem = f"{folder} is in use by process {pid} on {shown_host}."
                remedy = "Wait for it, stop it, or train into another folder with --out."
    return BusyError(problem, remedy)


# Unfinished files and folders

STAGED = ".replacement"  # folder of a run that is to replace the one in its model folder
RUN_FILES = (CONFIG, *layout.CHECKED, RECORD, METRICS, KEPT, CHECKPOINTS, WEIGHTS)
"""Everything that belongs to a run, in the order in which it is put in place and in the opposite order removed. Without
weights a reader finds no model; without a configuration a corpus reader would take the texts for its own."""

MODEL = f"{TEMPORARY}model-"
_MODEL_NAME = re.compile(re.escape(MODEL) + "[0-9a-f]{16}")


def is_unfinished(path: Path) -> bool:
    """True if an entry of a model folder, or of its checkpoints, is an unfinished file or folder, by its name."""
    return TEMPORARY_NAME.fullmatch(path.name) is not None and not path.is_symlink()


def clean(folder: Path) -> None:
    """Removes what crashed runs left unfinished in a model folder, whose lock the caller holds, or its checkpoints."""
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        for path in list(folder.iterdir()):
            if is_unfinished(path):
                remove(path)
    except OSError as error:
        raise cannot_write(folder, error) from error


def clean_models(folder: Path) -> None:
    """Removes models that were being copied into a folder by processes that have ended, as far as it can."""
    for path in list(folder.iterdir()):
        with suppress(OSError, XLError):
            may_lack_lock = time.time() - path.stat().st_mtime < SECONDS_TO_LOCK
            if may_lack_lock or path.is_symlink() or not _MODEL_NAME.fullmatch(path.name):
                continue
            with lock(path):  # `BusyError` if a process still copies
                shutil.rmtree(path)


def remove(path: Path) -> None:
    """Removes a folder with its content, or a file; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
