"""Texts of rows: JSON lines and arrays, CSV and TSV tables, and Parquet files.

    portions ─▶ recognized once ─▶ rows of JSON, of a table or of Parquet ─▶ texts, each a `Document`

Memory is bounded: a JSON object or a row of a table has at most `LONGEST_LINE` bytes. Parquet files, which are read
from their end, need pyarrow, the extra `parquet`.
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
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from xlcli.errors import DataError, named, shortened
from xlcli.files import as_utf8

DEFAULT_FIELD = "text"
"""Key of the text in JSON lines and Parquet files."""
_USUAL = "message msg log short_message body content sentence question prompt instruction input response answer output"
USUAL_FIELDS = {key: rank for rank, key in enumerate(_USUAL.split())}
"""Ranks of keys that usually have the text of a log or a data set, the likeliest first."""
LONGEST_LINE = 2**24
"""Maximum size of a JSON object or a row of a table in bytes. Parsing can take 64 bytes of RAM per byte."""
BLANKS = 2**9
"""Number of bytes of blanks and comments after which a text is no longer looked at for rows."""
LOOK = 2**20
"""Number of first bytes in which the key `DEFAULT_FIELD` is looked for."""
SKIP_SECONDS = 60.0
"""Least time between two remarks on rows of a stream that are skipped."""
PARQUET = b"PAR1"
"""First bytes of Parquet files."""
PARQUET_ROWS = 256
"""Rows per batch."""
KINDS = {"jsonl": "json", "ndjson": "json", "json": "json", "csv": "table", "tsv": "table", "parquet": "parquet"}
"""What a file has whose name ends so, also below the suffix of a compression."""
_NAME = re.compile(rf"\.({'|'.join(KINDS)})(\.(gz|bz2|xz|zst|zstd))?$", re.IGNORECASE)
_QUOTE_END = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
"""Rest of a quoted cell."""
_SEPARATOR = re.compile(rb'"?sep=(.)"?\s*')
"""First line with which spreadsheets say what divides the cells."""
_BEFORE_JSON = re.compile(rb"(?:[\s\x1e]|(?:#|//)[^\n]*+)*+")
_JSON = re.compile(rb'\{|\[\s*+[{"\[]')
"""Beginning of an object, or of an array of objects, texts or arrays."""
_BETWEEN_VALUES = re.compile(r"[\s,\[\]\x1e]*+")
_KEY = re.compile(rf'"{DEFAULT_FIELD}"\s*+:')
_SECOND_LINE = re.compile(rb'[^\n]*+\n\x1e?\{"')
"""Any line, and the beginning of an object in the next one."""
_TEXT_KIND = re.compile(r"(dictionary<values=)?(large_)?string(_view)?\b")
"""Types of Arrow that are texts."""
_WORD = re.compile(r"(?<!\S)[^\W\d_]++[.,;:!?]*+(?!\S)")

Portions = Iterator[bytes | None]
Notice = Callable[[str], None]
Rows = Iterator[tuple[str, Any] | bytes | None]
"""Rows and their places (`line 3`): each a dictionary, or what is there instead, a value or a `ValueError`.

Between rows come None for a pause and no bytes where a reader may stop.
"""
Read = Callable[[Rows, str, Sequence[str], Notice], Iterator[Any]]
"""What is made of rows: the rows, the name of their source, the keys of the texts, and what takes remarks."""


class Document(bytes):
    """A portion that begins a document. Portions of other types continue the document before them.

    A row without text is an empty one, which is left out but counts in the numbers of documents.

    Attributes:
        fields: The fields of its row that are not texts: strings of a table, values of a JSON object or of Parquet.
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


