"""Bytes and JSON on disk: a write is whole or absent, and durable when it returns; a read is bounded.

- A symbolic link is never followed as the last part of a path: reading refuses it, writing replaces it. Pass
  `path.resolve()` where a user's own link should be followed.
- Reading raises `CheckpointError`; writing raises `ResourceError` (disk full, I/O error, read-only, no permission) or
  `ConfigError` (a path that cannot be a file).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xlcli.errors import CheckpointError, ConfigError, ResourceError, XLError

JSON_LIMIT = 2**20
"""Most bytes of a JSON file."""
JSON_DEPTH = 20
"""Deepest nesting of a JSON file."""
TEMPORARY = ".tmp-"
"""What the name of everything unfinished begins with."""

_BLOCK = 2**20
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_PATH_MISTAKES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
RESTORE = "Restore the file from a copy, or choose another model."
"""What to do about a damaged file."""


# Writing


def write_atomic(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Makes `path` hold `data`: wholly and durably, or not at all.

    Written to a temporary file in the same folder, synced, renamed over `path`, folder synced. A new file's mode
    follows the umask, a replaced file's is kept. On any error the old content stands and the temporary file is gone.
    """
    pieces = (data,) if isinstance(data, bytes) else data
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        mode = _mode_of_replaced(path)
        descriptor = os.open(temporary, _CREATE, 0o666)
        try:
            try:
                if mode is not None and hasattr(os, "fchmod"):
                    with suppress(PermissionError):
                        os.fchmod(descriptor, mode)
                for piece in pieces:
                    _write_all(descriptor, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def append_line(path: Path, line: bytes) -> None:
    """Adds one line in one write; a torn line that a crash left at the end is closed first."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (_READ & ~os.O_RDONLY)
    try:
        descriptor = os.open(path, flags, 0o666)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path} is not a regular file.", "Choose another path.")
            if facts.st_size:
                os.lseek(descriptor, -1, os.SEEK_END)
                line = line if os.read(descriptor, 1) == b"\n" else b"\n" + line
            _write_all(descriptor, line + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from error


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, durably; one that exists is left as it is. `OSError` when it cannot be."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable, where the system lets a folder be synced."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> XLError:
    """The error to raise when writing `path` met `error`."""
    reason = (error.strerror or str(error)).lower()
    if error.errno in _PATH_MISTAKES:
        return ConfigError(f"cannot write {path}: {reason}.", "Choose a path in a folder that exists.")
    remedy = {
        errno.ENOSPC: "Free some space on that disk, or choose another folder, and run the same command again.",
        errno.EDQUOT: "Free some of your quota, or choose another folder, and run the same command again.",
        errno.EIO: "The disk reports errors: choose a folder on another one.",
    }.get(error.errno or 0, "Choose a folder that you may write to.")
    return ResourceError(f"cannot write {path}: {reason}.", remedy)


def _mode_of_replaced(path: Path) -> int | None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"cannot write {path}: it is {_kind(mode)}.", "Choose the path of a file.")
    return stat.S_IMODE(mode) & 0o777


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view[: 2**30]) :]


# Reading


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Descriptor and facts of a regular file that is no link; a FIFO or a device is refused without waiting for it."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link.", "Put the file itself there.") from None
        raise cannot_read(path, error) from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError(f"{path} is {_kind(facts.st_mode)}, not a file.", RESTORE)
        yield descriptor, facts
    except OSError as error:
        raise cannot_read(path, error) from None
    finally:
        os.close(descriptor)


def read_bounded(path: Path, limit: int) -> bytes:
    """Content of a regular file of at most `limit` bytes."""
    with open_regular(path) as (descriptor, facts):
        if facts.st_size > limit:
            raise CheckpointError(f"{path} is larger than the {limit:,} bytes allowed.", RESTORE)
        data = b"".join(blocks(descriptor, limit + 1))
    if len(data) != facts.st_size:
        raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file: at most 1 MiB, 20 levels, no repeated key, no NaN, no lone surrogate."""
    return parse_json(read_bounded(path, JSON_LIMIT), path)


def sha256(path: Path) -> str:
    """Hex digest of a regular file's content, in constant memory."""
    digest = hashlib.sha256()
    with open_regular(path) as (descriptor, facts):
        for block in blocks(descriptor, facts.st_size + 1):
            digest.update(block)
    return digest.hexdigest()


def blocks(descriptor: int, limit: int) -> Iterator[bytes]:
    """Blocks of an open file, `limit` bytes in all or up to its end."""
    while limit > 0 and (block := os.read(descriptor, min(_BLOCK, limit))):
        limit -= len(block)
        yield block


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """The error to raise when reading `path` met `error`."""
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{path} does not exist.", "Check the path.")
    return CheckpointError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.", "Check the path.")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object that `data`, which stood in `path`, describes; see `read_json`."""

    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: {why}.", RESTORE)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number")

    try:
        tree = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise damaged(f"it nests deeper than {JSON_DEPTH} levels") from None
    except ValueError as error:
        raise damaged(str(error).rstrip(".")) from None
    if not isinstance(tree, dict):
        raise damaged("it holds no JSON object")
    level: list[Any] = [tree]
    for _ in range(JSON_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise damaged("it holds a number too large")
            elif isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise damaged("it holds half a surrogate pair") from None
        level = below
    if level:
        raise damaged(f"it nests deeper than {JSON_DEPTH} levels")
    return tree
