"""Token cache: the token ids of a text on disk, built once and memory-mapped, and the removal of old files.

A token file has a checksum of all that follows and of its name, one little-endian record per token (its id as uint16 or
uint32, and its size in bytes as uint16 if it does not follow from the id), and, if documents are separated, the first
token of each as uint64. The name is a hash of text, documents and tokenizer. Files are written under a temporary name
and renamed when complete; one that does not match its checksum is written anew. Each use sets the time of the last
change of a file; those that were used least recently are removed, which does not disturb a process that has mapped one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from array import array
from bisect import bisect_left
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, DataError, ResourceError
from xlcli.events import Progress, ProgressMeter
from xlcli.files import CHECKSUM, TEMPORARY, TEMPORARY_NAME, cache_folder, checksum, open_regular, temporary_path
from xlcli.text.base import Tokenizer
from xlcli.text.corpus import Part
from xlcli.text.pretokenize import whole_words

MAX_BYTES = 10 * 10**9  # maximum total size of the token files; less if a tenth of the disk that they could use is less

_FORMAT = "xltoken6"  # part of the hash that names a token file; to be changed with its content
_START = np.dtype("<u8")  # the first token of a document in the file
_FILE = re.compile(rf"[0-9a-f]{{40}}\.tokens|{TEMPORARY_NAME.pattern}(\.tokens)?")
"""Names of token files, of unfinished ones, and of folders by `process_folder`."""
_ABANDONED_SECONDS = 86400
"""Time without a write after which an unfinished file or a folder is that of a process that was killed."""


def prune(folder: Path) -> None:
    """Removes what killed processes left unfinished, then the least recently used files beyond the limit but one."""
    finished = []
    total_bytes = 0
    for path in folder.iterdir():
        if not _FILE.fullmatch(path.name):
            continue
        with suppress(OSError):  # removed meanwhile
            status = path.lstat()
            if not path.name.startswith(TEMPORARY):
                finished.append((status.st_mtime, status.st_size, path))
                total_bytes += status.st_size
                continue
            is_abandoned = time.time() - status.st_mtime > _ABANDONED_SECONDS
            if is_abandoned and path.is_dir():
                shutil.rmtree(path)
            elif is_abandoned:
                path.unlink()
    usable_bytes = shutil.disk_usage(folder).free + total_bytes
    limit = min(MAX_BYTES, usable_bytes // 10)
    for _, size, path in sorted(finished)[:-1]:  # from the least recently used one
        if total_bytes > limit:
            with suppress(OSError):
                path.unlink()
                total_bytes -= size


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens of a text."""

    ids: NDArray[Any]  # token ids, uint16 or uint32, one axis, read only; may be a memory map
    n_bytes: int  # length of the text
    # Bytes of text of each id in the vocabulary, unless `text_sizes` is given.
    id_sizes: NDArray[np.int32] | None = None
    text_sizes: NDArray[np.integer] | None = None  # bytes of text of each token
    # First token of each document, ascending from 0; None if the text is one document.
    documents: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def sizes(self, index: Any) -> NDArray[Any]:
        """Bytes of text of the tokens at `index`, any index of a one-dimensional array."""
        if self.text_sizes is not None:
            return np.asarray(self.text_sizes[index])
        assert self.id_sizes is not None
        return np.asarray(self.id_sizes[self.ids[index]])


def token_file(part: Part, tokenizer: Tokenizer, *, by_document: bool = False) -> Generator[Progress, None, TokenFile]:
    """Tokens of `part`, from the cache or tokenized now, of separate documents if wanted. Yields progress.

    `DataError` if the text cannot be read, or has changed; `ResourceError` if the cache folder is full or read-only.
    """
    folder = cache_folder()
    documents = part.documents if by_document else ()
    text = part.fingerprint(by_document=by_document)
    name = hashlib.sha256(f"{_FORMAT}:{text}:{tokenizer.fingerprint}".encode()).hexdigest()[:40]
    path = folder / f"{name}.tokens"
    cached = _open(path, path.name, part.n_bytes, tokenizer, len(documents))
    if cached is not None:
        return cached
    temporary = temporary_path(folder).with_suffix(".tokens")
    try:
        with temporary.open("xb") as file:
            yield from _build(part, tokenizer, file, documents, path.name)
        built = _open(temporary, path.name, part.n_bytes, tokenizer, len(documents))
        with suppress(OSError):  # it has no name then, and its tokens are read as long as this process needs them
            temporary.replace(path)
        prune(folder)
    except OSError as error:
        problem = f"cannot write the token file in {folder}: {error.strerror}."
        remedy = "Free some space there, or set XLCLI_CACHE to a folder on a larger disk."
        raise ResourceError(problem, remedy) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if built is None:
        raise ResourceError(f"the token file {path} was not written correctly.", "Check the disk.")
    return built


