"""Bytes and JSON on disk: writes are atomic and durable, reads are bounded in size. Imports no torch.

- Reading follows symbolic links to regular files. Writing replaces a link in a model folder, so that it never changes
  what others link to; outputs that the user names are written where their links lead (`linked`).
- Reading raises `CheckpointError`; writing raises `ResourceError` (disk full, I/O error, read-only, no permission) or
  `ConfigError` (a path that cannot be a file). Both raise `ResourceError` if too many files are open.
- No other user can write the cache folder and those below it whose content is executed. A group with the name of the
  user and without other members may: systems with such groups set the umask 002.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import grp
import hashlib
import io
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from xlcli.errors import CheckpointError, ConfigError, ResourceError, XLError

JSON_LIMIT = 2**20  # maximum size of a JSON file in bytes
VOCABULARY_LIMIT = 2**26  # maximum bytes of the file of a vocabulary
JSON_DEPTH = 20  # maximum nesting depth of a JSON file
TEMPORARY = ".tmp-xlcli-"  # prefix of the names of unfinished files and folders
TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{16}")
"""Names of unfinished files, and of folders by `temporary_path`."""

_MOST_WRITERS = 100
_LONE = re.compile("[\\ud800-\\udfff]")
_BLOCK = 2**20
_MOST_AT_ONCE = 2**30
_READ = os.O_RDONLY | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_PATH_MISTAKES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)  # error numbers for too many open files
CLOSE_FILES = "Close other programs, or raise the limit of open files: ulimit -n 4096."
"""Remedy for too many open files."""
DISK_REMEDIES = {  # error number of a failed write to remedy
    errno.ENOSPC: "Free some space on that disk, or choose another folder, and run the same command again.",
    errno.EDQUOT: "Free some of your quota, or choose another folder, and run the same command again.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or choose a disk that allows larger files.",
    errno.EIO: "The disk reports errors: choose a folder on another one.",
}
STANDARD_INPUT = "standard input"  # name of `-` in messages and progress
RESTORE = "Restore the file from a copy, or choose another model."  # remedy for a damaged file


# Writing


def as_utf8(text: str) -> str:
    """`text` with U+FFFD for halves of surrogate pairs, as which Python reads the bytes of names that are not UTF-8."""
    if text.isascii():  # most are, and are not searched
        return text
    return _LONE.sub("\ufffd", text)


def temporary_path(folder: Path, prefix: str = TEMPORARY) -> Path:
    """A new path in a folder: the prefix and 16 random hexadecimal digits."""
    return folder / f"{prefix}{secrets.token_hex(8)}"


def write_atomic(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Replaces the content of `path` by `data`, durably; on any error the old content is kept.

    Writes and syncs a temporary file beside it, renames it over `path`, syncs the folder. A replaced file keeps its
    mode, a new one has `mode` without the umask.
    """
    pieces = [data] if isinstance(data, bytes) else data
    with replacing(path, mode) as (write, _):
        for piece in pieces:
            write(piece)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[tuple[Callable[[bytes], None], Path]]:
    """Function that writes pieces of the new content of `path`, and the temporary file; otherwise as `write_atomic`."""
    try:
        mode_of_replaced = _mode_of_replaced(path)
        with _unfinished(path, mode) as (descriptor, temporary):
            if mode_of_replaced is not None:
                with suppress(PermissionError):
                    os.fchmod(descriptor, mode_of_replaced)
            yield partial(write_all, descriptor), temporary
            os.fsync(descriptor)
            temporary.replace(path)
        sync_folder(path.parent)
    except BrokenPipeError:  # of standard output or standard error
        raise
    except OSError as error:
        raise cannot_write(path, error) from error


def linked(path: Path) -> Path:
    """The file that an output is written to: where a link leads."""
    if os.path.islink(path):  # noqa: PTH114
        return Path(os.path.realpath(path))
    return path


def check_writable(path: Path, n_bytes: int = 0) -> None:
    """Raises the error that `write_atomic` would raise for so many bytes, as far as it is known before writing."""
    try:
        _mode_of_replaced(path)
        with _unfinished(path, 0o666) as (descriptor, temporary):
            write_all(descriptor, bytes(n_bytes))
            temporary.unlink()
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def _unfinished(path: Path, mode: int) -> Iterator[tuple[int, Path]]:
    """Descriptor and path of a new file beside `path`, which is closed at the end, and removed on any error."""
    descriptor, temporary = _create_beside(path, mode)
    try:
        yield descriptor, temporary
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _create_beside(path: Path, mode: int) -> tuple[int, Path]:
    """Descriptor and path of a new file, whose name is a hash of that of `path` and of a number.

    It is the first number that no other writer of `path` uses. The file is locked while it is open, so that a writer
    recognizes what a kill has left, and removes it.
    """
    for number in range(_MOST_WRITERS):
        digest = hashlib.sha256(os.fsencode(f"{path.name}/{number}")).hexdigest()
        temporary = path.parent / f"{TEMPORARY}{digest[:16]}"
        with suppress(OSError):
            _remove_abandoned(temporary)
        try:
            descriptor = os.open(temporary, _CREATE, mode)
        except FileExistsError:  # of another writer
            continue
        try:
            is_taken = not _lock(descriptor, temporary)
        except OSError:  # the file system has no locks
            is_taken = False
        if not is_taken:
            return descriptor, temporary
        os.close(descriptor)
    raise ConfigError(f"another process is writing {path}.", f"Wait for it. If none is, remove {temporary}.")


