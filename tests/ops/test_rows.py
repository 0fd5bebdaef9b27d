"""Functions of some positions of a call."""

import pytest
import torch

from xlcli.ops.context import GROUP, Rows


@pytest.mark.parametrize("n", [1, 7, 3 * GROUP])
def test_selected_positions_are_those_of_the_whole_call(n):
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3).double()
    x = torch.randn(2, n, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, n, 3, dtype=torch.float64)
    needed = torch.rand(2, n) < 0.6
    needed[0, 0] = True
    out = Rows(needed).apply(lambda x, y: layer(x) * y, x, y)
    expected = torch.where(needed[..., None], layer(x) * y, 0.0)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    (gradient,), (oracle,) = (torch.autograd.grad(z.sin().sum(), x, retain_graph=True) for z in (out, expected))
    torch.testing.assert_close(gradient, oracle, atol=1e-12, rtol=0)


def test_a_position_depends_on_no_later_one_to_the_bit():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    x = torch.randn(1, 300, 64)
    many, few = torch.rand(1, 300) < 0.9, torch.rand(1, 300) < 0.1
    same = torch.arange(300) < 100
    few = torch.where(same, many, few)
    first, second = (Rows(needed).apply(layer, x)[:, :100] for needed in (many, few))
    assert torch.equal(first, second)
