"""What data is: by its name, then by its content; what is left out; and what a stream skips."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from corpora import open_corpus
from pyarrow import parquet

from xlcli.errors import DataError
from xlcli.text import documents
from xlcli.text.documents import Document, live_texts
from xlcli.text.formats import HEAD, is_plain, text_of
from xlcli.text.sources import InputFormat

ROWS = '{"text": "a", "id": 1}\n{"text": "b", "id": 2}\n'
NAMES = ("x", "x.jsonl", "x.ndjson", "x.JSON", "x.jsonl.gz")


def read(data: str | bytes, name: str = "x", fields: Sequence[str] = (), size: int = 2**20, **how: Any) -> list[bytes]:
    """The portions of text, without pauses; `how` goes to `text_of`."""
    data = data.encode() if isinstance(data, str) else data
    portions = (data[at : at + size] for at in range(0, len(data), size))
    return [portion for portion in text_of(portions, name, fields, **how) if portion is not None]


def texts(data: str | bytes, name: str = "x", fields: Sequence[str] = (), **how: Any) -> list[bytes]:
    found = read(data, name, fields, **how)
    assert all(isinstance(portion, Document) for portion in found if portion)
    return [bytes(portion) for portion in found if portion]


@pytest.mark.parametrize(
    "before",
    ["", "\n \n", "# exported [2026]\n", "// a {comment}\n\n# more\n", "{}\n", "{}, {}\n{}\n", "\x1e", "\x1e\n\x1e"],
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_recognized_behind_what_has_no_text(name: str, before: str) -> None:
    for size in (1, 7, 10**6):
        assert texts(before + ROWS, name, size=size) == [b"a\n", b"b\n"]
        assert texts(before + ROWS, name, ["text"], size=size) == [b"a\n", b"b\n"]
    assert not is_plain((before + ROWS).encode(), name)


@pytest.mark.parametrize("before", ["null\n", "[]\n", '{"meta": 1}\n[{"of": "it"}]\n', "null, null\n"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_name_decides_where_content_would_not(name: str, before: str) -> None:
    assert texts(before + ROWS, name) == [b"a\n", b"b\n"]
    assert texts(codecs.BOM_UTF16_BE + (before + ROWS).encode("utf-16-be"), name) == [b"a\n", b"b\n"]


@pytest.mark.parametrize("before", ['e dog."}\n', "-- Logs begin --\n", "5\n", '"text"\n', "\0\n", "{'text': 'a'}\n"])
def test_rows_behind_another_line_are_refused_with_it_or_reported(before: str) -> None:
    for name in NAMES[1:]:
        with pytest.raises(DataError, match=r"\b1\b.*'text'"):
            read(before + ROWS, name)
    for name in ("x", "x.csv"):
        with pytest.raises(DataError, match=r"\b1\b.*('id'|data)"):
            read(before + ROWS, name, ["id"])
    remarks: list[str] = []
    assert b"".join(read(before + ROWS, notice=remarks.append)).decode() == before + ROWS
    assert len(remarks) == 1
    assert "plain text" in remarks[0]


@pytest.mark.parametrize("data", ['"hello"', "3", "[1, 2]", "Once upon a time.\n", '{"a": {"text": "b"}}', "{ // c\n}"])
def test_a_file_that_is_named_as_rows_but_has_none_is_plain_text_with_a_remark(data: str) -> None:
    for name in ("x.json", "x.jsonl", "x.csv", "x.tsv.zst"):
        remarks: list[str] = []
        assert b"".join(read(data, name, notice=remarks.append)).decode() == data
        assert len(remarks) == 1
        assert "plain text" in remarks[0]


@pytest.mark.parametrize(
    ("data", "is_table"),
    [
        ("sentence,condition\nThe dog, he said, was here.,a\n", True),
        ('"id";"text"\r\n1;The dog.\r\n', True),
        ("nummer\tsatz\n1\tDer Hund.\n", True),
        ("tweet,label\nThe dog was here,1", True),
        ("Item Number\tCondition (a/b)\tSatz\n1\tmatch\tDer Hund.\n", True),
        ('Event Index,UTC Date,Display Text\n1,2026,"Hello, you."\n', True),
        ("Yes,no\nThe dog was here.\n", False),
        ("Once upon a time, there was a dog.\nA cat came, too.\n", False),
        ("Text\nThe dog, he said.\n", False),
        ("text, that is\nThe dog\n", False),
        ("1,2\n3,4\n", False),
    ],
)
def test_a_table_without_a_name_is_plain_text_with_a_remark(data: str, is_table: bool) -> None:
    remarks: list[str] = []
    assert b"".join(read(data, notice=remarks.append)).decode() == data
    assert [remark.count("--text-field") for remark in remarks] == [1] * is_table


PROSE = [
    "[Enter HAMLET, reading.]\nTo be, or not to be",
    '["Who is there?" within.]\nFRANCISCO: Nay, answer me.',
    "{Exeunt}\n{A room}\n",
    "[2026-11-28 10:00:00] INFO started {}\n[2026-11-28 10:00:01] WARN {}\n",
    "# A heading\n\nAn object is written {}, a list [].\n",
    "#!/bin/sh\n# sh\n[ -f x ] && { echo; }\n",
    "// C\n{ int x; }\n",
    "null and void\n[] and {}\n",
    "/ a slash",
    "# only a comment",
]


@pytest.mark.parametrize("text", PROSE)
def test_prose_stays_prose(text: str) -> None:
    for data, size in itertools.product((text, f"{text}\n\n{text}" * 60), (1, 7, 10**6)):
        remarks: list[str] = []
        assert b"".join(read(data, size=size, notice=remarks.append)).decode() == data
        assert not remarks


def test_what_is_named_as_parquet_has_to_be() -> None:
    for data in ("", "version https://git-lfs.github.com/spec/v1\n", ROWS):
        with pytest.raises(DataError, match=r"x\.parquet"):
            read(data, "x.parquet")


def test_rows_without_text_are_left_out_and_counted_in_every_format(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "", "n": 0}, {"text": "a", "n": 1}, {"text": None, "n": 2}, {"text": "b", "n": 3}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + 'null\n{"n": 5}\n')
    (tmp_path / "b.csv").write_text("text,n\n,0\na,1\n,2\nb,3\n,4\n,5\n")
    parquet.write_table(pa.Table.from_pylist([*rows, {"n": 4}, {"n": 5}]), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.csv", "c.parquet"):
        corpus = open_corpus([tmp_path / name, tmp_path / name], reading=InputFormat(text_fields=("text",)))
        assert b"".join(corpus.read()) == b"a\nb\na\nb\n"
        found = [(at, row.document, int(row.fields["n"])) for at, row in corpus.rows()]
        assert found == [(0, 2, 1), (2, 4, 3), (4, 8, 1), (6, 10, 3)]
        assert list(corpus.facts.documents) == [0, 2, 4, 6]
        assert [notice.text.count("left out: 4") for notice in corpus.notices()] == [1, 1]


def test_a_key_that_no_row_has_is_refused_with_those_that_have_a_text() -> None:
    rows = '{"id": "x1", "level": "info", "msg": "hello", "@timestamp": "2026-11-28 10:00"}\n' * 3
    for name in ("x", "x.jsonl"):
        with pytest.raises(DataError, match=r"'text_'.* msg .*level"):
            read(rows, name, ["text_"])
    with pytest.raises(DataError, match="'good'"):
        read('{"good": "a", "bad": "b"}\nnull\n', "x", ["good", "bad"])


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"log": "GET /\n", "stream": "stdout", "time": "2026-11-28T10:00:00.123456789Z"}, "log"),
        ({"level": 30, "hostname": "worker-7f9c4d-xk2lp", "msg": "hello world"}, "msg"),
        ({"__CURSOR": "s=1;i=2", "_BOOT_ID": "0f" * 16, "SYSLOG_IDENTIFIER": "sshd", "MESSAGE": "up"}, "MESSAGE"),
        ({"version": "1.1", "host": "www.example.org", "short_message": "down"}, "short_message"),
        ({"@timestamp": "2026-11-28", "log.level": "INFO", "message": "ok", "ecs.version": "1.2.0"}, "message"),
        ({"kubernetes": {}, "@timestamp": "2026-11-28", "log": "x", "logtag": "F", "stream": "stdout"}, "log"),
        ({"Timestamp": "1586960586000000000", "SeverityText": "INFO of it", "Body": "like"}, "Body"),
        ({"time": "2026-11-28 10:00:00", "source": "a b c", "log": {"level": "x"}, "event": {}, "Msg": "y"}, "Msg"),
        ({"id": "a" * 99, "question": "Why?", "url": "http://example.org/a/b/c"}, "question"),
        ({"field": "syntax", "UID": "a1", "sentence_good": "She sits.", "n": "3"}, "sentence_good"),
        ({"id": "0a1b-2c3d-4e5f-6071", "date": "2026-11-28 10:00:00 +0100", "review_body": "good"}, "review_body"),
        ({"title": "A", "abstract": "We show that it is so."}, "abstract"),
    ],
)
def test_the_hint_names_the_likeliest_key(row: dict[str, Any], key: str) -> None:
    for name in ("x", "x.jsonl"):
        remarks: list[str] = []
        read(json.dumps(row) + "\n", name, notice=remarks.append)
        assert [f"--text-field {key} reads" in remark for remark in remarks] == [True]


def test_a_row_with_a_key_twice_is_refused() -> None:
    with pytest.raises(DataError, match=r"\b2\b.*twice"):
        read('{"text": "a"}\n{"text": "b", "text": "c"}\n{"text": "d"}\n')


@pytest.mark.parametrize("ends", ["", "\r"])
def test_cr_alone_ends_lines_if_nothing_else_does(ends: str) -> None:
    lines = ["The dog barked.", "", "The cat ran.", "The cow slept." * 2000]
    data = ("\r".join(lines) + ends).encode()
    for size in (1, 7, 16, 2**10, 2**20):
        remarks: list[str] = []
        assert b"".join(read(data, size=size, notice=remarks.append)) == data.replace(b"\r", b"\n")
        assert ["CR" in remark for remark in remarks] == [True]
    table = "id,text\r1,a\r2,b" + ends
    assert texts(table, "x", ["text"]) == [b"a\n", b"b\n"]
    assert texts(ROWS.replace("\n", "\r")) == [b"a\n", b"b\n"]
    Path("mac").write_bytes(data)
    corpus = open_corpus(["mac"], reading=InputFormat(each_line=True))
    assert len([start for start in corpus.facts.documents if start < corpus.n_bytes]) == len(lines)
    assert b"".join(corpus.read(17, 29)) == b"The cat ran."


@pytest.mark.parametrize(
    "text", ["10%\r20%\rdone\nnext\n", "a\r\nb\r\n", "a" * (HEAD - 2) + "\r\nb", "a" * HEAD + "\rb"]
)
def test_other_cr_stays(text: str) -> None:
    for size in (1, 1000, 2**20):
        assert b"".join(read(text, size=size)).decode() == text


def test_zstd_with_skippable_frames() -> None:
    def skippable(number: int, data: bytes) -> bytes:
        return bytes([0x50 + number]) + b"\x2a\x4d\x18" + struct.pack("<I", len(data)) + data

    frames = [zstandard.compress(part) for part in (b"The dog barked.\n", b"The cat ran.\n")]
    for number in (0, 15):
        mark = skippable(number, struct.pack("<I", len(frames[0])))
        for data in (mark + frames[0] + mark + frames[1], mark + mark + b"".join(frames) + skippable(3, b"")):
            for size in (1, 5, 2**20):
                assert b"".join(read(data, size=size)) == b"The dog barked.\nThe cat ran.\n"
    with pytest.raises(DataError, match="zstd"):
        read(skippable(0, b"abcd")[:-1])


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_texts_of_parquet_of_every_type_with_the_other_columns(kind: pa.DataType, tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["a", None, "b"]).cast(kind),
        "log.level": pa.array(["x", "y", "z"]),
        "when": pa.array([1, 2, 3], pa.date32()),
        "nested": [{"n": [1.5]}] * 3,
        "picture": [b"\x89PNG"] * 3,
        "flag": [True, False, None],
    }
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    rows = [row.fields for _, row in open_corpus([tmp_path / "x.parquet"]).rows()]
    shared = {"nested": '{"n": [1.5]}'}
    assert rows == [
        {"log.level": "x", "when": "1970-01-02", "flag": True, **shared},
        {"log.level": "z", "when": "1970-01-04", "flag": None, **shared},
    ]


def test_dates_of_parquet_that_python_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    nanoseconds = [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.time64("ns"), pa.duration("ns")]
    columns = {str(kind): pa.array([1, 3_007], kind) for kind in nanoseconds}
    parquet.write_table(pa.table({"text": ["a", "b"], **columns}), path)
    [_, row] = [row.fields for _, row in open_corpus([path]).rows()]
    assert list(row.values()) == [
        "1970-01-01 00:00:00.000003", "1970-01-01 00:00:00.000003+00:00", "00:00:00.000003", "0:00:00.000003",
    ]  # fmt: skip
    parquet.write_table(pa.table({"text": ["a"], "when": pa.array([2**62], pa.timestamp("us"))}), path)
    with pytest.raises(DataError, match=r"row 1\b"):
        list(open_corpus([path]).rows())


def test_headers_of_tables() -> None:
    corpus = Path("x.csv")
    corpus.write_text(",,text,\na,1,A,\n")
    [(_, row)] = open_corpus([corpus], reading=InputFormat(text_fields=("text",))).rows()
    assert list(row.fields.values()) == ["a", "1", ""]
    for separator in "sep=;", '"sep=;"', "sep=;\r":
        assert texts(f"{separator}\nid;text\n1;a, b\n", "x.csv", ["text"]) == [b"a, b\n"]
    comments = "# Results on Sat\n# 1. Results reception time.\n1700000000,The dog.\n"
    with pytest.raises(DataError, match=r"\b1\b.*comment"):
        read(comments, "results.csv", ["sentence"])
    assert texts("#id,text\n1,a\n", "x.csv", ["text"]) == [b"a\n"]
    assert texts("id,text\n", "x.csv", ["text"]) == []


def live(data: str, *fields: str, size: int = 2**20) -> tuple[list[bytes], list[str]]:
    remarks: list[str] = []
    return read(data, "x", fields, size, read=live_texts, notice=remarks.append), remarks


def test_a_stream_skips_what_has_no_text_and_counts_it() -> None:
    lines = ['{"m": "a"}', '{"m": [27, 91, 195, 188, 255]}', '{"m": null}', "{}", "5 junk [", '{"m": {}}', '{"m": "b"}']
    data = "\n".join([*lines, '{"m": "c', '{"m": 300}', '{"m": [300]}', '{"m": "\\ud800"}', '{"m": "d"}', '{"m'])
    for size in (1, 7, 2**20):
        found, remarks = live(data, "m", size=size)
        assert [*filter(None, found)] == [b"a\n", "\x1b[ü\ufffd\n".encode(), b"b\n", b"d\n"]
        assert len(remarks) == 2
        assert "line 3 of x" in remarks[0]
        assert remarks[1].endswith(": 9")


def test_a_stream_reports_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(documents.time, "monotonic", lambda: seconds[0])
    remarks: list[str] = []

    def arriving() -> Iterable[bytes | None]:
        yield b'{"m": "a"}\n'
        for seconds[0] in range(150):
            yield b'{"n": 1}\n'
            yield None

    assert (
        b"".join(filter(None, text_of(iter(arriving()), "x", ["m"], read=live_texts, notice=remarks.append))) == b"a\n"
    )
    assert [int(remark.rpartition(" ")[2]) for remark in remarks] == [1, 60, 120, 150]


def test_a_stream_names_the_keys_that_have_a_text() -> None:
    _, remarks = live('{"msg": "a"}\n' * 3, "message")
    assert "--text-field msg" in remarks[0]
    found, remarks = live('Starting up\n{"msg": "a"}\n', "msg")
    assert [*filter(None, found)] == [b"a\n"]
    assert "line 1 of x" in remarks[0]


def docker(log: str, stream: str = "stdout", **more: Any) -> str:
    return json.dumps({"log": log, "stream": stream, "time": "2026-11-28T10:00:00Z", **more}) + "\n"


def test_parts_of_a_line_of_docker_are_joined() -> None:
    rows = docker("one ") + docker("line ") + docker("of three\n") + docker("whole\n", attrs={"tag": "x"})
    rows += docker("cut ") + docker("by this\n", "stderr") + docker("rest\n") + docker("no end")
    for size in (1, 7, 2**20):
        found, _ = live(rows, "log", size=size)
        assert b"".join(found) == b"one line of three\nwhole\ncut \nby this\nrest\nno end"
        starts = [bytes(each) for each in found if each and isinstance(each, Document) and not each.continues]
        assert starts == [b"one ", b"whole\n", b"cut ", b"by this\n", b"rest\n", b"no end"]
    for other in ({"logtag": "F"}, {"level": 3}):  # a line of these has no line end
        found, _ = live(docker("one", **other) + docker("two", **other), "log")
        assert [*filter(None, found)] == [b"one\n", b"two\n"]
    assert texts(docker("one ") + docker("two\n"), "x", ["log"]) == [b"one \n", b"two\n"]


def test_a_compressed_file_has_the_kind_that_its_name_has_below() -> None:
    assert texts(gzip.compress(b"null\n" + ROWS.encode()), "x.jsonl.gz") == [b"a\n", b"b\n"]
    assert texts(gzip.compress(b"id\ttext\n1\t{a}\n"), "x.tsv.gz", ["text"]) == [b"{a}\n"]
    assert texts("text\n{}\n", "x.csv", ["text"]) == [b"{}\n"]
