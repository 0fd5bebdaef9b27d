"""Different attention kinds in one model, and the union of the kinds of a layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, model_validator

from xlcli.config.attention.base import AttentionConfig
from xlcli.config.attention.random import LinearAttentionConfig, LSHAttentionConfig
from xlcli.config.attention.softmax import (
    CompressiveAttentionConfig,
    FullAttentionConfig,
    LocalAttentionConfig,
    SoftmaxAttentionConfig,
)
from xlcli.config.base import InvalidSettingError

HEADS = ("n_heads", "head_dim")
"""Keys that all attention kinds share."""
LayerKind = (
    FullAttentionConfig | LocalAttentionConfig | CompressiveAttentionConfig | LinearAttentionConfig | LSHAttentionConfig
)
"""Union of all attention kinds that a layer can have. A new kind is added here."""
LayerAttentionConfig = Annotated[LayerKind, Field(discriminator="kind")]
"""Attention of one layer."""


class MixedAttentionConfig(AttentionConfig):
    """Different attention kinds in one model: `layers` lists them from the first layer on, repeated over the depth.

    An entry is a table, or the name of a kind for its defaults; all layers share `n_heads` and `head_dim`. A position
    encoding applies to the layers that offer its hooks; at least one must.
    """

    kind: Literal["mixed"] = "mixed"
    layers: Annotated[tuple[LayerAttentionConfig, ...], Field(min_length=1, max_length=1024)] = (
        LocalAttentionConfig(),
        LSHAttentionConfig(),
    )

    @property
    def offers(self) -> frozenset[str]:
        """Union of the hooks of all layers."""
        return frozenset().union(*(layer.offers for layer in self.layers))

    def score_scale(self, n_terms: int, head_dim: int) -> float:
        """Factor of the softmax layers, which all share it."""
        scales = [a.score_scale(n_terms, head_dim) for a in self.layers if isinstance(a, SoftmaxAttentionConfig)]
        return scales[0] if scales else super().score_scale(n_terms, head_dim)

    def layer_configs(self, n_layers: int) -> tuple[AttentionConfig, ...]:
        """`layers`, repeated."""
        return tuple(itertools.islice(itertools.cycle(self.layers), n_layers))

    def with_settings(self, settings: Mapping[str, int]) -> Self:
        """Copy in which each layer has these settings."""
        return self.model_copy(update={"layers": tuple(layer.with_settings(settings) for layer in self.layers)})

    def sized_for(self, mem_len: int) -> Self:
        """Copy in which each layer is sized."""
        return self.model_copy(update={"layers": tuple(layer.sized_for(mem_len) for layer in self.layers)})

    @model_validator(mode="before")
    @classmethod
    def _expand_layers(cls, data: Any) -> Any:
        """Names of kinds become tables, and every table gets the shared heads."""
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
    def _check_layers(self) -> MixedAttentionConfig:
        if any(getattr(layer, name) != getattr(self, name) for layer in self.layers for name in HEADS):
            raise InvalidSettingError(
                "model.attention.layers",
                "and model.attention have different heads",
                "Set n_heads and head_dim in model.attention only.",
            )
        if len({layer.scaled for layer in self.layers if isinstance(layer, SoftmaxAttentionConfig)}) > 1:
            raise InvalidSettingError("model.attention.layers", "differ in scaled", "Use one value in all layers.")
        return self

    @field_serializer("layers")
    def _without_heads(self, layers: tuple[AttentionConfig, ...]) -> list[dict[str, Any]]:
        return [layer.model_dump(mode="json", exclude=set(HEADS)) for layer in layers]


def _strict(table: dict[str, Any]) -> dict[str, Any]:
    """Table with tuples for lists: strict validation takes a list from JSON for a tuple, but not from a validator."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
