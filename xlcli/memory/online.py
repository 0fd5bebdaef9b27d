"""Values that a model learns while it reads: their base class, and weights adapted to the text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from xlcli.files.tensors import with_prefix
from xlcli.memory import Memory, restored

UNKNOWN = -1  # token that is not known yet, or not part of the text


class OnlineMemory(ABC):
    """Immutable value of one text, shared by all sequences that continue it.

    Under inference mode a scorer may write into its tensors, so the old value must not be used any more; copy it with
    `State.fork` to continue it twice. It must be continued with `settings`, keys and values of `LearningConfig`.
    """

    settings: Mapping[str, Any]

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, as saved."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Metadata to save with the tensors, at least one entry."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> Self:
        """Makes a value of the results of `tensors` and `describe`; `KeyError` or `ValueError` if they are damaged."""

    def fork(self) -> Self:
        """Copy that shares no tensor."""
        with torch.inference_mode(False):
            return self.restore({name: t.clone() for name, t in self.tensors().items()}, self.describe())


@dataclass(frozen=True)
class Adaptation(OnlineMemory):
    """Adapted weights, state of their optimizer, and the unfinished block of text."""

    settings: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]  # mean squared gradients and learned rates, by name (`online/adaptation.py`)
    n_steps: int
    inputs: Tensor  # tokens (n) of the unfinished block
    targets: Tensor  # tokens (n) that follow them, `UNKNOWN` where nothing is to be learned
    last: Tensor  # tokens (1 n) before the block, as `State.last`; of any number if the block is empty
    start: tuple[Memory, ...] = ()  # memories of all layers before the block; empty if the block is

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: `weights.NAME`, `moments.NAME`, `inputs`, `targets`, `last`, and `start.0.k`."""
        tensors = {f"weights.{name}": t for name, t in self.weights.items()}
        tensors |= {f"moments.{name}": t for name, t in self.moments.items()}
        for i, layer in enumerate(self.start):
            tensors |= {f"start.{i}.{name}": t for name, t in layer.tensors().items()}
        return tensors | {"inputs": self.inputs, "targets": self.targets, "last": self.last}

    def describe(self) -> dict[str, str]:
        kinds = " ".join(layer.kind for layer in self.start)
        return {"settings": json.dumps(self.settings), "n_steps": str(self.n_steps), "start": kinds}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> Adaptation:
        """Value from the results of `tensors` and `describe`; shapes of weights and memories are not checked here."""
        weights, moments, memories = (with_prefix(f"{name}.", tensors) for name in ("weights", "moments", "start"))
        single = {name: t for name, t in tensors.items() if "." not in name}
        start = restored(description["start"], memories, 1)
        inputs, targets = single["inputs"], single["targets"]
        last = single.get("last", inputs.new_empty(1, 0))
        are_int64 = inputs.dtype == targets.dtype == last.dtype == torch.int64
        if not are_int64 or (inputs.ndim, targets.ndim, last.ndim) != (1, 1, 2) or len(last) != 1:
            raise ValueError("tokens of the adaptation are not int64 of one sequence")
        has_block, has_memories = len(inputs) > 0, len(start) > 0
        if len(inputs) != len(targets) or has_block != has_memories:
            raise ValueError("the unfinished block of the adaptation is incomplete")
        n_steps = int(description["n_steps"])
        if not 0 <= n_steps < 2**53:
            raise ValueError(f"{n_steps} steps of adaptation")
        settings = dict(json.loads(description["settings"]))
        return cls(settings, weights, moments, n_steps, inputs, targets, last, start)

    def extended(self, inputs: Tensor, targets: Tensor, **start: Any) -> Adaptation:
        """This value with tokens (n) added to the block; `start` are fields of a block that begins."""
        inputs, targets = torch.cat((self.inputs, inputs)), torch.cat((self.targets, targets))
        return replace(self, inputs=inputs, targets=targets, **start)

    def without_block(self) -> Adaptation:
        """This value at the beginning of a block."""
        return replace(self, inputs=self.inputs[:0], targets=self.targets[:0], start=(), last=self.last[:, :0])
