"""Position encoding kinds. A configuration class has the settings of its kind and the properties derived from them."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from xlcli.config.base import BaseConfig, Count, Positive
from xlcli.errors import InvalidSettingError

ClampLen = Count | Literal["none"]  # largest distance of a position encoding, or `none` for any
Placement = Literal["embedding", "layers"]  # absolute positions are added to the embedding or each layer's input
PlacementOrQK = Literal["embedding", "layers", "qk"]  # also: to the queries and keys of every layer, not to its values


class PositionConfig(BaseConfig):
    """Base of every position encoding."""

    hooks: ClassVar[frozenset[str]] = frozenset()
    in_heads: ClassVar[str] = "qk"  # placement with which queries and keys of every head get positions
    adds_vectors: ClassVar[bool] = False  # true if vectors of the absolute position are added
    in_pairs: ClassVar[bool] = False  # true if pairs of features get positions, so that their width must be even

    @property
    def needs(self) -> frozenset[str]:
        """Hooks that attention must offer: `place`, `term`, `bias`, `value_bias`. `embed` and `far` need no offer."""
        if getattr(self, "placement", None) == self.in_heads:
            return frozenset({"place"})
        return self.hooks

    @property
    def is_absolute(self) -> bool:
        """True if predictions depend on the positions of tokens in their text, not only on distances."""
        # Also for rotated embeddings, since projections mix the features of a pair.
        return self.adds_vectors or getattr(self, "placement", None) == "embedding"

    def check_dims(self, dim: int, head_dim: int) -> None:
        """`InvalidSettingError` unless the encoding is possible with these model and head widths."""
        key, width = "model.dim", dim
        if "place" in self.needs:
            key, width = "model.attention.head_dim", head_dim
        if self.in_pairs and width % 2:
            kind = type(self).model_fields["kind"].default
            raise InvalidSettingError(key, f"{width} is odd, but position '{kind}' consists of pairs", "Make it even.")


class NoPositionConfig(PositionConfig):
    """No position information except the causal mask."""

    kind: Literal["none"] = "none"


class SinusoidalPositionConfig(PositionConfig):
    """Sinusoids of the absolute position (Vaswani et al. 2017); with placement `qk` of the width of a head."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    placement: PlacementOrQK = Field(
        default="embedding",
        description="Add sinusoids to the embedding, the input of every layer, or queries and keys of every head.",
    )
    amplitude: Positive | None = Field(
        default=None,
        description="Amplitude of the sinusoids; 1 in the paper. Default: 1 with placement qk, else the "
        "initial root mean square of the embeddings (the ratio in the paper).",
    )
    adds_vectors = True
    in_pairs = True


class LearnedPositionConfig(PositionConfig):
    """A learned vector for each of `max_len` absolute positions.

    Placements `layers` and `qk` have one table per layer (as Al-Rfou et al. 2019) or, `shared`, one for all.
    """

    kind: Literal["learned"] = "learned"
    placement: PlacementOrQK = Field(
        default="embedding",
        description="Add vectors to the embedding, the input of every layer, or queries and keys, a part per head.",
    )
    shared: bool = Field(default=False, description="Share one table among all layers.")
    max_len: Count = Field(default=4096, description="Number of positions in a table.")
    overflow: Literal["wrap", "slide", "error"] = Field(
        default="wrap",
        description="Positions beyond the table start again at 0 (wrap) or raise an error. With slide, a text is read "
        "in overlapping windows if there is no memory (stride).",
    )
    adds_vectors = True

    def _check(self) -> None:
        if self.shared and self.placement == "embedding":
            reason = "is for tables of layers, but model.position.placement is 'embedding'"
            remedy = "Leave it out, or set model.position.placement to layers or qk."
            raise InvalidSettingError("model.position.shared", reason, remedy)