def _remove_abandoned(path: Path) -> None:
    """Removes a file, if it is a regular one that no process has locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_regular and _lock(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Locks an open file; False if another process has, or if `path` is another file by now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def append_line(path: Path, line: bytes) -> None:
    """Appends a line in one write."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            write_all(descriptor, line + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_file(path: Path) -> None:
    """Makes the content and the name of a file durable; a missing file is left missing."""
    try:
        _sync(path)
        sync_folder(path.parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write(path, error) from error


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, durably; existing ones are left as they are. Raises `OSError`."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    sync_folder(folder.parent)


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes those of the folders, given from the innermost on, that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable, on file systems where a folder can be synced."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def cannot_write(path: Path, error: OSError) -> XLError:
    reason = (error.strerror or str(error)).lower()
    if error.errno in TOO_MANY_FILES:
        return ResourceError(f"cannot write {path}: {reason}.", CLOSE_FILES)
    if error.errno in _PATH_MISTAKES:
        return ConfigError(f"cannot write {path}: {reason}.", "Choose a path in a folder that exists.")
    remedy = DISK_REMEDIES.get(error.errno or 0, "Choose a folder that you may write to.")
    return ResourceError(f"cannot write {path}: {reason}.", remedy)


def _mode_of_replaced(path: Path) -> int | None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"cannot write {path}: it is {kind_of(mode)}.", "Choose the path of a file.")
    return stat.S_IMODE(mode) & 0o777


def _sync(path: Path) -> None:
    descriptor = os.open(path, _READ)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of the data to a descriptor, at its place."""
    view = memoryview(data).cast("B")
    while view:
        n_written = os.write(descriptor, view[:_MOST_AT_ONCE])
        view = view[n_written:]


# Reading


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[io.BufferedReader, os.stat_result]]:
    """A regular file, open for reading, and its status; folders, FIFOs and devices are refused without opening them."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is {kind_of(mode)}, not a file.", RESTORE)
        with open(path, "rb", opener=lambda path, _: os.open(path, _READ)) as file:
            yield file, os.fstat(file.fileno())
    except OSError as error:
        raise cannot_read(path, error) from None


def is_pipe(name: str | Path) -> bool:
    """True for `-` and for a named pipe, such as `<(command)` of a shell; each can be read only once."""
    with suppress(OSError, ValueError):
        return str(name) == "-" or stat.S_ISFIFO(os.stat(name).st_mode)  # noqa: PTH116 (a name that is impossible)
    return False


def identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode, which all names of a file share."""
    return status.st_dev, status.st_ino


def version(status: os.stat_result) -> tuple[int, int, int]:
    """Numbers that change when a file is replaced or written to."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_blocks(path: Path) -> Iterator[bytes]:
    """Content of a regular file in blocks, no more than it had when it was opened."""
    with open_regular(path) as (file, status):
        left = status.st_size
        while left > 0:
            block = file.read(min(_BLOCK, left))
            if not block:  # it has been cut since
                return
            left -= len(block)
            yield block


def read_bounded(path: Path, limit: int) -> bytes:
    """Content of a regular file of at most `limit` bytes."""
    with open_regular(path) as (file, status):
        if status.st_size > limit:
            raise CheckpointError(f"{path} is larger than the {limit:,} bytes allowed.", RESTORE)
        data = file.read(status.st_size + 1)
    if len(data) != status.st_size:
        raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 1 MiB, as `parse_json`."""
    try:
        tree = parse_json(read_bounded(path, JSON_LIMIT))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {str(error).rstrip('.')}.", RESTORE) from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is damaged: it holds no JSON object.", RESTORE)
    return tree


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`; `ValueError` if it is none that is accepted.

    It may nest 20 levels deep, and has no key twice, no number that is not finite and no half of a surrogate pair.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique_keys)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses NaN, infinity and lone surrogates
        if json_depth(value) <= JSON_DEPTH:
            return value
    except RecursionError:
        pass
    raise ValueError(f"it nests deeper than {JSON_DEPTH} levels")


def json_depth(value: Any) -> int:
    """Number of lists and objects around the innermost value; `RecursionError` if it is about a thousand."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(json_depth, value), default=0)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dictionary, for `object_pairs_hook` of the library; `ValueError` if a key occurs twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key occurs twice")
    return table


