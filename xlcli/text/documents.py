"""Texts of rows: of a file (`texts_of`), or of a stream, which skips rows without text (`live_texts`).

    portions ─▶ recognized once ─▶ rows of JSON, of a table or of Parquet ─▶ texts, each a `Document`

Memory is bounded: a JSON object or a row of a table has at most `LONGEST_LINE` bytes.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from xlcli.errors import ConfigError, DataError, named, shortened
from xlcli.files import as_utf8
from xlcli.text.pretokenize import UNBLANKED

DEFAULT_FIELD = "text"  # key of the text in JSON lines and Parquet files
_USUAL = "text message msg log short_message body content sentence question prompt input response answer output"
USUAL_FIELDS = {key: rank for rank, key in enumerate(_USUAL.split())}
"""Ranks of keys that usually have the text of a log or a data set, the likeliest first."""
LONGEST_LINE = 2**24
"""Maximum size of a JSON object or a row of a table in bytes. Parsing can take 64 bytes of RAM per byte."""
SKIP_SECONDS = 60.0  # least time between two remarks on rows of a stream that are skipped
_WORD = re.compile(r"(?<!\S)[^\W\d_]++[.,;:!?]*+(?!\S)")
_BEGINS_UNBLANKED = re.compile(rf"\W*?{UNBLANKED}")  # behind blanks and marks

LONGEST_EVENT = 2**16  # number of bytes after which a line begins a new event, whatever it is
LINE_TEXT = "text"  # key of the text in rows of plain lines

Portions = Iterator[bytes | None]
Notice = Callable[[str], None]
Rows = Iterator[tuple[str, Any] | bytes | None]
"""Rows and their places (`line 3`, a `Place`): each a dictionary, or what is there instead, a value or a `ValueError`.

