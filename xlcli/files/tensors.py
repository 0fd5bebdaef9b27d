"""Tensors on disk: safetensors files, every number of whose header is checked before the library sees the file.

Torch and safetensors are imported in the functions that need them. Never a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlcli.errors import CheckpointError
from xlcli.files.plain import RESTORE, blocks, open_regular, parse_json, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LIMIT = 2**20
"""Most bytes of a safetensors header; a larger one is refused before any library sees it."""
MAX_DIMENSIONS = 8
"""Most dimensions of a tensor."""
MAX_ELEMENTS = 2**48
"""Most numbers in a tensor, dimensions of zero counted as one."""
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
"""Bytes a number of each tensor type we read or write, by its safetensors name."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class TensorFacts(NamedTuple):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, TensorFacts], dict[str, str]]:
    """Tensors and metadata that a safetensors file declares, every number of it checked against the file's size."""
    with open_regular(path) as (descriptor, facts):
        return _read_header(path, descriptor, facts.st_size)


def read_tensors(
    path: Path,
    *,
    expected: Mapping[str, tuple[str, tuple[int, ...]]] | None,
    device: str = "cpu",
    foreign: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; the tensors own their memory, so the file may change afterwards.

    Args:
        path: The file.
        expected: Name to (safetensors dtype, shape), compared before anything is allocated; None accepts any.
        device: Where the tensors go.
        foreign: Whether a file without our digests, written by another program, is accepted.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as (descriptor, before):
        facts, metadata = _read_header(path, descriptor, before.st_size)
        if expected is not None:
            _compare(path, facts, expected)
        if not foreign and not {"sha256", "metadata_sha256"} <= metadata.keys():
            raise CheckpointError(f"{path} carries no checksum, so it was not written by xlcli.", RESTORE)
        try:
            # pread, because the default maps the file: truncating it later would kill the process.
            with safe_open(path, framework="pt", device="cpu", backend="pread") as file:
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in sorted(facts)}
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.", RESTORE) from None
        after = path.stat()
    if (before.st_ino, before.st_size, before.st_mtime_ns) != (after.st_ino, after.st_size, after.st_mtime_ns):
        raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")
    if "sha256" in metadata and metadata["sha256"] != digest(tensors):
        raise CheckpointError(f"{path} is damaged: its tensors do not match their checksum.", RESTORE)
    seal = metadata.pop("metadata_sha256", None)
    if seal is not None and seal != _metadata_digest(metadata):
        raise CheckpointError(f"{path} is damaged: its metadata does not match its checksum.", RESTORE)
    return {name: tensor.to(device) for name, tensor in tensors.items()}, metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file by `write_atomic`; the same input gives the same bytes.

    Metadata gains `sha256`, the `digest` of the tensors, and a digest of the metadata itself.
    """
    from safetensors.torch import save

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a tensor name: {name!r}")
        whole = tensor.detach().to("cpu").contiguous()
        storage = whole.untyped_storage().data_ptr()
        ready[name] = whole.clone() if storage in seen else whole
        seen.add(storage)
    blob = save(ready)
    start = 8 + int.from_bytes(blob[:8], "little")
    entries = json.loads(blob[8:start])
    if unknown := {entry["dtype"] for entry in entries.values()} - ITEM_SIZES.keys():
        raise ValueError(f"tensors of type {', '.join(unknown)} are not stored")
    sealed = dict(metadata) | {"sha256": digest(ready)}
    sealed["metadata_sha256"] = _metadata_digest(sealed)
    # The library writes metadata in random order; ours is sorted so that equal models are equal files.
    header = json.dumps({"__metadata__": dict(sorted(sealed.items())), **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_LIMIT:
        raise ValueError(f"a header of {len(header):,} bytes could not be read again")
    write_atomic(path, (len(header).to_bytes(8, "little"), header, memoryview(blob)[start:]))  # type: ignore[arg-type]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, in the order of their names: a model's fingerprint."""
    import torch

    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode()).hexdigest()


def _read_header(path: Path, descriptor: int, size: int) -> tuple[dict[str, TensorFacts], dict[str, str]]:
    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged or no safetensors file: {why}.", RESTORE)

    os.lseek(descriptor, 0, os.SEEK_SET)
    prefix = b"".join(blocks(descriptor, 8))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise damaged("it is cut short")
    if length > HEADER_LIMIT:
        raise damaged(f"its header claims {length:,} bytes")
    raw = b"".join(blocks(descriptor, length))
    if len(raw) != length or not raw.startswith(b"{"):
        raise damaged("it has no header")
    tree = parse_json(raw, path)
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged("its metadata is not a table of texts")
    facts: dict[str, TensorFacts] = {}
    extents: list[tuple[int, int]] = []
    for name, entry in tree.items():
        if not _NAME.fullmatch(name):
            raise damaged(f"{name[:80]!a} is no tensor name")
        try:
            facts[name], extent = _entry(entry)
        except ValueError as error:
            raise damaged(f"tensor '{name}' {error}") from None
        extents.append(extent)
    end = 0
    for start, stop in sorted(extents):
        if start != end:
            raise damaged("its tensors overlap or leave holes")
        end = stop
    if end != size - 8 - length:
        raise damaged(f"its tensors end at byte {end:,} of {size - 8 - length:,}")
    return facts, metadata


def _entry(entry: Any) -> tuple[TensorFacts, tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ValueError(f"has the type {str(dtype)[:20]!a}, not one of {', '.join(ITEM_SIZES)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
        raise ValueError("has an impossible shape")
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * ITEM_SIZES[dtype]:
        raise ValueError("has a size that does not fit its shape")
    return TensorFacts(dtype, tuple(shape)), (offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value)


def _compare(path: Path, facts: Mapping[str, TensorFacts], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    remedy = "The file belongs to another model: keep each model's files together."
    for name, (dtype, shape) in sorted(expected.items()):
        if name not in facts:
            raise CheckpointError(f"{path} has no tensor '{name}'.", remedy)
        if facts[name] != (dtype, tuple(shape)):
            found = facts[name]
            raise CheckpointError(
                f"{path}: tensor '{name}' is {found.dtype} {list(found.shape)} where {dtype} {list(shape)} is needed.",
                remedy,
            )
    if extra := sorted(facts.keys() - expected.keys()):
        raise CheckpointError(f"{path} has a tensor too many: '{extra[0]}'.", remedy)
