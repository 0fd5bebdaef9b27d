"""Formats recognized by content: the same text from every one, however it arrives."""

from __future__ import annotations

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import random
import tempfile
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest
import zstandard
from corpora import open_corpus
from hypothesis import given
from hypothesis import strategies as st
from piped import standard_input
from pyarrow import parquet

from xlcli.errors import DataError
from xlcli.text.formats import (
    FRAMES,
    LineEnds,
    is_plain,
    text_of,
    with_notice_of_bytes,
)
from xlcli.text.sources import InputFormat

TEXT = "Zürich, 漢字 and {braces}\r\n\n" * 40 + "the end without a line end"
DOCUMENTS = ["first\nof two lines", "second\n", "", "dritte Zürich", "{}"]
JOINED = "first\nof two lines\nsecond\ndritte Zürich\n{}\n"
PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstandard.compress}


def json_lines(key="text"):
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(DOCUMENTS)).encode()


def read(data, cuts=(), **settings):
    edges = [0, *sorted(cuts), len(data)]
    portions = [data[a:b] for a, b in itertools.pairwise(edges)]
    return b"".join(part or b"" for part in text_of(iter([p for p in portions if p]), "x", **settings))


SAME = {
    "plain": TEXT.encode(),
    "utf-8 with mark": codecs.BOM_UTF8 + TEXT.encode(),
    "utf-16": TEXT.encode("utf-16"),
    "utf-16-be": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32": TEXT.encode("utf-32"),
    **{kind: pack(TEXT.encode()) for kind, pack in PACK.items()},
    **{f"two frames of {kind}": pack(TEXT[:300].encode()) + pack(TEXT[300:].encode()) for kind, pack in PACK.items()},
    "utf-16 in xz": lzma.compress(TEXT.encode("utf-16")),
    "padded gzip": gzip.compress(TEXT.encode()) + b"\0" * 512,
    "an empty frame first": gzip.compress(b"") + gzip.compress(TEXT.encode()),
}


@pytest.mark.parametrize("name", SAME)
def test_every_format_gives_the_same_text_cut_anywhere(name):
    data, rng = SAME[name], random.Random(0)
    assert read(data) == TEXT.encode()
    assert read(data, range(len(data))) == TEXT.encode()
    for _ in range(20):
        assert read(data, rng.sample(range(len(data)), 3)) == TEXT.encode()


@pytest.mark.parametrize("pack", [bytes, *PACK.values()])
def test_texts_of_json_lines_end_with_a_line_end(pack):
    data = pack(json_lines())
    assert read(data) == JOINED.encode()
    assert read(data, range(len(data))) == JOINED.encode()


@given(st.text())
def test_any_text_passes_through(text):
    data = text.encode()
    if is_plain(data, "x"):
        assert read(data) == data


@pytest.mark.parametrize("head", [b"{", b'{"text"', b'{"other": "x"}\n', b"{\n", b"[1]\n"])
def test_other_text_in_braces_is_text(head):
    assert read(head + b"more\n") == head + b"more\n"


def test_a_later_line_that_is_no_document_is_named():
    with pytest.raises(DataError, match=r"\b3\b.*'text'"):
        read(b'{"text": "a"}\n\n["texts"]\n')
    data = json_lines("body")
    assert read(data) == data
    assert b"".join(text_of(iter([data]), "x", ["body"])) == JOINED.encode()
    with pytest.raises(DataError, match=r"'title'.*body"):
        list(text_of(iter([data]), "x", ["title"]))
    with pytest.raises(DataError, match=r"\b1\b"):
        list(text_of(iter([b"plain\n"]), "x", ["title"]))


@pytest.mark.parametrize("kind", PACK)
def test_damage_is_refused(kind):
    data = PACK[kind](random.Random(0).randbytes(3000))
    for broken in (data[:-1], data[: len(data) // 2], data + b"garbage"):
        with pytest.raises(DataError, match=kind):
            read(broken, any_bytes=True)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 255
    if kind != "zstd":  # without --check zstd stores no checksum
        with pytest.raises(DataError, match=kind):
            read(bytes(flipped), any_bytes=True)


def test_half_a_character_of_utf16_is_refused():
    with pytest.raises(DataError, match="UTF-16-LE"):
        read(TEXT.encode("utf-16")[:-1])


@pytest.mark.parametrize("kind", PACK)
def test_a_small_file_of_much_text_takes_bounded_memory(kind):
    data = PACK[kind](bytes(200 * 2**20))
    assert len(data) < 2**20
    tracemalloc.start()
    sizes = [len(part or b"") for part in text_of(iter([data]), "x", any_bytes=True)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == 200 * 2**20
    assert max(sizes) <= 2**23
    assert peak < 2**25


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"PK\x03\x04rest of it all", "zip"), (b"%PDF-1.7 and so on", "PDF"),
        (b"\x7fELF\x02\x01\x01 program", "program"),
        (gzip.compress(b"PK\x03\x04inside of gzip", mtime=0), "zip"),
    ],
)  # fmt: skip
def test_well_known_files_that_are_not_text_are_named(data, kind):
    with pytest.raises(DataError, match=kind):
        read(data)
    assert read(data, any_bytes=True)


