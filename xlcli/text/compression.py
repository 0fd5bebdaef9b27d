"""Decompression of gzip, bzip2, xz and zstd data as it arrives, in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator

import zstandard

BLOCK = 2**20
"""Maximum number of bytes that one call of a decompressor returns."""
ZSTD_INPUT = 2**8
"""Bytes of zstd data decompressed at a time; each can stand for up to 2^15 bytes of text."""
LZMA_MEMORY, ZSTD_WINDOW = 2**27, 2**27
"""Maximum bytes of memory of a decompressor: those that the formats' own tools need at their highest levels."""
FAULTS = (zlib.error, OSError, lzma.LZMAError, zstandard.ZstdError)
"""Errors of damaged data."""


class _Frame:
    """One frame of compressed data. After its end, `unused` are the bytes behind it."""

    def __init__(self) -> None:
        self.ended = False
        self.unused = b""

    def text(self, data: bytes) -> Iterator[bytes]:
        """Text of more data."""
        raise NotImplementedError


class _Gzip(_Frame):
    def __init__(self) -> None:
        super().__init__()
        self._inner = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def text(self, data: bytes) -> Iterator[bytes]:
        while data:
            yield self._inner.decompress(data, BLOCK)
            data = self._inner.unconsumed_tail
        self.ended, self.unused = self._inner.eof, self._inner.unused_data


class _Bzip2(_Frame):
    def __init__(self) -> None:
        super().__init__()
        self._inner: bz2.BZ2Decompressor | lzma.LZMADecompressor = self._make()

    @staticmethod
    def _make() -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
        return bz2.BZ2Decompressor()

    def text(self, data: bytes) -> Iterator[bytes]:
        yield self._inner.decompress(data, BLOCK)
        while not (self._inner.eof or self._inner.needs_input):
            yield self._inner.decompress(b"", BLOCK)
        self.ended, self.unused = self._inner.eof, self._inner.unused_data


class _Xz(_Bzip2):
    @staticmethod
    def _make() -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=LZMA_MEMORY)


class _Zstd(_Frame):
    def __init__(self) -> None:
        super().__init__()
        self._inner = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()

    def text(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), ZSTD_INPUT):
            end = start + ZSTD_INPUT
            yield self._inner.decompress(data[start:end])
            if self._inner.eof:
                self.ended, self.unused = True, self._inner.unused_data + data[end:]
                return


FRAMES: dict[str, type[_Frame]] = {"gzip": _Gzip, "bzip2": _Bzip2, "xz": _Xz, "zstd": _Zstd}
"""Decompressor of each format."""


def decompressed(data: Iterator[bytes | None], kind: str) -> Iterator[bytes | None]:
    """Data in one or more frames of a format, a key of `FRAMES`; zero bytes between them are padding.

    Portions have at most 2^23 bytes. None in place of a portion is passed on.

    Raises:
        EOFError: The last frame is incomplete.
        FAULTS: The data is damaged.
    """
    frame: _Frame | None = None
    for portion in data:
        if portion is None:
            yield None
            continue
        rest = portion.lstrip(b"\0") if frame is None else portion
        while rest:
            frame = FRAMES[kind]() if frame is None else frame
            yield from filter(None, frame.text(rest))
            rest = frame.unused.lstrip(b"\0")
            if frame.ended:
                frame = None
    if frame is not None:
        raise EOFError
