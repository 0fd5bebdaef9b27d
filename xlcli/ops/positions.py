"""Positions of the tokens of a call: distances, absolute positions and angles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class DocumentPositions(NamedTuple):
    """Positions (b t) of new tokens in their documents, and True if a key of the call is of an earlier one."""

    positions: Tensor
    masked: bool


@dataclass(eq=False, kw_only=True)
class Positions:
    """Positions of `n_memory` remembered tokens followed by `n_new` new tokens, together s keys.

    Distances and angles are relative to the first new token, so they stay small in a stream of any length.
    """

    n_memory: int
    n_new: int
    first: int  # position of the first new token, counted from the first token read
    offsets: Tensor | None  # position (b) in its text of the first token read; None: 0
    device: torch.device
    documents: Tensor | None = None  # positions (b t) of the new tokens in their documents; None: one document

    @cached_property
    def keys(self) -> Tensor:
        """Positions (s) of the keys, relative to the first new token."""
        return torch.arange(-self.n_memory, self.n_new, device=self.device)

    def farthest(self, max_distance: int | None) -> int:
        """Upper bound of the distances of visible keys, if they are at most `max_distance` back (None: any)."""
        longest = self.n_memory + self.n_new - 1
        if max_distance is not None:
            longest = min(longest, max_distance)
        return longest

    @cached_property
    def distance(self) -> Tensor:
        """Query position minus key position (t s); negative for future keys."""
        query = torch.arange(self.n_new, device=self.device)
        return query[:, None] - self.keys

    @cached_property
    def origin(self) -> Tensor:
        """Positions (b 1) of the first new token in the texts, or (1 1) if all sequences agree."""
        if self.offsets is None:
            return torch.full((1, 1), self.first, device=self.device)
        return self.offsets[:, None] + self.first

    @cached_property
    def absolute(self) -> Tensor:
        return self.latest(self.n_new)

    def latest(self, n: int) -> Tensor:
        """Positions (b n), or (1 n) if all sequences agree, of the n latest tokens in their texts or documents.

        Remembered tokens of an earlier document, which no new token sees, have position 0.
        """
        place = torch.arange(self.n_new - n, self.n_new, device=self.device)  # relative to the first new token
        if self.documents is not None:
            if n <= self.n_new:
                return self.documents
            remembered = (self.documents[:, :1] + place[: n - self.n_new]).clamp(min=0)
            return torch.cat((remembered, self.documents), dim=1)
        return self.origin + place

    def angles(self, n_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sine and cosine (s f/2) of key positions times the frequencies 10000^(-2f/n_features) (Vaswani et al. 2017).

        Computed in float64, then rounded. Rows from `n_memory` on belong to the new tokens.
        """
        angle = self.keys[:, None].double() * frequencies(n_features, self.device)
        return angle.sin().to(dtype), angle.cos().to(dtype)


def frequencies(n_features: int, device: torch.device, base: float = 10000.0) -> Tensor:
    """Geometric series base^(-2f/n_features) for f = 0 .. n_features/2 - 1, in float64."""
    return base ** -(torch.arange(0, n_features, 2, device=device, dtype=torch.float64) / n_features)
