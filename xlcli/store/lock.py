"""A lock per model folder for the process that writes in it. The operating system releases it when the process dies."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xlcli.errors import BusyError, CheckpointError
from xlcli.files import cannot_write, make_folder, read_json, write_atomic

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"
HOLDER = ".lock.json"
"""File with the process id and host of the holder, separate from the lock file, which locking may truncate."""
_HOLDER_TIMEOUT = 0.3
"""Maximum time in seconds between taking the lock and writing `HOLDER`."""

_ATTEMPTS = 10


class Holder(NamedTuple):
    """Process that holds a lock, or held it when it was killed."""

    pid: int
    host: str


@contextmanager
def lock(folder: Path) -> Iterator[str]:
    """Locks the model folder.

    A missing folder is made, and removed at the end if nothing was written in it.

    Yields:
        A warning to show if the file system has no locks, else "".

    Raises:
        BusyError: Another process holds the lock; raised within a second.
    """
    from filelock import FileLock, Timeout

    path, guard = folder / LOCK, FileLock(folder / LOCK)
    is_new = not os.path.lexists(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _acquire(guard, path)
    except Timeout:
        raise _busy(folder) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        write_atomic(folder / HOLDER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n")
        yield _warning(folder) if caught else ""
    finally:
        with suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
            if is_new and not caught and list(folder.iterdir()) == [path]:
                path.unlink()  # by its holder: a lock of a removed file is not valid
                folder.rmdir()
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
        except (FileNotFoundError, NotADirectoryError):
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
    deadline = time.monotonic() + _HOLDER_TIMEOUT
    while not (found := holder(folder)) or not _may_live(found):
        if time.monotonic() > deadline:
            return BusyError(f"{folder} is in use by another process.", "Wait for it, or train into another folder.")
        time.sleep(0.02)
    return BusyError(
        f"{folder} is in use by process {found.pid} on {found.host[:64]!a}.".replace("'", ""),
        "Wait for it, stop it, or train into another folder with --out.",
    )


def _may_live(found: Holder) -> bool:
    """False only if the holder is a process of this host that no longer exists."""
    if found.host != socket.gethostname():
        return True
    try:
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _warning(folder: Path) -> str:
    return (
        f"the file system of {folder} has no locks, so a second writer may not be noticed; "
        f"after a crash remove {folder / LOCK}."
    )
