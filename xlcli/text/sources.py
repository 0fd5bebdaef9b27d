"""One file of a corpus, read in aligned blocks of text.

Files of the user are read, never memory-mapped: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import os
import select
import stat
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from xlcli.errors import CheckpointError, DataError, ResourceError, XLError
from xlcli.events import Progress, ProgressMeter
from xlcli.files import STANDARD_INPUT, cache_folder, identity, kind_of, read_json
from xlcli.text import formats
from xlcli.text.documents import Document
from xlcli.text.marks import without_marks

BLOCK = 2**20  # bytes of text per read
QUIET_MS = 100  # milliseconds without text from a pipe after which progress is reported
UNREAD = Document(b" ")  # a row without fields whose text nobody needs, except that there is one


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Interpretation of the bytes of files."""

    # Take the bytes as they are: nothing is unpacked or converted, and any byte is accepted.
    binary: bool = False
    # Keys of the texts in JSON lines, or columns of tables and Parquet files, of which each row has one each;
    # none is the key `text`, if there is such a key.
    text_fields: tuple[str, ...] = ()
    any_bytes: bool = False  # accept text with NUL bytes or bytes that are not UTF-8, as byte vocabularies do
    each_line: bool = False  # a document begins with each line
    # Marks around regions in the texts of rows, which are removed (`text/marks.py`).
    region_marks: str | None = None


class Block(NamedTuple):
    """A block of text."""

    text: bytes
    stored: int  # number of stored bytes read so far
    documents: Sequence[int] = ()  # offsets in the text at which documents begin
    crlf: int = 0  # number of CR LF so far that were read as LF


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Source:
    """A file of a corpus."""

    name: str
    path: Path
    identity: tuple[int, int]  # of the file or pipe itself (`files.identity`)
    stored_bytes: int  # its size when it was opened
    input_format: InputFormat
    seekable: bool  # reading can start anywhere if there is no CR LF, because the file holds nothing but its text
    spool: int | None = None  # descriptor of the unnamed copy of a pipe

    def blocks(
        self, first: int = 0, notice: Callable[[str], None] = lambda text: None, *, seek: bool = False
    ) -> Iterator[Block]:
        """Blocks of `BLOCK` bytes of text (the last one shorter) from block `first` on.

        Calls `notice` with remarks on rows. `seek`: start there if the file, which has no CR LF, is seekable.
        `DataError` if the file cannot be read, has become shorter, is damaged, or is not text.
        """
        with self._opened() as file:
            if self.input_format.binary or (seek and self.seekable):
                yield from self._stored(file, first)
            else:
                yield from self._converted(file, first, notice)

    def rows(self, start: int, size: int) -> Iterator[tuple[int, Document]]:
        """Each row of this file, which is read again, and the offset of its text; a row without text is empty.

        The text of the file begins at offset `start`; `DataError` if it has no longer `size` bytes. Text before the
        first row is a row without fields, and so is a file of nothing but text, in whose place is `UNREAD`.
        """
        if self.seekable:
            yield start, UNREAD
            return
        row_start = start
        has_begun = False
        with self._opened() as file:
            for text, row, _, _ in self._portions(file):
                if row is None and text and not has_begun:
                    row = Document(text)
                if row is not None:
                    yield row_start, row
                    has_begun = True
                row_start += len(text)
        if row_start != start + size:
            raise self.changed()

    def changed(self) -> DataError:
        """The error for a file that has changed."""
        problem = f"{self.name} changed while it was being read."
        return DataError(problem, "Wait until nothing writes to it, or copy it.")

    def fault(self) -> str | None:
        """Reason why this is not a text file, from its first bytes; None for a text file."""
        try:
            head = next(self.blocks(), Block(b"", 0)).text[: formats.HEAD]
        except XLError:
            return "not text, or damaged"
        if not head:
            return "empty"
        if self.input_format.binary:
            return None
        utf8 = formats.Utf8()
        utf8.feed(head)
        if utf8.has_nul:
            return "binary data"
        if utf8.bad is not None and not self.input_format.any_bytes:
            return "not UTF-8"
        return None

    def _opened(self) -> BinaryIO:
        descriptor = _open(self.path) if self.spool is None else os.dup(self.spool)
        return os.fdopen(descriptor, "rb", 0)

    def _portions(
        self, file: BinaryIO, notice: Callable[[str], None] = lambda text: None
    ) -> Iterator[tuple[bytes, Document | None, int, int]]:
        """Portions of text: bytes, the document that they begin or None, and `stored` and `crlf` as in `Block`."""
        input_format = self.input_format
        line_ends = formats.LineEnds()
        n_stored = 0  # bytes that were read so far

        def stored_bytes() -> Iterator[bytes]:
            """The bytes of the file; moves `n_stored` when the steps of `text_of` ask for more."""
            nonlocal n_stored
            for block in self._stored(file, 0):
                n_stored = block.stored
                yield block.text

        texts = formats.text_of(
            stored_bytes(),
            self.name,
            input_format.text_fields,
            file.fileno(),
            any_bytes=input_format.any_bytes,
            notice=notice,
        )
        if input_format.region_marks is not None:
            texts = without_marks(texts, self.name, input_format.region_marks)
        for portion in texts:
            document = portion if isinstance(portion, Document) else None
            yield line_ends.feed(portion or b""), document, n_stored, line_ends.replaced
        yield line_ends.feed(b"", final=True), None, n_stored, line_ends.replaced

    def _converted(self, file: BinaryIO, first: int, notice: Callable[[str], None]) -> Iterator[Block]:
        """Blocks of the text from number `first` on; those before it are read, too, to find where it begins."""
        held = bytearray()  # text of no block yet
        documents: list[int] = []  # offsets in `held` at which documents begin
        n_blocks = 0  # also those before `first`
        for text, document, stored, crlf in self._portions(file, notice):
            if document:
                documents.append(len(held))
            held += text
            while len(held) >= BLOCK:
                n_in_block = bisect_left(documents, BLOCK)
                if n_blocks >= first:
                    yield Block(bytes(held[:BLOCK]), stored, documents[:n_in_block], crlf)
                n_blocks += 1
                documents = [start - BLOCK for start in documents[n_in_block:]]
                del held[:BLOCK]
        if held and n_blocks >= first:
            yield Block(bytes(held), stored, documents, crlf)

    def _stored(self, file: BinaryIO, first: int) -> Iterator[Block]:
        """Blocks of the bytes as they are, from number `first` on, up to the size when the file was opened."""
        start = first * BLOCK
        while start < self.stored_bytes:
            end = min(start + BLOCK, self.stored_bytes)
            block = b""
            while start + len(block) < end:  # a read may return less than is asked for
                place = start + len(block)
                try:
                    more = os.pread(file.fileno(), end - place, place)
                except OSError as error:
                    raise DataError(f"cannot read {self.name}: {error.strerror}.", "Check the disk.") from None
                if not more:
                    raise self.changed()
                block += more
            yield Block(block, stored=end)
            start = end


