"""Kinds of attention and what each offers to a position encoding."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_serializer, field_validator, model_validator

from xlcli.config.base import BaseConfig, Count, InvalidSettingError

MAX_BUCKETS = 2**16
MAX_HASHES = 8
"""Rounds that directions are drawn for, so that a trained model may be run with more of them."""


class AttentionConfig(BaseConfig):
    """A kind of attention. `head_dim` defaults to `dim / n_heads`."""

    n_heads: Count = 4
    head_dim: Count | None = None

    @property
    def offers(self) -> frozenset[str]:
        """Hooks of a position encoding that this attention calls."""
        return frozenset()


class SoftmaxAttentionConfig(AttentionConfig):
    """`scaled` divides scores by sqrt(head_dim); the code of T5 does not (Raffel et al. 2020)."""

    scaled: bool = True

    @property
    def offers(self) -> frozenset[str]:
        """All of them."""
        return frozenset({"rotate", "term", "bias", "values"})


class FullAttentionConfig(SoftmaxAttentionConfig):
    """Softmax attention over the whole span."""

    kind: Literal["full"] = "full"


class LocalAttentionConfig(SoftmaxAttentionConfig):
    """Softmax attention over the last `window` tokens before a token and itself, in blocks: cost linear in length."""

    kind: Literal["local"] = "local"
    window: Count = 128


class LinearAttentionConfig(AttentionConfig):
    """Performer (Choromanski et al. 2021): the softmax kernel by `n_features` random features, sums as the memory.

    It has no span: everything read since the start counts, in a memory of constant size. `redraw_every` draws fresh
    features every so many steps of training, which forgets the memory.
    """

    kind: Literal["linear"] = "linear"
    n_features: Annotated[int, Field(ge=1, le=2**16)] = 128
    orthogonal: bool = True
    redraw_every: Count | None = None

    @property
    def offers(self) -> frozenset[str]:
        """Queries and keys may be turned before their features are made."""
        return frozenset({"rotate"})


class LSHAttentionConfig(AttentionConfig):
    """Hashed attention of shared queries and keys (Kitaev et al. 2020, Reformer), at a cost linear in length.

    In each of `n_hashes` rounds a token sees the last `bucket_size` earlier tokens of its bucket, within the memory
    length; itself only if there are none. `n_buckets` is even, or a list of even numbers whose product is meant: many
    buckets at the price of few. Buckets are the memory: constant in size, and a look-up costs the same whatever its
    length. A trained model may be run with more rounds than it was trained with. `redraw_every` draws fresh directions
    every so many steps of training, which forgets the memory of the layer.
    """

    kind: Literal["lsh"] = "lsh"
    n_buckets: int | tuple[int, ...] = 64
    bucket_size: Annotated[int, Field(ge=1, le=2**16)] = 32
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES)] = 4
    redraw_every: Count | None = None

    @property
    def offers(self) -> frozenset[str]:
        """Queries and keys may be turned once they have been hashed."""
        return frozenset({"rotate"})

    @property
    def factors(self) -> tuple[int, ...]:
        """The even numbers whose product is the number of buckets; none for a single bucket."""
        if self.n_buckets == 1:
            return ()
        return (self.n_buckets,) if isinstance(self.n_buckets, int) else self.n_buckets

    @field_validator("n_buckets")
    @classmethod
    def _even(cls, n_buckets: int | tuple[int, ...]) -> int | tuple[int, ...]:
        factors = (n_buckets,) if isinstance(n_buckets, int) else n_buckets
        if n_buckets != 1 and (not factors or any(n < 2 or n % 2 for n in factors)):
            raise InvalidSettingError(
                "model.attention.n_buckets",
                f"is {n_buckets}, but buckets come in pairs of opposite directions",
                "Make it even, a list of even numbers, or 1.",
            )
        if math.prod(factors) > MAX_BUCKETS:
            raise InvalidSettingError(
                "model.attention.n_buckets", f"{n_buckets} are more than {MAX_BUCKETS}", "Use fewer buckets."
            )
        return n_buckets


LayerAttentionConfig = Annotated[
    FullAttentionConfig | LocalAttentionConfig | LinearAttentionConfig | LSHAttentionConfig, Field(discriminator="kind")
]
"""The attention of one layer."""


class MixedAttentionConfig(AttentionConfig):
    """Layers of several kinds: `layers` names them from the first on, and is repeated over the depth.

    Each is a table of its kind, or the kind alone for its defaults; heads are those of the whole. A position encoding
    is given to the layers that can take it, of which there must be one.
    """

    kind: Literal["mixed"] = "mixed"
    layers: Annotated[tuple[LayerAttentionConfig, ...], Field(min_length=1, max_length=1024)] = (
        LocalAttentionConfig(),
        LSHAttentionConfig(),
    )

    @property
    def offers(self) -> frozenset[str]:
        """What any of the layers does."""
        return frozenset().union(*(layer.offers for layer in self.layers))

    @property
    def scaled(self) -> bool:
        """Whether layers of softmax attention divide scores by sqrt(head_dim)."""
        return all(layer.scaled for layer in self.layers if isinstance(layer, SoftmaxAttentionConfig))

    @model_validator(mode="before")
    @classmethod
    def _tables(cls, data: Any) -> Any:
        """Kinds alone become tables, and all of them get the heads of the whole."""
        if not isinstance(data, dict):
            return data
        data = {"layers": ("local", "lsh")} | data
        if not isinstance(data["layers"], list | tuple):
            return data
        heads = {name: data[name] for name in HEADS if name in data}
        layers = ({"kind": layer} if isinstance(layer, str) else layer for layer in data["layers"])
        return data | {
            "layers": tuple(heads | _strict(layer) if isinstance(layer, dict) else layer for layer in layers)
        }

    @model_validator(mode="after")
    def _alike(self) -> MixedAttentionConfig:
        if any(getattr(layer, name) != getattr(self, name) for layer in self.layers for name in HEADS):
            raise InvalidSettingError(
                "model.attention.layers",
                "have other heads than model.attention",
                "Set n_heads and head_dim in model.attention only.",
            )
        if len({layer.scaled for layer in self.layers if isinstance(layer, SoftmaxAttentionConfig)}) > 1:
            raise InvalidSettingError(
                "model.attention.layers", "differ in scaled", "Set scaled to the same value in all of them."
            )
        return self

    @field_serializer("layers")
    def _without_heads(self, layers: tuple[AttentionConfig, ...]) -> list[dict[str, Any]]:
        return [layer.model_dump(mode="json", exclude=set(HEADS)) for layer in layers]


def _strict(table: dict[str, Any]) -> dict[str, Any]:
    """The table with its lists as tuples: what is read from JSON before a validator is no longer JSON behind it."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


HEADS = ("n_heads", "head_dim")
"""Keys that mean the same whatever the kind."""

AnyAttentionConfig = Annotated[
    FullAttentionConfig | LocalAttentionConfig | LinearAttentionConfig | LSHAttentionConfig | MixedAttentionConfig,
    Field(discriminator="kind"),
]
ATTENTIONS: dict[str, type[AttentionConfig]] = {
    c.model_fields["kind"].default: c for c in get_args(get_args(AnyAttentionConfig)[0])
}
"""Kind to table."""
