"""Input of every format: the same score from a file and from standard input, and refusals of data that is no text."""

import bz2
import gzip
import json
import lzma
import math
import os
import re
from pathlib import Path

import pyarrow
import pytest
import zstandard
from corpora import open_corpus
from programs import TEXT
from pyarrow import parquet

FORMATS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.compress,
    "utf-16": lambda text: text.decode().encode("utf-16"),
    "json lines": lambda text: b"".join(
        json.dumps({"text": line}).encode() + b"\n" for line in text.decode().splitlines()
    ),
    "json array": lambda text: json.dumps([{"text": line} for line in text.decode().splitlines()], indent=1).encode(),
}


@pytest.fixture
def on_stdin():
    """Puts a file on standard input of this process."""
    saved = os.dup(0)

    def on_stdin(path):
        descriptor = os.open(path, os.O_RDONLY)
        os.dup2(descriptor, 0)
        os.close(descriptor)

    yield on_stdin
    os.dup2(saved, 0)
    os.close(saved)


def total(done):
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_every_format_has_the_score_of_its_text(run, model, on_stdin, line_end):
    text = (TEXT + "Zürich, 漢字\n".encode()).replace(b"\n", line_end) * 3
    size = len(text.replace(b"\r\n", b"\n"))
    scores, streams, plans, texts = set(), {}, set(), set()
    for name, pack in FORMATS.items():
        path = Path(name.replace(" ", "-"))
        path.write_bytes(pack(text))
        for source in (path, "-"):
            on_stdin(path)
            score = total(run("eval", source, "-m", model, "--json", "--threads", "1"))
            scores.add((score["bytes"], score["nats"]))
            on_stdin(path)
            streamed = total(run("stream", source, "-m", model, "--json", "--emit", "stats", "--threads", "1"))
            assert streams.setdefault(name, streamed["bits"]) == streamed["bits"]
            assert streamed["bytes"] == size
            assert streamed["crlf"] == score["crlf"] == (0 if "json" in name else text.count(b"\r\n"))
            on_stdin(path)
            plan = total(run("train", source, "--dry-run", "--json", "--preset", "tiny"))
            plans.add((plan["train_bytes"], plan["valid_bytes"]))
            on_stdin(path)
            texts.add(open_corpus([source]).facts.sha256)
    assert len(scores) == len(plans) == len(texts) == 1
    # Portions of other sizes make calls of other lengths, which may change the last bit.
    assert list(streams.values()) == pytest.approx([streams["plain"]] * len(FORMATS), rel=1e-6)
    assert next(iter(scores))[0] == size


LATIN_1 = "Zürich".encode("latin-1")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"PK\x03\x04 a zip archive", "zip"),
        (b"NUL\0NUL", "NUL"),
        (LATIN_1, r"UTF-8.*\b1\b"),
        (gzip.compress(TEXT, mtime=0)[:-4], "gzip"),
    ],
)
def test_data_that_is_no_text_is_refused(run, data, reason):
    Path("data").write_bytes(data)
    commands = [("eval", "data", "-m", "books"), ("stream", "data", "-m", "books"), ("train", "data")]
    if reason == "NUL" or data == LATIN_1:  # a stream scores such bytes and goes on
        del commands[1]
    for arguments in commands:
        done = run(*arguments)
        assert done.code == 3
        assert not done.out or (arguments[0], data[:2]) == ("stream", b"\x1f\x8b")
        assert re.search(rf"\bdata\b.*{reason}", done.err)
        assert "gzip -t" in done.err or "--binary" in done.err
        assert run(*arguments, "--binary", *(["--dry-run"] if arguments[0] == "train" else [])).code == 0


def test_a_text_field_has_a_name(run, model):
    Path("lines").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert total(run("eval", "lines", "-m", model, "--json"))["bytes"] == 32
    assert total(run("eval", "lines", "-m", model, "--json", "--text-field", "body"))["bytes"] == 8
    assert run("stream", "lines", "-m", model, "--set=stream.text_field=body").out.endswith(b"two\n")
    done = run("eval", "lines", "-m", model, "--text-field", "title")
    assert (done.code, "'title'" in done.err) == (3, True)
    for command in ("eval", "stream", "train"):
        assert run(command, "lines", "--text-field", "body", "--binary").code == 2


