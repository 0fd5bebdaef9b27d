"""Attention kinds. A configuration class has the settings of its kind and the properties derived from them."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from xlcli.config.attention.base import AttentionConfig
from xlcli.config.attention.mixed import LayerKind, MixedAttentionConfig

AnyAttentionConfig = Annotated[LayerKind | MixedAttentionConfig, Field(discriminator="kind")]
"""Attention of a model."""
ATTENTIONS: dict[str, type[AttentionConfig]] = {
    c.model_fields["kind"].default: c for c in get_args(get_args(AnyAttentionConfig)[0])
}
"""Attention kind to configuration class."""
