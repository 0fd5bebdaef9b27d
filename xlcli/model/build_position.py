"""Construction of position encodings from a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from xlcli.config import ModelConfig
from xlcli.config import position as kinds
from xlcli.model.position import Position
from xlcli.model.position.alibi import AlibiPosition
from xlcli.model.position.contextual import Contextual1Position, Contextual2Position
from xlcli.model.position.learned import AxialPosition, LearnedHeadPosition
from xlcli.model.position.rope import RopeEmbedding, RopePosition
from xlcli.model.position.shaw import ShawPosition
from xlcli.model.position.sinusoidal import SinusoidalHeadPosition, SinusoidalPosition
from xlcli.model.position.t5 import T5Position
from xlcli.model.position.xl import XLBiases, XLPosition


def build_positions(config: ModelConfig) -> tuple[Position, list[Position]]:
    """Encoding at the embedding, and encoding of each layer, which is the same one for all if it is `shared`."""
    kind, layers = config.position, range(config.n_layers)
    make = POSITION_BUILDERS[type(kind)](config, kind)
    if getattr(kind, "placement", None) == "embedding":
        return make(), [Position() for _ in layers]
    if getattr(kind, "shared", False):
        return Position(), [make()] * len(layers)
    return Position(), [make() for _ in layers]


def _sinusoidal(config: ModelConfig, kind: kinds.SinusoidalPositionConfig) -> Callable[[], Position]:
    if kind.placement == "qk":
        return lambda: SinusoidalHeadPosition(amplitude=kind.amplitude or 1.0)
    rms = config.embedding_rms if kind.placement == "embedding" else config.stream_rms
    return lambda: SinusoidalPosition(amplitude=kind.amplitude or rms)


def _learned(config: ModelConfig, kind: kinds.LearnedPositionConfig) -> Callable[[], Position]:
    on_heads = kind.placement == "qk"
    encoding = LearnedHeadPosition if on_heads else AxialPosition
    width = config.attention.n_heads * config.head_dim if on_heads else config.dim
    return lambda: encoding(shape=(kind.max_len,), dims=(width,), overflow=kind.overflow)


def _axial(config: ModelConfig, kind: kinds.AxialPositionConfig) -> Callable[[], Position]:
    return lambda: AxialPosition(shape=kind.shape, dims=kind.widths(config.dim), overflow=kind.overflow)


def _rope(config: ModelConfig, kind: kinds.RopePositionConfig) -> Callable[[], Position]:
    encoding = RopeEmbedding if kind.placement == "embedding" else RopePosition
    return lambda: encoding(layout=kind.layout, base=kind.base)


def _t5(config: ModelConfig, kind: kinds.T5PositionConfig) -> Callable[[], Position]:
    return lambda: T5Position(
        table=nn.Embedding(kind.n_buckets, config.attention.n_heads), max_distance=kind.max_distance
    )


def _shaw(config: ModelConfig, kind: kinds.ShawPositionConfig) -> Callable[[], Position]:
    scale = _scale(config, ShawPosition)
    return lambda: ShawPosition(head_dim=config.head_dim, max_distance=kind.max_distance, scale=scale)


def _xl(config: ModelConfig, kind: kinds.XLPositionConfig) -> Callable[[], Position]:
    heads, width = config.attention.n_heads, config.head_dim
    shared = XLBiases(heads, width) if kind.tied else None
    return lambda: XLPosition(
        n_heads=heads,
        head_dim=width,
        n_features=kind.n_features or config.dim + config.dim % 2,
        biases=shared or XLBiases(heads, width),
        scale=_scale(config, XLPosition),
    )


def _contextual_1(config: ModelConfig, kind: kinds.Contextual1PositionConfig) -> Callable[[], Position]:
    return lambda: Contextual1Position(
        dim=config.dim,
        n_heads=config.attention.n_heads,
        head_dim=config.head_dim,
        n_buckets=kind.n_buckets,
        max_distance=kind.max_distance,
        scale=_scale(config, Contextual1Position),
    )


def _contextual_2(config: ModelConfig, kind: kinds.Contextual2PositionConfig) -> Callable[[], Position]:
    return lambda: Contextual2Position(
        dim=config.dim,
        n_buckets=kind.n_buckets,
        max_distance=kind.max_distance,
        scale=_scale(config, Contextual2Position),
    )


def _scale(config: ModelConfig, encoding: type[Position]) -> float:
    """Factor on the scores of an encoding."""
    return config.attention.score_scale(encoding.n_terms, config.head_dim)


POSITION_BUILDERS: dict[type[kinds.PositionConfig], Callable[[ModelConfig, Any], Callable[[], Position]]] = {
    kinds.NoPositionConfig: lambda config, kind: Position,
    kinds.SinusoidalPositionConfig: _sinusoidal,
    kinds.LearnedPositionConfig: _learned,
    kinds.AxialPositionConfig: _axial,
    kinds.RopePositionConfig: _rope,
    kinds.AlibiPositionConfig: lambda config, kind: AlibiPosition,
    kinds.T5PositionConfig: _t5,
    kinds.ShawPositionConfig: _shaw,
    kinds.XLPositionConfig: _xl,
    kinds.Contextual1PositionConfig: _contextual_1,
    kinds.Contextual2PositionConfig: _contextual_2,
}
"""Configuration class to a function that returns the constructor of one encoding."""
