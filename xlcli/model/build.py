"""From a `ModelConfig` to a `LanguageModel`. The only file of this room that reads the configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from xlcli.config import ModelConfig, NoPosition, XLPosition
from xlcli.model import position
from xlcli.model.attention.full import FullAttention
from xlcli.model.embedding import TokenEmbedding
from xlcli.model.feedforward import FeedForward
from xlcli.model.head import SoftmaxHead
from xlcli.model.init import init_weights
from xlcli.model.lm import LanguageModel
from xlcli.model.norm import build_norm
from xlcli.model.position import Position, xl
from xlcli.model.stack import Block, PostNormStack, PreNormStack, Stack


def build_model(config: ModelConfig, generator: torch.Generator | None = None) -> LanguageModel:
    """A freshly initialised model on the current default device."""
    positions = POSITIONS[config.position.kind](config)
    blocks = [_block(config, position) for position in positions]
    embedding = TokenEmbedding(
        vocab_size=config.vocab_size,
        dim=config.dim,
        scaled=config.embedding.scaled,
        dropout=config.dropout.embedding,
    )
    weight = embedding.table.weight
    if not config.embedding.tied:
        weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
    stack: Stack
    if config.norm.placement == "pre":
        stack = PreNormStack(blocks, build_norm(config.norm.kind, config.dim, bias=config.bias))
    else:
        stack = PostNormStack(blocks, config.dropout.residual)
    model = LanguageModel(
        config=config, embedding=embedding, stack=stack, head=SoftmaxHead(weight=weight, bias=config.bias)
    )
    if weight.device.type != "meta":
        init_weights(model, config, generator)
    return model


def _block(config: ModelConfig, position: Position) -> Block:
    return Block(
        attention=FullAttention(
            dim=config.dim,
            n_heads=config.attention.n_heads,
            head_dim=config.head_dim,
            position=position,
            dropout=config.dropout.attention,
        ),
        feedforward=FeedForward(
            kind=config.feedforward.kind,
            dim=config.dim,
            ffn_dim=config.ffn_dim,
            bias=config.bias,
            dropout=config.dropout.feedforward,
        ),
        attention_norm=build_norm(config.norm.kind, config.dim, bias=config.bias),
        feedforward_norm=build_norm(config.norm.kind, config.dim, bias=config.bias),
        dropout=config.dropout.residual,
    )


def _no_positions(config: ModelConfig) -> list[Position]:
    return [position.Position() for _ in range(config.n_layers)]


def _xl_positions(config: ModelConfig) -> list[Position]:
    kind = config.position
    assert isinstance(kind, XLPosition)
    heads, width = config.attention.n_heads, config.head_dim
    shared = xl.XLBiases(heads, width) if kind.tied else None
    return [
        xl.XLPosition(
            n_heads=heads,
            head_dim=width,
            n_features=kind.n_features or config.dim + config.dim % 2,
            biases=shared or xl.XLBiases(heads, width),
            clamp_len=kind.clamp_len,
        )
        for _ in range(config.n_layers)
    ]


POSITIONS: dict[str, Callable[[ModelConfig], list[Position]]] = {
    NoPosition().kind: _no_positions,
    XLPosition().kind: _xl_positions,
}
"""From a kind of position encoding to one instance a layer."""