def test_documents_are_scored_as_if_each_were_alone_from_any_source(run, model, on_stdin):
    texts = ["The first one.\nIts second line.", "Zürich", "a third, longer document " * 9]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\r\n" for text in texts)
    Path("a.jsonl").write_bytes(lines)
    Path("a.jsonl.zst").write_bytes(zstandard.compress(lines))
    parquet.write_table(pyarrow.table({"text": texts}), "a.parquet")
    nats = 0.0
    for i, text in enumerate(texts):
        Path(f"{i}.txt").write_text(f"{text}\n")
        nats += total(run("eval", f"{i}.txt", "-m", model, "--json"))["nats"]
    scores, streams = set(), set()
    options = ("-m", model, "--json", "--threads", "1", "--reset-on-document")
    for path in (Path("a.jsonl"), Path("a.jsonl.zst"), Path("a.parquet")):
        for source in (path, "-"):
            on_stdin(path)
            score = total(run("eval", source, *options))
            scores.add((score["documents"], score["nats"]))
            on_stdin(path)
            streams.add(total(run("stream", source, *options, "--emit", "stats"))["bits"])
    assert len(scores) == len(streams) == 1
    assert next(iter(scores)) == (3, pytest.approx(nats, rel=1e-6))
    assert next(iter(streams)) * math.log(2) == pytest.approx(nats, rel=1e-6)
    shown = run("eval", "0.txt", "1.txt", "2.txt", "-m", model, "--reset-on-document").out.decode()
    assert "tokens in 3 documents, each scored alone" in " ".join(shown.split())
    assert total(run("eval", "a.jsonl", "-m", model, "--json"))["documents"] == 1


def test_a_stream_of_documents_is_cut_and_resumed(run, model):
    lines = [json.dumps({"text": f"document {i}, which is {'very ' * i}long"}) + "\n" for i in range(6)]
    Path("whole").write_text("".join(lines))
    options = ("-m", model, "--json", "--threads", "1", "--reset-on-document", "--emit", "tokens")
    whole = run("stream", "whole", *options).out
    for name, part in (("first", lines[:4]), ("second", lines[4:])):
        Path(name).write_text("".join(part))
    first = run("stream", "first", *options, "--state-out", "memory.state").out
    second = run("stream", "second", *options, "--state-in", "memory.state").out
    assert first + second == whole


def test_a_parquet_file_in_a_pipe_is_explained(run, model):
    parquet.write_table(pyarrow.table({"text": ["a text"]}), "a.parquet")
    ends = os.pipe()
    os.write(ends[1], Path("a.parquet").read_bytes())
    os.close(ends[1])
    saved = os.dup(0)
    os.dup2(ends[0], 0)
    try:
        done = run("stream", "-m", model)
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(ends[0])
    assert done.code == 3
    assert "Parquet" in done.err


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("command", ["eval", "stream", "train"])
def test_a_model_or_a_misspelled_file_as_text(command, run, model):
    Path("corpus.txt").write_bytes(b"a text")
    done = run(command, "corpsu.txt")
    assert done.code == 3
    assert re.search(r"\bcorpsu\.txt\b.*\n.*\bcorpus\.txt\b", done.err)
    for name in ("tiny", "models/tiny"):
        done = run(command, name)
        typed = f"train FILE --init {name}" if command == "train" else f"{command} -m {name}"
        assert done.code == 3
        assert f"xlcli {typed}" in done.err


def test_json_lines_with_another_key_are_reported(run, model):
    Path("b.jsonl").write_bytes(b'{"id": "x1", "body": "a longer text"}\n' * 400)
    said = "--text-field body"
    tiny = ("--tokenizer", "bytes", "--dry-run")
    for words in (("eval", "b.jsonl"), ("stream", "b.jsonl", "--emit", "none"), ("train", "b.jsonl", *tiny)):
        done = run(*words)
        assert done.code == 0, done.err
        assert done.err.count(said) == 1, words
        done = run(*words, "--text-field", "body")
        assert done.code == 0, done.err
        assert "--text-field" not in done.err


@pytest.mark.parametrize("line", [b'{"text": "a"}', b'{"text": "{\\"body\\": \\"a\\"}"}', b'{"n": 1}', b"{", b'["a"]'])
def test_other_texts_are_not_taken_for_json_lines(line, run, model):
    Path("a.txt").write_bytes(line + b"\n")
    for words in (("eval", "a.txt"), ("stream", "a.txt")):
        assert "--text-field" not in run(*words).err


