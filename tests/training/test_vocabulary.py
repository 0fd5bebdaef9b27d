"""Vocabularies that fit a text badly are named; a text like that of the bundled model starts from it."""

import re
from pathlib import Path

import pytest
from short_runs import PROSE, corpus, go, of_kind, small

from xlcli import training
from xlcli.errors import ConfigError
from xlcli.events import Notice, Plan
from xlcli.store import origin
from xlcli.store.discover import ModelSummary
from xlcli.store.folder import load
from xlcli.store.layout import read_record, write_record
from xlcli.store.origin import configurations
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


@pytest.fixture
def bundled(monkeypatch):
    """A tiny model in place of the bundled one, whose text is `ENGLISH`."""
    go(small(text={"tokenizer": "sentencepiece"}, train={"max_steps": 1}), corpus(text=ENGLISH), "tales")
    for module in (prepare, origin):
        monkeypatch.setattr(module, "bundled_models", lambda: [ModelSummary("tales", Path("tales"), True)])
    return corpus(text=ENGLISH)


def begin(path, folder="m", settings=None, **options):
    """Events of a run of two steps, in which all but these settings are open."""
    tree = settings or {"train": {"max_steps": 2}, "runtime": {"dtype": "float32", "threads": 1}}
    return list(training.train([path], Path(folder), configurations(tree, or_bundled=True), **options))


def start(path, **options):
    """The model that such a run would start from."""
    return of_kind(begin(path, dry_run=True, **options), Plan)[0].init


def test_a_text_like_that_of_the_bundled_model_starts_from_it(bundled):
    events = begin(bundled)
    assert of_kind(events, Plan)[0].init == "tales"
    [notice] = [notice.text for notice in of_kind(events, Notice) if "tales" in notice.text]
    assert "--init none" in notice
    likeness = float(re.search(r"[\d.]+(?= times)", notice)[0])
    assert likeness == pytest.approx(1, abs=0.1)  # the same text, of which a part is held out
    record, tokenizer = read_record(Path("m")), "tokenizer.model"
    assert origin.origin_of(record)["weights"] == load(Path("tales")).fingerprints["weights"]
    assert Path("m", tokenizer).read_bytes() == Path("tales", tokenizer).read_bytes()
    more = {"train": {"max_steps": 3}}
    for init in ("none", "other"):
        with pytest.raises(ConfigError):
            go(more, bundled, "m", resume=True, preset=None, init=init)
    assert go(more, bundled, "m", resume=True, preset=None)[-1].step == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"text": {"tokenizer": "words"}},
        {"text": {"vocab_size": 256}},
        {"model": {"dropout": {"residual": 0.1}}},
    ],
    ids=str,
)
def test_given_settings_of_vocabulary_or_model_decline(settings, bundled):
    assert start(bundled, settings=settings) is None
    assert list(configurations({}, "small", or_bundled=True)) == ["small"]


@pytest.mark.parametrize(
    "text", [RUSSIAN, b"\xff\x00" * 999, "x", "-" * 5000, "10.0.0.1 - - [21/Nov] GET /a.html 200 512\n" * 50]
)
def test_other_text_starts_anew(text, bundled):
    settings = {"text": {"binary": True}}
    assert start(bundled, settings=settings) == "tales"
    assert start(corpus(text=text), settings=settings) is None


@pytest.mark.parametrize(("name", "value"), [("BEGINS_ANEW", 4000), ("available_bytes", lambda: 9)])
def test_a_long_text_or_a_small_machine_starts_anew(bundled, monkeypatch, name, value):
    assert start(bundled) == "tales"
    monkeypatch.setattr(prepare, name, value)
    assert start(bundled) is None


def test_a_short_text_is_named_for_new_weights_only():
    go(small(train={"max_steps": 1}), corpus(), "base")
    configs = configurations({"train": {"max_steps": 1}}, None, Path("base"))
    for model, n_notices in ((None, 1), (load(Path("base")), 0)):
        events = prepare_new([corpus()], configs, model, load)
        assert sum("general" in notice.text for notice in of_kind(events, Notice)) == n_notices
