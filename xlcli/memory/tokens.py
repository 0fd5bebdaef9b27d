"""Memory of the latest tokens, for softmax attention: layer inputs, or keys and values in buffers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from xlcli.memory.base import Memory
from xlcli.ops.layers import dequantize, quantize

MAX_SLACK = 1024  # most unused rows in a buffer: more waste memory, fewer move rows more often
ALIGNMENT = 64  # alignment of floating-point rows in bytes, as by PyTorch's CPU allocator; size of a 512-bit register
SINKS = {"sink_k": "bhse", "sink_v": "bhsw"}  # axes of the tensors of sinks, in float32 or wider
Project = Callable[[Tensor], tuple[Tensor, Tensor]]  # inputs (b n d) of the latest tokens to keys and values (b h n e)


class TokenMemory(Memory):
    """Memory of the latest tokens, for softmax attention."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens."""

    @abstractmethod
    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, TokenMemory]:
        """Keys and values (b h s e) of remembered and new tokens, and the memory of the last `keep` tokens.

        `x` are inputs (b t d) of the new tokens; `project` makes their keys and values.
        """


@dataclass(frozen=True)
class TokenBuffers(TokenMemory):
    """Rows `start` to `stop` of buffers (b h m ...) with unused rows at their end: one for each entry of `axes` with m.

    In inference mode `extend` writes into the buffers: do not use the old memory any more, or copy it by `State.fork`.
    """

    buffers: tuple[Tensor, ...]
    start: int
    stop: int
    sinks: tuple[Tensor, ...] = ()

    @staticmethod
    @abstractmethod
    def encode(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Rows to store of new keys (b h t e) and values (b h t w)."""

    @abstractmethod
    def decode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows, in the number types of `k` and `v`."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Memory of tensors without unused rows."""
        parts = tuple(tensors[name] for name in cls.axes if name in tensors)
        n = sum("m" in axes for axes in cls.axes.values())
        return cls(parts[:n], 0, parts[0].shape[2], parts[n:])

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.axes, self.rows() + self.sinks, strict=False))

    def rows(self) -> tuple[Tensor, ...]:
        return tuple(buffer[:, :, self.start : self.stop] for buffer in self.buffers)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.buffers[0].dtype

    @property
    def length(self) -> int:
        return self.stop - self.start

    def with_sinks(self, *new: Tensor) -> Self:
        """Memory with further sinks: keys (b h t e) and values (b h t w), without gradient."""
        sinks = tuple(x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in new)
        if self.sinks:
            sinks = tuple(torch.cat(parts, dim=2) for parts in zip(self.sinks, sinks, strict=True))
        return replace(self, sinks=sinks)

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Self]:
        """`TokenMemory.extend`, which projects and appends the new inputs only: amortized O(1) per token.

        At inference new keys and values are rounded to the type of the memory before their first use, so a result does
        not depend on the division of a text into calls. In training the memory has no gradient.
        """
        new_keys, new_values = project(x)
        new_rows = self.encode(new_keys, new_values)  # as they are stored: rounded, for example, with their scales
        if torch.is_inference_mode_enabled():
            whole = self.reserve(new_keys.shape[2], keep, new_rows)
            for rows_of_memory, rows in zip(whole.rows(), new_rows, strict=True):
                rows_of_memory[:, :, self.length :] = rows
            remembered = whole.keep(keep)
        else:
            whole = self._with_rows(new_rows)
            if keep == new_keys.shape[2]:  # the new rows, which are in tensors of their own
                kept = tuple(rows.detach() for rows in new_rows)
            else:  # views would keep the keys and values of the whole call alive
                kept = tuple(rows.detach().clone() for rows in whole.keep(keep).rows())
            remembered = replace(self, buffers=kept, start=0, stop=keep)
        keys, values = whole.decode(new_keys, new_values)  # of remembered and new tokens, in the type of the new ones
        return keys, values, remembered

    def _with_rows(self, new_rows: tuple[Tensor, ...]) -> Self:
        """This memory with new rows at its end, in new tensors, through which the new rows get gradients."""
        joined = new_rows
        if self.length:
            pairs = zip(self.rows(), new_rows, strict=True)
            joined = tuple(torch.cat((old.to(new.dtype), new), dim=2) for old, new in pairs)
        return replace(self, buffers=joined, start=0, stop=joined[0].shape[2])

    def reserve(self, n_new: int, keep: int, like: Sequence[Tensor] | None = None) -> Self:
        """This memory with `n_new` more rows at its end, which the caller has to write.

        They are in the same buffers if there is room, else all rows move: to the beginning of these buffers, or to new
        ones if these are too small or far too large. `keep`: number of tokens in the memory after the call. `like` are
        the new rows, if they may be of another type.
        """
        buffers, length = self.buffers, self.length
        capacity = buffers[0].shape[2]
        if self.stop + n_new <= capacity:
            return type(self)(buffers, self.start, self.stop + n_new, self.sinks)
        slack = max(n_new, min(max(keep, length), MAX_SLACK))
        needed = length + n_new + slack
        has_right_size = length + n_new <= capacity <= 2 * needed
        would_overwrite_itself = self.start < length
        if would_overwrite_itself or not has_right_size:
            models = buffers if like is None else like
            buffers = tuple(_new_buffer(model, old, needed) for model, old in zip(models, buffers, strict=True))
        for buffer, rows in zip(buffers, self.rows(), strict=True):
            buffer[:, :, :length] = rows
        return type(self)(buffers, 0, length + n_new, self.sinks)

    def keep(self, n: int) -> Self:
        """Memory of the latest `n` tokens, in the same buffers."""
        return type(self)(self.buffers, self.stop - n, self.stop, self.sinks)


