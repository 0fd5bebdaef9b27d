"""Pre-tokenization depends on the text and not on the portions it comes in."""

from __future__ import annotations

import itertools
import tracemalloc

from hypothesis import example, given
from hypothesis import strategies as st

from xlcli.text.pretokenize import LONGEST, WORDS, PreTokenizer, whole_characters, whole_words

ALPHABET = [
    b" ",
    b"\n",
    b"\r\n",
    b"a",
    b"the",
    b"\t",
    "é".encode(),
    "漢".encode(),
    b"\xff",
    b"\x80",
    b"\xe2\x96",
    b"\0",
]
texts = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from(ALPHABET), max_size=60).map(b"".join),
    st.tuples(st.sampled_from([b"x", b" ", "漢".encode(), b"\x80", b"a "]), st.integers(0, 3 * LONGEST)).map(
        lambda pair: pair[0] * pair[1]
    ),
)


def portions_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def fed(portions: list[bytes], pretokenizer: PreTokenizer) -> list[bytes]:
    return [given for portion in portions if (given := pretokenizer.feed(portion))]


@given(texts)
@example(b"")
@example(b"\n\n")
@example(b"  a  b \n c")
def test_words_join_to_the_text_and_are_bounded(data: bytes) -> None:
    found = WORDS.split(data)
    assert b"".join(found) == data
    assert all(0 < len(word) <= LONGEST for word in found)


def test_words_start_with_spaces_and_end_with_a_line_end() -> None:
    assert WORDS.split(b"a  bc\n\n  d\te ") == [b"a", b"  bc\n", b"\n", b"  d\te", b" "]


@given(texts, st.lists(st.integers(0, 4000), max_size=20))
def test_any_portions_give_the_same_words(data: bytes, cuts: list[int]) -> None:
    pretokenizer = PreTokenizer()
    returned = fed(portions_of(data, cuts), pretokenizer)
    returned.append(pretokenizer.finish())
    assert [word for part in returned for word in WORDS.split(part)] == WORDS.split(data)
    assert pretokenizer.pending == b""


@given(texts, st.lists(st.integers(0, 4000), max_size=10))
def test_the_pending_bytes_are_the_whole_state(data: bytes, cuts: list[int]) -> None:
    one, pending = PreTokenizer(), b""
    for portion in portions_of(data, cuts):
        fresh = PreTokenizer()
        assert fresh.feed(pending + portion) == one.feed(portion)
        pending = fresh.pending
        assert pending == one.pending


@given(texts, texts)
def test_a_stable_prefix_has_the_same_words_whatever_follows(data: bytes, more: bytes) -> None:
    cut = WORDS.stable_prefix_len(data)
    whole = WORDS.split(data + more)
    prefix = WORDS.split(data[:cut])
    assert whole[: len(prefix)] == prefix


@given(texts)
def test_less_than_a_word_is_not_stable(data: bytes) -> None:
    held = data[WORDS.stable_prefix_len(data) :]
    assert len(held) <= LONGEST
    assert b"\n" not in held
    assert len(WORDS.split(held)) <= 1


def test_a_complete_line_is_returned_at_once() -> None:
    assert PreTokenizer().feed(b"one two\n") == b"one two\n"


def test_long_words_are_cut_between_characters() -> None:
    found = WORDS.split("漢".encode() * 1000)
    assert all(part.decode() for part in found)
    assert {len(part) for part in found[:-1]} == {LONGEST - LONGEST % 3}


def test_bytes_that_are_not_utf8_are_cut_too() -> None:
    assert [len(word) for word in WORDS.split(b"\x80" * (LONGEST + 5))] == [LONGEST, 5]


@given(st.text(max_size=20), st.integers(0, 3))
def test_whole_characters(text: str, missing: int) -> None:
    data = text.encode()
    cut = data[: len(data) - missing] if missing else data
    end = whole_characters(cut)
    assert cut[:end].decode() == text[: len(cut[:end].decode())]
    assert len(cut) - end <= 3


def test_flush_keeps_an_unfinished_character() -> None:
    pretokenizer = PreTokenizer()
    assert pretokenizer.feed(b"caf\xc3") == b""
    assert pretokenizer.flush() == b"caf"
    assert pretokenizer.pending == b"\xc3"
    assert pretokenizer.feed(b"\xa9\n") == "é\n".encode()
    assert pretokenizer.pending == b""


@given(texts, st.lists(st.integers(0, 4000), max_size=20), st.integers(1, 3000))
def test_portions_of_whole_words(data: bytes, cuts: list[int], at_least: int) -> None:
    portions = list(whole_words(portions_of(data, cuts), at_least))
    assert [word for part in portions for word in WORDS.split(part)] == WORDS.split(data)


def test_an_endless_line_takes_bounded_memory() -> None:
    pretokenizer = PreTokenizer()
    tracemalloc.start()
    try:
        for _ in range(1000):
            pretokenizer.feed(b"x" * 65536)
        assert len(pretokenizer.pending) <= LONGEST
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
