"""State is a value: it can be copied, selected from, saved and continued without anything else knowing."""

import json
from dataclasses import replace

import pytest
import torch
import variants

from xlcli import config
from xlcli.errors import StateError
from xlcli.memory import Hidden, Int8KeyValue, KeyValue, Sums
from xlcli.memory.tokens import MAX_SLACK
from xlcli.model.build import build_model
from xlcli.ops.span import Span
from xlcli.state import State

NAME = "full-xl-0-pre-0"
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
    chosen = state.select([2, 0, 0])
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
    assert ([layer.length for layer in state.layers], state.seen) == ([7, 7], 199)
    assert state.bytes == sum(t.numel() for layer in state.layers for t in layer.tensors().values()) * 8


def test_buffers_stay_bounded(model):
    _, state = _read(model, variants.tokens(1, 1500), "keyvalue", cuts=(1,))
    assert all(layer.buffers[0].shape[2] <= 7 + 1 + MAX_SLACK for layer in state.layers)
    assert all(layer.buffers[0].shape[2] <= 4 * 7 for layer in state.layers)


@pytest.mark.parametrize("cuts", [(1,), (2, 5), (30,), (1, 1, 40)])
def test_buffers_give_what_plain_copies_give(cuts):
    def project(x):
        return x[:, None], -x[:, None]

    kept = KeyValue((torch.empty(1, 1, 0, 3), torch.empty(1, 1, 0, 3)), 0, 0)
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


@pytest.mark.parametrize("cuts", [(1,), (2, 5), (30,), (1, 1, 40)])
def test_keys_and_values_are_rounded_before_their_first_use(cuts):
    """Buffers give what copies of rounded rows give; int8 rows have a scale for each token and head."""

    def project(x):
        return torch.stack((x, 3 * x), dim=1), torch.stack((-x, x * x), dim=1)

    def to_int8(x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    empty = torch.empty(1, 2, 0, 3)
    kinds = [
        (KeyValue((empty.bfloat16(), empty.bfloat16()), 0, 0), lambda x: x.bfloat16().float()),
        (Int8KeyValue(Int8KeyValue.encode(empty, empty), 0, 0), to_int8),
    ]
    for kept, rounded in kinds:
        dtypes = {name: t.dtype for name, t in kept.tensors().items()}
        generator, k2, v2 = torch.Generator().manual_seed(0), empty, empty
        for step in range(40):
            x = torch.randn(1, cuts[step % len(cuts)], 3, generator=generator)
            keep = min(11, kept.length + x.shape[1])
            k2, v2 = (torch.cat((old, rounded(new)), 2) for old, new in zip((k2, v2), project(x), strict=True))
            k, v, kept = kept.extend(x, project, keep)
            assert k.dtype == v.dtype == torch.float32
            assert torch.equal(k, k2)
            assert torch.equal(v, v2)
            assert {name: t.dtype for name, t in kept.tensors().items()} == dtypes
            k2, v2 = k2[:, :, k2.shape[2] - keep :], v2[:, :, v2.shape[2] - keep :]
            assert kept.length == keep


def test_outside_inference_mode_a_memory_is_copied():
    empty = torch.empty(1, 2, 0, 3)
    start = Int8KeyValue(Int8KeyValue.encode(empty, empty), 0, 0)
    k, v = torch.randn(2, 1, 2, 5, 3)
    project = lambda x: (k, v)  # noqa: E731
    in_place = start.extend(k, project, 4)
    with torch.inference_mode(mode=False):
        copied = start.map(torch.clone).extend(k, project, 4)
    assert torch.equal(copied[0], in_place[0])
    assert torch.equal(copied[1], in_place[1])
    assert all(torch.equal(t, in_place[2].tensors()[name]) for name, t in copied[2].tensors().items())


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
    {"memory": "other"}, {"memory": "keyvalue"}, {"memory": "keyvalue keyvalue"}, {"memory": "hidden"}, {"memory": ""},
    {"memory": "hidden hidden hidden"}, {"memory": None}, {"span": "uniform 3 4"}, {"span": "[]"},
    {"span": "{}"}, {"span": ""}, {"span": None}, {"seen": ""}, {"seen": "-1"}, {"seen": "1.5"}, {"seen": "9" * 30},
    {"seen": None},
])  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(model, change):
    _, state = _read(model, variants.tokens(1, 9), "hidden")
    description = {**state.describe(), **change}
    description = {key: value for key, value in description.items() if value is not None}
    with pytest.raises(StateError, match="state"):
        State.restore(state.tensors(), description)


