"""Checkpoints of PyTorch, and other pickles, read without executing anything. Torch is imported when a tensor is read.

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
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from xlcli.errors import CheckpointError, XLError
from xlcli.files import open_regular
from xlcli.files.tensors import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_PICKLE = 2**26
"""Maximum bytes of a pickle without its storages. The vocabulary of 267,735 words of WikiText-103 takes 9 MB."""
MOST_OPCODES = 2**23
"""Maximum number of opcodes: 1.6 million for that vocabulary. Each makes at most one object."""
LARGEST_DIRECTORY = 2**24
"""Maximum bytes of the directory of a zip file, which takes twenty times the RAM."""
MOST_SHARING = 4
"""Maximum size of all tensors, in sizes of the file: tied weights share a storage."""
LONGEST_NAME, MOST_ARGUMENTS, MOST_AXES = 512, 16, 8
RECORDS = frozenset(
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
"""Classes and functions that pickles of Transformer-XL models and vocabularies name. None of them is imported."""


class _Numbers(NamedTuple):
    """Type of the numbers of a storage, their size in bytes, and the name of the type in torch."""

    dtype: str
    size: int
    name: str


_STORAGES = {
    "torch.FloatStorage": _Numbers("F32", 4, "float32"),
    "torch.HalfStorage": _Numbers("F16", 2, "float16"),
    "torch.BFloat16Storage": _Numbers("BF16", 2, "bfloat16"),
    "torch.DoubleStorage": _Numbers("F64", 8, "float64"),
    "torch.LongStorage": _Numbers("I64", 8, "int64"),
    "torch.IntStorage": _Numbers("I32", 4, "int32"),
    "torch.ByteStorage": _Numbers("U8", 1, "uint8"),
    "torch.BoolStorage": _Numbers("BOOL", 1, "bool"),
}
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_ALLOWED = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINPUT LONG_BINPUT "
    "MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES EMPTY_LIST APPEND APPENDS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS"
)
"""Opcodes of protocols 2 to 5, without those that name objects by number or make other types."""
REMEDY = "Import a copy of the model with weights in safetensors, if there is one."


@dataclass(eq=False, repr=False)
class Record:
    """An object of a class that is not imported: its name, such as `torch.nn.modules.linear.Linear`, and its state."""

    name: str
    state: Any = None


@dataclass(eq=False)
class Storage:
    """`n` numbers of one type in a file; `start` is the offset of the first one in bytes, -1 until it is known."""

    path: Path
    identity: tuple[int, ...]
    kind: _Numbers
    n: int
    start: int = -1


@dataclass(eq=False)
class StoredTensor:
    """A tensor in a file: type, shape and strides, and the offset of its first number in its storage."""

    storage: Storage
    offset: int
    info: TensorInfo
    strides: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, in RAM of its own. Raises `CheckpointError` if the file has changed."""
        import torch

        storage, kind = self.storage, self.storage.kind
        data = bytearray(_extent(self.info.shape, self.strides) * kind.size)
        with open_regular(storage.path) as (file, status):
            file.seek(storage.start + self.offset * kind.size)
            if _identity(status) != storage.identity or file.readinto(data) != len(data):
                raise CheckpointError(f"{storage.path} changed while it was read.", "Run the command again.")
        dtype = getattr(torch, kind.name)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(self.info.shape, self.strides).contiguous()


def read_checkpoint(path: Path) -> Any:
    """Content of a file that `torch.save` or pickle wrote: containers, numbers and texts, `StoredTensor` and `Record`.

    Sets are lists, ordered dictionaries and counters are dictionaries, parameters are tensors.

    Raises:
        CheckpointError: The file is missing, damaged or too large, or names something that is not in `RECORDS`.
    """
    with open_regular(path) as (file, status):
        reader = _Reader(path, file, status)
        try:
            return reader.read_zip() if file.read(4) == b"PK\3\4" else reader.read_legacy()
        except (XLError, OSError):
            raise
        except Exception as error:  # the standard library has many for damage
            reason = ascii(f"{type(error).__name__}: {error}")[1:200].rstrip("'.")
            raise CheckpointError(f"{path} is damaged or no checkpoint of PyTorch ({reason}).", REMEDY) from None


