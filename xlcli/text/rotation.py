"""Files beside a log: where its text went when it was rotated.

A file is recognized by device and inode, and by its first bytes, since inodes are used again. Files that lay beside the
log when it was last looked at are not parts of it. Of those that appeared since, a file is one if it was renamed as
another part of the log was (`schemes`), or if its name begins with that of the log and it was renamed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

from pydantic import Base64Bytes, Field

from xlcli.errors import DataError
from xlcli.files import cache_folder
from xlcli.text.formats import COMPRESSIONS, unpacked

HEAD = 64
"""Number of first bytes by which a file is recognized."""
_EDGE = 1024
"""Number of bytes at the beginning and at the end that are compared to recognize a copy."""
_PORTION = 2**16
_N_SCHEMES = 16
_ROTATED = re.compile(r"[-._](\d[\w:.+@-]*?|old\w*|prev\w*|bak|back\w*|orig|last|[a-z])(\.(gz|bz2|xz|zst))?", re.ASCII)
"""What rotation adds to the name of a log."""
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".Z", ".zip")

Identity = tuple[int, int]
"""Device and inode."""
_Number = Annotated[int, Field(ge=0, lt=2**64)]


class MovedError(Exception):
    """Another file has the name of one that was listed, or none."""


@dataclass(frozen=True)
class FilePosition:
    """Place in a file of a log, behind all text that was taken from it; or the end of another file beside it.

    Attributes:
        offset: Offset of the place in bytes as they are stored.
        tail: Bytes before the place, by which the file is recognized.
        head: First bytes of the file, read or not, unpacked if it is compressed.
    """

    device: _Number
    inode: _Number
    offset: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tail: Base64Bytes = b""
    head: Base64Bytes = b""

    @property
    def identity(self) -> Identity:
        """Device and inode."""
        return self.device, self.inode


class Entry(NamedTuple):
    """A regular file as it was seen: size in bytes, last changes of content and status in nanoseconds since 1970."""

    path: Path
    identity: Identity
    size: int
    modified: int
    changed: int
    is_packed: bool = False

    @property
    def is_moved(self) -> bool:
        """True if the status changed after the content: it was renamed, and not written to since."""
        return self.modified != self.changed


def seen(path: Path) -> Entry | None:
    """The regular file at a path that is no link, None if there is none."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            identity = status.st_dev, status.st_ino
            is_packed = path.suffix in _PACKED
            return Entry(path, identity, status.st_size, status.st_mtime_ns, status.st_ctime_ns, is_packed)
    return None


def seen_log(path: Path) -> Entry | None:
    """The regular file to which the path of a log leads, whose text is read as it is."""
    with suppress(OSError):
        entry = seen(Path(os.path.realpath(path)))
        return entry and entry._replace(is_packed=False)
    return None


def head_of(entry: Entry) -> bytes:
    """First bytes of a file, unpacked if it is compressed; empty if they cannot be read."""
    try:
        with os.fdopen(_open(entry), "rb") as file:
            return (next(filter(None, _text_of(entry, file)), None) or b"")[:HEAD]
    except (OSError, DataError):
        return b""


def tail_of(entry: Entry, size: int) -> bytes:
    """Last bytes of the first `size` bytes of a file as they are stored; empty if they cannot be read."""
    try:
        with os.fdopen(_open(entry), "rb") as file:
            return os.pread(file.fileno(), min(HEAD, size), max(0, size - HEAD))
    except OSError:
        return b""


def is_beginning(descriptor: int, other: int) -> bool:
    """True if all of an open file is the beginning of another one, by its first and last bytes: it is a copy."""
    size, length = os.fstat(descriptor).st_size, os.fstat(other).st_size
    places = (0, max(0, size - _EDGE))
    return size <= length and all(
        os.pread(descriptor, _EDGE, at) == os.pread(other, min(_EDGE, size), at) for at in places
    )


def open_text(entry: Entry) -> int:
    """Descriptor of a file, or of its unpacked text in an unnamed one; raises `OSError` or an error of xlcli."""
    descriptor = _open(entry)
    if not entry.is_packed:
        return descriptor
    with os.fdopen(descriptor, "rb") as file, tempfile.TemporaryFile(dir=cache_folder()) as copy:
        for portion in _text_of(entry, file):
            copy.write(portion or b"")
        copy.flush()
        return os.dup(copy.fileno())


def _text_of(entry: Entry, file: BinaryIO) -> Iterator[bytes | None]:
    """Portions of the text; `DataError` if it cannot be unpacked."""
    portions = iter(lambda: file.read(_PORTION) or None, None)
    if not entry.is_packed:
        return portions
    if not os.pread(file.fileno(), HEAD, 0).startswith(tuple(COMPRESSIONS)):
        raise DataError(f"{entry.path.name} is not packed in a known way.")
    return unpacked(portions, entry.path.name)


