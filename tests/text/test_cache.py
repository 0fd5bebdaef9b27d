"""The token cache bounds itself, and disturbs no process that uses a file."""

import os
from pathlib import Path

import numpy as np
from corpora import drain, open_corpus

from xlcli.files import cache_folder
from xlcli.text import tokens as cache
from xlcli.text.corpus import Part
from xlcli.text.tokenizers import TOKENIZERS
from xlcli.text.tokens import token_file


def build(text, name="text.txt"):
    """Tokens of a text by the tokenizer of bytes."""
    Path(name).write_bytes(text)
    corpus = open_corpus([name])
    return drain(token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS["bytes"].train([])))


def names():
    return {path.name for path in cache_folder().iterdir()}


def aged(seconds, size=100, name=None):
    """A token file, or an unfinished one, that was used so long ago."""
    path = cache_folder() / (name or f"{os.urandom(20).hex()}.tokens")
    path.write_bytes(bytes(size))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def prune(monkeypatch, max_bytes):
    """Removes files beyond this total."""
    monkeypatch.setattr(cache, "MAX_BYTES", max_bytes)
    cache.prune(cache_folder())


def test_a_file_that_is_removed_can_be_read_by_its_users(monkeypatch):
    tokens = build(b"some text\n")
    newest = aged(-100)
    prune(monkeypatch, 0)
    assert names() == {newest.name}
    assert bytes(tokens.ids.astype(np.uint8)) == b"some text\n"


def test_the_least_recently_used_files_go_first(monkeypatch):
    _, middle, recent = aged(300), aged(200), aged(100)
    prune(monkeypatch, 250)
    assert names() == {middle.name, recent.name}
    for max_bytes in (199, 0):
        prune(monkeypatch, max_bytes)
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
    orphan = aged(2 * 86400, 1000, f".tmp-xlcli-{'0' * 16}.tokens")
    unfinished = aged(3600, 1000, f".tmp-xlcli-{'1' * 16}.tokens")
    mine = [aged(99 * 86400, 1, name) for name in ("notes.txt", "old.tokens", ".tmp-notes", ".tmp-xlcli-x.tokens")]
    made = build(b"new text")
    assert names() == {recent.name, unfinished.name, made.path.name, *(path.name for path in mine)}
    assert not any(path.exists() for path in (old, orphan))


def test_the_bound_is_a_tenth_of_a_small_disk(monkeypatch):
    oldest, newest = aged(300, 600), aged(200, 600)
    for free, left in ((10_801, {oldest, newest}), (10_799, {newest})):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        cache.prune(cache_folder())
        assert names() == {path.name for path in left}


def test_a_builder_keeps_its_unfinished_file(monkeypatch):
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    Path("long.txt").write_bytes(b"word " * 400_000)
    corpus = open_corpus(["long.txt"])
    work = token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS["bytes"].train([]))
    next(work)
    prune(monkeypatch, 0)
    assert len(names()) == 1
    assert len(drain(work)) == 2_000_000
