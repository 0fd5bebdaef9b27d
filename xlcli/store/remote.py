"""Models sent to and fetched from remote locations: folders and URLs of fsspec, such as S3, SSH, the Hugging Face hub.

A fetched model is untrusted: only files with the names of `FILES` are read, their sizes are known and bounded before
the first byte, and the model is verified as by `load` before it appears under its name. fsspec is imported here only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from xlcli.errors import CheckpointError, ConfigError, ResourceError, XLError
from xlcli.files import cannot_write, make_folder, read_header, write_atomic
from xlcli.files.plain import JSON_LIMIT
from xlcli.files.tensors import HEADER_LIMIT
from xlcli.store.copy import copy_model, new_folder, require_free
from xlcli.store.folder import load
from xlcli.store.layout import CONFIG, DOCUMENTS, HELD_OUT, TOKENIZER, WEIGHTS
from xlcli.store.records import RECORD

TEXT_FILES = (*HELD_OUT.values(), *DOCUMENTS.values())
"""Files of held-out text, which are sent only on request."""
FILES = (CONFIG, *TOKENIZER, *TEXT_FILES, RECORD, WEIGHTS)
"""Files of a model at a remote location, in the order of their transfer: without weights it is no model."""
VOCABULARY_LIMIT = 2**26
"""Maximum size of a vocabulary in bytes."""

_BLOCK = 2**20
_USER = re.compile(r"(?<=://)[^/]*@")
"""User information in a URL, with its @."""


def push(folder: Path, url: str, *, with_text: bool = False, force: bool = False) -> list[str]:
    """Sends a model; returns the names of the files. On an error it removes the files that it has sent.

    Args:
        folder: Model folder.
        url: Folder, or URL of fsspec, for the files.
        with_text: Send validation and test text, too.
        force: Replace the files of an unfinished push.

    Raises:
        CheckpointError: The model is damaged.
        ConfigError: The location has files of these names, fsspec cannot reach it, or a package is not installed.
        ResourceError: Network, permissions or quota prevent the transfer.
    """
    location = _Location(url)
    with TemporaryDirectory(prefix="xlcli-push-") as temporary:
        present = [name for name in FILES if location.info(name)]
        if present:
            _require_unfinished(location, present, Path(temporary))
            if not force:
                raise ConfigError(
                    f"there is an unfinished push at {location} ({', '.join(present)}).",
                    "Add --force to replace it, or choose another location.",
                )
        copy = Path(temporary) / "model"
        copy_model(folder, copy)  # consistent, even if the model is being trained
        for name in reversed(present):  # CONFIG last, because it identifies an unfinished push
            location.remove(name)
        location.make_folder()
        sent: list[str] = []
        try:
            for name in FILES:
                if (copy / name).is_file() and (with_text or name not in TEXT_FILES):
                    sent.append(name)
                    location.put(copy / name)
        except BaseException:
            for name in reversed(sent):
                with suppress(XLError):
                    location.remove(name)
            raise
    return sent


def pull(url: str, target: Path) -> None:
    """Fetches a model into `target`, which appears when it is complete and verified.

    Args:
        url: Folder, or URL of fsspec, with the files.
        target: New model folder; must not exist.

    Raises:
        CheckpointError: There is no model, or it is damaged.
        ConfigError: `target` exists, fsspec cannot reach the location, or a package is not installed.
        ResourceError: The disk is too small, or network or permissions prevent the transfer.
    """
    require_free(target)
    location = _Location(url)
    sizes = _sizes(location)
    try:
        make_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from error
    free = shutil.disk_usage(target.parent).free
    if sum(sizes.values()) > free:
        raise ResourceError(
            f"the model at {location} has {sum(sizes.values()):,} bytes, the disk of {target.parent} {free:,}.",
            "Free some space, or choose a folder on another disk.",
        )
    with new_folder(target) as temporary:
        for name, size in sizes.items():
            write_atomic(temporary / name, location.blocks(name, size))
        model = load(temporary)
        model.held_out_documents("valid")  # verifies the text, too
        model.held_out_documents("test")


def without_user(url: str) -> str:
    """The URL without user name and password, for messages."""
    return _USER.sub("", url)


def _require_unfinished(location: _Location, present: list[str], temporary: Path) -> None:
    """`ConfigError` unless the files present are those of an unfinished push."""
    if WEIGHTS in present and _has_whole_weights(location, temporary):
        raise ConfigError(f"there is a model at {location}.", "Choose another location, or remove the model first.")
    if _size(location.info(CONFIG)) is None or not _is_config(location.read(CONFIG, JSON_LIMIT)):
        raise ConfigError(
            f"there is a {present[0]} at {location}, which is no part of an unfinished push.",
            "Choose another location, or remove the file first.",
        )


def _is_config(content: bytes) -> bool:
    """Whether this is a `config.json` of xlcli, or one that was cut before its first byte."""
    if not content:
        return True
    with suppress(ValueError, RecursionError):
        tree = json.loads(content)
        return isinstance(tree, dict) and {"schema", "sha256"} <= tree.keys()
    return False


def _has_whole_weights(location: _Location, temporary: Path) -> bool:
    """Whether the weights have the size that their header describes. File systems without atomic writes keep a part."""
    size = _size(location.info(WEIGHTS))
    if size is None:
        return True
    sample = temporary / "header"
    sample.write_bytes(location.read(WEIGHTS, min(size, 8 + HEADER_LIMIT)))
    os.truncate(sample, size)
    try:
        read_header(sample)
    except CheckpointError:
        return False
    return True


def _sizes(location: _Location) -> dict[str, int]:
    """Name and size of the files of a model, which are bounded."""
    limits = {CONFIG: JSON_LIMIT, RECORD: JSON_LIMIT, **dict.fromkeys(TOKENIZER, VOCABULARY_LIMIT)}
    sizes = {}
    for name in FILES:
        info = location.info(name)
        if info is None:
            if name in (CONFIG, WEIGHTS):
                raise CheckpointError(f"there is no model at {location}: it has no {name}.", "Check the URL.")
            continue
        size = _size(info)
        if size is None:
            raise CheckpointError(f"{name} at {location} is not a file of known size.", "Choose another model.")
        if size > limits.get(name, size):
            raise CheckpointError(
                f"{name} at {location} is larger than the {limits[name]:,} bytes allowed.", "Choose another model."
            )
        sizes[name] = size
    return sizes


def _size(info: dict[str, Any] | None) -> int | None:
    """Size of a remote file in bytes; None unless it is a file of known size."""
    if info is None or info.get("type") != "file" or info.get("islink"):
        return None
    size = info.get("size")
    return size if type(size) is int and size >= 0 else None


class _Location:
    """Folder or URL of a model. Errors of its file system become a `ResourceError`; str() has no user information."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                "remote locations are reached with fsspec, which is not installed.",
                "Type pip install 'xlcli[remote]'.",
            ) from error
        try:
            self._files, root = url_to_fs(url)
        except (ValueError, TypeError) as error:
            message = f"fsspec cannot reach {self}: {self._reason(error)}."
            raise ConfigError(message, "Give a folder or another URL.") from error
        except Exception as error:
            raise self._failure(error) from error
        self._root = str(root).rstrip("/")

    def __str__(self) -> str:
        return without_user(self._url)

    def info(self, name: str) -> dict[str, Any] | None:
        """Type and size of a file as fsspec describes it; None if there is none."""
        with self._calls(), suppress(FileNotFoundError, NotADirectoryError):
            return dict(self._files.info(f"{self._root}/{name}"))
        return None

    def read(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file."""
        with self._calls(), self._files.open(f"{self._root}/{name}", "rb") as file:
            return bytes(file.read(limit))

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """Content of a file; `CheckpointError` unless it has `size` bytes."""
        left = size
        with self._calls(), self._files.open(f"{self._root}/{name}", "rb") as file:
            while block := file.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    break
                yield block
        if left:
            raise CheckpointError(f"{name} at {self} changed while it was read.", "Run the command again.")

    def make_folder(self) -> None:
        """Makes the folder, unless the file system has none."""
        with self._calls(), suppress(NotImplementedError, FileExistsError):
            self._files.makedirs(self._root, exist_ok=True)

    def put(self, path: Path) -> None:
        """Sends a local file under its name."""
        with self._calls():
            self._files.put_file(str(path), f"{self._root}/{path.name}")

    def remove(self, name: str) -> None:
        """Removes a file."""
        with self._calls():
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _calls(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> XLError:
        if isinstance(error, ImportError):
            message = f"{self} needs a package that is not installed: {self._reason(error)}."
            return ConfigError(message, "Install that package with pip.")
        return ResourceError(
            f"{self} cannot be used: {self._reason(error)}.",
            "Check the URL, the connection and your access, then run the command again.",
        )

    def _reason(self, error: Exception) -> str:
        """First line of the message of an error, without user name and password of the URL."""
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        for user in _USER.findall(self._url):
            password = user[:-1].partition(":")[2]
            reason = reason.replace(user, "")
            for secret in filter(None, (password, unquote(password))):
                reason = reason.replace(secret, "***")
        return reason
