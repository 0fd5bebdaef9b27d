"""Errors that users can cause or meet. The command line prints each as one sentence and returns its exit code."""

import re
from collections.abc import Sequence

MAX_NAMED = 12  # maximum number of names from files or folders in a message


def named(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """The first names in words, each shortened, and the number of the others."""
    text = ", ".join(shortened(name, 200) for name in names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


def counted(n: int, noun: str) -> str:
    """A number of things: `1 token`, `2 tokens`."""
    return f"{n} {plural_noun(n, noun)}"


def plural_noun(n: float, noun: str) -> str:
    """The noun for a number of things: `token` for 1, `tokens` for 2."""
    return noun if n == 1 else f"{noun}s"


def shortened(text: str, length: int = 4000) -> str:
    """A message or name without its middle if it is longer."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} ... {text[-length // 2 :]}"


_OPTION = re.compile(
    r"'[^']*'|xlcli [a-z]+ .*|--set ((eval|generate|stream)\.)?|"
    r"(?<![\w-])(?P<option>--[a-z-]*[a-z]|-[mo]\b)(?P<blank_before_value> (?=[\dA-Z]))?"
)
"""An option in a sentence, or a name or a command, which stay."""
_KEYWORDS = {"-m": "model", "-o": "folder"}


def in_python(text: str) -> str:
    """A sentence of an error with keywords in place of options: `batch_size=1` for `--batch-size 1`. Commands stay."""

    def keyword(match: re.Match[str]) -> str:
        option = match["option"]
        if option is None:
            is_name_or_command = match[0].startswith(("'", "xlcli"))
            return match[0] if is_name_or_command else ""  # `--set` goes, and the key after it is a keyword
        word = _KEYWORDS.get(option, option.lstrip("-").replace("-", "_"))
        return word if match["blank_before_value"] is None else f"{word}="

    return _OPTION.sub(keyword, text).replace("=false", "=False")


class XLError(Exception):
    """Base of all errors of xlcli.

    Args:
        message: Sentence that describes the problem and its place.
        remedy: Sentence that suggests a solution; may be empty.

    Both name settings as options of the command line. As a text, an error names them as keywords of Python.
    """

    exit_code = 1
    is_of_first_rank = False
    """True if the first process of the run reports this error."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = shortened(message)
        self.remedy = shortened(remedy)

    def __str__(self) -> str:
        return in_python(f"{self.message} {self.remedy}".strip())


class ConfigError(XLError):
    """A usage or configuration mistake: unknown key, illegal combination, value out of range."""

    exit_code = 2


class InvalidSettingError(ConfigError, ValueError):
    """A setting that is illegal, alone or with others; a `ValueError`, because pydantic collects these.

    Args:
        key: Dotted key of the setting; within a validator also a name in its section.
        reason: Rest of the sentence that begins with the key, without its period.
        remedy: Sentence on how to correct it.
    """

    def __init__(self, key: str, reason: str, remedy: str) -> None:
        super().__init__(f"{key} {reason}.", remedy)
        self.key = key
        self.reason = reason


class DataError(XLError):
    """The text cannot be used: empty, unreadable, invalid UTF-8 where UTF-8 is required, or changed."""

    exit_code = 3


class StateError(XLError):
    """A saved state belongs to another model or is damaged."""

    exit_code = 3


class CheckpointError(XLError):
    """A model folder or checkpoint is missing, damaged, mismatched or of a newer format."""

    exit_code = 3


class ResourceError(XLError):
    """Out of disk space, RAM or GPU memory."""

    exit_code = 4


class RankError(XLError):
    """Another process of a run on several ranks has ended or does not answer."""

    exit_code = 4


class LostRankError(RankError):
    """The connection to another process was lost: it has ended."""


class BusyError(XLError):
    """Another process is writing the same model folder."""

    exit_code = 5


class DivergedError(XLError):
    """Training or adaptation met NaN or infinity; nothing non-finite was saved."""

    exit_code = 6
