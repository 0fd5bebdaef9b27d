"""Text of any size from files, folders and standard input, read in bounded RAM, and its held-out parts.

Compressed files, other Unicode encodings, JSON lines, tables and Parquet files are recognized (`text/formats.py`).

Several files are one text, joined as by `cat`. A document begins with each file, and with each text of JSON lines,
tables and Parquet files, or with each line. Later reads are compared with the checksums of the first scan: a file that
has grown is read up to its length in the scan, and a file that has changed is refused.
"""

from __future__ import annotations

import math
import os
import random
import re
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, compress
from pathlib import Path

from xlcli.errors import DataError, counted, named
from xlcli.events import Notice, Progress, ProgressMeter, Row
from xlcli.files import is_pipe
from xlcli.text.documents import Document, plain
from xlcli.text.formats import CRLF_NOTICE, Utf8, not_utf8, with_nul_bytes
from xlcli.text.pretokenize import WORDS, whole_characters
from xlcli.text.sources import BLOCK, UNREAD, Block, InputFormat, Source, copy_pipe, files_below, open_source

TEXT = InputFormat()
MOST_REMARKS = 3  # number of remarks on files of rows that are shown


@dataclass(frozen=True, slots=True)
class Facts:
    """Result of scanning a corpus."""

    n_bytes: int
    n_chars: int | None  # number of characters; None if the text is not UTF-8
    has_nul: bool  # true if it contains NUL bytes, a sign of binary data
    sha256: str  # hash of the text
    sizes: tuple[int, ...]  # bytes of each file
    # File and offset of the first byte that is not UTF-8; None if the text is UTF-8.
    bad_byte: tuple[str, int] | None
    documents: Sequence[int] = (0,)  # offsets at which documents begin, ascending; the first is 0
    crlf: tuple[int, ...] = ()  # number of CR LF of each file that are read as LF
    from_bad_byte: bytes = b""  # some text from the first byte on that is not UTF-8