Between rows come None for a pause and no bytes where a reader may stop.
"""
Read = Callable[[Rows, str, Sequence[str], Notice], Iterator[Any]]
"""What is made of rows: the rows, the name of their source, the keys of the texts, and what takes remarks."""


class Document(bytes):
    """A portion that begins a document. Portions of other types continue the document before them.

    A row without text is an empty one, which is left out but counts in the numbers of documents.
    """

    # The fields of its row that are not texts: strings of a table, values of a JSON object or of Parquet.
    fields: Mapping[str, Any]
    regions: Sequence[tuple[int, int]]  # offsets at which its marked regions begin and end (`text/marks.py`)
    row: Mapping[str, Any]  # all fields, with the text, of a row of a stream
    key: str  # the key of its text in `row`
    line: int  # line of the input at which it begins
    stream: str | None = None  # stream of the container that wrote its row, or None
    unfinished: str | None = None  # this stream if its line goes on in its next row, else None
    # It is a part of the last line of the document before it, or the next line of an event. It begins a
    # document if the one before has ended by now, after a pause.
    continues = False

    def __new__(
        cls,
        text: bytes,
        fields: Mapping[str, Any] | None = None,
        regions: Sequence[tuple[int, int]] = (),
        *,
        row: Mapping[str, Any] | None = None,
        key: str = LINE_TEXT,
        line: int = 0,
    ) -> Self:
        if not isinstance(text, bytes):
            raise ConfigError(f"a document is made from bytes, not {type(text).__name__}.", "Pass text.encode().")
        self = super().__new__(cls, text)
        self.fields = {} if fields is None else fields
        self.regions = regions
        self.row = {} if row is None else row
        self.key = key
        self.line = line
        return self


class Place(str):
    """Place of a row in its source, such as `line 3`, with its number."""

    number: int

    def __new__(cls, unit: str, number: int) -> Self:
        self = super().__new__(cls, f"{unit} {number}")
        self.number = number
        return self


class LineRow(dict[str, Any]):
    """A plain line as a row: the named groups of a pattern, or the line alone as its text."""

    # Stream of a container that writes long lines in parts (CRI, the format of Kubernetes), or None.
    stream: str | None = None
    is_part = False  # the line goes on in the next row of this stream

    def __init__(self, groups: Mapping[str, Any], *, continues: bool) -> None:
        super().__init__(groups)
        self.continues = continues  # the line does not begin an event


class Joined(tuple[str, ...]):
    """Keys of a context and its continuation, one text of a row. `joiner` divides them where no white space does.

    A `joiner` of None is a blank, or nothing within a script without blanks.
    """

    def __new__(cls, keys: Sequence[str], joiner: str | None) -> Self:  # a tuple is made here, `joiner` is set below
        return super().__new__(cls, keys)

    def __init__(self, keys: Sequence[str], joiner: str | None) -> None:
        self.joiner = joiner

    def divide(self, row: Mapping[str, str]) -> tuple[bytes, bytes]:
        """The two parts of the text of a row. Blanks between them belong to the continuation.

        Without a context the continuation begins the text, with no joiner before it.
        """
        context, continuation = ((row[key] or "").replace("\r\n", "\n").rstrip("\r") for key in self)
        blanks = context[len(context.rstrip(" ")) :]
        has_white_space = context[-1:].isspace() or continuation[:1].isspace()
        if context and not has_white_space:
            default = "" if is_within_unblanked(context, continuation) else " "
            blanks = default if self.joiner is None else self.joiner
        return context.rstrip(" ").encode(), (blanks + continuation).encode()


def is_within_unblanked(before: str, after: str) -> bool:
    """True if two parts of a text meet within a script without blanks: both their letters next to the border are."""
    last_letter = _BEGINS_UNBLANKED.match(before[::-1])
    first_letter = _BEGINS_UNBLANKED.match(after)
    return last_letter is not None and first_letter is not None


def texts_of(rows: Rows, name: str, text_fields: Sequence[str], notice: Notice) -> Portions:
    """Yields the texts of rows, each a `Document`, empty for a row without text; `DataError` if a text is no string."""
    n_without_text = 0
    has_key = False
    first_row = None
    for item in rows:
        if not isinstance(item, tuple):  # a pause, or a place where a reader may stop
            yield item
            continue
        place, row = item
        first_row = first_row or row
        has_key = has_key or (isinstance(row, dict) and text_fields[0] in row)
        try:
            texts = texts_of_row(row, text_fields)  # takes the text out of the row
        except ValueError as error:
            raise refusal(f"{place} of {name}", text_fields, error) from None
        if not texts:
            n_without_text += 1
            texts = [Document(b"")]  # so that the next documents keep their numbers
        yield from texts
    if n_without_text and not has_key:
        reason = f"no row of {name} has the key '{text_fields[0]}'{key_hint(first_row)}."
        raise DataError(reason, "Name a key that its rows have.")
    if n_without_text:
        notice(f"rows of {name} without text are left out: {n_without_text:,}")


def live_texts(
    rows: Rows,
    name: str,
    text_fields: Sequence[str],
    skipped: Notice,
    key: str | None = None,
    event_start: Any = None,
    n_before: int = 0,
    stream: str | None = None,
    unfinished: str | None = None,
) -> Portions:
    """Texts of rows that arrive without end, as of `texts_of`; rows without a text, or without `key`, are skipped.

    Calls `skipped` with their number and the last of them, at most once in `SKIP_SECONDS`, and at the end. Parts into
    which Docker or Kubernetes divide a long line are joined. A row whose text does not match `event_start` continues
    the event before it, up to `LONGEST_EVENT`. Neither continues a row of another stream. Lines are counted on from
    `n_before`. `stream` is that of the last row before, and `unfinished`, too, if the line of that row goes on.
    """
    skips = _Skips(skipped)
    has_begun = False
    event_bytes = 0
    lost: DataError | None = None  # why the beginning of the present event was skipped
    try:
        for item in rows:
            skips.report_if_due()
            if not isinstance(item, tuple):
                yield item
                continue
            place, row = item
            number = n_before + place.number if isinstance(place, Place) else 0
            try:
                document = _live_text(row, text_fields, key, number, has_begun=has_begun)
            except ValueError as error:
                lost = refusal(f"line {number} of {name}", text_fields, error)
            else:
                may_continue_event = document.stream == stream and event_bytes < LONGEST_EVENT
                continues_event = may_continue_event and _continues_event(row, document, event_start)
                if not continues_event:
                    lost = None
            if lost is not None:
                skips.add(number, lost)
                yield Document(b"", line=number)
                continue

            continues_line = unfinished is not None and document.stream == unfinished
            if unfinished is not None and not continues_line:
                yield b"\n"  # ends the line whose other parts have not come
            document.continues = continues_line or continues_event
            stream = document.stream
            unfinished = document.unfinished
            yield document
            has_begun = True
            if not document.continues:
                event_bytes = 0
            event_bytes += len(document)
    finally:
        skips.report()


def _continues_event(row: Any, document: Document, event_start: Any) -> bool:
    if isinstance(row, LineRow):
        return row.continues
    return event_start is not None and event_start.search(document.removesuffix(b"\n")) is None


class _Skips:
    """Counts the rows of a stream that are skipped, and calls `notice` with their number and the last of them."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._n_skipped = self._n_reported = 0
        self._last_line: int | None = None
        self._remark = ""
        self._due = time.monotonic()

    def add(self, line: int, error: DataError) -> None:
        if line != self._last_line:  # a broken line may have several values
            self._n_skipped += 1
        self._last_line = line
        self._remark = error.message.removesuffix(".")

    def report_if_due(self) -> None:
        if self._n_skipped > self._n_reported and time.monotonic() >= self._due:
            self.report()
            self._due = time.monotonic() + SKIP_SECONDS

    def report(self) -> None:
        if self._n_skipped > self._n_reported:
            self._notice(f"{self._remark}; rows skipped so far: {self._n_skipped:,}")
            self._n_reported = self._n_skipped


