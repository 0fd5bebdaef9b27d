"""Token cache: the token ids of a text on disk, built once and memory-mapped.

A token file has a header (`xlcli.text.cache`), one little-endian record per token (its id as uint16 or uint32, and its
size in bytes as uint16 if it does not follow from the id), and, if documents are separated, the first token of each as
uint64. The name is a hash of text, documents and tokenizer. Files are written under a temporary name and renamed when
complete. A process that maps a file holds a lock on it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import ResourceError
from xlcli.events import Progress, ProgressMeter
from xlcli.files import cache_folder
from xlcli.text import cache
from xlcli.text.cache import HEADER, TokenHeader
from xlcli.text.heldout import Part
from xlcli.text.pretokenize import whole_words
from xlcli.text.tokenizers.base import Tokenizer

_FORMAT = "xltoken4"
"""Part of the name of a file; to be changed with its content."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens of a text.

    Attributes:
        ids: Token ids, uint16 or uint32, one axis, read only; may be a memory map.
        n_bytes: Length of the text.
        id_sizes: Bytes of text of each id in the vocabulary; None if `text_sizes` is given.
        text_sizes: Bytes of text of each token, where they do not follow from the id.
        path: The file; None for tokens in memory.
        documents: First token of each document, ascending from 0; None if the text is one document.
    """

    ids: NDArray[Any]
    n_bytes: int
    id_sizes: NDArray[np.int32] | None = None
    text_sizes: NDArray[np.uint16] | None = None
    path: Path | None = None
    documents: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> TokenFile:
        """The first `n` tokens."""
        return replace(
            self,
            ids=self.ids[:n],
            n_bytes=int(self.sizes(slice(n)).sum()),
            text_sizes=None if self.text_sizes is None else self.text_sizes[:n],
            documents=None if self.documents is None else self.documents[self.documents < n],
        )

    def sizes(self, index: Any) -> NDArray[Any]:
        """Bytes of text of the tokens at `index`, any index of a one-dimensional array."""
        if self.text_sizes is not None:
            return np.asarray(self.text_sizes[index])
        assert self.id_sizes is not None
        return np.asarray(self.id_sizes[self.ids[index]])


def token_file(part: Part, tokenizer: Tokenizer, *, by_document: bool = False) -> Generator[Progress, None, TokenFile]:
    """Tokens of `part`, from the cache or tokenized now. Yields progress, returns the tokens.

    Args:
        part: The text.
        tokenizer: Its tokenizer.
        by_document: Separate the documents: no token is in two of them.

    Raises:
        DataError: The text cannot be read, or has changed since it was opened.
        ResourceError: The cache folder is full or cannot be written.
    """
    folder = cache_folder()
    documents = part.documents if by_document else ()
    text = part.fingerprint(by_document=by_document)
    name = sha256(f"{_FORMAT}:{text}:{tokenizer.fingerprint}".encode()).hexdigest()[:40]
    path = folder / f"{name}.tokens"
    if (known := _open(path, part.n_bytes, tokenizer, len(documents))) is not None:
        return known
    temporary = cache.unfinished_path(folder)
    try:
        with temporary.open("xb") as file:
            cache.hold(file)
            yield from _build(part, tokenizer, file, documents)
            temporary.replace(path)
            built = _open(path, part.n_bytes, tokenizer, len(documents))
        cache.prune(folder)
    except OSError as error:
        raise ResourceError(
            f"cannot write the token file in {folder}: {error.strerror}.",
            "Free some space there, or set XLCLI_CACHE to a folder on a larger disk.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if built is None:
        raise ResourceError(f"the token file {path} was not written correctly.", "Check the disk.")
    return built


def sample_tokens(part: Part, tokenizer: Tokenizer, limit: int) -> TokenFile:
    """Tokens of a sample of at most `limit` bytes of `part`, in memory."""
    text = b"".join(part.sample(limit))
    ids = np.asarray(tokenizer.encode(text))
    text_sizes = None if tokenizer.id_sizes is not None else tokenizer.sizes(ids, text).astype(np.uint16)
    return TokenFile(ids, len(text), tokenizer.id_sizes, text_sizes)


def _record(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Type of one token in the file."""
    ids = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    return np.dtype([("id", ids)] if tokenizer.id_sizes is not None else [("id", ids), ("size", "<u2")])


def _build(
    part: Part, tokenizer: Tokenizer, file: BinaryIO, documents: Sequence[int]
) -> Generator[Progress, None, None]:
    record = _record(tokenizer)
    first_tokens = array("Q")
    meter = ProgressMeter("tokenizing", part.n_bytes, "B")
    n_bytes = n_tokens = crc = 0
    cache.begin(file)
    for text in whole_words(part.read(), documents=documents):
        ids = tokenizer.encode(text)
        tokens = np.empty(len(ids), record)
        tokens["id"] = ids
        sizes = tokenizer.sizes(ids, text)
        if tokenizer.id_sizes is None:
            tokens["size"] = sizes
        if begun := documents[bisect_left(documents, n_bytes) : bisect_left(documents, n_bytes + len(text))]:
            places = np.searchsorted(np.cumsum(sizes), np.array(begun, np.int64) - n_bytes, side="right")
            first_tokens.extend((n_tokens + places).tolist())
        data = tokens.tobytes()
        file.write(data)
        crc = zlib.crc32(data, crc)
        n_bytes += len(text)
        n_tokens += len(ids)
        yield from meter.report(n_bytes)
    data = np.array(first_tokens, "<u8").tobytes()
    file.write(data)
    crc = zlib.crc32(data, crc)
    file.seek(0)
    file.write(cache.pack_header(TokenHeader(record.itemsize, n_tokens, n_bytes, crc, len(first_tokens))))
    file.flush()
    os.fsync(file.fileno())


def _open(path: Path, n_bytes: int, tokenizer: Tokenizer, n_documents: int) -> TokenFile | None:
    """The token file; None if it is missing, damaged or being removed."""
    record = _record(tokenizer)
    try:
        with path.open("rb") as file:
            header = cache.read_header(file) if cache.hold(file) else None
            expected = (record.itemsize, n_bytes, n_documents)
            if header is None or (header.item_size, header.n_bytes, header.n_documents) != expected:
                return None
            found = 0
            while block := file.read(2**20):
                found = zlib.crc32(block, found)
            if found != header.crc:
                return None
            os.utime(path)
            file.seek(HEADER + header.n_tokens * header.item_size)
            documents = np.fromfile(file, "<u8").astype(np.int64) if n_documents else None
            shape = (header.n_tokens,)
            # The map is made from the open file, since its copy of the descriptor keeps the lock of `hold`.
            tokens: NDArray[Any] = (
                np.memmap(file, record, mode="r", offset=HEADER, shape=shape)
                if header.n_tokens
                else np.empty(shape, record)
            )
    except OSError:
        return None
    text_sizes = tokens["size"] if tokenizer.id_sizes is None else None
    return TokenFile(tokens["id"], n_bytes, tokenizer.id_sizes, text_sizes, path, documents)
