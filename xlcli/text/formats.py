"""Text out of compressed files, other Unicode encodings, JSON and tables.

    portions ─▶ unpacked ─▶ in UTF-8 ─▶ in lines ─▶ texts of JSON or of a table ─▶ portions of text

Data is read as it arrives. Each step looks at the first bytes and passes text that is not of its format on unchanged.
None in place of a portion means that nothing has arrived for a while; it is passed on. Memory is bounded: a portion has
at most 2^23 bytes, however small the compressed data, and a row at most `LONGEST_LINE`. Parquet files are read from
their end (`text/parquet_rows.py`). Readers of text pass it through `LineEnds`.
"""

from __future__ import annotations

import bz2
import codecs
import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard

from xlcli.errors import DataError
from xlcli.text.documents import DEFAULT_FIELD, Document, Notice, Portions, Read, texts_of
from xlcli.text.misreadings import conversion, likely_encodings
from xlcli.text.parquet_rows import PARQUET, parquet_rows
from xlcli.text.recognition import read_while, recognized, texts_in

HEAD = 2**13  # number of first bytes of a stream that must be text
LEAST_NULS = 8  # NUL bytes, all of them first or all second of two, from which a text is taken for UTF-16
COMPRESSIONS = {  # first bytes of compressed data
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{b"%c\x2a\x4d\x18" % first: "zstd" for first in range(0x50, 0x60)},  # skippable frames, as pzstd writes them
}
ENCODINGS = {  # byte-order marks; UTF-32 comes first, because its mark begins with the mark of UTF-16
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
BINARIES = {  # first bytes of well-known files that are not text
    b"PK\x03\x04": "a zip archive or an office document",
    b"\x7fELF": "a program",
    b"MZ\x90": "a program",
    b"%PDF-": "a PDF document",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"SQLite format 3\0": "an SQLite database",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"Rar!": "a RAR archive",
    PARQUET: "a Parquet file",
    b"\x93NUMPY": "a NumPy array",
}


def text_of(
    portions: Portions,
    name: str,
    text_fields: Sequence[str] = (),  # keys in JSON, or columns of a table; none is the key `text` of JSON, if any
    descriptor: int | None = None,  # open file of the data, for Parquet
    *,
    any_bytes: bool = False,  # accept well-known formats that are not text, except Parquet, which is one of texts
    notice: Notice = lambda text: None,  # called with remarks on rows that are plain text or left out, and on CR
    read: Read = texts_of,  # what is made of rows
) -> Portions:
    """Text of data in any of the formats; `DataError` if it is damaged, known as no text, or lacks `text_fields`."""
    if descriptor is not None and _begins_with(descriptor, PARQUET):
        fields = text_fields or [DEFAULT_FIELD]
        return read(parquet_rows(descriptor, name, fields), name, fields, notice)
    text = plain_text(portions, name, any_bytes=any_bytes, notice=notice)
    return texts_in(text, name, text_fields, notice, read)


def plain_text(portions: Portions, name: str, *, any_bytes: bool, notice: Notice) -> Portions:
    """Text of data that is taken for lines, whatever they hold; arguments and errors as of `text_of`."""
    marks = [PARQUET] if any_bytes else [*BINARIES]
    return in_lines(_without_binaries(in_utf8(unpacked(portions, name), name), name, marks), name, notice)


def _begins_with(descriptor: int, mark: bytes) -> bool:
    """True if an open file begins with these bytes; False for a pipe."""
    try:
        return os.pread(descriptor, len(mark), 0) == mark
    except OSError:
        return False


def is_plain(head: bytes, name: str, text_fields: Sequence[str] = ()) -> bool:
    """True if `text_of` passes data with these first `HEAD` bytes on unchanged."""
    if head.startswith((*COMPRESSIONS, *ENCODINGS, *BINARIES)) or _ends_lines_in_cr(head):
        return False
    return recognized(head, name, text_fields).kind == "plain"


CRLF_NOTICE = "Windows line endings (CR LF) are read as LF"


class LineEnds:
    """Reads CR LF as LF in a text divided anywhere; a CR before anything else stays."""

    def __init__(self, held: bytes = b"") -> None:
        self.held = held  # a CR at the end of the text so far, which the next byte decides about
        self.replaced = 0  # number of CR LF so far

    def feed(self, portion: bytes, *, final: bool = False) -> bytes:
        """The next bytes as text, `final` if they are the last ones."""
        text = self.held + portion
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
            self.replaced += len(self.held) + len(portion) - len(text)
        self.held = b"\r" if text.endswith(b"\r") and not final else b""
        return text.removesuffix(self.held)


def unpacked(portions: Portions, name: str) -> Portions:
    """Decompressed data, or data as it is if it is not compressed; `DataError` if it is damaged or incomplete."""
    mark, head = yield from _begin(portions, COMPRESSIONS)
    data = itertools.chain([head], portions)
    if not mark:
        yield from data
        return
    kind = COMPRESSIONS[mark]
    unpacker = _Unpacker(kind)
    try:
        for portion in data:
            if portion is None:
                yield None
            else:
                yield from filter(None, unpacker.feed(portion))
    except FAULTS as error:
        raise DataError(f"{name} is damaged {kind} data: {error}.", f"Check it with: {kind} -t") from None
    if unpacker.frame is not None:
        raise DataError(f"{name} ends in the middle of its {kind} data.", f"Check it with: {kind} -t")


def in_utf8(portions: Portions, name: str) -> Portions:
    """Text in UTF-8, converted if a byte-order mark says so; `DataError` if the text does not agree with the mark."""
    mark, head = yield from _begin(portions, ENCODINGS)
    encoding, data = ENCODINGS.get(mark, "utf-8"), itertools.chain([head.removeprefix(mark)], portions)
    if encoding == "utf-8":
        yield from data
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for portion in data:
            if portion is None:
                yield None
                continue
            text = decoder.decode(portion)
            if text:
                yield text.encode()
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        problem = f"{name} begins like {encoding.upper()} but is not: {error}."
        raise DataError(problem, "Convert it to UTF-8 with iconv.") from None


def in_lines(portions: Portions, name: str, notice: Notice) -> Portions:
    """Passes a text on, with LF for each CR if its first `HEAD` bytes have no other line end; `notice` is told."""
    n_left = HEAD  # bytes that are still to be looked at
    for portion in portions:
        if portion and (b"\r" in portion or b"\n" in portion):
            break
        n_left -= len(portion or b"")
        yield portion
    else:
        return  # a text of one line
    from_first_end = itertools.chain([portion], portions)
    head = yield from read_while(from_first_end, lambda head: b"\n" not in head and len(head) < n_left)
    ends_lines_in_cr = _ends_lines_in_cr(head[: max(n_left, 0)])
    if ends_lines_in_cr:
        notice(f"{name} ends its lines in CR alone, which is read as a line end")
    for portion in itertools.chain([head], portions):
        if portion and ends_lines_in_cr:
            portion = portion.replace(b"\r", b"\n")
        yield portion


def _ends_lines_in_cr(head: bytes) -> bool:
    return b"\r" in head[: HEAD - 1] and b"\n" not in head


def not_text(name: str, reason: str) -> DataError:
    """Error for a source that is not text; `reason` says why."""
    return DataError(f"{name} {reason}, not text.", "Extract its text first, or use --binary to read its raw bytes.")


def with_nul_bytes(name: str, head: bytes) -> DataError:
    """Error for a source with NUL bytes in its first bytes, of which it says so if they are UTF-16."""
    encoding = utf16_encoding(head)
    if encoding is None:
        return not_text(name, "contains NUL bytes")
    problem = f"{name} is probably UTF-16 without a byte-order mark: it contains NUL bytes at every second place only."
    return DataError(problem, f"Convert it: iconv -f {encoding} -t utf-8 OLD > NEW, or use --binary to read its bytes.")


def utf16_encoding(head: bytes) -> str | None:
    """The encoding if NUL bytes are the first of two bytes each, or the second, as in UTF-16; else None."""
    places = np.flatnonzero(np.frombuffer(head, np.uint8) == 0)
    if len(places) < LEAST_NULS or len({*(places % 2).tolist()}) > 1:
        return None
    return "utf-16-be" if places[0] % 2 == 0 else "utf-16-le"


def not_utf8(name: str, offset: int, data: bytes, *, is_cut: bool = False) -> DataError:
    """Error for text whose byte at `offset` is not UTF-8, and begins `data`.

    `is_cut`: it begins a character that the end cuts off.
    """
    reason = f"is not UTF-8: the byte at offset {offset} is invalid"
    remedy = conversion(data)
    if is_cut:
        reason = "ends inside a UTF-8 character, in its last line"
        remedy = "Cut it at a line end, as head -n does"
    return DataError(f"{name} {reason}.", f"{remedy}, or use --binary to read its raw bytes.")


class Utf8:
    """Counts the characters of a text and finds bytes that are not text."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.n_chars: int | None = 0  # number of characters so far; None if the text is not UTF-8
        self.bad: int | None = None  # offset of the first byte that is not UTF-8
        self.from_bad = b""  # the text from that byte on, `HEAD` bytes at most
        self.is_cut = False  # true if `bad` begins a character that the end of the text cuts off
        self.has_nul = False  # true if there is a NUL byte, a sign of binary data
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, block: bytes, *, final: bool = False) -> str:
        """Reads the next bytes of the text, `final` if they are the last ones; returns the characters that they end."""
        text = ""
        if self.n_chars is not None:
            held = len(self._decoder.getstate()[0])
            try:
                text = self._decoder.decode(block, final)
                self.n_chars += len(text)
            except UnicodeDecodeError as error:
                self.n_chars, self.bad, self.is_cut = None, self.n_bytes - held + error.start, final
                self.from_bad = error.object[error.start :][:HEAD]
        self.n_bytes += len(block)
        self.has_nul = self.has_nul or b"\0" in block
        return text


def with_notice_of_bytes(portions: Portions, name: str, notice: Notice) -> Portions:
    """Passes a text on, and tells `notice` of the first line not in UTF-8, and with NUL; `DataError` for UTF-16."""
    utf8 = Utf8()
    line = 1  # in which the next portion begins
    for portion in portions:
        if not portion or isinstance(portion, Document):
            yield portion
            continue
        start = utf8.n_bytes
        was_utf8 = utf8.bad is None
        had_nul = utf8.has_nul
        utf8.feed(portion)
        if was_utf8 and utf8.bad is not None:
            bad_line = line + portion.count(b"\n", 0, max(utf8.bad - start, 0))
            place = f"line {bad_line:,} of {name}"
            remark = f"{place} is not UTF-8: its bytes are scored, as U+FFFD where the model has none"
            likely = " or ".join(likely_encodings(utf8.from_bad))
            notice(f"{remark}; it is probably {likely}" if likely else remark)
        if utf8.has_nul and not had_nul:
            if utf16_encoding(portion[:HEAD]) is not None:
                raise with_nul_bytes(name, portion[:HEAD])
            nul_line = line + portion.count(b"\n", 0, portion.index(b"\0"))
            notice(f"line {nul_line:,} of {name} has NUL bytes, which are scored: it may be binary or UTF-16")
        line += portion.count(b"\n")
        yield portion


def _without_binaries(portions: Portions, name: str, marks: Sequence[bytes]) -> Portions:
    """The data, unless it begins with one of these keys of `BINARIES`."""
    mark, head = yield from _begin(portions, marks)
    if mark == PARQUET:
        reason = "which is read from its end: it cannot come through a pipe or be compressed."
        raise DataError(f"{name} is a Parquet file, {reason}", "Give the file by its name.")
    if mark:
        raise not_text(name, f"is {BINARIES[mark]}")
    yield from itertools.chain([head], portions)


def _begin(portions: Portions, marks: Iterable[bytes]) -> Generator[None, None, tuple[bytes, bytes]]:
    """The mark that the data begins with, or nothing, and the first bytes with it."""
    head = yield from read_while(portions, lambda head: any(mark != head and mark.startswith(head) for mark in marks))
    return next(filter(head.startswith, marks), b""), head


# Gzip, bzip2, xz and zstd data

BLOCK = 2**20  # maximum number of bytes that one call of a decompressor returns
ZSTD_INPUT = 2**8  # bytes of zstd data decompressed at a time; each can stand for up to 2^15 bytes of text
LZMA_MEMORY, ZSTD_WINDOW = 2**27, 2**27
"""Maximum bytes of RAM of a decompressor: those that the formats' own tools need at their highest levels."""
FAULTS = (zlib.error, OSError, lzma.LZMAError, zstandard.ZstdError)  # errors of damaged data
FRAMES: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=LZMA_MEMORY),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj(),
}
"""What decompresses one frame of each format: an object with `decompress`, `eof` and `unused_data`."""


