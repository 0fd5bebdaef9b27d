"""Tokenizers of others: the tokens of `tokenizers` on the whole text, however it is cut."""

import itertools
import json
import random
import resource
import sys
import time
from typing import Any

import pytest
import tokenizers
from foreign import LOSSLESS, ours, trained
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import models

from xlcli.errors import CheckpointError, ConfigError, XLError
from xlcli.text.base import Tokenizer
from xlcli.text.foreign import (
    BYTE_CHARACTERS,
    GPT2,
    LLAMA3,
    LONGEST_PART,
    QWEN2,
    IdsTokenizer,
    TokenizersTokenizer,
    converted,
    plain_steps,
)
from xlcli.text.pretokenize import PreTokenizer, whole_words
from xlcli.text.tokenizers import Coverage, SentencePieceTokenizer, WordsTokenizer, load_tokenizer


@pytest.fixture(scope="module", params=LOSSLESS)
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
    if name in ("llama2", "unigram") and text:
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
    assert tokenizer.decode(ids) == text.encode()
    expected = reference(name, package, text)
    if name in ("qwen", "pythia"):
        package.normalizer, expected = None, package.encode(text, add_special_tokens=False).ids
    if tokenizer.decode([i for i in expected if i < tokenizer.vocab_size]) == text.encode():
        assert ids.tolist() == expected


@slow
@given(data=broken, cuts=st.lists(st.integers(0, 80), max_size=8))
@example(data="the dog\n漢".encode(), cuts=[9])
def test_a_text_cut_anywhere_has_the_tokens_of_the_whole(pair, data, cuts):
    _, _, tokenizer = pair
    ids, sizes = tokenizer.tokens(data)
    assert sizes.sum() == len(data)
    assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
    assert tokenizer.decode(ids) == data
    assert in_portions(data, cuts, tokenizer) == ids.tolist()
    portions = [data[a:b] for a, b in itertools.pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)])]
    assert [
        i for part in whole_words(portions, 9, splitter=tokenizer.splitter) for i in tokenizer.encode(part)
    ] == ids.tolist()


CODE = 'Error (last call):\n  File "x.py", line 1\n    foo()\n\tat x(Y:1)\n}\n  }\nend\n \t漢\n'


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "pythia", "llama3", "qwen", "slashes", "unigram"])
def test_a_line_is_decided_when_the_next_one_has_come_also_an_indented_one(kind):
    tokenizer = ours(trained(kind))
    pretokenizer, n_whole, n_before = PreTokenizer(tokenizer.splitter), 0, 0
    for line in CODE.encode().splitlines(keepends=True):
        n_whole += len(pretokenizer.feed(line))
        assert n_whole >= n_before
        n_before += len(line)


def test_white_space_of_several_bytes_before_blanks_in_a_vocabulary_makes_no_place_unsafe():
    content = json.loads(trained("gpt2").to_str())  # which has no token of two no-break spaces, as that of GPT-2 has
    content["model"]["vocab"]["ĠÂłĠÂł"] = len(content["model"]["vocab"])
    tokenizer = TokenizersTokenizer(json.dumps(content).encode(), vocab_size=450, start_id=0)
    assert tokenizer.splitter.split(b"the dog") == [b"the", b" dog"]


def test_a_tokenizer_is_saved_and_its_description_checked(tmp_path, pair):
    _, _, tokenizer = pair
    for made in (tokenizer, IdsTokenizer(90, 3)):
        made.save(tmp_path)
        again = load_tokenizer(tmp_path)
        assert type(again) is type(made)
        assert (again.fingerprint, again.vocab_size, again.start_id) == (
            made.fingerprint,
            made.vocab_size,
            made.start_id,
        )
        about = json.loads((tmp_path / "tokenizer.json").read_text())
        for changed in ({"start_id": 1}, {"start_id": None}, {"vocab_size": 10**9}, {"start_id": -1}):
            (tmp_path / "tokenizer.json").write_text(json.dumps(about | changed))
            with pytest.raises(CheckpointError):
                load_tokenizer(tmp_path)


def test_a_damaged_file_is_refused_and_nothing_else_happens():
    draw, refused = random.Random(0), 0
    files = [trained(kind).to_str().encode() for kind in ("llama3", "unigram")]
    for _ in range(300):
        content = json.loads(draw.choice(files))
        place = draw.choice([content, content["model"]])
        place[draw.choice(sorted(place))] = draw.choice([None, 0, -1, "x", [], {}, 2**70, True])
        data = json.dumps(content).encode()
        data = data if draw.random() < 0.7 else data[: draw.randrange(len(data))]
        text = "the dog\n\nfox 漢 <|end|> \xff".encode()
        try:
            sizes = TokenizersTokenizer(data, vocab_size=450, start_id=0).tokens(text)[1]
        except CheckpointError:
            refused += 1
        else:
            assert sizes.sum() == len(text)
    assert 100 < refused < 300


