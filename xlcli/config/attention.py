"""Attention kinds. A configuration class has the settings of its kind and the properties derived from them."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_serializer, model_validator

from xlcli.config.base import BaseConfig, Count, Positive
from xlcli.errors import InvalidSettingError

MemoryDtype = Literal["float32", "bfloat16", "int8"]  # of past keys and values at inference; `float32`: unrounded


class AttentionConfig(BaseConfig):
    """Base of every attention kind."""

    n_heads: Count = Field(default=4, description="Number of heads.")
    head_dim: Count | None = Field(
        default=None, description="Width of a head. Default: model.dim divided by the number of heads."
    )

    offers: ClassVar[frozenset[str]] = frozenset()  # hooks of a position encoding that this attention calls
    rounds_memory: ClassVar[bool] = False  # true if memory can be kept in another number type than float32
    is_banded: ClassVar[bool] = False  # a token attends to successive tokens: a call can hide earlier documents

    def layer_configs(self, n_layers: int) -> tuple["AttentionConfig", ...]:
        """Attention of each of `n_layers` layers."""
        return (self,) * n_layers

    def effective_mem_len(self, mem_len: int) -> int | None:
        """Number of memory tokens that a layer uses; None if its memory is unbounded."""
        return mem_len

    def max_distance(self, mem_len: int, n_earlier: int) -> int:
        """Largest distance from a token to a key, after `n_earlier` tokens of its segment beside those in memory."""
        return self.effective_mem_len(mem_len + n_earlier) or 0

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """Size in bytes of the memory of one sequence in one layer at inference."""
        raise NotImplementedError

    def n_weights(self, dim: int, head_dim: int) -> int:
        """Number of weights in the matrices of one layer: queries, keys, values and output."""
        return 4 * dim * self.n_heads * head_dim

    def mask_bytes(self, n_new: int, mem_len: int) -> int:
        """Size in bytes of the distances and the mask of a call with `n_new` tokens."""
        return 0


KV_HEADS: Any = Field(
    default=None,
    description="Number of heads of keys and values in softmax attention, which query heads share "
    "(Ainslie et al. 2023). Default: n_heads.",
)


class SoftmaxAttentionConfig(AttentionConfig):
    """Base of softmax attention."""

    scaled: bool = Field(
        default=True, description="Divide scores by the square root of head_dim; T5 does not (Raffel et al. 2020)."
    )
    qk_norm: bool = Field(
        default=False,
        description="Apply an RMSNorm to the queries and keys of each head (Henry et al. 2020; Dehghani et al. 2023, "
        "section 2).",
    )
    n_kv_heads: Count | None = KV_HEADS
    bias: Literal["none", "qkv", "all"] = Field(
        default="none",
        description="Add biases to queries, keys and values (qkv; as Qwen2), also to the output (all; as GPT-2).",
    )

    offers = frozenset({"place", "term", "bias", "value_bias"})
    rounds_memory = True

    @property
    def key_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """One key and one value for each token and head, in int8 with a float32 scale each."""
        # Of one key or value.
        row_bytes = {"float32": 4 * head_dim, "bfloat16": 2 * head_dim, "int8": head_dim + 4}[dtype]
        return 2 * self.key_heads * row_bytes * (self.effective_mem_len(mem_len) or 0)

    def n_weights(self, dim: int, head_dim: int) -> int:
        return 2 * dim * (self.n_heads + self.key_heads) * head_dim

    def mask_bytes(self, n_new: int, mem_len: int) -> int:
        """An int64 and a boolean for each query and key of a call or block."""
        n_queries, n_memory = self.effective_mem_len(n_new) or 0, self.effective_mem_len(mem_len) or 0
        return 9 * n_queries * (n_queries + n_memory)

    def _check(self) -> None:
        if self.n_heads % self.key_heads:
            reason = f"{self.n_kv_heads} does not divide n_heads {self.n_heads}"
            raise InvalidSettingError("model.attention.n_kv_heads", reason, "Change one.")


class FullAttentionConfig(SoftmaxAttentionConfig):
    """Softmax attention over the whole span."""

    kind: Literal["full"] = "full"
    is_banded = True


class LocalAttentionConfig(SoftmaxAttentionConfig):
    """Softmax attention over a token and the `window` tokens before it, in blocks; cost is linear in the length."""

    kind: Literal["local"] = "local"
    is_banded = True
    window: Count = Field(default=128, description="Number of tokens before it that a token attends to.")

    def effective_mem_len(self, mem_len: int) -> int | None:
        return min(mem_len, self.window)


MAX_BUCKETS = 2**16  # largest number of hash buckets
MAX_SLOTS = 2**20  # largest number of tokens in the buckets of one head and hash round
MAX_HASHES = 8  # directions for all these rounds are stored, so inference may use more rounds than training


class RandomAttentionConfig(AttentionConfig):
    """Base of attention with random features. A draw every `redraw_every` training steps clears the layer's memory."""

    redraw_every: Count | None = Field(
        default=None,
        description="Training steps between two draws of random features or hashes. A draw clears the memory "
        "of the layer. Default: never.",
    )


