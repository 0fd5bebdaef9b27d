"""Which tokens a token sees, and how many are remembered: one rule for training, evaluation, generation and streams.

uniform   a token sees itself and the `mem_len` tokens before it, however the text is cut into calls
growing   a token sees its own call up to itself and the `mem_len` tokens before the call (the paper's training)
segment   a token sees its own segment of `segment_len` tokens up to itself, and nothing before (recurrence off)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Span:
    """The rule. `segment` is what a memory of zero means: independent segments, the vanilla Transformer."""

    kind: Literal["uniform", "growing", "segment"]
    mem_len: int
    segment_len: int

    @staticmethod
    def make(kind: Literal["uniform", "growing"], *, mem_len: int, segment_len: int) -> Span:
        """The rule for a memory of `mem_len` tokens; with none it is `segment`, whatever was asked."""
        return Span(kind if mem_len else "segment", mem_len, segment_len)

    def n_kept(self, seen: int) -> int:
        """Tokens to remember once `seen` tokens have been read."""
        return seen % self.segment_len if self.kind == "segment" else min(seen, self.mem_len)

    def n_until_reset(self, seen: int) -> int | None:
        """Tokens that one call may read before its memory must be dropped; None when any number."""
        return self.segment_len - seen % self.segment_len if self.kind == "segment" else None


T = TypeVar("T")


class AttentionContext:
    """The rule applied to one call: `n_memory` remembered tokens followed by `n_new` new ones: s keys.

    Made once a call and shared by all layers, so that masks and tables are computed once. Distances, and angles, count
    from the first new token, which keeps them small however long the stream. `start` tokens were read before this call
    and `offsets` (b) says where in its text each row began: absolute encodings need both. A `window` is the most tokens
    back that a layer sees, whatever the span.
    """

    def __init__(
        self,
        span: Span,
        *,
        n_memory: int,
        n_new: int,
        keep: int,
        device: torch.device,
        start: int = 0,
        offsets: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self.span = span
        self.n_memory = n_memory
        self.n_new = n_new
        self.keep = keep
        self.device = device
        self.start = start
        self.offsets = offsets
        self.window = window
        self._kept: dict[Hashable, Any] = {}

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call with this key, a tuple with a module if its parameters are used."""
        if key not in self._kept:
            self._kept[key] = make()
        value: T = self._kept[key]
        return value

    def clear_learned(self) -> None:
        """Drops what was made of parameters, and with it the graph of how."""
        for key, value in list(self._kept.items()):
            if isinstance(value, AttentionContext):
                value.clear_learned()
            elif isinstance(key, tuple) and any(isinstance(part, nn.Module) for part in key):
                del self._kept[key]

    def narrow(self, window: int) -> AttentionContext:
        """The context of a layer that sees, and remembers, at most `window` tokens back."""
        return self.cached(
            ("narrow", window),
            lambda: AttentionContext(
                self.span,
                n_memory=min(self.n_memory, window),
                n_new=self.n_new,
                keep=min(self.keep, window),
                device=self.device,
                start=self.start,
                offsets=self.offsets,
                window=window,
            ),
        )

    @cached_property
    def limit(self) -> int | None:
        """Greatest distance seen; None when memory and call are all there is."""
        limits = [self.span.mem_len] if self.span.kind == "uniform" else []
        if self.window is not None:
            limits.append(self.window)
        return min(limits, default=None)

    @cached_property
    def visible(self) -> Tensor | None:
        """Boolean mask (t s), true where the query sees the key; None when every query sees every key."""
        if self.n_new == 1 and (self.limit is None or self.n_memory <= self.limit):
            return None
        distance = self.distance
        seen = distance >= 0
        return seen if self.limit is None else seen & (distance <= self.limit)

    @cached_property
    def distance(self) -> Tensor:
        """Query position minus key position (t s); negative for keys in the future."""
        query = torch.arange(self.n_new, device=self.device)
        key = torch.arange(-self.n_memory, self.n_new, device=self.device)
        return query[:, None] - key

    @property
    def first(self) -> int:
        """Tokens before the first new one since the start, or since its segment began when segments are independent."""
        return self.start % self.span.segment_len if self.span.kind == "segment" else self.start

    @cached_property
    def positions(self) -> Tensor:
        """Absolute positions (b t) of the new tokens, or (1 t) when rows agree.

        They count from the beginning of the text; from that of the segment when segments are independent.
        """
        new = self.first + torch.arange(self.n_new, device=self.device)
        offsets = None if self.span.kind == "segment" else self.offsets
        return new[None] if offsets is None else offsets[:, None] + new

    def angles(self, n_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sine and cosine (s f/2) of key positions times the frequencies 10000^(-2f/n_features) (Vaswani et al. 2017).

        Computed in float64, then rounded. Rows `n_memory:` belong to the new tokens.
        """

        def make() -> tuple[Tensor, Tensor]:
            position = torch.arange(-self.n_memory, self.n_new, device=self.device, dtype=torch.float64)
            angle = position[:, None] * frequencies(n_features, self.device)
            return angle.sin().to(dtype), angle.cos().to(dtype)

        return self.cached(("angles", n_features, dtype), make)


def frequencies(n_features: int, device: torch.device, base: float = 10000.0) -> Tensor:
    """The geometric ladder base^(-2f/n_features) for f = 0 .. n_features/2 - 1, in float64."""
    return base ** -(torch.arange(0, n_features, 2, device=device, dtype=torch.float64) / n_features)
