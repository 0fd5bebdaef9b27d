"""What a model remembers between calls: a value that is passed in and comes back, never hidden in a module.

`Hidden` is the paper's memory: layer inputs with the gradient stopped, projected afresh at every call; for training.
`KeyValue` is the same memory already projected, which is exact because an encoding never changes a key that has been
read; for inference. `Sums` is the memory of linear attention, `Buckets` that of hashed attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from xlcli.errors import StateError
from xlcli.ops.lsh_table import Table
from xlcli.ops.span import Span

Project = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Inputs (b n d) of the n latest tokens to their keys and values (b h n e)."""

NO_SETTINGS: Mapping[str, int] = {}


class Memory(Protocol):
    """One layer's memory."""

    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        """What must agree between memories of the same layer: every axis but rows and tokens."""
        ...

    @property
    def settings(self) -> Mapping[str, int]:
        """Inference settings that this memory fixes."""
        ...

    def empty(self) -> Memory:
        """Memory of the same kind, shape and batch that holds nothing."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with every tensor (rows first) changed."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What must be saved, rows first."""
        ...


class Entries(Memory, Protocol):
    """A memory of single tokens. `extend` never tells which kind it is."""

    @property
    def length(self) -> int:
        """Tokens remembered."""
        ...

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Entries]:
        """Keys and values (b h s e) of memory and x (b t d), s = m + t, and the memory of the last `keep` of them."""
        ...


