"""CSV and TSV tables, texts in two columns, and the fields that travel with the texts."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import random
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from corpora import open_corpus
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from xlcli.errors import DataError, named
from xlcli.events import Row
from xlcli.text.corpus import Corpus
from xlcli.text.documents import Document
from xlcli.text.formats import text_of
from xlcli.text.sources import InputFormat
from xlcli.text.table_rows import table_rows

Found = list[tuple[bytes, dict[str, Any]]]
CELLS = [
    "a b",
    "",
    'said "no"',
    "tab\tand, comma",
    "two\nlines",
    "cr\r\nlf",
    "Zürich 漢字 🙂",
    "مرحبا",
    "สวัสดี",
    '"',
]
TABLE = [["id", "text", "note"], *([str(i), f"{cell}.", cell] for i, cell in enumerate(CELLS))]
ROWS = [(f"{cell}.\n".encode(), {"id": str(i), "note": cell}) for i, cell in enumerate(CELLS)]


def table(rows: Iterable[Sequence[str]], delimiter: str = ",", line_end: str = "\n", *, quote: bool = False) -> str:
    file, quoting = io.StringIO(newline=""), csv.QUOTE_ALL if quote else csv.QUOTE_MINIMAL
    csv.writer(file, delimiter=delimiter, lineterminator=line_end, quoting=quoting).writerows(rows)
    return file.getvalue()


def read(portions: Iterable[bytes | None], *fields: str) -> Found:
    found = [part for part in text_of(iter(portions), "x", fields) if part]
    assert all(isinstance(part, Document) for part in found)
    return [(bytes(part), dict(part.fields)) for part in found if isinstance(part, Document)]


def corpus(path: str, *fields: str) -> Corpus:
    return open_corpus([path], reading=InputFormat(text_fields=fields))


def rows_of(corpus: Corpus) -> Found:
    """Fields of each row, beside the text between the offsets."""
    rows = list(corpus.rows())
    edges = [*(at for at, _ in rows), corpus.n_bytes]
    parts = itertools.pairwise(edges)
    return [(b"".join(corpus.read(a, b)), dict(each.fields)) for (a, b), (_, each) in zip(parts, rows, strict=True)]


@pytest.mark.parametrize("delimiter", ["\t", ","])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_table_is_read_cut_anywhere(delimiter: str, line_end: str) -> None:
    text = table(TABLE, delimiter, line_end)
    data, rng = text.encode(), random.Random(0)
    for whole in (data, data.removesuffix(line_end.encode()), codecs.BOM_UTF8 + data, text.encode("utf-16")):
        assert read([whole], "text") == ROWS
    assert read([b" \n\n" + data + b"\n\n"], "text") == ROWS
    assert read([gzip.compress(data)], "text") == ROWS
    assert read([data[i : i + 1] for i in range(len(data))], "text") == ROWS
    for _ in range(20):
        edges = [0, *sorted(rng.sample(range(len(data)), 5)), len(data)]
        portions = [data[a:b] for a, b in itertools.pairwise(edges)]
        assert read(itertools.chain(*((part, None) for part in portions)), "text") == ROWS


@given(st.lists(st.tuples(*[st.text('ab ",\t\r\n\0ü')] * 3), max_size=5), st.sampled_from(",\t"))
def test_what_the_csv_module_writes_is_read(rows: list[tuple[str, str, str]], delimiter: str) -> None:
    quote = any("\r" in cell for row in rows for cell in row)
    data = table([("a", "b", "text"), *rows], delimiter, quote=quote).encode()
    wanted = [(f"{t.removesuffix(chr(10))}\n".encode(), {"a": a, "b": b}) for a, b, t in rows if t]
    assert read([data], "text") == wanted


def test_a_pause_is_passed_on_also_within_a_row() -> None:
    portions = [b"id,te", None, b"xt\n1,a\n", None, b'2,"half', None, b'\nof it"', None, b"\n"]
    found = list(text_of(iter(portions), "x", ["text"]))
    assert [part for part in found if part != b""] == [None, b"a\n", None, None, None, b"half\nof it\n"]


def test_a_live_row_is_read_when_it_is_complete() -> None:
    seen = []

    def arriving() -> Iterator[bytes]:
        for portion in (b"text,id\n", b"a,1\nb", b",2\n"):
            seen.append(portion)
            yield portion

    assert next(part for part in text_of(arriving(), "x", ["text"]) if part) == b"a\n"
    assert len(seen) == 2


def test_without_the_name_of_a_column_a_table_is_text() -> None:
    data = table(TABLE).encode()
    assert b"".join(part or b"" for part in text_of(iter([data]), "x")) == data


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"id,text\n1,a\n2,b,c\n", 3), (b"id,text\n1,a\n\n2\n", 4), (b'id,text\n1,"a\nb"\n2,"a"b\n', 4),
        (b'id,text\n1,"a\n2,b\n', 2), (b"id,text\n1,\xff\n", 2), (b'id,text\n"1\r",a\r2,b\n', 2), (b"id,text,id\n", 1),
        (b'id,text\n1,"a"b,"c\n2,d\n', 2), (b"\nid,body\n", 2), (b"plain\n", 1), (b'"text', 1),
    ],
)  # fmt: skip
def test_a_broken_row_is_refused_with_its_number(data: bytes, number: int) -> None:
    for portions in ([data], [data[i : i + 1] for i in range(len(data))]):
        with pytest.raises(DataError, match=rf"\b{number}\b.*\bx\b"):
            read(portions, "text")


def test_a_missing_column_is_refused_with_the_names_of_the_others() -> None:
    for delimiter in ",\t":
        with pytest.raises(DataError, match="'body'") as caught:
            read([table(TABLE, delimiter).encode()], "body")
        assert "id, text, note" in caught.value.remedy


def test_columns_may_all_lack_a_name() -> None:
    rows = [row for row in table_rows([b",\nsome,text\n"], "x", [], print) if row]
    assert rows == [("line 2", {"column 1": "some", "column 2": "text"})]


@pytest.mark.parametrize(
    ("row", "is_data"),
    [
        ("1619973769,313362cc8a2f,PennController,1,0,trial,NULL,DashedSentence,1,The,319,false,The dog barked.", True),
        ("s01,match,2026-11-28 14:02,The dog barked.", True), ("s01,match,-1.5,The dog barked.", True),
        ("s01,NA,The dog barked.", True), ("item,condition,rt2,sentence", False),
        ("Reading time (ms),2nd sentence,T1,", False), (",item,sentence", False),
    ],
)  # fmt: skip
def test_a_first_row_of_data_is_refused_as_such(row: str, is_data: bool) -> None:
    with pytest.raises(DataError, match="line 1 of x") as caught:
        read([f"{row}\n{row}\n".encode()], "text")
    n_columns = row.count(",") + 1
    assert ("data" in str(caught.value)) == is_data == (f"each of its {n_columns} columns" in caught.value.remedy)


def test_nul_bytes_are_text() -> None:
    assert read([b"id,text\na\0,b\0\n"], "text") == [(b"b\0\n", {"id": "a\0"})]


def test_a_cell_has_any_size_up_to_the_limit() -> None:
    text = 'a "quoted" line,\n' * 2**16
    assert read([table([["text", "id"], [text, "1"]]).encode()], "text") == [(text.encode(), {"id": "1"})]


HOSTILE = {
    "a quote that is never closed": (b'id,text\n1,"', b"a, b\n" * 2**10),
    "quotes that are never closed": (b'id,text\n1,"', b'""\n' * 2**10),
    "a row without end": (b"id,text\n1,", b"a" * 2**12),
    "columns without end": (b"id,text\n1", b",a" * 2**12),
    "quoted cells without end": (b"id,text\n1", b',"\n"' * 2**10),
    "a header without end": (b"id,text", b",a" * 2**12),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_end_in_bounded_memory(name: str) -> None:
    first, more = HOSTILE[name]
    n_portions = 0

    def endless() -> Iterator[bytes]:
        nonlocal n_portions
        yield first
        while True:
            n_portions += 1
            yield more

    limit = 2**18
    tracemalloc.start()
    with patch("xlcli.text.documents.LONGEST_LINE", limit), pytest.raises(DataError):
        read(endless(), "text")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_portions * len(more) <= limit + 2 * len(more)
    assert peak < 64 * limit


def test_a_table_of_many_columns() -> None:
    names = [f"c{i}" for i in range(10_000)]
    [(text, fields)] = read([table([["text", *names], ["a", *names]]).encode()], "text")
    assert (text, fields) == (b"a\n", dict(zip(names, names, strict=True)))


def test_a_message_names_a_few_of_many_names() -> None:
    names = [f"c{i}" for i in range(20_000)]
    for header in (names, ["c" * 2**20], [f"{name}{'c' * 1000}" for name in names[:100]]):
        with pytest.raises(DataError) as caught:
            read([table([header]).encode()], "text")
        assert len(str(caught.value)) < 5000
    assert "19,9" in str(DataError("x", named(names)))
    assert len(str(DataError("m" * 10**5, "r" * 10**5))) < 10_000


PAIRS = [{"n": "1", "good": "She sits.", "bad": "She sit."}, {"n": "2", "good": "two\nlines", "bad": "x"}]


def write_pairs(rows: list[dict[str, str]]) -> None:
    cells = [list(PAIRS[0]), *(list(row.values()) for row in rows)]
    Path("a.csv").write_bytes(table(cells).encode())
    Path("a.tsv").write_bytes(table(cells, "\t", "\r\n").encode())
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), "a.parquet")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet"])
def test_two_texts_of_each_row(name: str) -> None:
    write_pairs(PAIRS)
    for fields in (("good", "bad"), ("bad", "good")):
        found = rows_of(corpus(name, *fields))
        assert [text for text, _ in found] == [f"{row[field]}\n".encode() for row in PAIRS for field in fields]
        assert [each for _, each in found] == [row for row in PAIRS for _ in fields]
    write_pairs([*PAIRS, {"n": "3", "good": "", "bad": "x"}])
    assert len(list(corpus(name, "bad").rows())) == 3
    assert len(list(corpus(name, "good").rows())) == 2
    with pytest.raises(DataError, match=r"\b[345]\b.*'good'"):
        corpus(name, "good", "bad").facts  # noqa: B018


def test_rows_of_a_corpus_begin_with_its_documents(tmp_path: Path) -> None:
    values = {"n": 3, "nested": {"a": [1.5, None, True]}, "surrogate": "\ud800"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one\r\ntwo", **values}) + "\n")
    (tmp_path / "b.tsv").write_bytes(table(TABLE, "\t").encode())
    parquet.write_table(pa.table({"text": ["x", None, "y"], "id": [1, 2, 3]}), tmp_path / "c.parquet")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(table([["text", "k"], ["Z" * 3 * 2**20, "v"]]).encode()))
    whole = open_corpus([tmp_path], reading=InputFormat(text_fields=("text",)))
    tabular = [(text.replace(b"\r\n", b"\n"), fields) for text, fields in ROWS]
    long = (b"Z" * 3 * 2**20 + b"\n", {"k": "v"})
    values |= {"nested": json.dumps(values["nested"]), "surrogate": "\ufffd"}
    found = rows_of(whole)
    files = [fields.pop("file") for _, fields in found]
    assert [Path(file).name for file in files] == [
        "a.jsonl",
        *["b.tsv"] * len(ROWS),
        "c.parquet",
        "c.parquet",
        "d.csv.gz",
    ]
    assert found == [(b"one\ntwo\n", values), *tabular, (b"x\n", {"id": 1}), (b"y\n", {"id": 3}), long]
    assert [at for at, _ in whole.rows()] == list(whole.facts.documents)
    (tmp_path / "a.jsonl").write_text('{"text": "short"}' + " " * 100)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        list(whole.rows())


def test_a_plain_file_is_a_row_whose_field_is_its_name() -> None:
    Path("plain").write_bytes(b"one\r\ntwo\n")
    Path("lines").write_bytes(b'{"text": "x", "n": 1}\n')
    found = list(open_corpus(["plain", "lines", "plain"]).rows())
    plain = {"file": "plain"}
    assert found == [
        (0, Row(1, plain, file="plain")),
        (8, Row(2, {"file": "lines", "n": 1}, file="lines")),
        (10, Row(3, plain, file="plain")),
    ]
    assert list(open_corpus(["plain"]).rows()) == [(0, Row(1, {}))]
    Path("lines").write_bytes(b'{"text": "x", "file": "of the user"}\n')
    assert [row.fields["file"] for _, row in open_corpus(["plain", "lines"]).rows()] == ["plain", "of the user"]


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.tsv.gz"])
def test_a_table_that_is_read_as_text_is_reported(name: str) -> None:
    data = table(TABLE).encode().replace(b"\0", b"")
    Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for fields, times in (((), 1), (("text",), 0)):
        found = corpus(name, *fields)
        assert found.facts
        assert sum("--text-field" in notice.text for notice in found.notices()) == times


def test_tables_of_spreadsheets() -> None:
    Path("a.csv").write_bytes('\ufeffitem;sentence;;\r\n1;"x; ""y""";;\r\n'.encode())
    found = open_corpus(["a.csv"], reading=InputFormat(text_fields=("sentence",)))
    assert [row.fields["item"] for _, row in found.rows()] == ["1"]
    assert b"".join(found.read()) == b'x; "y"\n'


