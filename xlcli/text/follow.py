"""A log that is followed: the file that has its name, and those in which its text lies after it was rotated.

A file is part of the log if it was seen under its name, or if its name and times show that it had the name between
two looks. Every other file is foreign and is not read. Where text may be missing, a warning says from which byte.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Base64Bytes, Field

from xlcli import errors
from xlcli.files import version
from xlcli.text.documents import LONGEST_LINE

PORTION = 2**16  # bytes per read, unless a line is longer
N_TAIL = 1024  # bytes before a place by which a file is recognized, since inodes are used again
QUIET_SECONDS = 60.0  # a file that lost its name is complete when nothing was added for this time
WAIT_SECONDS = 5.0  # a log that cannot be opened is reported after this time
LOOK_SECONDS = 1.0  # time between two looks at the files near a log that keeps its name
DATE = re.compile(r"\d{4}\D?\d\d")  # year and month
SIGNS = re.compile(r"[\d\W_]+")  # what rotation adds to a name, or changes in it
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".Z", ".zip")

Find = Callable[[bytes, bytes], int]
Warn = Callable[[str], None]
Listing = dict[Path, os.stat_result]


@dataclass(frozen=True)
class FilePosition:
    """Place in a file of a log."""

    inode: int
    offset: Annotated[int, Field(ge=0, lt=2**63)] = 0  # in bytes
    tail: Base64Bytes = b""  # at most `N_TAIL` bytes before the place


@dataclass(frozen=True)
class LogPosition:
    """Place in a log."""

    path: Base64Bytes  # absolute, as bytes, since names need not be UTF-8
    files: tuple[FilePosition, ...]  # open files, from the oldest to the one that has the name
    near: tuple[tuple[int, int, int], ...] = ()  # `version` of each file near the log
    unfinished: int | None = None  # inode of the file whose unfinished line was read last


class _OpenFile:
    """An open file of the log and the place in it. `OSError` if it cannot be opened or is not a regular file."""

    def __init__(self, path: Path, offset: int = 0, tail: bytes = b"") -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        self.offset = offset
        self.tail = tail
        self.last_read = time.monotonic()

    def is_intact(self) -> bool:
        """True if the bytes before the place were read from this file; False if it was truncated or is another one."""
        return os.pread(self.descriptor, len(self.tail), self.offset - len(self.tail)) == self.tail

    def lines(self, find: Find) -> bytes:
        """Lines up to the end that `find` finds; b"" if the next is unfinished. A long line comes in parts."""
        for size in (PORTION, LONGEST_LINE):
            data = os.pread(self.descriptor, size, self.offset)
            n_whole = find(data, b"\n") + 1
            is_end_of_file = len(data) < size
            if n_whole > 0 or is_end_of_file:
                return data[:n_whole]
        return data

    def advance(self, data: bytes) -> None:
        """Moves the place behind the next bytes."""
        self.offset += len(data)
        self.tail = (self.tail + data)[-N_TAIL:]
        self.last_read = time.monotonic()

    def move_to_end(self) -> None:
        """Moves the place to the end, or to the start of the unfinished line there."""
        self.offset = max(0, os.fstat(self.descriptor).st_size - PORTION)
        data = os.pread(self.descriptor, PORTION, self.offset)
        self.advance(data[: data.rfind(b"\n") + 1] or data)


class FollowedFile:
    """Reads a log, then what is written to it and to the files that replace it. Problems are reported to `warn`.

    It begins at `position`; without it at the start of the file, or `from_end` at the end of one that is there.
    """

    def __init__(self, path: Path, position: LogPosition | None, warn: Warn, *, from_end: bool = False) -> None:
        begin = position or LogPosition(os.fsencode(path), ())
        self.path = path
        self._warn = warn
        self._saved = position  # until its files are open
        self._known = set(begin.near)  # versions of files near the log
        self._listing = Listing()  # of the last look
        self._unfinished = begin.unfinished
        self._files: list[_OpenFile] = []  # from the oldest to the one that has the name
        self._next_look = 0.0
        self._next_report = time.monotonic() + WAIT_SECONDS
        if position is None:
            self._remember(self._list_files())
        self._look()
        if from_end and position is None and self._files:
            self._files[-1].move_to_end()

    @property
    def position(self) -> LogPosition:
        """Place behind the last text."""
        if self._saved is not None:
            return self._saved
        files = tuple(FilePosition(os.fstat(file.descriptor).st_ino, file.offset, file.tail) for file in self._files)
        return LogPosition(os.fsencode(self.path), files, tuple(self._known), self._unfinished)

    def portions(self, find: Find, line_seconds: float = float("inf")) -> Iterator[bytes | None]:
        """Lines as they are written; None while there are none. Does not end.

        `find` is `bytes.find` for one line at a time, `bytes.rfind` for many. An unfinished line is read after
        `line_seconds`, or after `QUIET_SECONDS` if its file has lost the name.
        """
        while True:
            self._look()
            texts = (self._read_next(file, find, line_seconds) for file in tuple(self._files))
            yield next(filter(None, texts), None)

    def _read_next(self, file: _OpenFile, find: Find, line_seconds: float) -> bytes:
        """Reads the next text of a file, after a line end if the line of another file is unfinished."""
        data = file.lines(find)
        if not data:
            data = self._unfinished_line(file, line_seconds)
        if not data:
            return b""
        inode = os.fstat(file.descriptor).st_ino
        is_other_file = self._unfinished != inode
        is_truncated = file.offset == 0
        is_cut = self._unfinished is not None and (is_other_file or is_truncated)
        self._unfinished = None if data.endswith(b"\n") else inode
        file.advance(data)
        return b"\n" + data if is_cut else data

    def _unfinished_line(self, file: _OpenFile, line_seconds: float) -> bytes:
        """Reads what has no line end, once nothing was added for a while. A file that can't grow any more is let go."""
        has_name = file is self._files[-1]
        patience = line_seconds if has_name else QUIET_SECONDS
        if time.monotonic() - file.last_read <= patience:
            return b""
        data = os.pread(file.descriptor, PORTION, file.offset)
        if not data and not has_name:
            had_name_last = file is self._files[-2]
            is_deleted = os.fstat(file.descriptor).st_nlink == 0
            if is_deleted or not had_name_last:
                self._files.remove(file)
        return data

    def _look(self) -> None:
        """Goes on with the file that has the name now, and reports once if it cannot be opened for a while."""
        for file in tuple(self._files):
            if not file.is_intact():
                self._files.remove(file)
                self._warn_of_loss(file.offset, "its file was truncated or overwritten")
        try:
            is_same = bool(self._files) and os.path.samestat(self.path.stat(), os.fstat(self._files[-1].descriptor))
            named = self._files[-1] if is_same else _OpenFile(self.path)
        except OSError as error:
            if time.monotonic() > self._next_report:
                self._warn(f"{self.path} cannot be opened ({error.strerror}); waiting until it can be")
                self._next_report = float("inf")
            return
        self._next_report = time.monotonic() + WAIT_SECONDS
        if self._saved is not None:
            self._resume(self._saved, self._list_files())
            self._look()  # for what has come since the position was saved
            return
        # A file that was seen empty may have been filled, copied and truncated since, unless its version is the same.
        is_current = is_same and (named.offset > 0 or version(os.fstat(named.descriptor)) in self._known)
        if is_current and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        listing = self._list_files()
        if not is_same:
            self._continue_with(named, listing)
        elif not is_current:
            self._warn_of_new(listing, 0)
        self._remember(listing)

    def _resume(self, position: LogPosition, listing: Listing) -> None:
        """Opens the files of a saved position; warns if one is gone."""
        self._saved = None
        files = [self._reopen(place, listing) for place in position.files]  # before a warning makes all files known
        for place, file in zip(position.files, files, strict=True):
            if file is not None:
                self._files.append(file)
            else:
                self._warn_of_loss(place.offset, "its file is gone, packed or unreadable, or has other text now")

    def _reopen(self, place: FilePosition, listing: Listing) -> _OpenFile | None:
        """Returns the file of a saved place, opened under its present name, or None.

        Of a file that was seen empty only the inode is known, which another file may have by now. It is the same one if
        it is the log, the first of the new files with a name of a rotated log, or unchanged.
        """
        log = Path(os.path.realpath(self.path))
        new = {path for path, status in listing.items() if path != log and self._is_new(path, status)}
        for path, status in listing.items():
            if status.st_ino != place.inode:
                continue
            has_name_of_rotated_log = SIGNS.fullmatch(path.name.removeprefix(log.name)) is not None
            is_renamed_log = has_name_of_rotated_log and path == min(new | {path})
            is_unchanged = version(status) in self._known
            was_empty = not place.tail
            if was_empty and not (path == log or is_renamed_log or is_unchanged):
                continue
            with suppress(OSError):
                file = _OpenFile(path, place.offset, place.tail)
                if file.is_intact():
                    return file
        return None

    def _continue_with(self, named: _OpenFile, listing: Listing) -> None:
        """Appends the file that has the name now, after those that certainly had it since the last look."""
        had_name = self._files[-1] if self._files else named
        old = os.fstat(had_name.descriptor)
        self._files.append(named)
        renamed = [path for path, status in listing.items() if os.path.samestat(status, old)]
        packed = [path for path in listing if path.suffix in PACKED and listing[path].st_mtime_ns == old.st_mtime_ns]
        if renamed:
            self._insert_later(renamed[0], listing)
        elif not packed:
            self._warn_of_loss(old.st_size, "its file was removed, and others may have had the name since")
        self._known.add(version(old))  # the time of a packed file is that of its original
        self._warn_of_new(listing, old.st_size)

    def _insert_later(self, renamed: Path, listing: Listing) -> None:
        """Opens the new files that were renamed like an older one, but to later dates. Numbers prove no order."""
        for path, status in sorted(listing.items()):
            was_renamed = status.st_ctime_ns > status.st_mtime_ns  # a copy was written last
            has_same_form = re.sub(r"\d", "0", path.name) == re.sub(r"\d", "0", renamed.name)
            is_later = DATE.search(path.name) is not None and path.name > renamed.name
            if was_renamed and has_same_form and is_later and self._is_new(path, status):
                with suppress(OSError):
                    self._files.insert(-1, _OpenFile(path))

    def _warn_of_new(self, listing: Listing, n_bytes: int) -> None:
        """Warns of files that came since the last look and may be parts of the log, but are not read."""
        new = [str(path) for path, status in listing.items() if self._is_new(path, status)]
        if new:
            self._warn_of_loss(n_bytes, f"{errors.named(new)} may be part of it and is not read")

    def _is_new(self, path: Path, status: os.stat_result) -> bool:
        """True if a file has text that was not near the log at the last look. Other logs keep name and inode."""
        is_other_log = path in self._listing and self._listing[path].st_ino == status.st_ino
        is_open = any(os.path.samestat(status, os.fstat(file.descriptor)) for file in self._files)
        is_packed = path.suffix in PACKED and status.st_mtime_ns in {time_ns for *_, time_ns in self._known}
        return status.st_size > 0 and not (is_open or is_other_log or is_packed or version(status) in self._known)

    def _warn_of_loss(self, n_bytes: int, reason: str) -> None:
        """Warns of text that may be lost. All files that are there now are known from then on."""
        self._warn(f"text of {self.path} after byte {n_bytes:,} may be lost: {reason}".replace("\n", "\\n"))
        self._remember(self._list_files())

    def _remember(self, listing: Listing) -> None:
        self._listing = listing
        self._known = {version(status) for status in listing.values()}

    def _list_files(self) -> Listing:
        """Regular files whose names resemble that of the log: beside it and its target, and in folders there."""
        logs = {self.path, Path(os.path.realpath(self.path))}
        letters = tuple(SIGNS.sub("", path.name) for path in logs)
        listing: Listing = {}
        for parent in {path.parent for path in logs}:
            for folder, subfolders, names in os.walk(parent):
                if folder != str(parent):
                    subfolders.clear()  # so that `os.walk` goes no deeper
                for path in [Path(folder, name) for name in names if SIGNS.sub("", name).startswith(letters)]:
                    with suppress(OSError):
                        listing[path] = path.lstat()
        return {path: status for path, status in listing.items() if stat.S_ISREG(status.st_mode)}
