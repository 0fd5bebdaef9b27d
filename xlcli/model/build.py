"""Construction of a `LanguageModel` from a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from xlcli.config import AttentionConfig, ModelConfig
from xlcli.config import attention as kinds
from xlcli.config import model as stacks
from xlcli.config import position as encodings
from xlcli.model.attention import Attention
from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.linear import LinearAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.embedding import AdaptiveEmbedding, BigramEmbedding, TokenEmbedding
from xlcli.model.head import AdaptiveHead, Head, SoftmaxHead
from xlcli.model.lm import LanguageModel
from xlcli.model.position import Position, absolute, distance, rope, xl
from xlcli.model.reversible import ReversibleStack
from xlcli.model.stack import AdaptiveStack, Block, FeedForward, Residual, Stack, UniversalStack
from xlcli.ops.layers import Dropout, LayerNorm, RMSNorm


def build_model(config: ModelConfig, generator: torch.Generator | None = None) -> LanguageModel:
    """Newly initialized model on the current default device; a model on the meta device stays uninitialized."""
    at_embedding, positions = build_positions(config)
    embedding = _embedding(config)
    bigrams = None
    if config.embedding.n_bigrams:
        bigrams = BigramEmbedding(config.embedding.n_bigrams, config.dim)
    layers = zip(config.attentions, positions, strict=True)
    model = LanguageModel(
        config=config,
        embedding=embedding,
        embedding_norm=_norm(config) if config.embedding.norm else nn.Identity(),
        bigrams=bigrams,
        position=at_embedding,
        stack=_stack(config, [_block(config, attention, position) for attention, position in layers]),
        head=_head(config, embedding),
    )
    if next(model.parameters()).device.type != "meta":
        init_weights(model, config, generator)
    return model


def build_on_meta(config: ModelConfig) -> LanguageModel:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"), _NoInitialValues():
        return build_model(config)


class _NoInitialValues(TorchFunctionMode):
    """Mode in which modules of PyTorch get no initial values: on the meta device that imports its compiler (1 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]  # the tensor that it would fill
        return func(*args, **kwargs)


def _embedding(config: ModelConfig) -> TokenEmbedding | AdaptiveEmbedding:
    settings: dict[str, Any] = {"vocab_size": config.vocab_size, "dim": config.dim}
    settings |= {"scaled": config.embedding.scaled, "dropout": config.dropout.embedding}
    settings["inner_dim"] = config.embedding.inner_dim
    if config.cutoffs:
        return AdaptiveEmbedding(cutoffs=config.cutoffs, div_val=config.embedding.div_val, **settings)
    return TokenEmbedding(**settings)


def _head(config: ModelConfig, embedding: TokenEmbedding | AdaptiveEmbedding) -> Head:
    """Head that shares matrices of the embedding if they are tied."""
    source = embedding if config.embedding.tied else _embedding(config)
    tables = [source] if isinstance(source, TokenEmbedding) else source.clusters
    # Number of first tables whose projection the head does not share.
    n_untied = {"all": 0, "rest": 1, "none": len(tables)}[config.embedding.tied_projections]
    settings: dict[str, Any] = {"bias": config.bias, "softcap": config.logit_softcap, "loss_chunk": config.loss_chunk}
    heads = []
    for i, table in enumerate(tables):
        projection = None if table.up is None else table.up.weight
        if projection is not None and i < n_untied:
            projection = nn.Parameter(torch.empty_like(projection))
        heads.append(SoftmaxHead(weight=table.table.weight, projection=projection, **settings))
    if len(heads) == 1:
        return heads[0]
    return AdaptiveHead(clusters=heads, cutoffs=config.cutoffs, **settings)


