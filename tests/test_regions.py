"""Regions of texts: their words and sums beside a computation from raw log-probabilities, string by string."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_words import log_p
from toys import RUNTIME, toy

from xlcli.config import EvalConfig, validate
from xlcli.errors import ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, RegionScore, Row, Score, WordScore
from xlcli.text.documents import Document
from xlcli.text.marks import without_marks

ROWS = [
    {"item": 1, "text": "The quick *brown fox* said: the *dog*, being lazy"},
    {"item": 2, "text": "*She* said that\nthe fox and *the dog were* friends"},
    {"item": 3, "text": "The dog, being lazy, does not *mind.*"},
    {"item": 4, "text": "Nothing is marked here"},
]
NUMBERS = ["3-4, 7", "1, 7-9", "7", None]  # the same regions by numbers of words


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def events_of(model, path, **options):
    options = {"reset_on_document": True} | options
    return [*evaluate(model, [path], EvalConfig(**options), RUNTIME, words=True)]


def plain_rows():
    return [row | {"text": row["text"].replace("*", ""), "at": at} for row, at in zip(ROWS, NUMBERS, strict=True)]


def by_hand(model, text):
    """Regions of a text with marks, from its tokens and the log-probabilities of the network alone."""
    plain = text.replace("*", "") + "\n"
    ids = model.tokenizer.encode(plain.encode()).tolist()
    pieces = [model.tokenizer.decode([i]).decode() for i in ids]  # the text is ASCII
    vocabulary = [model.tokenizer.decode([i]).decode("utf-8", "replace") for i in range(model.tokenizer.vocab_size)]
    begins = [i for i, each in enumerate(vocabulary) if each[:1].isspace() or "\u4e00" <= each[:1] <= "\u9fff"]
    p = log_p(model, ids).double()
    ends = p[:, begins].logsumexp(-1)  # that a word ends before a token
    words, at, start = [], 0, 0
    for i in range(1, len(ids) + 1):
        is_after_line = pieces[i - 1].endswith("\n")
        is_next_word = i < len(ids) and pieces[i][:1].isspace() and not pieces[i - 1].isspace()
        if i < len(ids) and not is_after_line and not is_next_word:
            continue
        text_of = "".join(pieces[start:i])
        nats = ends[start].item() if start and not pieces[start - 1].endswith("\n") else 0.0
        nats -= sum(p[j, ids[j]].item() for j in range(start, i)) + (0.0 if is_after_line else ends[i].item())
        if text_of.strip():
            first = at + len(text_of) - len(text_of.lstrip())
            words.append({"start": first, "text": text_of.strip(), "tokens": i - start, "bits": nats / math.log(2)})
        at, start = at + len(text_of), i
    regions = []
    for number, match in enumerate(re.finditer(r"\*([^*]+)\*", text)):
        start = match.start() - 2 * number
        end = start + len(match[1])
        inside = [
            i for i, word in enumerate(words) if word["start"] < end and start < word["start"] + len(word["text"])
        ]
        after = [word["bits"] for word in words[inside[-1] + 1 :]]
        regions.append(
            {
                "number": inside[0] + 1,
                "text": " ".join(words[i]["text"] for i in inside),
                "words": len(inside),
                "tokens": sum(words[i]["tokens"] for i in inside),
                "bits": pytest.approx(sum(words[i]["bits"] for i in inside), abs=1e-4),  # scores are kept in float32
                "next_bits": pytest.approx(after[0], abs=1e-4) if after else None,
                "next_two_bits": pytest.approx(sum(after[:2]), abs=1e-4) if len(after) > 1 else None,
            }
        )
    return regions


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_regions_as_by_hand(kind, tmp_path):
    model = toy(kind, mem_len=300)
    events = events_of(model, write(tmp_path / "rows.jsonl", ROWS), region_mark="*")
    found = only(events, RegionScore)
    for row, given_row in enumerate(ROWS, 1):
        expected = by_hand(model, given_row["text"])
        of_row = [region for region in found if region.document == row]
        assert [region.region for region in of_row] == [*range(1, len(expected) + 1)]
        for region, columns in zip(of_row, expected, strict=True):
            assert {name: getattr(region, name) for name in columns} == columns
    assert [region.text for region in found] == ["brown fox", "dog,", "She", "the dog were", "mind."]


@pytest.mark.parametrize("options", [{}, {"split_punctuation": True}, {"reset_on_document": False}, {"adapt": True}])
def test_marks_change_nothing_else_to_the_bit(options, tmp_path):
    if "adapt" in options:
        options = options | {"reset_on_document": None}
    model = toy("sentencepiece")
    marked = events_of(model, write(tmp_path / "marked.jsonl", ROWS), region_mark="*", **options)
    plain = events_of(model, write(tmp_path / "plain.jsonl", plain_rows()), **options)
    words = only(marked, WordScore)
    assert [(w.document, w.line, w.number, w.byte, w.word, w.bits, w.naive_bits, w.token_entropy) for w in words] == [
        (w.document, w.line, w.number, w.byte, w.word, w.bits, w.naive_bits, w.token_entropy)
        for w in only(plain, WordScore)
    ]
    ours, theirs = only(marked, Score)[0], only(plain, Score)[0]
    assert (ours.nats, ours.bytes, ours.words, ours.chars) == (theirs.nats, theirs.bytes, theirs.words, theirs.chars)
    warnings = [event.text for event in only(marked, Notice) if event.level == "warning"]
    assert not any("around words" in text for text in warnings)


def test_regions_sum_to_the_words_of_their_numbers(tmp_path):
    events = events_of(toy("sentencepiece"), write(tmp_path / "rows.jsonl", ROWS), region_mark="*")
    words, total = only(events, WordScore), 0.0
    for region in only(events, RegionScore):
        inside = [w for w in words if (w.document, w.columns["region"]) == (region.document, region.region)]
        assert region.bits == pytest.approx(math.fsum(w.bits for w in inside), abs=1e-9)
        assert (region.words, region.tokens) == (len(inside), sum(w.tokens for w in inside))
        assert region.byte == inside[0].byte
        total += region.bits
    outside = math.fsum(w.bits for w in words if w.columns["region"] == 0)
    assert total + outside == pytest.approx(math.fsum(w.bits for w in words), abs=1e-9)
    assert "1 of 4 rows have no region (row 4 is the first)" in [event.text for event in only(events, Notice)]


def test_columns_of_a_region_are_sums_or_those_of_its_first_or_last_word(tmp_path):
    (tmp_path / "counts.txt").write_text("the fox and the dog\n")
    asked = f"length,last,next_entropy,entropy_reduction,temperature=2,layers,rank,frequency={tmp_path / 'counts.txt'}"
    path = write(tmp_path / "rows.jsonl", ROWS)
    events = events_of(toy("sentencepiece"), path, region_mark="*", columns=asked)
    words, sums = only(events, WordScore), ("length", "entropy_reduction", "temperature_2", "layer_1", "frequency")
    for region in only(events, RegionScore):
        inside = [w for w in words if (w.document, w.columns["region"]) == (region.document, region.region)]
        assert region.naive_bits == pytest.approx(math.fsum(w.naive_bits for w in inside), abs=1e-9)
        assert region.token_entropy == inside[0].token_entropy
        expected = {name: pytest.approx(math.fsum(w.columns[name] for w in inside), abs=1e-9) for name in sums}
        expected |= {name: inside[-1].columns[name] for name in ("last", "next_entropy")}
        assert region.columns == expected | {"rank": inside[0].columns["rank"]}
        assert region.columns["length"] == len(region.text.replace(" ", ""))


def test_each_region_comes_after_its_row_and_before_the_next(tmp_path):
    events = events_of(toy(), write(tmp_path / "rows.jsonl", ROWS), region_mark="*")
    row = 0
    for event in events:
        if isinstance(event, Row):
            row = event.document
        if isinstance(event, WordScore | RegionScore):
            assert event.document == row


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_column_of_numbers_gives_the_same_regions(kind, tmp_path):
    model = toy(kind)
    marked = events_of(model, write(tmp_path / "marked.jsonl", ROWS), region_mark="*")
    named = events_of(model, write(tmp_path / "named.jsonl", plain_rows()), region_mark="column:at")
    assert only(named, RegionScore) == only(marked, RegionScore)
    assert only(named, WordScore) == only(marked, WordScore)


def test_characters_that_are_words_are_joined_without_blanks(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "我*爱你 ab* 吗"}])
    [region] = only(events_of(toy("bytes"), path, region_mark="*"), RegionScore)
    assert (region.text, region.words, region.number, region.byte) == ("爱你 ab", 3, 2, 3)


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [("3", "3"), ("3 - 4", "3-4"), ("3–4;", None), ("1,3-4", "1, 3-4"), ("1 3-4", "1, 3-4"), (3, "3"), ("3.0", "3")]
    + [(cell, None) for cell in ("4-3", "3, 2", "2-3 3", "x", "3-", "-3", "3.5", "1e1", [3, 4], True)],
)
def test_numbers_of_words(cell, numbers, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "one two three four five", "at": cell}])
    if numbers is None:
        with pytest.raises(DataError, match="row 1"):
            events_of(toy(), path, region_mark="column:at")
        return
    regions = only(events_of(toy(), path, region_mark="column:at"), RegionScore)
    spans = [(r.number, r.number + r.words - 1) for r in regions]
    assert ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans) == numbers


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("*", "The *quick fox"),
        ("*", "The *quick* *fox"),
        ("[]", "The quick] fox"),
        ("[]", "The [quick [brown] fox]"),
        ("[]", "The [quick fox"),
        ("*", "No mark at all"),
        ("*", "A *do*g*gy* word"),  # two regions of one word
        ("[]", "An empty [ ] region"),
        ("column:at", "one two"),  # of which the third is asked for
        ("column:to", "one two"),
        ("column:other", "one two"),
    ],
)
def test_what_is_no_region_is_refused_with_its_row(mark, text, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": text, "at": 3, "to": "2-3"}])
    with pytest.raises(DataError, match=r"row 1|no row"):
        events_of(toy(), path, region_mark=mark)


@pytest.mark.parametrize("mark", ["", "a", "1", " ", "***", "*a", "column:", "column"])
def test_what_is_no_mark_is_refused(mark):
    with pytest.raises(ConfigError, match="region_mark"):
        validate(EvalConfig, {"region_mark": mark})


@pytest.mark.parametrize("other", [{"pairs": ("a", "b")}, {"limit": 9}, {"binary": True}])
def test_regions_need_whole_rows(other):
    with pytest.raises(ConfigError, match="region_mark"):
        validate(EvalConfig, {"region_mark": "*"} | other)


def test_plain_text_has_no_regions(tmp_path):
    (tmp_path / "text.txt").write_text("The *quick* fox\n")
    with pytest.raises(DataError, match="rows"):
        events_of(toy(), tmp_path / "text.txt", region_mark="*")


@given(
    st.lists(st.tuples(st.text("ab é\r\n界 ", min_size=1), st.booleans()), max_size=9),
    st.sampled_from(["*", "[]", "**"]),
)
def test_removed_marks_leave_the_text_and_the_places(parts, marks):
    opening, closing = ("[", "]") if marks == "[]" else (marks, marks)
    text, plain, expected = "", "", []
    for part, is_marked in parts:
        if is_marked:
            expected.append(part.replace("\r\n", "\n"))
        text += f"{opening}{part}{closing} " if is_marked else part
        plain += f"{part} " if is_marked else part
    # A CR at the end of a part may meet an LF that another part begins with.
    if plain.count("\r\n") != sum(part.count("\r\n") for part, _ in parts):
        return
    [found] = without_marks(iter([Document(text.encode(), {"n": 1})]), "f", marks[:1] if marks == "**" else marks)
    assert found == plain.replace("\r\n", "\n").encode()
    assert [found[start:end].decode() for start, end in found.regions] == expected
    assert found.fields == {"n": 1}


def test_numbers_of_words_are_not_those_of_marks_and_words():
    with pytest.raises(ConfigError, match="split_punctuation"):
        validate(EvalConfig, {"region_mark": "column:critical", "split_punctuation": True})
    assert validate(EvalConfig, {"region_mark": "*", "split_punctuation": True})