@pytest.mark.parametrize(("name", "change"), [
    ("1.k", None), ("offsets", None), ("2.k", lambda t: t), ("more", lambda t: t), ("0.h", lambda t: t),
    ("1.k", lambda t: t[0]), ("1.k", lambda t: t[:1]), ("1.k", lambda t: t[:, :, :3]), ("1.v", lambda t: t[:, :1]),
    ("1.v", lambda t: t[..., 0]), ("1.v", lambda t: t.long()), ("1.v", lambda t: t.sum()), ("1.k", lambda t: t[None]),
    ("offsets", lambda t: t[:1]), ("offsets", lambda t: t[:, None]), ("offsets", lambda t: t[0]),
    ("offsets", lambda t: t.double()), ("offsets", lambda t: t.bool()), ("1.v", lambda t: t.half()),
])  # fmt: skip
def test_tensors_that_do_not_fit_together_are_refused(model, name, change):
    _, state = _read(model, variants.tokens(2, 9), "keyvalue")
    tensors = state.tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name, tensors["1.k"]))
    with pytest.raises(StateError, match="damaged"):
        State.restore(tensors, state.describe())


@pytest.mark.parametrize(("name", "value"), [
    ("counts", -1), ("counts", 2**36), ("global_ranks", -1), ("global_ranks", 2**62), ("positions", -1),
])  # fmt: skip
def test_numbers_of_a_hash_table_that_are_out_of_range_are_refused(name, value):
    model = variants.make(next(n for n in variants.COMBINATIONS if n.startswith("lsh-")))
    _, state = _read(model, variants.tokens(1, 20), "keyvalue")
    tensors = state.tensors()
    key = next(each for each in tensors if each.endswith(f".{name}"))
    State.restore(tensors, state.describe())
    tensors[key] = tensors[key].clone()
    tensors[key].view(-1)[-1] = value
    with pytest.raises(StateError, match=f"'{name}'.*'buckets'"):
        State.restore(tensors, state.describe())


def test_a_memory_of_zero_is_independent_segments(model):
    state = model.init_state(1, mem_len=0, segment_len=5)
    assert state.span == Span("segment", 0, 5)
    _, state = model.score(*[variants.tokens(1, 12)] * 2, state)[:2]
    assert (state.seen, [layer.length for layer in state.layers]) == (12, [2, 2])


SPAN = {"kind": "uniform", "mem_len": 4, "segment_len": 3}
WINDOWS = {"kind": "segment", "mem_len": 0, "segment_len": 3}


def test_what_a_span_has_is_part_of_a_state(model):
    ends = {"clamp_len": 7, "full_len": 9}
    for table in (SPAN, WINDOWS, SPAN | ends, SPAN | {"full_len": 9}, SPAN | {"kind": "growing", "zero_memory": True},
                  WINDOWS | {"stride": 2}, WINDOWS | {"stride": 3}):  # fmt: skip
        state = State((), 9, Span(**table), torch.tensor([5]), torch.empty(1, 0, dtype=torch.int64))
        assert json.loads(state.describe()["span"]) == table
        assert State.restore(state.tensors(), state.describe()).span == state.span


