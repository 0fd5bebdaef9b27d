"""Texts of rows: JSON lines and arrays, CSV and TSV tables, and Parquet files.

Each text is a `Document` with the other fields of its row. Memory is bounded: a JSON object or a row of a table has at
most `LONGEST_LINE` bytes. Parquet files, which are read from their end, need pyarrow, the extra `parquet`.
"""

from __future__ import annotations

import codecs
import csv
import gc
import io
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Self

from xlcli.errors import DataError, named, shortened
from xlcli.files import as_utf8

DEFAULT_FIELD = "text"
"""Key of the text in JSON lines and Parquet files."""
LONGEST_LINE = 2**24
"""Maximum size of a JSON object or a row of a table in bytes. Parsing can take 64 bytes of RAM per byte."""
BLANKS = 2**9
"""Number of blank bytes after which a text is no longer looked at for rows."""
PARQUET = b"PAR1"
"""First bytes of Parquet files."""
PARQUET_ROWS = 256
"""Rows per batch."""
_QUOTE_END = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
"""Rest of a quoted cell."""
_JSON = re.compile(rb'\s*+(?:\{|\[\s*+[{"\[])')
"""Beginning of an object, or of an array of objects, texts or arrays."""
_DECODER = json.JSONDecoder()
_BETWEEN_VALUES = re.compile(r"[\s,\[\]]*+")

Portions = Iterator[bytes | None]


class Document(bytes):
    """A portion that begins a document. Portions of other types continue the document before them.

    Attributes:
        fields: The fields of its row that are not texts: strings of a table, values of a JSON object.
    """

    fields: Mapping[str, Any]

    def __new__(cls, text: bytes, fields: Mapping[str, Any] | None = None) -> Self:
        """The text with its fields."""
        self = super().__new__(cls, text)
        self.fields = fields or {}
        return self


class Joined(tuple[str, ...]):
    """Keys of a context and its continuation, one text of a row. `joiner` divides them where no white space does."""

    def __new__(cls, keys: Sequence[str], joiner: str) -> Self:
        """The two keys; `joiner` is for `__init__`."""
        return super().__new__(cls, keys)

    def __init__(self, keys: Sequence[str], joiner: str) -> None:
        self.joiner = joiner

    def divide(self, row: Mapping[str, str]) -> tuple[bytes, bytes]:
        """The two parts of the text of a row. Blanks between them belong to the continuation."""
        context, continuation = (row[key].replace("\r\n", "\n").rstrip("\r") for key in self)
        blanks = context[len(context.rstrip(" ")) :]
        if not (context[-1:].isspace() or continuation[:1].isspace()):
            blanks = self.joiner
        return context.rstrip(" ").encode(), (blanks + continuation).encode()


def begins_json(head: bytes | bytearray) -> bool:
    """True if a text with these first bytes may be JSON."""
    return bool(_JSON.match(head[:BLANKS])) or (len(head) < BLANKS and not head.strip(b" \t\r\n["))


def documents(portions: Portions, name: str, text_fields: Sequence[str], notice: Callable[[str], None]) -> Portions:
    """Texts of JSON or of a table, each a `Document` ended by a line end; other text is passed on unchanged.

    JSON is objects, one on each line, in an array, or one after the other. Without `text_fields` only JSON is
    recognized, by the key `DEFAULT_FIELD` of its first object. Calls `notice` with remarks on rows that are read as
    plain text, or as one row.

    Raises:
        DataError: As `json_texts` and `table`.
    """
    head = yield from read_while(portions, lambda head: begins_json(head) and not _JSON.match(head))
    data: Portions = itertools.chain([head], portions)
    value: Any = None
    if begins_json(head) and not text_fields:
        value, data = yield from _first_value(data)
    has_text, remark = isinstance(value, dict) and DEFAULT_FIELD in value, _remark(value, name)
    del value  # it may take much RAM
    if text_fields and head.strip() and not begins_json(head):
        yield from table(data, name, text_fields, notice)
    elif text_fields or has_text:
        yield from json_texts(_values(data), name, text_fields or [DEFAULT_FIELD], notice)
    else:
        if remark:
            notice(remark)
        yield from data


