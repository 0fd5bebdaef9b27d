"""Every position encoding against its paper, one query and key at a time, and what each of them promises."""

import math
from functools import partial

import pytest
import torch
from oracles import positions
from torch.utils._python_dispatch import TorchDispatchMode

from xlcli import config
from xlcli.config.position import RopeScalingConfig
from xlcli.errors import ConfigError, DataError
from xlcli.memory import Hidden, KeyValue
from xlcli.model.build import build_model
from xlcli.model.position.distance import slopes
from xlcli.model.position.rope import rope_frequencies
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import DocumentPositions
from xlcli.ops.span import Span

DIM = 12
BUCKETS = {"n_buckets": 5, "max_distance": 12}
KINDS = {
    "none": {"kind": "none"},
    "sinusoidal": {"kind": "sinusoidal", "amplitude": 1.0},
    "sinusoidal in layers": {"kind": "sinusoidal", "placement": "layers", "amplitude": 1.0},
    "sinusoidal on heads": {"kind": "sinusoidal", "placement": "qk"},
    "learned": {"kind": "learned", "max_len": 7},
    "learned in layers": {"kind": "learned", "max_len": 48, "placement": "layers"},
    "learned on heads": {"kind": "learned", "max_len": 11, "placement": "qk"},
    "axial": {"kind": "axial", "shape": [3, 5], "dims": [8, 4]},
    "axial of three": {"kind": "axial", "shape": [2, 3, 2]},
    "axial in layers": {"kind": "axial", "shape": [5, 3], "placement": "layers"},
    "rope": {"kind": "rope", "base": 100.0},
    "rope interleaved": {"kind": "rope", "layout": "interleaved"},
    "rope interpolated": {"kind": "rope", "scaling": {"kind": "linear", "factor": 3.0}},
    "rope of Gemma 3": {
        "kind": "rope",
        "base": 100.0,
        "local_base": 10.0,
        "scaling": {"kind": "linear", "factor": 3.0},
    },
    "rope of Llama 3": {
        "kind": "rope",
        "base": 10.0,
        "clamp_len": 5,
        "scaling": {"kind": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "original_len": 60},
    },
    "rope clamped": {"kind": "rope", "base": 100.0, "clamp_len": 4},
    "rope interleaved and clamped": {"kind": "rope", "layout": "interleaved", "clamp_len": 1},
    "rope of half a head": {"kind": "rope", "base": 100.0, "clamp_len": 4, "rotary_dim": 2},
    "rope interleaved of half a head": {"kind": "rope", "base": 10.0, "layout": "interleaved", "rotary_dim": 2},
    "rope at embedding": {"kind": "rope", "placement": "embedding"},
    "rope of a part at embedding": {"kind": "rope", "placement": "embedding", "rotary_dim": 6},
    "rope interleaved at embedding": {"kind": "rope", "placement": "embedding", "layout": "interleaved", "base": 100.0},
    "alibi": {"kind": "alibi"},
    "t5": {"kind": "t5", **BUCKETS},
    "shaw": {"kind": "shaw", "max_distance": 3},
    "contextual-1": {"kind": "contextual-1", **BUCKETS},
    "contextual-2": {"kind": "contextual-2", **BUCKETS},
    "xl": {"kind": "xl", "n_features": 8},
    "xl clamped": {"kind": "xl", "n_features": 8, "clamp_len": 4},
}
"""Tables under `model.position`."""
ABSOLUTE = [name for name in KINDS if name.startswith(("sinusoidal", "learned", "axial")) or "at embedding" in name]
RELATIVE = [name for name in KINDS if name not in ABSOLUTE]
CASES = [(1, 0), (1, 9), (5, 0), (5, 3), (4, 9)]


