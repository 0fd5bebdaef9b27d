"""Attention span: the rule for the tokens that a token attends to, and for the number of tokens in memory.

uniform   a token attends to itself and the `mem_len` tokens before it, for any division of the text into calls
growing   a token attends to the earlier tokens of its call, itself, and the `mem_len` tokens before the call (the
          training pattern of Dai et al. 2019)
segment   a token attends to the earlier tokens of its segment of `segment_len` tokens and itself (no recurrence);
          with a stride, segments are windows that begin every `stride` tokens: one repeats the end of the last one
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from xlcli.config.base import Count, Length

FAR_BIAS = -2.0  # addition to the scores of keys beyond `full_len` (chosen on validation text, benchmarks/log)


@dataclass(frozen=True)
class Span:
    """Attention span. With memory length 0 it is always `segment`, without zero inputs: the vanilla Transformer.

    `mem_len` acts in four places: `max_distance` is the mask, `n_kept` the memory that is kept, `n_until_reset` says
    where a segment ends if nothing is kept, and `far_bias` how much keys beyond those of training weigh.
    """

    kind: Literal["uniform", "growing", "segment"]
    mem_len: Length
    segment_len: Count
    clamp_len: Count | None = None  # largest distance in clamped position encodings: keys further back are at this one
    full_len: Count | None = None  # largest distance of keys with full weight; `far_bias` is added to other scores
    stride: Count | None = None  # of overlapping windows of `segment_len` tokens in a `segment` span; None: no overlap
    zero_memory: bool = False  # `mem_len` zero layer inputs come before a text and are attended to like tokens

    def __post_init__(self) -> None:
        if not self.mem_len:
            object.__setattr__(self, "kind", "segment")
            object.__setattr__(self, "zero_memory", False)

    @staticmethod
    def parse(text: str) -> Span:
        """Span from its `text`; raises ValueError if it is none."""
        try:
            span = TypeAdapter(Span).validate_json(text, strict=True)
        except ValidationError:
            raise ValueError(f"'{text}' is not a span") from None
        is_segment_with_memory = span.mem_len > 0 and (span.kind == "segment" or span.stride is not None)
        if is_segment_with_memory or span.overlap < 0 or span.text != text:
            raise ValueError(f"'{text}' is not a span")
        return span

    @property
    def text(self) -> str:
        """Fields without a default and those that differ from it, as JSON, as saved states have them."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values[field.name] = value
        return json.dumps(values)

    @property
    def far_bias(self) -> float:
        """Addition to the scores of far keys, so that all of them together weigh no more for being many."""
        if self.full_len is None:
            return 0.0
        n_earlier = self.mem_len
        if self.kind != "uniform":
            n_earlier += self.segment_len - 1
        return FAR_BIAS + min(0.0, math.log(self.full_len / max(1, n_earlier)))

    def n_kept(self, seen: int) -> int:
        """Number of tokens, or zero inputs, to remember after `seen` tokens have been read."""
        if self.kind == "segment":
            return self.next_position(seen)
        if self.zero_memory:  # never less than full
            return self.mem_len
        return min(seen, self.mem_len)

    def n_until_reset(self, seen: int) -> int | None:
        """Number of tokens that one call may read before the memory is reset; None if unlimited."""
        if self.kind != "segment":
            return None
        return self.segment_len - self.next_position(seen)

    @property
    def overlap(self) -> int:
        """Number of tokens that each window but the first reads again."""
        return self.segment_len - (self.stride or self.segment_len)

    def next_position(self, seen: int) -> int:
        """Position of the next token, counted from the first token read or from the start of its segment."""
        if self.kind != "segment" or seen < self.segment_len:
            return seen
        # Windows after the first one begin with their overlap, which is read already.
        return self.overlap + (seen - self.segment_len) % (self.segment_len - self.overlap)

    def max_distance(self, window: int | None = None) -> int | None:
        """Largest distance of a visible key in a layer with this attention window (None: no window); None if any."""
        limits = []
        if self.kind == "uniform":
            limits.append(self.mem_len)
        if window is not None:
            limits.append(window)
        return min(limits, default=None)