@pytest.mark.parametrize("table", [
    SPAN | {"kind": "round"}, SPAN | {"kind": "segment"}, SPAN | {"mem_len": 0}, SPAN | {"mem_len": -1},
    SPAN | {"mem_len": "4"}, SPAN | {"mem_len": 4.0}, SPAN | {"mem_len": True}, SPAN | {"mem_len": 2**40},
    SPAN | {"segment_len": 0}, SPAN | {"segment_len": None}, SPAN | {"clamp_len": 0}, SPAN | {"clamp_len": None},
    SPAN | {"other": 1}, SPAN | {"stride": 2}, SPAN | {"zero_memory": 1}, SPAN | {"zero_memory": False},
    WINDOWS | {"stride": 4}, WINDOWS | {"stride": 0}, WINDOWS | {"zero_memory": True}, {"kind": "uniform"},
])  # fmt: skip
def test_a_span_that_makes_no_sense_is_refused(table):
    state = State((), 9, Span(**SPAN), torch.tensor([5]), torch.empty(1, 0, dtype=torch.int64))
    with pytest.raises(StateError, match="damaged"):
        State.restore(state.tensors(), state.describe() | {"span": json.dumps(table)})


def test_memory_may_differ_from_layer_to_layer():
    """Tensors are saved under the number of the layer, and each layer's kind stands in the description."""
    numbers = torch.arange(24.0, dtype=torch.float64)
    layers = (
        Hidden(numbers.view(2, 4, 3)),
        Sums(numbers.view(2, 1, 4, 3), numbers[:8].view(2, 1, 4)),
        KeyValue((numbers.view(2, 1, 4, 3), numbers[:16].view(2, 1, 4, 2)), 0, 4),
    )
    state = State(layers, 9, Span("growing", 4, 3), torch.tensor([5, 2**40]), torch.empty(2, 0, dtype=torch.int64))
    assert state.describe() == {"memory": "hidden sums keyvalue", "seen": "9", "span": state.span.text}
    assert set(state.tensors()) == {"offsets", "last", "0.h", "1.s", "1.z", "2.k", "2.v"}
    again = State.restore(state.tensors(), state.describe())
    assert [type(layer) for layer in again.layers] == [Hidden, Sums, KeyValue]
    assert (again.seen, again.span, again.batch_size) == (9, state.span, 2)
    _same(again, state)


@pytest.mark.parametrize("attention", ["full", "local", "linear"])
def test_rows_and_forks_of_every_memory(attention):
    model = variants.make(next(n for n in variants.COMBINATIONS if n.startswith(f"{attention}-learned")))
    text = variants.tokens(3, 41)
    state = model.init_state(3, mem_len=7, segment_len=13, offsets=[4, 0, 9])
    _, state = variants.read(model, text[:, :21], [5], state=state)
    chosen = state.select([2, 0, 0])
    assert chosen.offsets.tolist() == [9, 4, 4]
    assert chosen.batch_size == 3
    fork = state.fork()
    expected, _ = variants.read(model, text[:, 20:], [1, 6], state=state)
    _same(fork, State.restore(fork.tensors(), fork.describe()))
    again, _ = variants.read(model, text[:, 20:], [1, 6], state=fork)
    assert torch.equal(again, expected)
    rest, _ = variants.read(model, text[[2, 0, 0], 20:], [1, 6], state=chosen)
    assert torch.allclose(rest, expected[[2, 0, 0]], rtol=0, atol=1e-12)


def test_where_rows_began_is_part_of_them(model):
    state = model.init_state(3, mem_len=7, segment_len=5, offsets=[4, 0, 9])
    assert state.offsets.tolist() == [4, 0, 9]
    _, state = model.score(*[variants.tokens(3, 6)] * 2, state)[:2]
    assert state.offsets.tolist() == [4, 0, 9]
    assert model.init_state(2, mem_len=7, segment_len=5).offsets.tolist() == [0, 0]


@pytest.mark.parametrize("name", variants.thinned(variants.IN_TURN, variants.IN_TURN[::3]))
def test_it_fits_the_model_that_made_it(name):
    model = variants.make(name)
    for memory, mem_len in (("hidden", 3), ("keyvalue", 200), ("keyvalue", 0)):
        state = model.init_state(2, mem_len=mem_len, segment_len=13, memory=memory)
        assert model.is_compatible(state)
        _, state = model.score(*[variants.tokens(2, 16)] * 2, state)[:2]
        assert model.is_compatible(state)
        assert model.is_compatible(State.restore(state.tensors(), state.describe()))


