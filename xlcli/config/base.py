"""Base class and value types of every section of the configuration, and regular expressions in settings.

A setting is declared once, as a field of a section. Its type has the bounds and the validator that reads it from text
(`units`), its description is the help, and an `Option` makes it an option of the command line.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from xlcli.config import units
from xlcli.config.units import COUNT, DURATION, NUMBER
from xlcli.errors import InvalidSettingError


@dataclass(frozen=True)
class Option:
    """Part of the type of a field that is an option of the command line."""

    panel: str  # heading in the help
    names: str  # names and value as the help shows them: `-n, --max-new-tokens N`
    example: str = ""  # a valid value for error messages
    commands: tuple[str, ...] = ()  # commands that have the option; empty for all that use the section

    @property
    def spellings(self) -> list[str]:
        """Its names: `["-n", "--max-new-tokens"]`."""
        return [name for name in self.names.replace(",", " ").split(" ") if name.startswith("-")]


Count = Annotated[int, Field(ge=1, le=2**31), COUNT]  # positive integer
Length = Annotated[int, Field(ge=0, le=2**31), COUNT]  # length in tokens; may be 0
Rate = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), NUMBER]  # probability below 1, as of dropout
Share = Annotated[float, Field(ge=0.0, le=1.0), NUMBER]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0), NUMBER]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False), NUMBER]
Positive = Annotated[float, Field(ge=1e-12, le=1e18), NUMBER]  # products and quotients of such numbers stay finite
Seconds = Annotated[float, Field(ge=1e-12, le=1e18), DURATION]  # time in seconds
Switch = Annotated[bool, units.reads(units.switch)]  # yes or no; in the environment 1 or 0
SpanKind = Literal["uniform", "growing"]  # tokens that a token attends to; see `xlcli.ops.span.Span`
WeightEncoding = Literal["float32", "bfloat16", "int8"]  # in which weights are written; see `xlcli.store.weights`


class BaseConfig(BaseModel):
    """A section of the configuration: immutable, without unknown keys."""

    # Validators are built when they are first used, so that usage errors and help need not wait for them.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, defer_build=True)

    @model_validator(mode="after")
    def _run_check(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """`InvalidSettingError` if values do not fit together."""


def compile_pattern(pattern: str, key: str) -> Any:
    """Regular expression for lines of text, with the method `search` of `re`; `InvalidSettingError` if it is none."""
    # The matcher is RE2, whose time is linear in the length of the text, whatever the pattern.
    import re2

    options = re2.Options()
    options.log_errors = False  # they are raised
    options.max_mem = 2**20
    try:
        if len(pattern) > 1000:
            raise InvalidSettingError(key, "has more than 1,000 characters", "Shorten the pattern.")
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        reason = f"is not a regular expression: {reason}"
        raise InvalidSettingError(key, reason, "Check the pattern; the syntax is RE2.") from None
