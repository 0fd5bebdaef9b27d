"""The branch of hashed attention and its memory against loops over the definition."""

import math

import pytest
import torch
from oracles import positions, reformer
from pydantic import ValidationError

from xlcli import config
from xlcli.config.attention import LSHAttentionConfig
from xlcli.errors import StateError
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.build import build_model
from xlcli.model.position import Position
from xlcli.model.position.rope import RopePosition
from xlcli.ops.context import AttentionContext, Rows
from xlcli.ops.span import Span
from xlcli.state import State

DIM, HEADS, WIDTH, FACTORS, SIZE, ROUNDS = 10, 2, 4, (2, 4), 3, 2
UNIFORM = Span("uniform", mem_len=20, segment_len=7)
GROWING = Span("growing", mem_len=6, segment_len=7)
SEGMENT = Span("uniform", mem_len=0, segment_len=7)
NONE = Rows(torch.zeros(2, 1, dtype=torch.bool))


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def branch(n_hashes=ROUNDS, dtype=torch.float64, dropout=0.0, position=None, query_scale=None):
    attention = LSHAttention(
        dim=DIM,
        n_heads=HEADS,
        head_dim=WIDTH,
        position=position or Position(),
        factors=FACTORS,
        bucket_size=SIZE,
        n_hashes=n_hashes,
        dropout=dropout,
        query_scale=query_scale,
    )
    attention.redraw(drawn(1))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, 0.5, generator=drawn(parameter.numel()))
    return attention.to(dtype).eval()


def text(t, rows=2, dtype=torch.float64):
    return torch.randn(rows, t, DIM, generator=drawn(t), dtype=torch.float64).to(dtype)


def context(start, n_new, span=UNIFORM):
    keep = span.n_kept(start + n_new)
    return AttentionContext(
        span, n_memory=span.n_kept(start), n_new=n_new, keep=keep, device=torch.device("cpu"), start=start
    )


def read(attention, x, cuts, span=UNIFORM, memory=None, start=0):
    """Outputs of x (b t d) read in calls of these lengths, and the memory at the end."""
    memory, out, at = memory or attention.init_memory(len(x), "hidden"), [], 0
    for n in cuts:
        y, memory = attention(x[:, at : at + n], memory, context(start + at, n, span))
        out.append(y)
        at += n
    assert at == x.shape[1]
    return torch.cat(out, 1), memory


def expected(attention, x, limit=20, apply_rope=lambda q, i: q):
    """Output of the branch in index loops, projections included; `apply_rope` rotates a query or key."""
    rows = []
    for row in x:
        q, v = (
            (row @ part.weight.T).unflatten(-1, (HEADS, WIDTH)).tolist() for part in (attention.query, attention.value)
        )
        heads = []
        factors = [1.0] * HEADS if attention.log_scale is None else [math.exp(s) for s in attention.log_scale.tolist()]
        for head in range(HEADS):
            scale = factors[head]
            q_h, v_h = [of[head] for of in q], [of[head] for of in v]
            rotations = attention.rotations[: attention.n_hashes].tolist()
            buckets = [[reformer.bucket(of, directions, FACTORS) for of in q_h] for directions in rotations]
            q_h = [apply_rope(q_i, i) for i, q_i in enumerate(q_h)]
            heads.append(torch.tensor(reformer.attend(q_h, v_h, buckets, SIZE, scale, limit), dtype=x.dtype))
        rows.append(torch.cat(heads, -1) @ attention.output.weight.T)
    return torch.stack(rows)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("cuts", [[70], [1] * 70, [33, 1, 36], [5, 12, 13, 40]])
@pytest.mark.parametrize("n_hashes", [1, 4])
def test_attention_equals_the_definition(n_hashes, cuts, inference):
    attention, x = branch(n_hashes), text(70)
    with torch.inference_mode(inference):
        out, _ = read(attention, x, cuts)
    assert torch.allclose(out, expected(attention, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [17, 23]])
