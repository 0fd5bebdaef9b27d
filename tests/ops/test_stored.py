"""Stored matrices: every operation gives what the float32 matrix with the same values gives."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from xlcli.ops import stored as stored_module
from xlcli.ops.layers import Linear, dequantize, quantize
from xlcli.ops.stored import StoredMatrix, is_finite, widened

TYPES = ["int8", "bfloat16", "float16"]


def matrix(kind, n=64, width=32):
    """A stored matrix, and the float32 one with its values."""
    values = torch.randn(n, width, generator=torch.Generator().manual_seed(1))
    if kind == "int8":
        rows, scale = quantize(values)
        return StoredMatrix(rows, scale), dequantize(rows, scale)
    rows = values.to(getattr(torch, kind))
    return StoredMatrix(rows), rows.float()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_operations_are_those_of_the_float32_matrix(kind, mode):
    stored, wide = matrix(kind)
    parameter = nn.Parameter(stored, requires_grad=False)
    ids = torch.tensor([[3, 1], [0, 63]])
    with mode():
        x = torch.randn(2, 5, 32)
        for operation in (
            lambda w: F.linear(x, w),
            lambda w: F.embedding(ids, w),
            lambda w: x @ w.T,
            lambda w: x @ w.mT,
            lambda w: w.view(4, -1, 32),
            lambda w: torch.cat([w, w[3:5]]),
            lambda w: w.isfinite().all(),
            lambda w: w.to(torch.float64),
        ):
            assert torch.equal(operation(parameter), operation(wide))
    assert type(parameter) is StoredMatrix
    assert (parameter.shape, parameter.dtype) == (wide.shape, torch.float32)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 200)])
def test_a_product_in_tiles_is_that_of_the_float32_matrix(kind, bias, monkeypatch):
    stored, wide = matrix(kind, n=200)
    monkeypatch.setattr(stored_module, "TILE", 1)  # tiles of the fewest rows, and a shorter one at the end
    for shape in ((32,), (1, 1, 32), (2, 7, 32), (0, 32)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        product = F.linear(x, stored, bias)
        assert product.shape == (*shape[:-1], 200)
        torch.testing.assert_close(product, F.linear(x, wide, bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_that_are_none_are_found(kind, monkeypatch):
    monkeypatch.setattr(stored_module, "TILE", 100)  # several, and a shorter one at the end
    stored, _ = matrix(kind)
    assert is_finite(stored)
    if kind == "int8":
        stored.scale[5] = 3e38  # it is finite, but not its product with the largest number of its row
        assert not is_finite(stored)
        return
    limits = torch.finfo(stored.rows.dtype)
    stored.rows[-1, -2:] = torch.tensor([limits.min, limits.max])
    assert is_finite(stored)
    for number in (math.nan, math.inf, -math.inf):
        rows = stored.rows.clone()
        rows[5, 3] = number
        assert not is_finite(StoredMatrix(rows))


@pytest.mark.parametrize("kind", TYPES)
def test_gradients_of_inputs_are_those_of_the_float32_matrix(kind):
    found = []
    for weight in matrix(kind):
        x = torch.ones(3, 32, requires_grad=True)
        F.linear(x, weight).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", TYPES)
def test_modules_are_filled_saved_and_copied(kind):
    stored, wide = matrix(kind)
    with torch.device("meta"):
        module = Linear(32, 64, bias=False)
    module.load_state_dict({"weight": nn.Parameter(stored, requires_grad=False)}, assign=True)
    x = torch.randn(7, 32)
    for each in (module, copy.deepcopy(module)):
        assert type(each.weight) is StoredMatrix
        assert torch.equal(each(x), F.linear(x, wide))
        assert torch.equal(each.state_dict()["weight"] + 0, wide)


@pytest.mark.parametrize("kind", TYPES)
def test_it_cannot_be_changed(kind):
    stored, wide = matrix(kind)
    for change in (
        lambda: stored.copy_(wide),
        lambda: stored.mul_(2),
        lambda: stored.__setitem__((0, 0), 1.0),
        lambda: nn.init.zeros_(stored),
    ):
        with pytest.raises(TypeError, match="stored"):
            change()
    assert torch.equal(widened(stored), wide)
    target = torch.empty_like(wide).copy_(stored)
    assert torch.equal(target, wide)


@pytest.mark.parametrize("kind", TYPES)
def test_parts_of_a_joined_matrix_share_its_memory(kind):
    (first, wide), (second, more) = matrix(kind), matrix(kind, n=8)
    joined = StoredMatrix.cat([first, second])
    assert torch.equal(widened(joined), torch.cat([wide, more]))
    part = joined.part(64, 72)
    assert torch.equal(widened(part), more)
    assert part.rows.untyped_storage().data_ptr() == joined.rows.untyped_storage().data_ptr()
