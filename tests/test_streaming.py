import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import PROSE, RUNTIME, VARIANTS, prose_bits, slow_bits, toy
from variants import thinned

from xlcli import streaming
from xlcli.config import EvalConfig, StreamConfig, validate
from xlcli.errors import CheckpointError, ConfigError, DataError, StateError
from xlcli.evaluation import evaluate
from xlcli.events import LineScore, Notice, Score, StreamStats, TokenScore
from xlcli.store.state_files import PendingText, load_state, save_state
from xlcli.streaming import stream

TEXT = PROSE.encode()


def run(model, portions, *, resume=None, save=None, stop=lambda: False, saves_start=False, **options):
    how = {"resume": resume, "save": save, "stop": stop, "saves_start": saves_start}
    return list(stream(model, portions, StreamConfig(**options), RUNTIME, **how))


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def cut(data, sizes):
    """Data in portions of the sizes given, over and over."""
    portions = []
    for size in itertools.cycle(sizes):
        portions.append(data[:size])
        data = data[size:]
        if not data:
            break
    return portions


def through_disk(path, session, model):
    """A session written to a file and read again."""
    save_state(path, session, model=model)
    return load_state(path, model=model, device="cpu")


sizes = st.lists(st.integers(1, 90), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None)
@given(sizes, st.sampled_from([("bytes", 9), ("sentencepiece", 0)]))
def test_tokens_as_the_slow_way_whatever_the_portions(sizes, case):
    kind, mem_len = case
    *tokens, stats = run(toy(kind), cut(TEXT, sizes), emit="tokens", mem_len=mem_len)
    tokens = only(tokens, TokenScore)
    assert [t.bits for t in tokens] == pytest.approx(prose_bits(*case), abs=1e-9)
    assert b"".join(t.text for t in tokens) == TEXT
    assert [t.byte for t in tokens] == [0, *itertools.accumulate(len(t.text) for t in tokens)][:-1]
    assert stats.final
    assert (stats.bytes, stats.tokens, stats.lines) == (len(TEXT), len(tokens), TEXT.count(b"\n"))
    assert stats.bits == pytest.approx(sum(prose_bits(*case)))


STREAMED = [*itertools.product(VARIANTS, (9, 0))]


@pytest.mark.parametrize("case", thinned(STREAMED, STREAMED[::3]), ids=str)
def test_every_model_is_streamed_as_the_slow_way_with_a_state_in_between(case, tmp_path):
    variant, mem_len = case
    model, text, path = toy(variant=variant), TEXT[:100], tmp_path / "s"
    save = lambda session: save_state(path, session, model=model)  # noqa: E731
    first = run(model, cut(text[:61], [7, 1, 30]), emit="tokens", mem_len=mem_len, save=save)
    resume = load_state(path, model=model, device="cpu")
    second = run(model, cut(text[61:], [1, 2, 20]), emit="tokens", resume=resume)
    known = [event for event in only(first, TokenScore) if event.byte < resume.stream.n_bytes]
    bits = [event.bits for event in known + only(second, TokenScore)]
    assert bits == pytest.approx(slow_bits(model, text, mem_len=mem_len), abs=1e-9)


@pytest.mark.parametrize("variant", ["universal", "adaptive"])
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_depth_chosen_for_a_stream_lasts_over_a_fresh_start_and_a_saved_state(variant, n_steps):
    model, kept = toy(variant=variant, n_steps=n_steps), []
    first = run(model, [b"ab\ncd\n"], emit="tokens", n_steps=n_steps, reset_on="cd", save=kept.append)
    second = run(toy(variant=variant), [b"ef"], emit="tokens", resume=kept[-1])
    bits = [event.bits for event in only(first + second, TokenScore)]
    slow = slow_bits(model, b"ab\n") + slow_bits(model, b"cd\nef")
    assert bits == pytest.approx(slow, abs=1e-9)
    with pytest.raises(StateError, match="n_steps"):
        run(toy(variant=variant, n_steps=n_steps + 1), [b"ef"], n_steps=n_steps + 1, resume=kept[-1])


