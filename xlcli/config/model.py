"""Configuration of a model: stacks, blocks, embedding, and the legal combinations of parts."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from xlcli.config.attention import (
    ATTENTIONS,
    AnyAttentionConfig,
    AttentionConfig,
    FullAttentionConfig,
)
from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Positive, Rate
from xlcli.config.position import (
    POSITIONS,
    AnyPositionConfig,
    XLPositionConfig,
)
from xlcli.errors import ConfigError

_OMIT = "Omit it to use the trained value."


class StandardStackConfig(BaseConfig):
    """`n_layers` blocks in sequence."""

    kind: Literal["standard"] = "standard"


class UniversalStackConfig(BaseConfig):
    """Universal Transformer (Dehghani et al. 2019): the `n_layers` blocks are applied `n_steps` times.

    `time_signal` adds a sinusoid of the step, with the initial amplitude of the stream, to the input of every step.
    With `act` (adaptive computation time) each position halts when its halting probabilities sum to 1 - `epsilon`, or
    at the last step. `ponder_weight` is the weight of the ponder cost in the loss. `halt_bias` is the initial bias of
    the halting logit; a negative value makes training start with many steps.
    """

    kind: Literal["universal"] = "universal"
    n_steps: Annotated[int, Field(ge=1, le=1024)] = 4
    time_signal: bool = True
    act: bool = False
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    ponder_weight: Annotated[float, Field(ge=0.0, le=1e3)] = 0.01
    halt_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = -3.0


class ReversibleStackConfig(BaseConfig):
    """Two streams, from which the backward pass recomputes activations (Kitaev et al. 2020, section 3)."""

    kind: Literal["reversible"] = "reversible"


AnyStackConfig = Annotated[
    StandardStackConfig | UniversalStackConfig | ReversibleStackConfig, Field(discriminator="kind")
]
STACKS = {table.model_fields["kind"].default: table for table in get_args(get_args(AnyStackConfig)[0])}
"""Stack kind to configuration class."""


class FeedForwardConfig(BaseConfig):
    """Feed-forward branch. The gated kinds `swiglu` and `geglu` have three matrices, the others two.

    `chunk_len` is the number of tokens computed at once and recomputed in the backward pass, which saves memory and
    changes no result; None computes all tokens at once.
    """

    kind: Literal["relu", "gelu", "swiglu", "geglu"] = "swiglu"
    ffn_dim: Count | None = None
    chunk_len: Count | None = None


class NormConfig(BaseConfig):
    """Kind and placement of normalization. The published Transformer-XL uses `post`.

    `sandwich` normalizes before and after a branch. `rezero` has no norms: the output of each branch is multiplied by a
    learned scalar, initially 0 (Bachlechner et al. 2021).
    """

    kind: Literal["layer", "rms"] = "rms"
    placement: Literal["pre", "post", "sandwich", "rezero"] = "pre"


class EmbeddingConfig(BaseConfig):
    """Token embedding and output head.

    `tied` shares their matrices. `scaled` multiplies embeddings by sqrt(dim) (Vaswani et al. 2017). `inner_dim`
    factorizes the matrix (Lan et al. 2020). `cutoffs` are the first words of the clusters of a vocabulary sorted by
    frequency; each cluster is `div_val` times narrower than the previous one (Baevski and Auli 2019). Cutoffs beyond
    the vocabulary are ignored.
    """

    tied: bool = True
    scaled: bool = False
    inner_dim: Count | None = None
    cutoffs: tuple[Count, ...] = ()
    div_val: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _check_clusters(self) -> EmbeddingConfig:
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
    """Shape of the network. `vocab_size` is set from the tokenizer.

    `loss_chunk` is the number of tokens whose logits are computed at once and recomputed in the backward pass; None
    chooses it so that the logits take little memory.
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
        """Feed-forward width; if not set, 4 dim, or 8/3 dim rounded up to a multiple of 64 for gated kinds."""
        if self.feedforward.ffn_dim is not None:
            return self.feedforward.ffn_dim
        if self.feedforward.kind in ("swiglu", "geglu"):
            return -(-8 * self.dim // 3 // 64) * 64 or 64
        return 4 * self.dim

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Cutoffs inside the vocabulary."""
        return tuple(cutoff for cutoff in self.embedding.cutoffs if cutoff < self.vocab_size)

    @property
    def embedding_rms(self) -> float:
        """Root mean square of embeddings before training."""
        return self.init_std * (self.dim**0.5 if self.embedding.scaled else 1.0)

    @property
    def stream_rms(self) -> float:
        """Root mean square of the input of a block before training; 1 with norm `post`."""
        return 1.0 if self.norm.placement == "post" else self.embedding_rms

    @property
    def n_repeats(self) -> int:
        """Number of times the blocks are applied."""
        return self.stack.n_steps if isinstance(self.stack, UniversalStackConfig) else 1

    @property
    def depth(self) -> int:
        """Number of blocks that a token passes."""
        return self.n_layers * self.n_repeats

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Attention of each of the `n_layers` layers."""
        return self.attention.layer_configs(self.n_layers)

    @property
    def supports_recall(self) -> bool:
        """Whether recall can be measured: some layer has LSH attention, and there is no adaptive computation time."""
        halts = isinstance(self.stack, UniversalStackConfig) and self.stack.act
        return not halts and any(attention.supports_recall for attention in self.attentions)

    def of_layer(self, attention: AttentionConfig) -> ModelConfig:
        """Copy in which all layers have this attention."""
        return self.model_copy(update={"attention": attention})

    def for_inference(self, n_steps: int | None = None, n_hashes: int | None = None) -> ModelConfig:
        """Copy with other inference settings.

        Args:
            n_steps: Number of times a universal stack applies its blocks; None keeps the trained value.
            n_hashes: Number of hash rounds of LSH attention; None keeps the trained value.

        Raises:
            ConfigError: The model has no such setting, or the value is out of range.
        """
        stack, attention = self.stack, self.attention
        try:
            if n_steps is not None:
                if not isinstance(stack, UniversalStackConfig):
                    raise _not_applicable("n_steps", "needs a universal stack, but this model applies its blocks once")
                stack = UniversalStackConfig(**(dict(stack) | {"n_steps": n_steps}))
            if n_hashes is not None:
                if not any("n_hashes" in layer.inference_settings for layer in self.attentions):
                    raise _not_applicable("n_hashes", "needs LSH attention, but this model has none")
                attention = attention.with_settings({"n_hashes": n_hashes})
        except ValidationError as error:
            [first, *_] = error.errors()
            raise ConfigError(f"{first['loc'][-1]} is {first['input']}. {first['msg']}.", _OMIT) from None
        return self.model_copy(update={"stack": stack, "attention": attention})

    def effective_mem_len(self, mem_len: int) -> int | None:
        """Longest memory in tokens that any layer uses; None if some layer has unbounded memory."""
        lengths = [attention.effective_mem_len(mem_len) for attention in self.attentions]
        bounded = [length for length in lengths if length is not None]
        return max(bounded) if len(bounded) == len(lengths) else None

    def memory_floats(self, mem_len: int) -> int:
        """Memory of one sequence at inference, in float32 numbers."""
        return self.n_repeats * sum(layer.memory_floats(mem_len, self.head_dim) for layer in self.attentions)

    def describe_memory(self, mem_len: int, segment_len: int) -> str:
        """Contents of the memory, for example "512 tokens in each of 6 layers"."""
        steps = f" at each of {self.n_repeats} steps" if isinstance(self.stack, UniversalStackConfig) else ""
        contents = Counter(layer.describe_memory(mem_len, segment_len) for layer in self.attentions)
        if len(contents) == 1:
            [text] = contents
            return f"{text} in {'one layer' if self.n_layers == 1 else f'each of {self.n_layers} layers'}{steps}"
        return ", ".join(f"{text} in {n} layer{'s' if n > 1 else ''}" for text, n in contents.items()) + steps

    def mem_len_warning(self, mem_len: int) -> str | None:
        """Warning if a memory of `mem_len` tokens has no effect, or no more effect than a shorter one."""
        lengths = [layer.effective_mem_len(mem_len) for layer in self.attentions]
        bounded = [length for length in lengths if length is not None]
        if mem_len and not bounded:
            return "this model remembers all tokens it has read; a memory length other than 0 has no effect"
        if bounded and max(bounded) < mem_len:
            return f"this model attends to at most {max(bounded)} earlier tokens; a longer memory has no effect"
        return None

    @model_validator(mode="after")
    def _check_combinations(self) -> ModelConfig:
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
        if self.dropout.attention and not all(layer.supports_dropout for layer in self.attentions):
            without = [kind for kind, table in ATTENTIONS.items() if not table.supports_dropout]
            raise InvalidSettingError(
                "model.dropout.attention",
                f"is {self.dropout.attention}, but attention '{_any(without)}' has no weights to drop",
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
        position.check_dims(self.dim, self.head_dim)
        if isinstance(self.stack, UniversalStackConfig) and self.stack.time_signal and self.dim % 2:
            raise InvalidSettingError(
                "model.dim",
                f"{self.dim} is odd, but the time signal consists of pairs",
                "Make it even or set model.stack.time_signal to false.",
            )


def _not_applicable(key: str, reason: str) -> ConfigError:
    return ConfigError(f"{key} {reason}.", _OMIT, key=key, reason=reason)


def _any(kinds: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


HOOKS = {
    "rotate": "queries and keys to rotate",
    "term": "a second score term",
    "bias": "scores to add a bias to",
    "value_bias": "attention weights to compute a value bias from",
}
"""Requirement of each position hook on the attention, for error messages."""
