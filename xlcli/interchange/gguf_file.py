"""GGUF files: metadata and places of tensors, tensors in quantized blocks, writing.

The header is read here and not by the package gguf, which trusts the counts and sizes in it. The layout of a file is
that of version 3 of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; version 2 has the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import open_regular, replacing, version
from xlcli.files.tensors import TensorInfo, type_name
from xlcli.interchange.pickles import StoredTensor

MAGIC = b"GGUF"
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # that can be imported
LARGEST_HEADER, MOST_VALUES, MOST_TENSORS = 2**26, 2**21, 2**16  # bytes before tensors, and counts
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # types of values as `struct` names them
_STRING, _ARRAY = 8, 9
_PORTION = 2**22  # numbers that are dequantized at once


def package() -> ModuleType:
    """The package gguf; `ConfigError` if it is missing."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files need the package gguf.", "Install it: pip install gguf") from None
    module: ModuleType = gguf
    return module


def shortest(number: float) -> float:
    """The number with the fewest decimal places that is the same in float32, as a configuration has it."""
    return float(str(np.float32(number)))


@dataclass(eq=False)
class QuantizedTensor(StoredTensor):
    """A tensor in blocks of numbers that share scales. Its storage counts numbers and begins with the first block."""

    def read(self) -> Tensor:
        gguf = package()
        kind = gguf.GGMLQuantizationType[self.storage.dtype]
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        whole = torch.empty(self.info.shape)
        row_len = whole.shape[-1]
        start = self.offset // block_numbers * block_bytes
        # A portion of the rows at a time is in blocks, and is written into `whole`.
        for rows in torch.split(whole.view(-1, row_len), max(1, _PORTION // row_len)):
            data = self.storage.read(start, rows.numel() // block_numbers * block_bytes)
            blocks = np.frombuffer(data, np.uint8).reshape(len(rows), -1)
            with np.errstate(all="ignore"):
                rows.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
            start += len(data)
        return whole


class _Header:
    """Reads the header of a file; `ValueError` where it is too long, or claims more than there is."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left, self._values = file, min(size, LARGEST_HEADER), MOST_VALUES

    def take(self, n: int) -> bytes:
        self._left -= n
        if self._left < 0:
            raise ValueError("it is cut off, or a size in it is too large")
        return self._file.read(n)

    def numbers(self, kind: str, n: int = 1) -> tuple[Any, ...]:
        """The next n numbers of a type of `struct`."""
        self._values -= n
        if self._values < 0:
            raise ValueError("a count in it is too large")
        return struct.unpack(f"<{n}{kind}", self.take(n * struct.calcsize(kind)))

    def string(self) -> str:
        return self.take(self.numbers("Q")[0]).decode()

    def value(self, kind: int) -> Any:
        """The next value of a type; a list for an array, and bytes for one of bytes."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            (number,) = self.numbers(_NUMBERS[kind])
            return shortest(number) if _NUMBERS[kind] == "f" else number
        (inner,), (n,) = self.numbers("I"), self.numbers("Q")
        if inner == _STRING:
            return [self.string() for _ in range(n)]
        return self.take(n) if inner == 0 else [*self.numbers(_NUMBERS[inner], n)]

    def table(self) -> dict[str, Any]:
        """Metadata and, with the key `tensors`, offset, shape and number of the type of each tensor by name."""
        (format_version,), (n_tensors, n_keys) = self.numbers("I"), self.numbers("Q", 2)
        if format_version not in (2, 3) or n_tensors > MOST_TENSORS:
            raise ValueError(f"it has the version {format_version}, and {n_tensors} tensors")
        metadata: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for _ in range(n_keys):
            key, (kind,) = self.string(), self.numbers("I")
            if key in metadata:
                raise ValueError(f"the key {key[:80]!a} is there twice")
            metadata[key] = self.value(kind)
        for _ in range(n_tensors):
            name, (n_axes,) = self.string(), self.numbers("I")
            if name in tensors or not 1 <= n_axes <= 4:
                raise ValueError(f"the tensor {name[:80]!a} is there twice, or has {n_axes} axes")
            shape = tuple(reversed(self.numbers("Q", n_axes)))  # the first axis of a file is the last one of torch
            (type_number,), (offset,) = self.numbers("I"), self.numbers("Q")
            tensors[name] = offset, shape, type_number
        return metadata | {"tensors": tensors}


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata of a file, and its tensors, not read; `CheckpointError` if it is damaged or its header too large."""
    gguf = package()
    with open_regular(path) as (file, status):
        try:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            metadata = _Header(file, status.st_size - len(MAGIC)).table()
            alignment = index(metadata.get("general.alignment", 32))
            if alignment < 1 or alignment % 8:
                raise ValueError(f"its alignment is {alignment}")
            data_start = math.ceil(file.tell() / alignment) * alignment
            tensors: dict[str, StoredTensor] = {}
            end = 0  # of the tensor before
            by_offset = sorted(metadata.pop("tensors").items(), key=lambda item: item[1][0])
            for name, (offset, shape, type_number) in by_offset:
                kind = gguf.GGMLQuantizationType(type_number)
                block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                n_numbers = math.prod(shape)
                if not n_numbers or shape[-1] % block_numbers or offset < end or offset % alignment:
                    raise ValueError(f"the tensor {name[:80]!a} is empty, not aligned, or overlaps another one")
                end = offset + n_numbers // block_numbers * block_bytes
                if data_start + end > status.st_size:
                    raise ValueError(f"the tensor {name[:80]!a} is not within it")
                tensor_class = QuantizedTensor if kind.name in QUANTIZED else StoredTensor
                info = TensorInfo(kind.name, shape)
                tensors[name] = tensor_class.whole(path, version(status), info, data_start + offset)
        except (ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
            reason = f"{type(error).__name__} {error}"
            if type(error) is ValueError:  # of this module
                reason = str(error)
            problem = f"{path} is damaged or no GGUF file: {reason:.200}"
            raise CheckpointError(f"{problem}.", "Download it again.") from None
    return metadata, tensors


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file as `write_atomic` does, matrices in their own type, others in float32."""
    gguf = package()
    writer = gguf.GGUFWriter(None, metadata["general.architecture"])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add |= dict.fromkeys((list, bytes), writer.add_array)
    for key, value in metadata.items():
        if key != "general.architecture":  # which it has already
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        data = tensor if tensor.ndim > 1 else tensor.float()
        data = data.detach().contiguous()
        kind = gguf.GGMLQuantizationType[type_name(data.dtype)]
        writer.add_tensor(name, data.view(torch.uint8).numpy(), raw_dtype=kind)

    with replacing(path) as (_, temporary):
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