def recognized(
    head: bytes | bytearray, name: str, text_fields: Sequence[str], *, is_all: bool = False
) -> tuple[str | None, str | None]:
    """What data with these first bytes is, `json`, `table`, `parquet` or `plain` text, and a remark on plain text.

    Its name decides, else its beginning. Without `text_fields` a table is plain text, and so is JSON without the key
    `DEFAULT_FIELD` in its first object, or in all the bytes of a file that is named as JSON. The kind is None if more
    bytes will tell; `is_all`: no more are looked at. The remark is on a name or a beginning as of rows.
    """
    named_as = _NAME.search(name)
    kind = KINDS[named_as[1].lower()] if named_as else _kind_of_beginning(head, LOOK if text_fields else BLANKS)
    if is_all:
        kind = kind or "table"
    is_cut = not named_as and _SECOND_LINE.match(head) is not None
    if is_cut and text_fields and text_fields[0].encode(errors="replace") not in head.partition(b"\n")[0]:
        kind = "json"  # behind a line of another kind, as programs print it when they start
    if kind is None or text_fields or kind == "parquet":
        return kind, None
    remark = f"{name} is read as plain text, because line 1 is not JSON, as line 2 seems to be" if is_cut else None
    if kind == "table" and named_as:
        remark = f"{name} is read as plain text, not as a table; --text-field NAME reads one column"
    if kind == "table":
        return "plain", remark
    without_key, first = f"{name} looks like JSON without the key {DEFAULT_FIELD} and is read as plain text", None
    for each in json_rows(iter([bytes(head), None])):
        if each is None and not is_all:
            return None, None
        value = each[1] if isinstance(each, tuple) else None
        if isinstance(value, dict) and DEFAULT_FIELD in value:
            return "json", None
        if isinstance(value, json.JSONDecodeError):
            if _KEY.search(value.doc if named_as else value.doc[: value.pos]):
                return "json", None
            return "plain", without_key if named_as or len(head) >= LOOK else remark
        first = first or value
        if value and not named_as and not isinstance(value, str):
            break
    is_json = named_as or isinstance(first, dict | str)
    return "plain", without_key + _hint(first) if is_json else None


def _kind_of_beginning(head: bytes | bytearray, limit: int) -> str | None:
    """`json` if a text begins so behind less than `limit` bytes of blanks and comments, else `table`; None: perhaps."""
    rest = _BEFORE_JSON.sub(b"", head[:limit], count=1)
    if _JSON.match(rest):
        return "json"
    may_begin = rest == b"/" or not rest.strip(b" \t\r\n[")
    return None if may_begin and len(head) < limit else "table"


def _hint(row: Any) -> str:
    """The end of a remark on a row that lacks a key: which of its keys have a text, the likeliest first."""
    texts = {key: text for key, text in row.items() if isinstance(text, str)} if isinstance(row, dict) else {}
    if not texts:
        return ""

    def likeness(key: str) -> tuple[int, int, int]:
        rank = USUAL_FIELDS.get(key.lower().strip("_@0123456789"), len(USUAL_FIELDS))
        return rank, -len(_WORD.findall(texts[key])), -len(texts[key])

    first, *others = sorted(texts, key=likeness)
    hint = f"; --text-field {shortened(shlex.quote(first), 200)} reads that key"
    return f"{hint} (others with a text: {named(others, 3)})" if others else hint


def texts_in(portions: Portions, name: str, text_fields: Sequence[str], notice: Notice, read: Read) -> Portions:
    """What `read` makes of the rows of JSON or of a table; other text is passed on unchanged.

    Calls `notice` with remarks on rows that are read as plain text, or as one row, and those of `read`.

    Raises:
        DataError: The data is named as Parquet but is not, or as `table_rows` and `read`.
    """
    head = yield from read_while(portions, lambda head: len(head) < LOOK and not recognized(head, name, text_fields)[0])
    data, fields = itertools.chain([head], portions), text_fields or [DEFAULT_FIELD]
    kind, remark = recognized(head, name, text_fields, is_all=True)
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


def texts_of(rows: Rows, name: str, text_fields: Sequence[str], notice: Notice) -> Portions:
    """Texts of rows, each a `Document`, empty for a row without text. Calls `notice` with the number of these.

    Raises:
        DataError: A row has another value in the place of a text, lacks one of several, or no row has the key.
    """
    n_empty, has_key, first = 0, False, None
    for each in rows:
        if not isinstance(each, tuple):
            yield each
            continue
        place, row = each
        first = first or row
        has_key = has_key or (isinstance(row, dict) and text_fields[0] in row)
        try:
            found = texts_of_row(row, text_fields)
        except ValueError as error:
            raise refusal(f"{place} of {name}", text_fields, error) from None
        n_empty += not found
        yield from found or [Document(b"")]
    if n_empty and not has_key:
        reason = f"no row of {name} has the key '{text_fields[0]}'{_hint(first)}."
        raise DataError(reason, "Name a key that its rows have.")
    if n_empty:
        notice(f"rows of {name} without text are left out: {n_empty:,}")


