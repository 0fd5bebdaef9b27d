"""Keyword arguments of the Python interface: keys of the configuration classes of `config/inference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from xlcli.config.base import SpanKind
from xlcli.config.inference import AdaptedWeights, Dtype
from xlcli.config.position import ClampLen


class ModelOptions(TypedDict, total=False):
    """Keys of `InferenceConfig` that are fixed when a model is loaded."""

    n_steps: int | None
    n_hashes: int | None
    clamp_len: ClampLen | None
    weight_dtype: Dtype


class OnlineOptions(TypedDict, total=False):
    """Keys of `OnlineConfig`."""

    adapt: bool
    adapt_block: int | None
    adapt_lr: float | None
    adapt_decay: float | None
    adapt_weights: AdaptedWeights | None
    context_cache: int | None


class ReadOptions(OnlineOptions, total=False):
    """Keys of `InferenceConfig` and `OnlineConfig` for reading one text."""

    mem_len: int | None
    memory_dtype: Dtype


class EvalOptions(ReadOptions, total=False):
    """Keys of `EvalConfig`."""

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


class SamplingOptions(ReadOptions, total=False):
    """Keys of `GenerateConfig` for one sample."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    stop: Sequence[str]


class GenerateOptions(SamplingOptions, total=False):
    """Keys of `GenerateConfig`."""

    num_samples: int
    logprobs: int | None


class StreamOptions(ReadOptions, total=False):
    """Keys of `StreamConfig`."""

    emit: Literal["lines", "tokens", "stats", "none"]
    continue_tokens: int
    save_every: float | None
    flush_ms: int | None
    reset_on: str | None
    reset_on_document: bool | None
    binary: bool
    text_field: str | None
