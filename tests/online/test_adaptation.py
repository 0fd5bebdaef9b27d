"""Adaptation while reading: every token is scored before anything is learned from it, however the text arrives."""

import itertools

import pytest
import torch
import variants
from oracles.dynamic_evaluation import dynamic_nats

from xlcli.errors import ConfigError
from xlcli.memory.online import UNKNOWN
from xlcli.online.adaptation import AdaptiveModel, Optimizer, adapted_weights, head_tables
from xlcli.state import State

NAME = "full-xl-0-pre-0"
SETTINGS = {"lr": 0.01, "decay": 0.1, "beta": 0.9}
BLOCK = 8
TEXT = variants.tokens(1, 45)


def reader_of(model, part="all", *, decodes=False, **settings):
    optimizer = Optimizer(adapted_weights(model, part), **SETTINGS | settings)
    return AdaptiveModel(model, optimizer, {"adapt_block": BLOCK}, decodes=decodes)


def start(reader, **options):
    with torch.inference_mode():
        return reader.init_state(1, **{"mem_len": 7, "segment_len": 13} | options)


def read(reader, text, cuts, state=None):
    """Surprisal of text[:, 1:] in calls of these lengths, and the last state."""
    state = start(reader) if state is None else state
    out, at, sizes = [], 0, itertools.cycle(cuts)
    with torch.inference_mode():
        while at < text.shape[1] - 1:
            stop = min(at + next(sizes), text.shape[1] - 1)
            scored = reader.score(text[:, at:stop], text[:, at + 1 : stop + 1], state)
            out.append(scored.nll)
            state, at = scored.state, stop
    return torch.cat(out, 1), state


