import pytest
import torch

from xlcli.ops import layers as module
from xlcli.ops.layers import Share, dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_drops_at_the_rate_and_keeps_the_mean(rate, dtype):
    torch.manual_seed(0)
    x = torch.full((3, 1001, 37), 2.0, dtype=dtype, requires_grad=True)
    y = dropout(x, rate)
    kept = y != 0
    assert abs(kept.double().mean().item() - (1 - rate)) < 0.005
    assert torch.allclose(y[kept].double(), torch.tensor(2 / (1 - rate), dtype=torch.float64), rtol=2**-8)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(x, 3.0))
    assert torch.equal(gradient != 0, kept)
    assert torch.allclose(gradient[kept].double(), torch.tensor(3 / (1 - rate), dtype=torch.float64), rtol=2**-8)


def test_elements_are_dropped_independently():
    """Neighbors share a random word: every pattern of eight elements has the probability of independent ones."""
    torch.manual_seed(0)
    kept = (dropout(torch.ones(2**20), 0.5) != 0).view(-1, 8).long()
    counts = torch.bincount((kept * 2 ** torch.arange(8)).sum(1), minlength=256).double()
    expected = len(kept) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 330  # chi-squared with 255 degrees of freedom, p = 0.001


def test_the_generator_decides():
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks.append(dropout(torch.ones(7, 5), 0.3))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("parts", [2, 4, 5])
@pytest.mark.parametrize("shape", [(20, 8), (20, 3), (20,)])
def test_a_part_of_the_rows_has_its_part_of_the_mask(shape, parts, monkeypatch):
    monkeypatch.setattr(module, "DISCARDED", 3)
    x = torch.rand(shape) + 1
    torch.manual_seed(0)
    whole, following = dropout(x, 0.5), torch.rand(3)
    assert 0 < whole.count_nonzero() < whole.numel()
    for part, rows in enumerate(x.chunk(parts)):
        torch.manual_seed(0)
        assert torch.equal(dropout(rows, 0.5, Share(part, parts)), whole.chunk(parts)[part])
        assert torch.equal(torch.rand(3), following)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)])
@pytest.mark.parametrize(("rate", "factor"), [(0.0, 1.0), (1e-9, 1.0), (1.0, 0.0)])
def test_rates_without_chance(shape, rate, factor):
    x = torch.rand(shape) + 1
    assert torch.equal(dropout(x, rate), factor * x)