def _other(**changes):
    tree = variants.COMBINATIONS[NAME] | {"n_layers": 2} | changes
    return build_model(config.make({"model": tree}).model).double().eval()


UNIVERSAL = {"kind": "universal", "n_steps": 2}


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("changes", [
    {"n_layers": 1}, {"n_layers": 3}, {"n_layers": 4}, {"dim": 16},
    {"n_layers": 4, "stack": UNIVERSAL}, {"n_layers": 3, "stack": UNIVERSAL},
    {"attention": {"kind": "linear"}, "position": {"kind": "none"}},
    {"attention": {"kind": "local", "window": 3, "n_heads": 2}},
])  # fmt: skip
def test_it_does_not_fit_a_model_of_another_shape(model, memory, changes):
    _, state = _read(model, variants.tokens(1, 9), memory)
    assert _other().is_compatible(state)
    assert not _other(**changes).is_compatible(state)


@pytest.mark.parametrize("heads", [{"n_heads": 3}, {"n_heads": 2, "head_dim": 5}, {"n_heads": 1}])
def test_projected_memory_does_not_fit_other_heads(model, heads):
    _, state = _read(model, variants.tokens(1, 9), "keyvalue")
    assert not _other(attention={"kind": "full", **heads}).is_compatible(state)


@pytest.mark.parametrize("change", [
    {"seen": 6}, {"seen": 0}, {"span": Span("uniform", 6, 13)}, {"span": Span("segment", 0, 13)}, {"layers": ()},
])  # fmt: skip
@pytest.mark.parametrize("memory", KINDS)
def test_it_does_not_fit_when_more_or_less_is_remembered_than_it_says(model, memory, change):
    _, state = _read(model, variants.tokens(1, 9), memory)
    assert model.is_compatible(state)
    assert not model.is_compatible(replace(state, **change))


@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_a_universal_stack_takes_any_number_of_steps(n_steps):
    """As many as there are memories; `restart` keeps that number."""
    model = _other(stack=UNIVERSAL | {"n_steps": 3})
    chosen = _other(stack=UNIVERSAL | {"n_steps": n_steps})
    state = chosen.init_state(2, mem_len=7, segment_len=13, span="growing")
    _, state = model.score(*[variants.tokens(2, 9)] * 2, state)[:2]
    assert len(state.layers) == 2 * n_steps
    assert model.is_compatible(state)
    assert model.inference_settings(state)["n_steps"] == n_steps
    again = model.reset(state)
    assert (len(again.layers), again.seen, again.span, again.batch_size) == (2 * n_steps, 0, state.span, 2)
    assert not model.is_compatible(replace(state, layers=state.layers[1:]))