class AxialPositionConfig(PositionConfig):
    """Concatenated learned vectors of the digits of a position in a mixed radix, least significant digit last.

    Ho et al. 2019; Kitaev et al. 2020, section "axial positional encodings" of the code.
    """

    kind: Literal["axial"] = "axial"
    placement: Placement = Field(
        default="embedding", description="Add vectors to the embedding, or to the input of every layer."
    )
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)] = Field(
        default=(64, 64), description="Radices of the digits of a position, least significant last."
    )
    dims: tuple[Count, ...] | None = Field(
        default=None, description="Widths of the vectors of each digit. Default: equal parts of model.dim."
    )
    overflow: Literal["wrap", "error"] = Field(
        default="wrap", description="Positions beyond the table start again at 0 (wrap) or raise an error."
    )
    adds_vectors = True

    def widths(self, dim: int) -> tuple[int, ...]:
        """Width of the vectors of each digit: `dims`, or equal parts of `dim`, the first ones wider."""
        if self.dims is not None:
            return self.dims
        n_digits = len(self.shape)
        width, n_wider = divmod(dim, n_digits)
        return (width + 1,) * n_wider + (width,) * (n_digits - n_wider)

    def check_dims(self, dim: int, head_dim: int) -> None:
        widths = self.widths(dim)
        if sum(widths) != dim or not all(widths):
            reason = f"{list(widths)} do not add up to model.dim {dim}"
            raise InvalidSettingError("model.position.dims", reason, "Change them, or leave them out for equal parts.")

    def _check(self) -> None:
        if self.dims is not None and len(self.dims) != len(self.shape):
            reason = f"{list(self.dims)} is not as long as model.position.shape {list(self.shape)}"
            raise InvalidSettingError("model.position.dims", reason, "Give one width for each axis.")


class RopeScalingConfig(BaseConfig):
    """Change of the frequencies of rotary positions, for texts longer than those of training."""

    kind: Literal["none", "linear", "llama3"] = Field(
        default="none",
        description="Frequencies divided by the factor: none, all (linear; Chen et al. 2023), or low ones, with means "
        "between low and high (llama3; Llama 3.1).",
    )
    factor: Positive = Field(default=8.0, description="Divisor of the frequencies.")
    low_freq_factor: Positive = Field(
        default=1.0, description="With llama3: largest number of periods in original_len of a low frequency."
    )
    high_freq_factor: Positive = Field(
        default=4.0, description="With llama3: smallest number of periods in original_len of a high frequency."
    )
    original_len: Count = Field(
        default=8192, description="With llama3: number of tokens of a text in training without scaling."
    )

    def _check(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            reason = f"{self.low_freq_factor} is not below high_freq_factor"
            raise InvalidSettingError("low_freq_factor", reason, "Lower it.")


class RopePositionConfig(PositionConfig):
    """Rotation of queries and keys by their positions (Su et al. 2021)."""

    kind: Literal["rope"] = "rope"
    placement: Placement = Field(
        default="layers",
        description="Rotate queries and keys of every layer, or the embedding (an ablation; not relative "
        "after a projection).",
    )
    layout: Literal["half", "interleaved"] = Field(
        default="half",
        description="Pairs of features f and f + e/2 (half; code of GPT-NeoX), or 2f and 2f + 1 (interleaved; paper, "
        "code of LLaMA).",
    )
    rotary_dim: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)] | None = Field(
        default=None,
        description="Rotate the first features of each head, or of the embedding: this many. Default: all.",
    )
    base: Positive = Field(default=10000.0, description="Base of the wavelengths.")
    local_base: Positive | None = Field(
        default=None,
        description="Base in layers with local attention, where frequencies are not scaled (Gemma Team 2025). Default: "
        "as in the other layers.",
    )
    scaling: RopeScalingConfig = Field(default_factory=RopeScalingConfig)
    clamp_len: Count | None = Field(
        default=None, description="Largest distance in softmax attention, as for position xl."
    )
    n_sinks: Annotated[int, Field(ge=0, le=2**16)] = Field(
        default=0,
        description="At inference, full attention also sees this many first tokens of the text, as if at "
        "distance clamp_len (Xiao et al. 2024).",
    )
    in_heads = "layers"
    in_pairs = True

    def check_dims(self, dim: int, head_dim: int) -> None:
        if self.rotary_dim is None:
            super().check_dims(dim, head_dim)
            return
        width = head_dim if "place" in self.needs else dim
        if self.rotary_dim > width:
            reason = f"{self.rotary_dim} is more than the {width} features there are"
            raise InvalidSettingError("model.position.rotary_dim", reason, "Lower it, or leave it out for all.")

    def _check(self) -> None:
        if self.local_base is not None and self.placement == "embedding":
            reason = "is for layers, but model.position.placement is 'embedding'"
            raise InvalidSettingError("model.position.local_base", reason, "Leave it out, or set placement to layers.")