def _stack(config: ModelConfig, blocks: list[Block]) -> Stack:
    kind, placement = config.stack, config.norm.placement
    final: nn.Module = nn.Identity()
    if placement == "post":
        final = Dropout(config.dropout.residual)
    elif config.norm.final and placement in ("pre", "sandwich", "parallel"):
        final = _norm(config)
    if isinstance(kind, stacks.ReversibleStackConfig):
        return ReversibleStack(blocks, final)
    if not isinstance(kind, stacks.UniversalStackConfig):
        assert isinstance(kind, stacks.StandardStackConfig)
        return Stack(blocks, final, input_residual=kind.input_residual)
    amplitude = config.stream_rms if kind.time_signal else 0.0
    steps: dict[str, Any] = {"n_steps": kind.n_steps, "time_signal": amplitude}
    if not kind.act:
        return UniversalStack(blocks, final, **steps)
    return AdaptiveStack(blocks, final, dim=config.dim, epsilon=kind.epsilon, halt_bias=kind.halt_bias, **steps)


def _block(config: ModelConfig, attention: AttentionConfig, position: Position) -> Block:
    """One block; its attention gets the position encoding only if it offers all hooks that the encoding needs."""
    if not config.position.needs <= attention.offers:
        position = Position()
    # By name, so that no setting of the section can be forgotten.
    settings: dict[str, Any] = dict(config.feedforward) | {"dim": config.dim, "ffn_dim": config.ffn_dim}
    settings |= {"bias": config.bias, "dropout": config.dropout.feedforward}
    make_residual = partial(Residual, config.norm.placement, partial(_norm, config), config.dropout.residual)
    return Block(
        vectors=nn.Embedding(config.vocab_size, config.dim) if config.embedding.per_layer else None,
        attention=_attention(config, attention, position),
        feedforward=FeedForward(**settings),
        attention_residual=make_residual(),
        feedforward_residual=make_residual(),
    )


ATTENTIONS: dict[type[AttentionConfig], type[Attention]] = {  # modules; arguments are named as the settings
    kinds.FullAttentionConfig: FullAttention,
    kinds.LocalAttentionConfig: LocalAttention,
    kinds.LinearAttentionConfig: LinearAttention,
    kinds.LSHAttentionConfig: LSHAttention,
}


def _attention(config: ModelConfig, attention: AttentionConfig, position: Position) -> Attention:
    """The module of an attention kind; its arguments have the names of the settings, but for those here."""
    computed = {"kind", "head_dim", "scaled", "redraw_every", "n_buckets"}
    settings: dict[str, Any] = {name: value for name, value in attention if name not in computed}
    settings |= {"dim": config.dim, "head_dim": config.head_dim, "position": position}
    if isinstance(attention, kinds.SoftmaxAttentionConfig):
        scale = (position.n_terms * config.head_dim) ** -0.5 if attention.scaled else 1.0
        settings |= {"scale": scale, "dropout": config.dropout.attention, "epsilon": config.norm.epsilon}
    if isinstance(attention, kinds.FullAttentionConfig):
        settings["n_sinks"] = config.n_sinks
    if isinstance(attention, kinds.LSHAttentionConfig):
        settings |= {"factors": attention.factors, "dropout": config.dropout.attention}
    return ATTENTIONS[type(attention)](**settings)


def build_positions(config: ModelConfig) -> tuple[Position, list[Position]]:
    """Encoding at the embedding, and encoding of each layer, which is the same one for all if it is `shared`."""
    kind, n_layers = config.position, config.n_layers
    if getattr(kind, "placement", None) == "embedding":
        return _position(config, config.attention), [Position() for _ in range(n_layers)]
    if getattr(kind, "shared", False):
        return Position(), [_position(config, config.attention)] * n_layers
    biases = None
    if getattr(kind, "tied", False):
        biases = xl.XLBiases(config.attention.n_heads, config.head_dim)
    return Position(), [_position(config, attention, biases) for attention in config.attentions]


