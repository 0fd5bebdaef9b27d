"""Regular expressions in settings."""

from __future__ import annotations

from typing import Any

from xlcli.config.base import InvalidSettingError


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