class AlibiPositionConfig(PositionConfig):
    """Score penalty that is linear in the distance, with a fixed slope for each head (Press et al. 2022)."""

    kind: Literal["alibi"] = "alibi"
    hooks = frozenset({"bias"})


class RelativeBucketConfig(PositionConfig):
    """Relative buckets of distances, in the causal form of Raffel et al. 2020.

    The first half of the buckets has one distance each. The others are log-spaced up to `max_distance`, and the last
    one contains all longer distances.
    """

    n_buckets: Annotated[int, Field(ge=2, le=2**16)] = Field(default=32, description="Number of buckets of distances.")
    max_distance: Count = Field(default=128, description="Distances from here on share the last bucket.")
    hooks = frozenset({"bias"})

    def _check(self) -> None:
        if self.max_distance < 2 * self.n_buckets:
            comparison = f"{self.max_distance} is less than twice model.position.n_buckets {self.n_buckets}"
            reason = f"{comparison}, so some buckets would be empty"
            raise InvalidSettingError("model.position.max_distance", reason, "Raise it or use fewer buckets.")


class T5PositionConfig(RelativeBucketConfig):
    """Learned bias for each relative bucket and head."""

    kind: Literal["t5"] = "t5"
    shared: bool = Field(default=True, description="Use one table for all layers, as published.")


class ShawPositionConfig(PositionConfig):
    """Learned vectors of the distance, added to keys and values (Shaw et al. 2018)."""

    kind: Literal["shaw"] = "shaw"
    max_distance: Count = Field(
        default=64, description="Distances from here on share one vector; the published code uses 16 to 20."
    )
    hooks = frozenset({"bias", "value_bias"})


class XLPositionConfig(PositionConfig):
    """Relative encoding of Transformer-XL (Dai et al. 2019, section 3.3): biases u and v, and sinusoids."""

    kind: Literal["xl"] = "xl"
    n_features: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)] | None = Field(
        default=None, description="Number of sinusoid features. Default: model.dim, as in the paper."
    )
    tied: bool = Field(default=False, description="Share the biases u and v among the layers.")
    clamp_len: Count | None = Field(
        default=None,
        description="Largest distance; longer ones are clamped to it. Default: no limit in training, the "
        "largest trained distance at inference.",
    )

    @property
    def needs(self) -> frozenset[str]:
        if self.clamp_len is None:
            return frozenset({"term"})
        return frozenset({"term", "bias"})  # clamped distances of training are added as a bias


class Contextual1PositionConfig(RelativeBucketConfig):
    """Inner product of query and projected vector of the relative bucket."""

    kind: Literal["contextual-1"] = "contextual-1"
    shared: bool = Field(default=False, description="Share vectors and their projection among all layers.")


class Contextual2PositionConfig(RelativeBucketConfig):
    """Disentangled scores: query times position key plus key times position query, with the layer's projections.

    He et al. 2021 (DeBERTa), with causal relative buckets.
    """

    kind: Literal["contextual-2"] = "contextual-2"
    shared: bool = Field(default=False, description="Share one table among all layers, as in the paper.")


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
POSITIONS: dict[str, type[PositionConfig]] = {  # position kind to configuration class
    c.model_fields["kind"].default: c for c in get_args(get_args(AnyPositionConfig)[0])
}
LESS_WEIGHT_BEYOND_MEMORY = frozenset({"none", "sinusoidal", "learned", "axial", "contextual-1", "contextual-2"})
"""Kinds with which keys beyond the memory of training get less weight; with others, keys beyond the largest distance of
training do (measured)."""