def test_a_header_has_line_ends_in_its_cells() -> None:
    for delimiter, line_end in itertools.product("\t,;", ("\n", "\r\n")):
        header = [f"two{line_end}lines", "text", f"a{line_end}, b; c\td"]
        data = table([header, ["1", "a", "x"], ["2", "b", f"y{line_end}"]], delimiter, line_end).encode()
        wanted = [(b"a\n", {header[0]: "1", header[2]: "x"}), (b"b\n", {header[0]: "2", header[2]: f"y{line_end}"})]
        assert read([data], "text") == read([data[i : i + 1] for i in range(len(data))], "text") == wanted


PROSE = "Roses are red,\nviolets, too, are blue;\nsugar is sweet,\n\nand so are you"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ('id\ttext\n1\t"Come in, he said.\n2\tThe door was open."\n3\tLast.\n', 2),
        ('text\tid\nx\t1\n"Come in\t2\nnow,\t3\nhe" \t4\n'.replace('" ', '"'), 3),
        ('id;text\r\n1;"Come in\r\n2;he said"\r\n', 2),
        ('id,text\n1,"Come\n2,in"\n3,"You\n4,too"\n', 2),
        ('id\ttext\tnote\n1\t"Come\t\n2\tin"\t\n', 2),
        *(
            (table([["id", "text", "note"], ["1", PROSE, PROSE], ["2", "a", PROSE]], delimiter), 0)
            for delimiter in "\t,;"
        ),
        (table([["text"], [PROSE], ["a\nb"]]), 0),
        (table([["id", "text"], ["1", PROSE], ["2", "Yes, he\nsaid, no"]]), 0),
        (table([["id", "text"], ["1", 'said "a"\nand "b"']], "\t"), 0),
        ('id\ttext\n1\t"Come in."\n2\tout\n', 0),
    ],
)
def test_a_quotation_that_joins_rows_is_reported_once(data: str, line: int) -> None:
    for size in (1, 7, len(data)):
        remarks: list[str] = []
        portions = (data.encode()[at : at + size] for at in range(0, len(data), size))
        assert list(text_of(portions, "x", ["text"], notice=remarks.append))
        assert len(remarks) == (line > 0)
        assert not remarks or f"line {line} of x" in remarks[0]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ("text,cond\na dog,x\nHe said, no\nShe said, yes\n", 3),
        ("id;text;cond\n1;He said; no\n", 2),
        ("cond,text\n no,He said\n", 0),
        ('text,cond\n"He said, no",x\n', 0),
        ("text, cond\na dog, x\n", 0),
        ("text\tcond\na dog\t x\n", 0),
    ],
)
def test_a_comma_that_divides_a_text_is_reported_once(data: str, line: int) -> None:
    remarks: list[str] = []
    assert list(text_of(iter([data.encode()]), "x", ["text"], notice=remarks.append))
    assert len(remarks) == (line > 0)
    assert not remarks or f"line {line} of x" in remarks[0]


