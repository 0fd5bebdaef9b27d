"""The cache folder: token files, what they were made from, and their removal.

A process that uses a token file holds a shared lock on it (`hold`), which ends with the last mapping of the file.
A file without such a lock may be removed: the least recently used ones beyond a total size, those unused for a month,
and the unfinished ones of killed processes. The time of the last change of a file is that of its last use. Files that
do not begin as token files do are not ours, and stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xlcli.errors import ResourceError
from xlcli.files.plain import TEMPORARY_NAME, temporary_path

HEADER = 512
"""Size of the header of a token file in bytes."""
MAX_BYTES = 10 * 10**9
"""Maximum total size of the token files; less if a tenth of the disk that they could use is less."""
UNUSED_SECONDS = 30 * 86400
"""Time after which an unused token file is removed."""

_FAMILY = b"xltoken"
"""First bytes of a token file of any version, finished or not."""
_MAGIC = _FAMILY + b"3"
_LAYOUT = struct.Struct("<8sIQQIQ")
_LABEL = 64
"""Offset of the label in the header."""
_FILE = re.compile(r"[0-9a-f]{40}\.tokens")
_UNFINISHED = re.compile(TEMPORARY_NAME.pattern + r"\.tokens")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_RECENT_SECONDS = 86400
"""Time for which a file counts as used where the file system has no locks."""
_ATTEMPTS = 20
_RETRY_SECONDS = 0.01
_REMEDY = "Set XLCLI_CACHE to a writable folder."


class TokenHeader(NamedTuple):
    """Header of a token file.

    Size of a record, tokens, bytes of text, CRC-32 of the data; tokenizer and text; number of documents, 0 if they are
    not separated.
    """

    item_size: int
    n_tokens: int
    n_bytes: int
    crc: int
    tokenizer: str
    text: str
    n_documents: int = 0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A token file.

    Attributes:
        path: The file.
        bytes: Its size.
        age: Seconds since its last use.
        header: Its header; None if it is unfinished or damaged.
        unfinished: Whether it is being written, or was when its process was killed.
        in_use: Whether a process uses it.
    """

    path: Path
    bytes: int
    age: float
    header: TokenHeader | None
    unfinished: bool
    in_use: bool


def cache_folder() -> Path:
    """`XLCLI_CACHE`, else `XDG_CACHE_HOME/xlcli`, else `~/.cache/xlcli`; created with mode 0700 if missing.

    Raises:
        ResourceError: It cannot be created or written.
    """
    given, base = os.environ.get("XLCLI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "xlcli"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(f"the cache folder cannot be created: {error}.", _REMEDY) from None
    if not writable:
        raise ResourceError(f"the cache folder {folder} cannot be written.", _REMEDY)
    return folder


def unfinished_path(folder: Path) -> Path:
    """A new path for a token file that is being written."""
    return temporary_path(folder).with_suffix(".tokens")


def begin(file: BinaryIO) -> None:
    """Writes a header that marks a new file as an unfinished token file."""
    file.write(_MAGIC.ljust(HEADER, b"\0"))
    file.flush()


def pack_header(header: TokenHeader) -> bytes:
    """Header as bytes; tokenizer and text are shortened to fit."""
    fixed = _LAYOUT.pack(_MAGIC, header.item_size, header.n_tokens, header.n_bytes, header.crc, header.n_documents)
    label = f"{header.tokenizer}\n{header.text}".encode("utf-8", "replace")[: HEADER - _LABEL]
    return (fixed.ljust(_LABEL, b"\0") + label).ljust(HEADER, b"\0")


def read_header(file: BinaryIO) -> TokenHeader | None:
    """Header at the beginning of a file; None if it is no token file, or not of the size that its header gives."""
    data = file.read(HEADER)
    if len(data) < HEADER:
        return None
    magic, item_size, n_tokens, n_bytes, crc, n_documents = _LAYOUT.unpack_from(data)
    size = HEADER + n_tokens * item_size + 8 * n_documents
    if magic != _MAGIC or os.fstat(file.fileno()).st_size != size:
        return None
    tokenizer, _, text = data[_LABEL:].rstrip(b"\0").decode("utf-8", "ignore").partition("\n")
    return TokenHeader(item_size, n_tokens, n_bytes, crc, tokenizer, text, n_documents)


def hold(file: BinaryIO) -> bool:
    """Marks an open file as used until its descriptor and the mappings made from it are closed.

    Returns False if another process keeps it from that.
    """
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                return True  # the file system has no locks
            time.sleep(_RETRY_SECONDS)  # for as long as `entries` looks at it
        else:
            return True
    return False


def entries(folder: Path) -> list[CacheEntry]:
    """Token files of the cache folder, least recently used first."""
    found = []
    for path in folder.iterdir():
        unfinished = bool(_UNFINISHED.fullmatch(path.name))
        if unfinished or _FILE.fullmatch(path.name):
            try:
                with path.open("r+b") as file:
                    if not _is_ours(file):
                        continue
                    status = os.fstat(file.fileno())
                    age = max(time.time() - status.st_mtime, 0.0)
                    header = None if unfinished else read_header(file)
                    found.append(CacheEntry(path, status.st_size, age, header, unfinished, _is_held(file, age)))
            except OSError:  # removed meanwhile, or of another user
                continue
    return sorted(found, key=lambda entry: entry.age, reverse=True)


def limit(folder: Path, held: int) -> int:
    """Maximum total size of the token files, if they have `held` bytes now."""
    return min(MAX_BYTES, (shutil.disk_usage(folder).free + held) // 10)


def prune(folder: Path, *, max_bytes: int | None = None, unused_seconds: float = UNUSED_SECONDS) -> list[CacheEntry]:
    """Removes token files that no process uses; returns them.

    Args:
        folder: The cache folder.
        max_bytes: Maximum total size of all files, for which the least recently used ones are removed; None is `limit`.
        unused_seconds: Files that have not been used for this time are removed in any case.
    """
    found = entries(folder)
    total = sum(entry.bytes for entry in found)
    if max_bytes is None:
        max_bytes = limit(folder, total)
    expired = [entry for entry in found if entry.unfinished or entry.age >= unused_seconds]
    removed = [entry for entry in expired if _remove(entry)]
    total -= total_bytes(removed)
    for entry in found:
        if total > max_bytes and entry not in expired and _remove(entry):
            total -= entry.bytes
            removed.append(entry)
    return removed


def _remove(entry: CacheEntry) -> bool:
    """Removes a file unless a process uses it, or has replaced it."""
    try:
        with entry.path.open("r+b") as file:
            status = os.fstat(file.fileno())
            if not _is_ours(file) or _is_held(file, entry.age) or not os.path.samestat(status, entry.path.lstat()):
                return False
            entry.path.unlink()  # under the exclusive lock, so that no process can take the shared lock
    except OSError:
        return False
    return True


def _is_ours(file: BinaryIO) -> bool:
    """Whether an open file begins as a token file of any version; its position is its beginning afterwards."""
    found = file.read(len(_FAMILY))
    file.seek(0)
    return found == _FAMILY


def _is_held(file: BinaryIO, age: float) -> bool:
    """Whether a process uses an open file; if not, the descriptor has the exclusive lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY or age < _RECENT_SECONDS
    return False


def total_bytes(found: Iterable[CacheEntry]) -> int:
    """Total size of files."""
    return sum(entry.bytes for entry in found)


def is_of_another_version(path: Path) -> bool:
    """Whether a file is a token file of an older or newer format, by its first bytes."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError:
        return False
    return magic.startswith(_MAGIC[:-1]) and magic != _MAGIC
