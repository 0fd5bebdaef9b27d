"""From a `ModelConfig` to a `LanguageModel`. Only this file and `build_position` read the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from xlcli import config as settings
from xlcli.config import ModelConfig
from xlcli.model.attention import Attention
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.linear import LinearAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.build_position import POSITIONS, score_scale
from xlcli.model.embedding import AdaptiveEmbedding, TokenEmbedding
from xlcli.model.feedforward import FeedForward
from xlcli.model.head import AdaptiveHead, Head, SoftmaxHead
from xlcli.model.init import init_weights
from xlcli.model.lm import LanguageModel
from xlcli.model.norm import build_norm
from xlcli.model.position import Position
from xlcli.model.residual import PostNorm, PreNorm, Residual, ReZero, Sandwich
from xlcli.model.reversible import ReversibleStack
from xlcli.model.stack import Block, Stack
from xlcli.model.universal import AdaptiveStack, UniversalStack


def build_model(config: ModelConfig, generator: torch.Generator | None = None) -> LanguageModel:
    """A freshly initialized model on the current default device."""
    absolute, positions = POSITIONS[config.position.kind](config)
    layers = [config.of_layer(attention) for attention in config.attentions]
    embedding = _embedding(config)
    model = LanguageModel(
        config=config,
        embedding=embedding,
        position=absolute,
        stack=_stack(config, [_block(*layer) for layer in zip(layers, positions, strict=True)]),
        head=_head(config, embedding if config.embedding.tied else _embedding(config)),
    )
    if next(model.parameters()).device.type != "meta":
        init_weights(model, config, generator)
    return model


def _embedding(config: ModelConfig) -> TokenEmbedding | AdaptiveEmbedding:
    made = config.embedding
    if not config.cutoffs:
        return TokenEmbedding(
            vocab_size=config.vocab_size,
            dim=config.dim,
            inner_dim=made.inner_dim,
            scaled=made.scaled,
            dropout=config.dropout.embedding,
        )
    return AdaptiveEmbedding(
        vocab_size=config.vocab_size,
        dim=config.dim,
        cutoffs=config.cutoffs,
        div_val=made.div_val,
        scaled=made.scaled,
        dropout=config.dropout.embedding,
    )


def _head(config: ModelConfig, source: TokenEmbedding | AdaptiveEmbedding) -> Head:
    """A head whose matrices are those of `source`."""
    if isinstance(source, TokenEmbedding):
        return _softmax(config, source, config.loss_chunk)
    clusters = [_softmax(config, table) for table in source.tables()]
    return AdaptiveHead(clusters=clusters, cutoffs=config.cutoffs, bias=config.bias, loss_chunk=config.loss_chunk)


def _softmax(config: ModelConfig, source: TokenEmbedding, loss_chunk: int | None = None) -> SoftmaxHead:
    up = None if source.up is None else source.up.weight
    return SoftmaxHead(weight=source.table.weight, up=up, bias=config.bias, loss_chunk=loss_chunk)


def _stack(config: ModelConfig, blocks: list[Block]) -> Stack:
    final: nn.Module
    if config.norm.placement == "post":
        final = nn.Dropout(config.dropout.residual)
    else:
        final = nn.Identity() if config.norm.placement == "rezero" else _norm(config)
    kind = config.stack
    if isinstance(kind, settings.ReversibleStackConfig):
        return ReversibleStack(blocks, final)
    if not isinstance(kind, settings.UniversalStackConfig):
        return Stack(blocks, final)
    signal = config.stream_rms if kind.time_signal else 0.0
    if not kind.act:
        return UniversalStack(blocks, final, n_steps=kind.n_steps, time_signal=signal)
    return AdaptiveStack(blocks, final, dim=config.dim, n_steps=kind.n_steps, time_signal=signal, epsilon=kind.epsilon)


def _block(config: ModelConfig, position: Position) -> Block:
    """A block of a model all of whose layers have this configuration."""
    if not config.position.needs <= config.attention.offers:
        position = Position()
    return Block(
        attention=ATTENTIONS[config.attention.kind](config, position),
        feedforward=FeedForward(
            kind=config.feedforward.kind,
            dim=config.dim,
            ffn_dim=config.ffn_dim,
            bias=config.bias,
            dropout=config.dropout.feedforward,
            chunk_len=config.feedforward.chunk_len,
        ),
        attention_residual=_residual(config),
        feedforward_residual=_residual(config),
    )


def _norm(config: ModelConfig) -> nn.Module:
    return build_norm(config.norm.kind, config.dim, bias=config.bias)


def _residual(config: ModelConfig) -> Residual:
    dropout = config.dropout.residual
    match config.norm.placement:
        case "pre":
            return PreNorm(_norm(config), dropout)
        case "post":
            return PostNorm(_norm(config), dropout)
        case "sandwich":
            return Sandwich(_norm(config), _norm(config), dropout)
        case "rezero":
            return ReZero(dropout)


def _softmax_attention(config: ModelConfig, position: Position) -> Attention:
    made: Callable[..., FullAttention] = FullAttention
    if isinstance(config.attention, settings.LocalAttentionConfig):
        made = partial(LocalAttention, window=config.attention.window)
    return made(
        dim=config.dim,
        n_heads=config.attention.n_heads,
        head_dim=config.head_dim,
        position=position,
        scale=score_scale(config, position.n_terms),
        dropout=config.dropout.attention,
    )


def _linear(config: ModelConfig, position: Position) -> Attention:
    assert isinstance(config.attention, settings.LinearAttentionConfig)
    return LinearAttention(
        dim=config.dim,
        n_heads=config.attention.n_heads,
        head_dim=config.head_dim,
        position=position,
        n_features=config.attention.n_features,
        orthogonal=config.attention.orthogonal,
    )


def _lsh(config: ModelConfig, position: Position) -> Attention:
    assert isinstance(config.attention, settings.LSHAttentionConfig)
    return LSHAttention(
        dim=config.dim,
        n_heads=config.attention.n_heads,
        head_dim=config.head_dim,
        position=position,
        factors=config.attention.factors,
        bucket_size=config.attention.bucket_size,
        n_hashes=config.attention.n_hashes,
        dropout=config.dropout.attention,
    )


ATTENTIONS: dict[str, Callable[[ModelConfig, Position], Attention]] = {
    "full": _softmax_attention,
    "local": _softmax_attention,
    "linear": _linear,
    "lsh": _lsh,
}
"""From a kind of attention to one branch."""