def sample_tokens(part: Part, tokenizer: Tokenizer, limit: int) -> TokenFile:
    """Tokens of a sample of at most `limit` bytes of `part`, in memory."""
    text = b"".join(part.sample(limit))
    ids, sizes = tokenizer.tokens(text)
    return TokenFile(ids, len(text), text_sizes=sizes)


def _record(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Type of one token in the file."""
    ids = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    return np.dtype([("id", ids)] if tokenizer.id_sizes is not None else [("id", ids), ("size", "<u2")])


def _build(
    part: Part, tokenizer: Tokenizer, file: BinaryIO, documents: Sequence[int], name: str
) -> Generator[Progress, None, None]:
    """Writes the token file of this name; `documents` are the offsets at which separated documents begin."""
    record = _record(tokenizer)
    first_tokens = array("Q")  # of each document
    meter = ProgressMeter("tokenizing", part.n_bytes, "B")
    n_bytes = 0
    n_tokens = 0
    digest = checksum(name)

    def write(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    file.write(bytes(CHECKSUM))  # overwritten at the end
    for text in whole_words(part.read(), documents=documents, splitter=tokenizer.splitter):
        ids, sizes = tokenizer.tokens(text, n_bytes)
        tokens = np.empty(len(ids), record)
        tokens["id"] = ids
        if tokenizer.id_sizes is None:
            tokens["size"] = sizes
        write(tokens.tobytes())
        begun = documents[bisect_left(documents, n_bytes) : bisect_left(documents, n_bytes + len(text))]
        if begun:
            token_ends = n_bytes + np.cumsum(sizes)
            n_before = np.searchsorted(token_ends, np.array(begun, np.int64), side="right")
            first_tokens.extend((n_tokens + n_before).tolist())
        n_bytes += len(text)
        n_tokens += len(ids)
        yield from meter.report(n_bytes)
    has_no_token = n_bytes > 0 and n_tokens == 0
    # A document without a token begins where the next one or the end does.
    has_empty_document = len({*first_tokens, n_tokens}) < len(first_tokens) + 1
    if has_no_token or has_empty_document:
        raise DataError(f"{part.corpus.name} has an empty line or document.", "Leave it out.")
    write(np.array(first_tokens, _START).tobytes())
    file.seek(0)
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def _open(path: Path, name: str, n_bytes: int, tokenizer: Tokenizer, n_documents: int) -> TokenFile | None:
    """The token file of this name; None if it is missing or its checksum, for which it is read, does not match."""
    record = _record(tokenizer)
    try:
        with open_regular(path) as (file, status):
            written_checksum = file.read(CHECKSUM)
            present_checksum = hashlib.file_digest(file, lambda: checksum(name)).digest()  # of all that follows
            if written_checksum != present_checksum:
                return None
            os.utime(file.fileno())  # it is used now, so `prune` removes others first
            documents_bytes = _START.itemsize * n_documents
            n_tokens = (status.st_size - CHECKSUM - documents_bytes) // record.itemsize
            tokens: NDArray[Any] = np.empty(0, record)
            if n_tokens:
                tokens = np.memmap(file, record, mode="r", offset=CHECKSUM, shape=(n_tokens,))
            documents = None
            if n_documents:
                file.seek(-documents_bytes, os.SEEK_END)
                documents = np.fromfile(file, _START).astype(np.int64)
    except (OSError, CheckpointError):
        return None
    text_sizes = None if tokenizer.id_sizes is not None else tokens["size"]
    return TokenFile(tokens["id"], n_bytes, tokenizer.id_sizes, text_sizes, documents)