def test_rows_that_name_the_columns_again_are_refused() -> None:
    names = 'id,Q1\n"Response ID","Write a sentence,\nplease"\n"{""ImportId"":""_id""}","{""ImportId"":""QID1""}"\n'
    with pytest.raises(DataError, match="line 4 of x"):
        read([names.encode(), b"1,The dog was here.\n"], "Q1")
    assert read([b'id,Q1\n"ImportId","The dog was here."\n'], "Q1")


def test_rows_that_changed_are_refused() -> None:
    Path("a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    found = open_corpus(["a.jsonl"])
    assert found.facts
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": "cde"}\n')
    with pytest.raises(DataError, match="changed"):
        list(found.rows())


@pytest.mark.parametrize("portion_size", [9, 10_000])
@pytest.mark.parametrize(
    ("columns", "cell", "encoding"),
    [
        ("编号,文本", "人人生而自由,在尊严和权利上一律平等。", "gb18030"),
        ("編號,文本", "人人生而自由，在尊嚴和權利上一律平等。", "big5"),
    ],
)
def test_the_encoding_of_a_table_is_judged_by_more_than_the_names_of_its_columns(columns, cell, encoding, portion_size):
    data = "\n".join([columns, *[f"1,{cell}"] * 3]).encode(encoding)
    portions = [data[at : at + portion_size] for at in range(0, len(data), portion_size)]
    with pytest.raises(DataError, match="line 1 of x is not UTF-8") as caught:
        [*table_rows(iter(portions), "x", ["文本"], lambda text: None)]
    assert f"iconv -f {encoding} " in caught.value.remedy
    with pytest.raises(DataError, match="line 1 of x is not UTF-8"):  # a pause is not waited for
        [*table_rows(itertools.chain([columns.encode(encoding) + b"\n", None], iter(int, 1)), "x", ["文本"], print)]
