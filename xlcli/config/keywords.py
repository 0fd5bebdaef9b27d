"""Keyword arguments of the Python interface: keys of the configuration classes of `config/inference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from xlcli.config.base import SpanKind
from xlcli.config.inference import AdaptedWeights, Dtype


class OnlineOptions(TypedDict, total=False):
    """Keys of `OnlineConfig`."""

    adapt: bool
    adapt_block: int | None
    adapt_lr: float | None
    adapt_decay: float | None
    adapt_weights: AdaptedWeights | None
    context_cache: int | None


class EvalOptions(OnlineOptions, total=False):
    """Keys of `EvalConfig`."""

    mem_len: int | None
    segment_len: int | None
    stride: int | None
    batch_size: int | None
    span: SpanKind
    reset_on_document: bool | None
    split: Literal["valid", "test"]
    sweep_mem_len: Sequence[int]
    limit: int | None
    recall: bool
    binary: bool
    text_field: str | None
    memory_dtype: Dtype


class SamplingOptions(OnlineOptions, total=False):
    """Keys of `GenerateConfig` for one sample."""

    mem_len: int | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: Sequence[str]
    memory_dtype: Dtype


class GenerateOptions(SamplingOptions, total=False):
    """Keys of `GenerateConfig`."""

    num_samples: int
    logprobs: int | None


class StreamOptions(OnlineOptions, total=False):
    """Keys of `StreamConfig`."""

    mem_len: int | None
    emit: Literal["lines", "tokens", "stats", "none"]
    continue_tokens: int
    save_every: float | None
    flush_ms: int | None
    reset_on: str | None
    reset_on_document: bool | None
    binary: bool
    text_field: str | None
    memory_dtype: Dtype