@pytest.mark.parametrize("mem_len", [0, 7])
def test_restarted_it_has_read_nothing(model, mem_len):
    text = variants.tokens(2, 30)
    expected, _ = _read(model, text, "keyvalue", mem_len=mem_len)
    state = model.init_state(2, mem_len=mem_len, segment_len=13, offsets=[3, 4])
    _, state = variants.read(model, variants.tokens(2, 12, seed=4), [5], state=state)
    again = model.reset(state)
    assert again.offsets.tolist() == [0, 0]
    rest, _ = _read(model, text, "keyvalue", state=again)
    assert torch.equal(rest, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("attention", ["full", "local"])
def test_the_number_type_of_the_memory_is_part_of_the_state(attention, dtype):
    model = variants.make(
        next(n for n in variants.COMBINATIONS if n.startswith(f"{attention}-xl")), dtype=torch.float32
    )
    state = model.init_state(2, mem_len=7, segment_len=13, memory_dtype=dtype)
    assert state.memory_dtype == dtype
    _, state = variants.read(model, variants.tokens(2, 40), [9], state=state)
    tensors = {name: t.clone() for name, t in state.tensors().items()}
    for each in (state, model.reset(state), state.select([1]), State.restore(tensors, state.describe())):
        assert each.memory_dtype == dtype
        assert model.is_compatible(each)
    assert state.bytes == 2 * model.config.memory_bytes(7, dtype)


@pytest.mark.parametrize(("name", "change"), [
    ("1.keys", None), ("1.key_scales", None), ("1.keys", torch.Tensor.float), ("1.key_scales", torch.Tensor.char),
    ("1.value_scales", lambda t: t[:, :, 1:]), ("1.values", lambda t: t[..., 0]), ("1.keys", torch.Tensor.long),
    ("1.key_scales", torch.Tensor.bfloat16), ("1.value_scales", torch.Tensor.double),
])  # fmt: skip
def test_damaged_int8_memory_is_refused(model, name, change):
    state = model.init_state(2, mem_len=7, segment_len=13, memory_dtype="int8")
    _, state = variants.read(model, variants.tokens(2, 9), [4], state=state)
    tensors = state.tensors()
    tensors[name] = None if change is None else change(tensors[name])
    with pytest.raises(StateError, match="damaged"):
        State.restore({n: t for n, t in tensors.items() if t is not None}, state.describe())


WITHOUT_POSITIONS = [n for n in variants.COMBINATIONS if "-none-" in n]


@pytest.mark.parametrize("name", variants.thinned(WITHOUT_POSITIONS, WITHOUT_POSITIONS[::3]))
def test_the_configuration_knows_how_much_is_remembered(name):
    for mem_len, n_steps in ((3, None), (20, None), (20, 5)):
        model = variants.make(name, dtype=torch.float32, n_steps=n_steps)
        state = model.init_state(2, mem_len=mem_len, segment_len=13)
        _, state = variants.read(model, variants.tokens(2, 40), [9], state=state)
        assert state.bytes == 2 * model.config.memory_bytes(mem_len)


@pytest.mark.parametrize("mem_len", [0, 7])
@pytest.mark.parametrize("name", variants.thinned(variants.IN_TURN + variants.ROUNDED, variants.IN_TURN[::20]))
def test_sequences_at_different_places_are_joined_and_split(name, mem_len):
    """With memories that are not full, and full ones; hash tables only at equal places."""
    model = variants.make(name)
    lengths, n_new = (3, 21, 8, 21, 16), (9, 1)
    texts = [variants.tokens(1, n + 40, seed=i) for i, n in enumerate(lengths)]
    expected = [_read(model, text, "keyvalue", cuts=(9, 1), mem_len=mem_len)[0] for text in texts]
    states = [
        _read(model, text[:, : n + 1], "keyvalue", mem_len=mem_len)[1] for text, n in zip(texts, lengths, strict=True)
    ]
    groups = {}
    for i, state in enumerate(states):
        groups.setdefault(state.join_keys[0], []).append(i)
    counted = variants.has_gaps(name, variants.table(name).get("n_layers", 2)) or name.startswith("lsh")
    assert sorted(map(len, groups.values())) == (
        [5] if mem_len and not counted else [1, 1, 1, 2] if counted else [2, 3]
    )
    for rows in groups.values():
        joined = State.join([states[i] for i in rows])
        news = torch.cat([texts[i][:, lengths[i] : lengths[i] + 31] for i in rows])
        before = torch.cat([expected[i][:, lengths[i] : lengths[i] + 30] for i in rows])
        nll, joined = variants.read(model, news, n_new, state=joined)
        assert torch.allclose(nll, before, rtol=0, atol=1e-9)
        for row, i in enumerate(rows):
            state = joined.select([row])
            assert state.seen + int(state.offsets) == lengths[i] + 30
            rest, _ = variants.read(model, texts[i][:, lengths[i] + 30 :], n_new, state=state)
            assert torch.allclose(rest, expected[i][:, lengths[i] + 30 :], rtol=0, atol=1e-9)


def test_sequences_with_other_memories_are_not_joined(model):
    state = model.init_state(2, mem_len=7, segment_len=5)
    assert len({*state.join_keys}) == 1
    assert state.join_keys[0] != model.init_state(1, mem_len=8, segment_len=5).join_keys[0]
    assert model.init_state(1, mem_len=7, segment_len=5, offsets=[3]).join_keys == [None]
