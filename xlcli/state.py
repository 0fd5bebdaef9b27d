"""State of a model between calls: an immutable value that is passed in and returned. Modules store nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xlcli.config import MemoryDtype
from xlcli.errors import StateError
from xlcli.files.tensors import prefixed, with_prefix
from xlcli.memory import Memory, restored
from xlcli.memory.context_cache import ContextCache
from xlcli.memory.online import Adaptation, OnlineMemory
from xlcli.ops.span import Span

ONLINE_MEMORIES: dict[str, type[OnlineMemory]] = {"adaptation": Adaptation, "cache": ContextCache}
"""Field of `State` to class, of values that a model learns while it reads."""


@dataclass(frozen=True)
class State:
    """Memories of all layers, and the position in the text."""

    layers: tuple[Memory, ...]  # one for each block, in the order of use; in a universal stack for each step too
    seen: int  # number of tokens read since the start, the same for every sequence of the batch
    span: Span
    offsets: Tensor  # position (b) in its text at which each sequence began
    last: Tensor  # latest tokens (b n), -1 before the first: 1 for a bigram embedding, all that windows share
    adaptation: Adaptation | None = None
    cache: ContextCache | None = None
    lag: int = 0  # largest number of tokens by which a sequence is behind `seen`; only joined states have any

    @property
    def batch_size(self) -> int:
        return self.offsets.shape[0]

    @property
    def bytes(self) -> int:
        """Size of memory and of learned values in bytes, without unused buffer space."""
        memories: list[Memory | OnlineMemory] = [*self.layers, *self.online.values()]
        n_bytes = 0
        for memory in memories:
            n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in memory.tensors().values())
        return n_bytes

    @property
    def online(self) -> dict[str, OnlineMemory]:
        """Learned values by the name of their field."""
        values: dict[str, OnlineMemory] = {}
        if self.adaptation is not None:
            values["adaptation"] = self.adaptation
        if self.cache is not None:
            values["cache"] = self.cache
        return values

    @property
    def memory_dtype(self) -> MemoryDtype:
        """Number type of past keys and values; `float32` if they are not rounded, or no layer has any."""
        dtypes = {layer.dtype for layer in self.layers}
        if torch.int8 in dtypes:
            return "int8"
        if torch.bfloat16 in dtypes:
            return "bfloat16"
        return "float32"

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """State with `change` applied to every tensor that has one row for each sequence."""
        return replace(
            self,
            layers=tuple(layer.map(change) for layer in self.layers),
            offsets=change(self.offsets),
            last=change(self.last),
        )

    def select(self, index: Sequence[int] | Tensor) -> State:
        """Copy of the sequences `index`, in that order; `select([0] * 8)` gives eight copies of the first one.

        They share learned values.
        """
        lag = 0
        if self.lag:  # those that are behind have negative offsets
            lag = max(0, -int(self.offsets[list(index)].min()))
        return replace(self.map(lambda t: t.index_select(0, torch.as_tensor(index, device=t.device))), lag=lag)

    @property
    def join_keys(self) -> list[Hashable]:
        """Key of each sequence; those with equal keys can be joined, one whose key is None with no other."""
        offsets = self.offsets.tolist()
        n_sequences = len(offsets)
        begins_within_text = n_sequences == 1 and offsets[0] != 0
        if self.online or begins_within_text:
            return [None] * n_sequences
        kinds = tuple((layer.kind, layer.dtype, layer.shape, layer.n_sinks) for layer in self.layers)
        if any(layer.counts_tokens for layer in self.layers):  # they must have read equally many tokens
            return [(self.span, kinds, self.seen + offset) for offset in offsets]
        if self.span.kind == "segment":  # their segments must end together
            return [(self.span, kinds, self.span.next_position(self.seen))] * n_sequences
        return [(self.span, kinds)] * n_sequences

    @staticmethod
    def join(states: Sequence[State]) -> State:
        """Copies of the sequences of all states as the sequences of one state; their `join_keys` must be equal.

        They get one number of tokens read, `seen`, that of the longest. One that has read n fewer counts as if it had
        begun n tokens before its text: its offset falls by n, so that `offset + seen`, the position of its next token,
        stays, and its memory gets padding in front, which no token attends to. `lag` is the largest n.
        """
        seen_by_longest = max(state.seen for state in states)
        seen_by_shortest = min(state.seen - state.lag for state in states)
        layers: list[Memory] = []
        for memories_of_layer in zip(*(state.layers for state in states), strict=True):
            layers.append(type(memories_of_layer[0]).join(memories_of_layer))
        return replace(
            states[0],
            layers=tuple(layers),
            seen=seen_by_longest,
            offsets=torch.cat([state.offsets - (seen_by_longest - state.seen) for state in states]),
            last=torch.cat([state.last for state in states]),
            lag=seen_by_longest - seen_by_shortest,
        )

    def overwrite_earlier(self) -> State:
        """This state, written over the memories of the state before it, which must not be used any more.

        Saves copies of large memories in training; after the backward pass, which needs the earlier state.
        """
        return replace(self, layers=tuple(layer.overwrite_earlier() for layer in self.layers))

    def fork(self) -> State:
        """Copy that shares no tensor, so that both states can be continued."""
        learned: dict[str, Any] = {name: value.fork() for name, value in self.online.items()}
        return replace(self.map(torch.clone), **learned)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: `offsets`, `last`, and `0.k` for tensor k of the memory of layer 0.

        Those of learned values begin with the name of their field.
        """
        tensors = {"offsets": self.offsets, "last": self.last}
        for i, layer in enumerate(self.layers):
            tensors |= prefixed(f"{i}.", layer.tensors())
        for name, value in self.online.items():
            tensors |= prefixed(f"{name}.", value.tensors())
        return tensors

    def describe(self) -> dict[str, str]:
        """Metadata to save with the tensors: memory kinds, tokens read, span, and entries of learned values."""
        kinds = " ".join(layer.kind for layer in self.layers)
        description = {"memory": kinds, "seen": str(self.seen), "span": self.span.text}
        for name, value in self.online.items():
            description |= prefixed(f"{name}.", value.describe())
        return description

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> State:
        """State from the results of `tensors` and `describe`; `StateError` if they do not describe one."""
        try:
            offsets = tensors["offsets"]
            layers = restored(description["memory"], tensors, len(offsets))
            span = Span.parse(description["span"])
            learned: dict[str, Any] = {}
            for name, kind in ONLINE_MEMORIES.items():
                entries = with_prefix(f"{name}.", description)
                if entries:
                    learned[name] = kind.restore(with_prefix(f"{name}.", tensors), entries)
            last = tensors.get("last", offsets.new_empty(len(offsets), 0))  # the first versions saved none
            state = State(layers, int(description["seen"]), span, offsets, last, **learned)
            if not 0 <= state.seen < 2**62:
                raise ValueError(f"{state.seen} tokens read")
            unknown = tensors.keys() - state.tensors().keys()
            if unknown:
                raise ValueError(f"unknown tensor '{min(unknown)}'")
            for tensor, n_axes in ((state.offsets, 1), (state.last, 2)):
                if (tensor.ndim, len(tensor), tensor.dtype) != (n_axes, state.batch_size, torch.int64):
                    raise ValueError("offsets or latest tokens are not int64, a row for each sequence")
            return state
        except KeyError as error:
            raise StateError(f"the state is damaged: {error} is missing or unknown.", _REMEDY) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise StateError(f"the state is damaged: {error}.", _REMEDY) from None


_REMEDY = "Start without this state."