class Corpus:
    """One text made of files in order. Made by `gather`."""

    def __init__(
        self,
        sources: Sequence[Source],
        skipped: Mapping[Path, str] | None = None,  # files of folders that are not text, each with the reason
        documents: Sequence[int] | None = None,  # offsets at which they begin, ascending from 0; None: as files say
        left_out: Sequence[str] = (),  # names of files that are not read, because they are held-out text
    ) -> None:
        self.sources = tuple(sources)
        self.skipped = dict(skipped or {})
        self.left_out = tuple(left_out)
        self._documents = documents
        self._remarks: list[str] = []
        self._facts: Facts | None = None
        self.checksums: list[list[int]] = []  # CRC-32 of each block of each file, after the scan
        self._hashes: dict[tuple[int, int], str] = {}

    @property
    def name(self) -> str:
        """Names of the files, shortened if there are more than three."""
        names = [source.name for source in self.sources]
        if len(names) <= 3:
            return ", ".join(names)
        return f"{names[0]} and {len(names) - 1} more files"

    @property
    def facts(self) -> Facts:
        """Result of the scan. The first access scans the text."""
        if self._facts is None:
            for _ in self.scan():
                pass
        assert self._facts is not None
        return self._facts

    @property
    def n_bytes(self) -> int:
        return self.facts.n_bytes

    def without(self, held_out: Collection[Corpus]) -> Corpus:
        """This text without the files of held-out texts, whatever their names there. `DataError` if none remains."""
        taken = {source.identity for corpus in held_out for source in corpus.sources}
        remaining = [source for source in self.sources if source.identity not in taken]
        if len(remaining) == len(self.sources):
            return self
        if not remaining:
            remedy = "Give another file, or leave out --valid and --test: xlcli then splits text off the end."
            raise DataError(f"{self.name} can be only one of training, validation and test text.", remedy)
        left_out = [source.name for source in self.sources if source.identity in taken]
        return Corpus(remaining, self.skipped, left_out=left_out)

    def notices(self) -> Iterator[Notice]:
        """Warnings of skipped files and, after the scan, of rows that are read otherwise; a remark on CR LF."""
        if self.skipped:
            files = [f"{path} ({reason})" for path, reason in self.skipped.items()]
            yield Notice(f"skipped {counted(len(files), 'file')}: {named(files, most=3)}", "warning")
        if self._facts is not None and any(self._facts.crlf):
            where = ""
            if len(self.sources) > 1:
                with_crlf = compress(self.sources, self._facts.crlf)
                where = f" in {named([source.name for source in with_crlf], most=3)}"
            yield Notice(f"{CRLF_NOTICE}{where}; --binary keeps them")
        shown, others = self._remarks[:MOST_REMARKS], self._remarks[MOST_REMARKS:]
        yield from (Notice(remark, "warning") for remark in shown)
        if others:
            yield Notice(f"{len(others):,} more such warnings of other files or rows are not shown", "warning")

    def scan(self) -> Generator[Progress, None, None]:
        """Scans the text at the first call. Yields progress. `DataError` if the text is empty or cannot be read."""
        if self._facts is not None:
            return
        meter = ProgressMeter("reading", sum(source.stored_bytes for source in self.sources), "B")
        digest = sha256()
        utf8 = Utf8()
        documents = array("Q", [0])
        # Of each file so far; the last one is the one that is being read.
        sizes: list[int] = []
        crlf: list[int] = []
        checksums: list[list[int]] = []
        n_stored = 0  # bytes of the files that were read
        for source in self.sources:
            sizes.append(0)
            crlf.append(0)
            checksums.append([])
            for block in source.blocks(notice=self._remarks.append):
                block_start = utf8.n_bytes  # in the whole text
                starts = block.documents
                if source.input_format.each_line:
                    starts = [line_end.end() for line_end in re.finditer(b"\n", block.text)]
                begins_file = sizes[-1] == 0
                if begins_file:
                    starts = [0, *starts]
                for start in starts:
                    if block_start + start > documents[-1]:  # otherwise the document before it is empty
                        documents.append(block_start + start)
                digest.update(block.text)
                utf8.feed(block.text)
                sizes[-1] += len(block.text)
                crlf[-1] = block.crlf
                checksums[-1].append(zlib.crc32(block.text))
                self._require_text(utf8, sizes, block.text)
                yield from meter.report(n_stored + block.stored)
            n_stored += source.stored_bytes
        utf8.feed(b"", final=True)
        self._require_text(utf8, sizes, b"")
        if utf8.n_bytes == 0:
            raise DataError(f"{self.name} is empty.", "Give a file that contains text.")
        self.checksums = checksums
        self._facts = Facts(
            n_bytes=utf8.n_bytes,
            n_chars=utf8.n_chars,
            has_nul=utf8.has_nul,
            sha256=digest.hexdigest(),
            sizes=tuple(sizes),
            bad_byte=None if utf8.bad is None else self._locate(utf8.bad, sizes),
            documents=documents if self._documents is None else self._documents,
            crlf=tuple(crlf),
            from_bad_byte=utf8.from_bad,
        )

    def read(self, start: int = 0, stop: int = sys.maxsize) -> Iterator[bytes]:
        """Bytes of the text from offset `start` to `stop`, a block at a time; `DataError` if one has changed."""
        facts = self.facts
        file_start = 0  # offset in the text at which the text of the file begins
        for source, size, n_crlf, checksums in zip(self.sources, facts.sizes, facts.crlf, self.checksums, strict=True):
            start_in_file = max(start - file_start, 0)
            stop_in_file = min(stop - file_start, size)
            file_start += size
            if start_in_file >= stop_in_file:
                continue
            first_block = start_in_file // BLOCK
            # A file with CR LF is converted from its beginning, since its bytes are at other offsets than its text.
            blocks = source.blocks(first_block, seek=n_crlf == 0)
            for number in range(first_block, math.ceil(stop_in_file / BLOCK)):
                block_start = number * BLOCK  # in the text of the file
                block = next(blocks, Block(b"", 0)).text[: size - block_start]  # without what was appended since
                if zlib.crc32(block) != checksums[number]:
                    raise source.changed()
                yield block[max(start_in_file - block_start, 0) : stop_in_file - block_start]

    def rows(self) -> Iterator[tuple[int, Row]]:
        """The offset at which each row or file begins, and the row, whose number counts rows without text, too.

        A row of two texts comes twice, with two numbers. Files of rows are read again. If there are several files, the
        field `file` is the name of the row's, unless it has one. `DataError` if a file has changed since the scan.
        """
        file_start = 0
        number = 0
        starts = self.facts.documents
        for source, size in zip(self.sources, self.facts.sizes, strict=True):
            file = source.name if len(self.sources) > 1 else None
            file_field = {} if file is None else {"file": file}
            rows: Iterable[tuple[int, Document]] = source.rows(file_start, size)
            if self._documents is not None:
                rows = [(start, UNREAD) for start in self._documents]
            for start, document in rows:
                number += 1
                if not document:
                    continue
                is_known = bisect_left(starts, start) < bisect_right(starts, start)
                if not is_known:
                    raise source.changed()
                yield start, Row(number, file_field | plain(document.fields), document.regions, file)
            file_start += size

    def range_sha256(self, start: int, stop: int) -> str:
        """Hash of the bytes from `start` to `stop`, computed once."""
        if (start, stop) == (0, self.n_bytes):
            return self.facts.sha256
        if (start, stop) not in self._hashes:
            digest = sha256()
            for portion in self.read(start, stop):
                digest.update(portion)
            self._hashes[start, stop] = digest.hexdigest()
        return self._hashes[start, stop]

    def _require_text(self, text: Utf8, sizes: list[int], block: bytes) -> None:
        """`DataError` if what was read of the files, at last this block, is no text although it has to be."""
        source = self.sources[len(sizes) - 1]
        if source.input_format.binary or source.input_format.any_bytes:
            return
        if text.has_nul:
            raise with_nul_bytes(source.name, block)
        if text.bad is not None:
            name, offset = self._locate(text.bad, sizes)
            raise not_utf8(name, offset, text.from_bad, is_cut=text.is_cut or name != source.name)

    def _locate(self, place: int, sizes: Sequence[int]) -> tuple[str, int]:
        for source, size in zip(self.sources, sizes, strict=True):
            if place < size:
                return source.name, place
            place -= size
        return self.sources[-1].name, sizes[-1]


