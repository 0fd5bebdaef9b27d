"""Base class and value types of every section of the configuration, and regular expressions in settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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


def compile_pattern(pattern: str, key: str) -> Any:
    """Regular expression for lines of text, with the method `search` of `re`.

    The matcher is RE2, whose time is linear in the length of the text, whatever the pattern.

    Raises:
        InvalidSettingError: It is not a regular expression of RE2, or too large.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = 2**20
    try:
        if len(pattern) > 1000:
            raise InvalidSettingError(key, "has more than 1,000 characters", "Shorten the pattern.")
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise InvalidSettingError(
            key, f"is not a regular expression: {reason}", "Check the pattern; the syntax is that of RE2."
        ) from None