def open_source(path: Path, input_format: InputFormat) -> Source:
    """The file at `path`; `DataError` if it is missing, unreadable, a pipe, a device or a folder."""
    descriptor = _open(path)
    try:
        status = os.fstat(descriptor)
        seekable = _is_plain(descriptor, str(path), input_format)
        return Source(str(path), path, identity(status), status.st_size, input_format, seekable)
    finally:
        os.close(descriptor)


def copy_pipe(path: Path, input_format: InputFormat) -> Generator[Progress, None, Source]:
    """Standard input (`-`) or a named pipe, copied to an unnamed file, which is deleted when the source is garbage.

    Yields progress, also while nothing arrives. `DataError` if it cannot be read; `ResourceError` if the cache is full.
    """
    folder = cache_folder()
    if str(path) == "-":
        name = STANDARD_INPUT
        status = os.fstat(0)
    else:
        name = str(path)
        status = path.stat()
    meter = ProgressMeter(f"reading {name}", None, "B")
    n_bytes = 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for portion in _read_pipe(path, name):
                file.write(portion)
                n_bytes += len(portion)
                yield from meter.report(n_bytes)
            file.flush()
            spool = os.dup(file.fileno())  # keeps the file, which has no name, when `file` is closed
    except OSError as error:
        problem = f"cannot keep a copy of {name} in {folder}: {error.strerror}."
        remedy = "Free some space there, or set XLCLI_CACHE to a folder on a larger disk."
        raise ResourceError(problem, remedy) from None
    is_plain = _is_plain(spool, name, input_format)
    source = Source(name, path, identity(status), n_bytes, input_format, is_plain, spool)
    weakref.finalize(source, os.close, spool)
    return source


def files_below(folder: Path) -> list[Path]:
    """Files in a folder and its subfolders, sorted by path, without hidden files and model folders.

    Links are followed; a file or folder with several names has the first one. `DataError` if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        problem = f"cannot read the folder {error.filename}: {error.strerror}."
        raise DataError(problem, "Check its permissions.") from None

    paths: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for base, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        parent = Path(base)
        parent_identity = identity(parent.stat())
        is_known = parent_identity in entered
        entered.add(parent_identity)
        # What `subfolders` then contains is where `os.walk` goes next.
        if is_known or ("config.json" in names and _is_model(parent)):
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths += [parent / name for name in names if not name.startswith(".")]
    first_paths: dict[tuple[int, int], Path] = {}
    for path in sorted(paths):
        if path.is_file():
            first_paths.setdefault(identity(path.stat()), path)
    return list(first_paths.values())


def _is_plain(descriptor: int, name: str, input_format: InputFormat) -> bool:
    """True if the stored bytes are the text."""
    try:
        head = os.pread(descriptor, formats.HEAD, 0)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}.", "Check the disk.") from None
    if input_format.region_marks is not None:
        return False
    return input_format.binary or formats.is_plain(head, name, input_format.text_fields)


def _is_model(folder: Path) -> bool:
    """True if xlcli trained or trains a model in this folder, whose texts are copies of its corpus."""
    try:
        return {"schema", "model", "sha256"} <= read_json(folder / "config.json").keys()
    except CheckpointError:
        return False


def _read_pipe(path: Path, name: str) -> Iterator[bytes]:
    """The bytes of standard input or a pipe as they arrive; b"" after every `QUIET_MS` in which none arrive."""
    descriptor = os.dup(0) if str(path) == "-" else _open(path, stat.S_ISFIFO)
    with os.fdopen(descriptor, "rb", 0) as pipe:
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        try:
            while True:
                if not waiting.poll(QUIET_MS):
                    yield b""
                    continue
                portion = pipe.read(BLOCK)
                if portion == b"":
                    return
                yield portion or b""  # `portion` is None if another process was faster
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}.", "Give a file.") from None


def _open(path: Path, is_kind: Callable[[int], bool] = stat.S_ISREG) -> int:
    """Descriptor of a regular file, or of another kind. Does not block on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"there is no file {path}.", "Check the path.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"cannot open {str(path)!r}: {reason}.", "Give a file that you can read.") from None
    mode = os.fstat(descriptor).st_mode
    if is_kind(mode):
        return descriptor
    os.close(descriptor)
    raise DataError(f"{path} is {kind_of(mode)}, not a file.", "Give a file, or - for standard input.")