@settings(max_examples=12, deadline=None)
@given(sizes, st.booleans())
def test_lines(sizes, ended):
    model = toy("sentencepiece")
    text = TEXT if ended else TEXT[:-1]
    *lines, stats = run(model, cut(text, sizes))
    lines = only(lines, LineScore)
    assert [line.text for line in lines] == text.splitlines(keepends=True)
    assert [line.line for line in lines] == list(range(1, len(lines) + 1))
    assert stats.lines == len(lines)
    costs, byte = iter(prose_bits("sentencepiece", 9) if ended else slow_bits(model, text)), 0
    for line in lines:
        assert (line.byte, line.bytes) == (byte, len(line.text))
        assert b"".join(piece for piece, _ in line.spans) == line.text
        expected = [next(costs) for _ in line.spans]
        assert [bits for _, bits in line.spans] == pytest.approx(expected, abs=1e-9)
        assert line.bits == pytest.approx(sum(expected))
        assert line.bits_per_byte == pytest.approx(line.bits / line.bytes)
        assert line.tokens == len(expected)
        byte += line.bytes


@pytest.mark.parametrize("emit", ["none", "stats", "lines", "tokens"])
@pytest.mark.parametrize("portion", [1, 10**6])
def test_totals_equal_evaluation(emit, portion, tmp_path, monkeypatch):
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path))
    model = toy("sentencepiece")
    text = TEXT + b"\xff\xfe\x00 not UTF-8, and no line end"
    (tmp_path / "t").write_bytes(text)
    [score] = only(
        evaluate(model, [tmp_path / "t"], EvalConfig(batch_size=3, segment_len=7, binary=True), RUNTIME), Score
    )
    stats = run(model, cut(text, [portion]), emit=emit)[-1]
    assert (stats.bytes, stats.tokens) == (score.bytes, score.tokens)
    assert stats.bits_per_byte == pytest.approx(score.bits_per_byte, abs=1e-9)
    assert stats.mem_len == 9
    assert stats.state_bytes == 2 * 2 * 9 * 16 * 8


def test_a_line_is_output_when_its_end_arrives():
    model, heard = toy("sentencepiece"), []

    def pipe():
        for line in (b"The fox", b" and the dog\nThe", b" dog\n", b"\n", b"end"):
            yield line
            heard.append(f"after {line}")

    heard.extend(e.text for e in stream(model, pipe(), StreamConfig(), RUNTIME) if isinstance(e, LineScore))
    assert heard == [
        "after b'The fox'", b"The fox and the dog\n", "after b' and the dog\\nThe'", b"The dog\n", "after b' dog\\n'",
        b"\n", "after b'\\n'", "after b'end'", b"end",
    ]  # fmt: skip


def test_lines_that_arrive_together_are_read_together(monkeypatch):
    model, calls = toy(), []
    score = model.network.score
    monkeypatch.setattr(
        model.network, "score", lambda x, y, s, **k: (calls.append(x.shape[1]), score(x, y, s, **k))[1], raising=False
    )
    run(model, [b"ab\n" * 500], emit="lines")
    assert calls == [512, 512, 476]


def test_words_are_given_when_whole_if_tokens_are_asked_for():
    model = toy("sentencepiece")
    seen = []

    def pipe():
        for portion in (b"The do", b"g and", b" the"):
            yield portion
            seen.append(b"|")

    events = stream(model, pipe(), StreamConfig(emit="tokens"), RUNTIME)
    seen.extend(e.text for e in events if isinstance(e, TokenScore))
    assert b"".join(seen) == b"The|" + b" dog|" + b" and|" + b" the"