def sha256(path: Path) -> str:
    """SHA-256 of a regular file as hexadecimal digits, computed in constant RAM."""
    with open_regular(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(tree: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a table (keys sorted, no blanks, ASCII) as hexadecimal digits."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def cannot_read(path: Path, error: OSError) -> XLError:
    reason = (error.strerror or str(error)).lower()
    if error.errno in TOO_MANY_FILES:
        return ResourceError(f"cannot read {path}: {reason}.", CLOSE_FILES)
    if os.path.islink(path):  # noqa: PTH114
        problem = f"{path} is a symbolic link to {os.path.realpath(path)}, which cannot be read: {reason}."
        return CheckpointError(problem, "Fetch that file, or put a copy in place of the link.")
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{path} does not exist.", "Check the path.")
    return CheckpointError(f"cannot read {path}: {reason}.", "Check the path.")


def kind_of(mode: int) -> str:
    """What is no file, by its mode: a folder, a pipe, a socket or a device."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


# Folders and files that no other user can write

CACHE = "XLCLI_CACHE"  # environment variable of the cache folder
CHECKSUM = hashlib.blake2b().digest_size  # size of the checksum at the beginning of a cache file in bytes


def cache_folder(say: Callable[[str], None] = lambda _: None) -> Path:
    """`XLCLI_CACHE`, else `XDG_CACHE_HOME/xlcli`, else `~/.cache/xlcli`, as `own_folder`.

    If the variable is not set and that folder cannot be used, it is set to a temporary folder, which is removed when
    the process ends; `say` gets the reason.
    """
    chosen = os.environ.get(CACHE)
    if chosen:
        return own_folder(Path(chosen), CACHE)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path("~/.cache")
    try:
        return own_folder(base / "xlcli", CACHE)
    except XLError as error:
        temporary = tempfile.mkdtemp(prefix="xlcli-")
        os.environ[CACHE] = temporary
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        say(f"{error.message} This run caches in a temporary folder; set {CACHE} to keep its cache.")
        return own_folder(Path(temporary), CACHE)


def process_folder() -> Path:
    """A new folder in the cache folder, for a library that does not check its files; removed when the process ends."""
    folder = own_folder(temporary_path(cache_folder()), CACHE)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def code_folder(name: str, variable: str) -> Path:
    """The folder in this environment variable, else the one of this name in the cache folder, as `own_folder`."""
    chosen = os.environ.get(variable)
    if chosen:
        return own_folder(Path(chosen), variable)
    return own_folder(cache_folder() / name, CACHE)


def own_folder(folder: Path, variable: str) -> Path:
    """A folder without links in its path; it is made with mode 0700 if it is missing.

    The folders above it are checked, too, but for those above the home folder: who can replace that needs no cache. The
    environment variable `variable` chooses it. `ConfigError` if another user owns or can write the folder, or one above
    it that is not sticky; `ResourceError` if the folder cannot be created or written.
    """
    remedy = f"Set {variable} to a folder that only you can write."
    try:
        folder = folder.expanduser()
        for place in (*reversed(folder.parents), folder):
            place.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()
        home = os.path.expanduser("~")  # noqa: PTH111
        above_home = Path(home).resolve().parents if os.path.isabs(home) else ()  # noqa: PTH117
        # From above, because nobody exchanges what lies below a folder that was found safe.
        statuses: dict[Path, os.stat_result] = {}
        for place in (*reversed(folder.parents), folder):
            if place not in above_home:
                statuses[place] = place.lstat()
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(f"the cache folder cannot be created: {error}.", remedy) from None
    for place, status in statuses.items():
        if not _is_own(status, may_be_sticky=place != folder):
            raise ConfigError(f"{folder} is not safe: {place} belongs to another user, or others can write it.", remedy)
    if not is_writable:
        raise ResourceError(f"the cache folder {folder} cannot be written.", remedy)
    return folder


def checksum(name: str, content: bytes = b"") -> hashlib.blake2b:
    """Hash of the name and the content of a cache file, to be updated with more; no file passes as another one."""
    return hashlib.blake2b(name.encode() + content)


def write_checked(path: Path, content: bytes) -> None:
    """Writes a cache file for `read_checked`, of mode 0600; raises the errors of `write_atomic`."""
    with suppress(OSError):
        path.unlink()  # its mode would be kept
    write_atomic(path, (checksum(path.name, content).digest(), content), mode=0o600)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` wrote, or None; `ConfigError` if it is a link, or another user owns or can write it."""
    try:
        with open_regular(path) as (file, status):
            if path.is_symlink() or not _is_own(status):
                raise ConfigError(f"{path} is a link, belongs to another user, or others can write it.", "Remove it.")
            found, content = file.read(CHECKSUM), file.read()
    except CheckpointError:
        return None
    return content if checksum(path.name, content).digest() == found else None


def _is_own(status: os.stat_result, *, may_be_sticky: bool = False) -> bool:
    """True if this user or root owns a file or folder, and no other user can write it, or replace what is in it."""
    if status.st_uid not in (os.geteuid(), 0):
        return False
    if may_be_sticky and status.st_mode & stat.S_ISVTX:  # others can write, but not replace what is not theirs
        return True
    if status.st_mode & stat.S_IWOTH:
        return False
    is_writable_by_group = status.st_mode & stat.S_IWGRP
    return not is_writable_by_group or _is_private(status.st_gid)


def _is_private(gid: int) -> bool:
    """True if a group belongs to this user alone."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
