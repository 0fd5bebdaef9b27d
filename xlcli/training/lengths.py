"""Segment and memory lengths drawn at random in each training step (`train.random_lengths`).

A model then depends less on one segment length and one memory length. The idea of varying segments is that of Merity et
al. 2018 (section 4.1). Memory keeps as many tokens as configured; a step with a shorter one reads the latest of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from xlcli.config import TrainConfig
from xlcli.ops.span import Span
from xlcli.state import State


class Lengths(NamedTuple):
    """Tokens per segment and memory length of one step."""

    segment_len: int
    mem_len: int


def lengths(train: TrainConfig, seed: int, step: int) -> Lengths:
    """Lengths of the training step after `step` steps.

    If they are random: segments of at least half the configured length, and memory of at least 1 token, both uniform.
    They depend on seed and step only, so a resumed run draws the same ones.
    """
    if not train.random_lengths:
        return Lengths(train.segment_len, train.mem_len)
    generator = random.Random(f"{seed} {step}")  # noqa: S311
    least = -(-train.segment_len // 2)
    segment_len = least + int(generator.random() * (train.segment_len - least + 1))
    return Lengths(segment_len, 1 + int(generator.random() * train.mem_len) if train.mem_len else 0)


def shortened(state: State, drawn: Lengths) -> State:
    """State for a step with these lengths. Without recurrence every step begins an independent segment."""
    span = state.span
    if span.kind == "segment":
        return replace(state, seen=0, span=replace(span, segment_len=drawn.segment_len))
    return replace(state, span=replace(span, mem_len=drawn.mem_len, kept_len=span.mem_len))


def restored(state: State, span: Span) -> State:
    """State after such a step, with the configured span."""
    return replace(state, span=span, seen=0 if span.kind == "segment" else state.seen)
