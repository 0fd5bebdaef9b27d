"""Models sent to and fetched from any place that fsspec reaches: folders, S3, SSH, the Hugging Face hub and others.

A fetched model is a stranger's: only files with the names of `FILES` are read, their sizes are known and bounded before
the first byte, and the model is verified as by `load` before it appears under its name. fsspec is imported here only.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xlcli.errors import CheckpointError, ConfigError, ResourceError, XLError
from xlcli.files import cannot_write, make_folder, write_atomic
from xlcli.files.plain import JSON_LIMIT
from xlcli.store.copy import copy_model, new_folder, require_free
from xlcli.store.folder import load
from xlcli.store.layout import CONFIG, HELD_OUT, TOKENIZER, WEIGHTS
from xlcli.store.records import RECORD

FILES = (CONFIG, *TOKENIZER, *HELD_OUT.values(), RECORD, WEIGHTS)
"""Files of a model elsewhere, in the order of their transfer: without weights it is no model."""
VOCABULARY_LIMIT = 2**26
"""Maximum size of a vocabulary in bytes."""

_BLOCK = 2**20


def push(folder: Path, url: str, *, with_text: bool = False) -> list[str]:
    """Sends a model; returns the names of the files.

    Args:
        folder: Model folder.
        url: Folder, or URL of fsspec, for the files.
        with_text: Send validation and test text, too.

    Raises:
        CheckpointError: The model is damaged, or the place cannot be written.
        ConfigError: There is a model at the place, fsspec cannot reach it, or fsspec is not installed.
    """
    with TemporaryDirectory(prefix="xlcli-push-") as temporary, _remote(url):
        files, root = _open(url)
        for name in (CONFIG, WEIGHTS):
            if files.exists(f"{root}/{name}"):
                raise ConfigError(f"there is a {name} at {url}.", "Choose another place, or remove it there first.")
        copy = Path(temporary) / "model"
        copy_model(folder, copy)  # consistent, even if the model is being trained
        sent: list[str] = []
        with suppress(NotImplementedError, FileExistsError):
            files.makedirs(root, exist_ok=True)
        try:
            for name in FILES:
                if (copy / name).is_file() and (with_text or name not in HELD_OUT.values()):
                    sent.append(name)
                    files.put_file(str(copy / name), f"{root}/{name}")
        except BaseException:
            for name in sent:
                with suppress(Exception):
                    files.rm_file(f"{root}/{name}")
            raise
    return sent


def pull(url: str, target: Path) -> None:
    """Fetches a model into `target`, which appears when it is complete and verified.

    Args:
        url: Folder, or URL of fsspec, with the files.
        target: New model folder; must not exist.

    Raises:
        CheckpointError: There is no model, it is damaged, or it cannot be read.
        ConfigError: `target` exists, fsspec cannot reach the place, or fsspec is not installed.
        ResourceError: The disk is too small.
    """
    require_free(target)
    with _remote(url):
        files, root = _open(url)
        sizes = _sizes(files, root, url)
    try:
        make_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from error
    free = shutil.disk_usage(target.parent).free
    if sum(sizes.values()) > free:
        raise ResourceError(
            f"the model at {url} has {sum(sizes.values()):,} bytes, the disk of {target.parent} {free:,}.",
            "Free some space, or choose a folder on another disk.",
        )
    with new_folder(target) as temporary:
        for name, size in sizes.items():
            write_atomic(temporary / name, _blocks(files, f"{root}/{name}", size, url))
        model = load(temporary)
        model.held_out("valid"), model.held_out("test")


def _open(url: str) -> tuple[Any, str]:
    """File system and path of a place."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            "models elsewhere are reached with fsspec, which is not installed.", "Type pip install 'xlcli[remote]'."
        ) from None
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"fsspec cannot reach {url}: {reason}.", "Give a folder or another URL.") from None
    return files, str(root).rstrip("/")


def _sizes(files: Any, root: str, url: str) -> dict[str, int]:
    """Name and size of the files of a model, which are bounded."""
    limits = {CONFIG: JSON_LIMIT, RECORD: JSON_LIMIT, **dict.fromkeys(TOKENIZER, VOCABULARY_LIMIT)}
    sizes = {}
    for name in FILES:
        try:
            info = files.info(f"{root}/{name}")
        except FileNotFoundError:
            if name in (CONFIG, WEIGHTS):
                raise CheckpointError(f"there is no model at {url}: it has no {name}.", "Check the URL.") from None
            continue
        size = info.get("size")
        if info.get("type") != "file" or info.get("islink") or type(size) is not int or size < 0:
            raise CheckpointError(f"{name} at {url} is not a file of known size.", "Choose another model.")
        if size > limits.get(name, size):
            raise CheckpointError(
                f"{name} at {url} is larger than the {limits[name]:,} bytes allowed.", "Choose another model."
            )
        sizes[name] = size
    return sizes


def _blocks(files: Any, path: str, size: int, url: str) -> Iterator[bytes]:
    """Content of a file elsewhere; `CheckpointError` unless it has `size` bytes."""
    left = size
    with _remote(url), files.open(path, "rb") as file:
        while block := file.read(_BLOCK):
            left -= len(block)
            if left < 0:
                break
            yield block
    if left:
        raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")


@contextmanager
def _remote(url: str) -> Iterator[None]:
    """Context in which the errors of any file system become a `CheckpointError`."""
    try:
        yield
    except (XLError, GeneratorExit):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise CheckpointError(f"{url} cannot be used: {reason}.", "Check the URL and your access to it.") from None
