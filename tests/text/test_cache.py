"""The token cache bounds itself, and removes nothing that a process uses."""

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlcli.files import cache_folder
from xlcli.text import tokens as cache
from xlcli.text.corpus import Part, open_corpus
from xlcli.text.tokenizers import TOKENIZERS
from xlcli.text.tokens import token_file

SOURCE = Path(__file__).parents[2]


def build(text, name="text.txt"):
    """Tokens of a text by the tokenizer of bytes."""
    Path(name).write_bytes(text)
    corpus = open_corpus([name])
    return finish(token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS["bytes"].train([])))


def finish(work):
    """The tokens at the end of the work."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def names():
    return {path.name for path in cache_folder().iterdir()}


def aged(seconds, size=100, name=None):
    """A token file, or an unfinished one, that was used so long ago."""
    path = cache_folder() / (name or f"{os.urandom(20).hex()}.tokens")
    path.write_bytes(b"xltoken4".ljust(size, b"\0"))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def prune(monkeypatch, max_bytes):
    """Removes files beyond this total."""
    monkeypatch.setattr(cache, "MAX_BYTES", max_bytes)
    cache.prune(cache_folder())


def test_a_file_in_use_stays_until_its_last_user_is_gone(monkeypatch):
    tokens = build(b"some text\n")
    prune(monkeypatch, 0)
    assert names() == {tokens.path.name}
    part = tokens.ids[2:5]
    del tokens
    gc.collect()
    prune(monkeypatch, 0)
    assert len(names()) == 1, "a view of the ids is left"
    assert bytes(part.astype(np.uint8)) == b"me "
    del part
    gc.collect()
    prune(monkeypatch, 0)
    assert names() == set()


USER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache import build
tokens = build(b"text of another process", "other.txt")
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_that_uses_a_file_keeps_it(monkeypatch):
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(Path(__file__).parent)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == b"ready\n"
        prune(monkeypatch, 0)
        assert len(names()) == 1
        child.kill()
        child.wait()
        prune(monkeypatch, 0)
        assert names() == set()


def test_the_least_recently_used_files_go_first(monkeypatch):
    _, middle, recent = aged(300), aged(200), aged(100)
    prune(monkeypatch, 250)
    assert names() == {middle.name, recent.name}
    prune(monkeypatch, 199)
    assert names() == {recent.name}


def test_reading_a_file_makes_it_recent(monkeypatch):
    first = build(b"first text").path
    os.utime(first, (1, 1))
    aged(100, 1000)
    build(b"first text")
    prune(monkeypatch, 500)
    assert names() == {first.name}


def test_a_new_file_prunes_the_cache(monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 5000)
    old, recent = aged(3 * 86400, 4000), aged(2 * 86400, 4000)
    orphan = aged(5, 1000, f".tmp-xlcli-{'0' * 16}.tokens")
    mine = [aged(99 * 86400, 1, name) for name in ("notes.txt", "old.tokens", ".tmp-notes", ".tmp-xlcli-x.tokens")]
    made = build(b"new text")
    assert names() == {recent.name, made.path.name, *(path.name for path in mine)}
    assert not any(path.exists() for path in (old, orphan))


@pytest.mark.parametrize("content", [b"", b"mine" * 200, b"x" * 9 + b"xltoken3".ljust(600)])
def test_files_of_the_user_with_the_name_of_a_token_file_stay(content, monkeypatch):
    mine = [f"{'a' * 40}.tokens", f".tmp-1-2-{'b' * 40}.tokens", f".tmp-xlcli-{'c' * 16}.tokens"]
    for name in mine:
        (cache_folder() / name).write_bytes(content)
        os.utime(cache_folder() / name, (1, 1))
    prune(monkeypatch, 0)
    assert names() == {*mine}


def test_the_bound_is_a_tenth_of_a_small_disk(monkeypatch):
    oldest, newest = aged(300, 600), aged(200, 600)
    for free, left in ((10_801, {oldest, newest}), (10_799, {newest})):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        cache.prune(cache_folder())
        assert names() == {path.name for path in left}


def test_a_file_system_without_locks_keeps_what_was_used_lately(monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    aged(2 * 86400)
    made = build(b"new text")
    prune(monkeypatch, 0)
    assert names() == {made.path.name}


def test_a_builder_keeps_its_unfinished_file(monkeypatch):
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    Path("long.txt").write_bytes(b"word " * 400_000)
    corpus = open_corpus(["long.txt"])
    work = token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS["bytes"].train([]))
    next(work)
    prune(monkeypatch, 0)
    assert len(names()) == 1
    assert len(finish(work)) == 2_000_000
