import pytest
import torch

from xlcli.ops.attend import attend, attend_fused, attend_plain
from xlcli.ops.context import Mask, VisibleKeys
from xlcli.ops.positions import Positions
from xlcli.ops.scoring import ScoreTerm, Scoring


def chosen(q, k, v, *, visible, scale, bias=None, dropout=0.0):
    """`attend`, with the arguments of the kernels."""
    return attend(q, k, v, visible, Scoring(scale, bias=bias), dropout=dropout)


KERNELS = [chosen, attend_plain, attend_fused]


def tensors(t, m, e=8, w=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(t * 100 + m)
    return tuple(
        torch.randn(2, 3, n, width, generator=generator, dtype=dtype).requires_grad_()
        for n, width in ((t, e), (t + m, e), (t + m, w))
    )


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def causal(t, m):
    return torch.ones(t, t + m, dtype=torch.bool).tril(m)


def by_definition(q, k, v, visible, scale, bias=None):
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    n_shared = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if visible is None or visible[i, j]]
                scores = torch.stack([
                    (q[b, h, i] @ k[b, h // n_shared, j]) * scale + (0 if bias is None else bias[b, h, i, j])
                    for j in keys
                ])  # fmt: skip
                out[b, h, i] = sum(p * v[b, h // n_shared, j] for p, j in zip(scores.softmax(0), keys, strict=True))
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("e", "w"), [(8, 8), (12, 8), (4, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 3), (4, 2)])
def test_kernels_equal_the_definition_with_gradients(kernel, e, w, with_bias, n_heads, n_kv_heads):
    t, m = 5, 4
    q, k, v = (
        random(2, n, size, width).requires_grad_()
        for n, size, width in ((n_heads, t, e), (n_kv_heads, t + m, e), (n_kv_heads, t + m, w))
    )
    distance = torch.arange(t)[:, None] + m - torch.arange(t + m)
    visible = (distance >= 0) & (distance <= 6)
    bias = random(2, n_heads, t, t + m) if with_bias else None
    expected = by_definition(q, k, v, visible, 0.3, bias)
    out = kernel(q, k, v, visible=VisibleKeys(visible), scale=0.3, bias=bias)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    weights = random(*out.shape)
    for a, b in zip(
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        torch.autograd.grad((out * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("n_kv_heads", [3, 1])
def test_a_second_term_is_added_to_the_scores(t, masked, with_bias, n_kv_heads):
    """With a single query over visible keys, where no key is copied, as with many."""
    q, k, v = tensors(t, 9)
    k, v = k[:, :n_kv_heads], v[:, :n_kv_heads]
    query, key = random(2, 3, t, 6).requires_grad_(), random(t + 9, 6)
    visible = causal(t, 9) & (torch.arange(t + 9) != 2) if masked else None
    bias = random(2, 3, t, t + 9) if with_bias else None
    second = torch.einsum("bhtf,sf->bhts", query, key) * 0.3
    expected = by_definition(q, k, v, visible, 0.3, second if bias is None else second + bias)
    out = attend(q, k, v, VisibleKeys(visible), Scoring(0.3, term=ScoreTerm(query, key), bias=bias))
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    weights = random(*out.shape)
    for a, b in zip(
        torch.autograd.grad((expected * weights).sum(), (q, k, v, query)),
        torch.autograd.grad((out * weights).sum(), (q, k, v, query)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def weights_of(q, k, visible, dropout=0.0, **scores):
    """Attention weights, as a value bias is given them."""
    found = []

    def value_bias(weights):
        found.append(weights)
        return torch.zeros_like(q[..., :1])

    scoring = Scoring(0.3, value_bias=value_bias, **scores)
    out = attend(q, k, torch.zeros_like(k[..., :1]), VisibleKeys(visible), scoring, dropout=dropout)
    assert not out.any()
    return found[0]


def test_a_value_bias_is_added_to_the_output():
    q, k, v = tensors(5, 4)
    visible = causal(5, 4)
    vectors = random(9, 8)
    out = attend(q, k, v, VisibleKeys(visible), Scoring(0.3, value_bias=lambda weights: weights @ vectors))
    assert torch.allclose(out, attend(q, k, v + vectors, VisibleKeys(visible), Scoring(0.3)), rtol=0, atol=1e-12)


def test_dropout_keeps_the_mean_and_drops_weights():
    torch.manual_seed(0)
    q, k, v = tensors(64, 64, dtype=torch.float32)
    with torch.no_grad():
        kept = attend_plain(q, k, v, visible=VisibleKeys(None), scale=0.3)
        dropped = torch.stack(
            [attend_plain(q, k, v, visible=VisibleKeys(None), scale=0.3, dropout=0.5) for _ in range(200)]
        )
    assert not torch.allclose(dropped[0], kept)
    assert (dropped.mean(0) - kept).abs().max() < 0.15


BIASES = {
    "no bias": lambda t, s, dtype: None,
    "of every row": lambda t, s, dtype: random(2, 3, t, s, dtype=dtype),
    "of every head": lambda t, s, dtype: random(3, t, s, dtype=dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1e4, 6e4])
@pytest.mark.parametrize("where", ["scores", "bias"])
def test_scores_that_are_large_choose_the_best_key(kernel, dtype, size, where):
    """Scores from -`size` to `size`: one weight is 1, and neither it nor a gradient overflows."""
    t, m, w = 4, 2, 6
    peaks = torch.linspace(-1, 1, t + m, dtype=torch.float64)[torch.tensor([3, 0, 5, 1, 4, 2])]
    q = torch.ones(1, 1, t, 1, dtype=dtype)
    k = (peaks if where == "scores" else torch.zeros(t + m)).to(dtype).view(1, 1, -1, 1)
    bias = (peaks * size).to(dtype).expand(1, t, -1) if where == "bias" else None
    v = random(1, 1, t + m, w, dtype=dtype)
    for x in (q, k, v):
        x.requires_grad_()
    visible = causal(t, m)
    out = kernel(q, k, v, visible=VisibleKeys(visible), scale=size, bias=bias)
    best = peaks.masked_fill(~visible, -9).argmax(-1)
    assert torch.equal(out, v[:, :, best])
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", BIASES)
def test_a_mask_may_differ_from_row_to_row(kernel, bias):
    """(c 1 w 2w), as attention in blocks has it: rows with another mask each, heads alike."""
    q, k, v = tensors(5, 4)
    bias = BIASES[bias](5, 9, torch.float64)
    visible = torch.stack([causal(5, 4), causal(5, 4) & (torch.arange(9) >= 3)])[:, None]
    together = kernel(q, k, v, visible=VisibleKeys(visible), scale=0.3, bias=bias)
    for row in range(2):
        own = bias if bias is None or bias.ndim == 3 else bias[row : row + 1]
        alone = kernel(
            *(x[row : row + 1] for x in (q, k, v)), visible=VisibleKeys(visible[row, 0]), scale=0.3, bias=own
        )
        assert torch.allclose(together[row], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("visible", [None, causal(5, 4)])
def test_a_bias_of_heads_is_that_of_every_row(kernel, visible):
    q, k, v = tensors(5, 4)
    bias = random(3, 5, 9).requires_grad_()
    out = kernel(q, k, v, visible=VisibleKeys(visible), scale=0.3, bias=bias)
    expected = kernel(q, k, v, visible=VisibleKeys(visible), scale=0.3, bias=bias.expand(2, -1, -1, -1))
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    assert torch.allclose(out, by_definition(q, k, v, visible, 0.3, bias.expand(2, -1, -1, -1)), rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((y * random(*y.shape)).sum(), bias)[0] for y in (out, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("w", [1, 8, 30])
def test_values_may_have_any_width(kernel, w):
    q, k, v = tensors(5, 4, w=w)
    out = kernel(q, k, v, visible=VisibleKeys(causal(5, 4)), scale=0.3)
    assert out.shape == (2, 3, 5, w)
    for column in range(w):
        alone = kernel(q, k, v[..., column, None], visible=VisibleKeys(causal(5, 4)), scale=0.3)
        assert torch.allclose(out[..., column, None], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", BIASES)
def test_weights_are_probabilities_of_what_is_visible(bias):
    q, k, _ = tensors(5, 4)
    bias = BIASES[bias](5, 9, torch.float64)
    visible = causal(5, 4) & (torch.arange(9) != 2)
    weights = weights_of(q, k, visible, bias=bias)
    assert (weights > 0).eq(visible).all()
    assert torch.allclose(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64), rtol=0, atol=1e-12)
    unit = torch.eye(9, dtype=torch.float64).expand(2, 3, -1, -1)
    full = None if bias is None else bias.expand(2, 3, -1, -1)
    assert torch.allclose(weights, by_definition(q, k, unit, visible, 0.3, full), rtol=0, atol=1e-12)


def test_without_a_mask_all_keys_are_visible():
    q, k, _ = tensors(2, 3)
    assert (weights_of(q, k, None) > 0).all()


def test_dropout_of_weights():
    torch.manual_seed(0)
    q, k, _ = tensors(32, 32)
    kept = weights_of(q, k, None)
    dropped = weights_of(q, k, None, dropout=0.25)
    survived = dropped > 0
    assert 0.72 < survived.double().mean() < 0.78
    assert torch.allclose(dropped[survived] * 0.75, kept[survived], rtol=1e-12, atol=0)


@pytest.mark.parametrize("n_memory", [0, 5])
@pytest.mark.parametrize("max_distance", [None, 3, 7, 8])
def test_a_mask_says_whether_queries_see_all_earlier_keys(n_memory, max_distance):
    positions = Positions(n_memory=n_memory, n_new=4, first=0, offsets=None, device=torch.device("cpu"))
    mask = Mask(positions, max_distance)
    every = causal(4, n_memory)
    assert mask.sees_all_earlier == torch.equal(mask.visible, every)
    assert torch.equal(mask.causal_bias._materialize(), every)
    hidden_by_documents = Mask(positions, max_distance, torch.zeros(1, 4, dtype=torch.int64))
    assert not hidden_by_documents.sees_all_earlier


def test_what_hides_keys_is_made_once():
    positions = Positions(n_memory=2, n_new=3, first=0, offsets=None, device=torch.device("cpu"))
    mask = Mask(positions, None)
    assert mask.addition(torch.float32) is mask.addition(torch.float32)
    assert torch.equal(mask.addition(torch.float64) == 0, mask.visible)