def test_a_live_text_is_passed_on_as_soon_as_its_format_is_clear():
    def arriving(*portions):
        for portion in portions:
            seen.append(portion)
            yield portion

    for portions, first in [
        ((b"h", None, b"i\n", b"later"), b"h"),
        ((b"B", None, b"a", b"later"), b"Ba"),
        ((b"\x1f", None, gzip.compress(b"hi", mtime=0)[1:]), b"hi"),
        ((b'{"text":', None, b'"hi"}\n', b'{"text": "later"}\n'), b"hi\n"),
    ]:
        seen = []
        text = text_of(arriving(*portions), "x")
        got = next(part for part in text if part is not None)
        assert got == first
        assert seen[-1] != b"later"
        text = text_of(arriving(*portions), "x")
        assert None in list(text)


@pytest.mark.parametrize("portion", [1, 100, 5000])
def test_blank_lines_at_the_start_are_held_back_briefly(portion):
    given = []

    def arriving():
        while len(given) * portion < 100_000:
            given.append(b"\n" * portion)
            yield given[-1]
        yield b'{"text": "not JSON lines"}\n'

    text = text_of(arriving(), "x")
    first = next(text)
    assert len(given) * portion <= max(600, portion)
    assert first + b"".join(text) == b"\n" * 100_000 + b'{"text": "not JSON lines"}\n'


def test_some_blank_lines_before_json_lines():
    for blanks in (b"\n", b" \n" * 200):
        assert read(blanks + json_lines()) == JOINED.encode()
        assert read(blanks + json_lines(), range(len(blanks) + 20)) == JOINED.encode()
    assert b"".join(text_of(iter([b"\n" * 5000, json_lines()]), "x", ["text"])) == JOINED.encode()
    for n in (511, 512, 513):
        assert is_plain(b" " * n + b"a", "x")
        assert is_plain(b" " * n + b"{", "x") == (n > 511)


@pytest.mark.parametrize("size", [2**16, 2**26])
def test_a_json_line_has_a_maximum_size(size):
    def portions(*lines):
        data = b"\n".join(lines)
        return iter([data[start : start + size] for start in range(0, len(data), size)])

    line = b'{"text": "%s"}' % (b"a" * (2**24 - 12))
    assert sum(map(len, text_of(portions(line), "x"))) == 2**24 - 11
    longer = line.replace(b": ", b":  ")
    for number, lines in ((1, [longer]), (2, [b'{"text": "b"}', longer])):
        with pytest.raises(DataError, match=rf"\b{number}\b.*\b16\b"):
            list(text_of(portions(*lines, b"{}"), "x"))
    other = longer.replace(b"text", b"code")
    assert b"".join(text_of(portions(other, b"{}"), "x")) == other + b"\n{}"


def test_the_first_bytes_of_a_stream_are_not_utf16():
    for encoding in ("utf-16-le", "utf-16-be"):
        text = ("هذا كتاب جديد في المكتبة\n" * 3).encode(encoding)
        with pytest.raises(DataError, match="UTF-16") as error:
            list(with_notice_of_bytes(iter([text]), "x", print))
        assert encoding in error.value.remedy


def test_the_first_line_that_is_not_utf8_and_the_first_with_nul_are_named_once():
    good = "漢".encode()
    for bad, line in ((b"abc\nd\xff\n\xff\n", 2), (b"\xe6b\n", 1), (b"a\n\n" + good + b"\n\xe6\n", 4)):
        for size in (1, 3, 100):
            said = []
            cut = [bad[start : start + size] for start in range(0, len(bad), size)]
            assert b"".join(with_notice_of_bytes(iter(cut), "x", said.append)) == bad
            assert len(said) == 1
            assert said[0].startswith(f"line {line} of x ")
            with_nul = [*cut, b"a\n\0", b"\0\n"]
            said.clear()
            assert b"".join(with_notice_of_bytes(iter(with_nul), "x", said.append)) == b"".join(with_nul)
            assert len(said) == 2
            nul_line = with_nul[-2].count(b"\n") + bad.count(b"\n") + 1
            assert said[1].startswith(f"line {nul_line} of x ")
            assert "NUL" in said[1]


def test_files_and_standard_input_of_every_format_are_the_same_corpus(tmp_path: Path):
    for name, data in SAME.items():
        path = tmp_path / name
        path.write_bytes(data)
        with standard_input(path):
            piped = open_corpus(["-"])
        corpus = open_corpus([path])
        text = TEXT.encode().replace(b"\r\n", b"\n")
        assert b"".join(corpus.read()) == b"".join(piped.read()) == text
        assert corpus.facts.sha256 == piped.facts.sha256
        assert corpus.facts.crlf == piped.facts.crlf == (40,)
        assert b"".join(corpus.read(100, 200)) == text[100:200]
        assert b"".join(open_corpus([path], reading=InputFormat(binary=True)).read()) == data


