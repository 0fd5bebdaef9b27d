"""The package `tokenizers` reads an exported vocabulary, and gives the ids and texts of xlcli."""

import json
from pathlib import Path

import pytest
import tokenizers
from odd_texts import VOCABULARIES, texts, vocabulary

from xlcli.interchange.vocabulary import differences, tokenizer_config, tokenizer_json
from xlcli.text.foreign import IdsTokenizer, TokenizersTokenizer
from xlcli.text.tokenizers import TOKENIZERS


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_and_texts_are_those_of_xlcli(name):
    ours = vocabulary(name)
    package = tokenizers.Tokenizer.from_str(tokenizer_json(ours).decode())
    assert package.get_vocab_size() == ours.vocab_size
    for text in texts(3000):
        ids = ours.encode(text.encode()).tolist()
        assert package.encode(text).ids == ids, text
        assert package.decode(ids) == ours.decode(ids).decode(), text


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "sentencepiece-small"])
def test_a_vocabulary_without_the_files_of_xlcli_is_read_as_one_of_others(name):
    ours = vocabulary(name)
    again = TokenizersTokenizer(tokenizer_json(ours), vocab_size=ours.vocab_size, start_id=ours.start_id)
    for text in texts(300):
        assert again.encode(text.encode()).tolist() == ours.encode(text.encode()).tolist(), text


def unequal(ours, *examples):
    """For each text whether the ids differ."""
    package = tokenizers.Tokenizer.from_str(tokenizer_json(ours).decode())
    found = (package.encode(text, add_special_tokens=False).ids for text in examples)
    return [ids != ours.encode(text.encode()).tolist() for ids, text in zip(found, examples, strict=True)]


def test_texts_with_other_ids_are_named():
    assert differences(vocabulary("bytes")) == ["text that is not UTF-8"]
    for kind in ("words", "sentencepiece"):
        assert unequal(vocabulary(kind), "x" * 1024, "x" * 1030) == [False, kind == "words"]
        assert "1,024" in differences(vocabulary(kind))[-1]
    lacking = TOKENIZERS["sentencepiece"].train([b"only blanks and line ends\n" * 9], 300)
    assert unequal(lacking, "only  blanks\n", "only\tblanks") == [False, True]
    assert differences(lacking)[-1].startswith("words with a carriage return or tab,")
    assert differences(IdsTokenizer(9, 1)) == []
    assert tokenizer_json(IdsTokenizer(9, 1)) is None


NAMED = {
    "gpt2": {"<|endoftext|>": "<|endoftext|>"},
    "qwen2": {"<|im_end|>": "<|endoftext|>", "e\u0301": "NFC"},
    "llama2": {"x": "first word", " ▁": "▁", "<s>": "special"},
    "mistral": {"x": "first word", " ▁": "▁"},
    "unigram": {"x": "first word", " ▁": "▁"},
}
"""Texts that the package reads in another way, and words of what is said of them."""


@pytest.mark.parametrize("name", NAMED)
def test_texts_with_other_ids_in_a_tokenizer_of_others_are_named(name):
    data = (Path(__file__).parent / "tokenizers" / name / "tokenizer.json").read_bytes()
    ours = TokenizersTokenizer(data, name, vocab_size=400, start_id=0)
    assert unequal(ours, *NAMED[name]) == [True] * len(NAMED[name])
    found = "; ".join(differences(ours))
    assert all(word in found for word in NAMED[name].values()), found
    assert ("first word" in found, "NFC" in found) == (name in ("llama2", "mistral", "unigram"), name == "qwen2")


def test_special_tokens_of_the_settings_are_named():
    data = (Path(__file__).parent / "tokenizers" / "llama3" / "tokenizer.json").read_bytes()
    named = json.loads(tokenizer_config(data, {"bos_token_id": 0, "eos_token_id": [7]}, {}))
    assert named["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {key: value for key, value in named.items() if key.endswith("_token")} == {"bos_token": "<|begin_of_text|>"}