def live_texts(rows: Rows, name: str, text_fields: Sequence[str], skipped: Notice, key: str | None = None) -> Portions:
    """Texts of rows that arrive without end, as of `texts_of`; rows without a text, or without `key`, are skipped.

    Calls `skipped` with their number and the last of them, at most once in `SKIP_SECONDS`, and at the end. Parts into
    which Docker divides a long line are joined, unless the other stream comes between them.
    """
    n_skipped = n_said = 0
    last, remark, has_begun, due, unfinished = "", "", False, time.monotonic(), None
    try:
        for each in rows:
            if n_skipped > n_said and time.monotonic() >= due:
                skipped(f"{remark}; rows skipped so far: {n_skipped:,}")
                n_said, due = n_skipped, time.monotonic() + SKIP_SECONDS
            if not isinstance(each, tuple):
                yield each
                continue
            place, row = each
            stream = _docker_stream(row) if text_fields[0] == "log" else None
            is_part = stream is not None and not row["log"].endswith("\n")
            try:
                found = texts_of_row(row, text_fields)
                if not found:
                    raise ValueError("it is empty" if has_begun else f"it is missing{_hint(row)}")
                if key is not None and key not in row:
                    raise ValueError(f"the row has no '{key}'")
            except ValueError as error:
                n_skipped += place != last  # a broken line may have several values
                last, remark = place, refusal(f"{place} of {name}", text_fields, error).message.removesuffix(".")
                yield Document(b"")
                continue
            document = found[0]
            if is_part:
                document = Document(document.removesuffix(b"\n"), document.fields)
            if unfinished is not None and stream != unfinished:
                yield b"\n"
            # What continues a line is no new document.
            yield bytes(document) if unfinished is not None and stream == unfinished else document
            has_begun, unfinished = True, stream if is_part else None
    finally:
        if n_skipped > n_said:
            skipped(f"{remark}; rows skipped so far: {n_skipped:,}")


def _docker_stream(row: Any) -> str | None:
    """The stream of a row of Docker's log, in which a line without line end goes on in the next row; or None."""
    is_docker = isinstance(row, dict) and row.keys() - {"attrs"} == {"log", "stream", "time"}
    return str(row["stream"]) if is_docker and isinstance(row["log"], str) else None


def texts_of_row(row: Any, text_fields: Sequence[str]) -> list[Document]:
    """Texts of a row, each ended by a line end unless they are joined; none if an only text is null, empty or missing.

    Takes an only text out of the row. Decodes an array of bytes, as journald writes text that is not printable.

    Raises:
        ValueError: The row is broken or no object, a text is another value, or one of several is missing.
    """
    if isinstance(row, ValueError):
        raise row
    row = {} if row is None else row
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 (as all faults of a row)
    texts: list[Any]
    if len(text_fields) > 1:  # which stay beside the other fields
        texts = [row.get(field) or None for field in text_fields]
    else:
        text = row.pop(text_fields[0], None)
        if isinstance(text, list):
            with suppress(TypeError, ValueError):
                text = bytes(text).decode(errors="replace")
        texts = [] if text in (None, "") else [text]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it is missing, or is no text")
    if not isinstance(text_fields, Joined):
        return [Document((text.removesuffix("\n") + "\n").encode(), row) for text in texts]
    if not texts[1].strip():
        raise ValueError("the continuation is blank")
    return [Document(b"".join(text_fields.divide(row)), row)]