def test_every_division_of_a_text_reads_cr_lf_as_lf():
    for text in map(bytes, itertools.product(b"a\r\n", repeat=5)):
        expected = text.replace(b"\r\n", b"\n")
        for cuts in itertools.product((0, 1), repeat=4):
            edges = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), 5]
            line_ends = LineEnds()
            parts = [line_ends.feed(text[a:b]) + line_ends.feed(b"") for a, b in itertools.pairwise(edges)]
            parts.append(line_ends.feed(b"", final=True))
            assert (b"".join(parts), line_ends.replaced) == (expected, text.count(b"\r\n"))


def lines_of(text: bytes) -> bytes:
    """A short text with LF for each CR LF, or for each CR if no line ends otherwise."""
    return text.replace(b"\r\n", b"\n") if b"\n" in text else text.replace(b"\r", b"\n")


@given(st.text("a\r\n"), st.text("\r\n"), st.data())
def test_any_part_of_a_corpus_is_that_of_its_text(first, second, data):
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("xlcli.text.sources.BLOCK", 4),
        patch("xlcli.text.corpus.BLOCK", 4),
    ):
        files = [Path(folder, name) for name in "ab"]
        for file, text in zip(files, (first, second), strict=True):
            file.write_bytes(text.encode() + b"a" * 600)
        corpus = open_corpus(files)
        text = b"".join(lines_of(file.read_bytes()) for file in files)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        assert b"".join(corpus.read(start, stop)) == text[start:stop]
        assert corpus.facts.crlf == (first.count("\r\n"), second.count("\r\n"))
        n_mac = sum("\r" in text and "\n" not in text for text in (first, second))
        assert len(list(corpus.notices())) == any(corpus.facts.crlf) + n_mac
        binary = open_corpus(files, reading=InputFormat(binary=True))
        assert b"".join(binary.read()) == b"".join(file.read_bytes() for file in files)
        assert not any(binary.facts.crlf)


def test_line_ends_of_documents_are_read_as_lf(tmp_path: Path):
    texts = ["one\r\ntwo\r", "\nthree", "\r\n"]
    (tmp_path / "lines").write_text("".join(json.dumps({"text": text}) + "\r\n" for text in texts), newline="")
    parquet.write_table(pa.table({"text": texts}), tmp_path / "table")
    for name in ("lines", "table"):
        corpus = open_corpus([tmp_path / name])
        assert b"".join(corpus.read()) == b"one\ntwo\n\nthree\n\n"
        assert list(corpus.facts.documents) == [0, 8, 15]


def test_texts_of_parquet_files(tmp_path: Path):
    path = tmp_path / "table"
    parquet.write_table(pa.table({"id": range(5), "text": DOCUMENTS, "title": list("abcde")}), path)
    assert b"".join(open_corpus([path]).read()) == JOINED.encode()
    with standard_input(path):
        assert b"".join(open_corpus(["-"]).read()) == JOINED.encode()
    assert b"".join(open_corpus([path], reading=InputFormat(text_fields=("title",))).read()) == b"a\nb\nc\nd\ne\n"
    with pytest.raises(DataError, match="'body'") as caught:
        open_corpus([path], reading=InputFormat(text_fields=("body",))).facts  # noqa: B018
    assert "text, title" in caught.value.remedy
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="Parquet"):
        open_corpus([path]).facts  # noqa: B018


def test_a_parquet_file_with_text_that_is_not_utf8_is_damaged(tmp_path: Path):
    invalid = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": invalid}), tmp_path / "table")
    with pytest.raises(DataError, match="utf-8"):
        open_corpus([tmp_path / "table"]).facts  # noqa: B018


def test_text_that_is_not_text_is_refused_unless_it_is_meant(tmp_path: Path):
    for data, message in [(b"a\0b", "NUL"), (b"Z\xfcrich", "UTF-8"), (b"a\xe6", "UTF-8")]:
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(DataError, match=message) as caught:
            open_corpus([path]).facts  # noqa: B018
        assert "--binary" in caught.value.remedy
        for reading in (InputFormat(binary=True), InputFormat(any_bytes=True)):
            assert b"".join(open_corpus([path], reading=reading).read()) == data


@pytest.mark.parametrize(("files", "is_cut"), [([b"a\xe6\xbc"], True), ([b"a\xc3", b"b"], True), ([b"a\xc3b"], False)])
def test_a_text_that_ends_inside_a_character_is_told_from_another_encoding(tmp_path: Path, files, is_cut: bool):
    paths = [tmp_path / str(i) for i in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    place = "last line" if is_cut else r"\b1\b"
    with pytest.raises(DataError, match=f"{paths[0]} .*{place}") as caught:
        open_corpus(paths).facts  # noqa: B018
    assert ("iconv" in caught.value.remedy) == (not is_cut)


def test_a_file_given_twice_is_read_twice(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    corpus = open_corpus([tmp_path / "a", tmp_path, tmp_path / "b"])
    assert b"".join(corpus.read()) == b"aabb"


def test_every_compression_has_a_decompressor():
    assert set(FRAMES) == set(PACK)
