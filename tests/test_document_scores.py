"""The score of each document beside sums over its tokens, and the whole text."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from toys import PROSE, RUNTIME, toy

from xlcli import api
from xlcli.cli.score_report import documents_text
from xlcli.config import EvalConfig, GenerateConfig, StreamConfig
from xlcli.evaluation import evaluate
from xlcli.events import DocumentScore, Notice, Row, Score, TokenScore
from xlcli.generation import generate
from xlcli.streaming import stream

LINES = [line for line in PROSE.splitlines() if line.strip()]


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def files_in(folder, texts):
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    return paths


def rows_in(folder, texts):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n, "text": text.decode()}) + "\n" for n, text in enumerate(texts)))
    return [path]


TEXTS = [f"{line}\n".encode() for line in LINES[:4]] + [f"{LINES[5]}\n{LINES[0]}\n".encode()]


@pytest.mark.parametrize("options", [{}, {"reset_on_document": True}, {"each_line": True}, {"reset_on_change": "n"}])
@pytest.mark.parametrize("write", [files_in, rows_in])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_each_document_is_the_sum_of_its_tokens(kind, write, options, tmp_path):
    if "reset_on_change" in options and write is files_in:
        options = {"reset_on_change": "file"}
    model = toy(kind, dtype=torch.float32)
    paths = write(tmp_path, TEXTS)
    events = [*evaluate(model, paths, EvalConfig(**options), RUNTIME, per_token=True, documents=True)]
    tokens, found, [score] = only(events, TokenScore), only(events, DocumentScore), only(events, Score)
    expected = b"".join(TEXTS).splitlines(keepends=True) if "each_line" in options else TEXTS
    assert [document.document for document in found] == [*range(1, len(expected) + 1)]
    start = 0
    for document, text in zip(found, expected, strict=True):
        inside = [token for token in tokens if start < token.byte + len(token.text) <= start + len(text)]
        bits = math.fsum(token.bits for token in inside)
        assert (document.bytes, document.tokens) == (len(text), len(inside))
        assert document.words == len(text.split()) + text.count(b"\n")
        assert document.characters == len(text.decode())
        assert document.bits == pytest.approx(bits, abs=1e-9)
        assert document.bits_per_byte == pytest.approx(bits / len(text), abs=1e-9)
        assert document.bits_per_char == pytest.approx(bits / len(text.decode()), abs=1e-9)
        assert document.word_perplexity == pytest.approx(2 ** (bits / document.words), rel=1e-9)
        start += len(text)
    assert math.fsum(document.bits for document in found) == pytest.approx(score.nats / math.log(2), abs=1e-9)
    for name in ("bytes", "tokens", "words"):
        assert sum(getattr(document, name) for document in found) == getattr(score, name)
    if "each_line" not in options:
        assert [event for event in score.by_document if isinstance(event, DocumentScore)] == found
        own = [{"file": str(path)} for path in paths] if write is files_in else [{"n": n} for n in range(len(TEXTS))]
        assert [row.fields for row in score.by_document[::2]] == own


def test_documents_that_were_reset_are_those_of_the_intervals(tmp_path):
    events = [*evaluate(toy(), files_in(tmp_path, TEXTS), EvalConfig(reset_on_document=True), RUNTIME, documents=True)]
    [score] = only(events, Score)
    found = np.array([(document.bits, document.bytes) for document in only(events, DocumentScore)])
    assert found == pytest.approx(np.array(score.sums), abs=1e-9)


def test_a_token_across_two_files_and_a_part_of_a_text(tmp_path):
    paths = files_in(tmp_path, [b"The quick bro", b"wn fox jumps", b" over the lazy dog.\n"])
    model = toy("sentencepiece", dtype=torch.float32)
    for limit in (None, 20):
        events = [*evaluate(model, paths, EvalConfig(limit=limit), RUNTIME, documents=True)]
        found, [score] = only(events, DocumentScore), only(events, Score)
        assert [document.bytes for document in found] == ([13, 12, 20] if limit is None else [13, 7])
        assert math.fsum(document.bits for document in found) == pytest.approx(score.nats / math.log(2), abs=1e-9)
        assert sum(document.tokens for document in found) == score.tokens


def test_files_with_the_same_text_are_warned_of(tmp_path):
    paths = files_in(tmp_path, [TEXTS[0], TEXTS[1], TEXTS[0]])
    for given, is_told in ((paths, True), (paths[:2] + paths[:1], True), (paths[:2], False)):
        told = [event.text for event in only(evaluate(toy(), given, EvalConfig(), RUNTIME), Notice)]
        assert any(f"the same text in {given[0]} and {given[-1]}:" in text for text in told) == is_told


def test_rows_without_text_keep_their_numbers(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("n,text\n1,The fox\n2,\n3,The dog\n")
    events = [*evaluate(toy(), [path], EvalConfig(text_field="text"), RUNTIME, documents=True)]
    assert [document.document for document in only(events, DocumentScore)] == [1, 3]
    assert [row.fields["n"] for row in only(events, Row)] == ["1", "3"]


def test_more_documents_than_a_table_shows_are_reported_unless_they_are_listed(tmp_path):
    paths = rows_in(tmp_path, TEXTS[:1] * 21)
    for options, lists, is_told in (({}, {}, True), ({}, {"documents": True}, False), ({"each_line": True}, {}, False)):
        events = [*evaluate(toy(), paths, EvalConfig(**options), RUNTIME, **lists)]
        assert (
            any("21 documents" in event.text and "--documents" in event.text for event in only(events, Notice))
            == is_told
        )


def test_characters_are_not_bytes_and_none_without_utf8(tmp_path):
    paths = files_in(tmp_path, ["“Zürich”\n".encode(), b"caf\xe9\n"])
    found = only(evaluate(toy("bytes"), paths, EvalConfig(), RUNTIME, documents=True), DocumentScore)
    assert [(each.bytes, each.characters) for each in found] == [(14, 9), (5, None)]
    assert [each.bits_per_char for each in found] == [pytest.approx(found[0].bits / 9), None]


@pytest.mark.parametrize(("second", "is_told"), [("It said “no” to all.\n", True), ("It said no to all.\n", False)])
def test_documents_with_other_characters_are_reported(second, is_told, tmp_path):
    paths = files_in(tmp_path, [b"It said no to all.\n", second.encode()])
    events = [*evaluate(toy("bytes"), paths, EvalConfig(), RUNTIME)]
    assert any("bytes per character" in event.text for event in only(events, Notice)) == is_told
    assert ("bits/char" in documents_text([only(events, Score)[0]])) == is_told


@pytest.mark.parametrize("n", [1, 2, 20, 21])
def test_a_score_has_two_to_twenty_documents(n, tmp_path):
    events = [*evaluate(toy(), rows_in(tmp_path, TEXTS[:1] * n), EvalConfig(), RUNTIME)]
    assert len(only(events, Score)[0].by_document) == (2 * n if 2 <= n <= 20 else 0)


def test_documents_that_cost_more_than_without_a_model_are_named(tmp_path):
    model = toy("sentencepiece")
    strange = "\u0e0a\u0e32\u0e22\u0e0a\u0e23\u0e32\n".encode() * 12
    for texts, n_told in (([*TEXTS, strange], 1), (TEXTS, 0), ([*TEXTS * 5, strange, *TEXTS], 1)):
        paths = files_in(tmp_path, texts)
        events = [*evaluate(model, paths, EvalConfig(), RUNTIME, documents=True)]
        worst = max(only(events, DocumentScore), key=lambda score: score.bits_per_byte)
        assert n_told == (worst.bits_per_byte > 8)
        first = f"(number {worst.document}, {paths[worst.document - 1]}, is the first)"
        for problem in ("cost more than 8 bits", "are spelled in parts"):
            told = [event.text for event in only(events, Notice) if f"documents {problem}" in event.text]
            assert len(told) == n_told
            assert all(text.startswith(f"1 of {len(texts)} ") and first in text for text in told)


def test_lines_and_rows_that_cost_more_than_without_a_model_have_their_numbers(tmp_path):
    strange = "\u0e0a\u0e32\u0e22".encode() * 30
    rows = rows_in(tmp_path, [b"", *TEXTS[:4] * 6, strange])
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"\n" + b"".join(TEXTS[:4] * 6) + strange + b"\n")
    for paths, options in ((rows, {}), (rows, {"reset_on_document": True}), ([lines], {"each_line": True})):
        events = evaluate(toy("sentencepiece"), paths, EvalConfig(**options), RUNTIME)
        assert sum("(number 26 is the first)" in event.text for event in only(events, Notice)) == 2


@pytest.mark.parametrize(
    ("text", "is_told"),
    [("\u0e0a\u0e32\u0e22\u0e0a\u0e23\u0e32\n" * 3, True), (PROSE, False), ("1234567890" * 2, False)],
)
def test_a_text_that_is_spelled_in_bytes_is_reported(text, is_told, tmp_path, recwarn):
    model = toy("sentencepiece")
    (tmp_path / "text").write_text(text)
    runs = {
        "eval": evaluate(model, [tmp_path / "text"], EvalConfig(), RUNTIME),
        "stream": stream(model, [text.encode()], StreamConfig(), RUNTIME),
        "generate": generate(model, text.encode(), GenerateConfig(max_new_tokens=1), RUNTIME, seed=1),
    }
    for name, events in runs.items():
        notices = [event for event in only(events, Notice) if "parts of characters" in event.text]
        assert [notice.level for notice in notices] == ["warning"] * is_told, name
    warnings.simplefilter("always")
    for texts in (text, [text]):
        api.Model(model, RUNTIME).score(texts)
        assert sum("parts of characters" in str(warning.message) for warning in recwarn) == is_told
        recwarn.clear()


def test_a_text_of_unknown_words_is_reported_by_all(tmp_path, recwarn):
    model, text = toy("words"), "zzz yyy xxx\n"
    (tmp_path / "text").write_text(text)
    for events in (
        evaluate(model, [tmp_path / "text"], EvalConfig(), RUNTIME),
        stream(model, [text.encode()], StreamConfig(), RUNTIME),
        generate(model, text.encode(), GenerateConfig(max_new_tokens=1), RUNTIME, seed=1),
    ):
        assert sum("75.0 % of the words" in event.text for event in only(events, Notice)) == 1
    api.Model(model, RUNTIME).score(text)
    assert sum("75.0 % of the words" in str(warning.message) for warning in recwarn) == 1
