"""A log that is followed: the file that has its name, and those in which its text goes on when it is rotated.

Every file that had the name is kept open until all of it was read and nothing was written to it for `QUIET_SECONDS`.
What came between two looks is found beside the log (`text/rotation.py`). Where text may be lost, one warning says so.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Base64Bytes

from xlcli.errors import MAX_NAMED, XLError
from xlcli.text.documents import LONGEST_LINE
from xlcli.text.rotation import (
    HEAD,
    Entry,
    FilePosition,
    Identity,
    MovedError,
    Neighbors,
    head_of,
    is_beginning,
    open_text,
    seen_log,
)

PORTION = 2**16
"""Maximum number of bytes per read, unless a line that is read whole is longer."""
TAIL = 1024
"""Number of bytes before a place by which a file is recognized."""
SHORTEST_TAIL = 64
"""Number of bytes by which a copy of a file is recognized, at least."""
QUIET_SECONDS = 60.0
"""Time after which a file that lost its name is closed, if nothing was written to it."""
GONE_SECONDS = 5.0
"""Time after which a missing file is reported."""
LOOK_SECONDS = 1.0
"""Time between two looks at the files beside the log, unless it was rotated."""
_LOST = "its text may be lost"
_WAITING = "waiting until it can be"


@dataclass(frozen=True)
class LogPosition:
    """Place in a log.

    Attributes:
        path: Absolute path of the log, as bytes, since names need not be UTF-8.
        files: Places in its open files, from the oldest to the one that has its name.
        known: Other files beside it, by their first bytes.
        schemes: Paths to which its files were moved (`Neighbors`).
    """

    path: Base64Bytes
    files: tuple[FilePosition, ...]
    known: tuple[FilePosition, ...] = ()
    schemes: tuple[Base64Bytes, ...] = ()


class _Text:
    """An open file of the log and the place in it. `is_copy`: the file that it was copied from goes on behind it."""

    def __init__(self, descriptor: int, place: FilePosition, *, is_copy: bool = False) -> None:
        self.descriptor, self.place, self.is_copy = descriptor, place, is_copy
        self.wait()
        weakref.finalize(self, os.close, descriptor)

    def read(self, size: int) -> bytes | None:
        """At most `size` next bytes; None if the bytes before them are not those that were read."""
        place, n_before = self.place, len(self.place.tail)
        head = os.pread(self.descriptor, HEAD, 0)
        data = os.pread(self.descriptor, n_before + size, place.offset - n_before)
        if not (head.startswith(place.head) and data.startswith(place.tail)):
            return None
        self.place = replace(place, head=head)
        return data[n_before:]

    def advance(self, data: bytes) -> bytes:
        """Moves behind bytes that were read."""
        self.move_to(self.place.offset + len(data), (self.place.tail + data)[-TAIL:])
        self.wait()
        return data

    def move_to(self, offset: int, tail: bytes) -> None:
        """Moves to a place behind these bytes."""
        self.place = replace(self.place, offset=offset, tail=tail)

    def move_to_end(self) -> None:
        """Moves to the end, or to the start of the unfinished line there."""
        size = os.fstat(self.descriptor).st_size
        start = max(0, size - PORTION)
        data = os.pread(self.descriptor, size - start, start)
        self.move_to(start, b"")
        self.advance(data[: data.rfind(b"\n") + 1] or data)

    def wait(self) -> None:
        """Waits for `QUIET_SECONDS` from now on."""
        self.last_growth = time.monotonic()


class FollowedFile:
    """Reads a log from a place on, then what is written to it and to the files that replace it.

    Args:
        path: Absolute path of the file that is written to.
        position: Place behind the text that was read before; None begins at the start of the file.
        warn: Called with a remark on text that may be lost, and on files that cannot be opened.
        from_end: Without `position`, begin at the end of the file, at the start of its last unfinished line.
    """

    def __init__(
        self, path: Path, position: LogPosition | None, warn: Callable[[str], None], *, from_end: bool = False
    ) -> None:
        self.path, self._warn, self._from_end = path, warn, from_end
        self._told = set[object]()
        self._remarks: list[str] = []
        self._missing_since: float | None = None
        self._next_look = 0.0
        self._is_begun = position is not None
        self._cut: _Text | FilePosition | None = None  # the file whose unfinished line was read last
        self._saved = position
        position = position or LogPosition(os.fsencode(path), ())
        known = {each.identity: each for each in position.known}
        self._neighbors = Neighbors(path, known, map(os.fsdecode, position.schemes), self._tell)
        self._texts: list[_Text] = []
        self._look()
        self._from_end = False  # a log that comes later is new

    @property
    def position(self) -> LogPosition:
        """Place behind the last portion."""
        if self._saved is not None:
            return self._saved
        for text in self._texts:
            text.read(0)  # its head may have grown
        places = tuple(text.place for text in self._texts)
        schemes = tuple(map(os.fsencode, self._neighbors.schemes))
        return LogPosition(os.fsencode(self.path), places, tuple(self._neighbors.known.values()), schemes)

    def portions(self, *, by_line: bool, unfinished: bool) -> Iterator[bytes | None]:
        """Lines as they are written, many at once or, `by_line`, one by one; None while there are none. Does not end.

        An unfinished line is read if it fills a portion or if `unfinished`, not `by_line`; and if its file has ended.
        """
        while True:
            self._look()
            lines = ((text, self._take(text, by_line=by_line, unfinished=unfinished)) for text in tuple(self._texts))
            text, data = next((each for each in lines if each[1]), (None, None))
            if data and self._cut not in (None, text):
                data = b"\n" + data
            if data:
                self._cut = None if data.endswith(b"\n") or (text and text.is_copy) else text
            yield data

    def close(self) -> None:
        """Closes the files."""
        self._texts.clear()

    def _take(self, text: _Text, *, by_line: bool, unfinished: bool) -> bytes:
        """The next lines of a file, none if none is complete; the rest of a file that has ended."""
        size, is_last = PORTION, text is self._texts[-1]
        while True:
            data = text.read(size)
            if data is None:
                if not is_last:
                    self._texts.remove(text)
                    self._lose(text.place)
                return b""
            end = (data.find(b"\n") if by_line else data.rfind(b"\n")) + 1
            if not by_line or end or size > len(data) or size > LONGEST_LINE:
                break
            size *= 2
        if end:
            return text.advance(data[:end])
        if len(data) == size or (unfinished and not by_line and is_last):
            return text.advance(data)
        if is_last or not (text.is_copy or time.monotonic() - text.last_growth > QUIET_SECONDS):
            return b""
        text.advance(data)
        if text is not self._texts[-2] or not os.fstat(text.descriptor).st_nlink or text.is_copy:
            self._texts.remove(text)
        # The line that a copy was cut in goes on in the next file.
        return data + b"\n" if data and not text.is_copy else data

    def _look(self) -> None:
        """Goes on to the file that has the name now, and to those that had it since the last look."""
        named = seen_log(self.path)
        # Before the first bytes of a file are read: it may have been filled and truncated since the last look.
        is_known = named and self._has_name(named) and (self._texts[-1].place.offset or not named.size)
        if not (is_known and time.monotonic() < self._next_look):
            before = list(self._texts), set(self._told), self._saved, self._neighbors.copy()
            try:
                self._look_beside(named)
            except MovedError:  # files are being renamed: all of this look is done again
                self._texts, self._told, self._saved, self._neighbors = before
                self._remarks.clear()
                self._next_look = 0.0
        if self._remarks:
            self._warn("; ".join(self._remarks[:MAX_NAMED]).replace("\n", "\\n"))
            self._remarks.clear()

    def _has_name(self, named: Entry | None) -> bool:
        """True if the last file has the name of the log, and the text that was read of it."""
        last = self._texts[-1] if self._texts else None
        return bool(last and named and last.place.identity == named.identity and last.read(0) is not None)

    def _look_beside(self, named: Entry | None) -> None:
        if self._saved is not None and (named is None or self._open(named, _WAITING)):
            self._resume(self._saved, named)
        if named is None:
            self._miss()
            return
        self._missing_since = None
        self._next_look = time.monotonic() + LOOK_SECONDS
        is_same = self._has_name(named)
        text = self._texts[-1] if is_same else self._open(named, _WAITING)
        if text is None or self._saved is not None:
            return
        listing, again = self._neighbors.look(), seen_log(self.path)
        # What lies there after a rotation during the listing is not known yet.
        if again is None or again.identity != named.identity or text.read(0) is None:
            return
        if not is_same:
            listing = self._go_on(text, listing)
        elif not text.place.offset:  # it may have been filled and truncated since the last look
            self._texts[-1:] = [*self._between(text, listing, is_copy=True), text]
        self._neighbors.remember(listing)

    def _miss(self) -> None:
        """Reports once that the file has been missing for a while."""
        now, self._next_look = time.monotonic(), 0.0
        if self._missing_since is None:
            self._missing_since = now
            self._told.discard("missing")
        elif now - self._missing_since > GONE_SECONDS:
            self._tell("missing", f"{self.path} is not there or cannot be reached; waiting for it")

    def _resume(self, position: LogPosition, named: Entry | None) -> None:
        """Opens the files of a saved place."""
        self._saved, listing = None, self._neighbors.look()
        places = position.files
        devices = {place.device for place in places}
        if named is not None and len(devices) == 1 and named.identity[0] not in devices:
            # A file system may get another number when it is mounted again.
            device, before = named.identity[0], self._neighbors
            places = tuple(replace(place, device=device) for place in places)
            known = {(device, inode): each for (_, inode), each in before.known.items()}
            self._neighbors = Neighbors(self.path, known, before.schemes, self._tell)
        for place in places:
            n_before = len(self._texts)
            entry = named if named and named.identity == place.identity else listing.get(place.identity)
            if entry not in (None, named) and not place.head and self._neighbors.belongs(entry) is False:
                entry = None  # it was seen empty, and another file may have its inode by now
            if entry is not None and (text := self._open(entry, _LOST, place)) is not None:
                self._texts.append(text)
            elif entry is not None and self._is_told(entry):
                self._neighbors.known[place.identity] = replace(place, tail=b"")
            else:
                self._replace(place, listing, is_gone=entry is None)
            if place.tail:
                opened = next(iter(self._texts[n_before:]), place)
                self._cut = None if place.tail.endswith(b"\n") else opened

    def _go_on(self, text: _Text, listing: dict[Identity, Entry]) -> dict[Identity, Entry]:
        """Appends the file that has the name now, and before it those that came between. Returns the latest listing."""
        last = self._texts[-1] if self._texts else None
        if last is not None and last.place.identity == text.place.identity:  # it was truncated
            self._texts.remove(last)
            self._replace(last.place, listing, is_gone=False)
        elif last is not None and _is_replaced(last, text):
            self._texts.remove(last)
            text.move_to(last.place.offset, last.place.tail)
        elif last is not None:
            last.wait()
            listing = self._place(last, listing)
        if self._is_begun:
            is_copy = bool(self._texts) and self._texts[-1].is_copy
            self._texts += self._between(text, listing, is_copy=is_copy)
        elif self._from_end:
            text.move_to_end()
        self._texts.append(text)
        self._is_begun = True
        return listing

    def _place(self, text: _Text, listing: dict[Identity, Entry]) -> dict[Identity, Entry]:
        """Learns where a file was moved to, or warns. Returns a listing that has its new folder."""
        status = os.fstat(text.descriptor)
        text.read(0)
        packed = [
            entry.path for entry in listing.values() if entry.is_packed and head_of(entry) == text.place.head != b""
        ]
        if text.place.identity in listing:
            path = listing[text.place.identity].path
        elif status.st_nlink and Path(link := f"/proc/self/fd/{text.descriptor}").is_symlink():
            path = Path(os.readlink(link))  # noqa: PTH115
        elif packed:
            path = packed[0]
        else:
            self._lose(text.place, "its file was removed, and others may have come before the present one")
            return listing
        return self._neighbors.look() if self._neighbors.learn(path, status.st_ctime_ns) else listing

    def _replace(self, place: FilePosition, listing: dict[Identity, Entry], *, is_gone: bool) -> None:
        """Goes on in the longest copy of a file that is gone or was truncated, or warns."""
        new = {entry.identity for entry in self._neighbors.appeared(listing)}
        is_long = max(len(place.tail), len(place.head)) >= SHORTEST_TAIL
        copies = list[tuple[int, Entry, _Text]]()
        for entry in listing.values() if place.head else ():
            is_it = entry.identity != place.identity and head_of(entry).startswith(place.head)
            there = replace(place, device=entry.identity[0], inode=entry.identity[1])
            if is_it and (is_long or entry.identity in new):
                text = self._open(entry, _LOST, there, is_copy=not is_gone)
                if text is not None:
                    copies.append((os.fstat(text.descriptor).st_size, entry, text))
        if not copies:
            self._lose(place)
            return
        size, entry, text = max(copies, key=lambda copy: (copy[0], copy[1].identity in new))
        for _, each, _ in copies:
            self._neighbors.learn(each.path, each.changed)
        self._texts.append(text)
        if not entry.is_packed and (is_gone or entry.identity not in new):  # the file may have grown since
            self._lose(replace(place, offset=size))

    def _between(self, text: _Text, listing: dict[Identity, Entry], *, is_copy: bool) -> list[_Text]:
        """Files that had the name after the last one and before this one; `is_copy`: they are copies of such."""
        chain = [*(each for each in self._texts if each is not text), text]
        n_before = len(chain) - 1
        for entry in self._neighbors.appeared(listing):
            belongs = self._neighbors.belongs(entry)
            if belongs is False or self._is_told(entry) or entry.identity in {each.place.identity for each in chain}:
                continue
            head = head_of(entry)
            is_binary = b"\0" in head.lstrip(b"\0")  # a hole at the beginning is left by a writer that does not append
            if is_binary or (entry.is_packed and entry.path.with_suffix("").exists()):
                continue
            found = self._open(entry, _LOST, is_copy=is_copy)
            if found is None:
                continue
            size = os.fstat(found.descriptor).st_size
            alike = [known for known in self._neighbors.known.values() if entry.is_packed and known.head == head]
            tail = os.pread(found.descriptor, HEAD, max(0, size - HEAD))
            is_known = any((known.offset, known.tail) == (size, tail) for known in alike)
            is_new = not is_known and not any(is_beginning(found.descriptor, each.descriptor) for each in chain)
            if is_new and belongs and not alike:
                chain.insert(-1, found)
            elif is_new:
                self._tell(entry.identity, f"{entry.path} is not read; if it is a part of {self.path}, {_LOST}")
        return chain[n_before:-1]

    def _open(
        self, entry: Entry, consequence: str, place: FilePosition | None = None, *, is_copy: bool = False
    ) -> _Text | None:
        """Opens a file at a place; None if it cannot be opened or has other text there."""
        try:
            text = _Text(open_text(entry), place or FilePosition(*entry.identity), is_copy=is_copy)
        except (OSError, XLError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
            remark = f"{entry.path} cannot be opened ({reason}); {consequence}"
            self._tell(self._key(entry, consequence), remark)
            return None
        self._told.discard(self._key(entry, _WAITING))
        return None if text.read(0) is None else text

    def _is_told(self, entry: Entry) -> bool:
        """True if it was said that the text of a file may be lost."""
        return self._key(entry, _LOST) in self._told

    def _key(self, entry: Entry, consequence: str) -> object:
        """What a remark is about; a file that is waited for may change."""
        return entry.identity, consequence, entry.changed if consequence is _LOST else None

    def _lose(self, place: FilePosition, reason: str = "its file is gone or has other text now") -> None:
        self._remarks.append(f"text of {self.path} after byte {place.offset:,} may be lost: {reason}")

    def _tell(self, key: object, remark: str) -> None:
        """Gives a remark once."""
        if key not in self._told:
            self._told.add(key)
            self._remarks.append(remark)


def _is_replaced(text: _Text, other: _Text) -> bool:
    """True if a file was removed, and another one begins with all of it."""
    status = os.fstat(text.descriptor)
    is_long = status.st_size >= SHORTEST_TAIL
    return is_long and not status.st_nlink and is_beginning(text.descriptor, other.descriptor)