@dataclass(frozen=True)
class Hidden:
    """Past inputs of an attention branch (b m d), gradient stopped."""

    h: Tensor
    kind = "hidden"
    settings = NO_SETTINGS

    @property
    def shape(self) -> tuple[int, ...]:
        """(d)."""
        return tuple(self.h.shape[2:])

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.h.shape[1]

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Entries]:
        """Projects memory and new inputs together."""
        both = torch.cat((self.h.to(x.dtype), x), dim=1) if self.length else x
        k, v = project(both)
        # A copy, because a view would keep the new inputs of the whole call alive as well.
        return k, v, Hidden(both[:, both.shape[1] - keep :].detach().clone())

    def empty(self) -> Memory:
        """No inputs."""
        return Hidden(self.h.new_empty(len(self.h), 0, *self.shape))

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with its tensor changed."""
        return Hidden(change(self.h))

    def tensors(self) -> dict[str, Tensor]:
        """h."""
        return {"h": self.h}


@dataclass(frozen=True)
class KeyValue:
    """Past keys and values (b h m e), a window on buffers with slack.

    Under inference mode `extend` writes in place and so consumes its receiver: take `State.fork` before branching.
    """

    keys: Tensor
    values: Tensor
    start: int
    stop: int
    kind = "keyvalue"
    settings = NO_SETTINGS

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, e of keys, e of values)."""
        return self.keys.shape[1], self.keys.shape[3], self.values.shape[3]

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.stop - self.start

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Entries]:
        """Projects the new inputs only and appends them: amortized O(1) a token, one contiguous slice to read."""
        k, v = project(x)
        new = k.shape[2]
        if not torch.is_inference_mode_enabled():
            k, v = torch.cat((self._live(self.keys), k), dim=2), torch.cat((self._live(self.values), v), dim=2)
            return k, v, KeyValue(k, v, k.shape[2] - keep, k.shape[2])
        keys, values, start, stop = self._with_room(new, keep, k, v)
        keys[:, :, stop : stop + new] = k
        values[:, :, stop : stop + new] = v
        stop += new
        return keys[:, :, start:stop], values[:, :, start:stop], KeyValue(keys, values, stop - keep, stop)

    def empty(self) -> Memory:
        """No keys and values."""
        (b, h, _, e), w = self.keys.shape, self.values.shape[3]
        return KeyValue(self.keys.new_empty(b, h, 0, e), self.values.new_empty(b, h, 0, w), 0, 0)

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with its tensors changed, slack dropped."""
        return KeyValue(change(self._live(self.keys)), change(self._live(self.values)), 0, self.length)

    def tensors(self) -> dict[str, Tensor]:
        """Keys and values without the slack."""
        return {"k": self._live(self.keys), "v": self._live(self.values)}

    def _live(self, buffer: Tensor) -> Tensor:
        return buffer[:, :, self.start : self.stop]

    def _with_room(self, new: int, keep: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """Buffers in which `new` more entries fit; what is remembered moves to the front when they are full."""
        capacity = self.keys.shape[2]
        if self.stop + new <= capacity:
            return self.keys, self.values, self.start, self.stop
        length = self.length
        slack = max(new, min(max(keep, length), MAX_SLACK))
        needed = length + new + slack
        if length + new <= capacity <= 2 * needed and self.start >= length:
            self.keys[:, :, :length] = self._live(self.keys)
            self.values[:, :, :length] = self._live(self.values)
            return self.keys, self.values, 0, length
        keys, values = _aligned_buffer(k, needed), _aligned_buffer(v, needed)
        keys[:, :, :length] = self._live(self.keys)
        values[:, :, :length] = self._live(self.values)
        return keys, values, 0, length


def _aligned_buffer(like: Tensor, capacity: int) -> Tensor:
    """Buffer (b h capacity e) whose rows all begin at multiples of `ALIGNMENT` bytes.

    Matrix products sum in an order that depends on the alignment of their operands (Intel MKL, cuBLAS). With rows packed
    at a width such as 41 the result would depend on the row where the window begins, which differs between a state and
    its copy.
    """
    width = like.shape[3]
    step = ALIGNMENT // like.element_size()
    return like.new_empty((*like.shape[:2], capacity, -(-width // step) * step))[..., :width]


@dataclass(frozen=True)
class Sums:
    """Running sums of linear attention: s (b h f e) of key features times values, z (b h f) of key features."""

    s: Tensor
    z: Tensor
    kind = "sums"
    settings = NO_SETTINGS

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, f, e)."""
        return tuple(self.s.shape[1:])

    def empty(self) -> Memory:
        """Sums of no tokens."""
        return self.map(torch.zeros_like)

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with its tensors changed."""
        return Sums(change(self.s), change(self.z))

    def tensors(self) -> dict[str, Tensor]:
        """s and z."""
        return {"s": self.s, "z": self.z}


@dataclass(frozen=True)
class Buckets:
    """The latest tokens of every hash bucket: constant in size, however far back the oldest of them lies.

    `made` says that writing into the table hurts nobody else, which is so once `writable` has copied it. As with
    `KeyValue`, under inference mode that consumes the receiver.
    """

    table: Table
    made: bool = False
    kind = "buckets"

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, r, n, e of keys, e of values)."""
        return *self.table.counts.shape[1:], self.table.keys.shape[-1], self.table.values.shape[-1]

    @property
    def n_rounds(self) -> int:
        """Rounds of hashing."""
        return self.table.counts.shape[2]

    @property
    def settings(self) -> Mapping[str, int]:
        """The number of hash rounds."""
        return {"n_hashes": self.n_rounds}

    def writable(self, bucket_size: int) -> Buckets:
        """The memory in a table that may be changed in place: its own where that is allowed, else a copy."""
        if self.made and torch.is_inference_mode_enabled():
            return self
        return Buckets(self.table.copy(bucket_size), made=True)

    def empty(self) -> Buckets:
        """A memory of the same shape that nothing has arrived in."""
        return Buckets(Table.empty(self.table.keys, *self.table.counts.shape))

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with its tensors changed."""
        return Buckets(Table(*(change(t) for t in self.table)))

    def tensors(self) -> dict[str, Tensor]:
        """The table's."""
        return self.table._asdict()


MAX_SLACK = 1024
"""Most entries a buffer holds beyond what is remembered: bounds waste, keeps shifting rare."""

ALIGNMENT = 64
"""Bytes; the alignment of PyTorch's CPU allocator and of a vector register of 512 bits."""

MEMORIES: dict[str, Callable[..., Memory]] = {
    "hidden": lambda tensors: Hidden(tensors["h"]),
    "keyvalue": lambda tensors: KeyValue(tensors["k"], tensors["v"], 0, tensors["k"].shape[2]),
    "sums": lambda tensors: Sums(tensors["s"], tensors["z"]),
    "buckets": lambda tensors: Buckets(Table(**tensors)),
}
"""How each kind of memory is made from its tensors."""

