"""Text of any size from files, folders, gzip files and standard input, read in bounded memory.

Several files are one text, as `cat` makes it. The text is fixed by the first look through it: whatever is read later
must have the same checksums, so a file that grows is read as it was, and one that changed is refused.
"""

from __future__ import annotations

import codecs
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from xlcli.errors import DataError
from xlcli.events import Progress
from xlcli.text.sources import BLOCK, Source, copy_stdin, files_below, is_folder, open_source

_TURN = 0.2


@dataclass(frozen=True, slots=True)
class Facts:
    """What one look through a corpus tells.

    Attributes:
        n_bytes: length of the text.
        n_chars: its characters; None when it is not UTF-8.
        has_nul: whether it holds NUL bytes, a sign of data that is not text.
        sha256: hash of the text.
        sizes: bytes of each file.
        bad_byte: file and offset of the first byte that is not UTF-8; None when all are.
    """

    n_bytes: int
    n_chars: int | None
    has_nul: bool
    sha256: str
    sizes: tuple[int, ...]
    bad_byte: tuple[str, int] | None


class Corpus:
    """One text, made of files in order. Made by `open_corpus`.

    Attributes:
        sources: the files.
        skipped: files of folders that do not look like text.
    """

    def __init__(self, sources: Sequence[Source], skipped: Sequence[Path] = ()) -> None:
        self.sources = tuple(sources)
        self.skipped = tuple(skipped)
        self._facts: Facts | None = None
        self._checksums: list[list[int]] = []

    @property
    def name(self) -> str:
        """The names of the files, shortened when they are many."""
        names = [source.name for source in self.sources]
        return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more files"

    @property
    def seekable(self) -> bool:
        """Whether reading from the middle costs no more than from the beginning."""
        return all(source.seekable for source in self.sources)

    @property
    def facts(self) -> Facts:
        """What one look through the text tells; looks now if nobody has."""
        if self._facts is None:
            for _ in self.scan():
                pass
        assert self._facts is not None
        return self._facts

    @property
    def n_bytes(self) -> int:
        """Length of the text."""
        return self.facts.n_bytes

    @property
    def sha256(self) -> str:
        """Hash of the text."""
        return self.facts.sha256

    def scan(self) -> Iterator[Progress]:
        """Look through the text once, reporting progress.

        Raises:
            DataError: the text is empty or cannot be read.
        """
        if self._facts is not None:
            return
        clock = ProgressMeter("reading", sum(source.stored_bytes for source in self.sources))
        digest, utf8, nul, stored = sha256(), _Utf8(), False, 0
        sizes: list[int] = []
        checksums: list[list[int]] = []
        for source in self.sources:
            sizes.append(0)
            checksums.append([])
            for block, done in source.blocks():
                digest.update(block)
                utf8.feed(block)
                nul = nul or b"\0" in block
                sizes[-1] += len(block)
                checksums[-1].append(zlib.crc32(block))
                yield from clock.report(stored + done)
            stored += source.stored_bytes
        utf8.finish()
        if sum(sizes) == 0:
            raise DataError(f"{self.name} is empty.", "Give a file with text in it.")
        bad = None if utf8.bad is None else self._locate(utf8.bad, sizes)
        self._checksums = checksums
        self._facts = Facts(sum(sizes), utf8.n_chars, nul, digest.hexdigest(), tuple(sizes), bad)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to `stop` (default: the end), in portions of at most `BLOCK`.

        Raises:
            DataError: a file is not what it was at the first look.
        """
        stop = self.n_bytes if stop is None else stop
        place = 0
        for source, size, checksums in zip(self.sources, self.facts.sizes, self._checksums, strict=True):
            first, last = max(start - place, 0), min(stop - place, size)
            if first < last:
                yield from self._read_source(source, first, last, checksums, size)
            place += size

    def require_utf8(self) -> None:
        """Refuse text that is not UTF-8.

        Raises:
            DataError: names the file and the offset of the first wrong byte.
        """
        if self.facts.bad_byte is not None:
            name, offset = self.facts.bad_byte
            raise DataError(
                f"{name} is not UTF-8: the byte at offset {offset} fits no character.",
                "Add --tokenizer bytes, which takes anything, or convert the file with iconv.",
            )

    @staticmethod
    def _read_source(source: Source, first: int, last: int, checksums: list[int], size: int) -> Iterator[bytes]:
        at = first // BLOCK
        blocks = source.blocks(at)
        while at * BLOCK < last:
            block, _ = next(blocks, (b"", 0))
            block = block[: size - at * BLOCK]
            if zlib.crc32(block) != checksums[at]:
                raise source.changed()
            yield block[max(first - at * BLOCK, 0) : last - at * BLOCK]
            at += 1

    def _locate(self, place: int, sizes: list[int]) -> tuple[str, int]:
        for source, size in zip(self.sources, sizes, strict=True):
            if place < size:
                return source.name, place
            place -= size
        return self.sources[-1].name, sizes[-1]


def open_corpus(paths: Sequence[str | Path], *, stdin: BinaryIO | None = None) -> Corpus:
    """The text of files, folders, `.gz` files and `-` (standard input), in the order given.

    A folder gives its text-like files, sorted by path, hidden ones left out.

    Args:
        paths: what to read.
        stdin: what `-` reads; default: the process's own.

    Raises:
        DataError: nothing was given, or a path cannot be used as text.
        ResourceError: no room for the copy of standard input.
    """
    sources: list[Source] = []
    skipped: list[Path] = []
    for given in paths:
        path = Path(given)
        if str(given) == "-":
            if any(source.spool for source in sources):
                raise DataError("standard input was asked for twice.", "Give - once.")
            if stdin is None and sys.stdin is None:
                raise DataError("standard input is closed.", "Give a file.")
            sources.append(copy_stdin(stdin if stdin is not None else sys.stdin.buffer))
        elif is_folder(path):
            inside = [open_source(file) for file in files_below(path)]
            texts = [source for source in inside if source.looks_like_text()]
            if not texts:
                raise DataError(f"the folder {path} holds no text files.", "Give files, or a folder of text files.")
            sources += texts
            skipped += [source.path for source in inside if source not in texts]
        else:
            sources.append(open_source(path))
    if not sources:
        raise DataError("no text was given.", "Give a file, a folder, or - for standard input.")
    return Corpus(sources, skipped)


class ProgressMeter:
    """Turns amounts of work done into `Progress`, a few times a second.

    Args:
        stage: what is being done.
        total: bytes to do.
    """

    def __init__(self, stage: str, total: int) -> None:
        self.stage, self.total = stage, total
        self._start = self._last = time.monotonic()

    def report(self, done: int) -> Iterator[Progress]:
        """`Progress` at `done` bytes, when it is time for one."""
        now = time.monotonic()
        if now - self._last >= _TURN:
            self._last = now
            yield Progress(self.stage, done, self.total, "B", done / (now - self._start))


class _Utf8:
    """Counts the characters of a text and finds the place of the first byte that is not UTF-8."""

    def __init__(self) -> None:
        self.n_chars: int | None = 0
        self.bad: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._place = 0

    def feed(self, block: bytes) -> None:
        self._decode(block, final=False)
        self._place += len(block)

    def finish(self) -> None:
        self._decode(b"", final=True)

    def _decode(self, block: bytes, *, final: bool) -> None:
        if self.n_chars is None:
            return
        held = len(self._decoder.getstate()[0])
        try:
            self.n_chars += len(self._decoder.decode(block, final))
        except UnicodeDecodeError as error:
            self.n_chars, self.bad = None, self._place - held + error.start