def test_lines_that_wait_in_a_state_are_scored_before_new_text_comes():
    model, saved, scored, asked = toy(), [], [], []
    text = [PROSE.encode() * 9]
    begun = stream(model, text, StreamConfig(), RUNTIME, save=saved.append, stop=lambda: bool(scored))
    scored.extend(event for event in begun if isinstance(event, LineScore))

    def quiet():
        yield None
        asked.append(True)

    first = next(
        event
        for event in stream(model, quiet(), StreamConfig(), RUNTIME, resume=saved[-1])
        if isinstance(event, LineScore)
    )
    assert first.line == len(scored) + 1
    assert not asked


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes, st.integers(0, len(TEXT)), st.sampled_from(["lines", "tokens", "none"]),
    st.sampled_from(["bytes", "sentencepiece"]), st.sampled_from([0, 9]),
)  # fmt: skip
def test_two_streams_with_a_state_between_them_are_one(tmp_path, sizes, at, emit, kind, mem_len):
    model, saved = toy(kind), []
    options = {"emit": emit, "mem_len": mem_len}
    whole = run(model, [TEXT], **options)
    first = run(model, cut(TEXT[:at], sizes), save=lambda session: saved.append(session.fork()), **options)
    second = run(model, cut(TEXT[at:], sizes), resume=through_disk(tmp_path / "s", saved[-1], model), **options)
    known = saved[-1].stream.n_bytes
    kept = [e for e in first if isinstance(e, LineScore | TokenScore) and e.byte + len(e.text) <= known]
    if emit == "lines":
        kept = [line for line in kept if line.text.endswith(b"\n")]
    both, expected = kept + only(second, LineScore | TokenScore), only(whole, LineScore | TokenScore)
    assert [e.text for e in both] == [e.text for e in expected]
    assert [e.byte for e in both] == [e.byte for e in expected]
    assert [e.bits for e in both] == pytest.approx([e.bits for e in expected], abs=1e-9)
    before = saved[-1].stream
    for name in ("lines", "bytes", "tokens", "bits"):  # totals are those of the run
        assert getattr(before, f"n_{name}", before.bits) + getattr(second[-1], name) == pytest.approx(
            getattr(whole[-1], name)
        )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.integers(0, 40))
def test_bytes_without_a_token_count_as_the_bytes_that_they_are(tmp_path, sizes, at):
    text = b"The \xf5\xff fox\n\x04\n\xe6\xbc and\x1d \xf5\n\xff\xff\xff the end"
    model, saved = toy("incomplete"), []
    lines = only(run(model, [text]), LineScore)
    assert b"".join(line.text for line in lines) == text
    assert [line.byte for line in lines] == [0, 11, 13, 23]
    first = run(model, cut(text[:at], sizes), save=lambda session: saved.append(session.fork()), emit="tokens")
    resume = through_disk(tmp_path / "s", saved[-1], model)
    second = only(run(model, cut(text[at:], sizes), resume=resume, emit="tokens"), TokenScore)
    known = saved[-1].stream.n_bytes
    tokens = [token for token in only(first, TokenScore) if token.byte < known] + second
    assert b"".join(token.text for token in tokens) == text
    assert math.fsum(token.bits for token in tokens) == pytest.approx(math.fsum(line.bits for line in lines))
    assert sum("read as U+FFFD" in notice.text for notice in only(run(model, [text]), Notice)) == 1
    with pytest.raises(DataError, match="no token"):
        run(model, [text], binary=True)


WINDOWS = b"The fox\r\nand\r the dog\r\n\r\r\nend\r"


