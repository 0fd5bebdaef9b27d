"""A file that grows, followed across rotation and truncation.

A file that was renamed is read to its end before the next one is begun; its writer has left it when a later file has
text. A file is recognized by device, inode and the bytes before the place that was reached, and a copy of it (which
`copytruncate` of logrotate makes) by these bytes alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Base64Bytes, Field

from xlcli.text.documents import LONGEST_LINE

PORTION = 2**16
"""Maximum number of bytes per read, unless a line that is read whole is longer."""
TAIL = 1024
"""Number of bytes before a place by which a file is recognized."""
SHORTEST_TAIL = 64
"""Number of bytes by which a copy of a file is recognized, at least."""
_Number = Annotated[int, Field(ge=0, lt=2**64)]
_PACKED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class FilePosition:
    """Place in a file that is followed, behind all text that was taken from it.

    Attributes:
        device: Number of the device that holds the file.
        inode: Number of the file on that device.
        offset: Offset of the place in bytes.
        modified: Time of the last change of the file in nanoseconds since 1970.
        tail: Bytes before the place, by which the file is recognized.
    """

    device: _Number
    inode: _Number
    offset: Annotated[int, Field(ge=0, lt=2**63)]
    modified: _Number
    tail: Base64Bytes


class _File(NamedTuple):
    """A regular file as it was seen: `identity` is device and inode, `modified` is in nanoseconds since 1970."""

    path: Path
    identity: tuple[int, int]
    size: int
    modified: int


class FollowedFile:
    """Reads a file from a place on, then what is written to it and to the files that replace it.

    Args:
        path: File that is written to. Rotated files lie beside it: `NAME.1`, `NAME-20260131`, `STEM.1.log`.
        position: Place behind the text that was read before; None begins at the start of the file.
        notice: Called with a remark on text that is gone.

    Attributes:
        position: Place behind the last portion; None before the first one.
    """

    def __init__(self, path: Path, position: FilePosition | None, notice: Callable[[str], None]) -> None:
        self.path, self.position, self._notice = path, position, notice
        self._descriptor: int | None = None
        self._is_copy = False
        self._skipped: set[tuple[int, int]] = set()
        stem, suffix = re.escape(path.stem), re.escape(path.suffix)
        packed = "|".join(map(re.escape, _PACKED))
        number = r"(\.|-(?=\d{4}-?\d\d))\d[\d.T:_-]*"
        self._rotated_name = re.compile(rf"({stem}{suffix}{number}|{stem}{number}{suffix})({packed})?")

    def portions(self, *, by_line: bool, unfinished: bool) -> Iterator[bytes | None]:
        """Lines as they are written, many at once or, `by_line`, one by one; None while there are none. Does not end.

        An unfinished line is read if it fills a portion or if `unfinished`, not `by_line`; and if its file has ended.
        """
        size = PORTION
        while True:
            data = self._read(size)
            if data is None:
                if not self._find():
                    yield None
                continue
            end = (data.find(b"\n") if by_line else data.rfind(b"\n")) + 1
            if by_line and not end and size == len(data) <= LONGEST_LINE:
                size *= 2
                continue
            if not end and (len(data) == size or (unfinished and not by_line)):
                end = len(data)
            following = None if end else self._following()
            if following is not None:
                if data != self._read(size):
                    continue
                end = len(data)
            if end:
                size = PORTION
                self._advance(data[:end])
                is_cut = by_line and following is not None
                yield data[:end] + b"\n" if is_cut else data[:end]
            elif following is None or not self._begin(following):
                yield None

    def _read(self, size: int) -> bytes | None:
        """At most `size` next bytes, none at the end; None if no file is open, or other bytes are before them."""
        if self._descriptor is None or self.position is None:
            return None
        tail = self.position.tail
        data = os.pread(self._descriptor, len(tail) + size, self.position.offset - len(tail))
        return data[len(tail) :] if data.startswith(tail) else None

    def _advance(self, data: bytes) -> None:
        """Moves behind bytes that were read."""
        assert self.position is not None
        assert self._descriptor is not None
        offset, tail = self.position.offset + len(data), (self.position.tail + data)[-TAIL:]
        modified = os.fstat(self._descriptor).st_mtime_ns
        self.position = replace(self.position, offset=offset, modified=modified, tail=tail)

    def _find(self) -> bool:
        """Opens the file that holds the position, or a copy of it, or the one that was written after it, if any."""
        named, place = _seen(self.path), self.position
        if place is None:
            return named is not None and self._open(named)
        files = [*([named] if named else ()), *reversed(self._rotated())]
        same = [file for file in files if file.identity == (place.device, place.inode)]
        copies = [file for file in files if file not in same and len(place.tail) >= SHORTEST_TAIL]
        for file in (*same, *copies):
            if self._open(file, place.offset, place.tail):
                self._is_copy = file not in same
                return True
        # A copy that is too short to be recognized is not read again.
        has_copy = named is not None and named in same and len(place.tail) < SHORTEST_TAIL
        later = named if has_copy else self._after(place.modified) or named
        if later is None or not self._open(later):
            return False
        if place.offset:
            self._notice(f"{self.path} was truncated or removed; its text after byte {place.offset:,}, if any, is lost")
        return True

    def _following(self) -> _File | None:
        """The file to go on with at the end of this one, if there is one with text."""
        assert self._descriptor is not None
        status, named = os.fstat(self._descriptor), _seen(self.path)
        if named is None or named.identity == (status.st_dev, status.st_ino):
            return None
        return self._after(status.st_mtime_ns) or (named if named.size else None)

    def _begin(self, file: _File) -> bool:
        """Opens the file that follows; false if it is not there any more."""
        place, is_copy = self.position, self._is_copy
        assert place is not None
        # A file that was copied and not yet truncated continues its copy.
        if not (is_copy and self._open(file, place.offset, place.tail)) and not self._open(file):
            return False
        self._is_copy = is_copy and file.path != self.path
        return True

    def _after(self, modified: int) -> _File | None:
        """The first rotated file with text whose last change was later than this time in nanoseconds."""
        for file in self._rotated():
            if file.modified > modified and file.path.suffix not in _PACKED:
                return file
            if file.modified > modified and file.identity not in self._skipped:
                self._skipped.add(file.identity)
                self._notice(f"{file.path} was packed before it was read; its text is skipped")
        return None

    def _rotated(self) -> list[_File]:
        """Rotated files with text, by the time of their last change, when they do not change their names."""
        files, before = self._listed(), None
        while files != before:
            files, before = self._listed(), files
        return files

    def _listed(self) -> list[_File]:
        paths = [path for path in self.path.parent.iterdir() if self._rotated_name.fullmatch(path.name)]
        files = [file for path in paths if path != self.path and (file := _seen(path)) is not None and file.size]
        return sorted(files, key=lambda file: file.modified)

    def _open(self, file: _File, offset: int = 0, tail: bytes = b"") -> bool:
        """Goes to a place in a file; false if it is another one by now, or if the bytes before it are not `tail`."""
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        status = os.fstat(descriptor)
        is_it = file.identity == (status.st_dev, status.st_ino) and status.st_size >= offset
        if not is_it or os.pread(descriptor, len(tail), offset - len(tail)) != tail:
            os.close(descriptor)
            return False
        self.close()
        self._descriptor, self._is_copy = descriptor, False
        self.position = FilePosition(*file.identity, offset, status.st_mtime_ns, tail)
        return True

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _seen(path: Path) -> _File | None:
    """A regular file, None if there is none."""
    with suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            return _File(path, (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)
    return None
