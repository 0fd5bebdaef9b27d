"""Which tokens a token sees, and how many are remembered: one rule for training, evaluation, generation and streams.

uniform   a token sees itself and the `mem_len` tokens before it, however the text is cut into calls
growing   a token sees its own call up to itself and the `mem_len` tokens before the call (the paper's training)
segment   a token sees its own segment of `segment_len` tokens up to itself, and nothing before (recurrence off)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The rule. `segment` is what a memory of zero means: independent segments, the vanilla Transformer."""

    kind: Literal["uniform", "growing", "segment"]
    mem_len: int
    segment_len: int

    @staticmethod
    def of(kind: Literal["uniform", "growing"], *, mem_len: int, segment_len: int) -> Span:
        """The rule for a memory of `mem_len` tokens; with none it is `segment`, whatever was asked."""
        return Span(kind if mem_len else "segment", mem_len, segment_len)

    def keep(self, seen: int) -> int:
        """Tokens to remember once `seen` tokens have been read."""
        return seen % self.segment_len if self.kind == "segment" else min(seen, self.mem_len)

    def room(self, seen: int) -> int | None:
        """Tokens that one call may read before its memory must be dropped; None when any number."""
        return self.segment_len - seen % self.segment_len if self.kind == "segment" else None


class Frame:
    """The rule applied to one call: `n_memory` remembered tokens followed by `n_new` new ones: s keys.

    Made once a call and shared by all layers, so that masks and tables are computed once; positions are relative to the
    first new token, which keeps angles small however long the stream.
    """

    def __init__(self, span: Span, *, n_memory: int, n_new: int, keep: int, device: torch.device) -> None:
        self.span = span
        self.n_memory = n_memory
        self.n_new = n_new
        self.keep = keep
        self.device = device
        self._angles: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    @cached_property
    def visible(self) -> Tensor | None:
        """Boolean mask (t s), true where the query sees the key; None when every query sees every key."""
        window = self.span.mem_len if self.span.kind == "uniform" else None
        if self.n_new == 1 and (window is None or self.n_memory <= window):
            return None
        distance = self.distance
        seen = distance >= 0
        return seen if window is None else seen & (distance <= window)

    @cached_property
    def distance(self) -> Tensor:
        """Query position minus key position (t s); negative for keys in the future."""
        query = torch.arange(self.n_new, device=self.device)
        key = torch.arange(-self.n_memory, self.n_new, device=self.device)
        return query[:, None] - key

    def angles(self, n_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sine and cosine (s f/2) of key positions times the frequencies 10000^(-2f/n_features) (Vaswani et al. 2017).

        Computed in float64, then rounded. Rows `n_memory:` belong to the new tokens.
        """
        key = (n_features, dtype)
        if key not in self._angles:
            position = torch.arange(-self.n_memory, self.n_new, device=self.device, dtype=torch.float64)
            angle = position[:, None] * frequencies(n_features, self.device)
            self._angles[key] = (angle.sin().to(dtype), angle.cos().to(dtype))
        return self._angles[key]


def frequencies(n_features: int, device: torch.device) -> Tensor:
    """The geometric ladder 10000^(-2f/n_features) for f = 0 .. n_features/2 - 1, in float64."""
    return 10000.0 ** -(torch.arange(0, n_features, 2, device=device, dtype=torch.float64) / n_features)