def make(position, *, dtype=torch.float64, dim=DIM, n_layers=1, vocab_size=17, **attention):
    """A model whose weights are large enough that mistakes show."""
    tree = {"dim": dim, "n_layers": n_layers, "attention": {"n_heads": 3, **attention}, "position": position}
    model = build_model(config.make({"model": {"vocab_size": vocab_size, **tree}}).model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model.to(dtype).eval()


def twin(model):
    """The arguments of `oracles.positions.attention` that stand for the model's encoding."""
    kind, branch = model.config.position, model.stack.blocks[0].attention
    n_heads, ours = branch.n_heads, branch.position
    where = model.position if getattr(kind, "placement", None) == "embedding" else ours
    tables = [axis.weight.detach() for axis in getattr(where, "axes", [])]
    table = ours.table.weight.detach() if hasattr(ours, "table") else None
    match kind.kind:
        case "none":
            return {}
        case "sinusoidal" if kind.placement == "qk":
            return {
                "encoding": positions.added(
                    lambda p, h: positions.sinusoidal(p, branch.output.weight.shape[1] // n_heads)
                )
            }
        case "learned" if kind.placement == "qk":
            return {
                "encoding": positions.added(lambda p, h: positions.learned(p, tables[0], wrap=True).chunk(n_heads)[h])
            }
        case "sinusoidal":
            return {"embed": lambda row, p: row + positions.sinusoidal(p, len(row))}
        case "learned":
            return {"embed": lambda row, p: row + positions.learned(p, tables[0], wrap=True)}
        case "axial":
            return {"embed": lambda row, p: row + positions.axial(p, tables, wrap=True)}
        case "rope" if kind.placement == "embedding":
            return {"embed": partial(positions.rotated, base=kind.base, layout=kind.layout, width=kind.rotary_dim)}
        case "rope" if kind.local_base and model.config.attention.kind == "local":
            return {"encoding": positions.rope(base=kind.local_base, layout=kind.layout, width=kind.rotary_dim)}
        case "rope":
            series = {"base": kind.base, "layout": kind.layout, "width": kind.rotary_dim}
            settings = kind.scaling.model_dump(exclude={"kind"})
            match kind.scaling.kind:
                case "linear":
                    series["scale"] = partial(positions.linear, factor=settings["factor"])
                case "llama3":
                    series["scale"] = partial(positions.llama3, **settings)
            return {"encoding": positions.rope(clamp_len=kind.clamp_len, **series)}
        case "alibi":
            return {"encoding": positions.alibi(n_heads)}
        case "t5":
            scaled = model.config.attention.scaled
            return {"encoding": positions.t5(table, max_distance=kind.max_distance, scaled=scaled)}
        case "shaw":
            score, value = positions.shaw(ours.keys.weight.detach(), ours.value_vectors.weight.detach())
            return {"encoding": score, "value": value}
        case "contextual-1":
            sizes = {"max_distance": kind.max_distance, "n_heads": n_heads}
            return {"encoding": positions.contextual_1(table, ours.relative.weight.detach(), **sizes)}
        case "contextual-2":
            W_q, W_k = branch.query.weight.detach(), branch.key.weight.detach()
            W_k = torch.cat([W_k.chunk(branch.n_kv_heads)[h * branch.n_kv_heads // n_heads] for h in range(n_heads)])
            sizes = {"max_distance": kind.max_distance, "n_heads": n_heads}
            return {"encoding": positions.contextual_2(table, W_q, W_k, **sizes)}


def frame_of(n_memory, n_new, *, start=0, span="growing", mem_len=9, clamp_len=None):
    """The call that reads `n_new` tokens after `start + n_memory` others, of which `n_memory` are remembered."""
    rule = Span(span, mem_len=mem_len, segment_len=4, clamp_len=clamp_len)
    keep, device = min(2, n_memory + n_new), torch.device("cpu")
    return AttentionContext(rule, n_memory=n_memory, n_new=n_new, keep=keep, device=device, start=start + n_memory)


def outputs(model, x, older, **place):
    """What the first branch makes of inputs x (1 t d) after older ones (1 m d), with either memory."""
    branch, m, t = model.stack.blocks[0].attention, older.shape[1], x.shape[1]
    place["clamp_len"] = model.config.clamp_len
    before, now = frame_of(0, m, **place), frame_of(m, t, **place)
    marked = [branch.position.embed(model.position.embed(part, f), f) for part, f in ((older, before), (x, now))]
    memories = (Hidden(marked[0]), KeyValue(branch.project(marked[0], before), 0, m))
    found = [branch(marked[1], memory, now) for memory in memories]
    assert all(after.length == min(2, m + t) for _, after in found)
    return [out for out, _ in found]


def inputs(t, m, dtype=torch.float64):
    """x (1 t d) and older inputs (1 m d)."""
    generator = torch.Generator().manual_seed(100 * t + m)
    return tuple(torch.randn(1, n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in (t, m))


def check(model, t, m, *, window, span="growing"):
    """Equality with the loop over queries and keys; `window` is how many tokens back a token sees."""
    branch, (x, older) = model.stack.blocks[0].attention, inputs(t, m)
    linears = {"W_q": branch.query, "W_k": branch.key, "W_v": branch.value, "W_o": branch.output}
    expected = positions.attention(
        x[0],
        older[0],
        {name: linear.weight.detach() for name, linear in linears.items()}
        | {f"b_{name[2:]}": linear.bias.detach() for name, linear in linears.items() if linear.bias is not None},
        n_heads=branch.n_heads,
        window=window,
        start=5,
        **twin(model),
    )
    for mode in (torch.inference_mode, torch.no_grad):  # clamped distances have a form of their own at inference
        with mode():
            for out in outputs(model, x, older, start=5, span=span):
                assert torch.allclose(out[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("xl")])
@pytest.mark.parametrize(("t", "m"), CASES)
@pytest.mark.parametrize("span", ["uniform", "growing"])
def test_attention_equals_the_paper(name, t, m, span):
    check(make(KINDS[name]), t, m, span=span, window=9 if span == "uniform" else None)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("xl")])
@pytest.mark.parametrize(("t", "m"), [(1, 2), (5, 3), (8, 0), (13, 3)])
def test_local_attention_equals_the_paper(name, t, m):
    """In blocks as soon as a call is longer than two windows."""
    check(make(KINDS[name], kind="local", window=3), t, m, window=3)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith(("xl", "learned on"))])
@pytest.mark.parametrize(("t", "m"), CASES)
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_shared_heads_of_keys_and_biases(name, t, m, n_kv_heads):
    bias = "none" if name == "contextual-2" else ("qkv", "all")[m % 2]
    check(make(KINDS[name], n_heads=4, head_dim=4, n_kv_heads=n_kv_heads, bias=bias), t, m, window=None)


@pytest.mark.parametrize("position", ["xl", "xl clamped", "rope clamped"])
@pytest.mark.parametrize("kind", ["full", "local"])
def test_shared_heads_equal_heads_with_the_same_weights(kind, position):
    """Also of Transformer-XL, in calls that are cut and with gradients."""
    settings = {"kind": kind, "n_heads": 4, "head_dim": 4} | ({"window": 3} if kind == "local" else {})
    shared = make(KINDS[position], n_layers=2, n_kv_heads=2, **settings)
    single = make(KINDS[position], n_layers=2, **settings)
    weights = shared.state_dict()
    for name, weight in weights.items():
        if name.endswith(("key.weight", "value.weight")):
            weights[name] = weight.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    single.load_state_dict(weights)
    tokens = torch.arange(2 * 20).view(2, 20) % 17
    made = []
    for model in (shared, single):
        state = model.init_state(2, mem_len=9, segment_len=20, memory="hidden")
        nll, _ = model.score(tokens[:, :-1], tokens[:, 1:], state)[:2]
        gradient = torch.autograd.grad(nll.sum(), model.stack.blocks[0].attention.query.weight)[0]
        with torch.inference_mode():
            state, parts = model.init_state(2, mem_len=9, segment_len=20), []
            for part in tokens.split((7, 1, 12), dim=1):
                x, state = model(part, state)[:2]
                parts.append(x)
        made.append((nll, gradient, torch.cat(parts, dim=1)))
    for one, other in zip(*made, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("t", "m"), CASES)
@pytest.mark.parametrize("n_heads", [1, 2, 4, 6])
def test_alibi_for_any_number_of_heads(n_heads, t, m):
    check(make(KINDS["alibi"], n_heads=n_heads), t, m, window=None)


@pytest.mark.parametrize(("t", "m"), CASES)
def test_t5_with_unscaled_scores(t, m):
    check(make(KINDS["t5"], scaled=False), t, m, window=None)


def test_published_slopes_of_alibi():
    """Press et al. 2022, section 3: 1/2 to 1/256 for 8 heads; their code for 12 adds the odd ones of 16."""
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert slopes(8) == eight
    assert slopes(12) == pytest.approx([*eight, *(2**-e for e in (0.5, 1.5, 2.5, 3.5))])
    assert slopes(1) == [1 / 256]
    for n_heads in range(1, 70):
        assert slopes(n_heads) == pytest.approx(positions.alibi_slopes(n_heads))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("t", "m"), CASES)
@pytest.mark.parametrize("shift", [10**6, 2**30 + 1])
def test_translation_changes_nothing_for_relative_kinds_alone(name, t, m, shift):
    model, (x, older) = make(KINDS[name], dtype=torch.float32), inputs(t, m, torch.float32)
    is_equal = name in RELATIVE or ("on heads" in name and t + m == 1)  # a single key gets all the weight
    with torch.inference_mode():
        near, far = outputs(model, x, older), outputs(model, x, older, start=shift)
        for a, b in zip(near, far, strict=True):
            difference = (a - b).abs().max()
            assert difference < 1e-5 if is_equal else difference > 1e-2


@pytest.mark.parametrize("name", KINDS)
def test_distances_far_beyond_any_in_training(name):
    """Finite, with either memory, and in float32 what it is in float64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        model, (x, older) = make(KINDS[name], dtype=dtype), inputs(5, 3000, dtype)
        with torch.inference_mode():
            results += outputs(model, x, older, mem_len=3000)
    assert torch.isfinite(results[-1]).all()
    for out in results[:-1]:
        assert torch.allclose(out.double(), results[-1], rtol=0, atol=1e-4)


def vectors(position, n, **settings):
    """What the encoding adds at positions 0 to n - 1 (n d)."""
    return make(position, **settings).position.embed(torch.zeros(1, n, DIM, dtype=torch.float64), frame_of(0, n))[0]


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (2, 3, 4), (4, 3, 2), (21,)])
def test_axial_vectors_are_distinct_and_then_begin_again(shape):
    n = math.prod(shape)
    found = vectors({"kind": "axial", "shape": list(shape)}, n + 1)
    assert len(found.unique(dim=0)) == n
    assert torch.equal(found[0], found[n])


@pytest.mark.parametrize("shape", [(1024, 1024), (64, 64, 256), (3, 7, 11, 13, 499), (2**11, 2**11)])
def test_axial_positions_reach_a_million_and_beyond(shape):
    n, zeros = math.prod(shape), torch.zeros(1, 100, DIM, dtype=torch.float64)
    position = make({"kind": "axial", "shape": list(shape)}).position
    last = position.embed(zeros, frame_of(n - 50, 100))[0]
    assert n >= 2**20
    assert len(last.unique(dim=0)) == 100
    assert torch.equal(last[50:], position.embed(zeros, frame_of(0, 100))[0, :50])
    tables = [axis.weight for axis in position.axes]
    for row in (0, 49):
        place, digits = n - 50 + row, []
        for size in reversed(shape):
            place, digit = divmod(place, size)
            digits.insert(0, digit)
        assert torch.equal(last[row], torch.cat([table[i] for table, i in zip(tables, digits, strict=True)]))


def test_axial_of_one_axis_is_learned():
    a, b = (vectors(p, 9) for p in ({"kind": "axial", "shape": [9]}, {"kind": "learned", "max_len": 9}))
    assert torch.equal(a, b)


def test_axial_costs_what_its_axes_cost():
    sizes = {"shape": [64, 32], "dims": [4, 8]}
    without, with_axes = (make(p).n_parameters for p in (KINDS["none"], {"kind": "axial", **sizes}))
    assert with_axes - without == 64 * 4 + 32 * 8


@pytest.mark.parametrize("table", [
    {"kind": "learned", "max_len": 12},
    {"kind": "learned", "max_len": 12, "placement": "qk", "shared": True},
    {"kind": "axial", "shape": [3, 4]},
    {"kind": "axial", "shape": [3, 4], "placement": "layers"},
])  # fmt: skip
def test_beyond_the_table_is_an_error_in_one_sentence(table):
    model = make({**table, "overflow": "error"}, dim=18)
    text = torch.arange(13)[None]
    with torch.inference_mode():
        _, full = model(text[:, :12], model.init_state(1, mem_len=5, segment_len=4))
        for tokens, state in (
            (text[:, 12:], full),
            (text, model.init_state(1, mem_len=5, segment_len=4)),
            (text[:, :1].expand(2, 1), model.init_state(2, mem_len=5, segment_len=4, offsets=[3, 12])),
        ):
            with pytest.raises(DataError) as raised:
                model(tokens, state)
            message, remedy = raised.value.message, raised.value.remedy
            assert "12" in message
            assert message.count(".") == 1
            assert message.endswith(".")
            assert "overflow=wrap" in remedy
            assert "\n" not in message + remedy
        # What the error advises: independent segments count from their own beginning.
        assert "--mem-len 0" in remedy
        x, _ = model(text.expand(2, 13), model.init_state(2, mem_len=0, segment_len=4))
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("name", [name for name in ABSOLUTE if "layers" not in name and "heads" not in name])
def test_positions_count_on_from_call_to_call_and_from_the_offset_of_a_row(name):
    model = make(KINDS[name])
    mark, x = twin(model)["embed"], torch.randn(2, 3, DIM, dtype=torch.float64)
    place = {"n_memory": 2, "n_new": 3, "keep": 0, "device": x.device, "start": 6}
    sequences = AttentionContext(Span("uniform", 9, 4), **place, offsets=torch.tensor([0, 11]))
    segments = AttentionContext(Span("segment", 0, 9), **{**place, "start": 24})
    for context, firsts in ((sequences, (6, 17)), (segments, (6, 6))):
        out = model.position.embed(x, context)
        for row, first in enumerate(firsts):
            expected = torch.stack([mark(x[row, i], first + i) for i in range(3)])
            assert torch.allclose(out[row], expected, rtol=0, atol=1e-12)


def gradients(model, t, m):
    """Gradients of the branch's parameters for a random loss, by their names."""
    x, older = inputs(t, m)
    torch.manual_seed(0)
    out = model.stack.blocks[0].attention(x, Hidden(older), frame_of(m, t, mem_len=m))[0]
    (out * torch.randn_like(out)).sum().backward()
    return {name: p.grad for name, p in model.stack.blocks[0].attention.named_parameters()}


@pytest.mark.parametrize("kind", ["t5", "contextual-1", "contextual-2"])
def test_every_bucket_gets_gradient(kind):
    found = gradients(make({"kind": kind, "n_buckets": 32, "max_distance": 128}), 3, 140)["position.table.weight"]
    assert (found != 0).all()


def test_every_vector_of_shaw_gets_gradient():
    found = gradients(make({"kind": "shaw", "max_distance": 20}), 3, 40)
    assert (found["position.keys.weight"] != 0).all()
    assert (found["position.value_vectors.weight"] != 0).all()


@pytest.mark.parametrize(
    ("position", "size"),
    [
        (KINDS["t5"], BUCKETS["n_buckets"] * 3),
        (KINDS["learned in layers"], 48 * DIM),
        (KINDS["learned on heads"], 11 * DIM),
        (KINDS["contextual-1"], BUCKETS["n_buckets"] * DIM + DIM * DIM),
        (KINDS["contextual-2"], BUCKETS["n_buckets"] * DIM),
    ],
)
def test_tables_are_shared_by_layers_or_not(position, size):
    shared, own = (make({**position, "shared": s}, n_layers=3) for s in (True, False))
    assert own.n_parameters - shared.n_parameters == 2 * size
    text = torch.arange(10)[None]
    shared(text, shared.init_state(1, mem_len=3, segment_len=4, memory="hidden"))[0].square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in shared.stack.blocks[0].attention.position.parameters()
    )


