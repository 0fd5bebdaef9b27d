"""Continuations after their contexts: the bits of their tokens in the whole text, by the formula and in plain torch."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from toys import RUNTIME, slow_bits, toy

import xlcli
from xlcli.config import EvalConfig, validate
from xlcli.errors import ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import ContinuationScore, Notice, Row, Score

ROWS = [
    ("a", "The quick brown fox jumps over", "the lazy dog."),
    ("a", "The quick brown fox jumps over ", "the best of friends"),
    ("b", "She said that\nthe fox", " and the dog were naïve"),
    ("a", "The quick brown fox jumps over", "  a dog"),
    ("c", "x", "世界 the dog being lazy does not mind"),
    ("b", "The dog, being lazy, does not mind. " * 3, "And the fox?"),
    ("b", "Is it so? Answer:\n", "yes"),
]
BLANKS = [" ", " ", " ", "  ", " ", " ", ""]


def write(path, rows, **columns):
    path.write_text(
        json.dumps([{"item": i, "one": a, "two": b} | more(columns, n) for n, (i, a, b) in enumerate(rows)])
    )
    return path


def more(columns, n):
    return {name: values[n] for name, values in columns.items()}


def events_of(model, path, **options):
    settings = EvalConfig(**{"text_field": "one", "score_field": "two"} | options)
    return list(evaluate(model, [path], settings, RUNTIME, words=True))


def only_scores(events):
    return [event for event in events if isinstance(event, ContinuationScore)]


def scores(model, path, **options):
    return only_scores(events_of(model, path, **options))


def slow(model, context, continuation, **lengths):
    """Bits, bytes and number of the tokens that do not end within the context."""
    _, sizes = model.tokenizer.tokens(context + continuation)
    kept = np.cumsum(sizes) > len(context)
    bits = np.array(slow_bits(model, context + continuation, **lengths))
    return float(bits[kept].sum()), int(sizes[kept].sum()), int(kept.sum())


@pytest.mark.parametrize("mem_len", [0, 9, 500])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_bits_are_those_of_the_tokens_in_the_whole_text(kind, mem_len, tmp_path):
    model, wanted = toy(kind), []
    for (_, context, continuation), blanks in zip(ROWS, BLANKS, strict=True):
        parts = context.rstrip(" ").encode(), (blanks + continuation.lstrip(" ")).encode()
        wanted.append(slow(model, *parts, mem_len=mem_len))
    for options in ({}, {"batch_size": 2, "segment_len": 5 if mem_len else None}):
        found = scores(model, write(tmp_path / "rows.json", ROWS), mem_len=mem_len, **options)
        assert [each.row for each in found] == [*range(1, len(ROWS) + 1)]
        for (bits, n_bytes, n_tokens), each in zip(wanted, found, strict=True):
            assert each.bits == pytest.approx(bits, abs=1e-5)
            assert (each.bytes, each.tokens) == (n_bytes, n_tokens)
            assert each.bits_per_byte == pytest.approx(each.bits / n_bytes)
            assert (each.best, each.best_per_byte) == (None, None)


def test_the_score_is_of_the_continuations_only(tmp_path):
    model, path = toy("sentencepiece"), write(tmp_path / "rows.json", ROWS)
    *_, score = events_of(model, path, mem_len=9)
    found = scores(model, path, mem_len=9)
    assert isinstance(score, Score)
    assert score.nats == pytest.approx(math.fsum(each.bits for each in found) * math.log(2), abs=1e-5)
    assert (score.bytes, score.tokens) == (sum(each.bytes for each in found), sum(each.tokens for each in found))
    assert (score.documents, score.partial, score.words) == (len(ROWS), False, 26)
    assert sum(each.tokens for each in score.by_context) <= score.tokens
    [alone] = scores(model, write(tmp_path / "one.json", ROWS[2:3]), mem_len=9)
    assert alone.bits == pytest.approx(found[2].bits, abs=1e-5)


@pytest.mark.parametrize(
    ("context", "continuation", "blanks"),
    [
        ("昨天他去学校", "学习。", ""),
        ("他说：", "“你好”", ""),
        ("ฉันจึงกาง", "ร่ม", ""),
        ("「はい」", "「いいえ」", ""),
        ("ฉันกิน ", "ข้าว", " "),
        ("在", "2024年", " "),
        ("The word", "世界", " "),
        ("世界", "is a word", " "),
    ],
)
def test_within_a_script_without_blanks_there_is_none_at_the_border(context, continuation, blanks, tmp_path):
    model, path = toy("bytes"), write(tmp_path / "rows.json", [("a", context, continuation)])
    *events, score = events_of(model, path)
    [found] = only_scores(events)
    bits, n_bytes, _ = slow(model, context.strip().encode(), (blanks + continuation).encode())
    assert (found.bits, found.bytes) == (pytest.approx(bits, abs=1e-5), n_bytes)
    is_in_one_script = "The" not in context and "2024" not in continuation and "word" not in continuation
    assert (score.words is None) == is_in_one_script  # no perplexity per word
    remarks = [each.text for each in events if isinstance(each, Notice) and "without a blank" in each.text]
    assert len(remarks) == (blanks == "")
    for joiner in ("", " ", "-"):
        if not context.endswith(" "):
            [found] = scores(model, path, joiner=joiner)
            assert found.bytes == len((joiner + continuation).encode())


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_it_does_not_matter_where_the_blank_is(kind, tmp_path):
    forms = [("The fox", "jumps"), ("The fox ", "jumps"), ("The fox", " jumps")]
    found = scores(toy(kind), write(tmp_path / "rows.json", [("a", *form) for form in forms]))
    assert len({each.bytes for each in found}) == 1
    assert [each.bits for each in found] == pytest.approx([found[0].bits] * 3, abs=1e-9)


def test_the_whole_text_less_the_context_where_tokens_agree(tmp_path):
    books = xlcli.load("books", device="cpu", threads=1)
    rows = [("a", "The children in the garden", "were playing."), ("a", "He opened it with a", "small key")]
    path = write(tmp_path / "rows.json", rows)
    events = xlcli.evaluate(books, path, words=True, text_field="one", score_field="two")
    found = [event for event in events if isinstance(event, ContinuationScore)]
    for (_, context, continuation), each in zip(rows, found, strict=True):
        whole, before = books.score(f"{context} {continuation}"), books.score(context)
        assert each.bits == pytest.approx(whole.bits - before.bits, abs=1e-3)
        given = books.score(" " + continuation, state=books.read(context))
        assert each.bits == pytest.approx(given.bits, abs=1e-3)
        assert each.bits == pytest.approx(plain(books, context, f" {continuation}"), abs=1e-3)


def plain(model, context, continuation):
    """Bits by the network alone: one call over all tokens, then a softmax."""
    tokenizer, network = model.loaded.tokenizer, model.loaded.network
    before, ids = (tokenizer.encode(text.encode()).tolist() for text in (context, context + continuation))
    assert ids[: len(before)] == before
    with torch.inference_mode():
        state = network.init_state(1, mem_len=256, segment_len=256)
        hidden, _ = network(torch.tensor([[tokenizer.start_id, *ids[:-1]]]), state)
        log_p = network.head.logits(hidden)[0].double().log_softmax(-1)
    return -sum(log_p[i, ids[i]].item() for i in range(len(before), len(ids))) / math.log(2)


def test_a_token_across_the_border_counts_as_continuation(tmp_path):
    model = toy("sentencepiece")
    texts = [
        (text[:cut], text[cut:]) for text in ("The best of friends", "quick brown fox") for cut in range(1, len(text))
    ]
    texts = [(a, b) for a, b in texts if a.strip() == a and b.strip() == b]
    events = events_of(model, write(tmp_path / "rows.json", [("a", *text) for text in texts]), joiner="")
    found = [event for event in events if isinstance(event, ContinuationScore)]
    n_across = 0
    for (context, continuation), each in zip(texts, found, strict=True):
        bits, n_bytes, n_tokens = slow(model, context.encode(), continuation.encode())
        assert (each.bytes, each.tokens) == (n_bytes, n_tokens)
        assert each.bits == pytest.approx(bits, abs=1e-5)
        n_across += n_bytes > len(continuation.encode())
    assert n_across > 0
    [notice] = [event.text for event in events if isinstance(event, Notice) and "begin in a context" in event.text]
    assert notice.startswith(f"{n_across} tokens")


def test_the_best_row_of_each_group_and_the_share_of_correct_ones(tmp_path):
    model, rng = toy("sentencepiece"), np.random.default_rng(0)
    words = ["the fox", "the lazy dog", "a", "friends", "the best of friends", "mind"]
    rows = [(str(rng.integers(9)), "She said that", words[rng.integers(6)]) for _ in range(60)]
    marks = rng.integers(2, size=60).tolist()
    items = sorted({item for item, _, _ in rows})
    for item in items:
        marks[next(i for i, row in enumerate(rows) if row[0] == item)] = 1
    for kind in (int, bool, str):
        events = events_of(
            model, write(tmp_path / "rows.json", rows, correct=[kind(each) for each in marks]), by="item"
        )
        if kind is int:
            first = events
        assert events[-1].correct == first[-1].correct
    found = [event for event in events if isinstance(event, ContinuationScore)]
    assert [event.fields["item"] for event in events if isinstance(event, Row)] == [item for item, _, _ in rows]
    for name, measure in (("best", "bits"), ("best_per_byte", "bits_per_byte")):
        shares = []
        for item in items:
            mine = [i for i, row in enumerate(rows) if row[0] == item]
            lowest = min(getattr(found[i], measure) for i in mine)
            best = [i for i in mine if getattr(found[i], measure) == lowest]
            assert [i for i in mine if getattr(found[i], name)] == best
            shares.append(sum(marks[i] for i in best) / len(best))
        expected = sum(shares) / len(shares)
        assert getattr(events[-1], name.replace("best", "correct")) == pytest.approx(expected)
    chances = [np.mean([mark for row, mark in zip(rows, marks, strict=True) if row[0] == item]) for item in items]
    score = events[-1]
    assert score.correct_by_chance == pytest.approx(np.mean(chances))
    n, z = len(items), 1.959964  # the bounds solve the quadratic equation of Wilson
    for bound in (score.correct_low, score.correct_high):
        assert (score.correct - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / n)
    assert score.correct_low < score.correct < score.correct_high
    *_, unmarked = events_of(model, write(tmp_path / "rows.json", rows), by="item")
    assert (unmarked.correct, unmarked.correct_per_byte, unmarked.correct_by_chance) == (None, None, None)
    marks = [int(item != items[-1]) for item, _, _ in rows]
    with pytest.raises(DataError, match=f"item {items[-1]}"):
        events_of(model, write(tmp_path / "rows.json", rows, correct=marks), by="item")


def test_tables_json_and_lines_of_windows_are_read_alike(tmp_path):
    model, rows = toy("sentencepiece"), [(item, a, b) for item, a, b in ROWS if "\n" not in a]
    expected = scores(model, write(tmp_path / "rows.json", rows))
    for name, dialect, end in (("a.csv", "excel", "\r\n"), ("a.tsv", "excel-tab", "\n")):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, dialect, lineterminator=end).writerows([("item", "one", "two"), *rows])
        assert scores(model, tmp_path / name) == expected
    crlf = [("a", "One\r\ntwo", "three\r\nfour\r"), ("a", "One", "two")]
    lf = [("a", "One\ntwo", "three\nfour"), ("a", "One", "two")]
    found = [scores(model, write(tmp_path / "rows.json", each)) for each in (crlf, lf)]
    assert found[0] == found[1]


@pytest.mark.parametrize("nothing", ["", None])
def test_a_continuation_without_context_begins_a_text(tmp_path, nothing):
    model = toy()
    rows = [("a", nothing, "The quick fox"), ("b", "The", "quick fox")]
    events = events_of(model, write(tmp_path / "rows.json", rows))
    found = [event for event in events if isinstance(event, ContinuationScore)]
    for score, context, continuation in zip(found, (b"", b"The"), (b"The quick fox", b" quick fox"), strict=True):
        bits, size, n_tokens = slow(model, context, continuation)
        assert (score.bytes, score.tokens) == (size, n_tokens)
        assert score.bits == pytest.approx(bits, abs=1e-4)
    assert "rows without context, whose continuation begins a text: 1" in "".join(
        event.text for event in events if isinstance(event, Notice)
    )


def test_mistakes(tmp_path):
    model = toy()
    for options in ({"each_line": True}, {"limit": 9}, {"binary": True}, {"adapt": True}, {"pairs": ("one", "two")}):
        with pytest.raises(ConfigError):
            validate(EvalConfig, {"text_field": "one", "score_field": "two"} | options)
    for options in ({}, {"text_field": "two"}):
        with pytest.raises(ConfigError, match="score_field"):
            validate(EvalConfig, {"score_field": "two"} | options)
    for rows in ([("a", 0, "x")], [("a", "x", "")], [("a", "x", " ")], [("a", "x", None)]):
        with pytest.raises(DataError, match="'two'"):
            scores(model, write(tmp_path / "rows.json", rows))
    with pytest.raises(DataError, match="'three'"):
        scores(model, write(tmp_path / "rows.json", ROWS), score_field="three")
    with pytest.raises(DataError, match="'group'"):
        scores(model, write(tmp_path / "rows.json", ROWS), by="group")
