"""The cache over what was read equals an obvious implementation, and is a distribution given the past alone."""

import dataclasses
import itertools
import math
import random
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import context_cache as oracle
from toys import PROSE, RUNTIME, toy

from xlcli.config import EvalConfig, GenerateConfig, OnlineConfig, validate
from xlcli.errors import ConfigError, StateError
from xlcli.inference import InferenceSession
from xlcli.memory.context_cache import N_LATEST, ORDERS, ContextIndex
from xlcli.memory.online import UNKNOWN
from xlcli.online.cache import CachedModel
from xlcli.store.state_files import PendingText, SessionState, load_state, save_state

WINDOW = 37
TEXT = (PROSE[:90] * 2).encode()


def slow_followers(inputs, targets, window):
    """Counts of what followed the present context of each order within the window, read from the text anew."""
    oldest = max(0, len(inputs) - window)
    found = []
    for order in ORDERS:
        context = inputs[len(inputs) - order :]
        if order > len(inputs):
            break
        places = [
            at
            for at in range(oldest, len(inputs))
            if targets[at] != UNKNOWN and at + 1 >= order and inputs[at + 1 - order : at + 1] == context
        ]
        if order:
            places = places[-N_LATEST:]
        if not places:
            break
        counts = {}
        for at in places:
            counts[targets[at]] = counts.get(targets[at], 0) + 1
        found.append((len(found), counts, len(places)))
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 60), st.integers(0, 200))
def test_followers_are_those_of_the_text(seed, n_kinds, window, n_tokens):
    draw = random.Random(seed)
    index, inputs, targets = ContextIndex(window), [], []
    for _ in range(n_tokens):
        token = draw.randrange(n_kinds)
        index.read(token)
        inputs.append(token)
        targets.append(UNKNOWN)
        assert [tuple(followers) for followers in index.followers()] == slow_followers(inputs, targets, window)
        if draw.random() < 0.9:
            targets[-1] = draw.randrange(n_kinds)
            index.learn(targets[-1])


def test_an_index_of_the_latest_tokens_continues_like_the_whole_one():
    draw = random.Random(1)
    index = ContextIndex(20)
    for _ in range(150):
        index.read(draw.randrange(3))
        index.learn(draw.randrange(3))
        kept = 20 + ORDERS[-1]
        again = ContextIndex(20)
        again.fill(array("i", index.inputs[-kept:]), array("i", index.targets[-kept:]))
        assert list(again.followers()) == list(index.followers())


@pytest.fixture(scope="module")
def model():
    return toy("bytes")


def reader(model):
    return CachedModel(model.network, {"context_cache": WINDOW})


def read(reader, ids, lengths, state=None):
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
    whole, state = read(reader(model), TEXT, [len(TEXT)])
    for lengths in ([1], [7], [64]):
        cut, other = read(reader(model), TEXT, lengths)
        assert cut == pytest.approx(whole, abs=1e-9)
        assert torch.allclose(other.cache.weights, state.cache.weights, rtol=0, atol=1e-9)
    assert sum(whole) < 0.9 * sum(read(model.network, TEXT, [64])[0]), "repeats must pay"


_DRAW = random.Random(7)
MIXED = {
    "two kinds, more than 64 places": (300, _DRAW.choices(b"ab", k=400)),
    "five kinds": (37, _DRAW.choices(b"abcde", k=300)),
    "repeats": (150, [*_DRAW.choices(b"abcdefghij", k=90)] * 3),
    "prose": (90, list(TEXT)),
    "one token, up to the highest weight": (37, [97] * 400),
    "new tokens, down to the lowest weight": (20, [*range(256), *range(120)]),
    "a window of one": (1, _DRAW.choices(b"ab", k=30)),
}


