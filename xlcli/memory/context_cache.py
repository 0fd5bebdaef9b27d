"""Tokens that followed each context in the latest text, for `xlcli.online.cache`.

A context of order k is the last k tokens. A hash table for each order (open addressing, linear probing) has a slot for
each context: its hash, and its latest position, from which a chain leads to earlier ones. Tables are functions of the
tokens and are not saved.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xlcli.machine import require_memory
from xlcli.memory.online import UNKNOWN, OnlineMemory

ORDERS = (0, 1, 2, 3, 4, 5, 7, 10, 16)
"""Numbers of tokens of contexts."""
N_LATEST = 64
"""Maximum number of positions of a context that count."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class Followers(NamedTuple):
    """Tokens that followed a context.

    Attributes:
        order: Index of its order in `ORDERS`.
        counts: Token to number of times.
        total: Sum of the counts.
    """

    order: int
    counts: dict[int, int]
    total: int


class ContextIndex:
    """Contexts of the latest tokens and what followed them.

    Args:
        window: Number of latest positions that count.

    Raises:
        ResourceError: The tables do not fit the machine.

    Attributes:
        inputs: Tokens read, with at most `max(ORDERS)` that are older than the window.
        targets: Token that followed each of them, or `UNKNOWN`.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._bits = (4 * window + 2 * ORDERS[-1]).bit_length()  # the tables are at most half full
        n_bytes = len(ORDERS[1:]) * ((12 << self._bits) + 4 * 2 * window)
        require_memory(f"a context cache of {window:,} tokens", n_bytes, "Use a smaller --context-cache.")
        self._start()

    def _start(self) -> None:
        self._owners = self._latest = self._earlier = []  # old tables are freed before new ones are made
        self.inputs, self.targets = array("i"), array("i")
        self._owners = [array("Q", bytes(8 << self._bits)) for _ in ORDERS[1:]]
        self._latest = [array("i", b"\xff" * (4 << self._bits)) for _ in ORDERS[1:]]
        self._earlier = [array("i") for _ in ORDERS[1:]]
        self._counts: dict[int, int] = {}
        self._n_counted = 0

    def read(self, token: int) -> None:
        """Appends a token to the context."""
        if len(self.inputs) >= 2 * self.window + ORDERS[-1]:
            first = len(self.inputs) - self.window - ORDERS[-1]  # what is older than the window is forgotten
            self.fill(self.inputs[first:], self.targets[first:])
        self.inputs.append(token)
        self.targets.append(UNKNOWN)
        for chain in self._earlier:
            chain.append(-1)
        self._count(len(self.inputs) - 1 - self.window, -1)

    def learn(self, token: int) -> None:
        """Stores the token that follows the last one read."""
        at = len(self.inputs) - 1
        self.targets[at] = token
        self._count(at, 1)
        for i, (hashed, slot) in enumerate(self._slots()):
            self._earlier[i][at] = self._latest[i][slot]
            self._owners[i][slot] = hashed
            self._latest[i][slot] = at

    def followers(self) -> Iterator[Followers]:
        """Followers of the present context, of ascending order, up to the first one without any."""
        if not self._n_counted:
            return
        yield Followers(0, self._counts, self._n_counted)
        oldest = max(0, len(self.inputs) - self.window)
        targets = self.targets
        for i, (_, slot) in enumerate(self._slots()):
            at = self._latest[i][slot]
            if at < oldest:
                return
            counts: dict[int, int] = {}
            earlier, total = self._earlier[i], 0
            while at >= oldest and total < N_LATEST:
                token = targets[at]
                counts[token] = counts.get(token, 0) + 1
                total += 1
                at = earlier[at]
            yield Followers(i + 1, counts, total)

    def _slots(self) -> Iterator[tuple[int, int]]:
        """Hash of the present context of each order from 1 on, and its slot, which is empty if the context is new."""
        inputs, hashed, n = self.inputs, 1, 0
        shift, last = 64 - self._bits, (1 << self._bits) - 1
        for order, owners in zip(ORDERS[1:], self._owners, strict=True):
            if order > len(inputs):
                return
            while n < order:
                n += 1
                hashed = ((hashed ^ inputs[-n]) * _MULTIPLIER + n) & _MASK
                hashed ^= hashed >> 29
            slot = (hashed * _MULTIPLIER & _MASK) >> shift
            while owners[slot] not in (0, hashed):
                slot = (slot + 1) & last
            yield hashed, slot

    def _count(self, at: int, change: int) -> None:
        """Counts the token that follows position `at`, which enters or leaves the window."""
        token = self.targets[at] if at >= 0 else UNKNOWN
        if token == UNKNOWN:
            return
        self._n_counted += change
        self._counts[token] = self._counts.get(token, 0) + change
        if not self._counts[token]:
            del self._counts[token]

    def fill(self, inputs: array[int], targets: array[int]) -> None:
        """Starts anew with these tokens."""
        self._start()
        for token, target in zip(inputs, targets, strict=True):
            self.read(token)
            if target != UNKNOWN:
                self.learn(target)


@dataclass(frozen=True)
class ContextCache(OnlineMemory):
    """The latest tokens, and the weights of what followed their contexts.

    Attributes:
        index: The latest tokens.
        weights: Weights and numbers of updates (2 o n d), by order, number and distinct number of followers.
        predicted: Log-probabilities (v) of the token after the last one read, if it is not known yet; else empty.
    """

    settings: Mapping[str, Any]
    index: ContextIndex
    weights: Tensor
    predicted: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, weights, and the prediction."""
        first = max(0, len(self.index.inputs) - self.index.window - ORDERS[-1])
        tokens = {"inputs": self.index.inputs[first:], "targets": self.index.targets[first:]}
        kept = {name: torch.from_numpy(np.array(values, np.int32)) for name, values in tokens.items()}
        return {**kept, "weights": self.weights, "predicted": self.predicted}

    def describe(self) -> dict[str, str]:
        """Settings."""
        return {"settings": json.dumps(self.settings)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> ContextCache:
        """Value from the results of `tensors` and `describe`; the vocabulary is not checked here."""
        settings = dict(json.loads(description["settings"]))
        window = settings["context_cache"]
        if type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a context cache of {window} tokens")
        inputs, targets, weights = tensors["inputs"], tensors["targets"], tensors["weights"]
        if any((t.ndim, t.dtype) != (1, torch.int32) for t in (inputs, targets)) or len(inputs) != len(targets):
            raise ValueError("tokens of the context cache are not two vectors of int32")
        if len(inputs) > window + ORDERS[-1]:
            raise ValueError("the context cache holds too many tokens")
        # The mixture is computed on the CPU, whatever the device of the model.
        weights, predicted = weights.cpu(), tensors["predicted"].cpu()
        shape = 2, len(ORDERS), N_TOTALS, N_DISTINCT
        if (weights.shape, weights.dtype) != (shape, torch.float64):
            raise ValueError("weights of the context cache have another shape")
        if (predicted.ndim, predicted.dtype) != (1, torch.float64) or not bool((predicted <= 0).all()):
            raise ValueError("the prediction of the context cache has no log-probabilities")
        if not (bool(((weights[0] > 0) & (weights[0] < 1)).all()) and bool((weights[1] >= 0).all())):
            raise ValueError("weights of the context cache are not between 0 and 1")
        index = ContextIndex(window)
        index.fill(array("i", inputs.tolist()), array("i", targets.tolist()))
        return cls(settings, index, weights, predicted)

    def fits(self, vocab_size: int) -> bool:
        """True if all tokens are in a vocabulary of this size."""
        tokens = (*self.index.inputs, *(token for token in self.index.targets if token != UNKNOWN))
        return len(self.predicted) in (0, vocab_size) and (not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size)


MAX_WINDOW = 2**22
"""Maximum number of tokens of a cache."""
N_TOTALS = 9
"""Classes of the number of followers: 0, 1, 2 to 3, 4 to 7, and so on; the last one from 128 on."""
N_DISTINCT = 4
"""Classes of the number of distinct followers: 1, 2, 3, more."""
