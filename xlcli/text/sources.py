"""One file of a corpus, plain or gzip, read in aligned blocks.

Files of the user are read, never memory-mapped: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from xlcli.errors import CheckpointError, DataError, ResourceError, XLError
from xlcli.files import read_json
from xlcli.text.cache import cache_folder

BLOCK = 2**20
"""Bytes of text per read."""
_SNIFF = 8192


class Spool:
    """An unnamed file, open for the lifetime of this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


@dataclass(frozen=True, slots=True)
class Source:
    """A file, its size when it was opened, and the unnamed copy if it is standard input."""

    name: str
    path: Path
    stored_bytes: int
    spool: Spool | None = None

    @property
    def seekable(self) -> bool:
        """Whether reading can start anywhere; gzip files are decompressed from their beginning."""
        return self.path.suffix != ".gz"

    def blocks(self, first: int = 0) -> Iterator[tuple[bytes, int]]:
        """Blocks of `BLOCK` bytes of text (the last one shorter) from block `first` on.

        Each comes with the number of stored bytes read so far.

        Raises:
            DataError: The file cannot be read, has become shorter, or is damaged gzip.
        """
        if self.spool is not None:
            yield from self._plain(self.spool.descriptor, first)
            return
        descriptor = _open(self.path)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            yield from self._plain(descriptor, first) if self.seekable else self._inflated(file, first)

    def changed(self) -> DataError:
        """The error for a file that has changed."""
        return DataError(
            f"{self.name} changed while it was being read.", "Wait until nothing writes to it, or copy it."
        )

    def fault(self) -> str | None:
        """Reason why this is not a text file, from its first bytes; None for a text file."""
        try:
            head, _ = next(self.blocks(), (b"", 0))
        except XLError:
            return "cannot be read"
        if not head:
            return "empty"
        return "binary data" if b"\0" in head[:_SNIFF] else None

    def _plain(self, descriptor: int, first: int) -> Iterator[tuple[bytes, int]]:
        place = first * BLOCK
        while place < self.stored_bytes:
            want = min(BLOCK, self.stored_bytes - place)
            block = b""
            while len(block) < want:
                try:
                    more = os.pread(descriptor, want - len(block), place + len(block))
                except OSError as error:
                    raise DataError(f"cannot read {self.name}: {error.strerror}.", "Check the disk.") from None
                if not more:
                    raise self.changed()
                block += more
            place += want
            yield block, place

    def _inflated(self, file: IO[bytes], first: int) -> Iterator[tuple[bytes, int]]:
        remedy = f"Check it with: gzip -t {self.name}"
        try:
            with gzip.GzipFile(fileobj=file, mode="rb") as text:
                while block := text.read(BLOCK):
                    if first > 0:
                        first -= 1
                    else:
                        yield block, min(file.tell(), self.stored_bytes)
        except EOFError:
            raise DataError(f"{self.name} ends in the middle of its gzip data.", remedy) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.name} is not gzip, or is damaged: {error}.", remedy) from None
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror}.", "Check the disk.") from None


def open_source(path: Path) -> Source:
    """The file at `path`.

    Raises:
        DataError: It is missing, unreadable, a pipe, a device or a folder.
    """
    descriptor = _open(path)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    return Source(str(path), path, size)


def copy_stdin(stdin: BinaryIO) -> Source:
    """Standard input, copied to an unnamed file because a corpus is read more than once.

    Raises:
        DataError: Standard input cannot be read.
        ResourceError: The cache folder is full.
    """
    folder = cache_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            while portion := _read_stdin(stdin):
                file.write(portion)
            file.flush()
            spool = Spool(os.dup(file.fileno()))
    except OSError as error:
        raise ResourceError(
            f"cannot keep a copy of standard input in {folder}: {error.strerror}.",
            "Free some space there, or set XLCLI_CACHE to a folder on a larger disk.",
        ) from None
    return Source("standard input", Path("-"), os.fstat(spool.descriptor).st_size, spool)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; False for a path that cannot be read, which opening it reports."""
    try:
        return path.is_dir()
    except OSError:
        return False


def files_below(folder: Path) -> list[Path]:
    """Files in a folder and its subfolders, sorted by path, without hidden files, linked folders and model folders.

    Raises:
        DataError: A folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"cannot read the folder {error.filename}: {error.strerror}.", "Check its permissions."
        ) from None

    found: list[Path] = []
    for base, folders, names in os.walk(folder, onerror=refuse):
        if "config.json" in names and _is_model(Path(base)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(base) / name for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _is_model(folder: Path) -> bool:
    """Whether xlcli trained or trains a model in this folder, whose texts are copies of its corpus."""
    try:
        return {"schema", "model", "sha256"} <= read_json(folder / "config.json").keys()
    except CheckpointError:
        return False


def _read_stdin(stdin: BinaryIO) -> bytes:
    try:
        return stdin.read(BLOCK)
    except OSError as error:
        raise DataError(f"cannot read standard input: {error.strerror}.", "Give a file.") from None


def _open(path: Path) -> int:
    """Descriptor of a regular file. Does not block on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _cannot_open(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISFIFO(mode):
        raise DataError(f"{path} is a pipe, not a file.", f"Give - and read it from standard input: - < {path}")
    if stat.S_ISDIR(mode):
        raise DataError(f"{path} is a folder, not a file.", "Give a file.")
    raise DataError(f"{path} is a device, not a file.", "Give a file, or - for standard input.")


def _cannot_open(path: Path, error: OSError | ValueError) -> DataError:
    if not isinstance(error, OSError):
        return DataError(f"{str(path)!r} cannot be the name of a file: {error}.", "Check the path.")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DataError(f"there is no file {path}.", "Check the path.")
    if error.errno == errno.ELOOP:
        return DataError(f"{path} is a link that leads back to itself.", "Give the file itself.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DataError(f"{path} cannot be read by this user.", f"Allow it with: chmod u+r {path}")
    if error.errno == errno.ENXIO:
        return DataError(f"{path} is a socket or a device, not a file.", "Give a file, or - for standard input.")
    return DataError(f"cannot open {path}: {error.strerror}.", "Check the path.")
