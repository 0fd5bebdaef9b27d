"""The mixture with what was read equals a slow one, and is a distribution given the past alone."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mixture as oracle
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig, GenerateConfig, OnlineConfig, validate
from xlcli.errors import ConfigError, StateError
from xlcli.inference import InferenceSession
from xlcli.kernels.mixture import read
from xlcli.memory.context_cache import REACH, new_index, new_learned
from xlcli.memory.online import UNKNOWN
from xlcli.model.head import Readout
from xlcli.online.mixture import CachedModel
from xlcli.state import State
from xlcli.store.state_files import PendingText, SessionState, load_state, save_state

WINDOW = 37
TEXT = (PROSE[:90] * 2).encode()


DRAW = random.Random(7)
MIXED = {
    "two kinds, more than 64 places": (2, 300, DRAW.choices((0, 1), k=400)),
    "three kinds, a leaf without a token": (3, 37, DRAW.choices((0, 1, 2), k=300)),
    "repeats": (20, 150, [*DRAW.choices(range(20), k=90)] * 3),
    "lines": (9, 300, [token for i in range(40) for token in (8, i % 3, i % 5, DRAW.randrange(3), 7 - i % 2)]),
    "a line longer than it counts": (4, 500, [3, *DRAW.choices((0, 1, 2), k=400), 3, 0, 3, 1]),
    "one token": (5, 37, [4] * 400),
    "a window of one, made anew": (7, 1, DRAW.choices(range(7), k=1500)),
    "a window that is made anew": (4, 30, [*DRAW.choices(range(4), k=61)] * 24),
}


def only(tokens, n_kinds):
    """True for these tokens (v)."""
    return np.isin(np.arange(n_kinds), tokens)


def distributions(n_kinds, n):
    """Log-probabilities (n v) of a model that knows nothing."""
    return np.log(np.random.default_rng(0).dirichlet(np.ones(n_kinds), n))


@pytest.mark.parametrize("n_ends", [1, 2])
@pytest.mark.parametrize(("n_kinds", "window", "ids"), MIXED.values(), ids=MIXED)
def test_the_mixture_is_that_of_the_oracle(n_kinds, window, ids, n_ends):
    line_ends = range(n_kinds - n_ends, n_kinds)
    ids = [*ids, ids[0]]
    followers = [*ids[1:]]
    followers[7::50] = [UNKNOWN] * len(followers[7::50])
    log_p = distributions(n_kinds, len(followers))
    mixed = log_p.copy()
    learned = new_learned(n_kinds)
    read(new_index(window), learned, only(line_ends, n_kinds), np.array((ids[:-1], followers)), mixed)
    slow = oracle.Mixture(n_kinds, window, line_ends)
    for token, follower, p, found in zip(ids, followers, log_p.tolist(), mixed, strict=False):
        expected = slow.read(token, None if follower == UNKNOWN else follower, p)
        assert found == pytest.approx(expected, rel=0, abs=1e-10)
    assert learned.bias == pytest.approx(slow.bias, rel=0, abs=1e-10)


@pytest.mark.parametrize("n_kinds", [2, 3, 5, 64, 100])
def test_predictions_sum_to_one(n_kinds):
    ids = np.array([random.Random(0).randrange(n_kinds) for _ in range(50)] * 3)
    mixed = distributions(n_kinds, len(ids) - 1)
    read(new_index(90), new_learned(n_kinds), only(0, n_kinds), np.array((ids[:-1], ids[1:])), mixed)
    assert np.exp(mixed).sum(axis=1) == pytest.approx(1, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 60), st.integers(0, 2500))
def test_an_index_of_the_latest_tokens_continues_like_the_whole_one(seed, n_kinds, window, n_tokens):
    draw = random.Random(seed)
    texts = np.array([[draw.randrange(n_kinds) for _ in range(n_tokens)] for _ in range(2)], np.int64)
    texts[1][[draw.random() < 0.1 for _ in range(n_tokens)]] = UNKNOWN
    results = []
    for part in (texts, texts[:, max(0, n_tokens - window - REACH) :]):
        index, learned, log_p = new_index(window), new_learned(n_kinds), distributions(n_kinds, 1)
        read(index, learned, only(0, n_kinds), np.ascontiguousarray(part), log_p[:0])
        read(index, learned, only(0, n_kinds), np.array([[1], [UNKNOWN]]), log_p)
        results.append(log_p)
    assert np.array_equal(*results)


def test_rings_that_are_full_continue_like_longer_ones(monkeypatch):
    """A window whose ring is overwritten many times predicts as one with room for the whole text."""
    texts = np.random.default_rng(0).integers(0, 3, (2, 3000))
    results = []
    for slack in (REACH, 4000):
        monkeypatch.setattr("xlcli.memory.context_cache.SLACK", slack)
        mixed = distributions(3, 3000)
        read(new_index(30), new_learned(3), only(2, 3), texts, mixed)
        results.append(mixed)
    assert np.array_equal(*results)


@pytest.fixture(scope="module")
def model():
    return toy("bytes")


def reader(model):
    return CachedModel(model.network, {"context_cache": WINDOW}, line_ends=only(10, 256))


def read_text(reader, ids, lengths, state=None):
    """Surprisals of ids, in calls of these lengths, cycled."""
    state = reader.init_state(1, mem_len=9, segment_len=8) if state is None else state
    tokens, nll, at, i = [10, *ids], [], 0, 0
    with torch.inference_mode():
        while at < len(ids):
            n = min(lengths[i % len(lengths)], len(ids) - at)
            part = torch.tensor([tokens[at : at + n + 1]])
            out = reader.score(part[:, :-1], part[:, 1:], state)
            nll, state, at, i = [*nll, *out.nll[0].tolist()], out.state, at + n, i + 1
    return nll, state


def test_cuts_change_nothing(model):
    whole, state = read_text(reader(model), TEXT, [len(TEXT)])
    for lengths in ([1], [7], [64]):
        cut, other = read_text(reader(model), TEXT, lengths)
        assert cut == pytest.approx(whole, abs=1e-9)
        assert np.allclose(other.cache.learned.weights, state.cache.learned.weights, rtol=0, atol=1e-9)


def test_repeats_pay(model):
    mixed, own = (sum(read_text(each, TEXT * 2, [64])[0]) for each in (reader(model), model.network))
    assert mixed < 0.9 * own


def test_predictions_one_by_one_are_the_scores(model):
    expected, _ = read_text(reader(model), TEXT[:100], [100])
    cached, nll = reader(model), []
    state = cached.init_state(1, mem_len=9, segment_len=8)
    with torch.inference_mode():
        for token, target in zip([10, *TEXT], TEXT[:100], strict=False):
            logits, _ = cached.logits(torch.tensor([[token]]), state.fork())
            nll.append(-float(logits[0, target]))
            state = cached.score(torch.tensor([[token]]), torch.tensor([[target]]), state).state
    assert nll == pytest.approx(expected, abs=1e-9)


def test_tokens_without_a_score_teach_the_index_alone(model):
    cached, text = reader(model), torch.tensor([[10, *TEXT[:80]]])
    with torch.inference_mode():
        out = cached.score(text[:, :-1], text[:, 51:], cached.init_state(1, mem_len=9, segment_len=8))
        own = model.network.score(text[:, :-1], text[:, 51:], model.network.init_state(1, mem_len=9, segment_len=8))
    assert out.nll.shape == (1, 30)
    assert out.nll.sum() < own.nll.sum()


def test_parts_of_a_call_change_nothing(model, monkeypatch):
    text, results = torch.tensor([[10, *TEXT[:80]]]), []
    for most, step in ((2**21, 1), (256 * 5, 1), (1, 16)):
        monkeypatch.setattr("xlcli.online.mixture.MOST_LOGITS", most)
        cached = dataclasses.replace(reader(model), step=step)
        with torch.inference_mode():
            state = cached.init_state(1, mem_len=9, segment_len=8)
            results.append(cached.score(text[:, :-1], text[:, 38:], state, readout=Readout()))
    whole, *others = results
    assert whole.nll.shape == (1, 43)
    for other in others:
        torch.testing.assert_close(other.nll, whole.nll, rtol=0, atol=1e-9)
        torch.testing.assert_close(other.readout, whole.readout, rtol=0, atol=1e-9)


def test_a_readout_sees_the_mixture(model):
    plain, _ = read_text(reader(model), TEXT[:60], [60])
    cached, text = reader(model), torch.tensor([[10, *TEXT[:60]]])
    with torch.inference_mode():
        state = cached.init_state(1, mem_len=9, segment_len=8)
        out = cached.score(text[:, :-1], text[:, 1:], state, readout=Readout())
    found = -out.readout[0].gather(1, text[0, 1:, None])[:, 0]
    assert found.tolist() == pytest.approx(plain, abs=1e-12)
    assert out.nll[0].tolist() == pytest.approx(plain, abs=1e-12)


def test_later_tokens_change_nothing(model):
    changed = bytearray(TEXT)
    changed[120] ^= 1
    one, other = (read_text(reader(model), text, [64])[0] for text in (TEXT, bytes(changed)))
    assert one[:120] == other[:120]
    assert one[120:] != other[120:]


def test_a_saved_value_continues_to_the_bit(model):
    for cut in (1, 50, 120):
        _, state = read_text(reader(model), TEXT[:cut], [64])
        value = state.cache
        loaded = type(value).restore({k: t.clone() for k, t in value.tensors().items()}, value.describe())
        forked = dataclasses.replace(state.fork(), cache=loaded)
        tail = [TEXT[cut - 1], *TEXT[cut:]]
        results = []
        for one in (state, forked):
            part = torch.tensor([tail])
            with torch.inference_mode():
                results.append(reader(model).score(part[:, :-1], part[:, 1:], one).nll)
        assert torch.equal(*results)


def test_a_saved_state_has_no_unknown_tensor(model):
    _, state = read_text(reader(model), TEXT[:60], [64])
    with pytest.raises(StateError, match=r"cache\.other"):
        State.restore(state.tensors() | {"cache.other": torch.empty(0)}, state.describe())


def test_nothing_is_learned_of_sampled_tokens(model):
    cached = reader(model)
    _, state = read_text(cached, TEXT[:60], [64])
    weights = state.cache.learned.weights.copy()
    with torch.inference_mode():
        for token in TEXT[59:90]:
            _, state = cached.logits(torch.tensor([[token]]), state)
    assert np.array_equal(state.cache.learned.weights, weights)
    assert state.cache.tensors()["texts"][1, -31:].tolist() == [UNKNOWN] * 31


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("texts", lambda t: t[1:]),
        ("texts", lambda t: t.long()),
        ("learned.weights", lambda t: t[:, 1:]),
        ("learned.weights", lambda t: t + 1e4),
        ("learned.weights", lambda t: t * math.nan),
        ("learned.weights", lambda t: t > 0),
        ("learned.squares", lambda t: t - 1),
        ("learned.squares", lambda t: t * 1e300),
        ("learned.bias", lambda t: t + 1e4),
        ("learned.bias", lambda t: t.float()),
    ],
)
def test_a_damaged_value_is_refused(model, name, change):
    state = read_text(reader(model), TEXT[:60], [64])[1]
    with torch.inference_mode():
        value = reader(model).logits(torch.tensor([[TEXT[59]]]), state)[1].cache
    tensors = value.tensors()
    with pytest.raises(ValueError, match="cache"):
        type(value).restore(tensors | {name: change(tensors[name])}, value.describe())


def test_a_state_of_the_earlier_cache_is_refused(model):
    _, state = read_text(reader(model), TEXT[:60], [64])
    with pytest.raises(StateError, match="earlier version"):
        State.restore(state.tensors() | {"cache.mixer.weights": torch.zeros(3)}, state.describe())


def test_sessions_save_and_continue_the_cache(model, tmp_path):
    def options(**changes):
        return OnlineConfig(mem_len=9, **{"context_cache": WINDOW, "adapt": True, "adapt_block": 8} | changes)

    ids = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    whole = InferenceSession.open(model, RUNTIME, options(), None)
    expected = [*whole.score(ids[:70])[0], *whole.score(ids[70:])[0]]
    first = InferenceSession.open(model, RUNTIME, options(), None)
    found = list(first.score(ids[:70])[0])
    path = tmp_path / "state"
    save_state(path, SessionState(first.state, first.last_tokens[0], PendingText(b"", ids[:0], ids[:0])), model=model)
    loaded = load_state(path, model=model, device="cpu")
    found += list(InferenceSession.open(model, RUNTIME, options(), loaded.fork()).score(ids[70:])[0])
    assert found == expected
    with pytest.raises(StateError, match=r"\b37\b.*\b5\b"):
        InferenceSession.open(model, RUNTIME, options(context_cache=5), loaded.fork())


def test_several_samples_and_documents_are_refused():
    for config in (
        lambda: validate(GenerateConfig, {"context_cache": 9, "num_samples": 2}),
        lambda: validate(EvalConfig, {"context_cache": 9, "batch_size": 2}),
        lambda: validate(EvalConfig, {"context_cache": 9, "span": "growing"}),
    ):
        with pytest.raises(ConfigError, match="context_cache"):
            config()