class _Reader(pickle._Unpickler):
    """The standard library's reader with fewer opcodes, of which those that call or hash something are replaced."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, path: Path, file: io.BufferedReader, status: os.stat_result) -> None:
        self.window = _Window(file)
        super().__init__(self.window, fix_imports=False, encoding="utf-8")
        codes = [getattr(pickle, name)[0] for name in _ALLOWED.split()]
        self.dispatch = _Opcodes({code: (self.dispatch | self.replaced)[code] for code in codes})  # type: ignore[misc]
        self.path, self.file, self.size, self.identity = path, file, status.st_size, _identity(status)
        self.storages: dict[str, Storage] = {}
        self.n_bytes = 0

    def read_zip(self) -> Any:
        """Content of data.pkl in an archive."""
        end = zipfile._EndRecData(self.file)  # type: ignore[attr-defined]
        if end is None or end[zipfile._ECD_SIZE] > LARGEST_DIRECTORY:  # type: ignore[attr-defined]
            self.refuse("is damaged, or no archive of torch.save")
        with zipfile.ZipFile(self.file) as archive:
            entries = {info.filename: info for info in archive.infolist()}
        [name] = (name for name in entries if name == "data.pkl" or name.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        if folder + "byteorder" in entries:
            start, stop = self.place(entries[folder + "byteorder"])
            self.file.seek(start)
            if self.file.read(min(stop - start, 8)) != b"little":
                self.refuse("has numbers in another order of bytes")
        self.window.move(*self.place(entries[name]))
        tree = self.load()
        for key, storage in self.storages.items():
            storage.start, stop = self.place(entries[f"{folder}data/{key}"])
            if stop - storage.start != storage.n * storage.kind.size:
                self.refuse("has a storage of another size than it says")
        return tree

    def place(self, entry: zipfile.ZipInfo) -> tuple[int, int]:
        """First byte of a file of the archive, which must not be compressed, and the byte after its last one."""
        self.file.seek(entry.header_offset)
        header = self.file.read(30)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        is_plain = not entry.compress_type and not entry.flag_bits & 1 and entry.file_size == entry.compress_size
        if header[:4] != b"PK\3\4" or not is_plain or start + entry.file_size > self.size:
            self.refuse("is damaged, or compressed, which torch.save does not do")
        return start, start + entry.file_size

    def read_legacy(self) -> Any:
        """Content of a file from before the zip format, or of a single pickle."""
        self.window.move(0, self.size)
        if (first := self.load()) != _MAGIC or type(first) is not int:
            return first
        version, machine, tree, keys = (self.load() for _ in range(4))
        if version != _VERSION or machine.get("little_endian") is not True:
            self.refuse("was written on a machine, or in a version of the format, that is not understood")
        at = self.window.at
        for key in keys:
            storage = self.storages[key if type(key) is str else ""]
            self.file.seek(at)
            n = int.from_bytes(self.file.read(8), "little")
            storage.start = at + 8
            at = storage.start + n * storage.kind.size
            if n != storage.n or at > self.size:
                self.refuse("has a storage of another size than it says")
        if any(storage.start < 0 for storage in self.storages.values()):
            self.refuse("lacks a storage")
        return tree

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {problem}.", REMEDY)

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle gets for a name: the type of a storage, or a function that makes a tensor or a record."""
        match whole := f"{module}.{name}":
            case "collections.OrderedDict" | "collections.Counter":
                return _table
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2":
                return self.tensor
            case "torch._utils._rebuild_parameter":
                return lambda tensor, *_: tensor
        if whole not in RECORDS and whole not in _STORAGES:
            self.refuse(f"asks for {ascii(whole)[:100]}, which is not executed: only tensors and plain values are read")
        return _STORAGES.get(whole, lambda *_: Record(whole))

    def persistent_load(self, key: Any) -> Any:
        """The storage, or the class, that a persistent id describes."""
        if type(key) is not tuple or not 4 <= len(key) <= 6:
            self.refuse("has a storage that is not understood")
        if key[0] == "module":
            return key[1]  # the source text of a class follows, which nobody reads
        _, kind, name, _, n, *view = key
        is_known = isinstance(kind, _Numbers) and type(name) is str and type(n) is int and view in ([], [None])
        if not is_known or not 0 <= n * kind.size <= self.size:
            self.refuse("has a storage that is not understood, or larger than the file")
        storage = self.storages.setdefault(name, Storage(self.path, self.identity, kind, n))
        if (storage.kind, storage.n) != (kind, n):
            self.refuse("describes a storage in two ways")
        return storage

    def tensor(self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
        """A tensor within its storage, which holds no number twice."""
        are_tuples = type(shape) is type(strides) is tuple and len(shape) == len(strides) <= MOST_AXES
        if not isinstance(storage, Storage) or not are_tuples:
            self.refuse("has a tensor that is not understood")
        are_sizes = all(type(n) is int and 0 <= n < 2**62 for n in (offset, *shape, *strides))
        extent = _extent(shape, strides) if are_sizes else 0
        self.n_bytes += extent * storage.kind.size
        if not are_sizes or offset + extent > storage.n or math.prod(shape) > extent:
            self.refuse("has a tensor that does not fit its storage")
        if self.n_bytes > MOST_SHARING * self.size:
            self.refuse("has more tensors than fit into it")
        return StoredTensor(storage, offset, TensorInfo(storage.kind.dtype, shape), strides)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
            raise TypeError("a call with too many arguments")
        self.stack[-1] = function(*arguments)

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Record):
            value.state = state
        elif type(value) is not dict:  # attributes of an ordered dictionary, such as versions of modules, are left out
            raise TypeError("only records have a state")

    def set_item(self) -> None:
        self.set_items([self.stack.pop(-2), self.stack.pop()])

    def set_items(self, items: list[Any] | None = None) -> None:
        items = self.pop_mark() if items is None else items
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a nested tuple may take for ever.
            if not (type(key) is str or (type(key) is int and abs(key) < 2**63)) or type(self.stack[-1]) is not dict:
                raise TypeError("a key that is neither a text nor a number")
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


class _Window:
    """A part of a file, of at most `LARGEST_PICKLE` bytes, as a file that ends with an error."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.file, self.at, self.end = file, 0, 0

    def move(self, start: int, stop: int) -> None:
        """Makes it the part from byte `start` to `stop`."""
        self.file.seek(start)
        self.at, self.end = start, min(stop, start + LARGEST_PICKLE)

    def read(self, n: int) -> bytes:
        """Exactly the next `n` bytes."""
        if n > self.end - self.at:
            raise EOFError("a pickle is too long, or too short")
        self.at += n
        return self.file.read(n)

    def readline(self) -> bytes:
        """The rest of a line, at most `LONGEST_NAME` bytes."""
        line = self.file.readline(LONGEST_NAME)
        self.at += len(line)
        if not line.endswith(b"\n") or self.at > self.end:
            raise EOFError("a name is too long")
        return line


def _table(given: Any = None) -> dict[Any, Any]:
    """A dictionary: the given one itself, since a copy would take time in proportion to its size at each call."""
    if given is not None and type(given) is not dict:
        raise TypeError("a table of something else")
    return {} if given is None else given


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Number of elements from the first to the last one of a tensor."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