def test_other_kinds_are_refused():
    pieces = models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    with pytest.raises(CheckpointError):
        ours(tokenizers.Tokenizer(pieces))
    with pytest.raises(CheckpointError):  # more tokens than the model has
        TokenizersTokenizer(trained("gpt2").to_str().encode(), vocab_size=300, start_id=0)
    panic = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    for key, step in (("pre_tokenizer", {"type": "Sequence"}), ("normalizer", panic)):
        changed = json.loads(trained("gpt2").to_str()) | {key: step}
        with pytest.raises(CheckpointError):
            TokenizersTokenizer(json.dumps(changed).encode(), vocab_size=450, start_id=0)


def before_bytes(step: dict[str, Any], name: str = "gpt2") -> TokenizersTokenizer:
    """A tokenizer with another step before its own."""
    content = json.loads(trained(name).to_str())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, content["pre_tokenizer"]]}
    return TokenizersTokenizer(json.dumps(content).encode(), "file", vocab_size=450, start_id=0)


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def test_a_panic_of_the_package_is_an_error_of_the_file():
    tokenizer = before_bytes(split("(a+)+$"))
    for _ in range(3):
        with pytest.raises(CheckpointError, match="file"):
            tokenizer.encode(b"a" * 60 + b"!")
    assert tokenizer.decode(tokenizer.encode(b"the dog")) == b"the dog"


def test_published_patterns_are_those_of_real_tokenizers():
    for name in ("gpt2", "smollm2", "llama3", "qwen"):
        content = json.loads(trained(name).to_str())
        steps = plain_steps(content["pre_tokenizer"])
        assert {step["pattern"]["Regex"] for step in steps if step["type"] == "Split"} <= {GPT2, LLAMA3, QWEN2}


REMOVING = {
    "Whitespace": {"type": "Whitespace"},
    "WhitespaceSplit": {"type": "WhitespaceSplit"},
    "BertPreTokenizer": {"type": "BertPreTokenizer"},
    "CharDelimiterSplit": {"type": "CharDelimiterSplit", "delimiter": "x"},
    "Punctuation": {"type": "Punctuation", "behavior": "Removed"},
    "Split": split(r"\s+", "Removed"),
}


@pytest.mark.parametrize("name", ["gpt2", "unigram"])
@pytest.mark.parametrize("step", REMOVING)
def test_a_pre_tokenizer_that_removes_text_is_refused_with_a_way_out(step, name):
    inner = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, REMOVING[step]]}
    for each in (REMOVING[step], inner):
        with pytest.raises(CheckpointError, match=f"loses text: '{step}'") as caught:
            before_bytes(each, name)
        assert "token ids" in caught.value.remedy