def gather(paths: Sequence[str | Path], *, input_format: InputFormat = TEXT) -> Generator[Progress, None, Corpus]:
    """The text of files, folders and `-` (standard input), in this order. Yields progress of pipes.

    Of a folder all files that look like text are read, sorted by path, except hidden files. `DataError` if `paths` is
    empty, or a path is not text; `ResourceError` if the disk is too full for a copy of standard input.
    """
    sources: list[Source] = []
    skipped: dict[Path, str] = {}
    for given in paths:
        path = Path(given)
        if any(source.spool is not None and source.path == path for source in sources):
            raise DataError(f"{given} is given twice.", f"Give {given} once.")
        if str(given) == "-" and sys.stdin is None:
            raise DataError("standard input is closed.", "Give a file.")
        if is_pipe(given):
            copied = yield from copy_pipe(path, input_format)
            sources.append(copied)
        elif os.path.isdir(path):  # noqa: PTH112 (a path that cannot be read is reported when it is opened)
            n_before = len(sources)
            for source in [open_source(file, input_format) for file in files_below(path)]:
                fault = source.fault()
                if fault is None:
                    sources.append(source)
                else:
                    skipped[source.path] = fault
            if len(sources) == n_before:
                raise DataError(f"the folder {path} contains no text files.", "Give files, or a folder of text files.")
        else:
            sources.append(open_source(path, input_format))
    if not sources:
        raise DataError("no text was given.", "Give a file, a folder, or - for standard input.")
    return Corpus(sources, skipped)


# Training, validation and test part

