"""Lines scored from the state of a baseline, beside a copy of the state for each of them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from toys import PROSE, RUNTIME, VARIANTS, toy
from variants import thinned

from xlcli.config import StreamConfig
from xlcli.errors import ConfigError, StateError
from xlcli.events import LineScore, RecordScore, TokenScore
from xlcli.kernels.mixture import read
from xlcli.memory.context_cache import ContextCache, new_index, new_learned
from xlcli.store.state_files import load_state, save_state
from xlcli.streaming import stream
from xlcli.text.documents import Document

NORMAL = PROSE.encode()
LINES = (
    b"The quick brown fox.\n",
    b"\n",
    b"a b a b a b a b a b\n",
    b"The quick brown fox.\n",
    NORMAL[:44] * 30 + b"\n",
)


def run(model, portions, *, resume=None, save=None, stop=lambda: False, **options):
    return list(stream(model, portions, StreamConfig(**options), RUNTIME, resume=resume, save=save, stop=stop))


def baseline(model, text=NORMAL, **options):
    """The state of a stream of normal text."""
    saved = []
    run(model, [text], save=lambda session: saved.append(session.fork()), emit="none", **options)
    return saved[-1]


def alone(model, session, line, **options):
    """Surprisals of the tokens of a line from a copy of the state."""
    tokens = run(model, [line], resume=session.fork(), emit="tokens", **options)
    return [event.bits for event in tokens if isinstance(event, TokenScore)]


def spans(events):
    return [[bits for _, bits in event.spans] for event in events if isinstance(event, LineScore)]


def assert_equal(found, expected):
    """Lines that wait are rows of one call, which adds in another order."""
    for bits, bits_alone in zip(found, expected, strict=True):
        assert bits == pytest.approx(bits_alone, abs=1e-9)


CASES = [
    *itertools.product(["bytes"], [None, *VARIANTS], [{}]),
    ("sentencepiece", None, {}),
    ("bytes", None, {"memory_dtype": "int8"}),
    ("bytes", "sinks", {"context_cache": 37}),
    ("sentencepiece", None, {"context_cache": 37}),
    ("bytes", None, {"context_cache": 100_000}),
]


@pytest.mark.parametrize("case", thinned(CASES, CASES[::2]), ids=str)
def test_each_line_is_scored_as_from_a_copy_of_the_state(case):
    kind, variant, options = case
    model = toy(kind, variant=variant)
    session = baseline(model, **options)
    found = spans(run(model, [b"".join(LINES)], resume=session.fork(), frozen=True))
    assert_equal(found, [alone(model, session, line) for line in LINES])


@pytest.mark.parametrize("options", [{}, {"context_cache": 37}], ids=str)
def test_lines_that_wait_are_scored_together_as_one_by_one(options):
    """Also with columns of each token, and behind a line that is longer than a call."""
    model = toy("sentencepiece")
    session = baseline(model, **options)
    lines = [*LINES, b"fox " * 700 + b"\n", *LINES[::-1], b"The end"]
    asked = {"frozen": True, "emit": "tokens", "columns": "entropy,rank"}
    one_by_one = run(model, lines, resume=session.fork(), **asked)
    together = run(model, [b"".join(lines)], resume=session.fork(), **asked)
    columns = [
        [[event.bits, *event.prediction.columns.values()] for event in events if isinstance(event, TokenScore)]
        for events in (one_by_one, together)
    ]
    assert np.array(columns[0]) == pytest.approx(np.array(columns[1]), abs=1e-9)
    assert together[-1].lines == one_by_one[-1].lines


def test_adapted_weights_stand_still():
    model = toy(dtype=torch.float32)
    adapted = baseline(model, adapt=True, adapt_block=16, adapt_lr=0.1, context_cache=50)
    found = spans(run(model, LINES, resume=adapted.fork(), frozen=True))
    # The same weights in a model that does not adapt:
    weights = adapted.model_state.adaptation.weights
    fixed = toy(dtype=torch.float32, folder="fixed")
    with torch.no_grad():
        for name, parameter in fixed.network.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    state = dataclasses.replace(adapted.model_state, adaptation=None)
    plain = dataclasses.replace(adapted, model_state=state)
    assert found == [alone(fixed, plain, line) for line in LINES]
    assert found[0] != spans(run(model, [LINES[0]]))[0]


def test_a_row_with_its_event_is_one_text():
    model = toy("sentencepiece")
    session = baseline(model, context_cache=50)
    texts = [b"The fox.\n  runs\n", b"A dog\n", b"The fox.\n"]
    rows = [Document(text, line=number) for number, text in enumerate(texts, 1)]
    found = run(model, rows, resume=session.fork(), frozen=True)
    records = [event for event in found if isinstance(event, RecordScore)]
    assert [event.text for event in records] == texts
    for event, text in zip(records, texts, strict=True):
        assert event.bits == sum(alone(model, session, text, reset_on_document=False))


def test_a_saved_baseline_goes_on_in_the_log_but_not_in_what_it_knows(tmp_path):
    model = toy()
    session = baseline(model, context_cache=50)
    expected = spans(run(model, [b"".join(LINES)], resume=session.fork(), frozen=True))
    found, resume = [], session
    for line in LINES:
        saved = []
        found += spans(run(model, [line], resume=resume.fork(), save=saved.append, frozen=True))
        save_state(tmp_path / "s", saved[-1], model=model)
        resume = load_state(tmp_path / "s", model=model, device="cpu")
    assert_equal(found, expected)
    assert resume.stream.n_bytes == session.stream.n_bytes + len(b"".join(LINES))
    before, after = session.model_state, resume.model_state
    assert after.seen == before.seen
    for name, tensor in before.tensors().items():
        assert torch.equal(tensor, after.tensors()[name]), name


def test_a_baseline_is_needed_and_ends_with_a_line():
    model = toy()
    with pytest.raises(ConfigError, match="baseline"):
        run(model, [b"a\n"], frozen=True)
    session = baseline(model, b"one\ntw")
    within = dataclasses.replace(session, stream=dataclasses.replace(session.stream, n_bytes=6))
    with pytest.raises(StateError, match="line"):
        run(model, [b"a\n"], resume=within, frozen=True)


@pytest.mark.parametrize("window", [5, 37, 1000])
def test_what_was_read_is_taken_back_from_the_cache_exactly(window, monkeypatch):
    """What is predicted and saved afterwards is as before, also if the text was longer than can be taken back."""
    monkeypatch.setattr("xlcli.memory.context_cache.SLACK", 300)
    draw = np.random.default_rng(window)
    n_kinds, line_ends = 5, np.arange(5) == 4

    def read_on(cache, n):
        """Log-probabilities of n further tokens."""
        texts = draw.integers(-1, n_kinds, (2, n))
        texts[0] = abs(texts[0])
        log_p = np.full((n, n_kinds), -np.log(n_kinds))
        for unread in (*cache.unread, texts):
            read(cache.index, cache.learned, line_ends, unread, log_p if unread is texts else log_p[:0])
        cache.unread.clear()
        return texts, log_p

    live = ContextCache({"context_cache": window}, new_learned(n_kinds), new_index(window))
    read_on(live, 2 * window + 300)
    before, copy = live.snapshot(), live.fork()
    for n in (0, 1, 3, 40, 200, 1):
        read_on(live, n)
        live.go_back(before, n)
        for name, tensor in copy.tensors().items():
            assert torch.equal(live.tensors()[name], tensor), name
    draw = np.random.default_rng(0)
    expected = read_on(copy, 50)[1]
    draw = np.random.default_rng(0)
    assert np.array_equal(read_on(live, 50)[1], expected)