AXES = {
    "hidden": {"h": "bmd"},
    "keyvalue": {"k": "bhme", "v": "bhmw"},
    "sums": {"s": "bhfe", "z": "bhf"},
    "buckets": {"keys": "bhrnce", "values": "bhrncw", "positions": "bhrnc", "global_ranks": "bhrncr", "counts": "bhrn"},
}
"""The axes of each kind's tensors."""

INTEGERS = {"positions", "global_ranks", "counts"}
"""Tensors of whole numbers; all others are of floating point."""


@dataclass(frozen=True)
class State:
    """Everything a model carries from call to call.

    `layers` holds a memory for each block in the order of use, and for each step when blocks are applied several times.
    `seen` counts tokens read since the start, in every row; `offsets` (b) says where in its text each row began.
    """

    layers: tuple[Memory, ...]
    seen: int
    span: Span
    offsets: Tensor

    @property
    def batch_size(self) -> int:
        """Texts read side by side."""
        return self.offsets.shape[0]

    @property
    def bytes(self) -> int:
        """Size of what is remembered."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """The state with every tensor changed."""
        return replace(self, layers=tuple(layer.map(change) for layer in self.layers), offsets=change(self.offsets))

    def select(self, index: Sequence[int] | Tensor) -> State:
        """The rows named, in that order, copied; `rows([0] * 8)` makes eight continuations of row 0."""

        def select(t: Tensor) -> Tensor:
            return t.index_select(0, torch.as_tensor(index, device=t.device))

        return self.map(select)

    def fork(self) -> State:
        """A copy that shares nothing, so that this one and the copy may both be continued."""
        return self.map(torch.clone)

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name."""
        memories = {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.tensors().items()}
        return {"offsets": self.offsets, **memories}

    def describe(self) -> dict[str, str]:
        """What a file must say besides the tensors."""
        return {
            "memory": " ".join(layer.kind for layer in self.layers),
            "seen": str(self.seen),
            "span": f"{self.span.kind} {self.span.mem_len} {self.span.segment_len}",
        }

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> State:
        """The state that `tensors` and `describe` came from; `StateError` when they do not fit together."""
        try:
            layers = []
            for i, kind in enumerate(description["memory"].split()):
                prefix = f"{i}."
                own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                _check(kind, own, rows=len(tensors["offsets"]))
                layers.append(MEMORIES[kind](own))
            state = State(tuple(layers), int(description["seen"]), _span(description["span"]), tensors["offsets"])
            if not 0 <= state.seen < 2**62:
                raise ValueError(f"{state.seen} tokens seen")
            if state.tensors().keys() != tensors.keys():
                raise ValueError("there are tensors of no memory")
            if (state.offsets.ndim, state.offsets.dtype) != (1, torch.int64):
                raise ValueError("'offsets' is no list of places")
            return state
        except (KeyError, ValueError, TypeError) as error:
            raise StateError(f"the state does not fit together: {error}.", "Start without --state-in.") from None


def _check(kind: str, tensors: Mapping[str, Tensor], rows: int) -> None:
    """`ValueError` or `KeyError` unless these are the tensors of one memory of so many rows."""
    if tensors.keys() != AXES[kind].keys():
        raise ValueError(f"a memory of kind {kind} with {', '.join(sorted(tensors)) or 'nothing'}")
    sizes = {"b": rows}
    for name, axes in AXES[kind].items():
        t = tensors[name]
        if t.ndim != len(axes) or not (t.dtype == torch.int64 if name in INTEGERS else t.is_floating_point()):
            raise ValueError(f"'{name}' is no memory of kind {kind}")
        if any(sizes.setdefault(axis, n) != n for axis, n in zip(axes, t.shape, strict=True)):
            raise ValueError(f"'{name}' has another size than the rest")


def _span(text: str) -> Span:
    kind, mem_len, segment_len = text.split()
    span = Span(kind, int(mem_len), int(segment_len))  # type: ignore[arg-type]
    legal = kind == "segment" if span.mem_len == 0 else kind in ("uniform", "growing") and span.mem_len > 0
    if not legal or span.segment_len < 1:
        raise ValueError(f"'{text}' is no span")
    return span
