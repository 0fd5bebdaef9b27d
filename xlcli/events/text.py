"""Events of generation and compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Next text of a sample, in whole UTF-8 characters."""

    sample: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token in nats by the model, before temperature, repetition penalty and filters.

    `token` is its id. `best` are the most probable tokens in its place, if they were asked for, the best one first.
    """

    token: int
    text: bytes
    logprob: float
    best: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished sample; its fields are the JSON keys of `xlcli generate`. `logprobs`: None unless asked for."""

    sample: int
    prompt: str
    text: str
    tokens: int
    seed: int
    stop_reason: Literal["length", "stop", "interrupted"]
    prompt_tokens_per_second: float
    tokens_per_second: float
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Coded:
    """A text that was compressed or decompressed to its end.

    `bits` is the sum of the surprisals of its tokens, `compressed_bytes` the size of the compressed text.
    """

    bytes: int
    compressed_bytes: int
    tokens: int
    bits: float
    seconds: float
