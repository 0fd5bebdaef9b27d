"""What data is, JSON, a table or plain text: by its name, else by its beginning; and the texts in it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from xlcli.errors import DataError
from xlcli.text.documents import DEFAULT_FIELD, USUAL_FIELDS, Notice, Portions, Read, key_hint
from xlcli.text.json_rows import json_rows
from xlcli.text.table_rows import table_rows

KINDS = {"jsonl": "json", "ndjson": "json", "json": "json", "csv": "table", "tsv": "table", "parquet": "parquet"}
"""What a file has whose name ends so, also below the suffix of a compression."""
BLANKS = 2**9  # number of bytes of blanks and comments after which a text is no longer looked at for rows
LOOK = 2**20  # number of first bytes in which the key `DEFAULT_FIELD` is looked for
_NAME = re.compile(rf"\.({'|'.join(KINDS)})(\.(gz|bz2|xz|zst|zstd))?$", re.IGNORECASE)
_BEFORE_JSON = re.compile(rb"(?:[\s\x1e]|(?:#|//)[^\n]*+)*+")
_JSON = re.compile(rb'\{|\[\s*+[{"\[]')  # beginning of an object, or of an array of objects, texts or arrays
_KEY = re.compile(rf'"{DEFAULT_FIELD}"\s*+:')
_COLUMN = re.compile(r'"?[^\W\d](?:[\w. /()-]*[\w.)])?"?')
"""Usual name of a column: words without a blank before or behind them."""
_SECOND_LINE = re.compile(rb'[^\n]*+\n\x1e?\{"')  # any line, and the beginning of an object in the next one


class Recognized(NamedTuple):
    """What data is: `json`, `table`, `parquet` or `plain` text, None if more bytes will tell; and a remark, if any."""

    kind: str | None
    remark: str | None = None


def texts_in(portions: Portions, name: str, text_fields: Sequence[str], notice: Notice, read: Read) -> Portions:
    """Yields what `read` makes of rows of JSON or a table, or plain text as it is; `notice` is told of rows in that."""

    def is_unknown(head: bytes | bytearray) -> bool:
        return len(head) < LOOK and recognized(head, name, text_fields).kind is None

    head = yield from read_while(portions, is_unknown)
    data = itertools.chain([head], portions)
    kind, remark = recognized(head, name, text_fields, is_all=True)
    fields = text_fields or [DEFAULT_FIELD]
    if kind == "parquet":
        raise DataError(f"{name} is not a Parquet file.", "Copy or download it again, or rename it.")
    if remark:
        notice(remark)
    if kind == "json":
        yield from read(json_rows(data), name, fields, notice)
    elif kind == "table":
        yield from read(table_rows(data, name, fields, notice), name, fields, notice)
    else:
        yield from data


def recognized(head: bytes | bytearray, name: str, text_fields: Sequence[str], *, is_all: bool = False) -> Recognized:
    """Returns what data that begins with `head` is; its name decides, else these bytes. `is_all`: no more will come."""
    if not text_fields:  # it is plain text, unless it is JSON with the `DEFAULT_FIELD`
        return _default_rows_or_plain(head, name, is_all=is_all)
    first_line = head.partition(b"\n")[0]
    names_columns = text_fields[0].encode(errors="replace") in first_line
    if _has_json_in_second_line(head, name) and not names_columns:
        return Recognized("json")
    return Recognized(_apparent_kind(head, name, LOOK, is_all=is_all))


def _default_rows_or_plain(head: bytes | bytearray, name: str, *, is_all: bool) -> Recognized:
    """What data is if the user has named no key; a remark tells of plain text that looks like rows."""
    kind = _apparent_kind(head, name, BLANKS, is_all=is_all)
    if kind is None or kind == "parquet":
        return Recognized(kind)
    is_named = _NAME.search(name) is not None
    remark = None
    if _has_json_in_second_line(head, name):
        remark = f"{name} is read as plain text, because line 1 is not JSON, as line 2 seems to be"
    if kind == "json":
        return _json_or_plain(head, name, remark, is_named=is_named, is_all=is_all)
    if is_named or _names_columns(head):
        remark = f"{name} is read as plain text, not as a table; --text-field NAME reads one column"
    return Recognized("plain", remark)


def _apparent_kind(head: bytes | bytearray, name: str, limit: int, *, is_all: bool) -> str | None:
    """The kind that the name says, else `json` if the data begins so, else `table`; None if more bytes will tell."""
    suffix = _NAME.search(name)
    if suffix is not None:
        return KINDS[suffix[1].lower()]
    rest = _BEFORE_JSON.sub(b"", head[:limit], count=1)  # behind blanks and comments, of less than `limit` bytes
    if _JSON.match(rest):
        return "json"
    may_begin = rest == b"/" or not rest.strip(b" \t\r\n[")
    if may_begin and len(head) < limit and not is_all:
        return None
    return "table"


def _has_json_in_second_line(head: bytes | bytearray, name: str) -> bool:
    """True if data whose name says nothing has JSON in line 2: programs print a line before their rows at the start."""
    return _NAME.search(name) is None and _SECOND_LINE.match(head) is not None


def _names_columns(head: bytes | bytearray) -> bool:
    """True if the first line seems to name columns: one has a usual name, or the next line has as many cells."""
    first, second, *_ = [*head.decode(errors="replace").splitlines(), "", ""]
    for delimiter in "\t,;":
        names = first.split(delimiter)
        if len(names) > 1 and all(map(_COLUMN.fullmatch, names)):
            has_usual_name = any(name.strip('"').lower().split()[-1] in USUAL_FIELDS for name in names)
            return has_usual_name or second.count(delimiter) == len(names) - 1
    return False


def _json_or_plain(
    head: bytes | bytearray, name: str, remark: str | None, *, is_named: bool, is_all: bool
) -> Recognized:
    """Returns `json` if an object has the key `DEFAULT_FIELD`, else `plain`; `remark` is on text that is no JSON."""
    without_key = f"{name} looks like JSON without the key {DEFAULT_FIELD} and is read as plain text"
    first: Any = None  # value that is not empty
    for item in json_rows(iter([bytes(head), None])):
        if item is None and not is_all:
            return Recognized(None)  # the next bytes may have the key
        if not isinstance(item, tuple):
            continue
        _, value = item
        if isinstance(value, dict) and DEFAULT_FIELD in value:
            return Recognized("json")
        if isinstance(value, json.JSONDecodeError):
            # An object that is broken or cut may have the key before that place, in a file that is named so anywhere.
            looked_at = value.doc if is_named else value.doc[: value.pos]
            if _KEY.search(looked_at):
                return Recognized("json")
            seems_to_be_json = is_named or len(head) >= LOOK
            return Recognized("plain", without_key if seems_to_be_json else remark)
        first = first or value or None
        tells = bool(value) and not isinstance(value, str)  # it is an object or array with content
        if tells and not is_named:  # any object counts in a file that is named so
            break
    if is_named or isinstance(first, dict | str):
        return Recognized("plain", without_key + key_hint(first))
    return Recognized("plain")


def read_while(portions: Portions, is_short: Callable[[bytes | bytearray], bool]) -> Generator[None, None, bytes]:
    """First bytes, to which portions are added while `is_short` is true of them."""
    head = bytearray()
    wanted = 0
    for portion in portions:
        if portion is None:
            yield None
            continue
        head += portion
        if len(head) < wanted:  # looking anew at each portion would take long
            continue
        if not is_short(head):
            return portion if len(portion) == len(head) else bytes(head)
        wanted = len(head) * 9 // 8
    return bytes(head)
