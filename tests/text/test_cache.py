"""The token cache says what it holds, bounds itself, and removes nothing that a process uses."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlcli.text import cache
from xlcli.text.corpus import open_corpus
from xlcli.text.heldout import Part
from xlcli.text.tokenizers.registry import train_tokenizer
from xlcli.text.tokens import token_file

SOURCE = Path(__file__).parents[2]


def build(text, name="text.txt"):
    """Tokens of a text by the tokenizer of bytes."""
    Path(name).write_bytes(text)
    corpus = open_corpus([name])
    work = token_file(Part(corpus, 0, corpus.n_bytes), train_tokenizer("bytes", []))
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def names():
    return {path.name for path in cache.cache_folder().iterdir()}


def aged(seconds, size=100, name=None):
    """A token file, or an unfinished one, that was used so long ago."""
    path = cache.cache_folder() / (name or f"{os.urandom(20).hex()}.tokens")
    path.write_bytes(b"xltoken3".ljust(size, b"\0"))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def test_an_entry_says_what_it_was_made_from():
    tokens = build(b"one two\n" * 9, "wörter.txt")
    (entry,) = cache.entries(cache.cache_folder())
    assert (entry.path, entry.bytes) == (tokens.path, tokens.path.stat().st_size)
    assert entry.in_use
    assert not entry.unfinished
    header = entry.header
    assert (header.n_tokens, header.n_bytes, header.tokenizer) == (72, 72, "bytes 256")
    assert header.text == str(Path("wörter.txt").absolute())
    assert 0 <= entry.age < 60


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "a\nb", ""])
def test_a_label_of_any_length_leaves_the_header_readable(text, tmp_path):
    header = cache.TokenHeader(2, 0, 7, 5, "words 9", text)
    (tmp_path / "file").write_bytes(cache.pack_header(header))
    with (tmp_path / "file").open("rb") as file:
        found = cache.read_header(file)
    assert found[:5] == header[:5]
    assert text.startswith(found.text)
    assert len(found.text) >= min(len(text), 200)


def test_a_file_in_use_stays_until_its_last_user_is_gone():
    tokens = build(b"some text\n")
    cache.prune(cache.cache_folder(), max_bytes=0, unused_seconds=0)
    assert names() == {tokens.path.name}
    part = tokens.ids[2:5]
    del tokens
    gc.collect()
    cache.prune(cache.cache_folder(), max_bytes=0, unused_seconds=0)
    assert len(names()) == 1, "a view of the ids is left"
    assert bytes(part.astype(np.uint8)) == b"me "
    del part
    gc.collect()
    (removed,) = cache.prune(cache.cache_folder(), max_bytes=0)
    assert names() == set()
    assert removed.header.n_tokens == 10


USER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache import build
tokens = build(b"text of another process", "other.txt")
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_that_uses_a_file_keeps_it():
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(Path(__file__).parent)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == b"ready\n"
        (entry,) = cache.entries(cache.cache_folder())
        assert entry.in_use
        assert cache.prune(cache.cache_folder(), max_bytes=0) == []
        child.kill()
        child.wait()
        assert len(cache.prune(cache.cache_folder(), max_bytes=0)) == 1


def test_the_least_recently_used_files_go_first():
    old, middle, recent = aged(300), aged(200), aged(100)
    cache.prune(cache.cache_folder(), max_bytes=250, unused_seconds=1e9)
    assert names() == {middle.name, recent.name}
    cache.prune(cache.cache_folder(), max_bytes=1000, unused_seconds=150)
    assert names() == {recent.name}
    assert not old.exists()


def test_reading_a_file_makes_it_recent():
    first = build(b"first text").path
    os.utime(first, (1, 1))
    aged(100)
    build(b"first text")
    assert cache.entries(cache.cache_folder())[-1].path == first


def test_a_new_file_prunes_the_cache(monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 5000)
    month, old, recent = aged(31 * 86400, 1), aged(3 * 86400, 4000), aged(2 * 86400, 4000)
    orphan = aged(5, 1000, f".tmp-xlcli-{'0' * 16}.tokens")
    mine = [aged(99 * 86400, 1, name) for name in ("notes.txt", "old.tokens", ".tmp-notes", ".tmp-xlcli-x.tokens")]
    made = build(b"new text")
    assert names() == {recent.name, made.path.name, *(path.name for path in mine)}
    assert not any(path.exists() for path in (month, old, orphan))


@pytest.mark.parametrize("content", [b"", b"mine" * 200, b"x" * 9 + b"xltoken3".ljust(600)])
def test_files_of_the_user_with_the_name_of_a_token_file_stay(content):
    mine = [f"{'a' * 40}.tokens", f".tmp-1-2-{'b' * 40}.tokens", f".tmp-xlcli-{'c' * 16}.tokens"]
    for name in mine:
        (cache.cache_folder() / name).write_bytes(content)
        os.utime(cache.cache_folder() / name, (1, 1))
    assert cache.entries(cache.cache_folder()) == []
    assert cache.prune(cache.cache_folder(), max_bytes=0, unused_seconds=0) == []
    build(b"new text")
    assert {*mine} < names()


def test_the_bound_is_the_smaller_of_ten_gigabytes_and_a_tenth_of_the_disk(monkeypatch):
    for free, bound in ((10**9, 10**8 + 10), (10**12, 10**10)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        assert cache.limit(Path(), 100) == bound


def test_a_builder_keeps_its_unfinished_file(monkeypatch):
    monkeypatch.setattr("xlcli.events.progress.PROGRESS_INTERVAL", 0)
    Path("long.txt").write_bytes(b"word " * 400_000)
    corpus = open_corpus(["long.txt"])
    work = token_file(Part(corpus, 0, corpus.n_bytes), train_tokenizer("bytes", []))
    next(work)
    (entry,) = cache.entries(cache.cache_folder())
    assert entry.unfinished
    assert entry.in_use
    assert cache.prune(cache.cache_folder(), max_bytes=0) == []
    for _ in work:
        pass
    (entry,) = cache.entries(cache.cache_folder())
    assert entry.header.n_tokens == 2_000_000