def refusal(where: str, text_fields: Sequence[str], error: ValueError) -> DataError:
    """The error for a row, given that of `texts_of_row`."""
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"it is not JSON that can be read ({error.msg})"
    elif isinstance(error, UnicodeEncodeError):
        reason = "it is not JSON in UTF-8, or has half of a surrogate pair"
    wanted = " or ".join(f"'{field}'" for field in text_fields)
    return DataError(
        f"{where} has no text in {wanted}: {reason}.",
        "Correct or remove that row, write rows as objects (in pandas: orient='records'), or use --binary.",
    )


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as any output can hold them: nested values as JSON, dates as text, no halves of surrogate pairs."""
    values = {}
    for name, value in fields.items():
        try:
            shown = json.dumps(value, default=str) if isinstance(value, dict | list) else value
        except RecursionError:
            shown = None
        values[as_utf8(name)] = shown if isinstance(shown, int | float | None) else as_utf8(str(shown))
    return values


def json_lines(
    portions: Portions, name: str, text_fields: Sequence[str], skipped: Notice, key: str | None = None
) -> Portions:
    """Texts of JSON lines that arrive without end: `live_texts` of `json_rows`."""
    return live_texts(json_rows(portions), name, text_fields, skipped, key)


def json_rows(portions: Portions) -> Rows:
    """JSON values, one after the other or in arrays, with or without commas.

    What is broken is a `JSONDecodeError`, and the next value begins in the line after it. Between values, lines from #
    or // on are comments.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    held, number, wanted, n_open, skips_line, is_broken = "", 1, 0, 0, False, False
    for portion in itertools.chain(portions, [b""]):
        held += utf8.decode(portion or b"", final=portion == b"")
        if portion and len(held) < wanted:  # parsing anew at each portion would take long
            continue
        at = wanted = 0
        while True:
            if skips_line:
                line_end = held.find("\n", at)
                skips_line = line_end < 0
                at = len(held) if skips_line else line_end
            start, at = at, next(_BETWEEN_VALUES.finditer(held, at)).end()
            number += held.count("\n", start, at)
            n_open += held.count("[", start, at) - held.count("]", start, at)
            if at == len(held):
                break
            if held.startswith(("#", "//"), at):
                skips_line = True
                continue
            value, end = _parsed(held, at)
            if end > len(held) and portion != b"" and len(held) - at <= LONGEST_LINE:
                wanted = (len(held) - at) * 9 // 8
                break
            if end - at > LONGEST_LINE:
                value = json.JSONDecodeError(f"more than {LONGEST_LINE >> 20} MiB", held, at + LONGEST_LINE)
            if isinstance(value, json.JSONDecodeError):
                place = number + held.count("\n", at, value.pos)
                yield f"line {place}", value
                skips_line = is_broken = True
                continue
            yield f"line {number}", value
            number, at = number + held.count("\n", at, end), end
        held = held[at:]
        if portion is None or not held:
            yield portion and b""
    if n_open and not is_broken:
        yield f"line {number}", json.JSONDecodeError("the brackets of arrays do not match", "", 0)


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
        line_end = text.find("\n", at)
        return json.JSONDecodeError(str(error), text, line_end if line_end >= 0 else len(text)), len(text)
    finally:
        if collects:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def table_rows(portions: Portions, name: str, text_fields: Sequence[str], notice: Notice) -> Rows:
    """Rows of a table, whose first row names the columns. Calls `notice` at the first quotation that joins rows.

    Raises:
        DataError: A column of `text_fields` is missing, a name is there twice, or a row is broken or too long.
    """
    csv.field_size_limit(LONGEST_LINE)
    quote = re.compile(rb'(?:^|[\t,;])"')
    columns: list[str] = []
    delimiter, row, begin, is_open, has_joined = "", bytearray(), 1, False, False
    for number, line in _numbered_lines(portions, name):
        if line is None:
            yield None
            continue
        if not is_open:
            row, begin = bytearray(), number
        row += line + b"\n"
        at = 0
        while found := _QUOTE_END.match(line, at) if is_open else quote.search(line, at):
            at, is_open = found.end(), not is_open
        if is_open and len(row) <= LONGEST_LINE:
            continue
        if not row.strip(b" \r\n"):
            yield b""
            continue
        separator = _SEPARATOR.fullmatch(row)
        if separator and not columns:
            delimiter = separator[1].decode(errors="replace")
            continue
        delimiter, place = delimiter or _delimiter(row, text_fields), f"line {begin}"
        try:
            cells = next(csv.reader([row.decode()], delimiter=delimiter, strict=True))
        except UnicodeDecodeError:
            reason = f"{place} of {name} is not UTF-8."
            raise DataError(reason, "Save it as CSV UTF-8, or convert it with iconv.") from None
        except csv.Error:
            reason = "a quote is not doubled or not closed, or a line ends in CR alone"
            raise _broken(f"{place} of {name}", reason) from None
        if not columns:
            _require(text_fields, cells, cells, f"{place} of {name}")
            columns = [cell or f"column {i}" for i, cell in enumerate(cells, start=1)]
            quote = re.compile(rb'(?:^|%b)"' % re.escape(delimiter.encode()))
        elif len(cells) != len(columns):
            reason = f"it has {len(cells):,} cells, but the header has {len(columns):,}"
            raise _broken(f"{place} of {name}", reason)
        else:
            yield place, dict(zip(columns, cells, strict=True))
            if number > begin and not has_joined and _joins_rows(row, delimiter.encode(), len(columns)):
                has_joined = True
                notice(f'the quote in {place} of {name} joins it with line {number}; write each quote in a text as ""')
    if is_open:
        raise _broken(f"line {begin} of {name}", "a quote is not closed")


