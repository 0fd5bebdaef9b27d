"""Predictions: plain, factorized and adaptive heads, and losses computed in chunks of time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import adaptive_softmax as oracle
from torch import nn

from xlcli import config
from xlcli.model.build import build_model
from xlcli.model.head import AdaptiveHead, Readout, SoftmaxHead

V, D, CUTOFFS = 31, 12, (5, 7, 14)
KINDS = {
    "plain": {},
    "factorized": {"inner_dim": 3},
    "adaptive": {"cutoffs": CUTOFFS},
    "narrowing": {"cutoffs": CUTOFFS, "div_val": 2},
    "inner adaptive": {"cutoffs": CUTOFFS, "inner_dim": 5},
    "inner narrowing": {"cutoffs": CUTOFFS, "inner_dim": 9, "div_val": 2},
}
every = pytest.mark.parametrize("kind", KINDS)


def make(kind, *, tied=True, tied_projections="all", bias=True, loss_chunk=None, seed=0, dtype=torch.float64, **more):
    """A toy model whose weights are large enough that mistakes show."""
    tree = {
        "vocab_size": V, "dim": D, "n_layers": 1, "attention": {"n_heads": 2}, "bias": bias, "loss_chunk": loss_chunk,
        "embedding": {"tied": tied, "tied_projections": tied_projections, **KINDS[kind]},
    }  # fmt: skip
    model = build_model(config.make({"model": tree | more}).model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model.to(dtype)


def inputs(b=2, t=15, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(b, t, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randint(0, V, (b, t), generator=generator)


def clusters(head):
    return [head.first, *head.rest]


def oracle_log_probabilities(head, h):
    """Of all words after the hidden state h (d)."""
    parts = clusters(head)
    return oracle.log_probabilities(
        h,
        [p.weight for p in parts],
        [p.projection for p in parts],
        head.tails.weight,
        CUTOFFS,
        biases=None if parts[0].bias is None else [p.bias for p in parts],
        tail_bias=head.tails.bias,
    )


@pytest.mark.parametrize("kind", ["adaptive", "narrowing", "inner adaptive", "inner narrowing"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, "all", "rest", "none"])
def test_adaptive_softmax_equals_the_paper(kind, bias, tied):
    """Losses, in token order, log-probabilities and gradients, one word and one logit at a time."""
    head = make(kind, bias=bias, tied=bool(tied), tied_projections=tied or "all").head
    x, targets = inputs()
    expected = torch.stack([torch.stack([oracle_log_probabilities(head, h) for h in row]) for row in x])
    logits, nll = head.logits(x), head.nll(x, targets)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)
    assert torch.allclose(nll, -expected.gather(-1, targets[..., None])[..., 0], rtol=0, atol=1e-12)
    weights = torch.randn(nll.shape, dtype=torch.float64)
    parameters = [x, *head.parameters()]
    ours = torch.autograd.grad(nll, parameters, weights)
    theirs = torch.autograd.grad(-expected.gather(-1, targets[..., None])[..., 0], parameters, weights)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@every
def test_losses_are_minus_the_log_probability_of_the_target(kind):
    head = make(kind).head
    x, targets = inputs()
    p = head.logits(x).log_softmax(-1)
    assert torch.allclose(p.exp().sum(-1), torch.ones(2, 15, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(head.nll(x, targets), -p.gather(-1, targets[..., None])[..., 0], rtol=0, atol=1e-12)
    if "adapt" in kind or "narrow" in kind:
        assert torch.allclose(head.logits(x), p, rtol=0, atol=1e-12)


@every
def test_losses_are_in_the_order_of_the_tokens(kind):
    """Whatever order tokens come in, each keeps its loss."""
    head = make(kind).head
    x, targets = inputs(b=1)
    nll = head.nll(x, targets)
    assert nll.unique().numel() == nll.numel()
    for seed in range(5):
        order = torch.randperm(15, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(head.nll(x[:, order], targets[:, order]), nll[:, order], rtol=0, atol=1e-12)


def test_factorized_logits():
    model = make("factorized", bias=False)
    x, _ = inputs()
    by_hand = torch.einsum("btd,dw,vw->btv", x, model.embedding.up.weight, model.embedding.table.weight)
    assert torch.allclose(model.head.logits(x), by_hand, rtol=0, atol=1e-12)


@every
@pytest.mark.parametrize("targets", [[[0, 1]], [[30, 29]], [[5, 14]]])
def test_every_parameter_gets_a_gradient(kind, targets):
    """Also those of clusters that no target belongs to."""
    head = make(kind).head
    head.nll(inputs(1, 2)[0], torch.tensor(targets)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


SIZES = {
    "plain": (V * D, V, 0),
    "factorized": (V * 3 + 3 * D, V, 0),
    "adaptive": (V * D, V, 3 * D + 3),
    "narrowing": (5 * 12 + 2 * 6 + 7 * 3 + 17 * 1 + (12 + 6 + 3 + 1) * D, V, 3 * D + 3),
    "inner adaptive": (V * 5 + 4 * 5 * D, V, 3 * 5 + 3),
    "inner narrowing": (5 * 9 + 2 * 4 + 7 * 2 + 17 * 1 + (9 + 4 + 2 + 1) * D, V, 3 * 9 + 3),
}
"""Numbers in the shared matrices, in biases, in the tails' logits."""


