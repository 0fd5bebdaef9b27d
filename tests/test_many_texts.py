"""Many texts in one call of `Model.score`: tokens, words and bits of each are those of a call for it alone."""

import dataclasses

import pytest
from toys import PROSE, RUNTIME, VARIANTS, slow_bits, toy

import xlcli

pytestmark = pytest.mark.filterwarnings("ignore:texts that need a look:UserWarning")  # blanks, one word

TEXTS = [*PROSE.splitlines()[:3], "", " ", "One.\nTwo lines\n\n", b"x", "naïve 世界 café", PROSE, "", "End of\tit"]


def places(parts):
    return [dataclasses.replace(each, bits=0.0, **others(each, 0.0)) for each in parts]


def others(part, value):
    return {name: value for name in ("naive_bits", "token_entropy", "next_entropy") if hasattr(part, name)}


def numbers(parts):
    return [getattr(each, name) or 0.0 for each in parts for name in ("bits", *others(each, 0.0))]


def assert_same(found, expected, **tolerance):
    for one, other in ((found.tokens, expected.tokens), (found.words, expected.words)):
        assert places(one) == places(other)
        assert numbers(one) == pytest.approx(numbers(other), **tolerance)


@pytest.mark.parametrize("mem_len", [0, 9, 100])
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_each_text_is_scored_as_alone(variant, mem_len):
    model = xlcli.Model(toy("sentencepiece", variant=variant), RUNTIME)
    found = model.score(TEXTS, mem_len=mem_len)
    assert len(found) == len(TEXTS)
    for text, score in zip(TEXTS, found, strict=True):
        assert_same(score, model.score(text, mem_len=mem_len), abs=1e-6, rel=1e-6)


def test_windows_slide_over_each_text():
    model = xlcli.Model(toy("sentencepiece", variant="sliding", mem_len=0), RUNTIME)
    for text, score in zip(TEXTS, model.score(TEXTS), strict=True):
        assert_same(score, model.score(text), abs=1e-6, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*not in the vocabulary")
@pytest.mark.parametrize("kind", ["bytes", "words", "sentencepiece"])
def test_bits_are_those_of_the_formula(kind):
    model = toy(kind)
    for text, score in zip(TEXTS, xlcli.Model(model, RUNTIME).score(TEXTS, mem_len=9), strict=True):
        data = text if isinstance(text, bytes) else text.encode()
        assert b"".join(token.text for token in score.tokens) == data
        if data:
            assert [token.bits for token in score.tokens] == pytest.approx(slow_bits(model, data, mem_len=9), abs=1e-5)


@pytest.mark.parametrize("settings", [{"adapt": True, "adapt_block": 4}, {"context_cache": 50}])
def test_what_learns_starts_anew_with_each_text(settings):
    model = xlcli.Model(toy("sentencepiece"), RUNTIME)
    for text, score in zip(TEXTS, model.score(TEXTS, **settings), strict=True):
        assert_same(score, model.score(text, **settings), abs=0)


def test_each_text_continues_a_state():
    model = xlcli.Model(toy("sentencepiece"), RUNTIME)
    state = model.read("She said that the fox")
    for text, score in zip(TEXTS, model.score(iter(TEXTS), state=state), strict=True):
        assert_same(score, model.score(text, state=state), abs=0)


def test_no_texts_and_other_things():
    model = xlcli.Model(toy(), RUNTIME)
    assert model.score([]) == []
    assert [score.tokens for score in model.score(["", b""])] == [(), ()]
    assert [score.bytes for score in model.score(["", b"ab"])] == [0, 2]
    for wrong in (5, None, ["text", 5]):
        with pytest.raises(xlcli.ConfigError, match="str or bytes"):
            model.score(wrong)
    with pytest.raises(xlcli.ConfigError, match="segment_len"):
        model.score(["text"], segment_len=3)


def test_the_bundled_model_differs_by_rounding_only():
    """float32: bits per byte of a text agree to 2e-6, bits of a token to 1e-4."""
    books = xlcli.load("books", device="cpu", threads=1)
    texts = [line for line in PROSE.splitlines() if line] * 3
    for text, score in zip(texts, books.score(texts), strict=True):
        alone = books.score(text)
        assert_same(score, alone, abs=1e-4)
        assert score.bits_per_byte == pytest.approx(alone.bits_per_byte, abs=2e-6)
