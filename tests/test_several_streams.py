"""Several streams at a time: each has the scores of its text alone, however the texts arrive."""

import itertools

import pytest
from test_streaming import TEXT, cut, only, run
from toys import RUNTIME, VARIANTS, toy

from xlcli.config import StreamConfig
from xlcli.errors import DataError
from xlcli.events import LineScore, Notice, StreamStats, TokenScore
from xlcli.inference import InferenceSession
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming.several import Input, stream_several
from xlcli.text.formats import Document

TEXTS = {"a": TEXT[:60], "b": TEXT[40:140], "c": b"", "d": TEXT[:7] * 5, "e": TEXT[90:150]}


class Given:
    """Inputs that appear in turn: a list of them for each call; counts waits."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.n_waits = 0

    def appeared(self):
        return self.rounds.pop(0) if self.rounds else ()

    def wait(self):
        self.n_waits += 1
        assert self.n_waits < 1000


def slowly(data, sizes):
    """Portions between which nothing has arrived."""
    for portion in cut(data, sizes):
        yield portion
        yield None


def collect(found, events):
    """Adds events by name."""
    for name, event in found:
        events.setdefault(name, []).append(event)


def several(model, *rounds, stop=lambda: False, **options):
    """Events by name."""
    events = {}
    collect(stream_several(model, Given(*rounds), StreamConfig(**options), RUNTIME, stop=stop), events)
    return events


@pytest.mark.parametrize(("variant", "mem_len"), [(None, 0), ("lsh", 0), (None, 9), *((name, 9) for name in VARIANTS)])
def test_each_has_the_scores_of_its_text_alone(variant, mem_len):
    model = toy(variant=variant)
    sizes = dict(zip(TEXTS, ([3, 20], [50], [1], [1, 2, 9], [1000]), strict=True))
    first = [Input(name, slowly(TEXTS[name], sizes[name])) for name in "abc"]
    later = [Input(name, iter(cut(TEXTS[name], sizes[name]))) for name in "de"]
    events = several(model, first, [], later, emit="tokens", mem_len=mem_len)
    for name, text in TEXTS.items():
        alone = run(model, [text], emit="tokens", mem_len=mem_len)
        assert [e.text for e in only(events[name], TokenScore)] == [e.text for e in only(alone, TokenScore)]
        expected = [event.bits for event in only(alone, TokenScore)]
        assert [event.bits for event in only(events[name], TokenScore)] == pytest.approx(expected, abs=1e-9)
        ours, theirs = events[name][-1], alone[-1]
        assert (ours.lines, ours.bytes, ours.tokens, ours.final) == (theirs.lines, theirs.bytes, theirs.tokens, True)
        assert ours.state_bytes >= theirs.state_bytes


@pytest.mark.parametrize("mem_len", [0, 9])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_documents_of_each_with_rounded_memory_are_read_alone(dtype, mem_len):
    model, options = toy(), {"emit": "tokens", "mem_len": mem_len, "memory_dtype": dtype}
    given = {name: [Document(text[:20]), text[20:30], Document(text[30:])] for name, text in TEXTS.items()}
    events = several(
        model, [Input(name, iter(parts)) for name, parts in given.items()], reset_on_document=True, **options
    )
    for name, text in TEXTS.items():
        alone = [event for part in (text[:30], text[30:]) for event in only(run(model, [part], **options), TokenScore)]
        found = only(events[name], TokenScore)
        assert [event.text for event in found] == [event.text for event in alone]
        assert [event.bits for event in found] == pytest.approx([event.bits for event in alone], abs=1e-9)


def test_lines_are_output_in_order_and_resets_are_those_of_each():
    model, options = toy("sentencepiece"), {"reset_on": "^The", "mem_len": 9}
    events = several(model, [Input(name, slowly(text, [30])) for name, text in TEXTS.items()], **options)
    for name, text in TEXTS.items():
        alone = only(run(model, [text], **options), LineScore)
        found = only(events[name], LineScore)
        assert [(e.line, e.byte, e.text) for e in found] == [(e.line, e.byte, e.text) for e in alone]
        assert [e.bits for e in found] == pytest.approx([e.bits for e in alone], abs=1e-9)


def test_calls_are_shared(monkeypatch):
    sizes, score = [], InferenceSession.score

    def counted(session, ids):
        sizes.append(ids.shape)
        return score(session, ids)

    monkeypatch.setattr(InferenceSession, "score", counted)
    several(toy(), [Input(str(i), iter([TEXT[: 100 + i % 2]])) for i in range(4)], emit="none")
    assert sizes == [(4, 100), (2, 1)]


def test_one_that_learns_is_not_joined():
    model = toy()
    events = several(model, [Input(name, iter([TEXTS[name]])) for name in "ab"], emit="tokens", context_cache=50)
    for name in "ab":
        alone = only(run(model, [TEXTS[name]], emit="tokens", context_cache=50), TokenScore)
        expected = [event.bits for event in alone]
        assert [event.bits for event in only(events[name], TokenScore)] == pytest.approx(expected, abs=1e-9)


def test_a_stopped_run_saves_every_stream_and_goes_on(tmp_path):
    model, n_calls = toy(), itertools.count()

    def inputs(parts, resume):
        return [
            Input(
                name,
                slowly(text, [11]),
                lambda name=name: (
                    load_state(tmp_path / name, model=model, device="cpu") if resume else None,
                    lambda session: save_state(tmp_path / name, session, model=model),
                ),
            )
            for name, text in parts.items()
        ]

    before = several(model, inputs(TEXTS, False), stop=lambda: next(n_calls) > 40, emit="tokens")
    states = {name: load_state(tmp_path / name, model=model, device="cpu") for name in TEXTS}
    read = {name: state.stream.n_bytes + len(state.pending.data) for name, state in states.items()}
    assert 0 < sum(read.values()) < sum(map(len, TEXTS.values()))
    after = several(model, inputs({name: text[read[name] :] for name, text in TEXTS.items()}, True), emit="tokens")
    for name, text in TEXTS.items():
        bits = [e.bits for e in only(before[name] + after[name], TokenScore)]
        expected = [e.bits for e in only(run(model, [text], emit="tokens"), TokenScore)]
        assert bits == pytest.approx(expected, abs=1e-9)


def test_one_that_fails_ends_and_the_others_go_on():
    def damaged():
        yield TEXT[:50]
        raise DataError("it is damaged.", "Get it again.")

    def absent():
        raise DataError("it is gone.", "Look for it.")

    given = [Input("bad", damaged()), Input("good", iter([TEXT])), Input("absent", iter([b"x"]), absent)]
    events, found = {}, stream_several(toy(), Given(given), StreamConfig(), RUNTIME)
    with pytest.raises(DataError, match="2 of the inputs failed"):
        collect(found, events)
    assert only(events["good"], StreamStats)[-1].bytes == len(TEXT)
    assert "it is damaged. Get it again." in only(events["bad"], Notice)[-1].text
    assert [type(event) for event in events["absent"]] == [Notice]


def test_one_that_waits_does_not_keep_the_others_waiting():
    silent, given = iter(itertools.chain([b"a line\n"], itertools.repeat(None))), {}
    seen = []

    def stop():
        return any(event.final for event in only(given.get("b", []), StreamStats))

    for name, event in stream_several(
        toy(), Given([Input("a", silent), Input("b", slowly(TEXT, [40]))]), StreamConfig(), RUNTIME, stop=stop
    ):
        given.setdefault(name, []).append(event)
        seen.append(name)
    assert only(given["b"], StreamStats)[-1].bytes == len(TEXT)
    assert [event.text for event in only(given["a"], LineScore)] == [b"a line\n"]
