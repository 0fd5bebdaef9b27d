"""Kinds of position encoding and what each needs from attention."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Positive

Placement = Literal["embedding", "layers"]


class PositionConfig(BaseConfig):
    """A kind of position encoding."""

    @property
    def needs(self) -> frozenset[str]:
        """Hooks that attention must offer: `rotate`, `term`, `bias`, `values`."""
        return frozenset()


class NoPositionConfig(PositionConfig):
    """No position information beyond what causality gives."""

    kind: Literal["none"] = "none"


class SinusoidalPositionConfig(PositionConfig):
    """Sinusoids of the absolute position (Vaswani et al. 2017), added to the embedding or to every layer's input.

    `amplitude` is 1 in the paper, whose embeddings are initially as large; None keeps that ratio whatever their size.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    placement: Placement = "embedding"
    amplitude: Positive | None = None


class LearnedPositionConfig(PositionConfig):
    """A learned vector for each of `max_len` absolute positions; `layers` gives each layer its own.

    The latter is Al-Rfou et al. 2019. Beyond the last one positions begin again (`wrap`), or reading stops (`error`).
    """

    kind: Literal["learned"] = "learned"
    placement: Placement = "embedding"
    max_len: Count = 4096
    overflow: Literal["wrap", "error"] = "wrap"


class AxialPositionConfig(PositionConfig):
    """A position is a tuple of digits, the last one running fastest; each has learned vectors, which are joined.

    `shape` are the numbers of digits, `dims` the widths of their vectors (default: equal parts of `dim`). Kitaev et
    al. 2020, section "axial positional encodings" of the code; Ho et al. 2019.
    """

    kind: Literal["axial"] = "axial"
    placement: Placement = "embedding"
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)] = (64, 64)
    dims: tuple[Count, ...] | None = None
    overflow: Literal["wrap", "error"] = "wrap"

    @property
    def max_len(self) -> int:
        """Positions that can be told apart."""
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _axes(self) -> AxialPositionConfig:
        if self.dims is not None and len(self.dims) != len(self.shape):
            raise InvalidSettingError(
                "model.position.dims",
                f"{list(self.dims)} is not as long as model.position.shape {list(self.shape)}",
                "Give one width for each axis.",
            )
        return self


class RopePositionConfig(PositionConfig):
    """Queries and keys rotated by their positions (Su et al. 2021).

    `half` pairs feature f with f + e/2 (the layout of GPT-NeoX and LLaMA code), `interleaved` 2f with 2f + 1 (the
    paper's). Rotating the embedding instead is not relative once projected; it is here to be compared with.
    """

    kind: Literal["rope"] = "rope"
    placement: Placement = "layers"
    layout: Literal["half", "interleaved"] = "half"
    base: Positive = 10000.0

    @property
    def needs(self) -> frozenset[str]:
        """The rotation of queries and keys."""
        return frozenset({"rotate"}) if self.placement == "layers" else frozenset()


class AlibiPositionConfig(PositionConfig):
    """A penalty on the score, linear in the distance, with a fixed slope a head (Press et al. 2022)."""

    kind: Literal["alibi"] = "alibi"

    @property
    def needs(self) -> frozenset[str]:
        """A bias on the scores."""
        return frozenset({"bias"})


class RelativeBucketConfig(PositionConfig):
    """Distances fall into buckets, by the causal form of Raffel et al. 2020.

    The first half is exact, the others are log-spaced up to `max_distance`, and the last takes all farther ones.
    """

    n_buckets: Annotated[int, Field(ge=2, le=2**16)] = 32
    max_distance: Count = 128

    @property
    def needs(self) -> frozenset[str]:
        """A bias on the scores."""
        return frozenset({"bias"})

    @model_validator(mode="after")
    def _reachable(self) -> RelativeBucketConfig:
        if self.max_distance < 2 * self.n_buckets:
            raise InvalidSettingError(
                "model.position.max_distance",
                f"{self.max_distance} is less than twice model.position.n_buckets {self.n_buckets}, so that some "
                "buckets could never be reached",
                "Raise it or use fewer buckets.",
            )
        return self


class T5PositionConfig(RelativeBucketConfig):
    """A learned bias for each bucket of distances and head; `shared` by all layers, as published, or one table each."""

    kind: Literal["t5"] = "t5"
    shared: bool = True


class ShawPositionConfig(PositionConfig):
    """Learned vectors for distances up to `max_distance`, and one for all farther ones, on keys and values.

    Shaw et al. 2018, whose code uses a `max_distance` of 16 to 20.
    """

    kind: Literal["shaw"] = "shaw"
    max_distance: Count = 64

    @property
    def needs(self) -> frozenset[str]:
        """A bias on the scores and a term on the values."""
        return frozenset({"bias", "value_bias"})


class XLPositionConfig(PositionConfig):
    """Transformer-XL's relative encoding (Dai et al. 2019, section 3.3): content bias u, position bias v, sinusoids.

    `n_features` is the number of sinusoid features (the paper uses `dim`); `tied` shares u and v over the layers;
    `clamp_len` treats every farther distance as this one.
    """

    kind: Literal["xl"] = "xl"
    n_features: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)] | None = None
    tied: bool = False
    clamp_len: Count | None = None

    @property
    def needs(self) -> frozenset[str]:
        """A second term of the scores; a bias when distances are clamped."""
        return frozenset({"term"}) if self.clamp_len is None else frozenset({"term", "bias"})


class Contextual1PositionConfig(RelativeBucketConfig):
    """The query times a projected vector for each bucket of distances, one set of vectors a layer."""

    kind: Literal["contextual-1"] = "contextual-1"


class Contextual2PositionConfig(RelativeBucketConfig):
    """Disentangled: query times position key and key times position query, by the layer's own projections.

    He et al. 2021 (DeBERTa), with causal buckets.
    """

    kind: Literal["contextual-2"] = "contextual-2"


AnyPositionConfig = Annotated[
    NoPositionConfig
    | SinusoidalPositionConfig
    | LearnedPositionConfig
    | AxialPositionConfig
    | RopePositionConfig
    | AlibiPositionConfig
    | T5PositionConfig
    | ShawPositionConfig
    | XLPositionConfig
    | Contextual1PositionConfig
    | Contextual2PositionConfig,
    Field(discriminator="kind"),
]
POSITIONS: dict[str, type[PositionConfig]] = {
    c.model_fields["kind"].default: c for c in get_args(get_args(AnyPositionConfig)[0])
}
"""Kind to table."""
