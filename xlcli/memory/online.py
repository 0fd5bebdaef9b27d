"""Values that a model learns while it reads: the base class of those in `State`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

UNKNOWN = -1
"""Token that is not known yet, or not part of the text."""


class OnlineMemory(ABC):
    """Immutable value of one text, shared by all sequences that continue it.

    Under inference mode a reader may write into its tensors, so the old value must not be used any more; copy it with
    `State.fork` to continue it twice.

    Attributes:
        settings: Keys of `OnlineConfig` and their values, by which the value must be continued.
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
        """Value from the results of `tensors` and `describe`.

        Raises:
            KeyError: An entry is missing.
            ValueError: The entries are not those of one value.
        """

    def fork(self) -> Self:
        """Copy that shares no tensor."""
        with torch.inference_mode(False):
            return self.restore({name: t.clone() for name, t in self.tensors().items()}, self.describe())
