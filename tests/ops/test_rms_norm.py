import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from xlcli.ops.layers import RMSNorm

EPSILON = 1e-3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def rms_norm(x, weight):
    return functional_call(RMSNorm(len(weight), eps=EPSILON), {"weight": weight}, (x,))


def plain(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPSILON)


def with_gradients(function, x, weight, grad):
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 5, 16), (2, 300, 41), (0, 4)])
def test_equals_the_plain_function_and_its_gradients(shape, dtype):
    generator = torch.Generator().manual_seed(len(shape))
    x, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator, dtype=dtype)
    found, want = (with_gradients(function, 3 * x, weight, grad) for function in (rms_norm, plain))
    assert torch.equal(found[0], want[0])
    for one, other in zip(found[1:], want[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_small_inputs_are_not_amplified_without_limit():
    x, weight = torch.zeros(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    _, d_x, d_weight = with_gradients(rms_norm, x, weight, torch.ones(2, 8, dtype=torch.float64))
    torch.testing.assert_close(d_x, torch.full_like(d_x, EPSILON**-0.5))
    assert not d_weight.any()
