"""Tokenizers of others: the tokens of `tokenizers` on the whole text, however it is cut."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from xlcli.text.base import Tokenizer
from xlcli.text.foreign import TokenizersTokenizer
from xlcli.text.pretokenize import PreTokenizer, whole_words

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SLASHES = LLAMA3.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+[\r\n/]*")
TEXT = (
    "The dog, the dogs and the fox.\n\nThe fox's den isn't far: 12345 steps, 3,000 dogs.\nThe end.\n\n\n"
    '  the "lazy" dog\r\nthe\tfox  jumped ...\n/usr/the\n.\n/usr/the\n漢字の漢字 naïve café résumé\nthe 🙂 dog\n'
) * 4
SPECIAL = ["<|end|>"]


def trained(name: str) -> tokenizers.Tokenizer:
    """A small tokenizer as those of published models."""
    split = {"llama3": LLAMA3, "qwen": QWEN, "slashes": SLASHES}
    if name in split or name in ("gpt2", "smollm2"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if name in split:
            by_pattern = pre_tokenizers.Split(Regex(split[name]), "isolated")
            by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            made.pre_tokenizer = pre_tokenizers.Sequence([by_pattern, by_byte])
        if name == "smollm2":
            digits = pre_tokenizers.Digits(individual_digits=True)
            made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        if name == "qwen":
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        )
        made.train_from_iterator([TEXT], trainer)
        return made
    if name == "llama2":  # as converted from sentencepiece: the whole text is one word
        bytes_of = [f"<0x{value:02X}>" for value in range(256)]
        learned = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        learned.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<unk>", "<s>", "</s>", *bytes_of]
        learned.train_from_iterator(
            TEXT.split("\n"), trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
        )
        content = json.loads(learned.to_str())
        content["added_tokens"] = content["added_tokens"][:3]
        content["model"] |= {"byte_fallback": True, "fuse_unk": True}
        content["pre_tokenizer"] = None
        steps = [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]
        content["normalizer"] = {"type": "Sequence", "normalizers": steps}
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    if name == "lowercase":
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    special = ["<unk>", "</s>", *([] if name == "lowercase" else [f"<0x{value:02X}>" for value in range(256)])]
    trainer = trainers.UnigramTrainer(vocab_size=450, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    content["model"]["byte_fallback"] = name == "unigram"
    return tokenizers.Tokenizer.from_str(json.dumps(content))


LOSSLESS = ["gpt2", "smollm2", "llama3", "qwen", "slashes", "llama2", "unigram"]
KINDS = [*LOSSLESS, "lowercase"]


def ours(package: tokenizers.Tokenizer) -> TokenizersTokenizer:
    size = package.get_vocab_size() + 7
    return TokenizersTokenizer(package.to_str().encode(), vocab_size=size, start_id=0)


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
