"""Configuration of a model: its parts and their legal combinations."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from xlcli.config.attention import (
    ATTENTIONS,
    AnyAttentionConfig,
    AttentionConfig,
    FullAttentionConfig,
    LinearAttentionConfig,
    LSHAttentionConfig,
    MemoryDtype,
    MixedAttentionConfig,
    SoftmaxAttentionConfig,
)
from xlcli.config.base import BaseConfig, Count, Positive, Rate
from xlcli.config.position import POSITIONS, AnyPositionConfig, LearnedPositionConfig, XLPositionConfig
from xlcli.errors import InvalidSettingError


class StandardStackConfig(BaseConfig):
    """`n_layers` blocks in sequence."""

    kind: Literal["standard"] = "standard"
    n_steps: ClassVar[int] = 1
    input_residual: bool = Field(
        default=False,
        description="Make the input of each block a x + b x0, where x is the stream, x0 the embedding, and a "
        "and b are learned scalars of the block, initially 1 and 0.",
    )


class UniversalStackConfig(BaseConfig):
    """Universal Transformer (Dehghani et al. 2019): the `n_layers` blocks are applied `n_steps` times."""

    kind: Literal["universal"] = "universal"
    n_steps: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="Number of times the blocks are applied."
    )
    time_signal: bool = Field(
        default=True,
        description="Add a sinusoid of the step, with the initial amplitude of the stream, to the input of every step.",
    )
    act: bool = Field(
        default=False,
        description="Adaptive computation time: a position halts when its halting probabilities sum to 1 - epsilon, or "
        "at the last step.",
    )
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.01, description="Halting probability that may remain."
    )
    ponder_weight: Annotated[float, Field(ge=0.0, le=1e3)] = Field(
        default=0.01, description="Weight of the ponder cost in the loss."
    )
    halt_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = Field(
        default=-3.0,
        description="Initial bias of the halting logit; a negative value makes training start with many steps.",
    )


class ReversibleStackConfig(BaseConfig):
    """Two streams, from which the backward pass recomputes activations (Kitaev et al. 2020, section 3)."""

    kind: Literal["reversible"] = "reversible"
    n_steps: ClassVar[int] = 1


AnyStackConfig = Annotated[
    StandardStackConfig | UniversalStackConfig | ReversibleStackConfig, Field(discriminator="kind")
]
STACKS = {table.model_fields["kind"].default: table for table in get_args(get_args(AnyStackConfig)[0])}
"""Stack kind to configuration class."""


GATED = frozenset({"swiglu", "geglu", "geglu-tanh"})  # kinds whose activation is multiplied by a second projection


class FeedForwardConfig(BaseConfig):
    """Feed-forward branch."""

    kind: Literal["relu", "gelu", "gelu-tanh", "relu2", "swiglu", "geglu", "geglu-tanh"] = Field(
        default="swiglu",
        description="Activation; the gated kinds swiglu, geglu and geglu-tanh have three matrices, the others two. "
        "relu2 is the squared ReLU (So et al. 2021), gelu-tanh the approximation of GELU by tanh (GPT-2).",
    )
    ffn_dim: Count | None = Field(
        default=None,
        description="Inner width. Default: 4 model.dim, or 8/3 of it rounded up to a multiple of 64 for gated kinds.",
    )
    chunk_len: Count | None = Field(
        default=None,
        description="Number of tokens computed at once and again in the backward pass, which saves RAM and changes "
        "no result. Default: all.",
    )


class NormConfig(BaseConfig):
    """Kind and placement of normalization."""

    kind: Literal["layer", "rms"] = Field(default="rms", description="LayerNorm or RMSNorm.")
    placement: Literal["pre", "post", "sandwich", "rezero", "parallel"] = Field(
        default="pre",
        description="Norms before a branch (pre), after it (post, as in the published Transformer-XL), or both "
        "(sandwich). rezero: no norm but a learned factor on each branch, initially 0 (Bachlechner et al. 2021). "
        "parallel: as pre, but both branches read the input of the block (GPT-NeoX; Black et al. 2022).",
    )
    epsilon: Positive = Field(default=1e-5, description="Added to the mean square by which a norm divides.")
    final: bool = Field(
        default=True,
        description="Apply a norm to the output of the last block, with placement pre, sandwich or parallel.",
    )


class EmbeddingConfig(BaseConfig):
    """Token embedding and output head."""

    n_bigrams: Annotated[int, Field(ge=0, le=2**24)] = Field(
        default=0,
        description="Add a vector for each pair of successive tokens, from a table of this many rows that a "
        "hash indexes. 0: no table.",
    )
    per_layer: bool = Field(
        default=False,
        description="Add another token vector, from a table of the layer, to each layer's input (Gemma Team 2025).",
    )
    tied: bool = Field(default=True, description="Share the matrices of embedding and head.")
    scaled: bool = Field(
        default=False, description="Multiply embeddings by the square root of model.dim (Vaswani et al. 2017)."
    )
    norm: bool = Field(default=False, description="Apply a norm to token vectors, before positions are added (BLOOM).")
    tied_projections: Literal["all", "rest", "none"] = Field(
        default="all",
        description="Matrices of a factorized or clustered vocabulary that a tied head shares, beside the tables: all, "
        "all but the one of the first cluster (rest, as in the published Transformer-XL), or none.",
    )
    inner_dim: Count | None = Field(
        default=None,
        description="Inner width of a factorized matrix (Lan et al. 2020); with cutoffs, of the first cluster. "
        "Default: not factorized.",
    )
    cutoffs: tuple[Count, ...] = Field(
        default=(),
        description="First words of the clusters of a vocabulary sorted by frequency. Cutoffs beyond the "
        "vocabulary are ignored.",
    )
    div_val: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Each cluster is this many times narrower than the one before (Baevski and Auli 2019)."
    )

    def _check(self) -> None:
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            reason = f"{list(self.cutoffs)} do not increase"
            raise InvalidSettingError("model.embedding.cutoffs", reason, "Put them in increasing order.")
        if self.div_val > 1 and not self.cutoffs:
            reason = f"{self.div_val} makes later clusters of the vocabulary narrower, but there are none"
            raise InvalidSettingError("model.embedding.div_val", reason, "Set model.embedding.cutoffs as well.")


class DropoutConfig(BaseConfig):
    """Dropout rates in training; a number is the rate for all."""

    embedding: Rate = Field(default=0.0, description="Rate for embeddings.")
    attention: Rate = Field(default=0.0, description="Rate for attention weights.")
    residual: Rate = Field(default=0.0, description="Rate for the output of a branch.")
    feedforward: Rate = Field(default=0.0, description="Rate within the feed-forward branch.")

    @property
    def is_used(self) -> bool:
        return any(self.model_dump().values())

    @model_validator(mode="before")
    @classmethod
    def _same_rate(cls, data: Any) -> Any:
        if isinstance(data, int | float):
            return dict.fromkeys(cls.model_fields, data)
        return data


class ModelConfig(BaseConfig):
    """Shape of the network."""

    vocab_size: Annotated[int, Field(ge=2, le=2**24)] = Field(
        default=256, description="Vocabulary size, from the tokenizer."
    )
    dim: Count = Field(default=128, description="Width of the model.")
    n_layers: Annotated[int, Field(ge=1, le=1024)] = Field(default=4, description="Number of blocks.")
    attention: AnyAttentionConfig = Field(default_factory=FullAttentionConfig)
    position: AnyPositionConfig = Field(default_factory=XLPositionConfig)
    stack: AnyStackConfig = Field(default_factory=StandardStackConfig)
    feedforward: FeedForwardConfig = Field(default_factory=FeedForwardConfig)
    norm: NormConfig = Field(default_factory=NormConfig)
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig)
    dropout: DropoutConfig = Field(default_factory=DropoutConfig)
    loss_chunk: Count | None = Field(
        default=None,
        description="Number of tokens whose logits are computed at once, and again in the backward pass. "
        "Default: few enough to take little RAM.",
    )
    logit_softcap: Positive | None = Field(
        default=None,
        description="Limit c of logits z, which become c tanh(z/c) (Gemma Team 2024, section 2). Default: no limit.",
    )
    zero_init: bool = Field(
        default=False,
        description="Begin with zeros in the last matrix of each branch: the stack starts as the identity.",
    )
    bias: bool = Field(default=False, description="Use biases in linear layers.")
    zero_memory: bool = Field(
        default=False,
        description="Begin a text with a memory of zero layer inputs that tokens attend to (Transformer-XL of "
        "Hugging Face), not with an empty one.",
    )
    init_std: Positive = Field(default=0.02, description="Standard deviation of the initial weights.")

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim or self.dim // self.attention.n_heads

    @property
    def ffn_dim(self) -> int:
        """Feed-forward width; if not set, 4 dim, or 8/3 dim rounded up to a multiple of 64 for gated kinds."""
        if self.feedforward.ffn_dim is not None:
            return self.feedforward.ffn_dim
        if self.feedforward.kind in GATED:
            return -(-8 * self.dim // 3 // 64) * 64 or 64
        return 4 * self.dim

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Cutoffs inside the vocabulary."""
        return tuple(cutoff for cutoff in self.embedding.cutoffs if cutoff < self.vocab_size)

    @property
    def embedding_rms(self) -> float:
        """Root mean square of embeddings before training."""
        if self.embedding.norm:
            return 1.0
        if self.embedding.scaled:
            return float(self.init_std * self.dim**0.5)
        return self.init_std

    @property
    def stream_rms(self) -> float:
        """Root mean square of the input of a block before training; 1 with norm `post`."""
        if self.norm.placement == "post":
            return 1.0
        return self.embedding_rms

    @property
    def depth(self) -> int:
        return self.n_layers * self.stack.n_steps

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        return self.attention.layer_configs(self.n_layers)

    def has_layer(self, kind: type[AttentionConfig]) -> bool:
        """True if some layer has attention of this kind, or of a kind derived from it."""
        return any(isinstance(layer, kind) for layer in self.attentions)

    @property
    def can_hide_documents(self) -> bool:
        """True if the tokens of a document can be kept from attending to those before it."""
        return not self.zero_memory and self._all_banded

    @property
    def _all_banded(self) -> bool:
        return all(layer.is_banded for layer in self.attentions)

    @property
    def rounds_memory(self) -> bool:
        """True if the memory of every layer can be kept in another number type than float32."""
        return all(layer.rounds_memory for layer in self.attentions)

    @property
    def clamp_len(self) -> int | None:
        """Largest distance of the position encoding; None if distances are not clamped."""
        return getattr(self.position, "clamp_len", None)

    @property
    def n_sinks(self) -> int:
        """Number of the first tokens of a text that full attention sees besides the memory."""
        return getattr(self.position, "n_sinks", 0)

    @property
    def has_softmax(self) -> bool:
        return self.has_layer(SoftmaxAttentionConfig)

    @property
    def clamps_distances(self) -> bool:
        """True if keys further back than some distance can be taken as being there."""
        position = self.position
        has_clamp = position.kind == "xl" or (position.kind == "rope" and position.placement == "layers")
        return self.has_softmax and has_clamp

    def max_distance(self, mem_len: int, n_earlier: int) -> int:
        """Largest distance from a token to a key in any layer with softmax attention, see `AttentionConfig`."""
        softmax = (layer for layer in self.attentions if isinstance(layer, SoftmaxAttentionConfig))
        return max(layer.max_distance(mem_len, n_earlier) for layer in softmax)

    def for_inference(
        self, n_steps: int | None = None, n_hashes: int | None = None, n_sinks: int | None = None
    ) -> Self:
        """Copy with other inference settings, as trained where None; `InvalidSettingError` if the model has none such.

        `n_steps` is for universal stacks, `n_hashes` for LSH attention. `n_sinks` first tokens of a text stay visible.
        """
        stack, attention, position = self.stack, self.attention, self.position
        remedy = "Omit it to use the trained value."
        if n_steps is not None:
            if not isinstance(stack, UniversalStackConfig):
                reason = "needs a universal stack, but this model applies its blocks once"
                raise InvalidSettingError("n_steps", reason, remedy)
            stack = stack.model_copy(update={"n_steps": n_steps})
        if n_hashes is not None:
            if not self.has_layer(LSHAttentionConfig):
                raise InvalidSettingError("n_hashes", "needs LSH attention, but this model has none", remedy)
            change: dict[str, Any] = {"n_hashes": n_hashes}
            if isinstance(attention, MixedAttentionConfig):
                layers = list(attention.layers)
                for i, layer in enumerate(layers):
                    if isinstance(layer, LSHAttentionConfig):
                        layers[i] = layer.model_copy(update=change)
                change = {"layers": tuple(layers)}
            attention = attention.model_copy(update=change)
        if n_sinks is not None:
            if not hasattr(position, "n_sinks"):
                raise InvalidSettingError("n_sinks", "needs rotary positions (rope), but this model has others", remedy)
            position = position.model_copy(update={"n_sinks": n_sinks})
        changed = self.model_copy(update={"stack": stack, "attention": attention, "position": position})
        changed._check_memory()
        return changed

    def effective_mem_len(self, mem_len: int) -> int | None:
        """Longest memory in tokens that any layer uses; None if some layer has unbounded memory."""
        bounded = self._bounded_mem_lens(mem_len)
        return max(bounded) if len(bounded) == self.n_layers else None

    def _bounded_mem_lens(self, mem_len: int) -> list[int]:
        """Memory in tokens of each layer whose memory is bounded."""
        lengths = [layer.effective_mem_len(mem_len) for layer in self.attentions]
        return [length for length in lengths if length is not None]

    def tokens_in_memory(self, mem_len: int, n_tokens: int) -> int:
        """Number of tokens for which memory takes space after `n_tokens` tokens; an upper bound if it is reserved."""
        if self.zero_memory:
            return mem_len
        return min(mem_len, n_tokens)

    def memory_bytes(self, mem_len: int, dtype: MemoryDtype = "float32") -> int:
        """Size in bytes of the memory of one sequence at inference; with full attention also of its sinks."""
        # A sink has a key and a value in float32 for each head.
        sink_bytes_per_head = 2 * 4 * self.n_sinks * self.head_dim
        n_bytes = 0
        for layer in self.attentions:
            n_bytes += layer.memory_bytes(mem_len, self.head_dim, dtype)
            if isinstance(layer, FullAttentionConfig):
                n_bytes += layer.key_heads * sink_bytes_per_head
        return self.stack.n_steps * n_bytes

    @property
    def n_matrix_weights(self) -> int:
        """Number of weights in the matrices of blocks and vectors of token pairs; at most the number of parameters."""
        n_matrices = 3 if self.feedforward.kind in GATED else 2
        feedforward = n_matrices * self.dim * self.ffn_dim
        attention = sum(layer.n_weights(self.dim, self.head_dim) for layer in self.attentions)
        return self.embedding.n_bigrams * self.dim + self.n_layers * feedforward + attention

    def mask_bytes(self, n_new: int, mem_len: int) -> int:
        """Size in bytes of the largest attention mask of a call with `n_new` tokens."""
        return max(layer.mask_bytes(n_new, mem_len) for layer in set(self.attentions))

    def inference_bytes(self, batch_size: int, n_new: int, mem_len: int, memory_dtype: MemoryDtype = "float32") -> int:
        """Lower bound of the memory in bytes, without the weights, of calls with `n_new` tokens of each sequence."""
        n_feedforward = min(n_new, self.feedforward.chunk_len or n_new)  # tokens in the feed-forward branch at once
        hidden_bytes = 4 * (2 * self.dim * n_new + self.ffn_dim * n_feedforward)
        memory = self.memory_bytes(mem_len, memory_dtype)
        if memory_dtype != "float32":  # one layer at a time is converted
            memory += max(layer.memory_bytes(mem_len, self.head_dim) for layer in self.attentions)
        return batch_size * (memory + hidden_bytes) + self.mask_bytes(n_new, mem_len)

    def mem_len_warning(self, mem_len: int) -> str | None:
        """Warning if a memory of `mem_len` tokens has no effect, or no more effect than a shorter one."""
        bounded = self._bounded_mem_lens(mem_len)
        if mem_len and not bounded:
            return "this model remembers all tokens it has read; a memory length other than 0 has no effect"
        if bounded and max(bounded) < mem_len:
            return f"this model attends to at most {max(bounded)} earlier tokens; a longer memory has no effect"
        return None

    def _check(self) -> None:
        if self.attention.head_dim is None and self.dim % self.attention.n_heads:
            reason = f"{self.dim} is not divisible by model.attention.n_heads {self.attention.n_heads}"
            raise InvalidSettingError("model.dim", reason, "Change one of them or set model.attention.head_dim.")
        self._check_position()
        self._check_clusters()
        self._check_stack()
        self._check_memory()
        if self.dropout.attention and self.has_layer(LinearAttentionConfig):
            reason = f"is {self.dropout.attention}, but attention 'linear' has no weights to drop"
            others = "model.dropout.residual and model.dropout.feedforward"
            remedy = f"Set {others} instead, or another model.attention.kind."
            raise InvalidSettingError("model.dropout.attention", reason, remedy)

    def _check_position(self) -> None:
        """Every hook that the position encoding needs must be offered by some layer, not by all."""
        position, attention = self.position, self.attention
        offered: frozenset[str] = frozenset().union(*(layer.offers for layer in self.attentions))
        missing = position.needs - offered
        if missing:
            positions = [kind for kind, table in POSITIONS.items() if table().needs <= offered]
            attentions = [kind for kind, table in ATTENTIONS.items() if position.needs <= table.offers]
            needed = " and ".join(HOOKS[hook] for hook in sorted(missing))
            reason = f"'{position.kind}' needs {needed}, which attention '{attention.kind}' does not have"
            remedy = f"Set model.position.kind to {_any(positions)}, or model.attention.kind to {_any(attentions)}."
            raise InvalidSettingError("model.position.kind", reason, remedy)
        position.check_dims(self.dim, self.head_dim)
        softmax = [layer for layer in self.attentions if isinstance(layer, SoftmaxAttentionConfig)]
        shares_keys = any(layer.key_heads < layer.n_heads for layer in softmax)
        if shares_keys and isinstance(position, LearnedPositionConfig) and position.placement == "qk":
            reason = "leaves heads of queries without keys, but position 'learned' adds to those of each head"
            remedy = "Leave it out, or set model.position.placement to layers."
            raise InvalidSettingError("model.attention.n_kv_heads", reason, remedy)

    def _check_clusters(self) -> None:
        """The last cluster of the vocabulary needs vectors of at least one feature."""
        key, widest = "model.dim", self.dim
        if self.embedding.inner_dim is not None:
            key, widest = "model.embedding.inner_dim", self.embedding.inner_dim
        if widest < self.embedding.div_val ** len(self.cutoffs):
            cluster = f"the last of {len(self.cutoffs) + 1} clusters"
            reason = f"{self.embedding.div_val} leaves nothing of {key} {widest} for {cluster}"
            remedy = f"Lower it, raise {key}, or use fewer cutoffs."
            raise InvalidSettingError("model.embedding.div_val", reason, remedy)

    def _check_stack(self) -> None:
        if isinstance(self.stack, UniversalStackConfig) and self.stack.time_signal and self.dim % 2:
            reason = f"{self.dim} is odd, but the time signal consists of pairs"
            raise InvalidSettingError("model.dim", reason, "Make it even or set model.stack.time_signal to false.")
        if isinstance(self.stack, ReversibleStackConfig) and self.norm.placement in ("post", "parallel"):
            key, placement = "model.norm.placement", self.norm.placement
            reason = f"'{placement}' does not allow stack 'reversible' to reconstruct its inputs by subtraction"
            remedy = f"Set {key} to pre, sandwich or rezero, or model.stack.kind to standard or universal."
            raise InvalidSettingError(key, reason, remedy)

    def _check_memory(self) -> None:
        has_distance = self.clamp_len is not None and "place" in self.position.needs
        if self.n_sinks and not (has_distance and self.has_layer(FullAttentionConfig)):
            reason = "needs full attention, model.position.clamp_len (the distance of the tokens) and placement layers"
            raise InvalidSettingError("model.position.n_sinks", reason, "Set them, or leave n_sinks out.")
        if self.zero_memory and (self.n_sinks or not self._all_banded):
            reason = "needs full or local attention, and no n_sinks: others begin with an empty memory"
            raise InvalidSettingError("model.zero_memory", reason, "Leave it out, or use full or local attention.")


def _any(kinds: list[str]) -> str:
    """The kinds as "a, b or c"."""
    *others, last = kinds
    return f"{', '.join(others)} or {last}" if others else last


HOOKS = {  # requirement of each position hook on the attention, for error messages
    "place": "queries and keys that take positions",
    "term": "a second score term",
    "bias": "scores to add a bias to",
    "value_bias": "attention weights to compute a value bias from",
}
