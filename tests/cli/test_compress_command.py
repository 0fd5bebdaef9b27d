"""`compress` and `decompress` on files, pipes and mistakes."""

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from conftest import save_untrained

from xlcli.coding import WORD_TOKENS, End, FileReader, Frame, Header
from xlcli.coding.workflow import Predictions
from xlcli.config import OnlineConfig

TEXT = b"a line\nand another one\n\x00\xff\xfe"


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_untrained(Path("models/one"))
    Path("text").write_bytes(TEXT)


def test_a_file_is_restored_by_the_model_it_names(model, run):
    done = run("compress", "text", "--json", "--mem-len", "7", "--threads", "1")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    size = Path("text.xl").stat().st_size
    assert (result["bytes"], result["compressed_bytes"], result["out"]) == (len(TEXT), size, "text.xl")
    assert result["bits_per_byte"] == 8 * size / len(TEXT)
    save_untrained(Path("models/two"), dim=8)  # newer
    Path("text").unlink()
    done = run("decompress", "text.xl")
    assert done.code == 0, done.err
    assert Path("text").read_bytes() == TEXT
    assert str(len(TEXT)) in done.err


@pytest.mark.parametrize(
    ("text", "crlf"),
    [
        (b"a line\r\nand another one\r\n" * 9, True),
        (b"\r\r\nno end\r\r\n\rx", True),
        (b"a\r\nb\r", False),
        (b"both\r\nkinds\n", False),
        (b"lone\rCR", False),
    ],
)
def test_windows_line_ends_are_restored(text, crlf, model, run):
    Path("text").write_bytes(text)
    done = run("compress", "text", "--json", "--threads", "1")
    assert done.code == 0, done.err
    coded = json.loads(done.out)
    assert (coded["bytes"], coded["tokens"]) == (len(text), len(text) - crlf * text.count(b"\n"))
    assert FileReader([Path("text.xl").read_bytes()], "x").header().crlf == crlf
    done = run("decompress", "text.xl", "-o", "restored", "--json")
    assert (Path("restored").read_bytes(), json.loads(done.out)["bytes"]) == (text, len(text))


def test_pipes(model, run):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    go = f"{sys.executable} -m xlcli"
    done = subprocess.run(
        f"{go} compress - < text | {go} decompress -", shell=True, capture_output=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, TEXT), done.stderr


def test_a_model_that_lies_elsewhere_is_asked_for(model, run):
    Path("models/one").rename("elsewhere")
    assert run("compress", "text", "-m", "elsewhere").code == 0
    Path("deep").mkdir()
    Path("elsewhere").rename("deep/elsewhere")
    done = run("decompress", "text.xl", "-o", "back")
    assert (done.code, "-m" in done.err) == (3, True)
    assert run("decompress", "text.xl", "-o", "back", "-m", "deep/elsewhere").code == 0
    assert Path("back").read_bytes() == TEXT
    assert run("stream", "text", "-m", "deep/elsewhere", "--state", "state").code == 0
    Path("deep").rename("deeper")
    done = run("stream", "text", "--state", "state")
    assert (done.code, "-m" in done.err) == (3, True)


def test_nothing_is_overwritten_or_left_behind(model, run):
    assert run("compress", "text").code == 0
    for again in (("compress", "text"), ("decompress", "text.xl"), ("decompress", "text.xl", "-o", "text.xl")):
        done = run(*again)
        assert done.code == 2
        assert "--force" in done.err
    Path("other").write_bytes(TEXT)
    assert run("compress", "other", "-o", "text.xl").code == 2
    assert run("compress", "other", "-o", "text.xl", "--force").code == 0
    Path("other").unlink()
    Path("empty").touch()
    assert run("decompress", "text.xl", "-o", "empty").code == 0
    Path("empty").unlink()
    Path("text.xl").write_bytes(Path("text.xl").read_bytes()[:-1])
    done = run("decompress", "text.xl", "-o", "new")
    assert done.code == 3
    assert "early" in done.err
    assert sorted(path.name for path in Path().iterdir()) == ["models", "text", "text.xl"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["compress", "missing"], 3, "missing"),
        (["decompress", "text"], 2, "-o"),
        (["decompress", "text", "-o", "new"], 3, "compressed"),
        (["compress", "text", "-o", "models"], 2, "folder"),
        (["compress", "text", "-o", "-", "--json"], 2, "--json"),
        (["compress", "models/one"], 3, "text"),
    ],
)
def test_mistakes_are_said_in_a_sentence(model, run, arguments, code, said):
    done = run(*arguments)
    assert (done.code, done.out) == (code, b"")
    assert said in done.err


def test_a_model_of_another_training_is_refused(model, run):
    assert run("compress", "text").code == 0
    save_untrained(Path("models/two"), n_layers=1)
    done = run("decompress", "text.xl", "-m", "two", "-o", "new")
    assert done.code == 3
    assert re.search(r"\btwo\b.*\bone\b", done.err)


def test_settings_that_do_not_apply_to_the_model_are_those_of_another(model, run):
    header = Header(
        model="one",
        fingerprint="0" * 16,
        settings=OnlineConfig(n_steps=5),
        threads=1,
        device="cpu",
        dtype="float32",
        software="",
        check="",
    )
    Path("text.xl").write_bytes(header.encode())
    done = run("decompress", "text.xl", "-o", "new")
    assert done.code == 3
    assert "n_steps" in done.err


@pytest.fixture
def header(model, run, monkeypatch):
    """The header of a compressed text."""
    made = []
    encode = Header.encode
    monkeypatch.setattr(Header, "encode", lambda header: encode(made.append(header) or header))
    assert run("compress", "text", "--threads", "1").code == 0
    monkeypatch.undo()
    return made[0]


@pytest.mark.parametrize(("n_tokens", "limit"), [(2**14, 0), (WORD_TOKENS, WORD_TOKENS)])
def test_the_size_of_a_forged_file_limits_its_tokens(n_tokens, limit, header, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = []
    predict = Predictions.next
    monkeypatch.setattr(Predictions, "next", lambda self: read.append(1) or predict(self))
    words = bytes(4) if limit else b""
    sizes = struct.pack("<II", n_tokens, len(words) // 4)
    frame = sizes + struct.pack("<I", zlib.crc32(sizes + words)) + words
    Path("forged.xl").write_bytes(header.encode() + frame + End(n_tokens, bytes(32)).encode())
    done = run("decompress", "forged.xl")
    assert (done.code, len(read), Path("forged").exists()) == (3, limit, False)


def test_the_header_starts_no_more_threads_than_there_are_cpus(header, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("torch.set_num_threads", started.append)
    forged = header.model_copy(update={"threads": 1024})
    Path("forged.xl").write_bytes(forged.encode() + Frame(1, bytes(4)).encode() + End(1, bytes(32)).encode())
    done = run("decompress", "forged.xl")
    assert (done.code, started) == (3, [])
    assert "--threads 1024" in done.err
