"""Checkpoints of PyTorch, and other pickles, read without executing anything.

A pickle is a program for a stack machine, which can call any function by name. Here it can build plain containers,
describe tensors, and make a `Record`, which only holds values, of a class in `RECORDS`; every other name is refused.
Opcodes, bytes and keys are limited, so a hostile file takes bounded RAM and time. `torch.save` writes two formats:

zip       data.pkl, and a file for each storage, not compressed
legacy    pickles of a magic number, version, machine, content and names of storages; then the storages
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from xlcli.errors import CheckpointError
from xlcli.files import open_regular, version
from xlcli.files.tensors import TYPES, TensorInfo

LARGEST_PICKLE = 2**26  # bytes without storages; the vocabulary of 267,735 words of WikiText-103 takes 9 MB
MOST_OPCODES = 2**23  # maximum number of opcodes: 1.6 million for that vocabulary. Each makes at most one object.
LARGEST_DIRECTORY = 2**24  # maximum bytes of the directory of a zip file, which takes twenty times the RAM
LONGEST_KEY = 2**10  # maximum characters of a key of a table, such as the name of a tensor or a word
MOST_ARGUMENTS = 16  # maximum number of arguments of a call, and of axes of a tensor
RECORDS = frozenset(  # what pickles of Transformer-XL models and vocabularies name; none of it is imported
    f"{module}.{name}"
    for module, names in {
        "torch.nn.modules": "activation.ReLU container.ModuleList container.ParameterList container.Sequential "
        "dropout.Dropout linear.Linear normalization.LayerNorm sparse.Embedding",
        "torch.nn.backends": "thnn._get_thnn_function_backend",
        "mem_transformer": "MemTransformerLM AdaptiveEmbedding PositionalEmbedding PositionwiseFF MultiHeadAttn "
        "DecoderLayer RelLearnableMultiHeadAttn RelLearnableDecoderLayer RelPartialLearnableMultiHeadAttn "
        "RelPartialLearnableDecoderLayer",
        "proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
        "utils": "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax vocabulary.Vocab",
        "vocabulary": "Vocab",
        "data_utils": "Corpus",
        "sacremoses": "normalize.MosesPunctNormalizer tokenize.MosesTokenizer tokenize.MosesDetokenizer",
        "transformers": "tokenization_utils.Trie",
        "tokenizers": "AddedToken",
        "re": "_compile",
        "builtins": "set",
        "__builtin__": "set",
    }.items()
    for name in names.split()
)
_STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.DoubleStorage": "F64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_COUNT_BYTES = 8
_ALLOWED = (  # opcodes of protocols 2 to 5, without those that name objects by number or make other types
    "PROTO FRAME STOP MARK POP POP_MARK DUP GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINPUT LONG_BINPUT "
    "MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES EMPTY_LIST APPEND APPENDS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS"
)
REMEDY = "Import a copy of the model with weights in safetensors, if there is one."


@dataclass(eq=False, repr=False)
class Record:
    """An object of a class that is not imported: its name, such as `torch.nn.modules.linear.Linear`, and its state."""

    name: str
    state: Any = None


@dataclass(eq=False)
class Storage:
    """Numbers of one type in a file."""

    path: Path
    version: tuple[int, int, int]
    dtype: str  # a key of `TYPES`
    n: int
    start: int = -1  # offset of the first number in bytes, -1 until it is known

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, TYPES[self.dtype])
        return dtype

    def place(self, start: int, n_bytes: int, file_size: int) -> int:
        """Notes where in the file it is; returns the offset of what follows it."""
        if n_bytes != self.n * self.torch_dtype.itemsize or start + n_bytes > file_size:
            raise ValueError("a storage has another size than it says")
        self.start = start
        return start + n_bytes

    def read(self, at: int, n_bytes: int) -> bytearray:
        """Bytes from the offset `at` in it; `CheckpointError` if the file has changed since `version`."""
        data = bytearray(n_bytes)
        with open_regular(self.path) as (file, _):
            file.seek(self.start + at)
            if file.readinto(data) != n_bytes or version(os.fstat(file.fileno())) != self.version:
                raise CheckpointError(f"{self.path} changed while it was read.", "Run the command again.")
        return data


@dataclass(eq=False)
class StoredTensor:
    """A tensor in a file: type, shape and strides, and the offset of its first number in its storage."""

    storage: Storage
    offset: int
    info: TensorInfo
    strides: tuple[int, ...]

    def read(self) -> Tensor:
        dtype = self.storage.torch_dtype
        n_bytes = _extent(self.info.shape, self.strides) * dtype.itemsize
        data = self.storage.read(self.offset * dtype.itemsize, n_bytes)
        flat = torch.empty(0, dtype=dtype)
        if data:  # of nothing, torch makes no tensor
            flat = torch.frombuffer(data, dtype=dtype)
        return flat.as_strided(self.info.shape, self.strides).contiguous()

    @classmethod
    def whole(cls, path: Path, version: tuple[int, int, int], info: TensorInfo, start: int) -> Self:
        """A tensor that is stored row by row, from the offset `start` of a file of this version."""
        strides = tuple(math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape)))
        return cls(Storage(path, version, info.dtype, math.prod(info.shape), start), 0, info, strides)


def read_checkpoint(path: Path) -> Any:
    """Content of a file that `torch.save` or pickle wrote: containers, numbers and texts, `StoredTensor` and `Record`.

    Sets are lists, ordered dictionaries and counters are dictionaries, parameters are tensors. `CheckpointError` if it
    is damaged or too large, or names something that is not in `RECORDS`.
    """
    with open_regular(path) as (file, status):
        try:
            read = _read_zip if file.read(4) == b"PK\3\4" else _read_legacy
            return read(path, file, status)
        except OSError:
            raise
        except Exception as error:  # the standard library has many for damage
            reason = ascii(f"{type(error).__name__}: {error}")[1:200].rstrip("'.")
            raise CheckpointError(f"{path} is damaged, or cannot be read without risk ({reason}).", REMEDY) from None


def _read_zip(path: Path, file: io.BufferedReader, status: os.stat_result) -> Any:
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end and end[zipfile._ECD_SIZE] > LARGEST_DIRECTORY:  # type: ignore[attr-defined]
        raise ValueError("the directory of the archive is too large")
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if any(info.compress_type or info.file_size != info.compress_size for info in entries.values()):
            raise ValueError("the archive is compressed, which torch.save does not do")
        [name] = (name for name in entries if name == "data.pkl" or name.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        if folder + "byteorder" in entries and archive.read(folder + "byteorder") != b"little":
            raise ValueError("numbers have another order of bytes")
        if entries[name].file_size > LARGEST_PICKLE:
            raise ValueError("the pickle is too long")
        reader = _Reader(path, archive.read(name), status)
        tree = reader.load()
        for key, storage in reader.storages.items():
            entry = entries[f"{folder}data/{key}"]
            with archive.open(entry) as content:
                start: int = content._orig_compress_start  # type: ignore[attr-defined]
                storage.place(start, entry.file_size, status.st_size)
    return tree


def _read_legacy(path: Path, file: io.BufferedReader, status: os.stat_result) -> Any:
    """Content of a file from before the zip format, or of a single pickle."""
    file.seek(0)
    reader = _Reader(path, file.read(LARGEST_PICKLE), status)
    first = reader.load()
    if first != _MAGIC or type(first) is not int:
        return first
    version, machine, tree, keys = (reader.load() for _ in range(4))
    if version != _VERSION or machine.get("little_endian") is not True:
        raise ValueError("another version of the format, or order of bytes")
    # Storages follow the pickles, each after the number of its elements.
    start = reader.data.tell()
    for key in keys:
        file.seek(start)
        n_elements = int.from_bytes(file.read(_COUNT_BYTES), "little")
        storage = reader.storages[key]
        start = storage.place(start + _COUNT_BYTES, n_elements * storage.torch_dtype.itemsize, status.st_size)
    if any(storage.start < 0 for storage in reader.storages.values()):
        raise ValueError("a storage is missing")
    return tree


class _Reader(pickle._Unpickler):
    """The standard library's reader with fewer opcodes, of which those that call or hash something are replaced."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, path: Path, data: bytes, status: os.stat_result) -> None:
        self.path, self.data, self.status = path, io.BytesIO(data), status
        super().__init__(self.data, fix_imports=False, encoding="utf-8")
        codes = [getattr(pickle, name)[0] for name in _ALLOWED.split()]
        self.dispatch = _Opcodes({code: (self.dispatch | self.replaced)[code] for code in codes})  # type: ignore[misc]
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle gets for a name: the type of a storage, or a function that makes a tensor or a record."""
        whole = f"{module}.{name}"
        match whole:
            case "collections.OrderedDict" | "collections.Counter":
                return lambda given=None: {} if given is None else given  # a copy of a large table takes time
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2":
                return self.tensor
            case "torch._utils._rebuild_parameter":
                return lambda tensor, *_: tensor
        if whole in _STORAGES:
            return _STORAGES[whole]
        if whole not in RECORDS:
            raise ValueError(f"it asks for {whole[:100]}, which is not executed")
        return lambda *_: Record(whole)

    def persistent_load(self, key: Any) -> Any:
        """The storage, or the class, that a persistent id describes.

        Of a storage that is ("storage", type, name, device, number of elements), in old files with a view after them.
        """
        match key:
            case ("module", kind, _, _):  # the source text of a class, which nobody reads
                return kind
            case ("storage", str(kind), str(name), _, int(n), *view) if (
                kind in TYPES and len(name) <= LONGEST_KEY and view in ([], [None])
            ):
                storage = self.storages.setdefault(name, Storage(self.path, version(self.status), kind, n))
                if (storage.dtype, storage.n) == (kind, n):  # as where it was named first
                    return storage
        raise ValueError("a storage is not understood")

    def tensor(self, storage: Storage, offset: int, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        """A tensor within its storage, which holds no number twice, and at least half of a range."""
        shape, strides = tuple(shape), tuple(strides)
        are_sizes = all(type(n) is int and 0 <= n < 2**62 for n in (offset, *shape, *strides))
        if not are_sizes or len(shape) > MOST_ARGUMENTS:
            raise ValueError("a tensor is not understood")
        extent = _extent(shape, strides)
        if offset + extent > storage.n or not math.prod(shape) <= extent <= 2 * math.prod(shape):
            raise ValueError("a tensor does not fit its storage")
        return StoredTensor(storage, offset, TensorInfo(storage.dtype, shape), strides)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if len(arguments) > MOST_ARGUMENTS:
            raise TypeError("a call has too many arguments")
        self.stack[-1] = function(*arguments)

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Record):
            value.state = state
        elif type(value) is not dict:  # attributes of an ordered dictionary, such as versions of modules, are left out
            raise TypeError("only records have a state")

    def set_item(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a nested tuple may take for ever, as may the comparison of long texts.
            is_text = type(key) is str and len(key) <= LONGEST_KEY
            is_number = type(key) is int and abs(key) < 2**63
            if not (is_text or is_number) or type(self.stack[-1]) is not dict:
                raise TypeError("a key is neither a short text nor a number")
            self.stack[-1][key] = value

    replaced = {  # noqa: RUF012
        pickle.REDUCE[0]: call,
        pickle.NEWOBJ[0]: call,
        pickle.BUILD[0]: build,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.EMPTY_SET[0]: pickle._Unpickler.load_empty_list,  # type: ignore[attr-defined]
        pickle.ADDITEMS[0]: pickle._Unpickler.load_appends,  # type: ignore[attr-defined]
    }


class _Opcodes(dict[int, Any]):
    """Functions of opcodes, of which `MOST_OPCODES` can be taken."""

    n = 0

    def __getitem__(self, code: int) -> Any:
        self.n += 1
        if self.n > MOST_OPCODES:
            raise EOFError("too many objects")
        return super().__getitem__(code)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements from the first to the last one of a tensor."""
    if not all(shape):
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