@pytest.mark.parametrize(("window", "ids"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize(("unscored", "lengths"), [(0, [1000]), (0, [1, 13, 2, 50]), (9, [10, 1, 60])])
def test_the_mixture_and_its_weights_are_those_of_the_oracle(model, window, ids, unscored, lengths):
    own, _ = read(model.network, ids, [64])
    expected, learned = oracle.mixture(
        [None] * unscored + [math.exp(-nats) for nats in own[unscored:]], [10, *ids], window=window
    )
    cached = CachedModel(model.network, {"context_cache": window})
    state, found, at = cached.init_state(1, mem_len=9, segment_len=8), [], 0
    for length in itertools.cycle(lengths):
        part = torch.tensor([[10, *ids][at : at + length + 1]])
        with torch.inference_mode():
            out = cached.score(part[:, :-1], part[:, 1 if at else 1 + unscored :], state)
        state, found, at = out.state, [*found, *out.nll[0].tolist()], at + length
        weights = torch.tensor([0.1, 8], dtype=torch.float64).view(2, 1, 1, 1).expand_as(state.cache.weights).clone()
        for (order, n_places, n_distinct), (weight, n_updates) in learned[len(found) - 1].items():
            weights[:, oracle.ORDERS.index(order), n_places, n_distinct - 1] = torch.tensor(
                [weight, n_updates], dtype=torch.float64
            )
        assert torch.allclose(state.cache.weights, weights, rtol=1e-11, atol=0)
        if at >= len(ids):
            break
    assert found == pytest.approx(expected, rel=0, abs=1e-11)


def test_predictions_are_distributions_and_their_logs_are_the_scores(model):
    expected, _ = read(reader(model), TEXT[:100], [100])
    cached, nll = reader(model), []
    state = cached.init_state(1, mem_len=9, segment_len=8)
    with torch.inference_mode():
        for token, target in zip([10, *TEXT], TEXT[:100], strict=False):
            logits, state = cached.logits(torch.tensor([[token]]), state)
            assert logits.exp().sum() == pytest.approx(1, abs=1e-12)
            nll.append(-float(logits[0, target]))
            state = cached.observe(torch.tensor([target]), state)
    assert nll == pytest.approx(expected, abs=1e-9)


def test_later_tokens_change_nothing(model):
    changed = bytearray(TEXT)
    changed[120] ^= 1
    one, other = (read(reader(model), text, [64])[0] for text in (TEXT, bytes(changed)))
    assert one[:120] == other[:120]
    assert one[120:] != other[120:]


def test_tokens_leave_the_window(model):
    """The prediction depends on the latest tokens only: those within reach of the model, and those of the window."""
    reach = model.network.receptive_field(9) + WINDOW + ORDERS[-1]
    text = bytes(random.Random(0).choices(b"abc", k=reach + 30))
    weights = read(reader(model), text, [64])[1].cache.weights
    last = []
    for first in (0, 20):
        _, state = read(reader(model), text[first:-1], [64])
        state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, weights=weights.clone()))
        with torch.inference_mode():
            last.append(reader(model).logits(torch.tensor([[text[-1]]]), state)[0])
    assert torch.allclose(*last, rtol=0, atol=1e-12)


def test_a_saved_value_continues_to_the_bit(model):
    for cut in (1, 50, 120):
        _, state = read(reader(model), TEXT[:cut], [64])
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


def test_nothing_is_learned_of_sampled_tokens(model):
    cached = reader(model)
    _, state = read(cached, TEXT[:60], [64])
    weights = state.cache.weights.clone()
    with torch.inference_mode():
        for token in TEXT[59:90]:
            _, state = cached.logits(torch.tensor([[token]]), state)
    assert torch.equal(state.cache.weights, weights)
    assert list(state.cache.index.targets[-31:]) == [UNKNOWN] * 31


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("inputs", lambda t: t[1:]),
        ("inputs", lambda t: t.long()),
        ("weights", lambda t: t[:, 1:]),
        ("weights", lambda t: t + 2),
        ("weights", lambda t: t * math.nan),
    ],
)
def test_a_damaged_value_is_refused(model, name, change):
    value = read(reader(model), TEXT[:60], [64])[1].cache
    tensors = value.tensors()
    with pytest.raises(ValueError, match="cache"):
        type(value).restore(tensors | {name: change(tensors[name])}, value.describe())


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
    for changes, said in (({"context_cache": 5}, r"\b37\b.*\b5\b"),):
        with pytest.raises(StateError, match=said):
            InferenceSession.open(model, RUNTIME, options(**changes), loaded.fork())


def test_several_samples_and_documents_are_refused():
    for config in (
        lambda: validate(GenerateConfig, {"context_cache": 9, "num_samples": 2}),
        lambda: validate(EvalConfig, {"context_cache": 9, "batch_size": 2}),
        lambda: validate(EvalConfig, {"context_cache": 9, "span": "growing"}),
    ):
        with pytest.raises(ConfigError, match="context_cache"):
            config()