@pytest.mark.parametrize("behavior", ["Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
@pytest.mark.parametrize("step", ["Punctuation", "Split"])
def test_a_pre_tokenizer_that_keeps_all_text_is_taken(step, behavior):
    tokenizer, text = before_bytes(REMOVING[step] | {"behavior": behavior}), b"the dog, the fox.\nthe  dog\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(len(tokenizer.texts[i]) for i in ids) > 1  # not spelled in bytes


def test_pieces_with_a_mark_of_continuation_are_refused():
    content = json.loads(trained("gpt2").to_str())
    content["model"]["continuing_subword_prefix"] = "##"
    with pytest.raises(CheckpointError, match="neither"):
        TokenizersTokenizer(json.dumps(content).encode(), vocab_size=450, start_id=0)


FORGED = {
    "of nothing": b"\x0a\x00" * 2**24,
    "of names alone": b"".join(b"\x0a\x08\x0a\x06%06x" % i for i in range(2**22 // 10)),
    "with fields": b"\x0a\xfe\xff\xff\x03" + b"\x18\x01" * (2**22 - 3),
    "of long names": b"".join(b"\x0a\xcb\x01\x0a\xc8\x01%0200x" % i for i in range(2**23 // 210)),
}
"""Messages of Protocol Buffers that are no models of sentencepiece, and would take long to read."""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_model_of_sentencepiece_is_refused_at_once_and_in_little_memory(name):
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        converted("file", FORGED[name])
    with pytest.raises(CheckpointError):
        SentencePieceTokenizer(FORGED[name])
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


def test_without_the_package_it_is_named(monkeypatch):
    data = trained("gpt2").to_str().encode()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="tokenizers") as caught:
        TokenizersTokenizer(data, vocab_size=450, start_id=0)
    assert "pip install" in caught.value.remedy


def test_names_of_special_tokens_are_text():
    for kind, name in (("gpt2", "<|end|>"), ("unigram", "</s>")):
        tokenizer = ours(trained(kind))
        ids = tokenizer.encode(f"the dog {name} the".encode())
        assert not {*tokenizer.separate_ids} & {*ids.tolist()}


def test_a_tokenizer_that_loses_text_is_refused_with_a_way_out():
    content = json.loads(trained("unigram").to_str())
    lowercase = content | {"normalizer": {"type": "Lowercase"}}
    without_a_byte = json.loads(json.dumps(content).replace("<0xFF>", "<FF>"))
    for changed in (json.loads(trained("lowercase").to_str()), lowercase, without_a_byte):
        with pytest.raises(CheckpointError) as caught:
            TokenizersTokenizer(json.dumps(changed).encode(), vocab_size=450, start_id=0)
        assert "token ids" in caught.value.remedy


def test_text_is_not_brought_into_a_normal_form():
    tokenizer = ours(trained("qwen"))
    assert tokenizer.decode(tokenizer.encode("e\u0301".encode())) == "e\u0301".encode()


def test_a_long_run_is_cut_between_characters():
    tokenizer = ours(trained("gpt2"))
    text = "漢字の漢字".encode() * (LONGEST_PART // 15 + 10)
    parts = tokenizer.splitter.split(text)
    assert [len(part) for part in parts] == [LONGEST_PART // 3 * 3, len(text) - LONGEST_PART // 3 * 3]
    pretokenizer = PreTokenizer(tokenizer.splitter)
    fed = [pretokenizer.feed(text[at : at + 1000]) for at in range(0, len(text), 1000)]
    assert [len(part) for part in fed if part] == [len(parts[0])]


@pytest.mark.parametrize("end", [b"x\nthe", b"\nthe", "漢\nthe".encode(), b" the", b"\n\nthe", b"\x80\nx"])
@pytest.mark.parametrize("missing", range(5))
def test_places_near_a_cut(end, missing):
    tokenizer = ours(trained("gpt2"))
    text = b"x" * (LONGEST_PART - missing) + end + b" dog"
    for size in (1000, LONGEST_PART - 1, LONGEST_PART, LONGEST_PART + 1, LONGEST_PART + 2):
        pretokenizer = PreTokenizer(tokenizer.splitter)
        fed = [pretokenizer.feed(text[at : at + size]) for at in range(0, len(text), size)]
        found = [part for fed_part in [*fed, pretokenizer.finish()] for part in tokenizer.splitter.split(fed_part)]
        assert [*map(len, found)] == [*map(len, tokenizer.splitter.split(text))]


def test_special_words_may_be_anywhere_in_a_vocabulary():
    tokenizer = WordsTokenizer(b"the\n<eos>\ndog\n<unk>\n")
    assert (tokenizer.start_id, tokenizer.unknown_id) == (1, 3)
    assert tokenizer.encode(b"the cat\ndog").tolist() == [0, 3, 1, 2]
    assert tokenizer.decode([0, 1, 3]) == b"the\n<unk>"
    with pytest.raises(CheckpointError):
        WordsTokenizer(b"the\n<eos>\ndog\n")


def test_a_text_in_parts_of_characters_is_told_from_one_in_whole_ones():
    content = json.loads(trained("gpt2").to_str())
    first, second = (BYTE_CHARACTERS[byte] for byte in "ა".encode()[:2])  # which most Georgian letters begin with
    content["model"]["vocab"][first + second] = len(content["model"]["vocab"])
    content["model"]["merges"].append([first, second])
    tokenizer = ours(tokenizers.Tokenizer.from_str(json.dumps(content)))
    for text, is_spelled in (("ჯუნგლის წიგნი " * 4, True), ("The lazy dog 123 " * 4, False), ("წი", False)):
        ids, sizes = tokenizer.tokens(text.encode())
        assert (sizes == 2).any() or not is_spelled
        coverage = Coverage(tokenizer, "model")
        coverage.add(ids, sizes)
        assert coverage.is_spelled == is_spelled


def test_ids_have_the_white_space_before_them_and_the_end_of_their_line():
    ids, sizes = IdsTokenizer(90, 3).tokens(b" 1 22 \n\n 3  4 ")
    assert (ids.tolist(), sizes.tolist()) == ([1, 22, 3, 4], [2, 5, 3, 4])
    with pytest.raises(XLError):
        IdsTokenizer(90, 90)