@every
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_counts(kind, tied):
    shared, biases, tails = SIZES[kind]
    model = make(kind, tied=tied)
    rest = sum(p.numel() for p in model.stack.parameters())
    assert model.n_parameters - rest == shared * (1 if tied else 2) + biases + tails
    n_tails = len(CUTOFFS) if tails else 0
    assert sum(p.numel() for p in model.embedding.parameters()) == shared
    without = make(kind, tied=tied, bias=False)
    rest = sum(p.numel() for p in without.stack.parameters())
    assert without.n_parameters - rest == shared * (1 if tied else 2) + tails - n_tails


def matrices(model, part):
    """Tables and projections of the embedding or of the head, in one order."""
    if part == "embedding":
        tables = list(model.embedding.clusters) if hasattr(model.embedding, "clusters") else [model.embedding]
        return [p for t in tables for p in (t.table.weight, t.up and t.up.weight) if p is not None]
    heads = clusters(model.head) if isinstance(model.head, AdaptiveHead) else [model.head]
    return [p for h in heads for p in (h.weight, h.projection) if p is not None]


@pytest.mark.parametrize(("tied", "own"), [("all", 0), ("rest", 1), ("none", 4)])
@pytest.mark.parametrize("kind", ["inner adaptive", "narrowing", "factorized"])
def test_tied_projections(kind, tied, own):
    """Tables are shared; of the projections, as many as asked for are the head's own, the first ones."""
    model = make(kind, tied_projections=tied)
    pairs = list(zip(matrices(model, "embedding"), matrices(model, "head"), strict=True))
    assert all(a is b for a, b in pairs[::2])
    assert [a is not b for a, b in pairs[1::2]] == [i < own for i in range(len(pairs) // 2)]
    assert all(a.shape == b.shape for a, b in pairs)
    model.head.nll(inputs(1, 4)[0], torch.tensor([[0, 6, 8, 30]])).sum().backward()
    assert all(b.grad.abs().sum() > 0 for a, b in pairs if a is not b)


@every
def test_tied_gradients_are_the_sum_of_both_uses(kind):
    tied, twin = make(kind), make(kind, tied=False)
    assert [id(p) for p in matrices(tied, "embedding")] == [id(p) for p in matrices(tied, "head")]
    own = dict(tied.named_parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in own:
                parameter.copy_(own[name])
        for a, b in zip(matrices(twin, "head"), matrices(tied, "head"), strict=True):
            a.copy_(b)
    text = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(seed)) for seed in range(2)])
    for model in (tied, twin):
        state = model.init_state(2, mem_len=4, segment_len=8, memory="hidden")
        model.score(text[:, :-1], text[:, 1:], state)[0].sum().backward()
    for both, first, last in zip(
        matrices(tied, "embedding"), matrices(twin, "embedding"), matrices(twin, "head"), strict=True
    ):
        assert first.grad.abs().sum() > 0
        assert last.grad.abs().sum() > 0
        assert torch.allclose(both.grad, first.grad + last.grad, rtol=0, atol=1e-11)


def watch(head, monkeypatch):
    """The list of how many tokens are scored at a time, filled as it happens."""
    seen, inner = [], head.losses

    def losses(x, targets):
        seen.append(x.shape[1])
        return inner(x, targets)

    monkeypatch.setattr(head, "losses", losses)
    return seen


