"""What a model may be made of, and which parts go together."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from xlcli.config.attention import (
    ATTENTIONS,
    AnyAttentionConfig,
    AttentionConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    LocalAttentionConfig,
    LSHAttentionConfig,
    MixedAttentionConfig,
)
from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Positive, Rate
from xlcli.config.position import (
    POSITIONS,
    AnyPositionConfig,
    AxialPositionConfig,
    RopePositionConfig,
    SinusoidalPositionConfig,
    XLPositionConfig,
)


class StandardStackConfig(BaseConfig):
    """`n_layers` blocks, one after the other."""

    kind: Literal["standard"] = "standard"


class UniversalStackConfig(BaseConfig):
    """Universal Transformer (Dehghani et al. 2019): the `n_layers` blocks are applied `n_steps` times.

    `time_signal` adds a sinusoid of the step, as large as the stream is at first, to every step's input. With `act`
    each position halts when its halting probabilities reach 1 - `epsilon`, or at the last step; `ponder_weight` weighs the
    cost of a step in the loss, and `halt_bias` is where the halting logit starts: well below zero lets training begin
    deep.
    """

    kind: Literal["universal"] = "universal"
    n_steps: Annotated[int, Field(ge=1, le=1024)] = 4
    time_signal: bool = True
    act: bool = False
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    ponder_weight: Annotated[float, Field(ge=0.0, le=1e3)] = 0.01
    halt_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = -3.0


class ReversibleStackConfig(BaseConfig):
    """Two streams side by side, from which the backward pass rebuilds activations (Kitaev et al. 2020, section 3)."""

    kind: Literal["reversible"] = "reversible"


AnyStackConfig = Annotated[
    StandardStackConfig | UniversalStackConfig | ReversibleStackConfig, Field(discriminator="kind")
]
STACKS = {table.model_fields["kind"].default: table for table in get_args(get_args(AnyStackConfig)[0])}
"""Kind to table."""


class FeedForwardConfig(BaseConfig):
    """PositionConfig-wise feed-forward branch; the gated kinds have three matrices, the others two.

    `chunk_len` computes that many tokens at a time and recomputes them in the backward pass: less memory, same numbers.
    """

    kind: Literal["relu", "gelu", "swiglu", "geglu"] = "swiglu"
    ffn_dim: Count | None = None
    chunk_len: Count | None = None


class NormConfig(BaseConfig):
    """Where and how activations are normalized. `post` is the published Transformer-XL.

    `sandwich` normalizes before and after a branch; `rezero` does not at all: each branch is multiplied by a number
    that starts at zero (Bachlechner et al. 2021).
    """

    kind: Literal["layer", "rms"] = "rms"
    placement: Literal["pre", "post", "sandwich", "rezero"] = "pre"


class EmbeddingConfig(BaseConfig):
    """Token embedding and output head. `tied` shares their matrices; `scaled` multiplies by sqrt(dim) as in the paper.

    `inner_dim` factorizes the matrix (Lan et al. 2020). `cutoffs` divide the vocabulary, which is sorted by frequency,
    into clusters, the later ones `div_val` times narrower than the one before (Baevski and Auli 2019); those beyond
    the vocabulary are left out.
    """

    tied: bool = True
    scaled: bool = False
    inner_dim: Count | None = None
    cutoffs: tuple[Count, ...] = ()
    div_val: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _one_way(self) -> EmbeddingConfig:
        if self.cutoffs and self.inner_dim is not None:
            raise InvalidSettingError(
                "model.embedding.cutoffs", "and model.embedding.inner_dim exclude each other", "Leave one of them out."
            )
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise InvalidSettingError(
                "model.embedding.cutoffs", f"{list(self.cutoffs)} do not increase", "Give them in order."
            )
        if self.div_val > 1 and not self.cutoffs:
            raise InvalidSettingError(
                "model.embedding.div_val",
                f"{self.div_val} makes later clusters of the vocabulary narrower, but there are none",
                "Set model.embedding.cutoffs as well.",
            )
        return self


class DropoutConfig(BaseConfig):
    """Dropout rates in training."""

    embedding: Rate = 0.0
    attention: Rate = 0.0
    residual: Rate = 0.0
    feedforward: Rate = 0.0


class ModelConfig(BaseConfig):
    """Shape of the network. `vocab_size` is filled in from the tokenizer.

    `loss_chunk` computes the loss so many tokens at a time and recomputes logits in the backward pass; None does so
    where the logits would take much memory.
    """

    vocab_size: Annotated[int, Field(ge=2, le=2**24)] = 256
    dim: Count = 128
    n_layers: Annotated[int, Field(ge=1, le=1024)] = 4
    attention: AnyAttentionConfig = FullAttentionConfig()
    position: AnyPositionConfig = XLPositionConfig()
    stack: AnyStackConfig = StandardStackConfig()
    feedforward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = NormConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    dropout: DropoutConfig = DropoutConfig()
    loss_chunk: Count | None = None
    bias: bool = False
    init_std: Positive = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.attention.head_dim or self.dim // self.attention.n_heads

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward branch: 4 dim, or 8/3 dim (rounded up to 64) when gated, unless set."""
        if self.feedforward.ffn_dim is not None:
            return self.feedforward.ffn_dim
        if self.feedforward.kind in ("swiglu", "geglu"):
            return -(-8 * self.dim // 3 // 64) * 64 or 64
        return 4 * self.dim

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Borders between the clusters of the vocabulary."""
        return tuple(cutoff for cutoff in self.embedding.cutoffs if cutoff < self.vocab_size)

    @property
    def axial_dims(self) -> tuple[int, ...]:
        """Width of each axis of an axial position encoding: as set, else equal parts of `dim`, the first ones wider."""
        assert isinstance(self.position, AxialPositionConfig)
        axes = len(self.position.shape)
        return self.position.dims or tuple(self.dim // axes + (i < self.dim % axes) for i in range(axes))

    @property
    def embedding_rms(self) -> float:
        """Root mean square of an embedding that has not been trained."""
        return self.init_std * (self.dim**0.5 if self.embedding.scaled else 1.0)

    @property
    def stream_rms(self) -> float:
        """Root mean square of what enters a block of a model that has not been trained: post-norm makes it 1."""
        return 1.0 if self.norm.placement == "post" else self.embedding_rms

    @property
    def depth(self) -> int:
        """Blocks that a token passes, as trained."""
        return self.n_layers * (self.stack.n_steps if isinstance(self.stack, UniversalStackConfig) else 1)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each of `n_layers` layers."""
        kinds = self.attention.layers if isinstance(self.attention, MixedAttentionConfig) else (self.attention,)
        return tuple(kinds[i % len(kinds)] for i in range(self.n_layers))

    def of_layer(self, attention: AttentionConfig) -> ModelConfig:
        """As if all layers had this attention."""
        return self.model_copy(update={"attention": attention})

    def remembered(self, length: int) -> int:
        """Tokens that the layer with the longest memory remembers when it is given `length` tokens of memory."""
        return max(min(length, a.window) if isinstance(a, LocalAttentionConfig) else length for a in self.attentions)

    def memory_floats(self, length: int, n_steps: int | None = None, n_hashes: int | None = None) -> int:
        """What one row remembers when every layer has `length` tokens of memory, for inference, in float32 numbers.

        `n_steps` is how often a universal stack is applied, `n_hashes` the rounds of hashing; None is as trained.
        """
        times = self.depth // self.n_layers if n_steps is None else n_steps
        return times * sum(self._layer_numbers(attention, length, n_hashes) for attention in self.attentions)

    def _layer_numbers(self, attention: AttentionConfig, length: int, n_hashes: int | None) -> int:
        heads, width = attention.n_heads, self.head_dim
        match attention:
            case LinearAttentionConfig(n_features=n_features):
                return 2 * heads * n_features * (width + 1)
            case LSHAttentionConfig():
                n_buckets, rounds = math.prod(attention.factors), n_hashes or attention.n_hashes
                of_token = 2 * width + 2 * (1 + rounds)
                return heads * rounds * n_buckets * (attention.bucket_size * of_token + 2)
            case LocalAttentionConfig(window=window):
                length = min(length, window)
        return 2 * heads * width * length

    @model_validator(mode="after")
    def _legal(self) -> ModelConfig:
        if self.attention.head_dim is None and self.dim % self.attention.n_heads:
            raise InvalidSettingError(
                "model.dim",
                f"{self.dim} is not divisible by model.attention.n_heads {self.attention.n_heads}",
                "Change one of them or set model.attention.head_dim.",
            )
        self._check_position()
        narrowest = self.dim // self.embedding.div_val ** len(self.cutoffs)
        if narrowest < 1:
            raise InvalidSettingError(
                "model.embedding.div_val",
                f"{self.embedding.div_val} leaves nothing of model.dim {self.dim} for the last of "
                f"{len(self.cutoffs) + 1} clusters",
                "Lower it, raise model.dim, or use fewer cutoffs.",
            )
        if isinstance(self.stack, ReversibleStackConfig) and self.norm.placement == "post":
            raise InvalidSettingError(
                "model.norm.placement",
                "'post' does not allow stack 'reversible' to reconstruct its inputs by subtraction",
                "Set model.norm.placement to pre, sandwich or rezero, or model.stack.kind to standard or universal.",
            )
        if self.dropout.attention and any(isinstance(layer, LinearAttentionConfig) for layer in self.attentions):
            raise InvalidSettingError(
                "model.dropout.attention",
                f"is {self.dropout.attention}, but attention 'linear' has no weights to drop",
                "Set model.dropout.residual and model.dropout.feedforward instead, or another model.attention.kind.",
            )
        return self

    def _check_position(self) -> None:
        position, attention = self.position, self.attention
        offered = frozenset().union(*(layer.offers for layer in self.attentions))
        missing = position.needs - offered
        if missing:
            positions = [kind for kind, table in POSITIONS.items() if table().needs <= attention.offers]
            attentions = [kind for kind, table in ATTENTIONS.items() if position.needs <= table().offers]
            raise InvalidSettingError(
                "model.position.kind",
                f"'{position.kind}' needs {' and '.join(HOOKS[hook] for hook in sorted(missing))}, which "
                f"attention '{attention.kind}' does not have",
                f"Set model.position.kind to {_any(positions)}, or model.attention.kind to {_any(attentions)}.",
            )
        if isinstance(position, RopePositionConfig):
            in_layers = position.placement == "layers"
            key, width = ("model.attention.head_dim", self.head_dim) if in_layers else ("model.dim", self.dim)
            if width % 2:
                raise InvalidSettingError(
                    key, f"{width} is odd, but position 'rope' rotates pairs of features", "Make it even."
                )
        if isinstance(position, SinusoidalPositionConfig) and self.dim % 2:
            raise InvalidSettingError(
                "model.dim", f"{self.dim} is odd, but position 'sinusoidal' consists of pairs", "Make it even."
            )
        if isinstance(self.stack, UniversalStackConfig) and self.stack.time_signal and self.dim % 2:
            raise InvalidSettingError(
                "model.dim",
                f"{self.dim} is odd, but the time signal consists of pairs",
                "Make it even or set model.stack.time_signal to false.",
            )
        if isinstance(position, AxialPositionConfig) and (sum(self.axial_dims) != self.dim or not all(self.axial_dims)):
            raise InvalidSettingError(
                "model.position.dims",
                f"{list(self.axial_dims)} do not add up to model.dim {self.dim}",
                "Change them, or leave them out for equal parts.",
            )


def _any(kinds: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


HOOKS = {
    "rotate": "queries and keys to rotate",
    "term": "a second score term",
    "bias": "scores to add a bias to",
    "values": "weights to add a term to the values",
}
"""What each hook needs, in words."""
