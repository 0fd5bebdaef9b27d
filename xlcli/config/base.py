"""Base class and value types of every section of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31)]
"""Positive integer."""
Length = Annotated[int, Field(ge=0, le=2**31)]
"""Length in tokens; may be 0."""
Rate = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
"""Probability below 1, such as a dropout rate."""
Positive = Annotated[float, Field(ge=1e-12, le=1e18)]
"""Positive number, with which products and quotients stay finite."""
SpanKind = Literal["uniform", "growing"]
"""Tokens that a token attends to; see `xlcli.ops.span.Span`."""
WeightEncoding = Literal["float32", "bfloat16", "int8"]
"""Encoding in which weights are written; see `xlcli.store.weights`."""


class BaseConfig(BaseModel):
    """A section of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class InvalidSettingError(ValueError):
    """Raised by a validator; pydantic collects it and `tree.validate` turns it into a `ConfigError`.

    Args:
        key: Dotted key of the invalid setting.
        reason: Rest of the sentence that begins with the key, without its period.
        remedy: Sentence on how to correct it.
    """

    def __init__(self, key: str, reason: str, remedy: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key
        self.reason = reason
        self.remedy = remedy