def _live_text(row: Any, text_fields: Sequence[str], key: str | None, line: int, *, has_begun: bool) -> Document:
    """Returns the text of a row of a stream, which it takes out of `row`, as a `Document` with the whole row.

    Raises `ValueError` with the reason to skip the row: it has no text, or lacks `key`. `has_begun`: an earlier did.
    """
    text_field = text_fields[0]
    stream, line_goes_on = _stream_of(row, text_field)
    whole_row = dict(row) if isinstance(row, dict) else {}
    has_array = isinstance(whole_row.get(text_field), list)
    if has_array:  # journald writes one if a field occurs several times, or has bytes that cannot be printed
        row[text_field] = _joined_values(whole_row[text_field])
    texts = texts_of_row(row, text_fields)
    is_within_event = isinstance(row, LineRow) and row.continues
    if not texts and is_within_event:
        texts = [Document(b"\n")]  # an empty line is a part of its event
    if not texts:
        raise ValueError(_why_no_text(whole_row, text_field, has_begun=has_begun))
    if key is not None and key not in row:
        raise ValueError(f"the row has no '{key}'")
    text: bytes = texts[0]
    text_without_end = text.removesuffix(b"\n")
    if has_array:
        whole_row[text_field] = text_without_end.decode()  # outputs show what is scored, not the array
    if line_goes_on:
        text = text_without_end
    document = Document(text, texts[0].fields, row=whole_row, key=text_field, line=line)
    document.stream = stream
    if line_goes_on:
        document.unfinished = stream
    return document


def _why_no_text(row: Mapping[str, Any], field: str, *, has_begun: bool) -> str:
    """Why a row has no text. Before a row had one (`has_begun`), perhaps none has this key, so others are named."""
    if field not in row:
        return "it is missing" if has_begun else f"it is missing{key_hint(row)}"
    if row[field] is not None:
        return "it is empty"
    if field == "MESSAGE":
        return "it is null (journalctl leaves out a long text unless you add --all)"
    return "it is null"


