"""Rows of JSON lines and arrays."""

from __future__ import annotations

import codecs
import gc
import itertools
import json
import re
from collections.abc import Generator
from typing import Any

from xlcli.files import json_depth, unique_keys
from xlcli.text import documents
from xlcli.text.documents import Place, Portions, Rows

_BETWEEN_VALUES = re.compile(r"[\s,\[\]\x1e]*+")
_COMMENTS = ("#", "//")
_DEPTH = 100  # maximum nesting depth of a row, which every output can hold


def json_rows(portions: Portions) -> Rows:
    """JSON values, one after the other or in arrays, with or without commas.

    What is broken is a `JSONDecodeError`; the next value begins a line later. Lines from # or // on are comments.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    reader = _Reader()
    held = ""
    for portion in itertools.chain(portions, [b""]):
        is_last = portion == b""
        held += utf8.decode(portion or b"", final=is_last)
        if portion and len(held) < reader.wanted:
            continue
        held = yield from reader.values(held, is_last=is_last)
        if portion is None:
            yield None  # a pause, which is passed on
        elif not held:
            yield b""  # nothing is held, so a reader may stop here
    if reader.n_open and not reader.is_broken:
        yield Place("line", reader.line), json.JSONDecodeError("the brackets of arrays do not match", "", 0)


class _Reader:
    """Reads values from a text that is held in part."""

    def __init__(self) -> None:
        self.line = 1  # number of the line that was read up to
        # Characters with which an unfinished value is parsed again: doing so at each portion would take long.
        self.wanted = 0
        self.n_open = 0  # number of brackets of arrays that are open; below 0 if too many are closed
        self.is_broken = False  # true if a value was broken, so that brackets may be lost
        self._skips_line = False

    def values(self, held: str, *, is_last: bool) -> Generator[tuple[str, Any], None, str]:
        """Values and their places; returns what is left: an unfinished value, unless the text is the last one."""
        self.wanted = 0
        at = self._next_value(held, 0)
        while at < len(held):
            value, end = _parsed(held, at)
            n_left = len(held) - at
            may_go_on = end > len(held) and n_left <= documents.LONGEST_LINE
            if may_go_on and not is_last:
                self.wanted = n_left * 9 // 8
                break
            if end - at > documents.LONGEST_LINE:
                limit = documents.LONGEST_LINE
                value = json.JSONDecodeError(f"more than {limit >> 20} MiB", held, at + limit)
            if isinstance(value, json.JSONDecodeError):
                self._skips_line = self.is_broken = True
                broken_line = self.line + held.count("\n", at, value.pos)
                yield Place("line", broken_line), value
            else:
                yield Place("line", self.line), value
                self.line += held.count("\n", at, end)
                at = end
            at = self._next_value(held, at)
        return held[at:]

    def _next_value(self, held: str, at: int) -> int:
        """Where the next value begins, behind the rest of a broken line, brackets, commas, blanks and comments."""
        while True:
            if self._skips_line:
                line_end = held.find("\n", at)
                self._skips_line = line_end < 0  # the line goes on in the next portion
                at = len(held) if self._skips_line else line_end
            start = at
            at = next(_BETWEEN_VALUES.finditer(held, start)).end()
            self.line += held.count("\n", start, at)
            self.n_open += held.count("[", start, at) - held.count("]", start, at)
            if not held.startswith(_COMMENTS, at):
                return at
            self._skips_line = True


def _parsed(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, or a `JSONDecodeError`, and its end, which is behind a text that may go on."""
    collects = gc.isenabled()
    gc.disable()  # it would look through millions of new lists again and again, which are no garbage
    try:
        value, end = _DECODER.raw_decode(text, at)
        check_depth(value, text.count("[", at, end) + text.count("{", at, end))
        return value, end
    except json.JSONDecodeError as error:
        may_go_on = error.msg.startswith("Unterminated") or error.pos + len("-Infinity") > len(text)
        return error, len(text) + 1 if may_go_on else len(text)
    except (ValueError, RecursionError) as error:
        line_end = text.find("\n", at)
        place = line_end if line_end >= 0 else len(text)
        reason = str(error).partition(":")[0]  # without a remedy for programmers
        return json.JSONDecodeError(reason, text, place), len(text)
    finally:
        if collects:
            gc.enable()


def check_depth(value: Any, n_brackets: int) -> None:
    """`ValueError` or `RecursionError` if a row with this number of opening brackets nests too deeply."""
    if n_brackets > _DEPTH and json_depth(value) > _DEPTH:
        raise ValueError(f"it nests deeper than {_DEPTH} levels")


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
