"""Records of a stream: rows, groups of lines and events are output whole, with what came, however they arrive."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from toys import RUNTIME, slow_bits, toy

from xlcli.config import StreamConfig
from xlcli.config.base import compile_pattern
from xlcli.errors import InvalidSettingError
from xlcli.events import LineScore, Notice, RecordScore
from xlcli.store.state_files import StreamPosition, load_state, save_state
from xlcli.streaming import stream
from xlcli.text.documents import LONGEST_EVENT, live_texts
from xlcli.text.json_rows import json_rows
from xlcli.text.line_rows import EventStart, line_rows

JSON = (
    '{"message": "one\\ntwo", "level": {"n": [1, null, 2.5]}, "line": 9}\n'
    '{"message": null}\njunk\n'
    '{"pid": 7, "message": "thr\\u00e9e\\r\\n"}\n\n{"message": "' + "four " * 5000 + '"}\n'
)
CONTAINER = (
    "2026-11-28T10:00:00.1Z stdout F one\n2026-11-28T10:00:00.2Z stdout P two, \n"
    "2026-11-28T10:00:00.3Z stdout F and three\nno container\n2026-11-28T10:00:00.4Z stderr P cut\n"
    "2026-11-28T10:00:00.5Z stdout F by this\n"
)
TRACE = (
    "2026-11-28 ERROR boom\n  at f(1)\n\n  at g(2)\n2026-11-28 INFO fine\n2026-11-28 nothing\n  of this\n"
    "2026-11-28 WARN last\n  at h(3)\n"
)
REGEX = {"container": r"(?P<time>\S+) \S+ [FP] (?P<text>.*)", "trace": r"^\S+ (?P<level>[A-Z]+) (?P<text>.*)"}
EVENT = r"^\d{4}-"


def rows(kind, portions, warn=lambda text: None, **before):
    """Documents of one of the texts above."""
    if kind == "json":
        return live_texts(json_rows(portions), "x", ["message"], warn, **before)
    pattern = compile_pattern(REGEX[kind], "text_regex")
    event_start = compile_pattern(EVENT, "event_start") if kind == "trace" else None
    read = line_rows(portions, "x", pattern, event_start)
    return live_texts(read, "x", ["text"], warn, event_start=event_start, **before)


def before(session):
    """What `live_texts` needs to know of the rows before a state."""
    position = session.stream
    return {"n_before": position.input_line, "stream": position.stream, "unfinished": position.unfinished}


FOUND = {
    "json": [
        (1, {"message": "one\ntwo", "level": {"n": [1, None, 2.5]}, "line": 9}, b"one\ntwo\n"),
        (4, {"pid": 7, "message": "thr\u00e9e\r\n"}, "thr\u00e9e\n".encode()),
        (6, {"message": "four " * 5000}, b"four " * 5000 + b"\n"),
    ],
    "container": [
        (1, {"time": "2026-11-28T10:00:00.1Z", "text": "one"}, b"one\n"),
        (2, {"time": "2026-11-28T10:00:00.2Z", "text": "two, and three"}, b"two, and three\n"),
        (5, {"time": "2026-11-28T10:00:00.4Z", "text": "cut"}, b"cut\n"),
        (6, {"time": "2026-11-28T10:00:00.5Z", "text": "by this"}, b"by this\n"),
    ],
    "trace": [
        (1, {"level": "ERROR", "text": "boom\n  at f(1)\n\n  at g(2)"}, b"boom\n  at f(1)\n\n  at g(2)\n"),
        (5, {"level": "INFO", "text": "fine"}, b"fine\n"),
        (8, {"level": "WARN", "text": "last\n  at h(3)"}, b"last\n  at h(3)\n"),
    ],
}
TEXTS = {"json": JSON, "container": CONTAINER, "trace": TRACE}
OPTIONS = {kind: {"event_start": EVENT} if kind == "trace" else {} for kind in TEXTS}
sizes = st.lists(st.integers(1, 400), min_size=1, max_size=5)


def cut(text, sizes):
    data = text.encode()
    starts = [0, *itertools.takewhile(lambda n: n < len(data), itertools.accumulate(itertools.cycle(sizes)))]
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]


def stopping(lines, stopped):
    """These lines; then it adds a value to `stopped`."""
    yield from lines
    stopped.append(True)
    yield None


def records(events):
    return [event for event in events if isinstance(event, RecordScore)]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes)
def test_each_record_once_with_what_came_whatever_the_portions(kind, tokenizer, sizes):
    warnings = []
    options = StreamConfig(**OPTIONS[kind])
    model = toy(tokenizer)
    found = [*stream(model, rows(kind, iter(cut(TEXTS[kind], sizes)), warnings.append), options, RUNTIME)]
    assert not [event for event in found if isinstance(event, LineScore) and not isinstance(event, RecordScore)]
    assert [(event.line, event.fields, event.text) for event in records(found)] == FOUND[kind]
    assert b"".join(text for text, _ in records(found)[-1].spans) == FOUND[kind][-1][2]
    assert [*records(found)[0].fields] == [*FOUND[kind][0][1]]
    assert sum(event.bits for event in records(found)) == pytest.approx(found[-1].bits, abs=1e-6)
    assert sum(event.tokens for event in records(found)) == found[-1].tokens
    assert warnings[-1].endswith({"json": ": 2", "container": ": 1", "trace": ": 2"}[kind])


@pytest.mark.parametrize("kind", ["container", "trace"])
def test_scores_of_records_are_those_of_their_text(kind):
    model = toy()
    found = records(stream(model, rows(kind, iter([TEXTS[kind].encode()])), StreamConfig(**OPTIONS[kind]), RUNTIME))
    slow = iter(slow_bits(model, b"".join(text for *_, text in FOUND[kind])))
    for record in found:
        bits = [next(slow) for _ in record.text]
        assert record.bits == pytest.approx(sum(bits), abs=1e-9)
        assert record.bits_per_byte == pytest.approx(sum(bits) / len(bits), abs=1e-9)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_record_that_waits_is_kept_in_the_state(kind, tmp_path):
    """Stopped after each line of the input, the records of both streams are those of one."""
    model = toy()
    options = StreamConfig(**OPTIONS[kind])
    lines = TEXTS[kind].encode().splitlines(keepends=True)
    whole = [*stream(model, rows(kind, iter(lines)), options, RUNTIME)]
    for n in range(1, len(lines)):
        if b"nothing" in lines[n - 1]:
            continue  # so is what continues an event whose beginning was skipped
        saved, stopped = [], []
        portions = stopping(lines[:n], stopped)
        arguments = {"save": saved.append, "stop": lambda stopped=stopped: bool(stopped)}
        first = records(stream(model, rows(kind, portions), options, RUNTIME, **arguments))
        save_state(tmp_path / "s", saved[-1], model=model)
        resume = load_state(tmp_path / "s", model=model, device="cpu")
        texts = rows(kind, iter(lines[n:]), **before(resume))
        rest = records(stream(model, texts, options, RUNTIME, resume=resume))
        found = [(event.fields, event.text) for event in first + rest]
        assert found == [(fields, text) for _, fields, text in FOUND[kind]], n
        bits = [event.bits for event in first + rest]
        assert bits == pytest.approx([event.bits for event in records(whole)], abs=1e-9)
        if kind != "json":  # whose blank lines are no rows
            assert [event.line for event in first + rest] == [line for line, *_ in FOUND[kind]], n


def test_an_event_ends_after_a_pause_and_another_begins():
    options = StreamConfig(event_start=EVENT, flush_ms=0)
    portions = iter([b"2026- a\n", b"  b\n", None, b"  c\n", None, b"2026- d\n"])
    event_start = compile_pattern(EVENT, "event_start")
    texts = live_texts(line_rows(portions, "x", None, event_start), "x", ["text"], print, event_start=event_start)
    found = records(stream(toy(), texts, options, RUNTIME))
    assert [(event.line, event.text) for event in found] == [(1, b"2026- a\n  b\n"), (3, b"  c\n"), (4, b"2026- d\n")]
    assert [event.fields["text"] for event in found] == ["2026- a\n  b", "  c", "2026- d"]


def test_an_event_is_bounded():
    event_start = compile_pattern(EVENT, "event_start")
    line = b"  " + b"a" * 1000 + b"\n"
    data = iter([b"2026-\n", line * 200])
    texts = live_texts(line_rows(data, "x", None, event_start), "x", ["text"], print, event_start=event_start)
    found = records(stream(toy(), texts, StreamConfig(event_start=EVENT), RUNTIME))
    assert b"".join(event.text for event in found) == b"2026-\n" + line * 200
    assert all(event.bytes <= LONGEST_EVENT + len(line) for event in found)
    assert len(found) == 4


def test_colors_before_a_date_do_not_hide_that_an_event_begins():
    lines = [b"\x1b[32m2026-11-28 one\n", b"  \x1b[1mmore\n", b"\x1b[0m\x1b[38;5;1m2026-11-28\x1b[0m two\n"]
    start = EventStart(compile_pattern(EVENT, "event_start"), pytest.fail)
    found = live_texts(line_rows(iter(lines), "x", None, start), "x", ["text"], pytest.fail, event_start=start)
    assert [(bytes(row), row.continues) for row in found] == list(zip(lines, (False, True, False), strict=True))


@pytest.mark.parametrize("kind", ["plain", "json"])
@pytest.mark.parametrize(("n_before", "n_warnings"), [(49, 0), (50, 1), (200, 1)])
def test_a_start_that_matches_no_line_is_said_once(kind, n_before, n_warnings):
    warnings = []
    start = EventStart(compile_pattern(EVENT, "event_start"), warnings.append)
    lines = [b"10.0.0.1 - - [28/Nov/2026:10:00:00]\n"] * n_before + [b"2026-11-28 one\n"] + [b"more\n"] * 60
    if kind == "plain":
        found = line_rows(iter(lines), "x", None, start)
    else:
        found = filter(None, json_rows(json.dumps({"text": line.decode()}).encode() + b"\n" for line in lines))
    assert len(list(live_texts(found, "x", ["text"], pytest.fail, event_start=start))) == len(lines)
    assert len(warnings) == n_warnings


def test_selection_is_of_records():
    options = StreamConfig(min_bits=2.0)
    texts = rows("container", iter([CONTAINER.encode()]))
    everything = records(stream(toy(), rows("container", iter([CONTAINER.encode()])), StreamConfig(), RUNTIME))
    least = sorted(event.bits_per_byte for event in everything)[2]
    options = StreamConfig(min_bits=least)
    found = [*stream(toy(), texts, options, RUNTIME)]
    assert [event.line for event in records(found)] == [e.line for e in everything if e.bits_per_byte >= least]
    assert found[-1].shown == 2


def test_positions_of_earlier_versions_have_no_records():
    position = TypeAdapter(StreamPosition).validate_json(b'{"n_lines": 3, "n_bytes": 40, "line_start": 40}')
    assert (position.records, position.input_line, position.stream, position.reads) == ((), 0, None, None)


def rows_of_journal(*messages, warn=lambda text: None, **before):
    data = iter(b'{"MESSAGE": %s}\n' % message.encode() for message in messages)
    return live_texts(json_rows(data), "x", ["MESSAGE"], warn, **before)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("[27, 91, 49, 109, 195, 169]", "\x1b[1mé"),
        ('["one", "two"]', "one\ntwo"),
        ('["one", [195, 169]]', "one\né"),
        (r'"a\u0000b"', "a\0b"),
        (r'"\u001b[1mred"', "\x1b[1mred"),
    ],
)
def test_messages_of_journald_in_every_form(message, text):
    found = records(stream(toy(), rows_of_journal(message), StreamConfig(), RUNTIME))
    assert [(event.fields["MESSAGE"], event.text) for event in found] == [(text, f"{text}\n".encode())]


@pytest.mark.parametrize("message", ["[]", "null", "[1, null]", '["a", {}]', "[[]]", "[300]"])
def test_other_arrays_are_no_messages(message):
    warnings = []
    found = [*stream(toy(), rows_of_journal(message, '"b"', warn=warnings.append), StreamConfig(), RUNTIME)]
    assert [event.text for event in records(found)] == [b"b\n"]
    assert len(warnings) == 1
    assert found[-1].records == 1


def test_numbers_that_json_does_not_have_become_texts():
    row = '{"m": "a", "n": [1e400, NaN, {"x": -Infinity}], "e": -1e999, "i": 123456789012345678901234567890, "f": 1.5}'
    texts = live_texts(json_rows(iter([row.encode()])), "x", ["m"], print)
    (found,) = records(stream(toy(), texts, StreamConfig(), RUNTIME))
    kept = {"n": ["Infinity", "NaN", {"x": "-Infinity"}], "e": "-Infinity", "f": 1.5}
    kept["i"] = 123456789012345678901234567890
    assert found.fields == {"m": "a", **kept}


def test_warnings_of_a_resumed_stream_count_its_lines_on_and_totals_are_those_of_the_run():
    """Lines are those of the input since the state began, whatever the number of lines in a message."""
    saved, warnings = [], []
    first = rows_of_journal('"one\\ntwo"', "null", '"three"')
    list(stream(toy(), first, StreamConfig(text_field="MESSAGE"), RUNTIME, save=saved.append))
    second = rows_of_journal(r'"a\u0007"', "7", warn=warnings.append, **before(saved[-1]))
    found = [*stream(toy(), second, StreamConfig(text_field="MESSAGE"), RUNTIME, resume=saved[-1])]
    assert [event.line for event in records(found)] == [4]
    assert "line 5 " in warnings[0]
    assert any("line 4:" in event.text for event in found if isinstance(event, Notice))
    assert (found[-1].records, found[-1].lines, found[-1].skipped) == (1, 1, 1)  # of this run


@pytest.mark.parametrize("other", [{}, {"text_field": "b"}, {"text_regex": "(?P<text>.*)"}, {"event_start": "a"}])
def test_a_stream_warns_if_its_state_was_made_with_another_reading(other):
    saved = []
    list(stream(toy(), [b"a\n"], StreamConfig(text_field="a"), RUNTIME, save=saved.append))
    for options, n_warnings in ((other, 1), ({"text_field": "a"}, 0)):
        found = [*stream(toy(), [b"a\n"], StreamConfig(**options), RUNTIME, resume=saved[0].fork())]
        warnings = [event for event in found if isinstance(event, Notice) and "--text-field a" in event.text]
        assert len(warnings) == n_warnings


@pytest.mark.parametrize(
    "options",
    [
        {"text_regex": "(?P<line>.*)"},
        {"text_regex": "("},
        {"event_start": "["},
        {"text_regex": "(?P<text>.*)", "text_field": "a"},
        {"text_regex": "(?P<text>.*)", "binary": True},
        {"event_start": "a", "each_line": True},
        {"frozen": True, "each_line": True},
        {"frozen": True, "reset_on": "a"},
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises((InvalidSettingError, ValueError)):
        StreamConfig(**options)


@pytest.mark.parametrize("stream_after", ["stdout", "stderr"])
def test_a_line_in_parts_goes_on_after_a_restart_in_its_own_stream(stream_after):
    """A container divides a line into parts. A row of the other stream is a record of its own."""
    row = '{{"log": "{}", "stream": "{}", "time": "t"}}\n'
    first_rows = [row.format("alpha\\n", "stdout"), row.format("beta part one ", "stdout")]
    words = ["part two", "gamma", "zebra zebra", "last"]
    later_rows = [row.format(f"{word}\\n", stream_after) for word in words]
    model, settings, states = toy("sentencepiece"), StreamConfig(), []

    def found_in(lines, resume=None, **before):
        data = iter(line.encode() for line in lines)
        texts = live_texts(json_rows(data), "x", ["log"], lambda text: None, **before)
        return records(stream(model, texts, settings, RUNTIME, resume=resume, save=states.append))

    found_in(first_rows)
    found = found_in(later_rows, states[-1], **before(states[-1]))
    expected = ["beta part one ", *words]
    if stream_after == "stdout":
        expected[:2] = ["beta part one part two"]
    cut = "beta part one "  # which has no line end in its row
    assert [record.fields["log"] for record in found] == [text if text == cut else f"{text}\n" for text in expected]
    lines = [2, 4, 5, 6] if stream_after == "stdout" else [2, 3, 4, 5, 6]
    assert [record.line for record in found] == lines
    texts = "".join(f"{text}\n" for text in expected).encode()
    bits = slow_bits(model, b"alpha\n" + texts)[-len(model.tokenizer.encode(texts)) :]
    assert sum(record.bits for record in found) == pytest.approx(sum(bits), abs=1e-4)


TWO_STREAMS = [
    ("stderr", "2026- boom"),
    ("stderr", "  at f"),
    ("stdout", "2026- fine"),
    ("stderr", "  at g"),
    ("stderr", "  at h"),
    ("stdout", "  of this"),
    ("stdout", "2026- last"),
    ("stdout", "  of all"),
]
EVENTS = [
    (1, "2026- boom\n  at f\n"),
    (3, "2026- fine\n"),
    (4, "  at g\n  at h\n"),
    (6, "  of this\n"),
    (7, "2026- last\n  of all\n"),
]


def rows_of_container(form, lines, **before):
    """Documents of lines of a container, each with its stream, in the form of Docker or CRI, with or without prefix."""
    event_start = compile_pattern(EVENT if form == "docker" else r"^\S+ \S+ F 2026-", "event_start")
    data = []
    for stream_name, text in lines:
        if form == "docker":
            data.append(json.dumps({"log": f"{text}\n", "stream": stream_name, "time": "t"}) + "\n")
        else:
            data.append(f"2026-11-28T10:00:00.1Z {stream_name} F {text}\n")
    portions = iter("".join(data).encode().splitlines(keepends=True))
    if form == "docker":
        return live_texts(json_rows(portions), "x", ["log"], print, event_start=event_start, **before)
    pattern = compile_pattern(r"^\S+ \S+ F (?P<text>.*)", "text_regex") if form == "cri" else None
    read = line_rows(portions, "x", pattern, event_start)
    return live_texts(read, "x", ["text"], print, event_start=event_start, **before)


@pytest.mark.parametrize("form", ["docker", "cri", "cri with prefix"])
def test_an_event_has_lines_of_one_stream(form):
    options = StreamConfig(event_start=EVENT)
    found = records(stream(toy(), rows_of_container(form, TWO_STREAMS), options, RUNTIME))
    if form == "cri with prefix":
        texts = [event.text.decode().replace("2026-11-28T10:00:00.1Z ", "") for event in found]
        texts = [text.replace("stdout F ", "").replace("stderr F ", "") for text in texts]
    else:
        texts = [event.text.decode() for event in found]
    assert [(event.line, text) for event, text in zip(found, texts, strict=True)] == EVENTS
    if form == "docker":
        assert [event.fields["log"] for event in found] == texts  # each with its last line end, as Docker writes it


@pytest.mark.parametrize("form", ["docker", "cri"])
@pytest.mark.parametrize("n", range(1, len(TWO_STREAMS)))
def test_an_event_has_lines_of_one_stream_across_a_restart(form, n):
    model, options, saved, stopped = toy(), StreamConfig(event_start=EVENT), [], []
    arguments = {"save": saved.append, "stop": lambda: bool(stopped)}
    first = rows_of_container(form, TWO_STREAMS[:n])
    found = records(stream(model, stopping(first, stopped), options, RUNTIME, **arguments))
    rest = rows_of_container(form, TWO_STREAMS[n:], **before(saved[-1]))
    found += records(stream(model, rest, options, RUNTIME, resume=saved[-1]))
    assert [(event.line, event.text.decode()) for event in found] == EVENTS


def test_lines_that_are_left_out_are_counted_once_each():
    lines = ["1 a", "junk", "2 b", "more junk"]
    read = line_rows(
        iter(f"{line}\n".encode() for line in lines), "x", compile_pattern(r"^\d (?P<text>.*)", "text_regex")
    )
    *_, stats = stream(toy(), live_texts(read, "x", ["text"], lambda text: None), StreamConfig(), RUNTIME)
    assert (stats.records, stats.skipped) == (2, 2)
    data = iter([b'{"m": "a"}\n1 2 junk\n{"m": "b"}\n'])
    *_, stats = stream(toy(), live_texts(json_rows(data), "x", ["m"], lambda text: None), StreamConfig(), RUNTIME)
    assert (stats.records, stats.skipped) == (2, 1)


@pytest.mark.parametrize(("message", "reason"), [("null", "--all"), ('""', "empty")])
def test_a_message_that_journalctl_leaves_out_is_not_called_empty(message, reason):
    warnings = []
    list(stream(toy(), rows_of_journal('"a"', message, warn=warnings.append), StreamConfig(), RUNTIME))
    assert reason in warnings[0]
