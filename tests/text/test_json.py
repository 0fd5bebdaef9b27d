"""JSON in every layout, what is nearly JSON, and text that only begins like it."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import open_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from xlcli.errors import DataError
from xlcli.text.documents import Document
from xlcli.text.formats import is_plain, text_of

Found = list[tuple[bytes, dict[str, Any]]]
OBJECTS: list[dict[str, Any]] = [
    {"text": "The dog."},
    {"id": 1, "text": 'said "no", {then} [left]\\', "nested": {"text": ["}", {"a": None}]}},
    {"text": "two\nlines\r\nand ü漢🙂", "x": -1.5e-3, "empty": {}, "list": []},
    {"text": ""},
    {"note": "\u2028, \x7f", "text": "last\n"},
]


def layouts(objects: list[dict[str, Any]]) -> Iterator[str]:
    """The objects as programs write them."""
    for ascii_only, indent, line_end in itertools.product((True, False), (None, 0, 2, "\t"), ("\n", "\r\n")):
        rows = [json.dumps(each, ensure_ascii=ascii_only, indent=indent) for each in objects]
        whole = json.dumps(objects, ensure_ascii=ascii_only, indent=indent)
        texts = [whole, "\n".join(rows) + "\n", ",\n".join(rows), "[\n" + "\n,\n".join(rows) + "\n]\n", "".join(rows)]
        yield from (text.replace("\n", line_end) for text in texts)
        yield json.dumps(objects, ensure_ascii=ascii_only, separators=(",", ":")) + line_end


def read(portions: Iterable[bytes | None], *fields: str) -> Found:
    found = [part for part in text_of(iter(portions), "x", fields) if part]
    assert all(isinstance(part, Document) for part in found)
    return [(bytes(part), dict(part.fields)) for part in found if isinstance(part, Document)]


def passed(data: bytes, size: int) -> tuple[bytes, list[str]]:
    """The text of data in portions of this size, and the remarks on it."""
    remarks: list[str] = []
    portions = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(part or b"" for part in text_of(portions, "x", notice=remarks.append)), remarks


def wanted(objects: list[dict[str, Any]], field: str = "text") -> Found:
    rows = [(each[field], {key: each[key] for key in each if key != field}) for each in objects]
    return [((text if text.endswith("\n") else f"{text}\n").encode(), rest) for text, rest in rows if text]


def test_every_layout_is_read_cut_anywhere() -> None:
    rng = random.Random(0)
    for text in layouts(OBJECTS):
        data = text.encode()
        packed = (codecs.BOM_UTF8 + data, b" \r\n\n" + data, gzip.compress(data), text.encode("utf-16"))
        for whole in (data, *packed):
            assert read([whole]) == wanted(OBJECTS)
        assert read([data[i : i + 1] for i in range(len(data))]) == wanted(OBJECTS)
        edges = [0, *sorted(rng.sample(range(len(data)), 5)), len(data)]
        cut = [data[a:b] for a, b in itertools.pairwise(edges)]
        assert read(itertools.chain(*((part, None) for part in cut))) == wanted(OBJECTS)
        assert read(cut, "text") == wanted(OBJECTS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.dictionaries(st.text(), VALUES, max_size=3)), min_size=1, max_size=4),
    st.sampled_from([None, 0, 1, "\t"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_any_array_that_python_writes_is_read(
    rows: list[tuple[str, dict[str, Any]]], indent: int | str | None, ascii_only: bool, size: int
) -> None:
    objects = [{**fields, "text": text} for text, fields in rows]
    data = json.dumps(objects, indent=indent, ensure_ascii=ascii_only).encode()
    assert read(data[at : at + size] for at in range(0, len(data), size)) == wanted(json.loads(data))


def test_two_texts_of_each_object() -> None:
    pairs = [{"n": 1, "good": "a", "bad": "b"}, {"n": 2, "good": "c", "bad": "d"}]
    found = read([json.dumps(pairs, indent=1).encode()], "good", "bad")
    assert found == [(f"{pair[key]}\n".encode(), pair) for pair in pairs for key in ("good", "bad")]


def test_a_corpus_of_an_array_is_that_of_its_lines() -> None:
    Path("a.json").write_text(json.dumps(OBJECTS, indent=4))
    Path("a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in OBJECTS))
    array, lines = open_corpus(["a.json"]), open_corpus(["a.jsonl"])
    assert (array.facts.sha256, array.facts.documents) == (lines.facts.sha256, lines.facts.documents)
    assert list(array.rows()) == list(lines.rows())
    assert [each.text.replace("a.json ", "a.jsonl ") for each in array.notices()] == [
        each.text for each in lines.notices()
    ]
    assert "without text are left out: 1" in [*lines.notices()][-1].text


PLAIN = [
    '[2026-01-01] INFO {"text": 1}',
    "[Illustration]",
    '[Illustration: "A"]',
    "[ ]",
    "[]",
    "{}",
    "{ }",
    "[",
    "{",
    "[{",
    "[{}]",
    "{% raw %}",
    '{{ "text": site }}',
    '{\n  "a", "b"\n};',
    "{ int x = 0; }",
    "{\\bf Text}",
    '{"o}sterreich "text": 1',
    "[link](http://x)",
    "[[Page|page]] text",
    '["Come in," he said. "text": 1]',
    "[(lambda (x) x)]",
    "['a', 'b']",
    "[{'text': 'a'}]",
    "{'a': 1}",
    "[1, 2, 3]",
    "[1]",
    "[1] A footnote",
    "[[1, 2], [3]]",
    "[0.5, 1)",
    "[null]",
    '[12:30] "text": 1',
    '[x]{"text": "a"}',
    '{"text"',
    '{"text" => "a"}',
    '{"a": b, "text": "c"}',
    '{"a": "b" "text": "c"}',
    '["a" => 1]',
    '{"a": foo()}',
    "[-]",
    '[/path/{"text": 1}]',
    '[{"a" "text": 1}]',
    "{n",
    "[true story]",
    '{"cut": "off\nin a line"',
    "[[[[[",
    '{"": }',
    "[ {name} ]",
    '{"text: "a"}',
    '["a"',
    '[section]\nkey = {"text": 1}',
]


@pytest.mark.parametrize("text", PLAIN)
def test_text_that_begins_like_json_is_text(text: str) -> None:
    for more in ("", "\n", '\nA second line with "text": 3 in it.\n' * 40):
        data = (text + more).encode()
        for size in (1, 7, len(data)):
            assert passed(data, size) == (data, [])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"body": "a"}\n', "body"),
        ('{"n": 1}\n{"n": 2}\n', ""),
        ('{\n "name": "a", "n": {"text": "b"}\n}', "name"),
        ('[{"body": "a"}, {"body": "b"}]', "body"),
        ('{"body": "a"},\n{"body": "b"},\n', "body"),
        ('{"data": [{"text": "a"}]}', ""),
        ('["The dog.", "The cat."]', ""),
        ('["a"]', ""),
        ('[["a", 1], ["b", 2]]', ""),
        ('[\n  "a",\n  "b"\n]\n', ""),
        ('{"a": 1}, {"text": "b"}', ""),
    ],
)
def test_json_without_the_key_is_text_with_a_remark(text: str, key: str) -> None:
    data = text.encode()
    for size in (1, 7, len(data)):
        found, remarks = passed(data, size)
        assert found == data
        assert len(remarks) == 1
        assert (f"--text-field {key}" if key else "JSON") in remarks[0]
        assert ("--text-field" in remarks[0]) == bool(key)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"text": "\\ud800"}\n', 1),
        ('{"text": 3}\n', 1),
        ('{"text": NaN}\n', 1),
        ('{"text": ["a"]}', 1),
        (f'{{"text": "a", "deep": {DEEP}', 1),
        (f'{{"text": "a", "deep": {"[" * 100}{"]" * 100}}}', 1),
        (f'{{"text": "a", "n": {"9" * 5000}}}', 1),
        ('{"text": "a" "b"}', 1),
        ('{"text": "a', 1),
        ('{"text": "a\nb"}\n', 1),
        ('{"text": None}', 1),
        ('{"text": "a"}\njunk\n', 2),
        ('{"text": "a"} junk', 1),
        ('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', 3),
        ('{\n"text":\n"a" "b"}', 3),
        ('{\n "text": 3\n}', 1),
        ('[{"text": "a"}', 1),
        ('[{"text": "a"},\n', 2),
        ('[{"text": "a"},\n{"text": "b', 2),
        ('[{"text": "a"},\n"b"]', 2),
        ('[{"text": "a"},\n5]', 2),
        ('[{"text": "a"}]]', 1),
        ('[\n{"text": "a"},\n{"text": "\\ud800"}]', 3),
        ('[\n{"text": "a",}]', 2),
        ('{"text": "a"}\n{"text": "\xff"}', 2),
        ('{"text": undefined}', 1),
        ('[{"text": "a"},\n{"text": "b\nc"}]', 2),
    ],
)
def test_what_is_nearly_json_is_refused_with_its_line(text: str, line: int) -> None:
    data = text.encode("latin-1")
    for size in (1, 7, len(data)) if len(data) < 99 else (len(data) // 3, len(data)):
        with pytest.raises(DataError, match=rf"\b{line}\b.*\bx\b.*'text'") as caught:
            passed(data, size)
        assert "--binary" in caught.value.remedy
        assert "records" in caught.value.remedy


def test_a_row_may_nest_deeply() -> None:
    deep = "[" * 99 + "]" * 99
    assert passed(f'{{"text": "a", "deep": {deep}}}'.encode(), 50) == (b"a\n", [])


def test_an_array_in_a_pipe_is_read_as_it_arrives() -> None:
    seen = []

    def arriving() -> Iterator[bytes | None]:
        for portion in (b'[{"text": "a"}', b', {"text": "' + b"b" * 90, b'b"}', None, b',{"text": "c"}]'):
            seen.append(portion)
            yield portion

    texts = (len(seen) for part in text_of(arriving(), "x") if part)
    assert list(texts) == [1, 4, 5]


def test_an_array_of_any_size_takes_bounded_memory() -> None:
    element = json.dumps({"text": "a" * 2**16, "n": list(range(99))}, indent=1).encode() + b",\n"

    def portions() -> Iterator[bytes]:
        yield b"["
        for _ in range(2**10):
            yield element
        yield b'{"text": "z"}]'

    tracemalloc.start()
    size = sum(len(part or b"") for part in text_of(portions(), "x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2**10 * (2**16 + 1) + 2
    assert peak < 2**20


@pytest.mark.parametrize("size", [2**16, 2**24 + 2**20])
def test_an_object_of_an_array_has_a_maximum_size(size: int) -> None:
    def cut(data: bytes) -> Iterator[bytes]:
        return iter([data[start : start + size] for start in range(0, len(data), size)])

    text = b"a" * (2**24 - 12)
    for number, around in ((1, b'[{"text": "%b"}]'), (2, b'[{"text": "b"},\n{"text": "%b"}, {"text": "c"}]')):
        assert sum(len(part or b"") for part in text_of(cut(around % text), "x")) >= 2**24 - 11
        with pytest.raises(DataError, match=rf"\b{number}\b.*\b16\b"):
            list(text_of(cut(around % (text + b"a")), "x"))


def test_blanks_between_objects_do_not_count() -> None:
    portions = itertools.chain([b'[{"text": "a"},'], itertools.repeat(b" \n" * 2**15, 2**9), [b'{"text": "b"}]'])
    parts = list(text_of(portions, "x"))
    assert b"".join(filter(None, parts)) == b"a\nb\n"
    assert len(parts) > 2**9  # the reader may stop between them


def test_only_text_that_cannot_be_json_is_read_from_anywhere() -> None:
    for start in (b"[2026]", b"[Illus", b"plain", b'"text"', b"[1, 2]", b"# a heading\nand text", b"{\\bf a} and b"):
        assert is_plain(start, "x")
    for start in (b"{", b"[{", b'[ "a"', b"[\n\n {", b"[", b" ", b"# a heading", b"/"):
        assert not is_plain(start, "x")
