"""Vocabularies that fit a text badly are named; the bundled model is named where it would help."""

import re
from pathlib import Path

import pytest
from runs import PROSE, corpus, go, of_kind, small, train

from xlcli import training
from xlcli.config import TextConfig
from xlcli.events import Notice, Plan
from xlcli.store.folder import load
from xlcli.store.layout import read_record, write_record
from xlcli.store.origin import configurations
from xlcli.text.corpus import Part, open_corpus
from xlcli.text.sources import InputFormat
from xlcli.training import prepare
from xlcli.training.prepare import prepare_new

RUSSIAN = "Все люди рождаются свободными и равными.\n" * 60
ENGLISH = (
    "It was a dark night, and the wind was in the trees. He had not spoken for an hour, and when he did it was only to "
    "say that the road was longer than he had thought.\n"
) * 30


def notices(init, text):
    """Warnings of a dry run that starts from a model."""
    path = corpus(text=text, name="new.txt")
    settings = {"runtime": {"dtype": "float32", "threads": 1}, "train": {"max_steps": 1}}
    events = training.train(
        [path], Path("m"), configurations(settings, None, Path(init)), init=Path(init), dry_run=True
    )
    return [(notice.level, notice.text) for notice in of_kind(events, Notice) if notice.level == "warning"]


def test_pieces_of_another_language():
    go(small(text={"tokenizer": "sentencepiece"}, train={"max_steps": 1}), corpus(text=PROSE * 3), "base")
    [(level, text)] = notices("base", RUSSIAN)
    assert level == "warning"
    assert re.search(r"\bbase\b.*\b1\.0\b", text)
    assert "--init" in text
    assert notices("base", PROSE) == []


def test_unknown_words():
    go(small(text={"tokenizer": "words"}, train={"max_steps": 1}), corpus(text=PROSE * 3), "base")
    [(level, text)] = notices("base", ENGLISH)
    assert level == "warning"
    assert "<unk>" in text
    assert notices("base", PROSE) == []


def test_bytes_fit_everything():
    go(small(train={"max_steps": 1}), corpus(), "base")
    assert notices("base", RUSSIAN) == []
    assert notices("base", b"\xff\x00" * 99) == []


@pytest.mark.parametrize(
    ("kind", "size", "expected"), [("words", 5000, 1), ("words", 9, 0), ("sentencepiece", 5000, 1)]
)
def test_a_text_too_short_for_the_vocabulary_is_named(kind, size, expected):
    tree = small(text={"tokenizer": kind, "vocab_size": size}, train={"max_steps": 1})
    events = go(tree, corpus(text=PROSE * 3), "m")
    found = [notice.text for notice in of_kind(events, Notice) if "yields" in notice.text]
    actual = load(Path("m")).tokenizer.vocab_size
    assert [re.findall(r"\d+", text.replace(",", "")) for text in found] == [[str(actual), "5000"]] * expected


def test_a_record_without_sizes_says_nothing():
    go(small(text={"tokenizer": "sentencepiece"}, train={"max_steps": 1}), corpus(text=PROSE * 3), "base")
    write_record(Path("base"), {key: value for key, value in read_record(Path("base")).items() if key != "train"})
    assert notices("base", RUSSIAN) == []


def hints(text, **options):
    part = open_corpus([corpus(text=text)], reading=InputFormat(binary=True))
    return [notice.text for notice in prepare.hint_at_bundled(TextConfig(**options), Part(part, 0, part.n_bytes))]


def test_the_bundled_model_is_named_for_text_like_its_own(monkeypatch):
    [text] = hints(ENGLISH)
    assert "books" in text
    assert hints(ENGLISH, tokenizer="words") == hints(ENGLISH, vocab_size=500) == []
    monkeypatch.setattr(prepare, "HINT_BELOW", len(ENGLISH))
    assert hints(ENGLISH) == []


@pytest.mark.parametrize(
    "text", [RUSSIAN, b"\xff\x00" * 99, "x", " " * 5000, "10.0.0.1 - - [21/Nov] GET /a.html 200 512\n" * 50]
)
def test_it_is_not_named_for_other_text(text):
    assert hints(text) == []


def test_it_is_named_once_and_only_if_nothing_is_chosen():
    path = corpus(text=ENGLISH)
    for preset, settings, expected in ((None, {}, 1), ("tiny", {}, 0), (None, {"text": {"vocab_size": 256}}, 0)):
        events = list(train(settings, [path], Path("m"), preset=preset, dry_run=True))
        assert isinstance(events[-1], Plan)
        assert len([n for n in of_kind(events, Notice) if n.level == "hint"]) == expected


def test_a_short_text_is_named_for_new_weights_only():
    go(small(train={"max_steps": 1}), corpus(), "base")
    configs = configurations({"train": {"max_steps": 1}}, None, Path("base"))
    for model, n_notices in ((None, 1), (load(Path("base")), 0)):
        events = prepare_new([corpus()], configs, model)
        assert sum("general" in notice.text for notice in of_kind(events, Notice)) == n_notices
