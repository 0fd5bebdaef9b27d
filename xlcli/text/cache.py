"""The cache folder, the header of token files, and the removal of old ones.

A process that uses or writes a token file holds a shared lock on it (`hold`), which ends with the last mapping of the
file. A file without such a lock may be removed. The time of the last change of a file is that of its last use. Files
that do not begin as token files do are not ours, and stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xlcli.files import TEMPORARY_NAME, temporary_path

HEADER = 64
"""Size of the header of a token file in bytes."""
MAX_BYTES = 10 * 10**9
"""Maximum total size of the token files; less if a tenth of the disk that they could use is less."""

_FAMILY = b"xltoken"
"""First bytes of a token file of any version, finished or not."""
_MAGIC = _FAMILY + b"4"
_LAYOUT = struct.Struct("<8sIQQIQ")
_FILE = re.compile(r"[0-9a-f]{40}\.tokens")
_UNFINISHED = re.compile(TEMPORARY_NAME.pattern + r"\.tokens")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_RECENT_SECONDS = 86400
"""Time for which a file counts as used where the file system has no locks."""


class TokenHeader(NamedTuple):
    """Header of a token file.

    Size of a record, tokens, bytes of text, CRC-32 of the data, number of documents (0 if they are not separated).
    """

    item_size: int
    n_tokens: int
    n_bytes: int
    crc: int
    n_documents: int = 0


def unfinished_path(folder: Path) -> Path:
    """A new path for a token file that is being written."""
    return temporary_path(folder).with_suffix(".tokens")


def begin(file: BinaryIO) -> None:
    """Writes a header that marks a new file as an unfinished token file."""
    file.write(_MAGIC.ljust(HEADER, b"\0"))
    file.flush()


def pack_header(header: TokenHeader) -> bytes:
    """Header as bytes."""
    return _LAYOUT.pack(_MAGIC, *header).ljust(HEADER, b"\0")


def read_header(file: BinaryIO) -> TokenHeader | None:
    """Header at the beginning of a file; None if it is no token file, or not of the size that its header gives."""
    data = file.read(HEADER)
    if len(data) < HEADER:
        return None
    magic, *fields = _LAYOUT.unpack_from(data)
    header = TokenHeader(*fields)
    size = HEADER + header.n_tokens * header.item_size + 8 * header.n_documents
    return header if magic == _MAGIC and os.fstat(file.fileno()).st_size == size else None


def hold(file: BinaryIO) -> bool:
    """Marks an open file as used until its descriptor and the mappings made from it are closed.

    Returns False if another process is removing it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY  # the file system may have no locks
    return True


def prune(folder: Path) -> None:
    """Removes what killed processes left unfinished, then the least recently used files beyond the limit."""
    found = []
    for path in folder.iterdir():
        unfinished = bool(_UNFINISHED.fullmatch(path.name))
        if unfinished or _FILE.fullmatch(path.name):
            with suppress(OSError):  # removed meanwhile
                status = path.lstat()
                found.append((not unfinished, status.st_mtime, status.st_size, path))
    total = sum(size for _, _, size, _ in found)
    limit = min(MAX_BYTES, (shutil.disk_usage(folder).free + total) // 10)
    for finished, used, size, path in sorted(found):
        if (total > limit or not finished) and _remove(path, used):
            total -= size


def _remove(path: Path, used: float) -> bool:
    """Removes a token file that was last used at this time, unless a process uses it or has replaced it."""
    try:
        with path.open("r+b") as file:
            if file.read(len(_FAMILY)) != _FAMILY:
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY or time.time() - used < _RECENT_SECONDS:
                    return False
            if not os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                return False
            path.unlink()  # under the exclusive lock, so that no process can take the shared lock
    except OSError:
        return False
    return True
