"""What a model remembers between calls: a value that is passed in and comes back, never hidden in a module.

`Hidden` is the paper's memory: layer inputs with the gradient stopped, projected afresh at every call; for training.
`KeyValue` is the same memory already projected, which is exact because keys carry no position; for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from xlcli.errors import StateError
from xlcli.ops.span import Span

Project = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Layer inputs (b s d) to keys and values (b h s e)."""


class Memory(Protocol):
    """One layer's memory. `extend` never tells which kind it is."""

    kind: str

    @property
    def length(self) -> int:
        """Tokens remembered."""
        ...

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Memory]:
        """Keys and values (b h s e) of memory and x (b t d), s = m + t, and the memory of the last `keep` of them."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The memory with every tensor (rows first) changed."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What must be saved, rows first."""
        ...


@dataclass(frozen=True)
class Hidden:
    """Past inputs of an attention branch (b m d), gradient stopped."""

    h: Tensor
    kind = "hidden"

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.h.shape[1]

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Memory]:
        """Projects memory and new inputs together."""
        both = torch.cat((self.h.to(x.dtype), x), dim=1) if self.length else x
        k, v = project(both)
        # A copy, because a view would keep the new inputs of the whole call alive as well.
        return k, v, Hidden(both[:, both.shape[1] - keep :].detach().clone())

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

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.stop - self.start

    def extend(self, x: Tensor, project: Project, keep: int) -> tuple[Tensor, Tensor, Memory]:
        """Projects the new inputs only and appends them: amortised O(1) a token, one contiguous slice to read."""
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
        keys = k.new_empty((*k.shape[:2], needed, k.shape[3]))
        values = v.new_empty((*v.shape[:2], needed, v.shape[3]))
        keys[:, :, :length] = self._live(self.keys)
        values[:, :, :length] = self._live(self.values)
        return keys, values, 0, length


MAX_SLACK = 1024
"""Most entries a buffer holds beyond what is remembered: bounds waste, keeps shifting rare."""

MEMORIES: dict[str, Callable[..., Memory]] = {
    "hidden": lambda tensors: Hidden(tensors["h"]),
    "keyvalue": lambda tensors: KeyValue(tensors["k"], tensors["v"], 0, tensors["k"].shape[2]),
}
"""How each kind of memory is made from its tensors."""


@dataclass(frozen=True)
class State:
    """Everything a model carries from call to call. `seen` counts tokens read since the start, in every row."""

    layers: tuple[Memory, ...]
    seen: int
    span: Span

    @property
    def length(self) -> int:
        """Tokens remembered by each layer."""
        return self.layers[0].length

    @property
    def bytes(self) -> int:
        """Size of what is remembered."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """The state with every tensor changed."""
        return replace(self, layers=tuple(layer.map(change) for layer in self.layers))

    def rows(self, index: Sequence[int] | Tensor) -> State:
        """The rows named, in that order, copied; `rows([0] * 8)` makes eight continuations of row 0."""

        def select(t: Tensor) -> Tensor:
            return t.index_select(0, torch.as_tensor(index, device=t.device))

        return self.map(select)

    def fork(self) -> State:
        """A copy that shares nothing, so that this one and the copy may both be continued."""
        return self.map(torch.clone)

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name."""
        return {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.tensors().items()}

    def describe(self) -> dict[str, str]:
        """What a file must say besides the tensors."""
        return {
            "memory": self.layers[0].kind,
            "layers": str(len(self.layers)),
            "seen": str(self.seen),
            "span": f"{self.span.kind} {self.span.mem_len} {self.span.segment_len}",
        }

    @staticmethod
    def restore(tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> State:
        """The state that `tensors` and `describe` came from; `StateError` when they do not fit together."""
        try:
            make = MEMORIES[description["memory"]]
            kind, mem_len, segment_len = description["span"].split()
            if kind not in ("uniform", "growing", "segment"):
                raise StateError(f"the state has an unknown span '{kind}'.", "Start without --state-in.")
            n_layers, seen = int(description["layers"]), int(description["seen"])
            layers = []
            for i in range(n_layers):
                prefix = f"{i}."
                layers.append(make({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}))
            span = Span(kind, int(mem_len), int(segment_len))  # type: ignore[arg-type]
        except (KeyError, ValueError, IndexError) as error:
            raise StateError(f"the state is incomplete: {error}.", "Start without --state-in.") from None
        return State(tuple(layers), seen, span)