def test_queries_are_multiplied_by_a_factor_of_their_head(cuts):
    attention, x = branch(query_scale=1.0), text(40)
    with torch.inference_mode():
        out, _ = read(attention, x, cuts)
        assert torch.allclose(out, expected(attention, x), rtol=0, atol=1e-10)
        assert not torch.allclose(out, expected(branch(), x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("inference", [False, True])
def test_independent_segments_forget(inference):
    attention, x = branch(), text(20)
    with torch.inference_mode(inference):
        out, memory = read(attention, x, [4, 3, 7, 1, 5], SEGMENT)
        parts = [expected(attention, part) for part in x.split(7, 1)]
        assert torch.allclose(out, torch.cat(parts, 1), rtol=0, atol=1e-10)
        assert memory.table.counts.any()
        _, ended = read(attention, x[:, :14], [7, 7], SEGMENT)
    assert not any(t.any() for t in ended.tensors().values())


def test_a_growing_span_sees_the_memory_and_the_call():
    attention, x = branch(), text(21)
    out, _ = read(attention, x, [7, 7, 7], GROWING)
    parts = [expected(attention, x[:, max(0, start - 6) : start + 7])[:, -7:] for start in (0, 7, 14)]
    assert torch.allclose(out, torch.cat(parts, 1), rtol=0, atol=1e-10)


def test_no_gradient_flows_into_memory():
    attention, x = branch(), text(30).requires_grad_()
    out, memory = read(attention, x, [20, 10])
    assert not any(t.requires_grad for t in memory.tensors().values())
    (gradient,) = torch.autograd.grad(out[:, 20:].square().sum(), x)
    assert not gradient[:, :20].any()
    assert gradient[:, 20:].abs().amax((0, 2)).min() > 0


def test_a_state_may_take_the_place_of_the_one_before_it():
    """After the backward pass; until then both can be continued."""
    attention, x = branch(), text(30).requires_grad_()
    memory, plain, start = attention.init_memory(2, "keyvalue"), attention.init_memory(2, "keyvalue"), 0
    for n in (9, 4, 17):
        part, at = x[:, start : start + n], context(start, n)
        (expected, plain), (out, after) = attention(part, plain, at), attention(part, memory, at)
        kept = [t.clone() for t in memory.tensors().values()]
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
        assert all(torch.equal(a, b) for a, b in zip(memory.tensors().values(), kept, strict=True))
        earlier, memory = memory, after.overwrite_earlier()
        assert torch.equal(out, expected)
        assert all(torch.equal(t, plain.tensors()[name]) for name, t in memory.tensors().items())
        assert start == 0 or memory.table.keys.data_ptr() == earlier.table.keys.data_ptr()
        start += n


@pytest.mark.parametrize("inference", [False, True])
def test_remembering_is_reading_without_the_output(inference):
    attention, x = branch(), text(30)
    with torch.inference_mode(inference):
        _, before = read(attention, x[:, :14], [14])
        _, alone = attention(x[:, 14:], before.map(torch.clone), context(14, 16).for_rows(NONE))
        for cuts in ([16], [1] * 16):
            _, after = read(attention, x[:, 14:], cuts, memory=before.map(torch.clone), start=14)
            for name, t in after.tensors().items():
                assert torch.allclose(t, alone.tensors()[name], rtol=0, atol=1e-12), name
        _, ended = attention(x[:, :7], attention.init_memory(2, "keyvalue"), context(0, 7, SEGMENT).for_rows(NONE))
    assert not any(t.any() for t in ended.tensors().values())


@pytest.mark.parametrize("n", [1, 16])
def test_only_continuing_under_inference_consumes_a_memory(n):
    attention, x = branch(), text(30)
    start = attention.init_memory(2, "keyvalue")
    with torch.inference_mode():
        _, memory = read(attention, x[:, :14], [14], memory=start)
        fork = memory.map(torch.clone)
        read(attention, x[:, 14 : 14 + n], [n], memory=memory, start=14)
    assert not any(t.any() for t in start.tensors().values())
    assert memory.table.counts.sum() == fork.table.counts.sum() + n * 2 * HEADS * ROUNDS
    with torch.no_grad():
        _, memory = read(attention, x[:, :14], [14])
        kept = memory.map(torch.clone)
        read(attention, x[:, 14 : 14 + n], [n], memory=memory, start=14)
    assert all(torch.equal(t, memory.tensors()[name]) for name, t in kept.tensors().items())


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [17, 23]])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_a_trained_layer_takes_other_rounds_at_evaluation(rounds, cuts):
    """The memory says how many; weights and the rounds in common are the same."""
    trained, x = branch(2), text(40)
    with torch.inference_mode():
        out, memory = read(trained, x, cuts, memory=branch(rounds).init_memory(2, "keyvalue"))
        assert torch.allclose(out, expected(branch(rounds), x), rtol=0, atol=1e-10)
    assert memory.n_rounds == rounds


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [17, 23]])
def test_queries_and_keys_are_turned_after_hashing(cuts):
    attention, x = branch(position=RopePosition(layout="interleaved", base=100.0)), text(40)

    def apply_rope(q, i):
        return positions.rotated(torch.tensor(q, dtype=torch.float64), i, base=100.0, layout="interleaved").tolist()

    with torch.inference_mode():
        out, _ = read(attention, x, cuts)
    assert torch.allclose(out, expected(attention, x, apply_rope=apply_rope), rtol=0, atol=1e-10)
    assert not torch.allclose(out, expected(attention, x), rtol=0, atol=1e-3)


