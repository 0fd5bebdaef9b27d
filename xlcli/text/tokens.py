"""Token ids of a text on disk: built once, kept in the cache folder, mapped into memory.

A token file is a header of `HEADER` bytes (magic, item size, tokens, bytes of text, CRC-32 of the ids) and the ids as
little-endian uint16 or uint32. It is written under a temporary name and renamed when complete, so a file under its
final name is whole. The name is a hash over text, range and vocabulary.
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

from xlcli.errors import ResourceError
from xlcli.events import Progress
from xlcli.text.cache import cache_folder
from xlcli.text.corpus import ProgressMeter
from xlcli.text.heldout import Part
from xlcli.text.pretokenize import whole_words
from xlcli.text.tokenizers.base import Tokenizer

HEADER = 64
_MAGIC = b"xltoken1"
_LAYOUT = struct.Struct("<8sIQQI")
_UNUSED_DAYS = 30
_STALE_TEMPORARY_DAYS = 1


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Ids of one text.

    `ids` is a read-only memory map, uint16 or uint32, one axis; `n_bytes` is the length of the text.
    """

    ids: np.memmap[Any, np.dtype[Any]] | np.ndarray[Any, np.dtype[Any]]
    n_bytes: int
    path: Path

    def __len__(self) -> int:
        return len(self.ids)


def token_file(part: Part, tokenizer: Tokenizer, *, folder: Path | None = None) -> Generator[Progress, None, TokenFile]:
    """The token ids of `part`, from the cache or built now, reporting progress; the generator returns them.

    Args:
        part: the text.
        tokenizer: its vocabulary.
        folder: where to keep the file; default: the cache folder.

    Raises:
        DataError: the text cannot be read, or is not what it was when opened.
        ResourceError: no room in the cache folder.
    """
    folder = folder or cache_folder()
    name = sha256(f"{_MAGIC.decode()}:{part.key}:{tokenizer.fingerprint}".encode()).hexdigest()[:40]
    path = folder / f"{name}.tokens"
    if (known := _open(path, part.n_bytes, tokenizer.vocab_size)) is not None:
        return known
    _sweep(folder)
    temporary = folder / f".tmp-{os.getpid()}-{time.monotonic_ns()}-{path.name}"
    try:
        yield from _build(part, tokenizer, temporary)
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(
            f"cannot write the token file in {folder}: {error.strerror}.",
            "Make room there, or set XLCLI_CACHE to a folder on a larger disk.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    built = _open(path, part.n_bytes, tokenizer.vocab_size)
    if built is None:
        raise ResourceError(f"the token file {path} does not read back as written.", "Check the disk.")
    return built


def _build(part: Part, tokenizer: Tokenizer, path: Path) -> Generator[Progress, None, None]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    clock = ProgressMeter("tokenizing", part.n_bytes)
    n_bytes = n_tokens = crc = 0
    with path.open("wb") as file:
        file.write(bytes(HEADER))
        for text in whole_words(part.read()):
            data = tokenizer.encode(text).astype(dtype).tobytes()
            file.write(data)
            crc = zlib.crc32(data, crc)
            n_bytes += len(text)
            n_tokens += len(data) // dtype.itemsize
            yield from clock.report(n_bytes)
        file.seek(0)
        file.write(_LAYOUT.pack(_MAGIC, dtype.itemsize, n_tokens, n_bytes, crc).ljust(HEADER, b"\0"))
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, n_bytes: int, vocab_size: int) -> TokenFile | None:
    """The token file, or None when there is none or it is not whole."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER)
            if len(header) < HEADER:
                return None
            magic, width, n_tokens, told, crc = _LAYOUT.unpack_from(header)
            size = os.fstat(file.fileno()).st_size
            if magic != _MAGIC or width not in (2, 4) or told != n_bytes or size != HEADER + n_tokens * width:
                return None
            found = 0
            while block := file.read(2**20):
                found = zlib.crc32(block, found)
            if found != crc:
                return None
        os.utime(path)
    except OSError:
        return None
    dtype = np.dtype(f"<u{width}")
    if n_tokens == 0:
        return TokenFile(np.empty(0, dtype), n_bytes, path)
    ids = np.memmap(path, dtype, mode="r", offset=HEADER, shape=(n_tokens,))
    return TokenFile(ids, n_bytes, path)


def _sweep(folder: Path) -> None:
    """Remove token files unused for a month and what killed builders left."""
    for pattern, days in (("*.tokens", _UNUSED_DAYS), (".tmp-*.tokens", _STALE_TEMPORARY_DAYS)):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > days * 86400:
                    path.unlink()
