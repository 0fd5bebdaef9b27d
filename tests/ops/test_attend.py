import pytest
import torch

from xlcli.ops.attend import attend, attend_fused, attend_one, attend_plain

torch.manual_seed(0)


def tensors(t, m, e=8, w=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(t * 100 + m)
    return tuple(
        torch.randn(2, 3, n, width, generator=generator, dtype=dtype).requires_grad_()
        for n, width in ((t, e), (t + m, e), (t + m, w))
    )


def by_definition(q, k, v, visible, scale, bias=None):
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if visible is None or visible[i, j]]
                scores = torch.stack([
                    (q[b, h, i] @ k[b, h, j]) * scale + (0 if bias is None else bias[b, h, i, j]) for j in keys
                ])  # fmt: skip
                out[b, h, i] = sum(p * v[b, h, j] for p, j in zip(scores.softmax(0), keys, strict=True))
    return out


@pytest.mark.parametrize("kernel", [attend, attend_plain, attend_fused])
@pytest.mark.parametrize(("e", "w"), [(8, 8), (12, 8), (4, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_kernels_equal_the_definition_with_gradients(kernel, e, w, with_bias):
    t, m = 5, 4
    q, k, v = tensors(t, m, e, w)
    distance = torch.arange(t)[:, None] + m - torch.arange(t + m)
    visible = (distance >= 0) & (distance <= 6)
    bias = torch.randn(2, 3, t, t + m, dtype=torch.float64) if with_bias else None
    expected = by_definition(q, k, v, visible, 0.3, bias)
    out = kernel(q, k, v, visible=visible, scale=0.3, bias=bias)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        torch.autograd.grad((out * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_one_token_with_a_shared_second_term_equals_joined_keys():
    q, k, v = tensors(1, 9)
    query, key = torch.randn(2, 3, 1, 6, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64)
    joined = attend_plain(
        torch.cat((q, query), -1),
        torch.cat((k, key.expand(2, 3, -1, -1)), -1),
        v,
        visible=None,
        scale=0.3,
    )
    assert torch.allclose(attend_one(q, k, v, term=(query, key), scale=0.3), joined, rtol=0, atol=1e-12)


def test_dropout_keeps_the_mean_and_drops_weights():
    q, k, v = tensors(64, 64, dtype=torch.float32)
    with torch.no_grad():
        kept = attend_plain(q, k, v, visible=None, scale=0.3)
        dropped = torch.stack([attend_plain(q, k, v, visible=None, scale=0.3, dropout=0.5) for _ in range(200)])
    assert not torch.allclose(dropped[0], kept)
    assert (dropped.mean(0) - kept).abs().max() < 0.15