def _position(config: ModelConfig, attention: AttentionConfig, biases: xl.XLBiases | None = None) -> Position:
    """The encoding of a layer with this attention; `biases` of Transformer-XL are given if layers share them."""
    heads, width = config.attention.n_heads, config.head_dim
    wraps = getattr(config.position, "overflow", None) == "wrap"
    match kind := config.position:
        case encodings.NoPositionConfig():
            return Position()
        case encodings.SinusoidalPositionConfig():
            rms = {"qk": 1.0, "embedding": config.embedding_rms, "layers": config.stream_rms}[kind.placement]
            return absolute.SinusoidalPosition(amplitude=kind.amplitude or rms, in_heads=kind.placement == "qk")
        case encodings.LearnedPositionConfig():
            in_heads = kind.placement == "qk"
            dim = heads * width if in_heads else config.dim
            return absolute.AxialPosition(shape=(kind.max_len,), dims=(dim,), wraps=wraps, in_heads=in_heads)
        case encodings.AxialPositionConfig():
            return absolute.AxialPosition(shape=kind.shape, dims=kind.widths(config.dim), wraps=wraps)
        case encodings.RopePositionConfig():
            encoding = rope.RopeEmbedding if kind.placement == "embedding" else rope.RopePosition
            settings: dict[str, Any] = dict(kind)
            for used_here in ("kind", "placement", "n_sinks", "local_base"):
                del settings[used_here]
            if kind.local_base is not None and isinstance(attention, kinds.LocalAttentionConfig):
                settings |= {"base": kind.local_base, "scaling": encodings.RopeScalingConfig()}
            return encoding(**settings)
        case encodings.AlibiPositionConfig():
            return distance.AlibiPosition()
        case encodings.T5PositionConfig():
            return distance.T5Position(table=nn.Embedding(kind.n_buckets, heads), max_distance=kind.max_distance)
        case encodings.Contextual1PositionConfig():
            table = nn.Embedding(kind.n_buckets, config.dim)
            return distance.Contextual1Position(
                table=table, max_distance=kind.max_distance, n_heads=heads, head_dim=width
            )
        case encodings.Contextual2PositionConfig():
            table = nn.Embedding(kind.n_buckets, config.dim)
            return distance.Contextual2Position(table=table, max_distance=kind.max_distance)
        case encodings.ShawPositionConfig():
            return distance.ShawPosition(head_dim=width, max_distance=kind.max_distance)
        case encodings.XLPositionConfig():
            n_features = kind.n_features or config.dim + config.dim % 2
            return xl.XLPosition(n_features=n_features, biases=biases or xl.XLBiases(heads, width))
    raise NotImplementedError(f"no encoding for {type(kind).__name__}")


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm.kind == "layer":
        return LayerNorm(config.dim, eps=config.norm.epsilon, bias=config.bias)
    return RMSNorm(config.dim, eps=config.norm.epsilon)


def init_weights(model: LanguageModel, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Fills all parameters in the order of `named_parameters`, then draws all random features.

    matrices, embedding, head     normal(0, init_std)
    last matrix of each branch    the same / sqrt(2 depth) with norm `pre` (Radford et al. 2019) or `parallel`, or 0
                                  (`zero_init`)
    XL biases u, v                normal(0, init_std), as in the original code
    norm gains                    1
    biases                        0
    `initial_constants`           constants that a module declares in this attribute, such as ReZero's alpha
    """
    last_scale = 1.0
    if config.zero_init:
        last_scale = 0.0
    elif config.norm.placement in ("pre", "parallel"):
        last_scale = (2 * config.depth) ** -0.5
    scales: dict[int, float] = {}
    for block in model.stack.blocks:
        scales[id(block.attention.output.weight)] = last_scale
        scales[id(block.feedforward.down.weight)] = last_scale

    constants: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            constants[id(module.weight)] = 1.0
        for name, value in getattr(module, "initial_constants", {}).items():
            constants[id(module.get_parameter(name))] = value

    # The order of the draws: another one would give other weights with the same seed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in constants:
                parameter.fill_(constants[id(parameter)])
            elif name.rpartition(".")[2] == "bias":
                parameter.zero_()
            else:
                parameter.normal_(0.0, config.init_std * scales.get(id(parameter), 1.0), generator=generator)
    model.stack.redraw(range(config.n_layers), generator)