@settings(max_examples=15, deadline=None)
@given(sizes, st.integers(0, len(WINDOWS)), st.sampled_from(["lines", "tokens"]), st.booleans())
def test_line_ends_of_windows_are_lf_however_they_arrive(sizes, at, emit, flushed):
    model, saved = toy(), []
    lf = WINDOWS.replace(b"\r\n", b"\n")
    text = [part for portion in cut(WINDOWS[:at], sizes) for part in (portion, *([None] if flushed else []))]
    run(model, text, emit=emit, save=lambda session: saved.append(session.fork()))
    known = saved[-1].stream.n_bytes
    *events, stats = run(model, cut(WINDOWS[at:], sizes), emit=emit, resume=saved[-1])
    assert b"".join(e.text for e in only(events, LineScore | TokenScore))[-len(lf) + known :] == lf[known:]
    alone, before = run(model, [lf], emit=emit, binary=True)[-1], saved[-1].stream
    assert before.n_bytes + stats.bytes == alone.bytes
    assert before.n_tokens + stats.tokens == alone.tokens
    assert before.n_lines + stats.lines == alone.lines
    assert before.bits + stats.bits == pytest.approx(alone.bits)
    kept = run(model, cut(WINDOWS, sizes), emit=emit, binary=True)[-1]
    assert (kept.bytes, kept.crlf) == (len(WINDOWS), 0)


def test_line_ends_of_windows_are_counted_and_said_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path))
    model = toy("sentencepiece")
    (tmp_path / "t").write_bytes(WINDOWS)
    events = list(evaluate(model, [tmp_path / "t"], EvalConfig(), RUNTIME))
    [score], streamed = only(events, Score), run(model, cut(WINDOWS, [1]))
    assert score.crlf == streamed[-1].crlf == WINDOWS.count(b"\r\n")
    assert streamed[-1].bits_per_byte == pytest.approx(score.bits_per_byte)
    for found in (events, streamed):
        assert sum("CR LF" in notice.text for notice in only(found, Notice)) == 1


@pytest.mark.parametrize("stopped_at", range(9))
def test_a_cr_at_a_stop_is_saved(stopped_at):
    model, saved, asked = toy(), [], itertools.count()
    run(model, [b"a\r", b"\nb\r"], save=saved.append, stop=lambda: next(asked) >= stopped_at, emit="tokens")
    pending = saved[-1]
    read = pending.stream.n_bytes + len(pending.pending.data)
    assert pending.pending.data.endswith(b"\r")
    before = pending.stream
    stats = run(model, [b"\nb\r" if read == 2 else b"", b"\n"], resume=pending)[-1]
    assert (before.n_bytes + stats.bytes, before.n_lines + stats.lines) == (4, 2)


@pytest.mark.parametrize("after", [0, 1, 3, 9])
@pytest.mark.parametrize("reset_on", [None, "^The"])
def test_stopped_in_the_middle_nothing_is_lost(after, reset_on):
    model, saved, asked = toy(), [], itertools.count()
    text = TEXT * 12
    first = run(model, [text], save=saved.append, stop=lambda: next(asked) > after, reset_on=reset_on)
    assert len(saved) == 1
    assert first[-1].bytes < len(text)
    second = run(model, [], resume=saved[0], reset_on=reset_on)
    assert [e.text for e in only(first + second, LineScore)] == text.splitlines(keepends=True)
    whole = run(model, [text], reset_on=reset_on)
    assert [e.bits for e in only(first + second, LineScore)] == pytest.approx([e.bits for e in only(whole, LineScore)])


def test_a_stopped_stream_saves_a_portion_of_any_size_unscored():
    model, saved = toy(), []
    text = b"0123456789abcde\n" * 20_000

    def arriving():
        yield text
        raise AssertionError("read on after the stop")

    [stats] = run(model, arriving(), save=saved.append, stop=lambda: True, emit="none")
    assert stats.bytes == 0
    assert saved[0].pending.data == text


@pytest.mark.parametrize("emit", ["none", "stats", "lines", "tokens"])
def test_lines_that_were_read_do_not_come_again(emit):
    model, saved = toy("sentencepiece"), []
    text = b"The fox and\nthe dog\nthe fo"
    run(model, [text], save=saved.append, emit=emit)
    assert b"\n" not in saved[-1].pending.data


