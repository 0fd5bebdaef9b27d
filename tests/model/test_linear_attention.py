"""The Performer branch against the paper's formulas, one feature, query and key at a time."""

import pytest
import torch
from oracles import performer

from xlcli.memory import Sums
from xlcli.model.attention.linear import LinearAttention
from xlcli.model.position import Position
from xlcli.model.position.rope import RopePosition
from xlcli.ops.context import AttentionContext, Rows
from xlcli.ops.span import Span

DIM, HEADS, WIDTH, FEATURES = 10, 3, 4, 7
UNIFORM = Span("uniform", mem_len=5, segment_len=4)
SEGMENT = Span("uniform", mem_len=0, segment_len=4)
NONE = Rows(torch.zeros(2, 1, dtype=torch.bool))


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def branch(position=None, dtype=torch.float64):
    attention = LinearAttention(
        dim=DIM,
        n_heads=HEADS,
        head_dim=WIDTH,
        position=position or Position(),
        n_features=FEATURES,
        orthogonal=True,
    )
    attention.redraw(drawn(1))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, 0.5, generator=drawn(parameter.numel()))
    return attention.to(dtype)


def text(t, rows=2, dtype=torch.float64):
    return torch.randn(rows, t, DIM, generator=drawn(t), dtype=torch.float64).to(dtype)


def context(start, n_new, span=UNIFORM):
    keep = span.n_kept(start + n_new)
    return AttentionContext(
        span, n_memory=span.n_kept(start), n_new=n_new, keep=keep, device=torch.device("cpu"), start=start
    )


def read(attention, x, cuts, span=UNIFORM):
    """Outputs of x (b t d) read in calls of these lengths, and the memory at the end."""
    memory, out, at = attention.init_memory(len(x), "hidden"), [], 0
    for n in cuts:
        y, memory = attention(x[:, at : at + n], memory, context(at, n, span))
        out.append(y)
        at += n
    assert at == x.shape[1]
    return torch.cat(out, 1), memory


def expected(attention, x, rotate=False):
    names = {"W_q": attention.query, "W_k": attention.key, "W_v": attention.value, "W_o": attention.output}
    weights = {name: linear.weight for name, linear in names.items()}
    rows = [performer.branch(row, weights, attention.features, n_heads=HEADS, rotate=rotate) for row in x]
    return torch.stack(rows)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("cuts", [[9], [1] * 9, [4, 1, 4], [1, 8]])
def test_attention_equals_the_paper_with_all_that_was_read_as_memory(rotate, cuts):
    attention = branch(RopePosition(layout="half", base=10000.0) if rotate else None)
    x = text(9)
    out, _ = read(attention, x, cuts)
    assert torch.allclose(out, expected(attention, x, rotate), rtol=0, atol=1e-10)


def test_gradients_equal_those_of_the_paper():
    attention, x = branch(), text(6).requires_grad_()
    probe = torch.randn(2, 6, DIM, generator=drawn(3), dtype=torch.float64)
    inputs = [x, *attention.parameters()]
    out, _ = read(attention, x, [6])
    fast = torch.autograd.grad((out * probe).sum(), inputs)
    slow = torch.autograd.grad((expected(attention, x) * probe).sum(), inputs)
    assert len(inputs) == 5
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_no_gradient_flows_into_memory():
    attention = branch()
    x = text(6).requires_grad_()
    out, memory = read(attention, x, [4, 2])
    assert not memory.s.requires_grad
    assert not memory.z.requires_grad
    (gradient,) = torch.autograd.grad(out[:, 4:].sum(), x)
    assert torch.equal(gradient[:, :4], torch.zeros_like(gradient[:, :4]))
    assert gradient[:, 4:].abs().min() > 0


