"""Folders as people have them: heads that differ or stand alone, wrapped names, older vocabularies, odd tokens."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from foreign import MISSING, TEXT, lacking
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from xlcli.errors import CheckpointError, DataError
from xlcli.interchange import import_model
from xlcli.store.folder import load
from xlcli.text.foreign import TokenizersTokenizer, converted
from xlcli.text.tokenizers import load_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
slow = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def source(tmp_path: Path) -> Iterator:
    """A function from a fixture to a copy of its folder, with changed settings."""

    def copy(name: str, **changed: object) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(FIXTURES / name / "source", folder)
        tree = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps(tree))
        return folder

    return copy


def renamed(folder: Path, change) -> None:
    """Gives the tensors of a folder other names."""
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def weights(folder: Path, target: str = "m") -> dict:
    import_model(folder, folder.parent / target)
    return load_file(folder.parent / target / "model.safetensors")


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


@pytest.mark.parametrize(("name", "table"), [("gpt2", "transformer.wte"), ("llama-smollm", "model.embed_tokens")])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(source, name, table):
    folder = source(name)
    expected = weights(folder, "expected")
    renamed(folder, lambda each: "lm_head.weight" if each == f"{table}.weight" else each)
    assert same(weights(folder), expected)
    tree = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=table):
        import_model(folder, folder.parent / "untied")


@pytest.mark.parametrize("name", ["llama", "transfo-xl-untied"])
def test_a_head_that_differs_from_a_tied_embedding_is_used(source, name):
    folder = source(name)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    expected = weights(folder, "expected")
    tree = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tree))
    assert same(weights(folder), expected)


def test_a_head_that_is_a_copy_of_a_tied_embedding_is_not_stored_twice(source):
    folder = source("qwen2")
    expected, path = weights(folder, "expected"), folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert same(weights(folder), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "transfo-xl-div4"])
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_are_left_out(source, name, wrapper):
    folder = source(name)
    expected = weights(folder, "expected")
    renamed(folder, lambda each: wrapper + each)
    assert same(weights(folder), expected)


def test_names_that_are_unknown_beside_those_of_a_wrapper_are_refused(source):
    folder = source("llama")
    renamed(folder, lambda each: each if "lm_head" in each else f"network.{each}")
    with pytest.raises(CheckpointError) as caught:
        import_model(folder, folder.parent / "m")
    assert "network." in caught.value.remedy
    renamed(folder, lambda each: each.replace("network", "module"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": tensors["module.model.norm.weight"] + 1}, path)
    with pytest.raises(CheckpointError):  # the same name twice
        import_model(folder, folder.parent / "m")


@pytest.mark.parametrize(
    ("key", "value"),
    [("is_causal", False), ("afn", "relu"), ("pruned_heads", {"0": [1]}), ("quantization_config", {"bits": 4})],
)
def test_settings_that_change_predictions_are_refused(source, key, value):
    folder = source("gpt2", **{key: value})
    with pytest.raises(CheckpointError, match=key):
        import_model(folder, folder.parent / "m")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmo", "clip_qkv", 8.0),
        ("olmo", "clip_qkv", 0),
        ("olmo", "rms_norm_eps", 1e-5),
        ("gptj", "rotary", False),
        ("gptj", "rotary_dim", None),
        ("gptj", "rotary_dim", 3),
        ("gptj", "rotary_dim", 10),
        ("gptj", "scale_attn_weights", False),
        ("gptj", "activation_function", "quick_gelu"),
        ("gpt-neox-pythia", "rotary_pct", 0.4),
        ("gpt-neox-pythia", "rotary_pct", 0),
        ("gpt-neox-pythia", "rotary_pct", 1.5),
        ("gpt-neox-pythia", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("gpt-neox-pythia", "num_attention_heads", 0),
        ("gpt-neox-pythia", "max_position_embeddings", 1),
        ("gpt-neox-pythia", "hidden_dropout", 1.5),
        ("gpt-neo", "attention_types", [[["global", "local"], 2]]),
        ("gpt-neo", "attention_types", [[["global", "strided"], 1]]),
        ("gpt-neo", "attention_types", [[["global"], 2**40]]),
        ("gpt-neo", "attention_types", [[["global"] * 1024, 1]] * 64),
        ("gpt-neo", "attention_types", [[[], -1], [["global", ["local"]], 1]]),
        ("gpt-neo", "attention_types", ["global", "local"]),
        ("gpt-neo", "attention_layers", ["local", "global"]),
        ("gpt-neo", "window_size", 1),
        ("gpt-neo", "num_layers", 2**40),
    ],
)
def test_settings_of_a_family_that_change_predictions_are_refused(source, name, key, value):
    named = {"num_attention_heads": "n_heads", "max_position_embeddings": "clamp_len", "hidden_dropout": "dropout"}
    named |= {"rotary_pct": "rotary", "rope_scaling": "type"}
    folder = source(name, **{key: value})
    with pytest.raises(CheckpointError, match=named.get(key, key)):
        import_model(folder, folder.parent / "m")


@pytest.mark.parametrize("name", ["gptj", "gpt-neox", "gpt-neo", "olmo"])
def test_a_tensor_of_a_family_that_is_missing_is_named(source, name):
    folder = source(name)
    weights = load_file(folder / "model.safetensors")
    for missing in weights:
        save_file({key: value for key, value in weights.items() if key != missing}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{missing}|fewer weights"):
            import_model(folder, folder.parent / "m")


def test_what_to_do_about_an_unknown_setting_is_said(source):
    folder = source("gpt2", a_new_setting=3)
    with pytest.raises(CheckpointError, match="a_new_setting") as caught:
        import_model(folder, folder.parent / "m")
    assert "config.json" in caught.value.remedy


def older(folder: Path, added: dict, special: dict) -> None:
    """Turns `tokenizer.json` into the files of older releases."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]))
    merges = [" ".join(each) if isinstance(each, list) else each for each in tree["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    for name, content in (("added_tokens.json", added), ("special_tokens_map.json", special)):
        if content:
            (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("added", [{}, {"<user>": 314, "<pad>": 315}])
def test_an_older_vocabulary_of_gpt2_gives_the_same_tokens(source, added):
    folder = source("gpt2-text")
    package = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if added:  # the model has 316 ids, the last of which are free then
        tree = json.loads(package.to_str())
        tree["model"]["vocab"] = {text: i for text, i in tree["model"]["vocab"].items() if i < 314}
        tree["model"]["merges"] = [
            pair for pair in tree["model"]["merges"] if "".join(pair).replace(" ", "") in tree["model"]["vocab"]
        ]
        (folder / "tokenizer.json").write_text(json.dumps(tree))
        package = tokenizers.Tokenizer.from_str(json.dumps(tree))
        package.add_tokens(["<user>"])
    older(folder, added, {"pad_token": {"content": "<pad>"}, "eos_token": "<|endoftext|>"} if added else {})
    about = import_model(folder, folder.parent / "m")
    assert (about["tokenizer"], about["notices"]) == ("tokenizers", [])
    tokenizer = load_tokenizer(folder.parent / "m")
    package.encode_special_tokens = True
    text = "The old ship's harbour,  <user> 1234 <pad>\n\n\tnaïve 漢字 <|endoftext|>\n"
    assert tokenizer.encode(text.encode()).tolist() == package.encode(text, add_special_tokens=False).ids
    assert tokenizer.texts[0] == b""  # <|endoftext|>


def test_the_token_that_begins_a_text_of_opt_is_special(source):
    folder = source("gpt2-text")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    special = {"content": "</s>", "normalized": True}
    older(folder, {}, {"bos_token": special, "unk_token": special, "pad_token": {"content": "<pad>"}})
    assert import_model(folder, folder.parent / "m")["notices"] == []
    tokenizer = load_tokenizer(folder.parent / "m")
    assert (tokenizer.start_id, tokenizer.texts[0]) == (0, b"")
    assert 0 not in tokenizer.encode(b"</s> The old ship</s>")


def test_texts_of_bloom_follow_the_token_that_ends_texts_in_training(source):
    folder = source("bloom-text", bos_token_id=1, eos_token_id=2)
    assert import_model(folder, folder.parent / "m")["notices"] == []
    assert load_tokenizer(folder.parent / "m").start_id == 2


@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "tekken.json"])
def test_a_vocabulary_of_a_kind_that_is_not_read_is_named(source, name):
    folder = source("llama")
    (folder / name).write_text("{}")
    about = import_model(folder, folder.parent / "m")
    assert about["tokenizer"] == "ids"
    assert name in about["notices"][0]


def sentencepieces(kind: str, **options: object) -> bytes:
    """A model that sentencepiece trains as for Llama."""
    options = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 390 if kind == "bpe" else 360,
        "user_defined_symbols": ["<nl>"],
    } | options
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=proto,
        model_type=kind,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=4,
        **options,
    )
    return proto.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_tokens_of_sentencepiece_are_those_of_its_library(kind):
    data = sentencepieces(kind)
    package = sentencepiece.SentencePieceProcessor(model_proto=data)
    size = package.GetPieceSize()
    tokenizer = TokenizersTokenizer(converted("tokenizer.model", data), vocab_size=size, start_id=1)
    assert {*tokenizer.separate_ids} == {0, 1, 2}
    exported = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    assert exported.decode(exported.encode("The dog é漢", add_special_tokens=False).ids) == "The dog é漢"
    words = st.sampled_from(["the", " dog", "The fox", "  ", "\t", "é", "漢字", "🙂", "12", "<nl>", ",", "'s", "x"])

    @slow
    @given(st.lists(words, min_size=1, max_size=20).map("".join))
    @example(TEXT.replace("\n", " "))
    def check(text: str) -> None:
        assert tokenizer.encode(f" {text}".encode()).tolist() == package.EncodeAsIds(text)  # it adds the first blank

    check()


