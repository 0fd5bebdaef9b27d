"""Events of evaluation, streaming and benchmarks."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of evaluated or streamed text: offset of its first byte, its text, its surprisal in bits."""

    byte: int
    text: bytes
    bits: float


@dataclass(frozen=True, slots=True)
class ContextBin:
    """Loss of tokens with a context of at least `start` and fewer than `stop` tokens, counted from an empty memory.

    `margin` is half the width of the 95 % confidence interval of `bits_per_byte`; None if it cannot be estimated.
    """

    start: int
    stop: int
    tokens: int
    bits_per_byte: float
    margin: float | None = None


ROUNDING_TOKENS = 2**14
"""Number of tokens at the beginning of a text on which the cost of rounding is measured."""


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation; its fields are the JSON keys of `xlcli eval`. `chars`, `words`: None if the text is not UTF-8.

    `unknown_words` is the number of words scored as `<unk>`, None unless the vocabulary is one of words.
    `mean_steps` is the mean number of steps per token of a model with adaptive computation time, else None. `recall`
    is the share of the weight of full attention that LSH attention finds, if measured: the mean, and of each LSH layer.
    `weight_dtype` and `memory_dtype` are the number types that weights and memory were rounded to. `rounding_cost` is
    the difference in bits per byte to the unrounded model over the first `ROUNDING_TOKENS` tokens, None without
    rounding.
    `partial`: evaluation was stopped; all values are those of the tokens scored until then.
    `documents` is the number of documents that were scored to their end, each as if it were alone; 1 if the text was
    not divided.
    `stride` is the distance in tokens of overlapping windows of `segment_len` tokens, None without them; with windows,
    `by_context` is empty.
    `adapt`: the weights were adapted to the text while it was read. `context_cache`: number of tokens of the cache, if
    any. With either, `by_context` is empty.
    """

    model: str
    file: str
    bytes: int
    chars: int | None
    words: int | None
    tokens: int
    nats: float
    bits_per_byte: float
    bits_per_char: float | None
    perplexity: float
    word_perplexity: float | None
    mem_len: int
    segment_len: int
    batch_size: int
    span: str
    tokens_per_second: float
    peak_rss_bytes: int
    seconds: float
    device: str
    dtype: str
    weight_dtype: str = "float32"
    memory_dtype: str = "float32"
    rounding_cost: float | None = None
    unknown_words: int | None = None
    documents: int = 1
    stride: int | None = None
    adapt: bool = False
    context_cache: int | None = None
    mean_steps: float | None = None
    recall: float | None = None
    recall_by_layer: tuple[float, ...] = ()
    partial: bool = False
    by_context: tuple[ContextBin, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a task with one memory length; its fields are the JSON keys of `xlcli bench`.

    Fields that do not apply to a task are None.

    Attributes:
        calls: Number of timed calls.
        tokens: Number of tokens in the timed calls.
        tokens_per_second: Mean over these calls.
        ms_per_token: Median duration of a call, divided by its tokens; `_p90` and `_p99` are percentiles, the latter
            from 100 calls on.
        first_token_seconds: Time from a prompt of `prompt_tokens` tokens to the next token.
        recompute_ms_per_token: Time of a call over one token and the `mem_len` tokens before it of one sequence, from
            empty memory. None if it takes long or does not fit the machine.
        recompute_ratio: That time over `ms_per_token`.
        read_bytes_per_token: Size of the weights, memory and tables that a call reads, as they are stored.
        read_share: Share of the machine's bandwidth with which they are read.
        flops_per_token: Operations of the matrix products that are computed, in training of the whole step.
        flops_share: Share of the machine's arithmetic.
        peak_rss_bytes: Peak memory of the process up to the last timed call, without the comparison.
        machine_read_bytes_per_second: Measured bandwidth of the machine.
        machine_flops_per_second: Measured rate of matrix products in the number type.
        seconds: Duration of the timed calls.
        kernels: Whether compiled kernels decode.
    """

    task: Literal["decode", "eval", "train"]
    model: str
    parameters: int
    mem_len: int
    segment_len: int
    batch_size: int
    calls: int
    tokens: int
    tokens_per_second: float
    ms_per_token: float
    ms_per_token_p90: float
    ms_per_token_p99: float | None
    first_token_seconds: float | None
    prompt_tokens: int | None
    recompute_ms_per_token: float | None
    recompute_ratio: float | None
    read_bytes_per_token: float | None
    read_share: float | None
    flops_per_token: float
    flops_share: float
    machine_read_bytes_per_second: float
    machine_flops_per_second: float
    peak_rss_bytes: int
    seconds: float
    device: str
    dtype: str
    weight_dtype: str
    memory_dtype: str
    kernels: bool | None
    threads: int


@dataclass(frozen=True, slots=True)
class LineScore:
    """One line of a stream with its line end. `spans` are its tokens for coloring: (text, bits)."""

    line: int
    byte: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float
    text: builtins.bytes
    spans: tuple[tuple[builtins.bytes, float], ...]


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Totals of a stream so far."""

    lines: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float
    seconds: float
    tokens_per_second: float
    mem_len: int
    state_bytes: int
    final: bool