def _new_buffer(like: Tensor, old: Tensor, capacity: int) -> Tensor:
    """Buffer for `capacity` rows like those in `like`, in the narrower type of `old` and `like`.

    Rows of floating-point numbers begin at multiples of `ALIGNMENT` bytes. Matrix products (MKL, cuBLAS) sum in an
    order that depends on the alignment of their operands: with packed rows of width 41, for example, results would
    depend on `start`, which differs between a memory and its copy.
    """
    dtype = min(old.dtype, like.dtype, key=lambda dtype: dtype.itemsize)
    b, h, _, *width = like.shape
    if not (dtype.is_floating_point and width):
        return like.new_empty((b, h, capacity, *width), dtype=dtype)
    step = ALIGNMENT // dtype.itemsize
    aligned_width = math.ceil(width[0] / step) * step
    return like.new_empty((b, h, capacity, aligned_width), dtype=dtype)[..., : width[0]]


@dataclass(frozen=True)
class Hidden(TokenMemory):
    """Past inputs h (b m d) of an attention branch, detached from the graph."""

    h: Tensor
    kind = "hidden"
    axes: ClassVar[Mapping[str, str]] = {"h": "bmd"}

    @property
    def length(self) -> int:
        return self.h.shape[1]

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Hidden]:
        """Projects memory and new inputs together."""
        both = torch.cat((self.h.to(x.dtype), x), dim=1)
        k, v = project(both)
        # A copy: a view would keep the inputs of the whole call alive.
        return k, v, Hidden(both[:, both.shape[1] - keep :].detach().clone())


class KeyValue(TokenBuffers):
    """Past keys (b h m e) and values (b h m w), in the type in which they are computed or in a narrower one.

    At inference a memory in 16 bits stays in 16 bits. In training, memory is detached from the graph, and was projected
    with the weights of earlier steps.
    """

    kind = "keyvalue"
    axes: ClassVar[Mapping[str, str]] = {"k": "bhme", "v": "bhmw"} | SINKS

    @staticmethod
    def encode(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Unchanged: writing into the buffers rounds."""
        return k, v

    def decode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Slices of the buffers, or copies of them in a wider type."""
        keys, values = self.rows()
        return keys.to(k.dtype), values.to(v.dtype)


class Int8KeyValue(TokenBuffers):
    """Past keys (b h m e) and values (b h m w) in int8, and their scales (b h m) in float32. For inference."""

    kind = "keyvalue-int8"
    axes: ClassVar[Mapping[str, str]] = {
        **{"keys": "bhme", "values": "bhmw", "key_scales": "bhm", "value_scales": "bhm"},
        **SINKS,
    }
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {
        **dict.fromkeys(("keys", "values"), torch.int8),
        **dict.fromkeys(("key_scales", "value_scales"), torch.float32),
    }

    @staticmethod
    def encode(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        keys, key_scales = quantize(k, torch.float32)
        values, value_scales = quantize(v, torch.float32)
        return keys, values, key_scales, value_scales

    def decode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = self.rows()
        return dequantize(keys, key_scales).to(k.dtype), dequantize(values, value_scales).to(v.dtype)