def test_rotations_are_saved_and_can_be_drawn_again():
    attention = branch()
    before = attention.state_dict()["rotations"].clone()
    attention.redraw(drawn(2))
    assert not torch.equal(attention.rotations, before)
    attention.redraw(drawn(1))
    assert torch.equal(attention.rotations, before)


@pytest.mark.parametrize("n", [1, 30])
def test_low_precision_hashes_in_float32(n):
    """Under autocast and in a model of bfloat16, scores and memory are at least float32."""
    exact = branch(dtype=torch.float32)
    for attention, autocast in ((exact, True), (branch(dtype=torch.bfloat16), False)):
        x = text(30, dtype=torch.float32 if autocast else torch.bfloat16)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, memory = read(attention, x, [n] * (30 // n))
        assert out.dtype == torch.bfloat16
        assert memory.table.keys.dtype == memory.table.values.dtype == torch.float32
        if autocast:
            assert torch.allclose(out.float(), read(exact, x, [30])[0], rtol=0, atol=0.1)


def table(**settings):
    return {"vocab_size": 31, "dim": 12, "n_layers": 2, "position": {"kind": "none"}, "attention": settings}


def test_memory_is_constant_and_foretold():
    settings = {"kind": "lsh", "n_heads": 2, "n_buckets": [2, 4], "bucket_size": 3, "n_hashes": 2}
    made = config.make({"model": table(**settings)}).model
    model = build_model(made, drawn(0))
    sizes = set()
    with torch.inference_mode():
        for t in (1, 50, 500):
            start = model.init_state(1, mem_len=10**6, segment_len=64)
            _, state = model(torch.randint(0, 31, (1, t), generator=drawn(t)), start)
            sizes.add(sum(t.nbytes for layer in state.layers for t in layer.tensors().values()))
    assert sizes == {made.memory_bytes(10**6)}
    assert start.bytes == 8 * 2 * 2 * 2 * 8, "before anything has arrived, its counts"
    assert made.memory_bytes(10**6) == 4 * 2 * 2 * 2 * 8 * (3 * (2 * 6 + 2 * 3) + 2)
    assert math.prod(made.attention.factors) == 8


def test_a_state_with_other_numbers_than_whole_ones_is_refused():
    model = build_model(config.make({"model": table(kind="lsh", n_buckets=2)}).model, drawn(0))
    state = model.init_state(1, mem_len=5, segment_len=4)
    tensors = state.tensors()
    assert model.is_compatible(State.restore(tensors, state.describe()))
    _, full = model(torch.zeros(1, 3, dtype=torch.int64), state)
    assert model.is_compatible(full)
    other = build_model(config.make({"model": table(kind="lsh", n_buckets=2, bucket_size=5)}).model, drawn(0))
    assert other.is_compatible(state)
    assert not other.is_compatible(full)
    for name in ("0.global_ranks", "0.counts", "0.positions"):
        with pytest.raises(StateError):
            State.restore(tensors | {name: tensors[name].double()}, state.describe())
    with pytest.raises(StateError):
        State.restore(tensors | {"1.keys": tensors["1.keys"].long()}, state.describe())


def test_the_factor_of_queries_begins_at_its_setting_and_learns():
    model = build_model(config.make({"model": table(kind="lsh", n_heads=2, n_buckets=2, query_scale=3.0)}).model)
    scales = [block.attention.log_scale for block in model.stack.blocks]
    assert all(torch.allclose(scale.exp(), torch.tensor([3.0, 3.0])) for scale in scales)
    tokens = torch.randint(0, 31, (2, 21), generator=drawn(0))
    model.score(tokens[:, :-1], tokens[:, 1:], model.init_state(2, mem_len=20, segment_len=20)).nll.sum().backward()
    assert all(scale.grad.all() for scale in scales)
    plain = build_model(config.make({"model": table(kind="lsh", n_heads=2, n_buckets=2)}).model)
    assert plain.n_parameters == model.n_parameters - 4


def test_tables_of_too_many_tokens_are_refused():
    assert LSHAttentionConfig(n_buckets=(256, 256), bucket_size=16).bucket_size == 16
    with pytest.raises(ValidationError, match=r"200\D+65,536"):
        LSHAttentionConfig(n_buckets=(256, 256), bucket_size=200)


@pytest.mark.parametrize("n_buckets", [0, 3, -2, [2, 3], [], [1], 2**17, [2**10, 2**10]])
def test_buckets_must_come_in_pairs(n_buckets):
    with pytest.raises(ValidationError, match="n_buckets"):
        LSHAttentionConfig(n_buckets=tuple(n_buckets) if isinstance(n_buckets, list) else n_buckets)