class _Unpacker:
    """Decompresses data of one format: frames, each compressed on its own, one after another, as `cat` joins files."""

    def __init__(self, kind: str) -> None:
        self.frame: Any = None  # what decompresses the unfinished frame (`FRAMES`); None between two frames
        self._kind = kind
        self._input_size = ZSTD_INPUT if kind == "zstd" else BLOCK

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Text of the next bytes of compressed data, in pieces of bounded size; it may end anywhere in a frame."""
        for start in range(0, len(data), self._input_size):
            compressed = data[start : start + self._input_size]
            while compressed:
                if self.frame is None:
                    compressed = compressed.lstrip(b"\0")  # padding between two frames
                    if not compressed:
                        break
                    self.frame = FRAMES[self._kind]()
                yield from self._pieces(compressed)
                if not self.frame.eof:
                    break  # the frame has taken all of them, and goes on in the next ones
                compressed = self.frame.unused_data  # of the next frame
                self.frame = None

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Text of more data of this frame, at most `BLOCK` bytes at a time, or as much as `ZSTD_INPUT` bytes hold."""
        frame = self.frame
        if self._kind == "zstd":
            yield frame.decompress(data)
            return
        yield frame.decompress(data, BLOCK)
        if self._kind == "gzip":
            while frame.unconsumed_tail:
                yield frame.decompress(frame.unconsumed_tail, BLOCK)
        else:
            while not (frame.eof or frame.needs_input):
                yield frame.decompress(b"", BLOCK)
