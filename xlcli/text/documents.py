"""Texts of rows: JSON lines, CSV and TSV tables, and Parquet files.

Each text is a `Document` with the other fields of its row. Memory is bounded: a JSON line or a row of a table has at
most `LONGEST_LINE` bytes. Parquet files, which are read from their end, need pyarrow, the extra `parquet`.
"""

from __future__ import annotations

import csv
import gc
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from xlcli.errors import DataError
from xlcli.files import as_utf8

DEFAULT_FIELD = "text"
"""Key of the text in JSON lines and Parquet files."""
LONGEST_LINE = 2**24
"""Maximum size of a JSON line or a row of a table in bytes. Parsing can take 64 bytes of RAM per byte."""
BLANKS = 2**9
"""Number of blank bytes after which a text is no longer looked at for rows."""
PARQUET = b"PAR1"
"""First bytes of Parquet files."""
PARQUET_ROWS = 256
"""Rows per batch."""
_QUOTE_END = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
"""Rest of a quoted cell."""

Portions = Iterator[bytes | None]


class Document(bytes):
    """A portion that begins a document. Portions of other types continue the document before them.

    Attributes:
        fields: The fields of its row that are not texts: strings of a table, values of a JSON object.
    """

    fields: Mapping[str, Any] = MappingProxyType({})


def documents(portions: Portions, name: str, text_fields: Sequence[str], notice: Callable[[str], None]) -> Portions:
    """Texts of JSON lines or of a table, each a `Document` ended by a line end; other text is passed on unchanged.

    Without `text_fields` only JSON lines are recognized, by a text in `DEFAULT_FIELD` of the first line.

    Raises:
        DataError: As `json_lines` and `table`.
    """
    head = yield from read_while(portions, lambda head, new: len(head) < BLANKS and not new.strip())
    start, first = len(head) - len(head.lstrip()), b""
    mark = head[start:BLANKS][:1]
    if mark == b"{" or (mark and text_fields):
        data = itertools.chain([head[start:]], portions)
        begun = yield from read_while(data, lambda begun, new: b"\n" not in new and len(begun) <= LONGEST_LINE)
        head, first = head[:start] + begun, begun[: LONGEST_LINE + 1].partition(b"\n")[0]
    data = itertools.chain([head], portions)
    if text_fields:
        is_table = mark not in (b"", b"{")
        yield from table(data, name, text_fields, first) if is_table else json_lines(data, name, text_fields)
    elif len(first) <= LONGEST_LINE and _texts(_parsed(first), [DEFAULT_FIELD]) is not None:
        yield from json_lines(data, name, [DEFAULT_FIELD])
    else:
        if len(first) > LONGEST_LINE and json.dumps(DEFAULT_FIELD).encode() in first:
            raise _too_long(1, name)
        if remark := keyless(first, name):
            notice(remark)
        yield from data