DEFAULT_FRACTION = 0.05
LARGEST_DEFAULT = 2**20  # maximum bytes of a held-out part of default size
DRAWN_FROM = 10  # number of files from which a held-out part is whole files
LEAST_DRAWN, MOST_DRAWN = 0.5, 3.0
"""Bytes of such a part for each byte that it should have; without files that fit, it is the end of the text."""
_SEARCH = 2**16
_SAMPLE_BLOCK = 2**16
PASSAGE = 512
"""Bytes of a passage that two texts share only if it was copied: logs of 2,000 lines repeat 128 bytes, but not 256."""
N_PASSAGES = 16  # number of passages of a held-out text that are looked for elsewhere


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` to `stop` of a corpus, whose documents begin at `starts` (None: as the corpus says)."""

    corpus: Corpus
    start: int
    stop: int
    starts: Sequence[int] | None = None

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start

    @property
    def sha256(self) -> str:
        return self.corpus.range_sha256(self.start, self.stop)

    @property
    def documents(self) -> Sequence[int]:
        """Offsets at which its documents begin, ascending from 0; a cut document begins with the part."""
        starts = self.corpus.facts.documents if self.starts is None else self.starts
        inside = starts[bisect_right(starts, self.start) : bisect_left(starts, self.stop)]
        return array("Q", [0, *(at - self.start for at in inside)])

    def files(self) -> Iterator[tuple[str, str]]:
        """A digest of the text of each file that begins in the part, and its name; from its size and its checksums."""
        start = 0
        facts = self.corpus.facts
        for source, size, checksums in zip(self.corpus.sources, facts.sizes, self.corpus.checksums, strict=True):
            if self.start <= start < self.stop:
                yield sha256(f"{size}:{checksums}".encode()).hexdigest()[:16], source.name
            start += size

    def fingerprint(self, *, by_document: bool) -> str:
        """Hash of the bytes, and of the places at which documents begin if they are separated."""
        if not by_document:
            return self.sha256
        places = ",".join(map(str, self.documents))
        return sha256(f"{self.sha256}:{places}".encode()).hexdigest()

    def read(self) -> Iterator[bytes]:
        return self.corpus.read(self.start, self.stop)

    def sample(self, limit: int) -> Iterator[bytes]:
        """At most `limit` bytes of the part, in evenly spread blocks that start and end between words."""
        if self.n_bytes <= limit:
            yield from self.read()
            return
        n_blocks = max(1, limit // _SAMPLE_BLOCK)
        last_start = self.n_bytes - _SAMPLE_BLOCK
        starts = [self.start + i * last_start // max(n_blocks - 1, 1) for i in range(n_blocks)]
        for block in _spread(self, starts):
            # After the first line end, else before the first blank, which belongs to the word after it.
            first_word = block.find(b"\n", 0, _SAMPLE_BLOCK // 2) + 1
            if first_word == 0:
                first_word = max(block.find(b" ", 0, _SAMPLE_BLOCK // 2), 0)
            block = block[first_word:]
            yield block[: WORDS.stable_prefix_len(block)] or block


@dataclass(frozen=True, slots=True)
class Split:
    """The three parts of a corpus; validation and test may be empty. `drawn` are files that these have as a whole."""

    train: Part
    valid: Part
    test: Part
    drawn: tuple[str, ...] = ()


def split(
    corpus: Corpus,
    valid: str | float | None = None,  # fraction of the text, or a file; None is 5 %, at most 1 MiB
    test: str | float | None = None,  # as `valid`; None is an empty part if `valid` is a file
    *,
    by_document: bool = False,  # split between documents where one begins at most 64 KiB before the place of the split
    seed: int | None = None,  # draws whole files to hold out, if there are `DRAWN_FROM`; None: hold out the end
) -> Generator[Progress, None, Split]:
    """Splits a corpus into training, validation and test part, at line ends if possible. Yields progress.

    The parts are in this order. If whole files are held out, they are moved to the end of the corpus.
    No file is read in two parts: test text comes first, then validation text.

    `DataError` if a file cannot be read or is empty, or nothing but held-out text is given.
    """
    if test is None and isinstance(valid, str):
        test = 0.0
    texts: dict[str, Corpus] = {}
    for given in (test, valid):
        if isinstance(given, str):
            text = yield from gather([given], input_format=corpus.sources[0].input_format)
            texts[given] = text.without(texts.values())
    corpus = corpus.without(texts.values())
    n_drawn = [0, 0]
    if seed is not None and len(corpus.sources) >= DRAWN_FROM:
        corpus, n_drawn = _drawn_last(corpus, (test, valid), seed)
    yield from corpus.scan()
    file_starts = [*accumulate(corpus.facts.sizes, initial=0)]
    n_files = len(corpus.sources)
    end = corpus.n_bytes
    held_out: list[Part] = []
    for given, n_drawn_files in zip((test, valid), n_drawn, strict=True):
        if isinstance(given, str):
            held_out.append(Part(texts[given], 0, texts[given].n_bytes))
            continue
        if n_drawn_files:
            n_files -= n_drawn_files
            start = file_starts[n_files]
        else:
            wanted_start = end - _held_out_size(given, corpus.n_bytes)
            start = _boundary(corpus, wanted_start, end, by_document=by_document)
        held_out.append(Part(corpus, start, end))
        end = start
    test_part, valid_part = held_out
    drawn = corpus.sources[n_files : n_files + sum(n_drawn)]
    return Split(Part(corpus, 0, end), valid_part, test_part, tuple(source.name for source in drawn))


def _held_out_size(given: str | float | None, n_bytes: int) -> int:
    """Bytes of a held-out part of a text of `n_bytes`, none if it is another text."""
    if isinstance(given, str):
        return 0
    if given is None:
        return min(int(n_bytes * DEFAULT_FRACTION), LARGEST_DEFAULT)
    return int(n_bytes * given)


def _drawn_last(corpus: Corpus, parts: Sequence[str | float | None], seed: int) -> tuple[Corpus, list[int]]:
    """Draws whole files for held-out parts, and moves them to the end of the corpus, those of the first part last.

    `parts` are given as to `split`. Returns the corpus in its new order and the number of files of each part: none for
    a part whose size no files have, and for those after it. Sizes are those of the stored files.
    """
    sizes = [source.stored_bytes for source in corpus.sources]
    undrawn = random.Random(seed).sample(range(len(sizes)), len(sizes))  # noqa: S311
    held_out_files: list[int] = []  # in their order at the end of the corpus
    n_drawn = [0] * len(parts)
    for i, given in enumerate(parts):
        wanted_bytes = _held_out_size(given, sum(sizes))
        drawn = _draw(undrawn, sizes, wanted_bytes)
        if wanted_bytes > 0 and not drawn:
            break
        undrawn = [file for file in undrawn if file not in drawn]
        held_out_files = sorted(drawn) + held_out_files
        n_drawn[i] = len(drawn)
    sources = [corpus.sources[file] for file in sorted(undrawn) + held_out_files]
    return Corpus(sources, corpus.skipped, left_out=corpus.left_out), n_drawn


def _draw(files: Sequence[int], sizes: Sequence[int], wanted_bytes: int) -> list[int]:
    """Takes files in this order, by number, until they have enough bytes, without too large ones; none if too few."""
    drawn: list[int] = []
    n_bytes = 0
    for file in files:
        is_too_large = n_bytes + sizes[file] > MOST_DRAWN * wanted_bytes
        if n_bytes < wanted_bytes and not is_too_large:
            drawn.append(file)
            n_bytes += sizes[file]
    return drawn if n_bytes >= LEAST_DRAWN * wanted_bytes else []


def warn_of_copies(held_out: Corpus, text: Corpus) -> Generator[Progress | Notice, None, None]:
    """A warning if another text has one of `N_PASSAGES` passages of a held-out text. Yields progress."""
    last = max(0, held_out.n_bytes - PASSAGE)
    starts = [last * (2 * i + 1) // (2 * N_PASSAGES) for i in range(N_PASSAGES)]
    passages = {block[:PASSAGE] for block in _spread(Part(held_out, 0, held_out.n_bytes), starts)}
    meter = ProgressMeter("looking for held-out text", text.n_bytes, "B")
    end = 0
    window = b""
    for portion in text.read():
        end += len(portion)
        window = window[1 - PASSAGE :] + portion  # a passage may begin in the portion before
        yield from meter.report(end)
        if any(passage in window for passage in passages):
            other, _ = text._locate(end - 1, text.facts.sizes)
            problem = f"{held_out.name} is not held out: {other} has the same text, at least in part"
            yield Notice(f"{problem}; remove it from one of them, or scores will be too good", "warning")
            return


def _boundary(corpus: Corpus, target: int, end: int, *, by_document: bool) -> int:
    """Offset after the last line end before `target`, else of the last space, else of the last character boundary.

    It is at most `_SEARCH` bytes before `target`, and the part up to `end` is at most doubled by what it adds.
    `by_document`: the last document that begins in the `_SEARCH` bytes up to `target`, if there is one.
    """
    if target >= end or target <= 0:
        return max(0, min(target, end))
    documents = corpus.facts.documents
    document = documents[bisect_right(documents, target) - 1]
    if by_document and document > max(target - _SEARCH, 0):
        return document
    n_before = min(_SEARCH, target, max(end - target, 4))  # a character has at most 4 bytes
    start = target - n_before
    before = b"".join(corpus.read(start, target))
    after_line = before.rfind(b"\n") + 1
    if after_line > 0:
        return start + after_line
    space = before.rfind(b" ")
    if space > 0:
        return start + len(before[:space].rstrip(b" "))
    return start + whole_characters(before)


def _spread(part: Part, starts: list[int]) -> Iterator[bytes]:
    """Blocks of the part at these ascending offsets; in one pass if a file has to be converted from its beginning."""
    if not any(part.corpus.facts.crlf) and all(source.seekable for source in part.corpus.sources):
        for start in starts:
            yield b"".join(part.corpus.read(start, min(start + _SAMPLE_BLOCK, part.stop)))
        return
    portions = part.read()
    held = b""  # what was read last
    held_start = part.start
    for start in starts:
        while held_start + len(held) < start + _SAMPLE_BLOCK:
            portion = next(portions, b"")
            if not portion:
                break
            held += portion
            n_before_block = max(0, min(start - held_start, len(held)))
            held = held[n_before_block:]
            held_start += n_before_block
        block_start = start - held_start
        yield held[block_start : block_start + _SAMPLE_BLOCK]
