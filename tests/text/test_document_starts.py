"""Documents: where they begin in the text of files, in its parts, and in its tokens."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import drain, open_corpus
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from xlcli.files import cache_folder
from xlcli.text.corpus import Corpus, Part, split
from xlcli.text.documents import Document
from xlcli.text.formats import text_of
from xlcli.text.pretokenize import Splitter, whole_words
from xlcli.text.sources import BLOCK, InputFormat, open_source
from xlcli.text.tokenizers import TOKENIZERS
from xlcli.text.tokens import token_file

TEXTS = ["one two\nthree", "four", "", "fünf  sechs\n", "seven eight nine"]
WORDS = st.text("ab \n", min_size=1, max_size=40)


def json_lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def contents(corpus: Corpus, start: int = 0, stop: int | None = None) -> list[bytes]:
    """The documents of a part of a corpus."""
    part = Part(corpus, start, corpus.n_bytes if stop is None else stop)
    data = b"".join(part.read())
    return [data[a:b] for a, b in itertools.pairwise([*part.documents, len(data)])]


def test_every_file_and_every_text_in_it_is_a_document(tmp_path: Path) -> None:
    lines = [f"{text.rstrip()}\n".encode() for text in TEXTS if text]
    files = {
        "a.txt": b"plain, without a line end",
        "b.jsonl": json_lines(TEXTS),
        "c.gz": gzip.compress(json_lines(TEXTS)),
        "d.txt": b"plain\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "e.parquet")
    assert contents(open_corpus([tmp_path])) == [files["a.txt"], *lines, *lines, files["d.txt"], *lines]
    binary = open_corpus([tmp_path / "b.jsonl", tmp_path / "c.gz"], reading=InputFormat(binary=True))
    assert contents(binary) == [files["b.jsonl"], files["c.gz"]]
    (tmp_path / "empty").touch()
    paths = [tmp_path / name for name in ("empty", "d.txt", "empty", "d.txt", "empty")]
    assert contents(open_corpus(paths)) == [files["d.txt"]] * 2


def test_documents_of_any_size_across_blocks(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = ["x" * rng.choice([1, 5, 300_000, BLOCK - 1, BLOCK, 2 * BLOCK + 3]) + "\n" for _ in range(30)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    assert contents(open_corpus([tmp_path / "a.jsonl"])) == [text.encode() for text in texts]


def test_a_live_document_begins_with_its_own_portion() -> None:
    data = json_lines(TEXTS)
    for portions in ([data], [data[i : i + 1] for i in range(len(data))]):
        found = [part for part in text_of(iter(portions), "x") if part]
        assert all(isinstance(part, Document) for part in found)
        assert found == [f"{text.rstrip()}\n".encode() for text in TEXTS if text]
    assert not any(isinstance(part, Document) for part in text_of(iter([b"plain\n"]), "x"))


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(0, 200), st.integers(0, 200))
def test_documents_of_a_part_begin_with_it(texts: list[str], a: int, b: int) -> None:
    data = b"".join(text.encode() for text in texts)
    edges = [0, *itertools.accumulate(len(text) for text in texts)]
    start, stop = sorted((a % (len(data) + 1), b % (len(data) + 1)))
    path = Path("text")
    path.write_bytes(data)
    corpus = Corpus([open_source(path, InputFormat())], documents=edges[:-1])
    if start < stop:
        inside = [start, *(edge for edge in edges if start < edge < stop), stop]
        assert contents(corpus, start, stop) == [data[x:y] for x, y in itertools.pairwise(inside)]


def test_held_out_parts_are_whole_documents_if_one_begins_near(tmp_path: Path) -> None:
    texts = [f"first line {i}\nsecond line {i}\n" * 20 for i in range(100)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    corpus = open_corpus([tmp_path / "a.jsonl"])
    parts = drain(split(corpus, 0.1, 0.1, by_document=True))
    found = [contents(corpus, part.start, part.stop) for part in (parts.train, parts.valid, parts.test)]
    assert [*itertools.chain(*found)] == [text.encode() for text in texts]
    assert all(10 <= len(documents) <= 80 for documents in found)
    by_line = drain(split(corpus, 0.1, 0.1))
    assert contents(corpus, by_line.valid.start, by_line.valid.stop)[0] not in [text.encode() for text in texts]
    (tmp_path / "long.jsonl").write_bytes(json_lines(["a\n" * 10, "b c\n" * 200_000]))
    corpus = open_corpus([tmp_path / "long.jsonl"])
    assert drain(split(corpus, 0.1, 0.0, by_document=True)) == drain(split(corpus, 0.1, 0.0))


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 60))
def test_a_word_ends_with_its_document(texts: list[str], size: int, at_least: int) -> None:
    data = b"".join(text.encode() for text in texts)
    starts = [0, *itertools.accumulate(len(text) for text in texts)][:-1]
    portions = [data[i : i + size] for i in range(0, len(data), size)]
    found: list[bytes] = []
    for whole in whole_words(portions, at_least, starts):
        found += Splitter().split(whole)
    apart = [word for text in texts for word in Splitter().split(text.encode())]
    # Words of one call of the tokenizer are found again, so only ends of documents may differ from ends of words.
    assert b"".join(found) == data
    ends = {*itertools.accumulate(map(len, apart))}
    assert {*itertools.accumulate(map(len, found))} <= ends
    assert {start for start in starts if start} <= {*itertools.accumulate(map(len, found))}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_tokens_of_each_document_are_its_own(kind: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choices(["fox", "dog", "lazy", "x" * 3000, "ü"], k=rng.randrange(1, 9))) for _ in range(50)]
    paths = [tmp_path / f"{i:02}" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    corpus = open_corpus(paths)
    tokenizer = TOKENIZERS[kind].train(["".join(texts).encode()], 300)
    part = Part(corpus, 0, corpus.n_bytes)
    tokens = drain(token_file(part, tokenizer, by_document=True))
    assert tokens.documents is not None
    edges = [*tokens.documents.tolist(), len(tokens)]
    for (a, b), text in zip(itertools.pairwise(edges), texts, strict=True):
        assert tokens.ids[a:b].tolist() == tokenizer.encode(text.encode()).tolist()
        assert int(tokens.sizes(slice(a, b)).sum()) == len(text.encode())
    again = drain(token_file(part, tokenizer, by_document=True))
    assert again.documents is not None
    assert again.documents.tolist() == edges[:-1]
    assert len(list(cache_folder().iterdir())) == 1
    joined = drain(token_file(part, tokenizer))
    assert joined.documents is None
    assert len(list(cache_folder().iterdir())) == 2


def test_the_fingerprint_covers_where_documents_begin() -> None:
    Path("text").write_bytes(b"one\ntwo\n")
    whole, parted = (Corpus([open_source(Path("text"), InputFormat())], documents=starts) for starts in ([0], [0, 4]))
    parts = [Part(corpus, 0, corpus.n_bytes) for corpus in (whole, parted)]
    assert len({part.fingerprint(by_document=False) for part in parts}) == 1
    assert len({part.fingerprint(by_document=True) for part in parts}) == 2
