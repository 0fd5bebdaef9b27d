"""Columns that a list of tokens or words may have in addition."""

import re
from typing import Any, NamedTuple, Self

from xlcli.config import units
from xlcli.config.model import ModelConfig
from xlcli.errors import InvalidSettingError


class Columns(NamedTuple):
    """Further columns of a list of tokens or words (docs/words.md); `layers` is None without, () for all inner ones.

    Those from `alternatives` on are columns of words only.
    """

    rank: bool = False
    entropy: bool = False
    logprobs: int = 0
    layers: tuple[int, ...] | None = None
    temperature: tuple[float, ...] = ()
    renyi: tuple[float, ...] = ()
    alternatives: int = 0
    word_entropy: int = 0
    frequency: str = ""
    length: bool = False
    last: bool = False
    next_entropy: bool = False
    entropy_reduction: bool = False
    previous: int = 0

    @property
    def of_words(self) -> list[str]:
        """Names of those that are columns of words only."""
        first = self._fields.index("alternatives")
        return [name for name, value in zip(self._fields[first:], self[first:], strict=True) if value]

    @property
    def n_searched(self) -> int:
        """Number of the most probable words that are searched for in the place of each word."""
        return max(self.alternatives, self.word_entropy)

    @classmethod
    def read(cls, names: str) -> Self:
        """The columns of names such as `rank,layers=2,4`; `InvalidSettingError` for an unknown one."""
        if not names:
            return cls()
        fields: dict[str, Any] = {}
        for column in re.split(",(?![0-9])", names):  # a comma before a digit is one between numbers of a column
            name, equals, value = column.partition("=")
            if name in _SWITCHES and not equals:
                fields[name] = True
            elif name in _COUNTS and re.fullmatch("[1-9][0-9]{0,2}", value):
                fields[name] = int(value)
            elif name in _NUMBERS and re.fullmatch(f"{_POSITIVE}(,{_POSITIVE})*", value):
                numbers = [float(number) for number in value.split(",")]
                fields[name] = tuple(dict.fromkeys(numbers))  # each once
            elif name == "layers" and not equals:
                fields[name] = ()
            elif name == "layers" and re.fullmatch("[0-9]{1,4}(,[0-9]{1,4})*", value):
                fields[name] = tuple(units.lengths(value))
            elif name == "frequency" and value:
                fields[name] = value
            else:
                known = f"{', '.join(KNOWN_COLUMNS)}; K is 1 to 999, X 0.01 to 99.99"
                raise InvalidSettingError("columns", f"has no '{column}'", f"Known: {known}.")
        return cls(**fields)

    def layers_of(self, model: ModelConfig, context_cache: int | None) -> tuple[int, ...]:
        """Numbers of the blocks of `layers`; `InvalidSettingError` if the model has no such predictions."""
        if self.layers is None:
            return ()
        is_reversible = model.stack.kind == "reversible"
        is_adaptive = getattr(model.stack, "act", False)
        all_exist = all(1 <= number <= model.depth for number in self.layers)
        if is_reversible or is_adaptive or context_cache or not all_exist:
            reason = f"needs layers from 1 to {model.depth}, no reversible or adaptive stack, and no context cache"
            raise InvalidSettingError("columns", reason, "Leave out the others.")
        return self.layers or tuple(range(1, model.depth))


_SWITCHES = ("rank", "entropy", "length", "last", "next_entropy", "entropy_reduction")
_COUNTS = ("logprobs", "alternatives", "word_entropy", "previous")
_NUMBERS = ("temperature", "renyi")
_POSITIVE = r"(?!0+(?:\.0+)?(?:,|$))[0-9]{1,2}(?:\.[0-9]{1,2})?"
"""A number of `_NUMBERS`, not 0. With at most two decimals the order of a Rényi entropy is 1 or clearly another one."""
KNOWN_COLUMNS = (
    *_SWITCHES, "layers", "layers=N,N", "frequency=FILE",
    *(f"{name}=K" for name in _COUNTS), *(f"{name}=X" for name in _NUMBERS),
)  # fmt: skip
