"""Products of one row with a matrix."""

import pytest
import torch
from torch.nn import functional as F

from xlcli.ops.layers import SMALLEST, Linear


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [512, 513])
def test_one_row_equals_the_layer_of_pytorch(outputs, bias, dtype):
    layer = Linear(SMALLEST // 512, outputs, bias=bias, dtype=dtype)
    for shape in ((1, 1), (1,), (), (3, 2)):
        x = torch.randn(*shape, layer.in_features, dtype=dtype)
        with torch.inference_mode():
            expected = F.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
            with torch.autocast("cpu"):
                assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_in_another_type(bias):
    layer, x = Linear(200, 300, bias=bias), torch.randn(2, 70, 200, requires_grad=True)
    scale = torch.randn(2, 70, 300)
    inputs = [x, *layer.parameters()]
    exact = torch.autograd.grad((layer(x) * scale).sum(), inputs)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 2e-2)):
        layer.gradient_dtype = dtype
        out = layer(x)
        assert torch.equal(out, F.linear(x, layer.weight, layer.bias))  # the prediction is not rounded
        for gradient, expected in zip(torch.autograd.grad((out * scale).sum(), inputs), exact, strict=True):
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    assert not torch.equal(torch.autograd.grad(layer(x).sum(), layer.weight)[0], exact[1])
    with torch.autocast("cpu"):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert torch.autograd.grad(layer(x).float().sum(), layer.weight)[0].dtype == torch.float32
