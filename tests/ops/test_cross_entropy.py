import pytest
import torch
from torch.nn import functional as F

from xlcli.model.head import Readout, SoftmaxHead, cross_entropy

SHAPES = [(1, 2), (7, 11), (300, 1000), (3, 200_000), (0, 5)]
"""Numbers of rows and logits: one chunk, several chunks with a partial one, rows longer than a chunk, none."""


def inputs(n, v, dtype):
    generator = torch.Generator().manual_seed(n + v)
    logits = torch.randn(n, v, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    return logits, torch.randint(0, v, (n,), generator=generator), torch.randn(n, generator=generator)


def plain(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def with_gradient(function, logits, targets, weight):
    leaf = logits.clone().requires_grad_()
    nll = function(leaf, targets)
    (nll * weight.to(nll.dtype)).sum().backward()
    return nll.detach(), leaf.grad


@pytest.mark.parametrize(("n", "v"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_plain_function_and_its_gradient(n, v, dtype):
    logits, targets, weight = inputs(n, v, dtype)
    nll, grad = with_gradient(cross_entropy, logits, targets, weight)
    want_nll, want_grad = with_gradient(plain, logits, targets, weight)
    assert nll.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(nll, want_nll, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad, want_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("v", [256, 49_152, 200_000])
def test_evaluation_of_a_large_vocabulary_is_that_of_float64(v):
    generator = torch.Generator().manual_seed(v)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (40, v))
    head = SoftmaxHead(weight=weight, bias=False)
    targets = torch.randint(0, v, (1, 40), generator=generator)
    with torch.inference_mode():
        nll = head.nll(x[None], targets)
        surprisal, features = head.read_out(x[None], targets, Readout())
        log_p = features.gather(-1, targets[..., None])[..., 0]
        logits = head.logits(x)
    want = plain(logits.double(), targets[0])[None]
    assert nll.dtype == log_p.dtype == torch.float32
    for found in (nll, surprisal, -log_p):
        assert (found - want).abs().max() <= torch.finfo(torch.float32).eps / 2 * want.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_normalized_in_float32(dtype):
    logits, targets, weight = inputs(300, 1000, dtype)
    nll, grad = with_gradient(cross_entropy, logits, targets, weight)
    want_nll, want_grad = with_gradient(plain, logits.float(), targets, weight)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, want_nll, rtol=1e-6, atol=1e-6)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, want_grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_a_row_does_not_depend_on_its_chunk():
    logits, targets, _ = inputs(300, 1000, torch.float32)
    assert torch.equal(cross_entropy(logits, targets)[290:], cross_entropy(logits[290:], targets[290:]))


def test_extreme_logits_give_finite_values():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    nll = cross_entropy(logits, torch.tensor([1]))
    nll.sum().backward()
    assert nll.item() == pytest.approx(2e4)
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]
