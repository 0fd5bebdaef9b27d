"""The position-wise branch: its formulas, its widths, and its computation in chunks of time."""

import math

import peak_memory
import pytest
import torch

from xlcli import config
from xlcli.model.build import build_model
from xlcli.model.stack import FeedForward

KINDS = ("relu", "gelu", "gelu-tanh", "swiglu", "geglu", "geglu-tanh")
every = pytest.mark.parametrize("kind", KINDS)


def make(kind, *, bias=True, dropout=0.0, chunk_len=None):
    """The same weights at each call, large enough that mistakes show."""
    made = FeedForward(kind=kind, dim=6, ffn_dim=10, bias=bias, dropout=dropout, chunk_len=chunk_len).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def inputs(t=15):
    return torch.randn(2, t, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def gelu(z):
    """z times the normal distribution's function (Hendrycks and Gimpel 2016)."""
    return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))


def gelu_tanh(z):
    """Its approximation (section 2)."""
    return z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


ACTIVATIONS = {
    "relu": lambda z: max(0.0, z),
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "swiglu": lambda z: z / (1 + math.exp(-z)),
    "geglu": gelu,
    "geglu-tanh": gelu_tanh,
}


@every
@pytest.mark.parametrize("bias", [False, True])
def test_formula(kind, bias):
    """Vaswani et al. 2017, equation 2; Shazeer 2020, equations 5 and 6; one number at a time."""
    made = make(kind, bias=bias)
    x = inputs(3)

    def linear(layer, vector):
        return [
            sum(w * v for w, v in zip(row.tolist(), vector, strict=True)) + (layer.bias[i].item() if bias else 0.0)
            for i, row in enumerate(layer.weight)
        ]

    for row, got in zip(x.flatten(0, 1), made(x).flatten(0, 1), strict=True):
        up = linear(made.up, row.tolist())
        if kind in ("relu", "gelu", "gelu-tanh"):
            inner = [ACTIVATIONS[kind](u) for u in up]
        else:
            inner = [ACTIVATIONS[kind](g) * u for g, u in zip(linear(made.gate, row.tolist()), up, strict=True)]
        assert got.tolist() == pytest.approx(linear(made.down, inner), rel=0, abs=1e-12)


@pytest.mark.parametrize("dim", [24, 100, 128, 384, 512, 1000])
@pytest.mark.parametrize(("gated", "plain"), [("swiglu", "relu"), ("geglu", "gelu"), ("geglu-tanh", "gelu")])
def test_gated_branches_are_as_large_as_others(dim, gated, plain):
    """2/3 of the width for three matrices instead of two (Shazeer 2020, section 3.1), rounded up to 64."""

    def count(kind):
        tree = {"dim": dim, "n_layers": 1, "attention": {"n_heads": 2}, "feedforward": {"kind": kind}}
        with torch.device("meta"):
            model = build_model(config.make({"model": tree}).model)
        return sum(p.numel() for p in model.stack.blocks[0].feedforward.parameters())

    assert count(plain) == 8 * dim * dim
    assert count(gated) % (3 * 64 * dim) == 0
    assert 0 <= count(gated) - count(plain) < 3 * 64 * dim


@every
@pytest.mark.parametrize("chunk", [1, 2, 7, 15, 99])
def test_chunks_change_no_number(kind, chunk, monkeypatch):
    """Values and gradients; and each chunk is computed once more backwards instead of being kept."""
    results = []
    for made in (make(kind), make(kind, chunk_len=chunk)):
        seen, branch = [], made._branch
        monkeypatch.setattr(made, "_branch", lambda x, branch=branch, seen=seen: seen.append(x.shape[1]) or branch(x))
        x = inputs()
        y = made(x)
        (y * torch.linspace(0.1, 2.0, 6, dtype=torch.float64)).sum().backward()
        results.append([y, x.grad, *(p.grad for p in made.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    sizes = [min(chunk, 15 - i) for i in range(0, 15, chunk)]
    assert seen[: len(sizes)] == sizes
    assert sorted(seen[len(sizes) :]) == sorted(sizes)
    seen.clear()
    with torch.inference_mode():
        assert torch.allclose(made(x), results[0][0], rtol=0, atol=1e-12)
    assert seen == sizes


@every
@pytest.mark.parametrize("chunk", [1, 4, 15, 99])
def test_dropout_is_replayed(kind, chunk):
    """Gradients are those of the masks that were drawn: as without chunks, for the same pieces with the same seed."""
    stored, cut = make(kind, dropout=0.4), make(kind, dropout=0.4, chunk_len=chunk)
    results = []
    for run in (lambda x: torch.cat([stored(part) for part in x.split(chunk, dim=1)], dim=1), cut):
        torch.manual_seed(7)
        x = inputs()
        y = run(x)
        torch.manual_seed(99)  # what happens between the two passes must not matter
        y.square().sum().backward()
        results.append([y, x.grad])
    results[0] += [p.grad for p in stored.parameters()]
    results[1] += [p.grad for p in cut.parameters()]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert not torch.allclose(results[0][0], make(kind)(inputs()))


def test_the_configuration_reaches_every_branch():
    tree = {"dim": 8, "attention": {"n_heads": 2}, "feedforward": {"chunk_len": 3}}
    model = build_model(config.make({"model": tree}).model)
    assert {block.feedforward.chunk_len for block in model.stack.blocks} == {3}


def test_chunks_take_less_memory():
    """2 x 4096 tokens, 1,024 inner features, forward and backward."""
    whole, cut = (peak_memory.measure(peak_memory.feedforward(chunk))["allocated"] for chunk in (None, 256))
    assert whole > 5 * cut
