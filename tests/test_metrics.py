import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlcli.metrics import (
    LEAST_JUDGED,
    TextCounter,
    bits_per,
    context_bin_edges,
    half_width,
    misfit,
    perplexity,
    share_interval,
)


def count(*portions):
    counter = TextCounter()
    for portion in portions:
        counter.feed(portion)
    return counter.counts()


@given(st.text(), st.lists(st.integers(0, 60)))
def test_counts_do_not_depend_on_portions(text, cuts):
    data = text.encode()
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    portions = [data[a:b] for a, b in itertools.pairwise(places)]
    counts = count(*portions)
    assert counts.bytes == len(data)
    assert counts.chars == len(text)
    assert counts.has_phrases or counts.words == len(data.split()) + data.count(b"\n")
    assert counts == count(data)


@given(st.binary())
def test_bytes_that_are_not_utf8_have_no_characters(data):
    try:
        chars = len(data.decode())
    except UnicodeDecodeError:
        chars = None
    for counts in (count(data), count(*(data[i : i + 1] for i in range(len(data))))):
        assert counts.chars == chars
        assert (counts.words is None) == (chars is None or counts.has_phrases)


@pytest.mark.parametrize(("text", "has_phrases"), [
    ("ภาษาไทยไม่มีช่องว่าง ระหว่างคำ", True),
    ("ภาษา ไทย ไม่ มี ช่องว่าง ระหว่าง คำ", False),  # somebody has divided it
    ("我们在黑暗的夜里航行。", True),
    ("internationalization institutionalization", False),
    ("സ്വാതന്ത്ര്യത്തോടുംകൂടി ജനിച്ചിട്ടുള്ളവരാണ്", False),  # Malayalam has long words
    ("In Thai: ภาษา", False),
    ("The sentence was ภาษาไทยไม่มีช่องว่างระหว่างคำ, she said.", True),  # a third of it
    ("كان الليل مظلما ภาษาไทยไม่มีช่องว่าง ระหว่างคำ في الشتاء", True),
    ("The old dog ran to the house. " * 20 + "ภาษาไทยไม่มีช่องว่าง", False),  # a quotation
    ("ภาษา\u200bไทย\u200bไม่\u200bมี ช่องว่าง\u200bระหว่าง\u200bคำ", True),  # only blanks divide words
    ("我们在黑暗的夜里，航行。今天，天气好。", True),
    ("东京 (Tokyo) and 北京 (Beijing) are cities", False),
])  # fmt: skip
def test_phrases_are_no_words(text, has_phrases):
    counts = count(text.encode())
    assert (counts.has_phrases, counts.words is None) == (has_phrases, has_phrases)


def test_phrases_of_one_document_are_no_words_of_the_text():
    arabic, thai = "كان الليل مظلما\n".encode() * 40, "ภาษาไทยไม่มีช่องว่างระหว่างคำ\n".encode()
    assert not count(arabic, thai, arabic).has_phrases  # 30 of 1,311 characters
    for documents in ([arabic, thai, arabic], [thai, arabic], [arabic, thai]):
        counter = TextCounter()
        for document in documents:
            counter.feed(document)
            counter.end_document()
        assert counter.counts().has_phrases


def test_words_are_counted_as_the_benchmarks_count_them():
    text = " = Robert Boulter = \n \n Robert Boulter is an <unk> .\n"
    assert count(text.encode()).words == sum(len(line.split()) + 1 for line in text.splitlines())


def test_ratios():
    assert bits_per(math.log(2) * 12, 4) == pytest.approx(3.0)
    assert perplexity(math.log(7) * 5, 5) == pytest.approx(7.0)
    assert bits_per(0.0, 0) == 0.0
    assert perplexity(0.0, 0) == 1.0
    assert perplexity(1e9, 1) == math.inf


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_of_shares_as_published(wins, n, low, high):  # Newcombe 1998, table I, method 3
    assert share_interval(wins / n, n) == pytest.approx((low, high), abs=6e-5)
    assert share_interval(1 - wins / n, n) == pytest.approx((1 - high, 1 - low), abs=6e-5)


@pytest.mark.parametrize("longest", [1, 2, 3, 7, 8, 100, 1024])
def test_edges_cover_every_length_once(longest):
    edges = context_bin_edges(longest)
    assert edges[0] == 1
    assert edges[-1] == longest + 1
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert all(b == 2 * a for a, b in itertools.pairwise(edges[:-1]))


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (10**6, 1.96)])
def test_quantiles_of_students_t(freedom, quantile):
    """From published tables."""
    assert half_width(2.0, freedom) / 2 == pytest.approx(quantile, rel=0.02 if freedom < 10 else 1e-3)


def test_a_score_worse_than_the_text_is_told_of_texts_that_are_long_enough():
    assert misfit("m", 8.1 * 2000, 2000) is not None
    assert misfit("m", 8.0 * 2000, 2000) is None
    assert misfit("m", 12.0 * LEAST_JUDGED, LEAST_JUDGED) is not None
    assert misfit("m", 12.0 * 2, 2) is None
    assert misfit("m", 0.0, 0) is None