def _first_value(portions: Portions) -> Generator[bytes | None, None, tuple[Any, Portions]]:
    """The first value of JSON, of a broken object only the key `DEFAULT_FIELD`; and the portions again."""
    ahead, again = itertools.tee(portions)
    first = None
    for number, value in _values(ahead):
        if number == 0:
            yield value
        elif isinstance(value, json.JSONDecodeError):
            has_key = re.search(rf'"{DEFAULT_FIELD}"\s*+:', value.doc[: value.pos])
            return {DEFAULT_FIELD: None} if has_key else None, again
        elif first is not None or not isinstance(value, str):
            return first or value, again
        else:
            first = value  # a text is of JSON if another value or nothing follows
    return first, again


def _remark(value: Any, name: str) -> str | None:
    """Remark on plain text that is named as a table, or that begins with this value of JSON; or None."""
    if {".csv", ".tsv"}.intersection(PurePath(name.lower()).suffixes[-2:]):
        return f"{name} is read as plain text, not as a table; --text-field NAME reads one column"
    if not value or not isinstance(value, dict | str):
        return None
    texts = {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
    key = shlex.quote(max(texts, key=lambda key: len(texts[key]), default=""))
    remark = f"{name} looks like JSON without the key {DEFAULT_FIELD} and is read as plain text"
    return f"{remark}; --text-field {shortened(key, 200)} reads that key" if texts else remark


def json_texts(
    values: Iterator[tuple[int, Any]],
    name: str,
    text_fields: Sequence[str],
    notice: Callable[[str], None] = lambda text: None,
) -> Portions:
    """Texts of the objects among `_values`. Calls `notice` at the end with the number of objects with an empty text.

    Raises:
        DataError: A value is not an object with these texts.
    """
    n_empty = 0
    for number, value in values:
        if not number:
            yield value
            continue
        fault = f": {value.msg}" if isinstance(value, json.JSONDecodeError) else ""
        try:
            texts = _texts(value, text_fields)
        except UnicodeEncodeError:
            texts, fault = None, ": it has half of a surrogate pair, or is not UTF-8"
        if texts is None:
            wanted = " and ".join(f"a text in '{field}'" for field in text_fields)
            option = "--text-field" if len(text_fields) == 1 or isinstance(text_fields, Joined) else "--pairs"
            raise DataError(
                f"line {number} of {name} is not a JSON object with {wanted}{fault}.",
                f"Name the key with {option}, write rows as objects (in pandas: orient='records'), or use --binary.",
            )
        n_empty += not texts
        yield from texts
    _note_empty(n_empty, name, notice)


def json_lines(
    portions: Portions, name: str, text_fields: Sequence[str], skipped: Callable[[str], None], key: str | None = None
) -> Portions:
    """Texts of JSON lines. Calls `skipped` with a remark on each line without them, or without `key`."""
    for number, line in _numbered_lines(portions):
        try:
            _require_length(line or b"", number, name)
            texts = [*json_texts(_values(iter([line]), number), name, text_fields)]
            if key is not None and any(isinstance(text, Document) and key not in text.fields for text in texts):
                raise DataError(f"line {number} of {name} has no '{key}'.", "Name a key that all rows have.")
            yield from texts
        except DataError as error:
            skipped(f"{error.message.removesuffix('.')}, and is skipped")


def table(portions: Portions, name: str, text_fields: Sequence[str], notice: Callable[[str], None]) -> Portions:
    """Texts of a table, whose first row names the columns.

    Calls `notice` at the first quotation that joins rows, and at the end with the number of rows without text.

    Raises:
        DataError: A column of `text_fields` is missing, a name is there twice, or a row is broken or too long.
    """
    csv.field_size_limit(LONGEST_LINE)
    quote = re.compile(rb'(?:^|[\t,;])"')
    columns: list[str] = []
    delimiter, row, begin, is_open, has_joined, n_empty = "", bytearray(), 1, False, False, 0
    for number, line in _numbered_lines(portions):
        if line is None:
            yield None
            continue
        _require_length(line, number, name)
        row += line + b"\n"
        at = 0
        while found := _QUOTE_END.match(line, at) if is_open else quote.search(line, at):
            at, is_open = found.end(), not is_open
        if is_open and len(row) <= LONGEST_LINE:
            continue
        place = f"line {begin} of {name}"
        delimiter = delimiter if columns else _delimiter(row, text_fields)
        try:
            cells = next(csv.reader([row.decode()], delimiter=delimiter, strict=True)) if row.strip(b" \r\n") else []
        except UnicodeDecodeError:
            raise DataError(f"{place} is not UTF-8.", "Save it as CSV UTF-8, or convert it with iconv.") from None
        except csv.Error:
            raise _broken(place, "a quote is not doubled or not closed, or a line ends in CR alone") from None
        if not cells:
            yield b""
        elif not columns:
            columns, quote = cells, re.compile(rb'(?:^|%b)"' % delimiter.encode())
            _require(text_fields, columns, place)
            column, times = Counter(filter(None, columns)).most_common(1)[0]
            if times > 1:
                raise DataError(f"{place} names {times:,} columns '{column[:99]}'.", "Give each a different name.")
        elif len(cells) != len(columns):
            raise _broken(place, f"it has {len(cells):,} cells, but the header has {len(columns):,}")
        else:
            texts = _texts(dict(zip(columns, cells, strict=True)), text_fields)
            if texts is None:
                reason = f"{place} has no text in '{text_fields[0]}' or in '{text_fields[-1]}'."
                raise DataError(reason, "Fill the cell, or remove the row.")
            n_empty += not texts
            yield from texts
            if number > begin and not has_joined and _joins_rows(row, delimiter.encode(), len(columns)):
                has_joined = True
                notice(f'the quote in {place} joins it with line {number}; write each quote in a text as ""')
        row, begin = bytearray(), number + 1
    if row:
        raise _broken(f"line {begin} of {name}", "a quote is not closed")
    _note_empty(n_empty, name, notice)


def _note_empty(n_empty: int, name: str, notice: Callable[[str], None]) -> None:
    if n_empty:
        notice(f"rows of {name} without text are left out: {n_empty:,}")


def begins_with(descriptor: int, mark: bytes) -> bool:
    """True if an open file begins with these bytes; False for a pipe."""
    try:
        return os.pread(descriptor, len(mark), 0) == mark
    except OSError:
        return False


def parquet_texts(
    descriptor: int, name: str, text_fields: Sequence[str], notice: Callable[[str], None]
) -> Iterator[Document]:
    """Each text of these columns (none: `text`) of an open file, ended by a line end, without other fields.

    Calls `notice` at the end with the number of rows without text.

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
    n_rows = n_empty = 0
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
                    n_empty += not texts
                    yield from texts
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is a damaged Parquet file: {error}.", "Copy or download it again.") from None
    _note_empty(n_empty, name, notice)


def read_while(portions: Portions, is_short: Callable[[bytes | bytearray], bool]) -> Generator[None, None, bytes]:
    """First bytes, to which portions are added while `is_short` is true of them."""
    head = bytearray()
    for portion in portions:
        if portion is None:
            yield None
            continue
        head += portion
        if not is_short(head):
            return portion if len(portion) == len(head) else bytes(head)
    return bytes(head)


def _numbered_lines(portions: Portions) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers from 1, or None for a portion that is None; of a line above `LONGEST_LINE` a part."""
    held, number, is_given = bytearray(), 1, False
    for portion in portions:
        if portion is None:
            yield number, None
        for line in io.BytesIO(portion or b""):
            held += b"" if is_given else line.removesuffix(b"\n")
            if not is_given and (line.endswith(b"\n") or len(held) > LONGEST_LINE):
                yield number, bytes(held)
                held.clear()
                is_given = True
            if line.endswith(b"\n"):
                number, is_given = number + 1, False
    if not is_given:
        yield number, bytes(held)


def _require_length(line: bytes, number: int, name: str) -> None:
    """`DataError` if a line is too long to be read as one."""
    if len(line) > LONGEST_LINE:
        problem = f"line {number} of {name} has more than {LONGEST_LINE >> 20} MiB."
        raise DataError(problem, "Divide it into documents, or use --binary to read its raw bytes.")


def _values(portions: Portions, number: int = 1) -> Iterator[tuple[int, Any]]:
    """JSON values with the numbers of their lines, one after the other or in arrays, with or without commas.

    The last one may be a `JSONDecodeError`. Line 0 has None for a pause, and no bytes after other portions.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    held, wanted, n_open = "", 0, 0
    for portion in itertools.chain(portions, [b""]):
        held += utf8.decode(portion or b"", final=portion == b"")
        if portion and len(held) < wanted:  # parsing anew at each portion would take long
            continue
        at = wanted = 0
        while True:
            start, at = at, next(_BETWEEN_VALUES.finditer(held, at)).end()
            number += held.count("\n", start, at)
            n_open += held.count("[", start, at) - held.count("]", start, at)
            if at == len(held):
                break
            value, end = _parsed(held, at)
            if end > len(held) and portion != b"" and len(held) - at <= LONGEST_LINE:
                wanted = (len(held) - at) * 9 // 8
                break
            if end - at > LONGEST_LINE:
                value = json.JSONDecodeError(f"more than {LONGEST_LINE >> 20} MiB", held, at + LONGEST_LINE)
            if isinstance(value, json.JSONDecodeError):
                yield number + held.count("\n", at, value.pos), value
                return
            yield number, value
            number, at = number + held.count("\n", at, end), end
        held = held[at:]
        if portion is None or not held:
            yield 0, portion and b""
    if n_open:
        yield number, json.JSONDecodeError("the brackets of arrays do not match", "", 0)


def _texts(row: Any, text_fields: Sequence[str]) -> list[Document] | None:
    """Texts of a row, each ended by a line end unless they are joined; not an only text that is empty.

    None if the row is no object, or if one of its texts is missing, or empty beside another one.
    """
    if not isinstance(row, dict):
        return None
    take = row.pop if len(text_fields) == 1 else row.get  # texts of pairs stay beside the other fields
    texts = [take(field, None) for field in text_fields]
    if not all(isinstance(text, str) for text in texts) or (len(texts) > 1 and not all(texts)):
        return None
    if isinstance(text_fields, Joined):
        return [Document(b"".join(text_fields.divide(row)), row)] if str(texts[1]).strip() else None
    return [Document((text.removesuffix("\n") + "\n").encode(), row) for text in texts if text]


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as any output can hold them: nested values as JSON, no halves of surrogate pairs."""
    values = {}
    for name, value in fields.items():
        try:
            values[as_utf8(name)] = json.dumps(value) if isinstance(value, dict | list) else value
        except RecursionError:
            values[as_utf8(name)] = None
    return {name: as_utf8(value) if isinstance(value, str) else value for name, value in values.items()}


def _parsed(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, or a `JSONDecodeError`, and its end, which is behind a text that may go on."""
    collects = gc.isenabled()
    gc.disable()  # it would look through millions of new lists again and again, which are no garbage
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        may_go_on = error.msg.startswith("Unterminated") or error.pos + len("-Infinity") > len(text)
        return error, len(text) + may_go_on
    except (ValueError, RecursionError) as error:
        return json.JSONDecodeError(str(error), text, len(text)), len(text)
    finally:
        if collects:
            gc.enable()


def _joins_rows(row: bytearray, delimiter: bytes, n_columns: int) -> bool:
    """True if lines of a row would be rows without quotes. A comma before a blank or a line end is punctuation."""
    lines = (line.replace(b'"', b"").rstrip(b"\r\n") + b" " for line in io.BytesIO(row))
    is_prose = b"\n" if delimiter == b"\t" else delimiter + b" "
    return n_columns > 1 and all(line.count(delimiter) == n_columns - 1 and is_prose not in line for line in lines)


def _delimiter(row: bytearray, text_fields: Sequence[str]) -> str:
    """Tab, comma or semicolon: what divides the first row into cells with these names, else into most cells."""
    line = re.sub("[\r\n]", " ", row[:LONGEST_LINE].decode(errors="replace").rstrip("\r\n"))
    cells = {delimiter: next(csv.reader([line], delimiter=delimiter), []) for delimiter in "\t,;"}
    return max(cells, key=lambda delimiter: ({*text_fields} <= {*cells[delimiter]}, len(cells[delimiter])))


def _require(text_fields: Sequence[str], columns: Sequence[str], place: str) -> None:
    """`DataError` if a text is not among these columns."""
    if missing := [field for field in text_fields if field not in columns]:
        remedy = f"Name one of its columns: {named(columns) or 'none'}."
        raise DataError(f"{place} has no text column '{missing[0]}'.", remedy)


def _broken(place: str, reason: str) -> DataError:
    return DataError(
        f"{place} is not a row of the table: {reason}.",
        'Write a cell with quotes as "a ""quoted"" cell"; in R: row.names = FALSE, qmethod = "double".',
    )
