import itertools
import math

import pytest
import torch
from oracles import performer

from xlcli.ops.attend import attend_plain
from xlcli.ops.context import VisibleKeys
from xlcli.ops.favor import (
    CHUNK,
    LIMIT,
    attend_linear,
    draw_features,
    key_features,
    query_features,
)

ROWS, HEADS = 2, 2


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def tensors(t, e=4, f=6, seed=0, scale=1.0, dtype=torch.float64):
    """q, k, v (b h t e) and a matrix of features."""
    generator = drawn(seed)
    qkv = (torch.randn(3, ROWS, HEADS, t, e, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return *qkv.unbind(), draw_features(f, e, generator).to(dtype)


def nothing(w, e, dtype=torch.float64):
    return torch.zeros(ROWS, HEADS, len(w), e, dtype=dtype), torch.zeros(ROWS, HEADS, len(w), dtype=dtype)


def attention(q, k, v, w, sums=None, kernel=attend_linear):
    return kernel(query_features(q, w), key_features(k, w), v, *(sums or nothing(w, v.shape[-1], v.dtype)))


def in_pieces(q, k, v, w, sizes):
    sums, out = None, []
    for piece in zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True):
        y, *sums = attention(*piece, w, sums)
        out.append(y)
    return torch.cat(out, 2), *sums


def kernel_estimate(q, k, w):
    """Estimates of exp(q·k / √e) for each pair (t t) of q, k (t e), out of the features of keys alone."""
    none = key_features(torch.zeros_like(q[:1]), w)
    return (key_features(q, w) / none) @ (key_features(k, w) / none).mT / len(w)


def kernel_error(n_features, e=16, orthogonal=True, draws=40):
    """Root of the mean squared relative error over pairs and draws."""
    q, k = 0.5 * torch.randn(2, 24, e, generator=drawn(5), dtype=torch.float64)
    truth = torch.exp(q @ k.mT / e**0.5)
    errors = [
        kernel_estimate(q, k, draw_features(n_features, e, drawn(i), orthogonal=orthogonal).double()) / truth - 1
        for i in range(draws)
    ]
    return torch.stack(errors).square().mean().sqrt().item()


@pytest.mark.parametrize(("n_features", "head_dim"), [(8, 8), (20, 8), (5, 8), (64, 8)])
def test_rows_are_orthogonal_within_blocks(n_features, head_dim):
    w = draw_features(n_features, head_dim, drawn(0))
    assert w.shape == (n_features, head_dim)
    assert w.dtype == torch.float32
    for block in w.double().split(head_dim):
        gram = block @ block.mT
        assert torch.allclose(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
    assert torch.equal(w, draw_features(n_features, head_dim, drawn(0)))
    assert not torch.equal(w, draw_features(n_features, head_dim, drawn(1)))


def test_each_row_is_a_gaussian_vector():
    """Squared norms have mean e and variance 2e; entries are centerd, uncorrelated and of kurtosis 3."""
    e, draws = 6, 4000
    w = torch.stack([draw_features(e, e, drawn(i)) for i in range(draws)]).double()
    squares = w.square().sum(-1)
    deviation = 1 / math.sqrt(draws * e)
    assert abs(squares.mean() - e) < 5 * math.sqrt(2 * e) * deviation
    assert abs(squares.var() - 2 * e) < 5 * math.sqrt(8 * e * e + 48 * e) * deviation
    assert w.mean(0).abs().max() < 5 / math.sqrt(draws)
    for row in range(e):
        covariance = w[:, row].T @ w[:, row] / draws
        assert (covariance - torch.eye(e)).abs().max() < 5 * math.sqrt(2 / draws)
    assert abs(w.pow(4).mean() - 3) < 5 * math.sqrt(96) * deviation


def test_independent_rows_are_not_orthogonal():
    w = draw_features(8, 8, drawn(0), orthogonal=False)
    assert (w @ w.T - (w @ w.T).diagonal().diag()).abs().max() > 1


def test_the_estimate_is_unbiased_and_that_of_the_paper():
    q, k, _, _ = tensors(5, e=8, scale=0.5)
    q, k = q[0, 0], k[0, 0]
    draws = [draw_features(12, 8, drawn(i)).double() for i in range(2000)]
    estimates = torch.stack([kernel_estimate(q, k, w) for w in draws])
    deviation = estimates.std(0) / math.sqrt(len(draws))
    for i in range(5):
        for j in range(5):
            bias = estimates[:, i, j].mean() - performer.softmax_kernel(q[i], k[j])
            assert abs(bias) < 4 * deviation[i, j] < 0.2
            assert torch.allclose(estimates[0, i, j], performer.kernel(q[i], k[j], draws[0]), rtol=1e-12, atol=0)


def test_features_of_a_query_are_those_of_a_key_up_to_its_share_and_a_factor():
    q, _, _, w = tensors(5, e=8, f=20)
    none = key_features(torch.zeros_like(q[:, :, :1]), w)
    ratio = query_features(q, w) / (key_features(q, w) / none.square())
    assert torch.allclose(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-12, atol=0)
    assert torch.equal(query_features(q, w).amax(-1), torch.ones(q.shape[:3], dtype=torch.float64))


def test_error_of_the_kernel_falls_with_features():
    errors = [kernel_error(n) for n in (64, 256, 1024)]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.6 * errors[1]
    assert errors[2] < 0.1


def test_orthogonal_features_err_less():
    for n_features in (16, 64):
        assert kernel_error(n_features, draws=300) < 0.97 * kernel_error(n_features, orthogonal=False, draws=300)


def test_error_against_softmax_attention_falls_with_features():
    q, k, v, _ = tensors(96, e=16)
    q, k = q / 2, k / 2
    visible = torch.ones(96, 96).tril().bool()
    truth = attend_plain(q, k, v, visible=VisibleKeys(visible), scale=0.25)

    def error(n_features):
        draws = [attention(q, k, v, draw_features(n_features, 16, drawn(i)).double())[0] - truth for i in range(8)]
        return torch.stack(draws).square().mean().sqrt()

    errors = [error(n) for n in (16, 64, 256, 1024)]
    assert all(more < 0.8 * fewer for fewer, more in itertools.pairwise(errors))
    assert errors[-1] < 0.1 * truth.square().mean().sqrt()


@pytest.mark.parametrize("before", [0, 3])
def test_attention_equals_the_paper_with_gradients(before):
    q, k, v, w = tensors(before + 6, e=4, f=6)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sums = nothing(w, 4) if not before else attention(q[:, :, :before], k[:, :, :before], v[:, :, :before], w)[1:]
    out, s, z = attention(q[:, :, before:], k[:, :, before:], v[:, :, before:], w, sums)
    expected = torch.stack([
        performer.attention(q[b, h, before:], k[b, h], v[b, h], w) for b in range(ROWS) for h in range(HEADS)
    ]).view_as(out)  # fmt: skip
    assert torch.allclose(out, expected, rtol=0, atol=1e-10)
    assert s.shape == (ROWS, HEADS, 6, 4)
    assert z.shape == (ROWS, HEADS, 6)
    probe = torch.randn(out.shape, generator=drawn(3), dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((out * probe).sum(), (q, k, v)),
        torch.autograd.grad((expected * probe).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("t", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_equal_one_token_at_a_time_with_gradients(t):
    """Also gradients of what the sums held before, and of the sums afterwards."""
    q, k, v, w = tensors(t)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    unit = math.exp(LIMIT / 2)
    s = (unit * torch.randn(ROWS, HEADS, 6, 4, generator=drawn(8), dtype=torch.float64)).requires_grad_()
    z = (unit * torch.rand(ROWS, HEADS, 6, generator=drawn(9), dtype=torch.float64)).requires_grad_()
    fast, slow = (attention(q, k, v, w, (s, z), kernel=kernel) for kernel in (attend_linear, performer.attend_linear))
    probe = torch.randn(fast[0].shape, generator=drawn(3), dtype=torch.float64)
    scale = slow[2].detach().mean()
    for a, b, unit in zip(fast, slow, (1.0, scale, scale), strict=True):
        assert torch.allclose(a / unit, b / unit, rtol=0, atol=1e-10)
    totals = [(y * probe).sum() + (s_ / scale).sum() + (z_ / scale).sin().sum() for y, s_, z_ in (fast, slow)]
    inputs = (q, k, v, s, z)
    for a, b in zip(*(torch.autograd.grad(total, inputs) for total in totals), strict=True):
        assert torch.allclose(a / b.abs().max(), b / b.abs().max(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "sizes", [[1] * 150, [7] * 21 + [3], [64, 64, 22], [65, 1, 84], [149, 1], [1, 149], [10, 128, 12]]
)
def test_any_cut_gives_the_same(sizes):
    q, k, v, w = tensors(150, e=8, f=20)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    whole, cut = attention(q, k, v, w), in_pieces(q, k, v, w, sizes)
    scale = whole[2].detach().mean()
    for a, b, unit in zip(whole, cut, (1.0, scale, scale), strict=True):
        assert torch.allclose(a / unit, b / unit, rtol=0, atol=1e-10)
    probe = torch.randn(whole[0].shape, generator=drawn(3), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((x[0] * probe).sum(), (q, k, v)) for x in (whole, cut)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [5, CHUNK, 2 * CHUNK + 9])
def test_a_later_token_changes_no_bit_of_an_earlier_output(dtype, t):
    q, k, v, w = tensors(t, e=16, f=40, dtype=dtype)
    out = attention(q, k, v, w)[0]
    for changed in {1, t // 2, CHUNK - 1, CHUNK, CHUNK + 5, t - 1} & set(range(t)):
        q_, k_, v_ = (x.clone() for x in (q, k, v))
        for x, scale in ((q_, 3.0), (k_, -9.0), (v_, 1e6)):
            x[:, :, changed] *= scale
        after = attention(q_, k_, v_, w)[0]
        assert torch.equal(out[:, :, :changed], after[:, :, :changed])
        assert not torch.equal(out[:, :, changed], after[:, :, changed])


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_ordinary_keys_neither_underflow_nor_lose_precision_in_float32(head_dim):
    q, k, v, w = tensors(200, e=head_dim, f=256)
    features = key_features(k.float(), w.float())
    assert features.min() > torch.finfo(torch.float32).tiny
    exact = attention(q, k, v, w)[0]
    assert torch.allclose(attention(*(x.float() for x in (q, k, v, w)))[0].double(), exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("t", [1, 150])
def test_large_norms_stay_finite_with_gradients(head_dim, t):
    q, k, v, w = tensors(t, e=head_dim, f=128, dtype=torch.float32)
    q, k = (30 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, s, z = attention(q, k, v, w)
    out.square().sum().backward()
    assert all(torch.isfinite(x).all() for x in (out, s, z, q.grad, k.grad, v.grad))
    assert (z > 0).all()
    assert (out[:, :, 0] - v[:, :, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("head_dim", [16, 256])
def test_a_thousand_million_tokens_at_the_bound_do_not_overflow(head_dim):
    """Keys that equal a row of the matrix are the worst there are."""
    q, _, v, w = tensors(CHUNK, e=head_dim, f=CHUNK, dtype=torch.float32)
    k = (w * head_dim**0.25).expand_as(q)
    features = key_features(k, w)
    assert 0.9 < features.amax() / math.exp(LIMIT) <= 1.00001
    most = torch.full((ROWS, HEADS, CHUNK), 1e9 * math.exp(LIMIT))
    v = 100 * v
    out, s, z = attend_linear(query_features(q, w), features, v, most.unsqueeze(-1) * v[:, :, :1], most)
    assert all(torch.isfinite(x).all() for x in (out, s, z))


def test_denominators_are_never_zero():
    q, _, v, w = tensors(3)
    out, _, _ = attend_linear(query_features(q, w), torch.zeros(ROWS, HEADS, 3, len(w)).double(), v, *nothing(w, 4))
    assert torch.equal(out, torch.zeros_like(v))


def test_rows_do_not_depend_on_each_other():
    q, k, v, w = tensors(CHUNK + 6)
    together = attention(q, k, v, w)
    for row in range(ROWS):
        sums = tuple(x[row : row + 1] for x in nothing(w, 4))
        alone = attention(*(x[row : row + 1] for x in (q, k, v)), w, sums)
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[row : row + 1], b, rtol=1e-12, atol=0)


def test_features_are_float32_at_least():
    q, k, _, w = tensors(3, e=8, f=20)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        for features in (query_features, key_features):
            assert features(q.to(dtype), w.to(dtype)).dtype == wide
    exact = key_features(k.bfloat16().double(), w)
    assert torch.allclose(key_features(k.bfloat16(), w).double(), exact, rtol=1e-4, atol=0)