def _numbered_lines(portions: Portions, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers from 1, or None for a portion that is None; `DataError` if a line is too long."""
    held, number = bytearray(), 1
    for portion in portions:
        if portion is None:
            yield number, None
        for line in io.BytesIO(portion or b""):
            held += line
            if len(held) > LONGEST_LINE + 1:
                problem = f"line {number} of {name} has more than {LONGEST_LINE >> 20} MiB."
                raise DataError(problem, "Divide it into documents, or use --binary to read its raw bytes.")
            if line.endswith(b"\n"):
                yield number, bytes(held[:-1])
                number += 1
                held.clear()
    yield number, bytes(held)


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


def _require(text_fields: Sequence[str], texts: Sequence[str], columns: Sequence[str], place: str) -> None:
    """`DataError` if a column that is asked for is not among those with `texts`, or a name is there twice."""
    if missing := [field for field in text_fields if field not in texts]:
        if columns and columns[0].startswith("#"):
            remedy = "Remove the comments; if no line has the names of the columns, write one."
            raise DataError(f"{place} is a comment, not the names of the columns.", remedy)
        remedy = f"Name one of its columns: {named(texts) or 'none'}."
        raise DataError(f"{place} has no text column '{missing[0]}'.", remedy)
    column, times = Counter(filter(None, columns)).most_common(1)[0]
    if times > 1:
        raise DataError(f"{place} names {times:,} columns '{column[:99]}'.", "Give each a different name.")


def _broken(place: str, reason: str) -> DataError:
    return DataError(
        f"{place} is not a row of the table: {reason}.",
        'Write a cell with quotes as "a ""quoted"" cell"; in R: row.names = FALSE, qmethod = "double".',
    )


def begins_with(descriptor: int, mark: bytes) -> bool:
    """True if an open file begins with these bytes; False for a pipe."""
    try:
        return os.pread(descriptor, len(mark), 0) == mark
    except OSError:
        return False


def parquet_rows(descriptor: int, name: str, text_fields: Sequence[str]) -> Rows:
    """Rows of an open file, without columns of bytes.

    Raises:
        DataError: pyarrow is missing, the file is damaged, or a column is missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name} is a Parquet file, which needs pyarrow.", "Install it: pip install 'xlcli[parquet]'"
        ) from None
    number = 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        try:
            parts = parquet.ParquetFile(file)
            kinds = {field.name: str(field.type) for field in parts.schema_arrow}
            texts = [column for column, kind in kinds.items() if _TEXT_KIND.match(kind)]
            _require(text_fields, texts, parts.schema_arrow.names, name)
            columns = [column for column, kind in kinds.items() if "binary" not in kind]
            for batch in parts.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number:,}", row
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name} is a damaged Parquet file: {error}.", "Copy or download it again.") from None


def read_while(portions: Portions, is_short: Callable[[bytes | bytearray], bool]) -> Generator[None, None, bytes]:
    """First bytes, to which portions are added while `is_short` is true of them."""
    head, wanted = bytearray(), 0
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
