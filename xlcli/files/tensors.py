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

LENGTH_BYTES = 8
"""Bytes of the length of the header, at the beginning of a file, and the multiple to which the header is padded."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class TensorInfo(NamedTuple):
    """Type (as safetensors names it: "F32", "I64") and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Type and shape of each tensor of a safetensors file, and its metadata, without reading tensors or loading torch.

    `CheckpointError` if the file is missing or damaged. Checksums are not compared.
    """
    with _open(path, "numpy") as file:
        return _infos(file), dict(file.metadata() or {})


def read_places(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], tuple[int, int, int]]:
    """Type, shape and offset in the file of each tensor, and the `version` of the file; errors as of `read_header`."""
    with _open(path, "numpy") as library, open_regular(path) as (file, status):
        header_length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(header_length))
        data_start = LENGTH_BYTES + header_length
        places: dict[str, tuple[TensorInfo, int]] = {}
        for name, info in _infos(library).items():
            begin, _ = header[name]["data_offsets"]
            places[name] = info, data_start + begin
        return places, version(status)


def read_tensors(path: Path, *, expected: Mapping[str, TensorInfo] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `write_tensors` wrote. Tensors own their memory: the file may change later.

    Types and shapes are compared with the expected ones, if given, before anything is allocated. `CheckpointError` if
    the file is missing, damaged, without checksums, or holds other tensors than expected.
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
    `ConfigError` if the tensors are too many for a header of `HEADER_LIMIT` bytes.
    """
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a tensor name: {name!r}")
        ready[name] = tensor.detach().to("cpu").contiguous()
    sealed = dict(metadata)
    sealed.pop("metadata_sha256", None)  # of the file that the metadata were read from
    sealed["sha256"] = digest(ready)
    sealed["metadata_sha256"] = json_digest(sealed)
    entries: dict[str, Any] = {"__metadata__": dict(sorted(sealed.items()))}
    order = sorted(ready, key=lambda name: (-ready[name].element_size(), name))  # so that all are aligned
    end = 0
    for name in order:
        tensor, start = ready[name], end
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": type_name(tensor.dtype), "shape": [*tensor.shape], "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > HEADER_LIMIT:
        size = f"a header of {len(header):,} bytes, more than the {HEADER_LIMIT:,} allowed"
        problem = f"cannot write {path}: {len(ready):,} tensors need {size}."
        raise ConfigError(problem, "Use fewer layers or a smaller train.grad_accum.")
    beginning = (len(header).to_bytes(LENGTH_BYTES, "little"), header)
    write_atomic(path, itertools.chain(beginning, (_bytes(ready[name]) for name in order)))


def type_name(dtype: torch.dtype) -> str:
    """A type of numbers as safetensors names it."""
    name = str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float", "F")
    return name.replace("uint", "U").replace("int", "I").upper()


def _bytes(tensor: Tensor) -> Any:
    """Content of a contiguous tensor on the CPU."""
    import torch

    if not tensor.numel():
        return b""
    # Tensors with one element may have any stride, even if contiguous; `view` needs a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


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
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
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
        # The library accepts such a shape without elements, and torch does not.
        if max(infos[name].shape, default=0) >= 2**63:
            raise ValueError(f"tensor '{name}' has an impossible shape")
    return infos


def _compare(path: Path, infos: Mapping[str, TensorInfo], expected: Mapping[str, TensorInfo]) -> None:
    remedy = "The file belongs to another model: keep each model's files together."
    for name, wanted in sorted(expected.items()):
        if name not in infos:
            raise CheckpointError(f"{path} has no tensor '{name}'.", remedy)
        present = infos[name]
        if present != wanted:
            difference = f"{present.dtype} {list(present.shape)} where {wanted.dtype} {list(wanted.shape)} is needed"
            raise CheckpointError(f"{path}: tensor '{name}' is {difference}.", remedy)
    unexpected = infos.keys() - expected.keys()
    if unexpected:
        raise CheckpointError(f"{path} has an unexpected tensor '{min(unexpected)}'.", remedy)


def prefixed(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """The entries, each with `prefix` before its name."""
    return {f"{prefix}{name}": value for name, value in entries.items()}


def with_prefix(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