class LinearAttentionConfig(RandomAttentionConfig):
    """Performer (Choromanski et al. 2021): softmax kernel estimated with `n_features` random features.

    Memory is a running sum over all tokens read: constant size, no span.
    """

    kind: Literal["linear"] = "linear"
    n_features: Annotated[int, Field(ge=1, le=2**16)] = Field(default=128, description="Number of random features.")
    orthogonal: bool = Field(default=True, description="Draw orthogonal features.")

    offers = frozenset({"place"})

    def effective_mem_len(self, mem_len: int) -> int | None:
        return None if mem_len else 0  # sums are unbounded, but independent segments start anew

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """Two sums in float64 for each feature."""
        return 8 * self.n_heads * self.n_features * (head_dim + 1)


class LSHAttentionConfig(RandomAttentionConfig):
    """LSH attention with shared queries and keys (Kitaev et al. 2020, Reformer); cost is linear in the length.

    In each of `n_hashes` rounds a token attends to the last `bucket_size` earlier tokens of its hash bucket, within the
    memory length; to itself only if there are none. The memory is the table of buckets: its size and the
    cost of a look-up do not depend on the memory length.
    """

    kind: Literal["lsh"] = "lsh"
    n_buckets: int | tuple[int, ...] = Field(
        default=64, description="Number of hash buckets: an even number, or a list of even numbers whose product it is."
    )
    bucket_size: Annotated[int, Field(ge=1, le=2**16)] = Field(default=32, description="Number of tokens in a bucket.")
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES)] = Field(default=4, description="Number of hash rounds.")
    query_scale: Positive | None = Field(
        default=None, description="Initial value of a learned factor on the queries of each head. Default: no factor."
    )

    offers = frozenset({"place"})

    @property
    def factors(self) -> tuple[int, ...]:
        """Even factors of the number of buckets; empty for a single bucket."""
        if not isinstance(self.n_buckets, int):
            return self.n_buckets
        if self.n_buckets == 1:
            return ()
        return (self.n_buckets,)

    def memory_bytes(self, mem_len: int, head_dim: int, dtype: MemoryDtype = "float32") -> int:
        """A key, a value, and int64 position and ranks for each slot; an int64 count for each bucket."""
        slot_bytes = 8 * head_dim + 8 * (1 + self.n_hashes)
        bucket_bytes = self.bucket_size * slot_bytes + 8
        return self.n_heads * self.n_hashes * math.prod(self.factors) * bucket_bytes

    def n_weights(self, dim: int, head_dim: int) -> int:
        return 3 * dim  # queries are also keys * self.n_heads * head_dim

    def _check(self) -> None:
        # Buckets are pairs: a vector is hashed to the direction nearest to it, or to its opposite.
        key, n_buckets = "model.attention.n_buckets", math.prod(self.factors)
        are_pairs = all(factor >= 2 and factor % 2 == 0 for factor in self.factors)
        if self.n_buckets == () or not are_pairs:
            reason = f"is {self.n_buckets}, but buckets are pairs of opposite directions"
            raise InvalidSettingError(key, reason, "Make it even, a list of even numbers, or 1.")
        if n_buckets > MAX_BUCKETS:
            raise InvalidSettingError(key, f"{self.n_buckets} is more than {MAX_BUCKETS}", "Use fewer buckets.")
        if n_buckets * self.bucket_size > MAX_SLOTS:
            reason = f"{self.bucket_size} is too large for {n_buckets:,} buckets, which may hold {MAX_SLOTS:,} tokens"
            remedy = f"Use at most {MAX_SLOTS // n_buckets}, or fewer buckets."
            raise InvalidSettingError("model.attention.bucket_size", reason, remedy)


