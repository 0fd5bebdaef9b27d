"""Stories in rows: the memory lasts while a column keeps its value, as if their rows were one document."""

import json

import pytest
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig, StreamConfig, validate
from xlcli.errors import ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Row, Score, TokenScore, WordScore
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming import stream
from xlcli.text.documents import Document

LINES = [line for line in PROSE.splitlines() if line]
STORIES = [1, 1, 1, 2, 1, 1, "3", 3]
ROWS = [{"story": story, "n": n, "text": text} for n, (story, text) in enumerate(zip(STORIES, LINES, strict=True))]
JOINED = [LINES[:3], LINES[3:4], LINES[4:6], LINES[6:]]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(model, path, **options):
    events = evaluate(model, [path], validate(EvalConfig, options), RUNTIME, per_token=True, words=True)
    events = [event for event in events if not isinstance(event, Notice)]
    score = next(event for event in events if isinstance(event, Score))
    return score, *([each for each in events if isinstance(each, kind)] for kind in (TokenScore, WordScore, Row))


def streamed(model, rows, emit="tokens", **options):
    """Events of a stream of rows, and the state after it; `resume` continues one."""
    states, how = [], {"resume": options.pop("resume", None)}
    settings = validate(StreamConfig, {"emit": emit, "reset_on_change": "story"} | options)
    parts = [Document(f"{row['text']}\n".encode(), row) for row in rows]
    events = [*stream(model, parts, settings, RUNTIME, save=states.append, **how)]
    return [event for event in events if isinstance(event, TokenScore | WordScore | Row)], states[-1]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
@pytest.mark.parametrize("mem_len", [0, 9, 500])
def test_rows_of_a_story_are_one_document(kind, mem_len, tmp_path):
    model = toy(kind)
    score, tokens, words, rows = evaluated(
        model, write(tmp_path / "rows.jsonl", ROWS), reset_on_change="story", mem_len=mem_len
    )
    joined = write(tmp_path / "joined.jsonl", [{"text": "\n".join(lines)} for lines in JOINED])
    expected, other_tokens, other_words, _ = evaluated(model, joined, reset_on_document=True, mem_len=mem_len)
    assert tokens == other_tokens
    assert [(each.byte, each.word, each.bits, each.token_entropy) for each in words] == [
        (each.byte, each.word, each.bits, each.token_entropy) for each in other_words
    ]
    assert (score.nats, score.documents, score.words) == (expected.nats, 4, expected.words)
    assert [row.fields["n"] for row in rows] == [*range(len(ROWS))]
    *_, apart, _, _ = evaluated(model, tmp_path / "rows.jsonl", reset_on_document=True, mem_len=mem_len)
    assert mem_len == 0 or apart != tokens


@pytest.mark.parametrize("emit", ["tokens", "words"])
def test_a_stream_has_the_numbers_of_an_evaluation(emit, tmp_path):
    model = toy("sentencepiece")
    _, tokens, words, rows = evaluated(model, write(tmp_path / "rows.jsonl", ROWS), reset_on_change="story")
    found, _ = streamed(model, ROWS, emit)
    expected = tokens if emit == "tokens" else words
    scored = [event for event in found if not isinstance(event, Row)]
    assert [each.byte for each in scored] == [each.byte for each in expected]
    assert [each.bits for each in scored] == pytest.approx([each.bits for each in expected], abs=1e-5)
    numbers = [event.fields["n"] for event in found if isinstance(event, Row)]
    assert numbers == [row.fields["n"] for row in rows] * (emit == "words")


@pytest.mark.parametrize("cut", range(1, len(ROWS)))
def test_a_stream_that_continues_knows_the_story_it_was_in(cut, tmp_path):
    model = toy("sentencepiece")
    whole, _ = streamed(model, ROWS)
    first, state = streamed(model, ROWS[:cut])
    save_state(tmp_path / "stream.state", state, model=model)
    rest, _ = streamed(model, ROWS[cut:], resume=load_state(tmp_path / "stream.state", model=model, device="cpu"))
    found = {event.byte: event for event in first + rest}
    assert [found[event.byte].bits for event in whole] == pytest.approx([event.bits for event in whole], abs=1e-9)


def test_files_of_one_story_belong_together(tmp_path):
    model = toy("sentencepiece")
    _, tokens, *_ = evaluated(model, write(tmp_path / "rows.jsonl", ROWS), reset_on_change="story")
    (tmp_path / "parts").mkdir()
    for name, rows in (("a", ROWS[:2]), ("b", ROWS[2:])):
        write(tmp_path / "parts" / name, rows)
    _, found, *_ = evaluated(model, tmp_path / "parts", reset_on_change="story")
    assert found == tokens


def test_one_story_is_no_list_of_sentences(tmp_path):
    rows = [{"story": 1, "text": "The fox jumps over the dog."}] * 9
    path = write(tmp_path / "rows.jsonl", rows)
    for options, is_told in (({"reset_on_change": "story"}, False), ({}, True)):
        events = [*evaluate(toy(), [path], EvalConfig(**options), RUNTIME)]
        assert any(isinstance(event, Notice) and "rows are read" in event.text for event in events) == is_told
        assert not any(isinstance(event, Notice) and "list of sentences" in event.text for event in events)


@pytest.mark.parametrize(
    ("stories", "told"),
    [
        (["A", "A", "B", "B"], []),
        (["A", "", "B", None, " "], ["3 rows (row 2 "]),
        (["A", "B", "A", "A", "B"], ["2 rows (row 3 "]),
        ([1, "", 1], ["1 rows (row 2 ", "1 rows (row 3 "]),
    ],
)
def test_cells_that_are_empty_and_stories_that_return_are_reported(stories, told, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"story": story, "text": "The fox."} for story in stories])
    events = evaluate(toy(), [path], EvalConfig(reset_on_change="story"), RUNTIME)
    warnings = [event.text for event in events if isinstance(event, Notice) and "'story'" in event.text]
    assert len(warnings) == len(told)
    assert all(part in warning for part, warning in zip(told, warnings, strict=True))


def test_mistakes(tmp_path):
    model = toy()
    for options in ({"each_line": True}, {"binary": True}, {"adapt": True}, {"pairs": ("a", "b")}):
        with pytest.raises(ConfigError):
            validate(EvalConfig, {"reset_on_change": "story"} | options)
    for rows in ([{"text": "a"}], [*ROWS, {"text": "b"}]):
        with pytest.raises(DataError, match="'story'"):
            evaluated(model, write(tmp_path / "rows.jsonl", rows), reset_on_change="story")
        with pytest.raises(DataError, match="'story'"):
            streamed(model, rows)
    (tmp_path / "plain.txt").write_text(PROSE)
    with pytest.raises(DataError, match="'story'"):
        evaluated(model, tmp_path / "plain.txt", reset_on_change="story")
    with pytest.raises(DataError, match="rows"):
        list(stream(model, [PROSE.encode()], StreamConfig(reset_on_change="story"), RUNTIME))
