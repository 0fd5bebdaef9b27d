"""Tokenizers of others: the tokens of `tokenizers` on the whole text, however it is cut."""

import itertools
import json

import pytest
import tokenizers
from foreign import KINDS, ours, trained
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xlcli.text.base import Tokenizer
from xlcli.text.pretokenize import PreTokenizer, whole_words


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """The package, as it is to be compared with, and our tokenizer of the same file."""
    package = trained(request.param)
    package.encode_special_tokens = True
    package.post_processor = None
    return request.param, package, ours(package)


pieces = st.sampled_from(
    [
        "the",
        " dog",
        "The fox",
        "'s",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        ".\n",
        "\t",
        "1",
        "12",
        "3456",
        ",",
        "...",
        "/",
        "\n/",
        "漢字",
        "の",
        "🙂",
        "é",
        "é",
        "́",
        "ﬁ",
        "\xa0",
        "\u3000",
        "\u2028",
        "\x1c",
        "▁",
        "<|end|>",
        "</s>",
        "\x00",
        "'",
        "A",
    ]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=25).map("".join)
broken = st.lists(
    st.one_of(pieces.map(str.encode), st.binary(max_size=4), st.just(b"\xe2"), st.just(b"\xff")), max_size=25
).map(b"".join)
slow = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def in_portions(data: bytes, cuts: list[int], tokenizer: Tokenizer) -> list[int]:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pretokenizer = PreTokenizer(tokenizer.splitter)
    parts = [pretokenizer.feed(data[a:b]) for a, b in itertools.pairwise(places)]
    return [i for part in [*parts, pretokenizer.finish()] for i in tokenizer.encode(part).tolist()]


def reference(name: str, package: tokenizers.Tokenizer, text: str) -> list[int]:
    """Tokens of the package without what it adds to a text."""
    if name in ("llama2", "unigram", "lowercase") and text:
        content = json.loads(package.to_str())
        if content["pre_tokenizer"]:
            content["pre_tokenizer"]["prepend_scheme"] = "never"
        elif content["normalizer"]["type"] == "Sequence":
            content["normalizer"]["normalizers"].pop(0)
        package = tokenizers.Tokenizer.from_str(json.dumps(content))
        package.encode_special_tokens = True
    return package.encode(text, add_special_tokens=False).ids


@slow
@given(text=texts)
@example(text="the dog.\n\nThe fox\n\n 12345\r\nthe\n  dog \n")
@example(text="the.\n/usr the\n.\n/usr")
def test_tokens_are_those_of_the_package(pair, text):
    name, package, tokenizer = pair
    ids, sizes = tokenizer.tokens(text.encode())
    assert sizes.sum() == len(text.encode())
    if tokenizer.is_lossless:
        assert tokenizer.decode(ids) == text.encode()
    expected = reference(name, package, text)
    special = {token["id"] for token in json.loads(package.to_str())["added_tokens"] if token["special"]}
    if name == "qwen":
        package.normalizer, expected = None, package.encode(text, add_special_tokens=False).ids
    known = tokenizer.is_lossless and tokenizer.decode([i for i in expected if i < len(tokenizer._text)])
    if known == text.encode() or (not tokenizer.is_lossless and text.strip() and special.isdisjoint(expected)):
        assert ids.tolist() == expected


@slow
@given(data=broken, cuts=st.lists(st.integers(0, 80), max_size=8))
@example(data="the dog\n漢".encode(), cuts=[9])
def test_a_text_cut_anywhere_has_the_tokens_of_the_whole(pair, data, cuts):
    _, _, tokenizer = pair
    ids, sizes = tokenizer.tokens(data)
    assert sizes.sum() == len(data)
    assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
    if tokenizer.is_lossless:
        assert tokenizer.decode(ids) == data
    assert in_portions(data, cuts, tokenizer) == ids.tolist()
    portions = [data[a:b] for a, b in itertools.pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)])]
    assert [
        i for part in whole_words(portions, 9, splitter=tokenizer.splitter) for i in tokenizer.encode(part)
    ] == ids.tolist()