def test_shared_tables_are_for_layers():
    with pytest.raises(ConfigError, match="placement"):
        make({**KINDS["learned"], "shared": True})


def test_a_base_of_local_layers_is_for_layers():
    with pytest.raises(ConfigError, match="local_base"):
        make({**KINDS["rope at embedding"], "local_base": 10.0})


@pytest.mark.parametrize("name", ["sinusoidal on heads", "learned on heads"])
def test_remembered_inputs_have_positions_in_their_documents(name):
    """Inputs that are projected again get the positions that their keys would have had."""
    context = AttentionContext(
        Span("growing", 9, 4), n_memory=5, n_new=3, keep=0, device=torch.device("cpu"), start=20,
        documents=DocumentPositions(torch.tensor([[3, 4, 0], [11, 12, 13]]), masked=True),
    )  # fmt: skip
    position, x = make(KINDS[name]).stack.blocks[0].attention.position, torch.randn(2, 3, 8, 4, dtype=torch.float64)
    placed = position.place(x, context)
    alone = frame_of(0, 30)
    zeros = torch.zeros(1, 3, 30, 4, dtype=torch.float64)
    expected = position.place(zeros, alone)[0]
    for row, places in enumerate(([0, 0, 0, 1, 2, 3, 4, 0], range(6, 14))):
        assert torch.allclose(placed[row] - x[row], expected[:, list(places)], rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made, backwards too."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return out


@pytest.mark.parametrize("name", ["contextual-1", "contextual-2", "shaw"])
@pytest.mark.parametrize(("t", "m"), [(40, 60), (1, 400)])
def test_a_vector_for_a_distance_is_never_spread_over_pairs_of_tokens(name, t, m):
    n_heads, dim = 2, 64
    attention = make(KINDS[name], dim=dim, n_heads=n_heads).stack.blocks[0].attention
    x, older = (torch.randn(1, n, dim, dtype=torch.float64, requires_grad=True) for n in (t, m))
    with Largest() as largest:
        attention(x, Hidden(older), frame_of(m, t, mem_len=m))[0].sum().backward()
    assert largest.elements <= max(n_heads * t * (t + m), (t + m) * dim, dim * dim)


def test_the_largest_tensor_is_seen_backwards():
    x = torch.randn(5, requires_grad=True)
    with Largest() as largest:
        y = x.sum()
        assert largest.elements == 1
        y.backward()
        assert largest.elements == 5


def test_scaled_frequencies():
    """The settings of Llama 3.1, and of 3.2."""
    for factor in (8.0, 32.0):
        scaling = RopeScalingConfig(kind="llama3", factor=factor)
        found = rope_frequencies(128, torch.device("cpu"), 500000.0, scaling).tolist()
        unscaled = [500000 ** (-2 * f / 128) for f in range(64)]
        settings = scaling.model_dump(exclude={"kind"})
        assert found == pytest.approx([positions.llama3(one, **settings) for one in unscaled], rel=1e-14)
        assert found[0] == 1
        assert found[-1] == pytest.approx(unscaled[-1] / factor)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_scores_depend_on_the_distance_alone_only_in_the_layers(layout):
    """One query vector and one key vector at every position: scores are constant along diagonals."""
    n = 40
    settings = {"kind": "rope", "layout": layout}
    layers, embedding = (make({**settings, "placement": where}) for where in ("layers", "embedding"))
    row = torch.randn(1, 1, DIM, dtype=torch.float64).expand(1, n, DIM)

    def scores(model):
        branch, context = model.stack.blocks[0].attention, frame_of(0, n)
        k, _ = branch.project(model.position.embed(row, context), context)
        heads = branch.query(model.position.embed(row, context)).unflatten(-1, (branch.n_heads, -1)).transpose(1, 2)
        return (branch.position.place(heads, context) @ k.mT)[0]

    with torch.no_grad():
        inside, outside = scores(layers), scores(embedding)
    assert torch.allclose(inside[:, 1:, 1:], inside[:, :-1, :-1], rtol=0, atol=1e-12)
    assert inside[:, -1].std() > 0.1
    assert (outside[:, 1:, 1:] - outside[:, :-1, :-1]).abs().max() > 0.1


def test_rope_at_the_embedding_is_another_model_than_in_the_layers():
    x, older = inputs(4, 9)
    with torch.inference_mode():
        a, b = (outputs(make({"kind": "rope", "placement": where}), x, older)[0] for where in ("layers", "embedding"))
    assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize(
    ("around", "size"),
    [
        ({}, 0.02),
        ({"embedding": {"scaled": True}}, 0.02 * 4),
        ({"norm": {"placement": "post"}}, 0.02),
        ({"norm": {"placement": "post"}, "position": {"kind": "sinusoidal", "placement": "layers"}}, 1.0),
        ({"position": {"kind": "sinusoidal", "amplitude": 0.3}}, 0.3),
    ],
)
def test_sinusoids_are_as_large_as_what_they_are_added_to(around, size):
    """The paper's ratio, whatever embeddings begin with: there both are about 1."""
    tree = {"dim": 16, "n_layers": 1, "attention": {"n_heads": 2}, "position": {"kind": "sinusoidal"}}
    model = build_model(config.make({"model": config.merge(tree, around)}).model)
    inside = model.stack.blocks[0].attention.position
    position = inside if around.get("position", {}).get("placement") == "layers" else model.position
    context = AttentionContext(
        Span("uniform", mem_len=4, segment_len=4), n_memory=0, n_new=3, keep=3, device=torch.device("cpu")
    )
    signal = position.embed(torch.zeros(1, 3, 16), context)
    assert signal.square().mean().sqrt().item() == pytest.approx(size / 2**0.5)
