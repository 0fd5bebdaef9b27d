"""Corpora: every kind of file, bounded memory, held-out parts, token files that are whole or absent."""

from __future__ import annotations

import gzip
import os
import random
import socket
import tracemalloc
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from corpora import open_corpus
from hypothesis import given
from hypothesis import strategies as st
from piped import standard_input

from xlcli.errors import DataError, ResourceError
from xlcli.events import Notice, Progress
from xlcli.files import cache_folder
from xlcli.text.corpus import LARGEST_DEFAULT, Corpus, Part, gather, split, warn_of_copies
from xlcli.text.sources import InputFormat
from xlcli.text.tokenizers import TOKENIZERS, WordsTokenizer
from xlcli.text.tokens import TokenFile, token_file

T = TypeVar("T")


def drain(steps: Generator[Any, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def whole(corpus: Corpus | Part) -> bytes:
    return b"".join(corpus.read())


ANY = InputFormat(any_bytes=True)


def corpus_of(data: bytes, reading: InputFormat = ANY) -> Corpus:
    with standard_input(data):
        return open_corpus(["-"], reading=reading)


def build(data: bytes, kind: str = "bytes") -> TokenFile:
    corpus = corpus_of(data)
    return drain(token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS[kind].train([data], 400)))


def prose(n_bytes: int, seed: int = 0) -> bytes:
    rng = random.Random(seed)
    lines = []
    size = 0
    while size < n_bytes:
        lines.append(b" ".join(b"word%d" % rng.randrange(300) for _ in range(rng.randrange(1, 15))) + b"\n")
        size += len(lines[-1])
    return b"".join(lines)[:n_bytes]


def test_files_are_one_text_as_cat_makes_it(tmp_path: Path) -> None:
    big = random.Random(1).randbytes(2**20 + 777).replace(b"\r", b"")
    (tmp_path / "a").write_bytes(b"no line end")
    (tmp_path / "b.gz").write_bytes(gzip.compress(big, 1) + gzip.compress(b"second member"))
    (tmp_path / "c").write_bytes(big[::-1])
    with standard_input(b"from a pipe\0"):
        corpus = open_corpus([tmp_path / "a", tmp_path / "b.gz", "-", str(tmp_path / "c")], reading=ANY)
    text = b"no line end" + big + b"second member" + b"from a pipe\0" + big[::-1]
    assert whole(corpus) == text
    assert corpus.n_bytes == len(text)
    assert corpus.facts.sha256 == sha256(text).hexdigest()
    assert corpus.facts.has_nul
    assert corpus.facts.n_chars is None
    assert whole(corpus) == text, "a corpus can be read again, standard input too"
    rng = random.Random(2)
    for _ in range(20):
        start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        assert b"".join(corpus.read(start, stop)) == text[start:stop]


def test_links_in_a_folder_are_followed_and_every_file_is_read_once(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for name, data in {"corpus/b/1": "b1", "corpus/b/2": "b2", "elsewhere/c/3": "c3", "elsewhere/4": "e4"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(data)
    (corpus / "a").symlink_to(corpus / "b")  # comes first, so its names count
    (corpus / "b" / "up").symlink_to("..")
    (corpus / "c").symlink_to(elsewhere)
    (elsewhere / "c" / "back").symlink_to(corpus)
    (corpus / "d").symlink_to(elsewhere / "c" / "3")
    os.link(corpus / "b" / "1", corpus / "e")
    (corpus / "self").symlink_to(corpus / "self")
    assert [str(source.path.relative_to(corpus)) for source in open_corpus([corpus]).sources] == [
        "a/1", "a/2", "c/4", "c/c/3",
    ]  # fmt: skip


def test_a_folder_gives_its_text_sorted(tmp_path: Path) -> None:
    for name, data in {
        "b.txt": b"bb",
        "a/z.md": b"az",
        "a/y.txt.gz": gzip.compress(b"ay"),
        ".hidden": b"no",
        ".git/x": b"no",
        "picture.png": b"\x89PNG\0\0",
        "broken.gz": gzip.compress(b"damaged")[:-3],
        "named.gz": b"an",
        "latin": "Z\u00fcrich".encode("latin-1"),
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    corpus = open_corpus([tmp_path])
    assert whole(corpus) == b"ayazbban"
    assert {path.name: reason for path, reason in corpus.skipped.items()} == {
        "broken.gz": "not text, or damaged", "empty": "empty", "latin": "not UTF-8",
        "picture.png": "not text, or damaged",
    }  # fmt: skip
    (notice,) = corpus.notices()
    assert notice.level == "warning"
    assert notice.text.split()[1] == "4"
    assert str(tmp_path / "empty") in notice.text
    assert not list(open_corpus([tmp_path / "a"]).notices())


def test_remarks_on_more_files_than_are_shown_are_counted(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.csv").write_text("item,text\n1,The dog\n")
    corpus = open_corpus([tmp_path])
    assert corpus.n_bytes
    *shown, last = corpus.notices()
    assert [f"{i}.csv" in notice.text for i, notice in enumerate(shown)] == [True] * 3
    assert last.text.startswith("2 more ")


def test_digests_of_files_depend_on_their_text_alone(tmp_path: Path) -> None:
    texts = {"a": b"text", "b": b"tex", "c": b"t" * 3_000_000, "d": b"t" * 2_999_999 + b"u", "e": b"text"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "f").write_bytes(gzip.compress(texts["c"]))
    corpus = open_corpus([tmp_path])
    digests = {Path(name).name: digest for digest, name in Part(corpus, 0, corpus.n_bytes).files()}
    assert digests["a"] == digests["e"]
    assert digests["c"] == digests["f"]
    assert len(set(digests.values())) == 4
    alone = open_corpus([tmp_path / "d"])
    assert [digest for digest, _ in Part(alone, 0, alone.n_bytes).files()] == [digests["d"]]
    cut = Part(corpus, 4, 8)  # `b` begins in it, and `c` does, too
    assert [digest for digest, _ in cut.files()] == [digests["b"], digests["c"]]


def test_a_notice_names_only_the_first_skipped_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text")
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(b"\0")
    (notice,) = open_corpus([tmp_path]).notices()
    assert notice.text.split()[1] == "5"
    assert "2.png" in notice.text
    assert notice.text.split()[-2] == "2"


def test_each_bad_input_has_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(random.Random(0).randbytes(5000))[:-2000])
    flipped = bytearray(gzip.compress(b"some text " * 1000))
    flipped[-6] ^= 1
    (tmp_path / "flipped.gz").write_bytes(flipped)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.chdir(tmp_path)
        sock.bind("socket")
        for name, message in {
            "empty": "empty",
            "missing": "missing",
            "file/inside": "inside",
            "folder": "folder",
            "torn.gz": "gzip",
            "flipped.gz": "damaged",
            "loop": "loop",
            "socket": "socket",
            "/dev/zero": "device",
            "nul\0byte": "nul",
            "x" * 5000: "open",
        }.items():
            with pytest.raises(DataError, match=message) as caught:
                open_corpus([name]).facts  # noqa: B018
            assert caught.value.remedy


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret").write_bytes(b"x")
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DataError, match="secret") as caught:
        open_corpus([tmp_path / "secret"])
    assert caught.value.remedy


def test_standard_input_may_be_empty_closed_or_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="empty"):
        corpus_of(b"").facts  # noqa: B018
    with standard_input(b"x"), pytest.raises(DataError, match="twice"):
        open_corpus(["-", "-"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="closed"):
        open_corpus(["-"])
    with pytest.raises(DataError):
        open_corpus([])


def test_the_copy_of_standard_input_leaves_nothing_behind() -> None:
    corpus = corpus_of(b"x" * 3_000_000)
    assert corpus.n_bytes == 3_000_000
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_changes_is_refused_and_one_that_grows_is_read_as_it_was(tmp_path: Path, suffix: str) -> None:
    store = partial(gzip.compress, compresslevel=1) if suffix else bytes
    text = prose(2_500_000)
    path = tmp_path / f"text{suffix}"
    path.write_bytes(store(text))
    corpus = open_corpus([path])
    assert corpus.n_bytes == len(text)
    with path.open("ab") as file:
        file.write(store(b"more"))
    assert whole(corpus) == text
    path.write_bytes(store(text[:1_500_000] + b"#" + text[1_500_001:]))
    with pytest.raises(DataError, match="changed"):
        whole(corpus)
    path.write_bytes(store(text[:1_500_000]))
    with pytest.raises(DataError, match="changed"):
        whole(corpus)
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        whole(corpus)


def test_a_file_truncated_while_it_is_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(prose(3_000_000))
    corpus = open_corpus([path])
    corpus.facts  # noqa: B018
    portions = corpus.read()
    next(portions)
    os.truncate(path, 10)
    with pytest.raises(DataError, match="changed"):
        list(portions)


@given(st.lists(st.sampled_from([b"a", "é".encode(), "漢".encode(), b"\xff", b"\xe6\xbc"]), min_size=1, max_size=12))
def test_utf8_is_judged_over_the_whole_text(files: list[bytes]) -> None:
    corpus = Corpus([source for data in files for source in corpus_of(data).sources])
    text = b"".join(files)
    good = text.decode(errors="ignore")
    if good.encode() == text:
        assert corpus.facts.n_chars == len(good)
        assert corpus.facts.bad_byte is None
        return
    with pytest.raises(UnicodeDecodeError) as invalid:
        text.decode()
    assert corpus.facts.n_chars is None
    name, offset = corpus.facts.bad_byte or ("", -1)
    starts = [sum(map(len, files[:i])) for i in range(len(files))]
    assert name == "standard input"
    assert offset in {invalid.value.start - start for start in starts}
    with pytest.raises(DataError, match=rf"\b{offset}\b|ends inside a UTF-8 character") as caught:
        Corpus([replace(source, input_format=InputFormat()) for source in corpus.sources]).facts  # noqa: B018
    assert "--binary" in caught.value.remedy


def test_the_wrong_byte_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x" * 2_000_000)
    (tmp_path / "bad").write_bytes(b"y" * 1_048_575 + b"\xc3(")
    corpus = open_corpus([tmp_path / "good", tmp_path / "bad"], reading=ANY)
    assert corpus.facts.bad_byte == (str(tmp_path / "bad"), 1_048_575)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reading_takes_bounded_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"large{suffix}"
    with gzip.open(path, "wb", 1) if suffix else path.open("wb") as file:
        for _ in range(40):
            file.write(b"a line of text\n" * 70_000)
    tracemalloc.start()
    try:
        corpus = open_corpus([path])
        assert sum(map(len, corpus.read())) == corpus.n_bytes == 42_000_000
        assert sum(map(len, drain(split(corpus)).train.sample(2**20))) <= 2**20
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()


def test_scanning_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    corpus = corpus_of(b"x" * 3_000_000)
    reports = list(corpus.scan())
    assert [report.done for report in reports] == [2**20, 2**21, 3_000_000]
    assert all(report.total == 3_000_000 for report in reports)
    assert list(corpus.scan()) == [], "a second look is not needed"


# held-out parts


def test_held_out_parts_come_off_the_end_at_line_ends() -> None:
    text = prose(200_000)
    parts = drain(split(corpus_of(text)))
    assert [whole(part) for part in (parts.train, parts.valid, parts.test)] == [
        text[: parts.train.stop],
        text[parts.train.stop : parts.valid.stop],
        text[parts.valid.stop :],
    ]
    for part in (parts.train, parts.valid):
        assert whole(part).endswith(b"\n")
    for part in (parts.valid, parts.test):
        assert 10_000 <= part.n_bytes < 10_200


@pytest.mark.parametrize(("valid", "test"), [(None, None), (0.2, 0.1), (0.1, 0.0), (None, 0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_of_ten_files_whole_ones_are_drawn(seed: int, valid: float | None, test: float | None, tmp_path: Path) -> None:
    random.seed(seed)
    texts = [prose(random.randint(3000, 9000), number) for number in range(12)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_bytes(text)
    parts = drain(split(open_corpus([tmp_path]), valid, test, seed=seed))
    drawn = [Path(name).read_bytes() for name in parts.drawn]
    n_of_valid = [*accumulate(map(len, drawn), initial=0)].index(parts.valid.n_bytes)
    assert whole(parts.valid) == b"".join(drawn[:n_of_valid])
    assert whole(parts.test) == b"".join(drawn[n_of_valid:])
    assert whole(parts.train) == b"".join(text for text in texts if text not in drawn)  # in their order
    for part, share in ((parts.valid, valid), (parts.test, test)):
        wanted = sum(map(len, texts)) * (0.05 if share is None else share)
        assert wanted / 2 <= part.n_bytes <= 3 * wanted
    again = drain(split(open_corpus([tmp_path]), valid, test, seed=seed))
    assert [part.sha256 for part in (again.valid, again.test)] == [part.sha256 for part in (parts.valid, parts.test)]


def test_held_out_files_differ_by_seed_and_are_spread(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(prose(5000, number))
    drawn = [drain(split(open_corpus([tmp_path]), 0.1, 0.0, seed=seed)).drawn for seed in range(60)]
    assert len({*drawn}) == 10


@pytest.mark.parametrize("sizes", [[5000] * 9, [300] + [20_000] * 9 + [10**6], [10**6] + [10] * 20])
def test_few_files_or_files_of_other_sizes_are_cut_at_the_end(sizes: list[int], tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:02}.txt").write_bytes(prose(size, number))
    drawn = drain(split(open_corpus([tmp_path]), 0.003, 0.003, seed=1))
    cut = drain(split(open_corpus([tmp_path]), 0.003, 0.003))
    for name in ("train", "valid", "test"):
        assert whole(getattr(drawn, name)) == whole(getattr(cut, name))


def test_held_out_parts_are_bounded_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"some line\n" * 3_000_000)
    corpus = open_corpus([tmp_path / "text"])
    parts = drain(split(corpus))
    assert LARGEST_DEFAULT <= parts.valid.n_bytes <= LARGEST_DEFAULT + 10
    parts = drain(split(corpus, 0.2, 0.0))
    assert parts.test.n_bytes == 0
    assert abs(parts.valid.n_bytes - 6_000_000) <= 10


def test_a_file_may_be_held_out_instead(tmp_path: Path) -> None:
    (tmp_path / "valid").write_bytes(b"held out")
    text = prose(10_000)
    parts = drain(split(corpus_of(text), str(tmp_path / "valid")))
    assert whole(parts.train) == text
    assert whole(parts.valid) == b"held out"
    assert whole(parts.test) == b""
    parts = drain(split(corpus_of(text), 0.1, str(tmp_path / "valid")))
    assert whole(parts.train) + whole(parts.valid) == text
    assert whole(parts.test) == b"held out"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with files of three different texts."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i, name in enumerate(("test", "train", "valid")):
        (folder / name).write_text("".join(f"{name} {i} {n * n}\n" for n in range(4000)))
    return folder


def same_path(path: Path) -> Path:
    return path


def symbolic_link(path: Path) -> Path:
    (path.parents[1] / "symbolic").symlink_to(path)
    return path.parents[1] / "symbolic"


def hard_link(path: Path) -> Path:
    (path.parents[1] / "hard").hardlink_to(path)
    return path.parents[1] / "hard"


def linked_folder(path: Path) -> Path:
    (path.parents[1] / "folder").symlink_to(path.parent)
    return path.parents[1] / "folder" / path.name


@pytest.mark.parametrize("name_of", [same_path, symbolic_link, hard_link, linked_folder])
@pytest.mark.parametrize("is_folder", [True, False])
def test_held_out_files_are_left_out_under_any_name(data: Path, name_of: Callable, is_folder: bool) -> None:
    given = [data] if is_folder else sorted(data.iterdir())
    valid, test = name_of(data / "valid"), str(data / "test")
    parts = drain(split(open_corpus(given), str(valid), test))
    assert whole(parts.train) == (data / "train").read_bytes()
    assert whole(parts.valid) == (data / "valid").read_bytes()
    assert whole(parts.test) == (data / "test").read_bytes()
    assert parts.train.corpus.left_out == (test, str(data / "valid"))


def test_a_held_out_file_leaves_a_fraction_of_the_rest(data: Path) -> None:
    parts = drain(split(open_corpus([data]), 0.1, str(data / "test")))
    assert whole(parts.train) + whole(parts.valid) == (data / "train").read_bytes() + (data / "valid").read_bytes()


def test_a_folder_is_held_out_without_the_file_of_the_test(data: Path) -> None:
    parts = drain(split(corpus_of(prose(1000)), str(data), str(data / "test")))
    assert whole(parts.valid) == (data / "train").read_bytes() + (data / "valid").read_bytes()


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("train", "train", None),
        ("train", "valid", "valid"),
        ("train", ".", None),
        (".", ".", None),
        ("train", 0.1, "train"),
    ],
)
def test_a_text_is_one_of_training_validation_and_test(
    data: Path, train: str, valid: str | float, test: str | None
) -> None:
    held_out = [str(data / each) if isinstance(each, str) else each for each in (valid, test)]
    with pytest.raises(DataError, match="only one of"):
        drain(split(open_corpus([data / train]), *held_out))


def test_standard_input_is_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(prose(1000))
    for train, valid in (("-", str(path)), (path, "-"), ("-", "-")):
        descriptor = os.open(path, os.O_RDONLY)
        before = os.dup(0)
        os.dup2(descriptor, 0)
        try:
            with pytest.raises(DataError, match="only one of"):
                drain(split(open_corpus([train]), valid))
        finally:
            os.dup2(before, 0)
            os.close(before)
            os.close(descriptor)


COPIES = {
    "whole": lambda text: text,
    "compressed": gzip.compress,
    "CR LF": lambda text: text.replace(b"\n", b"\r\n"),
    "JSON": lambda text: b"".join(b'{"text": "%s"}\n' % line for line in text.splitlines()),
    "part of another": lambda text: prose(2**20) + text + prose(1000),
    "across two reads": lambda text: prose(2**20 - len(text) // 2) + text,
    "half": lambda text: text[: len(text) // 2],
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_held_out_text_are_found(data: Path, kind: str) -> None:
    (data / "zz").write_bytes(COPIES[kind]((data / "valid").read_bytes()))
    corpus, held_out = open_corpus([data / "train", data / "zz"]), open_corpus([data / "valid"])
    (notice,) = [event for event in warn_of_copies(held_out, corpus) if isinstance(event, Notice)]
    assert notice.level == "warning"
    assert str(data / "zz") in notice.text
    assert str(data / "valid") in notice.text


@pytest.mark.parametrize("part", [b"", b"train 1 ", b"valid 2 81\nvalid 2 100\n"])
def test_text_that_shares_less_than_a_passage_is_no_copy(data: Path, part: bytes) -> None:
    (data / "zz").write_bytes(part + prose(100_000))
    corpus, held_out = open_corpus([data / "train", data / "zz"]), open_corpus([data / "valid"])
    assert not [event for event in warn_of_copies(held_out, corpus) if isinstance(event, Notice)]


@given(st.one_of(st.binary(min_size=1, max_size=300), st.text(min_size=1, max_size=300).map(str.encode)))
def test_parts_join_to_the_text(text: bytes) -> None:
    parts = drain(split(corpus_of(text, InputFormat(binary=True)), 0.2, 0.3))
    assert whole(parts.train) + whole(parts.valid) + whole(parts.test) == text
    # Each of the two boundaries lies at most 3 bytes, an unfinished character, before its target.
    assert parts.train.n_bytes > 0 or len(text) <= 12


@pytest.mark.parametrize("text", ["word " * 30_000, "漢字" * 20_000])
def test_one_line_is_cut_at_a_blank_or_a_character(text: str) -> None:
    parts = drain(split(corpus_of(text.encode())))
    assert whole(parts.valid).decode().startswith((" word", "漢", "字"))
    assert whole(parts.valid).decode() + whole(parts.test).decode() in text


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_sample_is_spread_evenly(tmp_path: Path, suffix: str) -> None:
    text = b"".join(b"%08d\n" % i for i in range(500_000))
    (tmp_path / f"text{suffix}").write_bytes(gzip.compress(text, 1) if suffix else text)
    part = drain(split(open_corpus([tmp_path / f"text{suffix}"]))).train
    sample = list(part.sample(10 * 2**16))
    assert sum(map(len, sample)) <= 10 * 2**16
    firsts = [int(block[:8]) for block in sample]
    assert firsts[0] <= 1
    assert np.diff(firsts).min() > 40_000
    assert all(len(line) in (0, 8) for block in sample for line in block.split(b"\n"))
    assert list(part.sample(10 * 2**16)) == sample
    assert b"".join(part.sample(2**30)) == whole(part)


@given(st.text(alphabet="é漢😀", min_size=5, max_size=40))
def test_short_text_is_cut_between_characters(text: str) -> None:
    parts = drain(split(corpus_of(text.encode()), 0.2, 0.1))
    assert whole(parts.train).decode() + whole(parts.valid).decode() + whole(parts.test).decode() == text


# token files


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_tokens_on_disk_are_those_of_the_whole_text(kind: str) -> None:
    text = prose(900_000)
    tokenizer = TOKENIZERS[kind].train([text], 400)
    corpus = corpus_of(text)
    tokens = drain(token_file(Part(corpus, 1000, corpus.n_bytes), tokenizer))
    assert tokens.ids.dtype == np.uint16
    assert not tokens.ids.flags.writeable
    assert tokens.n_bytes == len(text) - 1000
    assert tokens.ids.tolist() == tokenizer.encode(text[1000:]).tolist()
    assert len(tokens) == len(tokens.ids)


def test_large_vocabularies_take_wider_ids() -> None:
    tokenizer = WordsTokenizer(b"<unk>\n<eos>\n" + b"".join(b"w%d\n" % i for i in range(70_000)))
    corpus = corpus_of(b"w69999 w0\n")
    tokens = drain(token_file(Part(corpus, 0, corpus.n_bytes), tokenizer))
    assert tokens.ids.dtype == np.uint32
    assert tokens.ids.tolist() == [70_001, 2, 1]


def test_an_empty_part_has_no_tokens() -> None:
    tokens = drain(token_file(Part(corpus_of(b"x"), 1, 1), TOKENIZERS["bytes"].train([])))
    assert len(tokens) == tokens.n_bytes == 0


def test_tokens_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    text = prose(600_000)
    corpus, tokenizer = corpus_of(text), TOKENIZERS["bytes"].train([])
    part = Part(corpus, 0, corpus.n_bytes)
    reports = list(token_file(part, tokenizer))
    assert reports[-1] == Progress("tokenizing", 600_000, 600_000, "B", reports[-1].rate)
    assert list(token_file(part, tokenizer)) == []
    same_text = corpus_of(text)
    assert list(token_file(Part(same_text, 0, same_text.n_bytes), tokenizer)) == [], "keyed by content"
    assert list(token_file(Part(corpus, 1, corpus.n_bytes), tokenizer)) != []
    assert list(token_file(part, TOKENIZERS["sentencepiece"].train([text], 400))) != []
    assert len(list(cache_folder().iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "grow", "empty", "magic"])
def test_a_damaged_token_file_is_built_anew(damage: str) -> None:
    text = prose(5000)
    build(text)
    [path] = cache_folder().iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-2:]
    elif damage == "grow":
        data += b"\0\0"
    elif damage == "empty":
        data.clear()
    else:
        data[0] ^= 1
    path.write_bytes(data)
    tokens = build(text)
    assert bytes(tokens.ids.astype(np.uint8)) == text


def test_a_builder_that_stops_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    corpus = corpus_of(prose(2_000_000))
    steps = token_file(Part(corpus, 0, corpus.n_bytes), TOKENIZERS["bytes"].train([]))
    next(steps)
    assert [path.name[:11] for path in cache_folder().iterdir()] == [".tmp-xlcli-"]
    steps.close()
    assert list(cache_folder().iterdir()) == []


def test_two_builders_of_one_file_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0)
    text = prose(2_000_000)
    corpus, tokenizer = corpus_of(text), TOKENIZERS["bytes"].train([])
    one, two = (token_file(Part(corpus, 0, corpus.n_bytes), tokenizer) for _ in range(2))
    next(one), next(two)
    for steps in (one, two):
        assert bytes(drain(steps).ids.astype(np.uint8)) == text
    assert len(list(cache_folder().iterdir())) == 1


def test_a_full_disk_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="space") as caught:
        build(b"text")
    assert "XLCLI_CACHE" in caught.value.remedy
    assert list(cache_folder().iterdir()) == []


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path / "one"))
    assert cache_folder() == tmp_path / "one"
    monkeypatch.delenv("XLCLI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    assert cache_folder() == tmp_path / "two" / "xlcli"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "xlcli"
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=str(tmp_path / "file")):
        cache_folder()


def test_reading_standard_input_shows_progress(monkeypatch):
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0.0)
    reader, writer = os.pipe()
    os.write(writer, b"one\n")
    with os.fdopen(reader, "rb"), standard_input(reader):
        work = gather(["-"])
        first = next(work)
        assert (first.stage, first.done, first.total, first.unit) == ("reading standard input", 4, None, "B")
        os.write(writer, b"two\n")
        os.close(writer)
        assert next(work).done == 8
        with pytest.raises(StopIteration) as end:
            next(work)
    assert b"".join(end.value.value.read()) == b"one\ntwo\n"
