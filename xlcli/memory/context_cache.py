"""The latest tokens, where their contexts occurred, and what was learned from both, for `xlcli.online.mixture`.

The index is that of a compressor with a sliding window (LZ77): a table of heads leads to the latest position of a
context, a link from each position to the one before. It is a function of the tokens and is not saved.
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

from xlcli.errors import StateError
from xlcli.machine import require_memory
from xlcli.memory.online import UNKNOWN, OnlineMemory

ORDERS = (1, 2, 3, 6, 12)  # numbers of latest tokens that are a context
COLUMN, ABOVE, HEAD = range(len(ORDERS), len(ORDERS) + 3)  # contexts that know the place in a line (kernels/mixture.py)
N_KINDS = HEAD + 1
LINE, REACH = 128, 256  # largest place in a line that a context knows; how many tokens back a context can reach
MAX_WINDOW = 2**22  # maximum number of tokens of a cache
SLACK = 2**14  # tokens that can be taken back, and tokens kept that are older than the window; at least `REACH`
N_READ, WINDOW = range(2)  # places in `Index.sizes`: number of tokens read, and of tokens of the window
N_LEVELS = 8  # classes of a number of followers
FIRST_SLOPES = np.array([1, 1.5, 2.5, 2.5, 2.5, 1, 1, 1])  # initial weights (k) of the surprise of a token
MOST_LEARNED = 1e3  # maximum of a weight in a state file
SAVED_RANGES = {"weights": (-MOST_LEARNED, MOST_LEARNED), "squares": (1, 2**53), "bias": (-MOST_LEARNED, MOST_LEARNED)}
"""Smallest and largest number in a state file of each array of `Learned`; squares begin with 1 and only grow."""

Array = NDArray[Any]


class Index(NamedTuple):
    """The latest tokens and where their contexts occurred: rings, in which position p has place p modulo n."""

    tokens: Array  # tokens read (n)
    followers: Array  # token (n) that followed each of them, or `UNKNOWN`
    lines: Array  # position (n) at which the line of each begins
    keys: Array  # hash (k n) of each context of a token
    links: Array  # earlier position (k n) whose context has the same head, -1 if there is none
    heads: Array  # latest position (k h) of the contexts with each head, the last bits of their keys
    sizes: Array  # `N_READ`, `WINDOW` (2)


class Learned(NamedTuple):
    """What was learned: weights of logistic regressions.

    `weights` are constant and slope (k 2 l l 2) by which a context of kind k raises the logit of a token that followed
    it: latest (1) or not (0), in a class of how often, and of how often others did.
    """

    weights: Array
    squares: Array  # sums of the squared gradients of `weights`
    bias: Array  # added to the logit of each token (v)


def new_index(window: int) -> Index:
    """Index of no tokens, for a window; `ResourceError` if it does not fit the machine."""
    n, n_heads = window + SLACK, 1 << (window - 1).bit_length()
    n_bytes = 8 * (3 * n + N_KINDS * (2 * n + n_heads))
    require_memory(f"a context cache of {window:,} tokens", n_bytes, "Use a smaller --context-cache.")
    return Index(
        tokens=np.zeros(n, np.int64),
        followers=np.zeros(n, np.int64),
        lines=np.zeros(n, np.int64),
        keys=np.zeros((N_KINDS, n), np.uint64),
        links=np.zeros((N_KINDS, n), np.int64),
        heads=np.full((N_KINDS, n_heads), -1),
        sizes=np.array([0, window]),
    )


def new_learned(vocab_size: int) -> Learned:
    weights = np.zeros((N_KINDS, 2, N_LEVELS, N_LEVELS, 2))
    weights[..., 1] = FIRST_SLOPES[:, None, None, None]
    return Learned(weights, np.ones_like(weights), np.zeros(vocab_size))


@dataclass(frozen=True)
class ContextCache(OnlineMemory):
    """The latest tokens, and what was learned from what followed their contexts."""

    settings: Mapping[str, Any]
    learned: Learned  # changed in place by reading, as is `index`
    index: Index
    unread: list[Array] = field(default_factory=list)  # pairs of tokens and followers (2 n) to read first; at most one

    @property
    def texts(self) -> Array:
        """Tokens and their followers (2 n): those of the window, and older ones on which its contexts depend."""
        if self.unread:
            return self.unread[0]
        n_read, window = self.index.sizes
        places = np.arange(max(0, n_read - window - REACH), n_read) % len(self.index.tokens)
        return np.stack((self.index.tokens[places], self.index.followers[places]))

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, and what was learned."""
        tensors = {"texts": torch.from_numpy(self.texts.astype(np.int32))}
        for name, array in self.learned._asdict().items():
            tensors[f"learned.{name}"] = torch.from_numpy(array.copy())
        return tensors

    def describe(self) -> dict[str, str]:
        return {"settings": json.dumps(self.settings)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], description: Mapping[str, str]) -> ContextCache:
        """Value from the results of `tensors` and `describe`; tokens are compared with a vocabulary by `fits`.

        `StateError` if an earlier version saved it, whose cache learned other values; `ValueError` if it is damaged.
        """
        settings = dict(json.loads(description["settings"]))
        window = settings["context_cache"]
        if type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a context cache of {window} tokens")
        if "mixer.weights" in tensors:  # only earlier versions save one
            raise StateError("the context cache of the state is of an earlier version.", "Read its text again.")
        texts = tensors["texts"].cpu()
        has_two_rows = texts.ndim == 2 and len(texts) == 2
        if not has_two_rows or texts.dtype != torch.int32 or texts.shape[1] > window + REACH:
            raise ValueError("the context cache has no tokens and followers of its window")
        learned = new_learned(tensors["learned.bias"].numel())
        for name, array in learned._asdict().items():
            saved = tensors[f"learned.{name}"].cpu()
            is_alike = saved.shape == array.shape and saved.dtype == torch.float64
            least, most = SAVED_RANGES[name]
            if not is_alike or not bool(((saved >= least) & (saved <= most)).all()):
                raise ValueError(f"'{name}' of the context cache are damaged")
            array[...] = saved.numpy()
        unread = texts.numpy().astype(np.int64)  # the first call of a scorer reads them into the empty index
        return cls(settings, learned, new_index(window), [unread])

    def fork(self) -> ContextCache:
        index, learned = Index(*map(np.copy, self.index)), Learned(*map(np.copy, self.learned))
        return ContextCache(self.settings, learned, index, [*self.unread])

    def snapshot(self) -> ContextCache:
        """Copy that shares the index: to save, or to restore this cache after further text (`go_back`)."""
        return replace(self, learned=Learned(*map(np.copy, self.learned)), unread=[self.texts])

    def go_back(self, before: ContextCache, n_tokens: int) -> None:
        """Undoes the reading of the last `n_tokens`: makes this cache equal to its snapshot `before`, in place."""
        for array, saved in zip(self.learned, before.learned, strict=True):
            array[...] = saved
        if self.unread:  # the saved tokens still wait to be read, so nothing has entered the index
            return
        index = self.index
        is_oldest_overwritten = n_tokens > SLACK - REACH  # in the rings that have the tokens of the snapshot
        if is_oldest_overwritten:
            index.heads[...] = -1
            index.sizes[N_READ] = 0
            self.unread.append(before.texts)
            return
        index.sizes[N_READ] -= n_tokens
        latest_first = index.sizes[N_READ] + np.arange(n_tokens)[::-1]
        places = latest_first % len(index.tokens)
        places = places[index.followers[places] != UNKNOWN]  # without a follower a position never became a head
        last_bits = np.uint64(index.heads.shape[1] - 1)
        for heads, links, keys in zip(index.heads, index.links, index.keys, strict=True):
            head_of_place = (keys[places] & last_bits).astype(np.int64)
            # A head gets the link of its earliest position, which is assigned last.
            heads[head_of_place] = links[places]

    def fits(self, vocab_size: int) -> bool:
        """True if all tokens are in a vocabulary of this size."""
        tokens, followers = self.texts
        are_tokens = (tokens >= 0) & (tokens < vocab_size)
        are_followers = (followers >= UNKNOWN) & (followers < vocab_size)
        return len(self.learned.bias) == vocab_size and bool((are_tokens & are_followers).all())