@pytest.mark.parametrize("cuts", [[4, 4, 3], [1] * 11, [2, 2, 1, 3, 3]])
def test_independent_segments_forget(cuts):
    attention, x = branch(), text(11)
    out, memory = read(attention, x, cuts, SEGMENT)
    parts = [expected(attention, part) for part in x.split(4, 1)]
    assert torch.allclose(out, torch.cat(parts, 1), rtol=0, atol=1e-10)
    _, whole = read(attention, x[:, 8:], [3], SEGMENT)
    assert torch.allclose(memory.z, whole.z, rtol=1e-12, atol=0)
    _, ended = read(attention, x[:, :4], [4], SEGMENT)
    assert not ended.s.any()
    assert not ended.z.any()


def test_remembering_is_reading_without_the_output():
    attention, x = branch(RopePosition(layout="half", base=10000.0)), text(9)
    _, before = read(attention, x[:, :4], [4])
    _, after = attention(x[:, 4:], before, context(4, 5))
    _, alone = attention(x[:, 4:], before, context(4, 5).for_rows(NONE))
    assert torch.allclose(alone.s, after.s, rtol=1e-10, atol=0)
    assert torch.allclose(alone.z, after.z, rtol=1e-10, atol=0)
    _, ended = attention(x[:, :4], attention.init_memory(2, "keyvalue"), context(0, 4, SEGMENT).for_rows(NONE))
    assert not ended.z.any()


def test_a_memory_has_the_shape_it_starts_with_and_no_limit():
    attention = branch()
    assert attention.receptive_field(5) is None
    empty = attention.init_memory(2, "keyvalue")
    assert isinstance(empty, Sums)
    for _, memory in (read(attention, text(9), [9]), read(attention, text(9), [1] * 9)):
        assert memory.shape == empty.shape == (HEADS, FEATURES, WIDTH)
        assert {n: t.shape for n, t in memory.tensors().items()} == {n: t.shape for n, t in empty.tensors().items()}


@pytest.mark.parametrize("t", [1, 9])
def test_sums_keep_their_digits_under_autocast(t):
    """Large values, which bfloat16 sums would lose the digits of."""
    attention, x = branch(dtype=torch.float32), text(t, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, memory = read(attention, x, [t])
        k, v = attention.project(x, context(0, t))
    assert out.dtype == k.dtype == torch.bfloat16
    assert memory.s.dtype == memory.z.dtype == torch.float64
    exact = branch()
    exact.project = lambda x, context: (k.double(), v.double())
    _, summed = exact(x.double(), exact.init_memory(2, "hidden"), context(0, t).for_rows(NONE))
    assert torch.allclose(memory.s.double(), summed.s, rtol=1e-4, atol=1e-4 * summed.s.abs().mean())
    assert torch.allclose(memory.z.double(), summed.z, rtol=1e-4, atol=0)
    assert torch.allclose(out.float(), read(attention, x, [t])[0], rtol=0, atol=0.1)


def test_a_model_in_bfloat16_sums_in_float64():
    attention = branch(dtype=torch.bfloat16)
    out, memory = read(attention, text(9, dtype=torch.bfloat16), [5, 4])
    assert out.dtype == torch.bfloat16
    assert memory.s.dtype == attention.init_memory(1, "hidden").s.dtype == torch.float64


def test_features_are_saved_and_can_be_drawn_again():
    attention = branch()
    assert "features" in attention.state_dict()
    before = attention.features.clone()
    attention.redraw(drawn(2))
    assert not torch.equal(attention.features, before)
    attention.redraw(drawn(1))
    assert torch.equal(attention.features, before)
    gram = attention.features[:WIDTH] @ attention.features[:WIDTH].mT
    assert torch.allclose(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)


def test_sums_do_not_drift_when_tokens_come_one_at_a_time():
    """The same tokens one at a time or in large calls: float32 sums would differ in the fourth digit by then."""
    attention = branch(dtype=torch.float32)
    x = text(400, dtype=torch.float32).repeat(1, 10, 1)
    with torch.inference_mode():
        _, one = read(attention, x, [1] * 4000)
        _, large = read(attention, x, [1000] * 4)
    assert torch.allclose(one.z, large.z, rtol=1e-6, atol=0)
