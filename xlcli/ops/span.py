"""Attention span: the rule for the tokens that a token attends to, and for the number of tokens in memory.

uniform   a token attends to itself and the `mem_len` tokens before it, for any division of the text into calls
growing   a token attends to the earlier tokens of its call, itself, and the `mem_len` tokens before the call (the
          training pattern of Dai et al. 2019)
segment   a token attends to the earlier tokens of its segment of `segment_len` tokens and itself (no recurrence);
          with a stride, segments are windows that begin every `stride` tokens: one repeats the end of the last one

A text begins with an empty memory, or with one full of zero layer inputs, which are attended to like tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

FAR_BIAS = -2.0
"""Addition to the scores of far keys whose number training has seen (chosen on validation text, docs/log.md)."""


@dataclass(frozen=True)
class Span:
    """Attention span. With memory length 0 it is always `segment`: independent segments, the vanilla Transformer."""

    kind: Literal["uniform", "growing", "segment"]
    mem_len: int
    segment_len: int
    kept_len: int | None = None
    """Number of tokens that memory keeps for later calls, if a call with a drawn `mem_len` reads fewer of them."""
    clamp_len: int | None = None
    """Largest distance in position encodings that clamp distances: keys further back are at this one; None: any."""
    full_len: int | None = None
    """Largest distance of keys with full weight; `far_bias` is added to the scores of the others; None: any."""
    stride: int | None = None
    """Distance of overlapping windows of `segment_len` tokens in a `segment` span; None: independent segments."""
    zero_memory: bool = False
    """True if `mem_len` zero layer inputs come before a text."""

    @staticmethod
    def make(
        kind: Literal["uniform", "growing"],
        *,
        mem_len: int,
        segment_len: int,
        clamp_len: int | None = None,
        full_len: int | None = None,
        stride: int | None = None,
        zero_memory: bool = False,
    ) -> Span:
        """Span of this kind, or `segment`, without zero inputs, if `mem_len` is 0."""
        limits: dict[str, int | None] = {"clamp_len": clamp_len, "full_len": full_len, "stride": stride}
        rule = kind if mem_len else "segment"
        return Span(rule, mem_len, segment_len, **limits, zero_memory=zero_memory and mem_len > 0)

    def shortened(self, segment: float, memory: float) -> Span:
        """Span with at least half the segment and at least 1 token of memory, by two numbers from 0 to 1."""
        least = -(-self.segment_len // 2)
        segment_len = least + int(segment * (self.segment_len - least + 1))
        if self.kind == "segment":
            return replace(self, segment_len=segment_len)
        mem_len = 1 + int(memory * self.mem_len)
        return replace(self, segment_len=segment_len, mem_len=mem_len, kept_len=self.mem_len)

    @staticmethod
    def parse(text: str) -> Span:
        """Span from its `text`; raises ValueError if it is none."""
        kind, *numbers = text.split()
        zero_memory = numbers[-1:] == ["zeros"]
        numbers = numbers[: len(numbers) - zero_memory]
        mem_len, segment_len, *limits = (None if n == "none" else int(n) for n in numbers)
        span = Span(kind, mem_len, segment_len, None, *limits, zero_memory=zero_memory)  # type: ignore[arg-type,misc]
        is_segment = kind == "segment" and not zero_memory
        legal = is_segment if span.mem_len == 0 else kind in ("uniform", "growing") and span.mem_len > 0
        lengths = span.segment_len, *(n for n in limits if n is not None)
        legal &= span.stride is None or (kind == "segment" and span.overlap >= 0)
        if not legal or min(lengths) < 1 or max(span.mem_len, *lengths) > 2**31 or span.text != text:
            raise ValueError(f"'{text}' is not a span")
        return span

    @property
    def text(self) -> str:
        """Kind and lengths, as saved states have them."""
        limits = [limit or "none" for limit in (self.clamp_len, self.full_len, self.stride)]
        while limits and limits[-1] == "none":
            limits.pop()
        zeros = ["zeros"] if self.zero_memory else []
        return " ".join(map(str, (self.kind, self.mem_len, self.segment_len, *limits, *zeros)))

    @property
    def far_bias(self) -> float:
        """Addition to the scores of far keys, so that all of them together weigh no more for being many."""
        longest = self.mem_len + (0 if self.kind == "uniform" else self.segment_len - 1)
        return 0.0 if self.full_len is None else FAR_BIAS + min(0.0, math.log(self.full_len / max(1, longest)))

    @property
    def longest(self) -> int:
        """Number of tokens in a full memory."""
        return self.mem_len if self.kept_len is None else self.kept_len

    def n_kept(self, seen: int) -> int:
        """Number of tokens, or zero inputs, to remember after `seen` tokens have been read."""
        if self.kind == "segment":
            return self.next_position(seen)
        return self.longest if self.zero_memory else min(seen, self.longest)

    def n_read(self, seen: int) -> int:
        """Number of remembered tokens that a call after `seen` tokens reads."""
        kept = self.n_kept(seen)
        return kept if self.kept_len is None else min(kept, self.mem_len)

    def n_until_reset(self, seen: int) -> int | None:
        """Number of tokens that one call may read before the memory is reset; None if unlimited."""
        return self.segment_len - self.next_position(seen) if self.kind == "segment" else None

    @property
    def overlap(self) -> int:
        """Number of tokens that each window but the first reads again."""
        return 0 if self.stride is None or self.kind != "segment" else self.segment_len - self.stride

    def next_position(self, seen: int) -> int:
        """Position of the next token, counted from the first token read or from the start of its segment."""
        if self.kind != "segment" or seen < self.segment_len:
            return seen
        return self.overlap + (seen - self.segment_len) % (self.segment_len - self.overlap)

    def max_distance(self, window: int | None = None) -> int | None:
        """Largest distance of a visible key in a layer with this attention window (None: no window); None if any."""
        limits = [self.mem_len] if self.kind == "uniform" else []
        if window is not None:
            limits.append(window)
        return min(limits, default=None)
