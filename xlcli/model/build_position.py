"""Construction of position encodings from a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable

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

Positions = tuple[Position, list[Position]]
"""Encoding at the embedding, and encoding of each layer."""


def _placed(config: ModelConfig, make: Callable[[], Position]) -> Positions:
    """Absolute encoding at the embedding, or one in each layer."""
    plain = [Position() for _ in range(config.n_layers)]
    if getattr(config.position, "placement", None) == "embedding":
        return make(), plain
    return Position(), [make() for _ in plain]


def _in_layers(config: ModelConfig, make: Callable[[], Position], *, shared: bool = False) -> Positions:
    """One encoding in each layer, or the same one in all."""
    return Position(), [make()] * config.n_layers if shared else [make() for _ in range(config.n_layers)]


def _none(config: ModelConfig) -> Positions:
    return _in_layers(config, Position)


def _sinusoidal(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.SinusoidalPositionConfig)
    if kind.placement == "qk":
        return _in_layers(config, lambda: SinusoidalHeadPosition(amplitude=kind.amplitude or 1.0))
    rms = config.embedding_rms if kind.placement == "embedding" else config.stream_rms
    return _placed(config, lambda: SinusoidalPosition(amplitude=kind.amplitude or rms))


def _learned(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.LearnedPositionConfig)
    on_heads = kind.placement == "qk"
    encoding = LearnedHeadPosition if on_heads else AxialPosition
    width = config.attention.n_heads * config.head_dim if on_heads else config.dim

    def make() -> Position:
        return encoding(shape=(kind.max_len,), dims=(width,), overflow=kind.overflow)

    if kind.placement == "embedding":
        return _placed(config, make)
    return _in_layers(config, make, shared=kind.shared)


def _axial(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.AxialPositionConfig)
    return _placed(
        config, lambda: AxialPosition(shape=kind.shape, dims=kind.widths(config.dim), overflow=kind.overflow)
    )


def _rope(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.RopePositionConfig)
    encoding = RopeEmbedding if kind.placement == "embedding" else RopePosition
    return _placed(config, lambda: encoding(layout=kind.layout, base=kind.base))


def _alibi(config: ModelConfig) -> Positions:
    return _in_layers(config, AlibiPosition)


def _t5(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.T5PositionConfig)
    tables = [nn.Embedding(kind.n_buckets, config.attention.n_heads) for _ in range(config.n_layers)]
    if kind.shared:
        tables = tables[:1] * config.n_layers
    return Position(), [T5Position(table=table, max_distance=kind.max_distance) for table in tables]


def _shaw(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.ShawPositionConfig)
    scale = config.attention.score_scale(ShawPosition.n_terms, config.head_dim)
    return _in_layers(
        config, lambda: ShawPosition(head_dim=config.head_dim, max_distance=kind.max_distance, scale=scale)
    )


def _xl(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.XLPositionConfig)
    heads, width = config.attention.n_heads, config.head_dim
    shared = XLBiases(heads, width) if kind.tied else None
    return _in_layers(
        config,
        lambda: XLPosition(
            n_heads=heads,
            head_dim=width,
            n_features=kind.n_features or config.dim + config.dim % 2,
            biases=shared or XLBiases(heads, width),
            scale=config.attention.score_scale(XLPosition.n_terms, config.head_dim),
        ),
    )


def _contextual_1(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.Contextual1PositionConfig)
    return _in_layers(
        config,
        lambda: Contextual1Position(
            dim=config.dim,
            n_heads=config.attention.n_heads,
            head_dim=config.head_dim,
            n_buckets=kind.n_buckets,
            max_distance=kind.max_distance,
            scale=config.attention.score_scale(Contextual1Position.n_terms, config.head_dim),
        ),
        shared=kind.shared,
    )


def _contextual_2(config: ModelConfig) -> Positions:
    kind = config.position
    assert isinstance(kind, kinds.Contextual2PositionConfig)
    return _in_layers(
        config,
        lambda: Contextual2Position(
            dim=config.dim,
            n_buckets=kind.n_buckets,
            max_distance=kind.max_distance,
            scale=config.attention.score_scale(Contextual2Position.n_terms, config.head_dim),
        ),
        shared=kind.shared,
    )


POSITION_BUILDERS: dict[str, Callable[[ModelConfig], Positions]] = {
    "none": _none,
    "sinusoidal": _sinusoidal,
    "learned": _learned,
    "axial": _axial,
    "rope": _rope,
    "alibi": _alibi,
    "t5": _t5,
    "shaw": _shaw,
    "xl": _xl,
    "contextual-1": _contextual_1,
    "contextual-2": _contextual_2,
}
"""Position encoding kind to builder."""
