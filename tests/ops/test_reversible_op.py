"""Reversible coupling of plain functions: the equations, their gradients, and all that must come back with them."""

import weakref

import pytest
import torch
from oracles import reversible
from torch.nn import functional as F

from xlcli.model.reversible import Layer, reversible_forward

WAYS = pytest.mark.parametrize("way", [reversible_forward, reversible.forward])


class Coupling:
    """Two branches with dropout; `shared` is used by both. It counts calls and writes down what F was given."""

    def __init__(self, seed, *, shared=None, dtype=torch.float64, dropout=0.3, width=6):
        generator = torch.Generator().manual_seed(seed)
        self.f_weight, self.g_weight, new = (
            torch.randn(width, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for _ in range(3)
        )
        self.shared = new if shared is None else shared
        self.dropout, self.given = dropout, []

    def f(self, x):
        self.given.append(x.detach())
        y = F.dropout(torch.tanh(x @ self.f_weight @ self.shared), self.dropout)
        return y, len(self.given)

    def g(self, x):
        return F.dropout(torch.sin(F.linear(x, self.g_weight)), self.dropout) @ self.shared

    @property
    def layer(self):
        return Layer(self.f, self.g, [self.f_weight, self.shared], [self.g_weight, self.shared])

    @property
    def parameters(self):
        return [self.f_weight, self.g_weight, self.shared]


def deep(n, **more):
    first = Coupling(0, **more)
    return [first, *(Coupling(i, shared=first.shared, **more) for i in range(1, n))]


def streams(seed=7, dtype=torch.float64, shape=(2, 5, 6)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]


def run(way, couplings, x1, x2, seed=3):
    torch.manual_seed(seed)
    return way(x1, x2, [coupling.layer for coupling in couplings])


def everything(couplings):
    return [
        parameter for coupling in couplings for parameter in coupling.parameters[: 3 if coupling is couplings[0] else 2]
    ]


@WAYS
def test_equations(way):
    """y1 = x1 + F(x2), y2 = x2 + G(y1), layer after layer."""
    couplings = deep(3, dropout=0.0)
    x1, x2 = streams()
    y1, y2, further = run(way, couplings, x1, x2)
    with torch.no_grad():
        for c in couplings:
            x1 = x1 + torch.tanh(x2 @ c.f_weight @ c.shared)
            x2 = x2 + torch.sin(x1 @ c.g_weight.T) @ c.shared
    assert torch.allclose(y1, x1, rtol=0, atol=1e-13)
    assert torch.allclose(y2, x2, rtol=0, atol=1e-13)
    assert further == [1, 1, 1]


def test_gradients_by_finite_differences():
    couplings = deep(2, dropout=0.0, width=3)
    x1, x2 = streams(shape=(1, 2, 3))
    assert torch.autograd.gradcheck(
        lambda *_: run(reversible_forward, couplings, x1, x2)[:2], (x1, x2, *everything(couplings))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_of_stored_activations(dtype):
    """Twelve layers with dropout; one parameter is shared by all branches."""
    found = []
    for way in (reversible_forward, reversible.forward):
        couplings = deep(12, dtype=dtype)
        x1, x2 = streams(dtype=dtype)
        y1, y2, _ = run(way, couplings, x1, x2)
        assert y1.dtype == dtype
        loss = (y1.sin() * 2).sum() + y2.square().sum()
        found.append([y1, y2, *torch.autograd.grad(loss, (x1, x2, *everything(couplings)))])
    within = 1e-10 if dtype == torch.float64 else 1e-5
    for rebuilt, kept in zip(*found, strict=True):
        assert (rebuilt - kept).abs().max() <= within * kept.abs().max()


@pytest.mark.parametrize("autocast", [False, True])
def test_branches_are_given_the_same_again_to_the_bit(autocast):
    """Thirty layers deep, in float32 and with products in bfloat16, though streams are read back from the last ones."""
    couplings = deep(30, dtype=torch.float32)
    x1, x2 = streams(dtype=torch.float32, shape=(2, 50, 6))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y1, y2, _ = run(reversible_forward, couplings, x1, x2)
    assert y1.dtype == y2.dtype == torch.float32
    (y1 * y2).sum().backward()
    for coupling in couplings:
        first, again = coupling.given
        assert first.dtype == torch.float32
        assert torch.equal(first, again)


def test_gradients_under_autocast_equal_those_of_stored_activations():
    found = []
    for way in (reversible_forward, reversible.forward):
        couplings = deep(12, dtype=torch.float32)
        x1, x2 = streams(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=way is reversible_forward):
            y1, y2, _ = run(way, couplings, x1, x2)
        (y1 * y2).sum().backward()
        found.append([x1.grad, x2.grad, *(parameter.grad for c in couplings for parameter in c.parameters[:2])])
    for rebuilt, kept in zip(*found, strict=True):
        assert torch.equal(rebuilt, kept)


def test_autocast_is_not_told_of_weights_without_gradients():
    """A weight that a reversible layer has used may be used outside it under the same autocast."""
    coupling = Coupling(0, dtype=torch.float32)
    x1, x2 = streams(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run(reversible_forward, [coupling], x1, x2)
        (x1 @ coupling.f_weight).sum().backward()
    assert coupling.f_weight.grad.abs().sum() > 0


def test_two_forwards_before_one_backward_and_backward_in_any_order():
    couplings = deep(3)
    alone = []
    for seed in (1, 2):
        y1, y2, _ = run(reversible_forward, couplings, *streams(seed), seed=seed)
        alone.append(torch.autograd.grad((y1 * y2).sum(), everything(couplings)))
    calls = [run(reversible_forward, couplings, *streams(seed), seed=seed) for seed in (1, 2)]
    for i in (1, 0):
        again = torch.autograd.grad((calls[i][0] * calls[i][1]).sum(), everything(couplings))
        assert all(map(torch.equal, alone[i], again))


def test_backward_twice_when_the_graph_is_retained():
    couplings = deep(3)
    y1, y2, _ = run(reversible_forward, couplings, *streams())
    loss = (y1 * y2).sum()
    once, twice = (torch.autograd.grad(loss, everything(couplings), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, twice))


def test_random_numbers_go_on_as_if_nothing_was_replayed():
    couplings = deep(3)
    drawn = []
    for backward in (True, False):
        y1, y2, _ = run(reversible_forward, couplings, *streams())
        after_forward = torch.get_rng_state()
        if backward:
            (y1 + y2).sum().backward()
        assert torch.equal(torch.get_rng_state(), after_forward)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_gradients_add_up_over_backwards():
    couplings = deep(2)
    for _ in range(2):
        y1, y2, _ = run(reversible_forward, couplings, *streams())
        (y1 + y2).sum().backward()
    y1, y2, _ = run(reversible_forward, couplings, *streams())
    once = torch.autograd.grad((y1 + y2).sum(), everything(couplings))
    assert all(torch.allclose(p.grad, 2 * g, rtol=1e-12) for p, g in zip(everything(couplings), once, strict=True))


def test_frozen_and_unused_parameters_get_nothing():
    coupling, unused = Coupling(0), torch.zeros(3, requires_grad=True)
    coupling.f_weight.requires_grad_(False)
    layer = coupling.layer._replace(g_parameters=[*coupling.layer.g_parameters, unused])
    y1, y2, _ = reversible_forward(*(x.detach() for x in streams()), [layer])
    (y1 + y2).sum().backward()
    assert coupling.f_weight.grad is None
    assert unused.grad is None
    assert coupling.g_weight.grad.abs().sum() > 0


def test_one_output_may_be_left_unused():
    found = []
    for way in (reversible_forward, reversible.forward):
        couplings = deep(2)
        y1, _, _ = run(way, couplings, *streams())
        y1.sum().backward()
        found.append([couplings[0].g_weight.grad, couplings[1].f_weight.grad, couplings[0].shared.grad])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found, strict=True))


def test_parameters_changed_in_between_are_refused():
    coupling = Coupling(0)
    y1, _, _ = run(reversible_forward, [coupling], *streams())
    with torch.no_grad():
        coupling.f_weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y1.sum().backward()


def test_what_is_kept_does_not_grow_with_depth():
    """Numbers that autograd keeps until the backward pass, parameters left out."""
    counts = []
    for way in (reversible_forward, reversible.forward):
        for n in (2, 12):
            couplings, saved = deep(n), []

            def keep(t, saved=saved):
                t = t.detach()
                saved.append(weakref.ref(t))
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                out = run(way, couplings, *streams(shape=(2, 50, 6)))
            alive = [t for t in (ref() for ref in saved) if t is not None]
            sizes = {t.data_ptr(): t.numel() for t in alive}
            counts.append(sum(sizes.values()) - sum(sizes.get(p.data_ptr(), 0) for p in everything(couplings)))
            del out
    rebuilt_2, rebuilt_12, kept_2, kept_12 = counts
    assert rebuilt_2 == rebuilt_12 == 2 * (2 * 50 * 6)
    assert kept_12 > 5 * kept_2 > 0