def keyless(line: bytes, name: str) -> str | None:
    """Remark on plain text that is named as a table, or whose first line is a JSON object with other texts; or None."""
    if {".csv", ".tsv"}.intersection(PurePath(name.lower()).suffixes[-2:]):
        return f"{name} is read as plain text, not as a table; --text-field NAME reads one column"
    value = _parsed(line) if len(line) <= LONGEST_LINE >> 4 else None
    texts = {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
    if not texts or DEFAULT_FIELD in texts:
        return None
    key = shlex.quote(max(texts, key=lambda key: len(texts[key])))
    return (
        f"{name} looks like JSON lines without the key {DEFAULT_FIELD} and is read as plain text; "
        f"--text-field {key} reads that key"
    )


def json_lines(
    portions: Portions, name: str, text_fields: Sequence[str], skipped: Callable[[str], None] | None = None
) -> Portions:
    """Texts of JSON lines. Calls `skipped` with a remark on each line without them.

    Raises:
        DataError: A line is not a JSON object with these texts and `skipped` is None, or is longer than `LONGEST_LINE`.
    """
    for number, line in _numbered_lines(portions, name):
        if line is None:
            yield None
        elif line.strip():
            texts = _texts(_parsed(line), text_fields)
            if texts is None:
                wanted = " and ".join(f"a text in '{field}'" for field in text_fields)
                reason = f"line {number} of {name} is not a JSON object with {wanted}"
                if skipped is None:
                    option = "--text-field" if len(text_fields) == 1 else "--pairs"
                    raise DataError(f"{reason}.", f"Name the key with {option}, or take the lines with --binary.")
                skipped(f"{reason}, and is skipped")
            yield from texts or ()
        else:
            yield b""  # the reader may want to stop


def table(portions: Portions, name: str, text_fields: Sequence[str], first: bytes) -> Portions:
    """Texts of a table, whose first row names the columns. `first` is its first line.

    Raises:
        DataError: A column of `text_fields` is missing, a name is there twice, or a row is broken or too long.
    """
    csv.field_size_limit(LONGEST_LINE)
    delimiter = _delimiter(first, text_fields)
    quote = re.compile(rb'(?:^|%b)"' % delimiter.encode())
    columns: list[str] = []
    row, begin, is_open = bytearray(), 1, False
    for number, line in _numbered_lines(portions, name):
        if line is None:
            yield None
            continue
        row += line + b"\n"
        at = 0
        while found := _QUOTE_END.match(line, at) if is_open else quote.search(line, at):
            at, is_open = found.end(), not is_open
        if is_open and len(row) <= LONGEST_LINE:
            continue
        place = f"line {begin} of {name}"
        try:
            cells = next(csv.reader([row.decode()], delimiter=delimiter, strict=True)) if row.strip(b" \r\n") else []
        except UnicodeDecodeError:
            raise DataError(f"{place} is not UTF-8.", "Save it as CSV UTF-8, or convert it with iconv.") from None
        except csv.Error:
            raise _broken(place, "a quote is not doubled or not closed, or a line ends in CR alone") from None
        if not cells:
            yield b""
        elif not columns:
            columns = cells
            _require(text_fields, columns, place)
            column, times = Counter(filter(None, columns)).most_common(1)[0]
            if times > 1:
                raise DataError(f"{place} names {times:,} columns '{column[:99]}'.", "Give each a name of its own.")
        elif len(cells) != len(columns):
            raise _broken(place, f"it has {len(cells):,} cells, and the header {len(columns):,}")
        else:
            texts = _texts(dict(zip(columns, cells, strict=True)), text_fields)
            if texts is None:
                raise _broken(place, f"'{text_fields[0]}' or '{text_fields[-1]}' is empty")
            yield from texts
        row, begin = bytearray(), number + 1
    if row:
        raise _broken(f"line {begin} of {name}", "a quote is not closed")


def begins_with(descriptor: int, mark: bytes) -> bool:
    """True if an open file begins with these bytes; False for a pipe."""
    try:
        return os.pread(descriptor, len(mark), 0) == mark
    except OSError:
        return False


def parquet_texts(descriptor: int, name: str, text_fields: Sequence[str]) -> Iterator[Document]:
    """Each text of these columns (none: `text`) of an open file, ended by a line end, without other fields.

    Raises:
        DataError: pyarrow is missing, the file is damaged, there is no such column, or one of two texts is empty.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name} is a Parquet file, which needs pyarrow.", "Install it: pip install 'xlcli[parquet]'"
        ) from None
    fields = text_fields or [DEFAULT_FIELD]
    n_rows = 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        try:
            parts = parquet.ParquetFile(file)
            schema = parts.schema_arrow
            types = (pyarrow.string(), pyarrow.large_string())
            strings = [column for column, kind in zip(schema.names, schema.types, strict=True) if kind in types]
            _require(fields, strings, name)
            for batch in parts.iter_batches(batch_size=PARQUET_ROWS, columns=[*fields]):
                columns = [batch.column(batch.schema.names.index(field)).to_pylist() for field in fields]
                for cells in zip(*columns, strict=True):
                    n_rows += 1
                    texts = _texts({field: cell or "" for field, cell in zip(fields, cells, strict=True)}, fields)
                    if texts is None:
                        reason = f"row {n_rows:,} of {name} lacks a text in '{fields[0]}' or '{fields[-1]}'"
                        raise DataError(f"{reason}.", "Remove that row.")
                    yield from texts
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is a damaged Parquet file: {error}.", "Get it again.") from None


def read_while(portions: Portions, is_short: Callable[[bytearray, bytes], bool]) -> Generator[None, None, bytes]:
    """First bytes, to which portions are added while `is_short` is true of them and the last portion."""
    head = bytearray()
    for portion in portions:
        if portion is None:
            yield None
            continue
        head += portion
        if not is_short(head, portion):
            return portion if len(portion) == len(head) else bytes(head)
    return bytes(head)


def _numbered_lines(portions: Portions, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers from 1, or None for a portion that is None."""
    parts: list[bytes] = []
    number = size = 0
    for portion in portions:
        if portion is None:
            yield number, None
            continue
        *lines, rest = portion.split(b"\n")
        for line in lines:
            number += 1
            if size + len(line) > LONGEST_LINE:
                raise _too_long(number, name)
            yield number, b"".join((*parts, line))
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise _too_long(number + 1, name)
    yield number + 1, b"".join(parts)


def _texts(row: Any, text_fields: Sequence[str]) -> list[Document] | None:
    """Texts of a row, each ended by a line end; not an only text that is empty.

    None if the row is no object, or if one of its texts is missing, or empty beside another one.
    """
    if not isinstance(row, dict):
        return None
    take = row.pop if len(text_fields) == 1 else row.get  # texts of pairs stay beside the other fields
    texts = [take(field, None) for field in text_fields]
    if not all(isinstance(text, str) for text in texts) or (len(texts) > 1 and not all(texts)):
        return None
    try:
        found = [Document((text if text.endswith("\n") else text + "\n").encode()) for text in texts if text]
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    for document in found:
        document.fields = row
    return found


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as any output can hold them: nested values as JSON, no halves of surrogate pairs."""
    values = {}
    for name, value in fields.items():
        try:
            values[as_utf8(name)] = json.dumps(value) if isinstance(value, dict | list) else value
        except RecursionError:
            values[as_utf8(name)] = None
    return {name: as_utf8(value) if isinstance(value, str) else value for name, value in values.items()}


def _parsed(line: bytes) -> Any:
    """Value of a line of JSON; None if it is not JSON."""
    collects = gc.isenabled()
    gc.disable()  # it would look through millions of new lists again and again, which are no garbage
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
    finally:
        if collects:
            gc.enable()


def _delimiter(first: bytes, text_fields: Sequence[str]) -> str:
    """Tab, comma or semicolon: what divides the first line into cells with these names, else into most cells."""
    line = first[:LONGEST_LINE].partition(b"\r")[0].decode(errors="replace")
    cells = {delimiter: next(csv.reader([line], delimiter=delimiter), []) for delimiter in "\t,;"}
    return max(cells, key=lambda delimiter: ({*text_fields} <= {*cells[delimiter]}, len(cells[delimiter])))


def _require(text_fields: Sequence[str], columns: Sequence[str], place: str) -> None:
    """`DataError` if a text is not among these columns."""
    if missing := [field for field in text_fields if field not in columns]:
        raise DataError(
            f"{place} has no column '{missing[0]}' of texts.",
            f"Name one of its columns: {', '.join(columns)[:500] or 'none'}.",
        )


def _broken(place: str, reason: str) -> DataError:
    return DataError(
        f"{place} is not a row of the table: {reason}.",
        'Write a cell with quotes as "a ""quoted"" cell"; in R: row.names = FALSE, qmethod = "double".',
    )


def _too_long(number: int, name: str) -> DataError:
    return DataError(
        f"line {number} of {name} has more than {LONGEST_LINE >> 20} MiB.",
        "Divide it into documents, or use --binary to take it as it is.",
    )