def test_reset_on_starts_afresh_before_the_line():
    model = toy("sentencepiece")
    *lines, _ = run(model, cut(TEXT, [13]), reset_on="^She|lazy dog")
    parts, part = [], b""
    for line in TEXT.splitlines(keepends=True):
        if line.startswith(b"She") or b"lazy dog" in line:
            parts.append(part)
            part = b""
        part += line
    assert len(parts) == 4
    expected = [bits for text in [*parts, part] for bits in slow_bits(model, text)]
    assert [bits for line in lines for _, bits in line.spans] == pytest.approx(expected, abs=1e-9)
    for emit in ("tokens", "none"):
        assert run(model, [TEXT], reset_on="^She|lazy dog", emit=emit)[-1].bits == pytest.approx(sum(expected))


def test_long_lines_come_in_parts_and_reset_on_searches_their_start(monkeypatch):
    LINE_LIMIT = 2048
    for module in (streaming.intake, streaming.output):
        monkeypatch.setattr(module, "LINE_LIMIT", LINE_LIMIT)
    model = toy(mem_len=3)
    text = b"x" * (2 * LINE_LIMIT + 100) + b" MARK\n" + b"MARK" + b"y" * LINE_LIMIT + b"\nend\n"
    for portions in ([text], cut(text, [999])):
        *lines, stats = only(run(model, portions), LineScore | StreamStats)
        lines = only(lines, LineScore)
        assert [(line.line, line.bytes) for line in lines] == [
            (1, LINE_LIMIT), (1, LINE_LIMIT), (1, 106), (2, LINE_LIMIT), (2, 5), (3, 4),
        ]  # fmt: skip
        assert b"".join(line.text for line in lines) == text
        assert [line.byte for line in lines] == [0, *itertools.accumulate(line.bytes for line in lines)][:-1]
        assert stats.lines == 3
    fresh = run(model, cut(text, [5000]), reset_on="MARK", emit="none")[-1].bits
    border = text.index(b"\n") + 1
    apart = sum(run(model, [part], emit="none")[-1].bits for part in (text[:border], text[border:]))
    assert fresh == pytest.approx(apart, abs=1e-6)


def test_the_text_held_is_bounded():
    model = toy(mem_len=2, n_layers=1)
    for text in (b"a" * 70_000, b"a b\n" * 17_000, b"\n" * 70_000):
        saved = []
        run(model, cut(text, [9999]), save=saved.append, save_every=1e-9)
        assert len(saved) > 7
        assert max(len(session.pending.data) for session in saved) <= 9999 + 2**10
        assert max(len(session.stream.scored) for session in saved) <= 2**14


def test_silence_flushes_an_unfinished_line_but_no_broken_character():
    model, seen = toy("sentencepiece"), []

    def pipe():
        yield b"login: caf\xc3"
        time.sleep(0.06)
        yield None
        seen.append("|")
        yield None
        yield b"\xa9\nnext\n"

    events = stream(model, pipe(), StreamConfig(flush_ms=50), RUNTIME)
    seen.extend((e.line, e.byte, e.text) for e in events if isinstance(e, LineScore))
    assert seen == [(1, 0, b"login: caf"), "|", (1, 10, "\u00e9\n".encode()), (2, 13, b"next\n")]


def surprising(scores, top, n_recent):
    """Scores of which fewer than this share of the latest ones before them are as high."""
    for i, score in enumerate(scores):
        before = scores[max(0, i - n_recent) : i]
        if top * len(before) >= 1 and sum(one >= score for one in before) < top * len(before):
            yield i


