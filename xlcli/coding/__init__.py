"""Compression of text by arithmetic coding with the predictions of a model: the file, header, frames and end.

docs/developers/format.md specifies the file; `workflow` writes and reads it. Its size is the surprisal of the text,
as `eval` reports it, and about 0.1 % more for the frames. Imports no torch.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from xlcli.config import BaseConfig, OnlineConfig
from xlcli.errors import DataError
from xlcli.events import Coded, Notice, Progress

MAGIC = b"xlcli.c2"
"""First bytes of every file; the last digit is the version of the format."""
FRAME_TOKENS = 2**14
"""Maximum number of tokens of a frame."""
WORD_TOKENS = 2**8
"""Maximum number of tokens per word of a frame, so that the size of a file limits the time that it takes."""
HEADER_LIMIT = 2**16
"""Maximum size of the header in bytes, deflated and not."""
HEADER_DICTIONARY = (
    b'float16bfloat16cuda.dev0"settings":{"mem_len":"adapt":true,"context_cache":100000},no numba AVX2'
    b'{"model":"books","fingerprint":"","settings":{},"threads":1,"device":"cpu","dtype":"float32",'
    b'"software":"xlcli 0.1.0, torch 2.13.0+cpu, numba 0.68.1, x86_64 AVX512","check":"'
)
"""Text that a header repeats, to make it shorter: a part of the format that never changes."""

_SIZES = struct.Struct("<II")
_FRAME = struct.Struct("<III")
_END = struct.Struct("<IQ32s")
_REMEDY = "Compress the text again, or restore the file from a copy."


Output = bytes | Notice | Progress | Coded
"""What compression and decompression yield: bytes of the result, and events."""


class Header(BaseConfig):
    """What a decoder needs to compute the same predictions.

    Attributes:
        fingerprint: First 16 hexadecimal digits of the SHA-256 of the model's fingerprints.
        settings: Inference settings, of which the file holds those that differ from the defaults.
        software: Versions and processor, for messages.
        check: Hash of the predictions for a fixed text, 16 hexadecimal digits.
        crlf: Every line end of the text is CR LF, and was coded as LF.
    """

    model: str = Field(min_length=1, max_length=255)
    fingerprint: str
    settings: OnlineConfig
    threads: int = Field(ge=1, le=1024)
    device: str = Field(pattern="^(cpu|cuda)$")
    dtype: str = Field(pattern="^(float32|bfloat16|float16)$")
    software: str
    check: str
    crlf: bool = False

    @field_validator("model")
    @classmethod
    def _is_a_name(cls, model: str) -> str:
        """Refuses a path, which could name a model that came with the file."""
        if model == ".." or Path(model).name != model:
            raise ValueError("not a name")
        return model

    def restored(self, coded: bytes) -> bytes:
        """The text that these bytes stand for."""
        return coded.replace(b"\n", b"\r\n") if self.crlf else coded

    def encode(self) -> bytes:
        """Magic, size and deflated JSON."""
        deflate = zlib.compressobj(9, zdict=HEADER_DICTIONARY)
        tree = self.model_dump(mode="json", exclude_defaults=True)
        body = deflate.compress(json.dumps(tree, separators=(",", ":")).encode()) + deflate.flush()
        return MAGIC + struct.pack("<I", len(body)) + body


@dataclass(frozen=True)
class Frame:
    """Coded tokens: their number, and the words (bytes, a multiple of 4) of the range coder.

    Its decoder ignores words after those that it needs.
    """

    n_tokens: int
    words: bytes

    def encode(self) -> bytes:
        """Numbers of tokens and words, checksum, words, with zeros behind them if they are too few."""
        words = self.words.ljust(4 * -(-self.n_tokens // WORD_TOKENS), b"\0")
        sizes = _SIZES.pack(self.n_tokens, len(words) // 4)
        return sizes + struct.pack("<I", zlib.crc32(sizes + words)) + words


@dataclass(frozen=True)
class End:
    """Size in bytes and SHA-256 of the text."""

    n_bytes: int
    digest: bytes

    def encode(self) -> bytes:
        """The end of the file."""
        return _END.pack(0, self.n_bytes, self.digest)


class FileReader:
    """Reads a compressed text from portions of bytes, divided anywhere; None is skipped.

    Attributes:
        n_read: Number of bytes read.
    """

    def __init__(self, portions: Iterable[bytes | None], name: str) -> None:
        self.name = name
        self.n_read = 0
        self._portions = iter(portions)
        self._buffer = bytearray()

    def header(self) -> Header:
        """The header, read first.

        Raises:
            DataError: The file is not a compressed text, or the header is damaged.
        """
        start = self._take(len(MAGIC), exact=False)
        if start[:-1] != MAGIC[:-1]:
            raise DataError(f"{self.name} was not compressed by xlcli.", "Give a file that xlcli compress wrote.")
        if start != MAGIC:
            raise DataError(f"{self.name} has another format than {MAGIC.decode()}.", "Use the xlcli that wrote it.")
        (size,) = struct.unpack("<I", self._take(4))
        if size > HEADER_LIMIT:
            raise self._damaged("its header is too long")
        inflate = zlib.decompressobj(zdict=HEADER_DICTIONARY)
        try:
            header = Header.model_validate_json(inflate.decompress(self._take(size), HEADER_LIMIT))
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise self._damaged(f"its header has no valid {place}" if place else "its header is not readable") from None
        except zlib.error:
            raise self._damaged("its header is not readable") from None
        if not inflate.eof or inflate.unused_data:
            raise self._damaged("its header has a wrong size")
        return header

    def frames(self) -> Iterator[Frame | End]:
        """All frames, and the end last.

        Raises:
            DataError: The file is cut off, damaged, or continues after its end.
        """
        while True:
            start = self._take(_FRAME.size)
            n_tokens, n_words, checksum = _FRAME.unpack(start)
            if n_tokens == 0:
                _, n_bytes, digest = _END.unpack(start + self._take(_END.size - _FRAME.size))
                if self._take(1, exact=False):
                    raise self._damaged("it continues after its end")
                yield End(n_bytes, digest)
                return
            if n_tokens > min(FRAME_TOKENS, n_words * WORD_TOKENS) or n_words > n_tokens + 4:
                raise self._damaged("a frame has a wrong size")
            words = self._take(4 * n_words)
            if zlib.crc32(start[: _SIZES.size] + words) != checksum:
                raise self._damaged("the checksum of a frame is wrong")
            yield Frame(n_tokens, words)

    def _take(self, n: int, *, exact: bool = True) -> bytes:
        """The next `n` bytes; without `exact` fewer at the end of the file."""
        while len(self._buffer) < n:
            try:
                self._buffer += next(self._portions) or b""
            except StopIteration:
                if exact:
                    raise self._damaged("it ends early") from None
                break
        taken = bytes(self._buffer[:n])
        del self._buffer[:n]
        self.n_read += len(taken)
        return taken

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{self.name} is damaged: {reason}.", _REMEDY)
