"""Construction of position encodings from a `ModelConfig`."""

from __future__ import annotations

from torch import nn

from xlcli.config import AttentionConfig, ModelConfig
from xlcli.config import position as kinds
from xlcli.config.attention import LocalAttentionConfig
from xlcli.model.position import Position
from xlcli.model.position.alibi import AlibiPosition
from xlcli.model.position.contextual import Contextual1Position, Contextual2Position
from xlcli.model.position.learned import AxialPosition
from xlcli.model.position.rope import RopeEmbedding, RopePosition
from xlcli.model.position.shaw import ShawPosition
from xlcli.model.position.sinusoidal import SinusoidalPosition
from xlcli.model.position.t5 import T5Position
from xlcli.model.position.xl import XLBiases, XLPosition


def build_positions(config: ModelConfig) -> tuple[Position, list[Position]]:
    """Encoding at the embedding, and encoding of each layer, which is the same one for all if it is `shared`."""
    kind, n = config.position, config.n_layers
    if getattr(kind, "placement", None) == "embedding":
        return _build(config, config.attention), [Position() for _ in range(n)]
    if getattr(kind, "shared", False):
        return Position(), [_build(config, config.attention)] * n
    biases = XLBiases(config.attention.n_heads, config.head_dim) if getattr(kind, "tied", False) else None
    return Position(), [_build(config, attention, biases) for attention in config.attentions]


def _build(config: ModelConfig, attention: AttentionConfig, biases: XLBiases | None = None) -> Position:
    """The encoding of a layer with this attention; `biases` of Transformer-XL are given if layers share them."""
    heads, width = config.attention.n_heads, config.head_dim
    wraps = getattr(config.position, "overflow", None) == "wrap"
    match kind := config.position:
        case kinds.NoPositionConfig():
            return Position()
        case kinds.SinusoidalPositionConfig():
            rms = {"qk": 1.0, "embedding": config.embedding_rms, "layers": config.stream_rms}[kind.placement]
            return SinusoidalPosition(amplitude=kind.amplitude or rms, in_heads=kind.placement == "qk")
        case kinds.LearnedPositionConfig():
            in_heads = kind.placement == "qk"
            dim = heads * width if in_heads else config.dim
            return AxialPosition(shape=(kind.max_len,), dims=(dim,), wraps=wraps, in_heads=in_heads)
        case kinds.AxialPositionConfig():
            return AxialPosition(shape=kind.shape, dims=kind.widths(config.dim), wraps=wraps)
        case kinds.RopePositionConfig():
            encoding = RopeEmbedding if kind.placement == "embedding" else RopePosition
            settings = {
                name: value for name, value in kind if name not in ("kind", "placement", "n_sinks", "local_base")
            }
            if kind.local_base is not None and isinstance(attention, LocalAttentionConfig):
                settings |= {"base": kind.local_base, "scaling": kinds.RopeScalingConfig()}
            return encoding(**settings)
        case kinds.AlibiPositionConfig():
            return AlibiPosition()
        case kinds.T5PositionConfig():
            return T5Position(table=nn.Embedding(kind.n_buckets, heads), max_distance=kind.max_distance)
        case kinds.Contextual1PositionConfig():
            table = nn.Embedding(kind.n_buckets, config.dim)
            return Contextual1Position(table=table, max_distance=kind.max_distance, n_heads=heads, head_dim=width)
        case kinds.Contextual2PositionConfig():
            table = nn.Embedding(kind.n_buckets, config.dim)
            return Contextual2Position(table=table, max_distance=kind.max_distance)
        case kinds.ShawPositionConfig():
            return ShawPosition(head_dim=width, max_distance=kind.max_distance)
        case kinds.XLPositionConfig():
            n_features = kind.n_features or config.dim + config.dim % 2
            return XLPosition(n_features=n_features, biases=biases or XLBiases(heads, width))
    raise NotImplementedError(f"no encoding for {type(kind).__name__}")