def test_numbers_of_documents_are_those_of_rows(run, model):
    rows = [{"t": "", "n": 1}, {"t": "The dog.", "n": 2}, {"t": None, "n": 3}, {"t": "A fox", "n": 4}, {"n": 5}]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("b.csv").write_text("t,n\n,1\nThe dog.,2\n,3\nA fox,4\n,5\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), "c.parquet")
    options = ("-m", model, "--text-field", "t", "--reset-on-document", "--threads", "1")
    for name in ("a.jsonl", "b.csv", "c.parquet"):
        done = run("eval", name, *options, "--words", "w.jsonl")
        assert (done.code, done.err.count("left out: 3")) == (0, 1), done.err
        found = [json.loads(line) for line in Path("w.jsonl").read_text().splitlines()]
        wanted = [("The", 2), ("dog.", 2), ("A", 4), ("fox", 4)]
        assert [(each["word"], each["document"]) for each in found] == wanted
        assert [each["document"] for each in found] == [int(each["n"]) for each in found]
        done = run("stream", name, *options, "--emit", "words", "--json")
        streamed = [json.loads(line) for line in done.out.splitlines()]
        assert [(each["word"], each["document"], int(each["n"])) for each in streamed] == [(w, n, n) for w, n in wanted]
        assert done.err.count("rows skipped") == 2  # the first at once, the others at the end
        run("eval", name, *options, "--per-token", "p.jsonl")
        tokens = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
        assert {int(each["n"]) for each in tokens} == {2, 4}


def test_columns_of_parquet_group_rows_and_pairs(run, model):
    rows = [
        {"c": "The", "t": f"{word}.", "g": i // 2, "correct": i % 2 == 0} for i, word in enumerate(["dog", "x"] * 2)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (("--text-field", "c", "--score-field", "t", "--by", "g"), ("--pairs", "c,t", "--by", "g")):
        found = [run("eval", name, "-m", model, *words, "--words", "-", "--json") for name in ("a.parquet", "a.jsonl")]
        assert [done.code for done in found] == [0, 0], found[0].err
        lines = [[line for line in done.out.splitlines() if b'"g"' in line] for done in found]
        assert lines[0] == lines[1] != []


@pytest.mark.parametrize("name", ["p.json", "p.csv", "p.tsv.gz", "p.parquet", "p.jsonl"])
def test_prompts_are_read_from_what_texts_are_read_from(run, model, name):
    rows = [{"prompt": "The ", "id": "1"}, {"prompt": "A fox", "id": "2"}]
    tables = {sep: f"id{sep}prompt\n1{sep}The \n2{sep}A fox\n".encode() for sep in ",\t"}
    parquet.write_table(pyarrow.Table.from_pylist(rows), "p.parquet")
    data = {
        "p.json": json.dumps(rows, indent=1).encode(),
        "p.csv": tables[","],
        "p.tsv.gz": gzip.compress(tables["\t"]),
        "p.parquet": Path("p.parquet").read_bytes(),
        "p.jsonl": b"# two\n" + b"".join(b"\x1e" + json.dumps(row).encode() + b"\n" for row in rows),
    }
    Path(name).write_bytes(data[name])
    done = run("generate", "-m", model, "--prompts", name, "-n", "2", "--seed", "1")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [(each["prompt"], each["id"]) for each in found] == [("The ", "1"), ("A fox", "2")], done.err


def test_a_pipe_goes_on_where_a_file_is_refused(run, model, on_stdin):
    lines = ['{"M": "the first"}', '{"M": [27, 91, 109, 104, 105]}', '{"M": null}', '{"M": "cut', '{"M": "the last"}']
    Path("in").write_text("\n".join(lines))
    on_stdin("in")
    done = run("stream", "--text-field", "M", "-m", model, "--json")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [(each["M"], each["line"]) for each in found] == [("the first", 1), ("\x1b[mhi", 2), ("the last", 5)]
    assert done.code == 0
    assert len(re.findall(r"line [34] of standard input", done.err)) == 2
    done = run("eval", "in", "--text-field", "M", "-m", model)
    assert (done.code, "line 4 of in" in done.err) == (3, True)
