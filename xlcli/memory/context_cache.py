"""Contexts of the latest text with what followed them, and weights of a mixture, for `xlcli.online.mixture`.

A hash table for each kind of context (open addressing, linear probing) has a slot for each context: its hash, and its
latest position, from which a chain leads to earlier ones. Tables are functions of the tokens and are not saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.machine import require_memory
from xlcli.memory.online import UNKNOWN, OnlineMemory

ORDERS = (1, 2, 3, 4, 6, 10, 18)
"""Numbers of latest tokens that are a context."""
N_CONTEXTS = len(ORDERS) + 5
"""Kinds of contexts, with those that skip a token or know the place in a line (`kernels/mixture.py`)."""
N_LATEST = 64
"""Maximum number of positions of a context that count."""
LINE, REACH = 128, 256
"""Maximum place in a line that a context knows, and number of tokens after which none depends on a token."""
MAX_WINDOW = 2**22
"""Maximum number of tokens of a cache."""
N_READ, N_COUNTED, WINDOW = range(3)
"""Places in `Index.sizes`: numbers of tokens read, of followers counted, and of tokens of the window."""
MODEL, COUNTS, SURPLUS, N_COMMON = range(4)
"""Places of the inputs of a decision that no context has, and their number. Two for each context come behind them."""
N_INPUTS, N_MIXERS, MAX_DEPTH, MIXER_CLASSES = N_COMMON + 2 * N_CONTEXTS, 3, 19, 160
"""Inputs of a decision, mixers, greatest depth in the tree with weights of its own, sets of weights of a mixer."""
N_LEVELS = 9
"""Classes of a number of followers."""
N_STATES, MAP_BINS, MAP_RANGE = 2 * N_LEVELS**2, 12, 9.0
"""States of a context, and bins of a map of logits from -`MAP_RANGE` to `MAP_RANGE`."""
PROBABILITY, N_UPDATES = 0, 1
"""Places in a cell of `Mixer.states` and `Mixer.maps`."""
SSE_ROWS, SSE_BINS, SSE_RANGE = 2**12, 32, 12.0
"""Rows and bins of the correction of a result, and its range of logits."""

Array = NDArray[Any]


class Index(NamedTuple):
    """The latest tokens and where their contexts occurred.

    Attributes:
        inputs: Tokens read (n), with at least `REACH` older than the window.
        targets: Token (n) that followed each of them, or `UNKNOWN`.
        lines: Position (n) at which the line of each begins.
        owners: Hash of the context (c s) in each slot, 0: none.
        latest: Its latest position (c s), plus 1.
        earlier: Position (c n) of the same context before, plus 1.
        counts: Number of followers in the window (2 l) at or below each node of a tree of l leaves.
        sizes: `N_READ`, `N_COUNTED`, `WINDOW` (3).
    """

    inputs: Array
    targets: Array
    lines: Array
    owners: Array
    latest: Array
    earlier: Array
    counts: Array
    sizes: Array


class Mixer(NamedTuple):
    """What a mixture has learned.

    Attributes:
        weights: Weights (m k i) of inputs i in class k of mixer m.
        final: Weights (d m) of the mixers by depth.
        states: Probability (c z 2) that a context in state z is right, and number of updates.
        maps: Probability (c z x 2) for each logit of the model, and number of updates.
        sse: Corrections (2 r x) of the result, added to its probability.
        expected: Sum of probabilities (2 l) of each node by the model.
        progress: Number of predictions (1).
    """

    weights: Array
    final: Array
    states: Array
    maps: Array
    sse: Array
    expected: Array
    progress: Array


def n_leaves(vocab_size: int) -> int:
    """Leaves of a binary tree over a vocabulary."""
    return max(2, 1 << (vocab_size - 1).bit_length())


def new_index(window: int, vocab_size: int) -> Index:
    """Index of no tokens, for a window.

    Raises:
        ResourceError: It does not fit the machine.
    """
    # Twice the window, because what is older is forgotten only when there is no room left.
    capacity = 2 * window + 4 * REACH
    n_slots = 1 << (3 * capacity // 2).bit_length()  # more than 1.5 for each token: probing is short
    of_contexts = N_CONTEXTS * (12 * n_slots + 4 * capacity)
    n_bytes = of_contexts + 12 * capacity + 16 * n_leaves(vocab_size)
    require_memory(f"a context cache of {window:,} tokens", n_bytes, "Use a smaller --context-cache.")
    return Index(
        inputs=np.zeros(capacity, np.int32),
        targets=np.zeros(capacity, np.int32),
        lines=np.zeros(capacity, np.int32),
        owners=np.zeros((N_CONTEXTS, n_slots), np.uint64),
        latest=np.zeros((N_CONTEXTS, n_slots), np.int32),
        earlier=np.zeros((N_CONTEXTS, capacity), np.int32),
        counts=np.zeros(2 * n_leaves(vocab_size), np.int64),
        sizes=np.array([0, 0, window]),
    )


def new_mixer(vocab_size: int) -> Mixer:
    """A mixture that predicts nearly as the model does."""
    weights = np.zeros((N_MIXERS, MIXER_CLASSES, N_INPUTS))
    weights[..., MODEL], weights[..., N_COMMON:] = 0.9, 0.05
    # A state has the levels of two numbers: followers like the latest one, and others (`mixture.add_context`).
    n_same, n_other = np.divmod(np.arange(N_STATES) % N_LEVELS**2, N_LEVELS)
    share_of_same = (n_same + 0.5) / (n_same + n_other + 1)
    states = np.zeros((N_CONTEXTS, N_STATES, 2))
    states[..., PROBABILITY] = np.where(n_other > 0, share_of_same, 1 - 0.3 / (n_same + 1))
    # Maps begin as the identity: the logit of a bin to its probability.
    logits = np.linspace(-MAP_RANGE, MAP_RANGE, MAP_BINS + 1)
    maps = np.zeros((N_CONTEXTS, N_STATES, MAP_BINS + 1, 2))
    maps[..., PROBABILITY] = 1 / (1 + np.exp(-logits))
    return Mixer(
        weights=weights,
        final=np.full((MAX_DEPTH + 1, N_MIXERS), 1 / N_MIXERS),
        states=states,
        maps=maps,
        sse=np.zeros((2, SSE_ROWS, SSE_BINS + 1), np.float32),
        expected=np.zeros(2 * n_leaves(vocab_size)),
        progress=np.zeros(1),
    )


@dataclass(frozen=True)
class ContextCache(OnlineMemory):
    """The latest tokens, and what a mixture of their contexts with a model has learned.

    Attributes:
        index: The latest tokens, of which tables are made again when they are used first.
        unread: Tokens and their followers (2 n) of a restored value that are not in `index` yet.
    """

    settings: Mapping[str, Any]
    mixer: Mixer
    index: Index
    unread: list[Array] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, and what was learned."""
        if self.unread:
            texts = self.unread[0]
        else:
            n, window = int(self.index.sizes[N_READ]), int(self.index.sizes[WINDOW])
            first = max(0, n - window - REACH)
            texts = np.stack((self.index.inputs[first:n], self.index.targets[first:n]))
        tensors = {"texts": torch.from_numpy(texts.copy())}
        for name, array in self.mixer._asdict().items():
            tensors[f"mixer.{name}"] = torch.from_numpy(array.copy())
        return tensors

    def describe(self) -> dict[str, str]:
        return {"settings": json.dumps(self.settings)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> ContextCache:
        """Value from the results of `tensors` and `describe`; tokens are compared with a vocabulary by `fits`."""
        settings = dict(json.loads(description["settings"]))
        window = settings["context_cache"]
        if type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a context cache of {window} tokens")
        texts = tensors["texts"].cpu()
        are_pairs = texts.ndim == 2 and len(texts) == 2 and texts.dtype == torch.int32
        if not are_pairs or texts.shape[1] > window + REACH:
            raise ValueError("the context cache has no tokens and followers of its window")
        # As large as the vocabulary, which a state file may not enlarge.
        vocab_size = min(len(tensors["mixer.expected"]) // 2, 2**24)
        mixer = _restore_mixer(tensors, vocab_size)
        return cls(settings, mixer, new_index(window, vocab_size), [texts.numpy().copy()])

    def snapshot(self) -> ContextCache:
        """Copy of tokens and mixer that shares the index: to save, or to restore this cache after further text."""
        mixer = Mixer(*(array.copy() for array in self.mixer))
        return replace(self, mixer=mixer, unread=[self.tensors()["texts"].numpy()])

    def fits(self, vocab_size: int) -> bool:
        """True if all tokens are in a vocabulary of this size."""
        texts = self.tensors()["texts"].numpy()
        is_known = (texts >= 0) & (texts < vocab_size)
        is_known[1] |= texts[1] == UNKNOWN
        is_same_tree = len(self.mixer.expected) == 2 * n_leaves(vocab_size)
        return is_same_tree and bool(is_known.all())


def _restore_mixer(tensors: Mapping[str, Tensor], vocab_size: int) -> Mixer:
    """The mixer of `ContextCache.tensors`; `ValueError` if an array has another shape or impossible values."""
    arrays = {}
    for name, array in new_mixer(vocab_size)._asdict().items():
        t = tensors[f"mixer.{name}"].cpu()
        is_alike = tuple(t.shape) == array.shape and t.dtype == torch.from_numpy(array).dtype
        least, most = -8, 8  # of weights and corrections
        if name in ("expected", "progress", "states", "maps"):
            least, most = 0, 2**53
        if not is_alike or not bool(((t >= least) & (t <= most)).all()):
            raise ValueError(f"'{name}' of the context cache is damaged")
        if name in ("states", "maps") and not bool((t[..., PROBABILITY] <= 1).all()):
            raise ValueError(f"'{name}' of the context cache are no probabilities")
        arrays[name] = t.numpy().copy()
    return Mixer(**arrays)
