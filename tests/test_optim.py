"""Optimizers against PyTorch's own, and the lr_factor."""

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import nn

from xlcli import config
from xlcli.config import TrainConfig
from xlcli.config.workflows import ScheduleName
from xlcli.errors import CheckpointError
from xlcli.model.build import build_model
from xlcli.optim import (
    POLYNOMIALS,
    BatchedMuon,
    Optimizers,
    batches_of_one_shape,
    ends_with_budget,
    hidden_matrices,
    lr_factor,
    orthogonalize,
)

SHAPES = [(24, 24), (16, 48), (48, 16), (16, 48), (1, 8), (8, 1), (24, 24)]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
DTYPES = [torch.float32, torch.bfloat16]


def ours(weights, dtype):
    return BatchedMuon(weights, dtype=dtype, **SETTINGS)


class Reference(torch.optim.Muon):
    """PyTorch's Muon, with the polynomials applied to singular values."""

    def step(self):
        whole = torch.optim._muon._zeropower_via_newtonschulz
        torch.optim._muon._zeropower_via_newtonschulz = lambda update, *_: by_singular_values(update)
        super().step()
        torch.optim._muon._zeropower_via_newtonschulz = whole


def by_singular_values(matrix):
    """What `orthogonalize` computes, of one matrix (r c)."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (1.01 * (values**4).sum() ** 0.25).clamp(min=1e-7)
    for a, b, c in POLYNOMIALS:
        values = a * values + b * values**3 + c * values**5
    return (u * values @ v).to(matrix.dtype)


def pytorchs(weights, dtype=None):
    return Reference(weights, adjust_lr_fn="match_rms_adamw", **SETTINGS)


def _weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _steps(optimizer, weights, seeds):
    for seed in seeds:
        for weight, gradient in zip(weights, _weights(seed), strict=True):
            weight.grad = gradient.detach().clone()
        optimizer.step()


def _close(ours, theirs, before, dtype):
    # The first polynomial has slopes of 8 at 0 and 25 at 1, which amplify rounding to bfloat16, 0.4 %.
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-4
    for our, their, old in zip(ours, theirs, before, strict=True):
        assert (our - their).norm() < tolerance * (their - old).norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_muon_is_pytorchs_muon(dtype):
    our, their, before = _weights(), _weights(), _weights()
    _steps(ours(our, dtype), our, [1, 2, 3])
    _steps(pytorchs(their), their, [1, 2, 3])
    _close(our, their, before, dtype)


@pytest.mark.parametrize("kinds", [(ours, pytorchs), (pytorchs, ours)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_muon_state_is_that_of_pytorchs_muon(kinds, dtype):
    first, second = kinds
    moved, stayed, before = _weights(), _weights(), _weights()
    one = first(moved, dtype)
    _steps(one, moved, [1, 2])
    other = second(moved, dtype)
    for weight in moved:
        other.state[weight].update(one.state[weight])
    _steps(other, moved, [3])
    _steps(pytorchs(stayed), stayed, [1, 2, 3])
    assert all(
        torch.equal(other.state[weight]["momentum_buffer"], one.state[weight]["momentum_buffer"]) for weight in moved
    )
    _close(moved, stayed, before, dtype)


def test_without_gradients_muon_only_decays_the_weights():
    weights, before = _weights(), _weights()
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = ours(weights, torch.float32)
    optimizer.step()
    optimizer.step()
    kept = (1 - SETTINGS["lr"] * SETTINGS["weight_decay"]) ** 2
    assert all(torch.allclose(now, kept * old, rtol=1e-6, atol=0) for now, old in zip(weights, before, strict=True))


def test_batches_have_one_shape_and_a_limited_size():
    shapes = [(512, 512), (2, 3), (512, 512), (1024, 1024), (512, 512), (3, 2), (2, 3)]
    parameters = [torch.zeros(shape) for shape in shapes]
    batches = list(batches_of_one_shape(parameters))
    assert [[tuple(p.shape) for p in batch] for batch in batches] == [
        [(512, 512), (512, 512)], [(512, 512)], [(2, 3), (2, 3)], [(1024, 1024)], [(3, 2)],
    ]  # fmt: skip
    assert {id(p) for batch in batches for p in batch} == {id(p) for p in parameters}


def test_a_parameter_without_gradient_stays():
    weights = _weights()
    optimizer = ours(weights, torch.float32)
    optimizer.step()
    assert all(torch.equal(now, before) for now, before in zip(weights, _weights(), strict=True))
    assert not optimizer.state


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_orthogonalizing_brings_singular_values_near_one(shape):
    matrices = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = orthogonalize(matrices, 1e-7)
    assert torch.allclose(out, torch.stack([by_singular_values(matrix) for matrix in matrices]), rtol=0, atol=1e-9)
    values = torch.linalg.svdvals(out)
    assert 0.73 < values.median() <= values.max() < 1.27


def test_each_polynomial_is_the_nearest_to_one_on_its_interval():
    low, high = 0.01, 1.0
    for a, b, c in POLYNOMIALS:
        x = torch.linspace(low, high, 100_001, dtype=torch.float64)
        error = a * x + b * x**3 + c * x**5 - 1
        inside = (error[1:-1] - error[:-2]) * (error[2:] - error[1:-1]) <= 0
        extremes = torch.cat((error[:1], error[1:-1][inside], error[-1:]))
        # Chebyshev's criterion for three coefficients: four extremes of equal size with alternating signs.
        assert len(extremes) == 4
        assert torch.allclose(extremes.abs(), extremes.abs().mean(), rtol=2e-3, atol=0)
        assert (extremes[1:] * extremes[:-1] < 0).all()
        low, high = 1 - float(error.abs().max()), 1 + float(error.abs().max())
    assert high < 1.28


def _model():
    tree = {"dim": 16, "n_layers": 2, "attention": {"n_heads": 2}, "position": {"kind": "xl", "n_features": 4}}
    torch.manual_seed(0)
    return build_model(config.make({"model": tree}).model)


def _optimizers(model, **train):
    return Optimizers(model, config.make({"train": train}).train, lr=0.01, native_bfloat16=False)


def _learn(model, optimizers, seeds):
    for seed in seeds:
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))
        state = model.init_state(2, mem_len=8, segment_len=8, memory="hidden")
        model.score(tokens[:, :-1], tokens[:, 1:], state)[0].mean().backward()
        optimizers.step(0.5, 0)
        model.zero_grad(set_to_none=False)


def test_muon_gets_the_matrices_inside_and_adamw_the_rest():
    model = _model()
    optimizers = _optimizers(model)
    muon, adamw = (optimizer for optimizer, _ in optimizers.optimizers)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert matrices == hidden_matrices(model)
    assert matrices | rest == {id(p) for p in model.parameters()}
    assert not matrices & rest
    assert id(model.embedding.table.weight) in rest
    assert all(id(block.attention.query.weight) in matrices for block in model.stack.blocks)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert all(p.ndim < 2 for p in adamw.param_groups[1]["params"])


def test_each_optimizer_has_its_own_rate_times_the_factor():
    model = _model()
    optimizers = _optimizers(model, adam_lr=0.004)
    _learn(model, optimizers, [1])
    assert [group["lr"] for optimizer, _ in optimizers.optimizers for group in optimizer.param_groups] == [
        0.005, 0.002, 0.002,
    ]  # fmt: skip
    alone = _optimizers(_model(), optimizer="adamw", adam_lr=0.004)
    assert [rate for _, rate in alone.optimizers] == [0.01]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_settings_of_the_run_reach_the_update_of_every_parameter(optimizer):
    model, twin = _model(), _model()
    adam, muon = {"betas": (0.5, 0.7), "weight_decay": 0.3}, {"momentum": 0.6, "weight_decay": 0.3}
    optimizers = _optimizers(model, optimizer=optimizer, adam_lr=0.02, **adam | muon)
    matrices = hidden_matrices(twin) if optimizer == "muon" else set()
    adam_lr = 0.02 if optimizer == "muon" else 0.01
    expected = []
    for p in twin.parameters():
        if id(p) in matrices:
            expected.append(BatchedMuon([p], lr=0.5 * 0.01, dtype=torch.float32, **muon))
        else:
            decay = adam if p.ndim > 1 else adam | {"weight_decay": 0.0}
            expected.append(torch.optim.AdamW([p], lr=0.5 * adam_lr, **decay))
    for step in range(3):
        for p, q, one in zip(model.parameters(), twin.parameters(), expected, strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            p.grad.copy_(q.grad)
            one.step()
        optimizers.step(0.5, 0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_average_covers_a_share_of_the_run(share):
    model = _model()
    optimizers, values = _optimizers(model, average_share=share), []
    for step in range(12):
        for parameter in model.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        optimizers.step(0.5, step)
        values.append([parameter.detach().double().clone() for parameter in model.parameters()])
    power, n = 1 / share, len(values)
    parts = [((s + 1) / n) ** power - (s / n) ** power for s in range(n)]
    with optimizers.averaged():
        averages = [parameter.detach().clone() for parameter in model.parameters()]
    for i, (parameter, average) in enumerate(zip(model.parameters(), averages, strict=True)):
        expected = sum(part * value[i] for part, value in zip(parts, values, strict=True))
        assert torch.allclose(average.double(), expected, rtol=0, atol=1e-6)
        assert torch.equal(parameter.double(), values[-1][i])


def test_without_an_average_the_parameters_stay():
    for optimizers in (_optimizers(model := _model()), _optimizers(model, average_share=0.5)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with optimizers.averaged():
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert not optimizers.tensors()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("average_share", [0.0, 0.2])
def test_restored_optimizers_go_on_to_the_bit(optimizer, average_share):
    model, twin = _model(), _model()
    optimizers = _optimizers(model, optimizer=optimizer, average_share=average_share)
    _learn(model, optimizers, [1, 2])
    saved = {name: value.clone() for name, value in optimizers.tensors().items()}
    twin.load_state_dict(model.state_dict())
    restored = _optimizers(twin, optimizer=optimizer, average_share=average_share)
    restored.load(saved)
    _learn(model, optimizers, [3])
    _learn(twin, restored, [3])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert optimizers.tensors().keys() == restored.tensors().keys()
    assert all(torch.equal(value, restored.tensors()[name]) for name, value in optimizers.tensors().items())


def test_half_of_what_adamw_remembers_is_refused():
    model = _model()
    optimizers = _optimizers(model)
    _learn(model, optimizers, [1])
    saved = dict(optimizers.tensors())
    del saved["embedding.table.weight:exp_avg"]
    with pytest.raises(CheckpointError, match=r"'embedding\.table\.weight'"):
        _optimizers(_model()).load(saved)
    _optimizers(_model()).load({})


@pytest.mark.parametrize(
    ("fraction", "step", "lr_schedule", "final", "factor"),
    [
        (0.0, 0, "linear", 0.0, 1 / 5), (0.0, 3, "linear", 0.0, 4 / 5), (0.0, 4, "linear", 0.0, 1.0),
        (0.5, 99, "linear", 0.0, 0.5), (0.5, 99, "cosine", 0.0, 0.5), (0.25, 99, "cosine", 0.0, (1 + 0.5**0.5) / 2),
        (1.0, 99, "linear", 0.1, 0.1), (1.0, 99, "cosine", 0.1, 0.1), (1.7, 99, "linear", 0.0, 0.0),
        (-1.0, 99, "linear", 0.0, 1.0),
    ],
)  # fmt: skip
def test_the_schedule(fraction, step, lr_schedule, final, factor):
    assert math.isclose(
        lr_factor(TrainConfig(warmup_steps=4, lr_schedule=lr_schedule, min_lr_ratio=final), fraction, step), factor
    )


SHARES = {
    "cosine": (0.5, 0.5 * (1 - (1 + 5**0.5) / 4), 0.0),
    "linear": (0.5, 0.2, 0.0),
    "wsd": (1.0, 0.8, 0.0),  # straight down within the last quarter
    "constant": (1.0, 1.0, 1.0),
    "inverse_sqrt": ((5 / 20) ** 0.5, (5 / 32) ** 0.5, (5 / 40) ** 0.5),
}
"""Shares of the learning rate after 50, 80 and 100 % of the budget, in steps 19, 31 and 39, of which 4 are warmup."""


def test_every_schedule_is_what_it_says():
    assert set(get_args(ScheduleName)) == set(SHARES)
    for name, shares in SHARES.items():
        train = TrainConfig(warmup_steps=4, lr_schedule=name, min_lr_ratio=0.0, decay_fraction=0.25)
        found = [lr_factor(train, fraction, step) for fraction, step in ((0.5, 19), (0.8, 31), (1.0, 39))]
        assert found == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize("name", SHARES)
def test_a_schedule_never_rises_after_the_warmup_and_ends_where_it_says(name):
    train = TrainConfig(warmup_steps=4, lr_schedule=name, min_lr_ratio=0.1, decay_fraction=0.25)
    rates = [lr_factor(train, i / 100, 4 + i) for i in range(101)]
    assert rates[0] == 1.0
    assert all(before >= after for before, after in pairwise(rates))
    if ends_with_budget(train):
        assert rates[-1] == pytest.approx(0.1)
    else:
        assert rates[-1] > 0.1
        assert lr_factor(train, 0.0, 10**4) == lr_factor(train, 1.0, 10**4)


def test_without_warm_up_the_first_step_is_the_highest():
    assert lr_factor(TrainConfig(warmup_steps=0), 0.0, 0) == 1.0


def test_a_short_run_by_time_reaches_the_peak_after_a_tenth():
    timed = TrainConfig(max_time=60.0, lr_schedule="constant")
    assert lr_factor(timed, 0.0, 0) == 1 / 41
    assert lr_factor(timed, 0.05, 1) == pytest.approx(0.5)
    assert lr_factor(timed, 0.1, 2) == 1.0
    assert lr_factor(timed, 0.01, 40) == 1.0  # of many short steps the number decides
    assert lr_factor(TrainConfig(max_time=60.0, warmup_steps=9), 0.5, 0) == pytest.approx(0.1 * 0.5)  # as it was asked


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_a_constant_rate_is_that_after_warm_up(fraction):
    factors = [
        lr_factor(TrainConfig(warmup_steps=4, lr_schedule="constant", min_lr_ratio=0.1), fraction, step)
        for step in (0, 3, 4, 10**6)
    ]
    assert factors == pytest.approx([1 / 5, 4 / 5, 1.0, 1.0])


def test_the_inverse_square_root_is_the_formula_of_its_paper():
    """Vaswani et al. 2017, equation 3: d^-0.5 min(n^-0.5, n w^-1.5), at its highest after w steps; n from 1 on."""
    warmup = 4000
    highest = warmup**-0.5
    for n in (1, 2, 100, 3999, 4000, 4001, 16000, 100_000):
        theirs = min(n**-0.5, n * warmup**-1.5) / highest
        for fraction in (0.0, 0.9):
            ours = lr_factor(TrainConfig(warmup_steps=warmup - 1, lr_schedule="inverse_sqrt"), fraction, n - 1)
            assert ours == pytest.approx(theirs, rel=1e-12)
    assert lr_factor(
        TrainConfig(warmup_steps=3999, lr_schedule="inverse_sqrt", min_lr_ratio=0.2), 0.0, 15_999
    ) == pytest.approx(0.6)


@pytest.mark.parametrize(("fraction", "factor"), [(0.0, 1.0), (0.5, 1.0), (0.75, 1.0), (0.875, 0.55), (1.0, 0.1)])
def test_wsd_is_constant_and_then_decays(fraction, factor):
    got = lr_factor(
        TrainConfig(warmup_steps=10, lr_schedule="wsd", min_lr_ratio=0.1, decay_fraction=0.25), fraction, 99
    )
    assert math.isclose(got, factor)
