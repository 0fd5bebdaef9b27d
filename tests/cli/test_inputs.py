"""Input of every format: the same score from a file and from standard input, and refusals of data that is no text."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pytest
import zstandard
from programs import TEXT

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
    formats = {name: pack for name, pack in FORMATS.items() if line_end == b"\n" or name != "json lines"}
    scores, streams, plans = set(), {}, set()
    for name, pack in formats.items():
        path = Path(name.replace(" ", "-"))
        path.write_bytes(pack(text))
        for source in (path, "-"):
            on_stdin(path)
            score = total(run("eval", source, "-m", model, "--json", "--threads", "1"))
            scores.add((score["bytes"], score["nats"]))
            on_stdin(path)
            streamed = total(run("stream", source, "-m", model, "--json", "--emit", "stats", "--threads", "1"))
            assert streams.setdefault(name, streamed["bits"]) == streamed["bits"]
            assert streamed["bytes"] == len(text)
            on_stdin(path)
            plan = total(run("train", source, "--dry-run", "--json", "--preset", "tiny"))
            plans.add((plan["train_bytes"], plan["valid_bytes"]))
    assert len(scores) == len(plans) == 1
    # Portions of other sizes make calls of other lengths, which may change the last bit.
    assert list(streams.values()) == pytest.approx([streams["plain"]] * len(formats), rel=1e-6)
    assert next(iter(scores))[0] == len(text)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"PK\x03\x04 a zip archive", "is a zip archive or an office document, not text"),
        (b"NUL\0NUL", "holds NUL bytes, not text"),
        ("Zürich".encode("latin-1"), "is not UTF-8: the byte at offset 1 is invalid"),
        (gzip.compress(TEXT)[:-4], "ends in the middle of its gzip data"),
    ],
)
def test_data_that_is_no_text_is_refused(run, data, reason):
    Path("data").write_bytes(data)
    for arguments in (("eval", "data", "-m", "books"), ("stream", "data", "-m", "books"), ("train", "data")):
        done = run(*arguments)
        assert done.code == 3
        assert not done.out or (arguments[0], data[:2]) == ("stream", b"\x1f\x8b")
        assert f"data {reason}" in " ".join(done.err.split())
        assert "Check it with: gzip -t" in done.err or "--binary" in done.err
        assert run(*arguments, "--binary", *(["--dry-run"] if arguments[0] == "train" else [])).code == 0


def test_a_text_field_has_a_name(run, model):
    Path("lines").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert total(run("eval", "lines", "-m", model, "--json"))["bytes"] == 32
    assert total(run("eval", "lines", "-m", model, "--json", "--text-field", "body"))["bytes"] == 8
    assert run("stream", "lines", "-m", model, "--text-field", "body").out.endswith(b"two\n")
    done = run("eval", "lines", "-m", model, "--text-field", "title")
    assert (done.code, "line 1 of lines is not a JSON object with a text in 'title'" in done.err) == (3, True)