@pytest.mark.parametrize("emit", ["lines", "tokens"])
@pytest.mark.parametrize(("top", "n_recent"), [(0.1, 1000), (0.25, 13), (0.5, 4)])
def test_only_what_surprises_is_output_also_after_a_state(emit, top, n_recent, monkeypatch, tmp_path):
    monkeypatch.setattr(streaming.output, "RECENT", n_recent)
    # Equal lines would have equal scores but for rounding, which depends on the division into calls.
    model, text, saved = toy("sentencepiece"), b"".join((TEXT, TEXT.upper(), TEXT[::-1], TEXT.upper()[::-1], b"\n")), []

    def output(portions, **options):
        *events, stats = run(model, portions, emit=emit, **options)
        return only(events, LineScore | TokenScore), stats

    whole, _ = output([text])
    if emit == "lines":  # blank lines are left out
        whole = [line for line in whole if line.text.strip()]
    scores = [event.bits if emit == "tokens" else event.bits_per_byte for event in whole]
    places = [*surprising([round(score, 3) for score in scores], top, n_recent)]
    chosen, least = [whole[i] for i in places], sorted(scores[i] for i in places)[len(places) // 2]
    assert 0 < len(chosen) < len(whole) / 2
    found, stats = output(cut(text, [50]), top=top)
    assert [event.byte for event in found] == [event.byte for event in chosen]
    assert (stats.shown, stats.lines) == (len(chosen), text.count(b"\n"))
    found, _ = output([text], top=top, min_bits=least)
    both = [whole[i].byte for i in places if scores[i] >= least]
    assert 0 < len(both) <= len(chosen)
    assert [event.byte for event in found] == both
    first, _ = output([text[:400]], top=top, save=saved.append)
    resume = through_disk(tmp_path / "s", saved[-1], model)
    second, stats = output([text[400:]], top=top, resume=resume)
    first = [event for event in first if event.byte < resume.stream.line_start or emit == "tokens"]
    first = [event for event in first if event.byte < resume.stream.n_bytes]
    assert [event.byte for event in first + second] == [event.byte for event in chosen]
    assert stats.shown == len(second)  # of this run


def test_scores_that_are_all_equal_are_no_surprise():
    events = run(toy(), [b"ab\n" * 50], each_line=True, top=0.5)
    assert only(events, LineScore) == []
    assert (events[-1].shown, events[-1].lines) == (0, 50)


@pytest.mark.parametrize("options", [{"top": "200%"}, {"top": 0.0}, {"min_bits": -1}, {"top": 0.1, "emit": "none"}])
def test_a_selection_that_means_nothing_is_refused(options):
    with pytest.raises(ConfigError, match=r"top|min_bits"):
        validate(StreamConfig, options)


def test_every_token_is_given_to_the_one_who_asks():
    for emit in ("lines", "tokens", "none"):
        given = []
        options = StreamConfig(emit=emit, **({} if emit == "none" else {"min_bits": 1000}))
        assert not only(stream(toy(), [TEXT], options, RUNTIME, on_token=given.append), LineScore | TokenScore)
        assert given == only(run(toy(), [TEXT], emit="tokens"), TokenScore)


def test_without_flush_ms_silence_is_only_silence():
    *lines, _ = run(toy(), [b"ab", None, b"c\n", None])
    assert [line.text for line in lines] == [b"abc\n"]
    *lines, _ = run(toy(), [b"ab", None, b"c\n"], flush_ms=60_000)
    assert [line.text for line in lines] == [b"abc\n"]


@pytest.mark.parametrize("saves_start", [False, True])
def test_the_state_is_saved_every_so_often_when_something_is_new(saves_start):
    model, saved = toy(), []

    def pipe():
        for portion in (b"a\n", b"b\n", None, None, b"c\n"):
            time.sleep(0.02)
            yield portion

    save = lambda session: saved.append(session.stream.n_bytes)  # noqa: E731
    run(model, pipe(), save=save, save_every=0.01, saves_start=saves_start)
    assert saved == [0] * saves_start + [2, 4, 6, 6]


def test_a_state_of_another_text_is_saved_before_the_log_is_read():
    model, saved = toy(), []
    run(model, [b"a\n"], save=saved.append)
    [baseline] = saved

    def log():
        assert [session.stream.n_bytes for session in saved[1:]] == [2]
        yield b"b\n"

    for options in ({}, {"frozen": True}):
        del saved[1:]
        run(model, log(), resume=baseline, save=saved.append, saves_start=True, **options)
        assert saved[-1].stream.n_bytes == 4


def test_totals_are_given_while_working(monkeypatch):
    monkeypatch.setattr(streaming, "STATS_SECONDS", 0.0)
    events = run(toy(), [b"a\n", b"b\n"], emit="stats")
    assert [(e.lines, e.final) for e in events] == [(1, False), (2, False), (2, True)]
    assert events[-1].tokens_per_second > 0
    assert events[-1].lines_per_second * events[-1].busy_seconds == pytest.approx(2)


def test_speed_is_of_the_time_without_waits_for_text():
    def pipe():
        time.sleep(0.2)
        yield b"a\n"
        time.sleep(0.2)
        yield None
        time.sleep(0.2)

    totals = run(toy(), pipe(), emit="stats")[-1]
    assert totals.tokens_per_second * totals.busy_seconds == pytest.approx(totals.tokens)
    assert 0 < totals.busy_seconds <= totals.seconds - 0.6


def test_nothing_at_all():
    [stats] = run(toy(), [])
    assert (stats.bytes, stats.lines, stats.tokens, stats.bits_per_byte) == (0, 0, 0, None)


def test_a_state_that_does_not_fit_is_refused():
    model, saved = toy(), []
    run(model, [b"x\ny"], save=saved.append)
    with pytest.raises(StateError, match="mem_len=9"):
        run(model, [], resume=saved[0], mem_len=10)


def test_a_reset_within_a_crafted_token_makes_progress():
    """A sentencepiece token that spans a line end, which only a crafted state or vocabulary has."""
    model = toy("sentencepiece")
    size = int(model.tokenizer.id_sizes.max())
    token = int(model.tokenizer.id_sizes.argmax())
    text = b"\n" + b"x" * (size - 1)
    kept = []
    run(model, [], save=kept.append)
    pending = PendingText(text, np.array([token], np.int32), np.array([size], np.int32))
    resume = dataclasses.replace(kept[0], pending=pending)
    assert run(model, [b"\n"], resume=resume, reset_on="x", emit="none")[-1].bytes == size + 1


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a|a?)+$"])
def test_a_catastrophic_pattern_takes_linear_time(pattern):
    text = b"a" * 200 + b"!\nb\n"
    began = time.process_time()
    assert run(toy(n_layers=1), [text], emit="none", reset_on=pattern, mem_len=1)[-1].bytes == len(text)
    assert time.process_time() - began < 10


