"""What every table of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31)]
"""How many of something there must be at least one of."""
Length = Annotated[int, Field(ge=0, le=2**31)]
"""A length in tokens; zero is meaningful."""
Rate = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
"""A probability of dropping."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class BaseConfig(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