HEADS = ("n_heads", "head_dim", "n_kv_heads")  # keys of all attention kinds, the last one of softmax attention only
LayerKind = FullAttentionConfig | LocalAttentionConfig | LinearAttentionConfig | LSHAttentionConfig
"""Union of all attention kinds that a layer can have. A new kind is added here."""
LayerAttentionConfig = Annotated[LayerKind, Field(discriminator="kind")]  # attention of one layer


class MixedAttentionConfig(AttentionConfig):
    """Different attention kinds in one model: `layers` lists them from the first layer on, repeated over the depth.

    An entry is a table, or the name of a kind for its defaults; all layers share `HEADS`. A position encoding
    applies to the layers that offer its hooks; at least one must.
    """

    kind: Literal["mixed"] = "mixed"
    layers: Annotated[tuple[LayerAttentionConfig, ...], Field(min_length=1, max_length=1024)] = Field(
        default_factory=lambda: (LocalAttentionConfig(), LSHAttentionConfig()),
        description="Kinds (or tables) of the layers, from the first, repeated over the depth. Default: local, lsh.",
    )
    n_kv_heads: Count | None = KV_HEADS
    offers = SoftmaxAttentionConfig.offers  # hooks of the default layers

    def layer_configs(self, n_layers: int) -> tuple["AttentionConfig", ...]:
        return tuple(itertools.islice(itertools.cycle(self.layers), n_layers))

    @model_validator(mode="before")
    @classmethod
    def _expand_layers(cls, data: Any) -> Any:
        """Names of kinds become tables, and every table gets the shared heads."""
        if not isinstance(data, dict):
            return data
        data = {"layers": ("local", "lsh")} | data  # the default gets the shared heads, too
        if not isinstance(data["layers"], list | tuple):
            return data
        layers = tuple(cls._expand_layer(layer, data) for layer in data["layers"])
        return data | {"layers": layers}

    @staticmethod
    def _expand_layer(layer: Any, model_attention: Mapping[str, Any]) -> Any:
        """A layer as a table with the heads of the model; what is neither a name nor a table stays as it is."""
        if isinstance(layer, str):
            layer = {"kind": layer}
        if not isinstance(layer, dict):
            return layer
        result = shared_heads(model_attention, str(layer.get("kind")))
        for name, value in layer.items():
            # Strict validation takes lists from JSON only.
            result[name] = tuple(value) if isinstance(value, list) else value
        return result

    def _check(self) -> None:
        for layer in self.layers:
            for name in HEADS:
                if hasattr(layer, name) and getattr(layer, name) != getattr(self, name):
                    reason = "and model.attention have different heads"
                    remedy = "Set n_heads, head_dim and n_kv_heads in model.attention only."
                    raise InvalidSettingError("model.attention.layers", reason, remedy)

    @field_serializer("layers")
    def _without_heads(self, layers: tuple[AttentionConfig, ...]) -> list[dict[str, Any]]:
        return [layer.model_dump(mode="json", exclude=set(HEADS)) for layer in layers]


AnyAttentionConfig = Annotated[LayerKind | MixedAttentionConfig, Field(discriminator="kind")]  # attention of a model
ATTENTIONS: dict[str, type[AttentionConfig]] = {  # attention kind to configuration class
    c.model_fields["kind"].default: c for c in get_args(get_args(AnyAttentionConfig)[0])
}


def shared_heads(tree: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Values of `HEADS` in a table that attention of this kind has."""
    fields = ATTENTIONS[kind].model_fields if kind in ATTENTIONS else ()
    return {name: tree[name] for name in HEADS if name in tree and name in fields}
