"""Tensors on disk: safetensors files with a checksum over the tensors and one over the metadata. Never a pickle.

The safetensors library (0.8 or later) checks the structure of a header, its types, shapes and offsets. Checked here:
that the path is a regular file, the header small, tensor names plain and both checksums right. Torch and safetensors
are imported in the functions that need them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import RESTORE, json_digest, open_regular, version, write_atomic
from xlcli.machine import require_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

TYPES = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I8": "int8",
    "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Types of numbers as safetensors names them, and as torch does."""
HEADER_LIMIT = 2**24
"""Maximum size of a header in bytes: 1,024 layers and their optimizer state need 5 MB. At this size a header takes two
seconds and 400 MB; the library allows 100 MB."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class TensorInfo(NamedTuple):
    """Type (as safetensors names it: "F32", "I64") and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Type and shape of each tensor of a safetensors file, and its metadata, without reading tensors or loading torch.

    Raises:
        CheckpointError: The file is missing or damaged. Checksums are not compared.
    """
    with _open(path, "numpy") as file:
        return _infos(file), dict(file.metadata() or {})


def read_places(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], tuple[int, int, int]]:
    """Type and shape of each tensor, with the offset of its first byte in the file, and the `version` of the file.

    Raises:
        CheckpointError: As `read_header`.
    """
    with _open(path, "numpy") as library, open_regular(path) as (file, status):
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        return {
            name: (info, start + header[name]["data_offsets"][0]) for name, info in _infos(library).items()
        }, version(status)


def read_tensors(path: Path, *, expected: Mapping[str, TensorInfo] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `write_tensors` wrote. Tensors own their memory: the file may change later.

    Types and shapes are compared with the expected ones, if given, before anything is allocated.

    Raises:
        CheckpointError: The file is missing, damaged, without checksums, or holds other tensors than expected.
    """
    with _open(path, "pt") as file:
        infos, metadata = _infos(file), dict(file.metadata() or {})
        if expected is not None:
            _compare(path, infos, expected)
        require_memory(f"reading {path}", path.stat().st_size, "Close other programs.")
        checksum, metadata_checksum = metadata.get("sha256"), metadata.pop("metadata_sha256", None)
        if checksum is None or metadata_checksum is None:
            raise CheckpointError(f"{path} has no checksum, so xlcli did not write it.", RESTORE)
        if metadata_checksum != json_digest(metadata):
            raise CheckpointError(f"{path} is damaged: its metadata does not match its checksum.", RESTORE)
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in infos}
    if checksum != digest(tensors):
        raise CheckpointError(f"{path} is damaged: its tensors do not match their checksum.", RESTORE)
    return tensors, metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file with `write_atomic`; equal input gives equal bytes.

    Sets in the metadata `sha256`, the `digest` of the tensors, and `metadata_sha256`, a digest of the metadata.

    Raises:
        ConfigError: The tensors are too many for a header of `HEADER_LIMIT` bytes.
    """
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a tensor name: {name!r}")
        ready[name] = tensor.detach().to("cpu").contiguous()
    sealed = {key: value for key, value in metadata.items() if key != "metadata_sha256"} | {"sha256": digest(ready)}
    sealed["metadata_sha256"] = json_digest(sealed)
    entries: dict[str, Any] = {"__metadata__": dict(sorted(sealed.items()))}
    end = 0
    order = sorted(ready, key=lambda name: (-ready[name].element_size(), name))  # so that all are aligned
    for name in order:
        start, end = end, end + ready[name].numel() * ready[name].element_size()
        entries[name] = {
            "dtype": type_name(ready[name].dtype),
            "shape": [*ready[name].shape],
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_LIMIT:
        raise ConfigError(
            f"cannot write {path}: {len(ready):,} tensors need a header of {len(header):,} bytes, more than the "
            f"{HEADER_LIMIT:,} allowed.",
            "Use fewer layers or a smaller train.grad_accum.",
        )
    write_atomic(
        path, itertools.chain((len(header).to_bytes(8, "little"), header), (_bytes(ready[name]) for name in order))
    )


def type_name(dtype: torch.dtype) -> str:
    """A type of numbers as safetensors names it."""
    name = str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float", "F")
    return name.replace("uint", "U").replace("int", "I").upper()


def _bytes(tensor: Tensor) -> Any:
    """Content of a contiguous tensor on the CPU."""
    import torch

    # Tensors with one element may have any stride, even if contiguous; `view` needs a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data if tensor.numel() else b""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors in alphabetical order: the fingerprint of weights."""
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(_bytes(tensor.detach().to("cpu").contiguous()))
    return result.hexdigest()


@contextmanager
def _open(path: Path, framework: Literal["pt", "numpy"]) -> Iterator[Any]:
    """The library's view of a file that did not change meanwhile, its errors turned into `CheckpointError`."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as (opened, before):
        length = int.from_bytes(opened.read(8), "little")
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{path} is damaged: its header claims {length:,} bytes.", RESTORE)
        try:
            # pread, because the default maps the file: truncating it later would kill the process.
            with safe_open(path, framework=framework, device="cpu", backend="pread") as file:
                yield file
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            reason = ascii(reason)[1:200].rstrip("'.")  # may quote control characters of the file
            raise CheckpointError(f"{path} is damaged or no safetensors file: {reason}.", RESTORE) from None
        after = path.stat()
    if version(before) != version(after):
        raise CheckpointError(f"{path} changed while it was read.", "Run the command again.")


def _infos(file: Any) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name in sorted(file.keys()):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no tensor name")
        entry = file.get_slice(name)
        infos[name] = TensorInfo(entry.get_dtype(), tuple(entry.get_shape()))
        if max(infos[name].shape, default=0) >= 2**63:  # without elements, which the library accepts and torch does not
            raise ValueError(f"tensor '{name}' has an impossible shape")
    return infos


def _compare(path: Path, infos: Mapping[str, TensorInfo], expected: Mapping[str, TensorInfo]) -> None:
    remedy = "The file belongs to another model: keep each model's files together."
    for name, wanted in sorted(expected.items()):
        if name not in infos:
            raise CheckpointError(f"{path} has no tensor '{name}'.", remedy)
        if (found := infos[name]) != wanted:
            raise CheckpointError(
                f"{path}: tensor '{name}' is {found.dtype} {list(found.shape)} where {wanted.dtype} "
                f"{list(wanted.shape)} is needed.",
                remedy,
            )
    if extra := sorted(infos.keys() - expected.keys()):
        raise CheckpointError(f"{path} has an unexpected tensor '{extra[0]}'.", remedy)


def with_prefix(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
