"""Token cache: the token ids of a text on disk, built once and memory-mapped.

A token file has a header of `HEADER` bytes (magic, item size, number of tokens, bytes of text, CRC-32 of the tokens)
and one little-endian record per token: its id as uint16 or uint32, and its size in bytes as uint16 if it does
not follow from the id. The name is a hash of text and tokenizer. Files are written under a temporary name and
renamed when complete.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import ResourceError
from xlcli.events import Progress, ProgressMeter
from xlcli.text.cache import cache_folder
from xlcli.text.heldout import Part
from xlcli.text.pretokenize import whole_words
from xlcli.text.tokenizers.base import Tokenizer

HEADER = 64
_MAGIC = b"xltoken2"
_LAYOUT = struct.Struct("<8sIQQI")
_UNUSED_DAYS = 30
_STALE_TEMPORARY_DAYS = 1


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens of a text.

    Attributes:
        ids: Token ids, uint16 or uint32, one axis, read only; may be a memory map.
        n_bytes: Length of the text.
        id_sizes: Bytes of text of each id in the vocabulary; None if `text_sizes` is given.
        text_sizes: Bytes of text of each token, where they do not follow from the id.
        path: The file; None for tokens in memory.
    """

    ids: NDArray[Any]
    n_bytes: int
    id_sizes: NDArray[np.int32] | None = None
    text_sizes: NDArray[np.uint16] | None = None
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def sizes(self, index: Any) -> NDArray[Any]:
        """Bytes of text of the tokens at `index`, any index of a one-dimensional array."""
        if self.text_sizes is not None:
            return np.asarray(self.text_sizes[index])
        assert self.id_sizes is not None
        return np.asarray(self.id_sizes[self.ids[index]])


def token_file(part: Part, tokenizer: Tokenizer, *, folder: Path | None = None) -> Generator[Progress, None, TokenFile]:
    """Tokens of `part`, from the cache or tokenized now. Yields progress, returns the tokens.

    Args:
        part: The text.
        tokenizer: Its tokenizer.
        folder: Folder of the file; None is the cache folder.

    Raises:
        DataError: The text cannot be read, or has changed since it was opened.
        ResourceError: The cache folder is full or cannot be written.
    """
    folder = folder or cache_folder()
    name = sha256(f"{_MAGIC.decode()}:{part.sha256}:{tokenizer.fingerprint}".encode()).hexdigest()[:40]
    path = folder / f"{name}.tokens"
    if (known := _open(path, part.n_bytes, tokenizer)) is not None:
        return known
    _sweep(folder)
    temporary = folder / f".tmp-{os.getpid()}-{time.monotonic_ns()}-{path.name}"
    try:
        yield from _build(part, tokenizer, temporary)
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(
            f"cannot write the token file in {folder}: {error.strerror}.",
            "Free some space there, or set XLCLI_CACHE to a folder on a larger disk.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    built = _open(path, part.n_bytes, tokenizer)
    if built is None:
        raise ResourceError(f"the token file {path} was not written correctly.", "Check the disk.")
    return built


def _record(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Type of one token in the file."""
    ids = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    return np.dtype([("id", ids)] if tokenizer.id_sizes is not None else [("id", ids), ("size", "<u2")])


def _build(part: Part, tokenizer: Tokenizer, path: Path) -> Generator[Progress, None, None]:
    record = _record(tokenizer)
    meter = ProgressMeter("tokenizing", part.n_bytes, "B")
    n_bytes = n_tokens = crc = 0
    with path.open("wb") as file:
        file.write(bytes(HEADER))
        for text in whole_words(part.read()):
            ids = tokenizer.encode(text)
            tokens = np.empty(len(ids), record)
            tokens["id"] = ids
            if tokenizer.id_sizes is None:
                tokens["size"] = tokenizer.sizes(ids, text)
            data = tokens.tobytes()
            file.write(data)
            crc = zlib.crc32(data, crc)
            n_bytes += len(text)
            n_tokens += len(ids)
            yield from meter.report(n_bytes)
        file.seek(0)
        file.write(_LAYOUT.pack(_MAGIC, record.itemsize, n_tokens, n_bytes, crc).ljust(HEADER, b"\0"))
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, n_bytes: int, tokenizer: Tokenizer) -> TokenFile | None:
    """The token file; None if it is missing or damaged."""
    record = _record(tokenizer)
    try:
        with path.open("rb") as file:
            header = file.read(HEADER)
            if len(header) < HEADER:
                return None
            magic, item_size, n_tokens, text_bytes, crc = _LAYOUT.unpack_from(header)
            size = os.fstat(file.fileno()).st_size
            if (magic, item_size, text_bytes, size) != (
                _MAGIC,
                record.itemsize,
                n_bytes,
                HEADER + n_tokens * item_size,
            ):
                return None
            found = 0
            while block := file.read(2**20):
                found = zlib.crc32(block, found)
            if found != crc:
                return None
        os.utime(path)
    except OSError:
        return None
    shape = (n_tokens,)
    tokens = np.memmap(path, record, mode="r", offset=HEADER, shape=shape) if n_tokens else np.empty(shape, record)
    text_sizes = tokens["size"] if tokenizer.id_sizes is None else None
    return TokenFile(tokens["id"], n_bytes, tokenizer.id_sizes, text_sizes, path)


def _sweep(folder: Path) -> None:
    """Removes token files unused for a month and temporary files of killed processes."""
    for pattern, days in (("*.tokens", _UNUSED_DAYS), (".tmp-*.tokens", _STALE_TEMPORARY_DAYS)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > days * 86400:
                    path.unlink()