def same(a, b, tolerance=1e-9):
    assert a.describe() == b.describe()
    theirs = b.tensors()
    for name, t in a.tensors().items():
        torch.testing.assert_close(t, theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("part", ["all", "blocks", "feedforward"])
@pytest.mark.parametrize("name", [NAME, "local-rope-1-post-1", "full-t5-0-rezero-3"])
def test_as_the_loop_of_the_paper(name, part):
    model = variants.make(name)
    names = adapted_weights(model, part)
    dense = [n for n in names if "bigrams" not in n and "vectors" not in n]  # for others see below
    settings = SETTINGS | {"slow": head_tables(model)}
    assert settings["slow"]
    reader = AdaptiveModel(model, Optimizer(dense, **settings), {"adapt_block": BLOCK}, decodes=False)
    expected, weights = dynamic_nats(model, TEXT[0], block=BLOCK, mem_len=7, names=dense, **settings)
    nats, state = read(reader, TEXT, [99])
    torch.testing.assert_close(nats[0], expected, rtol=1e-9, atol=1e-9)
    for key, weight in state.adaptation.weights.items():
        torch.testing.assert_close(weight, weights[key].detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", variants.thinned(variants.IN_TURN + variants.ROUNDED, set(variants.IN_TURN[::12])))
def test_the_division_of_the_text_changes_nothing(name):
    model = variants.make(name)
    reader = reader_of(model)
    expected, after = read(reader, TEXT, [99])
    fixed, _ = variants.read(model, TEXT, [99], mem_len=7)
    torch.testing.assert_close(fixed[:, :BLOCK], expected[:, :BLOCK], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(fixed[:, BLOCK:], expected[:, BLOCK:], atol=1e-4)
    for cuts in ([1], [7], [3, 8, 1, 16]):
        nats, state = read(reader, TEXT, cuts)
        torch.testing.assert_close(nats, expected, rtol=1e-9, atol=1e-9)
        same(state.adaptation, after.adaptation)


@pytest.mark.parametrize("name", [NAME, "linear-none-0-pre-0", "local-axial-0-pre-5"])
def test_predictions_one_by_one_are_the_scores(name):
    reader = reader_of(variants.make(name))
    expected, _ = read(reader, TEXT, [99])
    state, nats = start(reader), []
    with torch.inference_mode():
        for at in range(TEXT.shape[1] - 1):
            token, target = TEXT[:, at : at + 1], TEXT[:, at + 1 : at + 2]
            logits, _ = reader.logits(token, state.fork())
            nats.append(-logits.log_softmax(-1)[0, target[0]])
            state = reader.score(token, target, state).state
    torch.testing.assert_close(torch.cat(nats), expected[0], rtol=1e-9, atol=1e-9)


def test_a_later_token_changes_nothing_before_it():
    reader = reader_of(variants.make(NAME))
    expected, _ = read(reader, TEXT, [99])
    other = TEXT.clone()
    other[0, 21] = (other[0, 21] + 1) % variants.VOCAB
    nats, _ = read(reader, other, [99])
    assert torch.equal(nats[0, :20], expected[0, :20])
    assert not torch.equal(nats[0, 20:], expected[0, 20:])


@pytest.mark.parametrize("name", variants.thinned(variants.IN_TURN + variants.ROUNDED, set(variants.IN_TURN[1::15])))
def test_saved_and_restored_it_goes_on_to_the_bit(name):
    reader = reader_of(variants.make(name))
    for n in (16, 21):  # between blocks and within one
        _, state = read(reader, TEXT[:, : n + 1], [5])
        tensors = {key: t.clone() for key, t in state.tensors().items()}
        expected, after = read(reader, TEXT[:, n:], [5], state)
        restored = State.restore(tensors, state.describe())
        nats, again = read(reader_of(variants.make(name)), TEXT[:, n:], [5], restored)
        assert torch.equal(nats, expected)
        same(again, after, 0)


def test_a_fork_and_its_origin_go_on_and_the_model_stays():
    model = variants.make(NAME)
    before = {name: p.clone() for name, p in model.named_parameters()}
    reader = reader_of(model)
    expected, _ = read(reader, TEXT, [99])
    _, state = read(reader, TEXT[:, :22], [99])
    branch = state.fork()
    read(reader, variants.tokens(1, 30, seed=2), [99], branch)
    nats, _ = read(reader, TEXT[:, 21:], [99], state)
    torch.testing.assert_close(nats, expected[:, 21:], rtol=1e-9, atol=1e-9)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_learned_from_a_token_that_was_not_scored(rows):
    reader = reader_of(variants.make(NAME))
    _, state = read(reader, TEXT[:, :22], [99])
    with torch.inference_mode():
        learned = {key: t.clone() for key, t in state.adaptation.weights.items()}
        state = state.select([0] * rows)
        for at in range(21, 44):
            _, state = reader.logits(TEXT[:, at : at + 1].expand(rows, 1), state)
    assert all(torch.equal(t, learned[key]) for key, t in state.adaptation.weights.items())


def test_a_block_with_sampled_tokens_teaches_its_other_tokens():
    reader = reader_of(variants.make(NAME))
    _, state = read(reader, TEXT[:, :22], [99])
    with torch.inference_mode():
        _, state = reader.logits(TEXT[:, 21:22], state)
    assert state.adaptation.targets.tolist() == [*TEXT[0, 17:22].tolist(), UNKNOWN]
    _, state = read(reader, TEXT[:, 22:25], [99], state)
    assert (state.adaptation.n_steps, len(state.adaptation.inputs)) == (3, 0)


def test_a_reset_ends_the_block_and_keeps_the_weights():
    reader = reader_of(variants.make(NAME))
    _, state = read(reader, TEXT[:, :22], [99])
    with torch.inference_mode():
        state = reader.reset(state)
    assert (state.adaptation.n_steps, len(state.adaptation.inputs), state.seen) == (3, 0, 0)
    expected, _ = read(reader, TEXT, [99], state.fork())
    nats, _ = read(reader, TEXT, [3], state)
    torch.testing.assert_close(nats, expected, rtol=1e-9, atol=1e-9)


def test_rows_of_a_table_and_limits_of_a_rate():
    draw = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(6, 4, generator=draw, dtype=torch.float64) for name in ("table", "matrix")}
    optimizer = Optimizer(("table", "matrix"), 0.01, 0.1, slow=("matrix",), rate_change=9.0)
    weights, moments = {name: t.clone() for name, t in trained.items()}, optimizer.init_moments(trained)
    expected, means = trained["table"].clone(), torch.zeros(6, dtype=torch.float64)
    for step, rows in enumerate(([1, 3], [3, 3, 0], [5], [3])):
        values = torch.randn(len(rows), 4, generator=draw, dtype=torch.float64)
        sparse = torch.sparse_coo_tensor([rows], values, (6, 4), check_invariants=True)
        growing = (trained["matrix"] - weights["matrix"]) if step else values[0].expand(6, 4)
        gradients = {"table": sparse, "matrix": growing.clone()}
        optimizer.step(weights, gradients, moments, trained, step)
        dense = sparse.to_dense()
        for row in set(rows):
            square = dense[row].square().mean()
            means[row] = 0.99 * means[row] + 0.01 * square if means[row] else square
            moved = expected[row] - 0.1 * dense[row] / means[row].sqrt()
            expected[row] = moved + 0.1 * (trained["table"][row] - moved)
        torch.testing.assert_close(weights["table"], expected)
    assert moments["matrix.rate"] == 3  # a gradient that always says "further"
    for _ in range(2):
        optimizer.step(weights, {"matrix": weights["matrix"] - trained["matrix"]}, moments, trained, 4)
    assert moments["matrix.rate"] == -5


@pytest.mark.parametrize("name", ["full-learned-0-pre-0", "full-t5-0-pre-5", "full-shaw-0-pre-0"])
def test_tables_of_positions_do_not_adapt_as_token_vectors(name):
    model = variants.make(name)
    found = adapted_weights(model, "feedforward")
    assert found
    assert all(set(part.split(".")) & {"feedforward", "vectors", "bigrams", "embedding", "head"} for part in found)


def test_rows_of_absent_tokens_do_not_change():
    model = variants.make(NAME)
    reader = reader_of(model)
    _, state = read(reader, TEXT[:, :18] % 5, [99])
    tables = [key for key in state.adaptation.weights if "vectors" in key]
    assert tables
    for key in tables:
        moments = state.adaptation.moments[f"{key}.rows"]
        assert moments[:5].all()
        assert not moments[5:].any()
        changed = (state.adaptation.weights[key] != model.get_parameter(key)).any(1)
        assert changed.tolist() == [row < 5 for row in range(variants.VOCAB)]


def test_several_texts_are_refused():
    with pytest.raises(ConfigError, match=r"\bone\b"):
        reader_of(variants.make(NAME)).init_state(2, mem_len=7, segment_len=13)


@pytest.mark.parametrize("name", [NAME, "full-rope-0-pre-0"])
def test_memory_longer_than_in_training(name):
    model = variants.make(name)
    model.clamp_len = model.full_len = 4
    reader = reader_of(model)
    expected, _ = read(reader, TEXT, [99])
    nats, state = read(reader, TEXT, [3, 8])
    assert (state.span.clamp_len, state.span.full_len) == (4, 4)
    torch.testing.assert_close(nats, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [[99], [3, 8]])
def test_gradients_in_bfloat16_change_the_weights_by_little(cuts, monkeypatch):
    model, results = variants.make(NAME).float(), []
    for is_native in (False, True):
        monkeypatch.setattr("xlcli.online.adaptation.has_bfloat16_units", lambda device, value=is_native: value)
        reader = reader_of(model, "feedforward", lr=1e-3)
        results.append(read(reader, TEXT, cuts))
    (exact, after), (rounded, after_rounded) = results
    assert torch.equal(rounded[:, :BLOCK], exact[:, :BLOCK])
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=1e-3, atol=1e-3)
    trained = dict(model.named_parameters())
    for name, weight in after.adaptation.weights.items():
        moved, moved_rounded = (weight - trained[name], after_rounded.adaptation.weights[name] - trained[name])
        assert (moved - moved_rounded).norm() < 0.1 * moved.norm()
