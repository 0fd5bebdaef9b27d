"""The token cache bounds itself, and disturbs no process that uses a file."""

import os
from pathlib import Path

import numpy as np
import pytest
from corpora import drain, open_corpus
from damages import damaged

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
    build(b"first text")
    [first] = cache_folder().iterdir()
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
    left = cache_folder() / f".tmp-xlcli-{'2' * 16}"
    (left / "code").mkdir(parents=True)
    os.utime(left, (1, 1))
    mine = [aged(99 * 86400, 1, name) for name in ("notes.txt", "old.tokens", ".tmp-notes", ".tmp-xlcli-x.tokens")]
    before = names()
    build(b"new text")
    [made] = names() - before
    assert names() == {recent.name, unfinished.name, made, *(path.name for path in mine)}
    assert not any(path.exists() for path in (old, orphan, left))


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


def everything(tokens):
    """All that is known of tokens."""
    documents = None if tokens.documents is None else tokens.documents.tolist()
    return tokens.ids.tolist(), tokens.sizes(slice(None)).tolist(), tokens.n_bytes, documents


@pytest.fixture(params=["bytes", "sentencepiece", "words"])
def tokenize(request):
    """Function that gives everything known of the tokens of a text by lines."""
    text = b"".join(b"line %d of a text of some words\n" % i for i in range(400))
    tokenizer = TOKENIZERS[request.param].train([text], 300)

    def tokenize(data):
        Path("text.jsonl").write_bytes(b"".join(b'{"text": "%b"}\n' % line for line in data.splitlines()))
        corpus = open_corpus(["text.jsonl"])
        return everything(drain(token_file(Part(corpus, 0, corpus.n_bytes), tokenizer, by_document=True)))

    return lambda data=text: tokenize(data)


def test_damaged_files_are_written_anew(tokenize):
    tokenize(b"another text\nof two lines\n")
    [other] = cache_folder().iterdir()
    tokens = tokenize()
    [path] = set(cache_folder().iterdir()) - {other}
    data = path.read_bytes()
    for kind, content in damaged(data, other.read_bytes()):
        path.write_bytes(content)
        assert tokenize() == tokens, kind
        assert path.read_bytes() == data, kind
    assert len(names()) == 2


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("swap", ["folder", "pipe", "dangling", "loop", "link"])
def test_what_is_no_file_is_not_read(tokenize, swap, first):
    tokens = tokenize()
    [path] = cache_folder().iterdir()
    data = path.read_bytes()
    path.unlink()
    if swap == "folder":
        path.mkdir()
        (path / "file").touch()
    elif swap == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"dangling": "nothing", "loop": path.name, "link": Path("copy").absolute()}[swap])
        Path("copy").write_bytes(data if first else data[::-1])
    assert [tokenize(), tokenize()] == [tokens, tokens]
    if swap == "folder":
        assert [each.name for each in cache_folder().rglob("*")] == [path.name, "file"]
    else:
        assert path.read_bytes() == data
        assert names() == {path.name}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_a_file_that_cannot_be_read_is_written_anew(tokenize):
    tokens = tokenize()
    [path] = cache_folder().iterdir()
    path.chmod(0)
    assert tokenize() == tokens
    assert path.stat().st_mode & 0o400


def test_a_file_that_is_removed_as_soon_as_it_is_written_is_used(tokenize, monkeypatch):
    tokens = tokenize()
    [path] = cache_folder().iterdir()
    path.unlink()
    monkeypatch.setattr(cache, "prune", lambda folder: path.unlink())
    assert tokenize() == tokens
    assert names() == set()