class Neighbors:
    """Files in the folder of a log, in that of the file that a link leads to, and where its files were moved to.

    `warn` is called with the folder and a remark if it cannot be listed.

    Attributes:
        known: The files with content that were there at the last look.
        schemes: Paths to which files of this log were moved, with # for each number.
    """

    def __init__(
        self,
        path: Path,
        known: Mapping[Identity, FilePosition],
        schemes: Iterable[str],
        warn: Callable[[object, str], None],
    ) -> None:
        self._path, self._warn = path, warn
        self.known, self.schemes = dict(known), list(schemes)

    def copy(self) -> Neighbors:
        """A copy with the same warnings."""
        return Neighbors(self._path, self.known, self.schemes, self._warn)

    @property
    def _own_folders(self) -> list[Path]:
        """Folders of the log: that of its name, and that of the file that a link leads to."""
        return [self._path.parent, Path(os.path.realpath(self._path)).parent]

    @property
    def _folders(self) -> list[Path]:
        """All folders that are looked at, without repetition."""
        own = self._own_folders
        inside = [Path(entry) for folder in own for entry in _subfolders(folder)]
        return [*dict.fromkeys([*own, *inside, *(Path(each).parent for each in self.schemes)])]

    @property
    def _names(self) -> set[str]:
        """Names of the log: its own, and that of the file that a link leads to."""
        return {self._path.name, os.path.basename(os.path.realpath(self._path))}  # noqa: PTH119

    def look(self) -> dict[Identity, Entry]:
        """The files whose names resemble that of the log, when they do not change their names."""
        listing, paths = self._listed(), None
        for _ in range(10):
            before, paths = paths, {identity: entry.path for identity, entry in listing.items()}
            if paths == before:
                break
            listing = self._listed()
        return listing

    def _listed(self) -> dict[Identity, Entry]:
        begin, end = tuple(name.partition(".")[0] or name for name in self._names), tuple(self._names)
        found = dict[Identity, Entry]()
        for folder in self._folders:
            try:
                names = os.listdir(folder)  # noqa: PTH208
            except OSError as error:
                if folder in self._own_folders and not isinstance(error, FileNotFoundError):
                    self._warn(folder, f"{folder} cannot be listed ({error.strerror}): rotated files are not found")
                continue
            for name in names:
                if name.startswith(begin) or name.endswith(end):
                    entry = seen(folder / name)
                    if entry is not None and (entry.identity not in found or self.belongs(entry)):
                        found[entry.identity] = entry
        return found

    def remember(self, listing: Mapping[Identity, Entry]) -> None:
        """Takes the files of a listing for known: what comes later is not among them."""
        heads = {key: each.head for key, each in self.known.items()}
        self.known = {key: _known(entry, heads.get(key, b"")) for key, entry in listing.items() if entry.size}

    def learn(self, path: Path, changed: int) -> bool:
        """Takes the path to which a file of the log was moved for a scheme. True if its folder is a new one.

        Files in a new folder that were changed no later than this file, at `changed`, are older than it.
        """
        scheme, is_new = _scheme(path), path.parent not in self._folders
        self.schemes = [*(each for each in self.schemes if each != scheme), scheme][-_N_SCHEMES:]
        if is_new:
            older = [each for each in self._listed().values() if each.changed <= changed]
            self.known |= {each.identity: _known(each) for each in older}
        return is_new

    def appeared(self, listing: Mapping[Identity, Entry]) -> list[Entry]:
        """Files with text that were not there at the last look, in the order of their last changes."""
        new = [entry for entry in listing.values() if entry.size and not self._knows(entry)]
        return sorted(new, key=lambda entry: entry.modified)

    def _knows(self, entry: Entry) -> bool:
        known = self.known.get(entry.identity)
        if known is None or entry.size < known.offset:
            return False
        return head_of(entry).startswith(known.head) and tail_of(entry, known.offset).endswith(known.tail)

    def belongs(self, entry: Entry) -> bool | None:
        """True if a file that appeared is a part of the log, False if it is not, None if this cannot be told."""
        is_own = entry.path.parent in self._own_folders
        is_scheme = _digits(_scheme(entry.path)) in map(_digits, self.schemes)
        rests = [entry.path.name.removeprefix(name) for name in self._names if entry.path.name.startswith(name)]
        is_named = is_own and any(_ROTATED.fullmatch(rest) for rest in rests)
        is_like = is_own and (bool(rests) or (entry.is_moved and entry.path.suffix == self._path.suffix))
        is_never_moved = _scheme(Path(os.path.realpath(self._path))) in self.schemes  # as with a link to today's file
        if (is_scheme and (is_named or entry.is_moved or is_never_moved)) or (is_named and entry.is_moved):
            return True
        return None if is_scheme or is_named or is_like else False


def _known(entry: Entry, head: bytes = b"") -> FilePosition:
    """The end of a file as it is now; `head` is known of it if it cannot be read."""
    return FilePosition(*entry.identity, entry.size, tail_of(entry, entry.size), head_of(entry) or head)


def _subfolders(folder: Path) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.path


def _open(entry: Entry) -> int:
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise MovedError(entry.path) from None
        raise
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != entry.identity:
        os.close(descriptor)
        raise MovedError(entry.path)
    return descriptor


def _digits(scheme: str) -> str:
    """A scheme with # for each number in the names of its folders, too."""
    return re.sub(r"\d+", "#", scheme)


def _scheme(path: Path) -> str:
    name = path.name.removesuffix(path.suffix) if path.suffix in _PACKED else path.name
    return str(path.with_name(re.sub(r"\d+", "#", name)))