def _stream_of(row: Any, text_field: str) -> tuple[str | None, bool]:
    """The stream of a row of a container, and whether its line goes on in the next row of that stream; or None."""
    if isinstance(row, LineRow):
        return row.stream, row.is_part
    is_docker = isinstance(row, dict) and row.keys() - {"attrs"} == {"log", "stream", "time"}
    if text_field != "log" or not is_docker or not isinstance(row["log"], str):
        return None, False
    return str(row["stream"]), not row["log"].endswith("\n")


def texts_of_row(row: Any, text_fields: Sequence[str]) -> list[Document]:
    """Returns the texts of a row, each ended by a line end; those of `Joined` fields are one text as it is.

    A single text is taken out of the row. If it is null, empty or missing, the row has no texts. It may be an array of
    bytes, as journald writes text that cannot be printed. Raises `ValueError` if the row is broken or no object, a text
    is no string, or one of several is missing. Of several, only the context of a continuation may be empty.
    """
    if isinstance(row, ValueError):  # the reader of the rows found this one broken
        raise row
    if row is None:
        row = {}
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 (as all faults of a row)
    texts: list[Any]
    if len(text_fields) == 1:
        text = _decoded(row.pop(text_fields[0], None))
        if text in (None, ""):
            return []
        texts = [text]
    else:  # several texts stay in the row
        texts = [row.get(field) or None for field in text_fields]
        context = text_fields[0]
        has_empty_context = context in row and row[context] in (None, "")
        if isinstance(text_fields, Joined) and has_empty_context:
            texts[0] = ""
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it is missing, or is no text")
    if not isinstance(text_fields, Joined):
        return [Document((text.removesuffix("\n") + "\n").encode(), row) for text in texts]
    _, continuation = texts
    if not continuation.strip():
        raise ValueError("the continuation is blank")
    return [Document(b"".join(text_fields.divide(row)), row)]


def _decoded(value: Any) -> Any:
    """The text of an array of bytes, as journald writes what is not printable; other values as they are."""
    if isinstance(value, list):
        with suppress(TypeError, ValueError):
            return bytes(value).decode(errors="replace")
    return value


def _joined_values(values: list[Any]) -> Any:
    """The texts of a field that occurs several times, which journald writes as an array, one below the other."""
    texts = [_decoded(value) for value in values]
    if not all(isinstance(text, str) for text in texts):
        return values
    return "\n".join(texts)


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


def rank_of_key(key: str) -> int:
    """The place of a key among the usual names of texts, the most usual first; other keys come after all of them."""
    return USUAL_FIELDS.get(key.lower().strip("_@0123456789"), len(USUAL_FIELDS))


def key_hint(row: Any) -> str:
    """The end of a remark on a row that lacks a key: which of its keys have a text, the likeliest first; or nothing."""
    if not isinstance(row, dict):
        return ""
    texts = {key: text for key, text in row.items() if isinstance(text, str)}
    if not texts:
        return ""

    def unlikeness(key: str) -> tuple[int, int, int]:
        return rank_of_key(key), -len(_WORD.findall(texts[key])), -len(texts[key])

    first, *others = sorted(texts, key=unlikeness)
    hint = f"; --text-field {shortened(shlex.quote(first), 200)} reads that key"
    return f"{hint} (others with a text: {named(others, 3)})" if others else hint


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as any output can hold them: nested values as JSON, dates as text, no halves of surrogate pairs."""
    values = {}
    for name, value in fields.items():
        shown = value
        if isinstance(value, dict | list):
            try:
                shown = json.dumps(value, default=str)
            except RecursionError:
                shown = None
        if not isinstance(shown, int | float | None):
            shown = as_utf8(str(shown))
        values[as_utf8(name)] = shown
    return values