def test_runs_of_blanks_that_gemma_adds_to_sentencepiece_are_tokens():
    runs = ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<b>"]
    data = sentencepieces("bpe", user_defined_symbols=runs, add_dummy_prefix=False, vocab_size=400)
    package = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = TokenizersTokenizer(converted("m", data), vocab_size=package.GetPieceSize(), start_id=1)
    words = st.sampled_from(["the", " dog", "  ", "   ", "      ", "\n", "\n\n", "é", "漢字", "12", "<b>", ",", "x"])

    @slow
    @given(st.lists(words, min_size=1, max_size=20).map("".join))
    def check(text: str) -> None:
        ids = tokenizer.encode(text.encode())
        assert ids.tolist() == package.EncodeAsIds(text)
        assert tokenizer.decode(ids) == text.encode()

    check()


def test_a_model_of_sentencepiece_becomes_the_tokenizer(source):
    folder = source("llama-text", vocab_size=320)
    (folder / "tokenizer.json").unlink()
    data = sentencepieces("bpe", vocab_size=318)
    (folder / "tokenizer.model").write_bytes(data)
    assert import_model(folder, folder.parent / "m")["tokenizer"] == "tokenizers"
    package = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert load_tokenizer(folder.parent / "m").encode(b" The dogs").tolist() == package.EncodeAsIds("The dogs")
    for damaged in (data[:-9], b"", b"IQ== 0\nIg== 1\n", sentencepieces("bpe", normalization_rule_name="nmt_nfkc")):
        (folder / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            import_model(folder, folder.parent / "damaged")


@pytest.fixture(scope="module")
def incomplete():
    return lacking(MISSING)


characters = st.sampled_from([*"The dog.\n \x04\x1dé🙂漢\xf8", "\U000f0000", "the fox", "  "])


@slow
@given(text=st.lists(characters, max_size=30).map("".join))
def test_a_text_is_spelled_or_its_first_byte_without_a_token_is_named(incomplete, text):
    tokenizer, package = incomplete
    data = text.encode()
    place = next((i for i, value in enumerate(data) if value in MISSING), None)
    if place is None:
        assert tokenizer.encode(data).tolist() == package.encode(text, add_special_tokens=False).ids
        assert tokenizer.tokens(data)[1].sum() == len(data)
    else:
        with pytest.raises(DataError, match=f"0x{data[place]:02x}.* {100 + place} "):
            tokenizer.tokens(data, 100)
    ids, sizes = tokenizer.any_tokens(data)
    read = 0
    for token, size in zip(ids.tolist(), sizes.tolist(), strict=True):
        of_token = data[read : read + size]
        if of_token[0] in MISSING:
            assert (token, size) == (tokenizer.stand_in, 1)
        else:
            assert tokenizer.decode([token]) == of_token
        read += size
    assert read == len(data)


def test_a_vocabulary_without_line_ends_or_of_characters_without_bytes_is_refused():
    with pytest.raises(CheckpointError):
        lacking((0x0A,))


def edited(folder: Path, **rules: object) -> None:
    """Gives the last token of a vocabulary rules."""
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    token = {"id": 315, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tree["model"]["vocab"] = {text: i for text, i in tree["model"]["vocab"].items() if i != 315}
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    tree["added_tokens"].append(token | {"content": "<nl>"} | rules)
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize("rules", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "special": True}, {}])
def test_added_tokens_that_strip_blanks_leave_them_and_are_named(source, rules):
    folder = source("gpt2-text")
    edited(folder, **rules)
    about = import_model(folder, folder.parent / "m")
    is_found = not rules.get("special")
    assert len(about["notices"]) == (is_found and bool(rules))
    assert all("<nl>" in notice for notice in about["notices"])
    tokenizer, text = load_tokenizer(folder.parent / "m"), b"The ship  <nl>  sails<nl> again.\n"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert ids.count(315) == 2 * is_found
    assert len(ids) < len(text) - 6 * is_found  # not spelled in bytes


@pytest.mark.parametrize(
    ("ids", "named"),
    [((65, 65), "65"), ((0, 65), ""), ((None, 65), "65"), ((None, None), "")],
)
def test_texts_that_begin_with_a_word_are_noticed(source, ids, named):
    folder = source("gpt2-text", bos_token_id=ids[0], eos_token_id=ids[1])
    notices = import_model(folder, folder.parent / "m")["notices"]
    assert [named in notice and "begin" in notice for notice in notices] == [True] * bool(named)


def test_the_check_scores_a_text_if_the_vocabulary_spells_it(source):
    folder = source("gpt2-text")
    assert import_model(folder, folder.parent / "m")["check_bits"] > 0
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["vocab"].pop("Q", None)
    tree["model"]["vocab"].pop("q")
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert import_model(folder, folder.parent / "without")["check_bits"] is None
    (folder / "tokenizer.json").unlink()
    assert import_model(folder, folder.parent / "ids")["check_bits"] is None
    assert load(folder.parent / "ids").tokenizer.kind == "ids"
