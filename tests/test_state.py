"""State is a value: it can be copied, selected from, saved and continued without anything else knowing."""

import pytest
import torch
import variants

from xlcli.errors import StateError
from xlcli.ops.span import Span
from xlcli.state import MAX_SLACK, Hidden, KeyValue, State

NAME = next(name for name in variants.COMBINATIONS if "xl" in name)
KINDS = ["hidden", "keyvalue"]


@pytest.fixture(scope="module")
def model():
    return variants.make(NAME)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def _read(model, text, memory, cuts=(5,), state=None, mem_len=7):
    return variants.read(model, text, cuts, mem_len=mem_len, memory=memory, state=state)


def _same(a, b):
    assert a.describe() == b.describe()
    assert a.tensors().keys() == b.tensors().keys()
    assert all(torch.equal(t, b.tensors()[name]) for name, t in a.tensors().items())


@pytest.mark.parametrize("memory", KINDS)
def test_saved_and_restored_it_goes_on_to_the_bit(model, memory):
    text = variants.tokens(2, 60)
    expected, _ = _read(model, text, memory)
    _, state = _read(model, text[:, :31], memory)
    tensors = {name: t.clone() for name, t in state.tensors().items()}
    rest, _ = _read(model, text[:, 30:], memory, state=State.restore(tensors, state.describe()))
    assert torch.equal(rest, expected[:, 30:])


@pytest.mark.parametrize("memory", KINDS)
def test_a_fork_and_its_origin_both_go_on(model, memory):
    text, other = variants.tokens(2, 40), variants.tokens(2, 40, seed=2)
    _, state = _read(model, text[:, :21], memory)
    branch = state.fork()
    expected, _ = _read(model, text, memory)
    _read(model, other, memory, state=branch)
    rest, _ = _read(model, text[:, 20:], memory, state=state)
    assert torch.equal(rest, expected[:, 20:])


@pytest.mark.parametrize("memory", KINDS)
def test_rows_are_chosen_and_repeated(model, memory):
    text = variants.tokens(3, 40)
    _, state = _read(model, text[:, :21], memory)
    chosen = state.rows([2, 0, 0])
    for name, t in chosen.tensors().items():
        assert torch.equal(t, state.tensors()[name][[2, 0, 0]])
    assert chosen.seen == state.seen
    expected, _ = _read(model, text[[2, 0, 0]], memory)
    rest, _ = _read(model, text[[2, 0, 0]][:, 20:], memory, state=chosen)
    assert torch.allclose(rest, expected[:, 20:], atol=1e-12)


@pytest.mark.parametrize("memory", KINDS)
def test_it_remembers_no_more_than_it_may(model, memory):
    text = variants.tokens(1, 200)
    _, state = _read(model, text, memory, cuts=(1, 3, 50))
    assert (state.length, state.seen) == (7, 199)
    numbers = sum(t.numel() for t in state.tensors().values())
    assert state.bytes == numbers * 8


def test_buffers_stay_bounded(model):
    _, state = _read(model, variants.tokens(1, 1500), "keyvalue", cuts=(1,))
    assert all(layer.keys.shape[2] <= 7 + 1 + MAX_SLACK for layer in state.layers)
    assert all(layer.keys.shape[2] <= 4 * 7 for layer in state.layers)


@pytest.mark.parametrize("cuts", [(1,), (2, 5), (30,), (1, 1, 40)])
def test_buffers_give_what_plain_copies_give(cuts):
    def project(x):
        return x[:, None], -x[:, None]

    kept = KeyValue(torch.empty(1, 1, 0, 3), torch.empty(1, 1, 0, 3), 0, 0)
    plain = Hidden(torch.empty(1, 0, 3))
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        x = torch.randn(1, cuts[step % len(cuts)], 3, generator=generator)
        keep = min(11, plain.length + x.shape[1])
        k, v, kept = kept.extend(x, project, keep)
        k2, v2, plain = plain.extend(x, project, keep)
        assert torch.equal(k, k2)
        assert torch.equal(v, v2)
        assert kept.length == plain.length == keep


def test_memory_of_training_holds_no_gradient():
    with torch.inference_mode(mode=False), torch.enable_grad():
        x = torch.randn(1, 4, 3, requires_grad=True)
        _, _, memory = Hidden(torch.empty(1, 0, 3)).extend(x * 2, lambda x: (x, x), 4)
        assert not memory.h.requires_grad


@pytest.mark.parametrize("memory", KINDS)
def test_mapping_changes_every_tensor(model, memory):
    _, state = _read(model, variants.tokens(2, 30), memory)
    assert {t.dtype for t in state.map(torch.Tensor.float).tensors().values()} == {torch.float32}
    _same(state.map(lambda t: t), state)


@pytest.mark.parametrize("change", [
    {"memory": "other"}, {"memory": "keyvalue"}, {"span": "round 3 4"}, {"span": "uniform 3"}, {"layers": "99"},
    {"layers": "0x"}, {"seen": ""}, {"seen": None},
])  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(model, change):
    _, state = _read(model, variants.tokens(1, 9), "hidden")
    description = {**state.describe(), **change}
    description = {key: value for key, value in description.items() if value is not None}
    with pytest.raises(StateError, match="Start without --state-in"):
        State.restore(state.tensors(), description)


def test_a_memory_of_zero_is_independent_segments(model):
    state = model.start(1, mem_len=0, segment_len=5)
    assert state.span == Span("segment", 0, 5)
    _, state = model.nll(*[variants.tokens(1, 12)] * 2, state)
    assert (state.seen, state.length) == (12, 2)
