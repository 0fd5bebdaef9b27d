"""Base class of memory kinds, and the simplest kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F


class Memory:
    """Memory of one layer: an immutable value made of named tensors, batch axis first."""

    kind: ClassVar[str]  # name in saved states
    axes: ClassVar[Mapping[str, str]]
    """Axis letters of each tensor; m (tokens), c (slots of a bucket) and s (sinks) may change while the model runs.
    A memory without sinks has no tensors for them."""
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}
    """Types of tensors that have one type only. The others are floating point; keys and values have the same type,
    but sinks may have a wider one."""

    sinks: tuple[Tensor, ...] = ()  # keys (b h s e) without positions, values (b h s w) of the first tokens, if kept
    counts_tokens: ClassVar[bool] = False  # whether the content depends on the number of tokens read, not length alone

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Memory of the tensors that `tensors` returned; by default they are its fields."""
        return cls(*(tensors[name] for name in cls.axes))

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, as saved."""
        return {name: getattr(self, name) for name in self.axes}

    def empty(self) -> Self:
        """Memory of no tokens, of this kind, shape and batch size: zeros, and no tokens, slots or sinks."""
        zeros = {}
        for name, t in self.tensors().items():
            axes = self.axes[name]
            if "s" in axes:  # a memory without sinks has no such tensor
                continue
            none_or_all = tuple(slice(0) if axis in "mc" else slice(None) for axis in axes)
            zeros[name] = torch.zeros_like(t[none_or_all])
        return self.from_tensors(zeros)

    def overwrite_earlier(self) -> Self:
        """This memory, in the buffers of the one that it extends if possible; do not use that one again."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes that are fixed for a layer: all except batch, tokens, slots and sinks."""
        sizes: dict[str, int] = {}
        for name, t in self.tensors().items():
            sizes |= zip(self.axes[name], t.shape, strict=True)
        return tuple(n for axis, n in sizes.items() if axis not in "bmcs")

    @property
    def n_sinks(self) -> int:
        return self.sinks[0].shape[2] if self.sinks else 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Number type of past keys and values; None if there are none."""
        return None

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Memory with `change` applied to every tensor."""
        return self.from_tensors({name: change(t) for name, t in self.tensors().items()})

    @classmethod
    def join(cls, memories: Sequence[Memory]) -> Self:
        """Memory of the sequences of all `memories`, of this kind; zeros before the tokens of the shorter ones."""
        all_tensors = [memory.tensors() for memory in memories]
        joined = {}
        for name in all_tensors[0]:
            parts = [tensors[name] for tensors in all_tensors]
            if "m" in cls.axes[name]:
                parts = _padded(parts, axis=cls.axes[name].index("m"))
            joined[name] = torch.cat(parts)
        return cls.from_tensors(joined)

    @classmethod
    def check(cls, tensors: Mapping[str, Tensor], batch_size: int) -> None:
        """Checks names, types and shapes of loaded tensors; an axis, such as h, has one length. `ValueError` else."""
        needed = [name for name, axes in cls.axes.items() if "s" not in axes]  # sinks may be missing, all of them
        if set(tensors) not in (set(needed), set(cls.axes)):
            names = ", ".join(sorted(tensors)) or "none"
            raise ValueError(f"memory '{cls.kind}' needs the tensors {', '.join(needed)}; found {names}")
        sizes = {"b": batch_size}
        key_value_types = set()
        for name, t in tensors.items():
            axes = cls.axes[name]
            has_fixed_type = name in cls.dtypes
            is_right_type = t.dtype == cls.dtypes[name] if has_fixed_type else t.is_floating_point()
            if t.ndim != len(axes) or not is_right_type:
                raise ValueError(f"tensor '{name}' of memory '{cls.kind}' has the wrong type or number of axes")
            for axis, n in zip(axes, t.shape, strict=True):
                if axis not in sizes:
                    sizes[axis] = n
                if sizes[axis] != n:
                    raise ValueError(f"tensor '{name}' of memory '{cls.kind}' has the wrong shape {list(t.shape)}")
            are_keys_or_values = "h" in axes and "s" not in axes
            if are_keys_or_values and not has_fixed_type:
                key_value_types.add(t.dtype)
        if len(key_value_types) > 1:
            raise ValueError(f"keys and values of memory '{cls.kind}' have different number types")


def _padded(parts: Sequence[Tensor], axis: int) -> list[Tensor]:
    """The tensors with zeros in front along an axis, as long as the longest of them."""
    longest = max(t.shape[axis] for t in parts)
    padded = []
    for t in parts:
        later_axes = [0, 0] * (t.ndim - 1 - axis)  # `pad` takes the last axis first
        padded.append(F.pad(t, [*later_axes, longest - t.shape[axis], 0]))
    return padded


@dataclass(frozen=True)
class Sums(Memory):
    """Sums over all tokens read: s (b h f e) of key features times values, z (b h f) of key features."""

    s: Tensor
    z: Tensor
    kind = "sums"
    axes: ClassVar[Mapping[str, str]] = {"s": "bhfe", "z": "bhf"}
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"s": torch.float64, "z": torch.float64}
