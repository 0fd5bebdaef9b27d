"""Tensors on disk: safetensors files with a checksum over the tensors and one over the metadata. Never a pickle.

The safetensors library (0.8 or later) checks the structure of a header, its types, shapes and offsets. Checked here:
that the path is a regular file, the header small, tensor names plain and both checksums right. Torch and safetensors
are imported in the functions that need them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import RESTORE, json_digest, open_regular, replacing, version, write_all
from xlcli.machine import require_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

TYPES = {  # types of numbers as safetensors names them, and as torch does
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I8": "int8",
    "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
HEADER_LIMIT = 2**24
"""Maximum size of a header in bytes: 1,024 layers and their optimizer state need 5 MB. At this size a header takes two
seconds and 400 MB; the library allows 100 MB."""

LENGTH_BYTES = 8
"""Bytes of the length of the header, at the beginning of a file, and the multiple to which the header is padded."""

NO_CHECKSUM = "0" * 64  # as long as the SHA-256 of the tensors
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
    """Writes a safetensors file as `write_atomic` does; equal input gives equal bytes.

    Sets in the metadata `sha256`, the `digest` of the tensors, and `metadata_sha256`, a digest of the metadata.
    `ConfigError` if the tensors are too many for a header of `HEADER_LIMIT` bytes.
    """
    infos = {name: TensorInfo(type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_in_order(path, infos, sorted(tensors.items()), metadata)


def write_in_order(
    path: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """`write_tensors` for names and tensors that are made one after the other, in alphabetical order, of these types.

    Each is written to its place before the next one is asked for.
    """
    entries, beginning = _layout(path, infos, metadata)
    data_start = len(beginning(NO_CHECKSUM))
    checksum = hashlib.sha256()
    with replacing(path) as (_, temporary), temporary.open("r+b", buffering=0) as file:
        for name, tensor in tensors:
            if TensorInfo(type_name(tensor.dtype), tuple(tensor.shape)) != infos[name]:
                raise ValueError(f"tensor {name!r} is not of the announced type and shape")
            content = _add_to_digest(checksum, name, tensor)
            os.lseek(file.fileno(), data_start + entries[name]["data_offsets"][0], os.SEEK_SET)
            write_all(file.fileno(), content)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        write_all(file.fileno(), beginning(checksum.hexdigest()))


def _layout(
    path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], Callable[[str], bytes]]:
    """Entries of tensors in the header, in their order, and a function from the checksum to the file before them."""
    for name in infos:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a tensor name: {name!r}")

    def wide_ones_first(name: str) -> tuple[int, str]:  # so that all numbers are aligned
        return -torch_type(infos[name]).itemsize, name

    entries: dict[str, Any] = {}
    start = 0
    for name in sorted(infos, key=wide_ones_first):
        end = start + n_bytes(infos[name])
        entries[name] = {"dtype": infos[name].dtype, "shape": [*infos[name].shape], "data_offsets": [start, end]}
        start = end

    def beginning(checksum: str) -> bytes:
        sealed = dict(metadata)
        sealed.pop("metadata_sha256", None)  # of the file that the metadata were read from
        sealed["sha256"] = checksum
        sealed["metadata_sha256"] = json_digest(sealed)
        header = json.dumps({"__metadata__": dict(sorted(sealed.items())), **entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % LENGTH_BYTES)
        return len(header).to_bytes(LENGTH_BYTES, "little") + header

    data_start = len(beginning(NO_CHECKSUM))
    if data_start - LENGTH_BYTES > HEADER_LIMIT:
        size = f"a header of {data_start - LENGTH_BYTES:,} bytes, more than the {HEADER_LIMIT:,} allowed"
        problem = f"cannot write {path}: {len(infos):,} tensors need {size}."
        raise ConfigError(problem, "Use fewer layers or a smaller train.grad_accum.")
    return entries, beginning


def n_bytes(info: TensorInfo) -> int:
    """Size of a stored tensor."""
    return math.prod(info.shape) * torch_type(info).itemsize


def torch_type(info: TensorInfo) -> torch.dtype:
    """Type of the numbers of a stored tensor."""
    import torch

    dtype: torch.dtype = getattr(torch, TYPES[info.dtype])
    return dtype


def type_name(dtype: torch.dtype) -> str:
    """A type of numbers as safetensors names it."""
    name = str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float", "F")
    return name.replace("uint", "U").replace("int", "I").upper()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors in alphabetical order: the fingerprint of weights."""
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        _add_to_digest(result, name, tensor)
    return result.hexdigest()


def _add_to_digest(checksum: hashlib._Hash, name: str, tensor: Tensor) -> Any:
    """Adds a tensor to a `digest`; returns its bytes."""
    import torch

    content: Any = b""
    if tensor.numel():
        contiguous = tensor.detach().to("cpu").contiguous()
        # One element may have any stride, even if contiguous; `view` needs a stride of 1.
        content = contiguous.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    checksum.update(content)
    return content


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