def test_scores_that_are_not_finite_are_an_error_and_are_not_saved():
    model, saved = toy(), []
    with torch.no_grad():
        next(model.network.parameters()).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="finite"):
        run(model, [b"ab\n"], save=saved.append)
    assert saved == []


def test_a_state_keeps_the_line_ends_that_it_has_decided(tmp_path):
    model, data, saved = toy(), b"one\r\r\ntwo\r\nthree\r", []
    whole = only(run(model, [data + b"\nfour"]), LineScore)
    run(model, [data], save=lambda s: saved.append(through_disk(tmp_path / "s", s, model)), stop=lambda: True)
    assert [(line.byte, line.text) for line in whole] == [
        (line.byte, line.text) for line in only(run(model, [b"\nfour"], resume=saved[0]), LineScore)
    ]


def test_words_that_are_not_in_the_vocabulary_are_counted_as_in_an_evaluation(tmp_path):
    model, text = toy("words"), b"The quick zebra jumps over the lazy quagga.\nThe dog\n"
    (tmp_path / "text").write_bytes(text)
    told = [[event for event in events if isinstance(event, Notice) and "<unk>" in event.text] for events in (
        run(model, [text[:9], text[9:]]), evaluate(model, [tmp_path / "text"], EvalConfig(), RUNTIME)
    )]  # fmt: skip
    assert told[0] == told[1]
    assert [notice.level for notice in told[0]] == ["warning"]
    assert not only(run(model, [b"The dog\n"]), Notice)