@every
@pytest.mark.parametrize(("chunk", "sizes"), [(1, [1] * 15), (2, [2] * 7 + [1]), (7, [7, 7, 1]), (15, [15])])
def test_chunks_change_no_number(kind, chunk, sizes, monkeypatch):
    whole, cut = make(kind).head, make(kind, loss_chunk=chunk).head
    seen = watch(cut, monkeypatch)
    results = []
    for head in (whole, cut):
        x, targets = inputs()
        nll = head.nll(x, targets)
        (nll * torch.linspace(0.1, 2.0, 15, dtype=torch.float64)).sum().backward()
        results.append([nll, x.grad, *(p.grad for p in head.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    backwards = [] if len(sizes) == 1 else sizes[::-1]
    assert seen == sizes + backwards
    for quiet in (torch.no_grad, torch.inference_mode):
        seen.clear()
        with quiet():
            assert torch.allclose(cut.nll(x, targets), results[0][0], rtol=0, atol=1e-12)
        assert seen == sizes


@pytest.mark.parametrize("kind", ["plain", "narrowing"])
def test_chunks_in_bfloat16(kind):
    """Weights' gradients are added up in float32 however small the chunks are."""
    exact = make(kind).head
    x, targets = inputs(t=300)
    exact.nll(x, targets).sum().backward()
    errors = []
    for chunk in (None, 1):
        head = make(kind, loss_chunk=chunk, dtype=torch.float32).head
        x, targets = inputs(t=300, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            nll = head.nll(x, targets)
        assert nll.dtype == torch.float32
        nll.sum().backward()
        pairs = zip(head.parameters(), exact.parameters(), strict=True)
        errors.append([float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs])
    assert all(cut < 1.2 * whole + 1e-3 for whole, cut in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("b", "n_words", "sizes"), [(1, 70_000, [120, 80]), (3, 70_000, [40] * 5), (1, 30_000, [200])])
def test_large_logits_are_cut_without_being_asked(b, n_words, sizes, monkeypatch):
    """Beyond 2^23 numbers, so many tokens a row that a chunk has about as many."""
    head = SoftmaxHead(weight=nn.Parameter(torch.randn(n_words, 2)), bias=False)
    x, targets = torch.randn(b, 200, 2), torch.randint(0, n_words, (b, 200))
    seen = watch(head, monkeypatch)
    with torch.inference_mode():
        cut = head.nll(x, targets)
        whole = -head.logits(x).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(cut, whole, rtol=0, atol=1e-4)
    assert seen == sizes


def test_an_adaptive_chunk_is_as_long_as_its_largest_clusters_allow(monkeypatch):
    """A token needs the head's logits and those of one tail."""
    parts = [SoftmaxHead(weight=nn.Parameter(torch.randn(n, 2)), bias=False) for n in (1_000, 40_000, 29_000)]
    head = AdaptiveHead(clusters=parts, cutoffs=(1_000, 41_000), bias=False)
    x, targets = torch.randn(2, 150, 2), torch.randint(0, 70_000, (2, 150))
    seen = watch(head, monkeypatch)
    with torch.inference_mode():
        head.nll(x, targets)
    assert seen == [103, 47]
    assert 2 * 102 * 41_002 < 2**23 <= 2 * 103 * 41_002


def peaks(which, chunk):
    script = Path(__file__).with_name("peak_memory.py")
    # Every large tensor in pages of its own: what stays small in the heap between freed ones would leave gaps, more or
    # fewer of them from run to run, and the process would keep those.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(
        [sys.executable, script, which, str(chunk)], capture_output=True, text=True, check=True, env=env
    )
    return json.loads(done.stdout)


@pytest.mark.exhaustive
def test_chunks_take_an_eighth_of_the_memory():
    """4 x 1024 tokens, 32,000 words, forward and backward; logits in one piece are 500 MiB, as are their gradients."""
    whole, cut = peaks("head", 1024), peaks("head", "none")
    assert 2 * 4 * 4096 * 32_000 < whole["allocated"] < 2.1 * 4 * 4096 * 32_000
    assert whole["allocated"] > 8 * cut["allocated"]
    if whole["resident"] is not None:
        assert whole["resident"] > 5 * cut["resident"]


@every
def test_softcap_limits_logits(kind):
    """The formula, and losses that are those of the limited logits."""
    plain, capped = make(kind, seed=3).head, make(kind, seed=3, logit_softcap=2.0).head
    x, targets = inputs()
    logits = capped.logits(x)
    assert torch.allclose(
        capped.nll(x, targets), nn.functional.cross_entropy(logits.mT, targets, reduction="none"), atol=1e-12
    )
    if kind in ("plain", "factorized"):
        assert torch.allclose(logits, 2.0 * torch.tanh(plain.logits(x) / 2.0), atol=1e-12)
        assert logits.abs().max() < 2.0


@every
@pytest.mark.parametrize("loss_chunk", [None, 4])
@torch.no_grad()
def test_surprisal_that_is_read_out_is_that_of_the_loss(kind, loss_chunk):
    head = make(kind, loss_chunk=loss_chunk, dtype=torch.float32).head
    x, targets = inputs(dtype=torch.float32)
    nll, log_p = head.read_out(x, targets, Readout())
    torch.testing.assert_close(nll, head.nll(x, targets), rtol=2e-7, atol=1e-7 if "adaptive" not in kind else 1e-6)
    assert log_p.gather(-1, targets[..., None]).squeeze(-1).equal(-nll)
