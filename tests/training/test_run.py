"""One run in memory: its steps, its schedule, what it refuses."""

import itertools
import math

import numpy as np
import pytest
import torch
from short_runs import PROSE, small
from toys import VARIANTS

from tests.variants import thinned
from xlcli import config
from xlcli.errors import ConfigError, DivergedError
from xlcli.optim import warmup_steps
from xlcli.runtime import Runtime, make_runtime
from xlcli.text.tokenizers import BytesTokenizer
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun
from xlcli.training.validation import check_finite, validation_bits

PROSE_BYTES = PROSE.encode()
CPU = Runtime(torch.device("cpu"), torch.float32, 1)


def _text(text=PROSE_BYTES):
    return TokenFile(np.frombuffer(text, np.uint8), len(text))


def _run(tree, runtime=CPU):
    settings = config.make({"train": {"lr": 6e-3}}, tree)
    return TrainingRun(settings, runtime, _text(), 10, BytesTokenizer().line_ends)


def _in_float64(run):
    run.model.double()
    run.states = [state.map(torch.Tensor.double) for state in run.states]
    return run


def _figures(step):
    """Figures of a step that do not depend on the clock."""
    return step.nats, step.grad_norm, step.lr


def _weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


STILL = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), 0.0)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_grad_accum_gives_the_same_update(optimizer, parts, monkeypatch):
    monkeypatch.setattr("xlcli.training.run.has_bfloat16_units", lambda device: False)
    whole, cut = (
        _in_float64(_run(small(train={"grad_accum": n, "optimizer": optimizer}, model={"dropout": STILL})))
        for n in (1, parts)
    )
    for _ in range(3):
        one, other = whole.train_step(0.2), cut.train_step(0.2)
        assert _figures(other) == pytest.approx(_figures(one), rel=1e-6)  # summed in float32
        assert one.mean_steps is other.mean_steps is None
    for name, weight in _weights(whole).items():
        assert torch.allclose(weight, _weights(cut)[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_ponder_cost_in_unequal_parts_is_that_of_one_batch(parts):
    """Three microbatches of four sequences have two, one and one."""
    adaptive = {**VARIANTS["adaptive"], "stack": VARIANTS["adaptive"]["stack"] | {"ponder_weight": 0.3}}
    tree = small(model=adaptive | {"dropout": STILL}, train={"grad_accum": parts, "grad_clip": 0.0})
    run = _in_float64(_run(tree))
    one = _in_float64(_run(config.merge(tree, {"train": {"grad_accum": 1}})))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.normal_(std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    n_further = 0
    for _ in range(3):
        one.model.load_state_dict(run.model.state_dict())
        one.count(n_read=run.counters.n_read)
        [(x, y, _)] = one.next_batch()
        nll, one.states[0], ponder, _ = one.model.score(x, y, one.states[0])
        further = 0.3 * ponder.cost.mean()
        one.model.zero_grad()
        (nll.mean() + further).backward()
        n_further += bool(further > 0.01)
        found = run.train_step(0.2)
        assert found.nats == pytest.approx(nll.mean().item(), rel=1e-6)  # summed in float32
        assert len(ponder.steps.unique()) > 1
        assert found.mean_steps == pytest.approx(float(ponder.steps.mean()), rel=1e-6)
        for (name, p), q in zip(run.model.named_parameters(), one.model.parameters(), strict=True):
            assert torch.allclose(p.grad, torch.zeros_like(q) if q.grad is None else q.grad, rtol=0, atol=1e-12), name
    assert n_further >= 2


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("share", [0.01, 0.9, 1.1, 0.0])
def test_an_update_takes_the_gradient_clipped_to_the_threshold(optimizer, share):
    """`share` of the norm of the whole gradient, over all microbatches; 0: no clipping."""
    model = {"dropout": STILL}
    tree = small(model=model, train={"grad_accum": 2, "grad_clip": 0.0, "optimizer": optimizer, "betas": [0.8, 0.9]})
    plain = _in_float64(_run(tree))
    before = _weights(plain)
    norm = plain.train_step(0.0).grad_norm
    whole = [p.grad for p in plain.model.parameters()]
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in whole)), rel=1e-12)
    run = _in_float64(_run(config.merge(tree, {"train": {"grad_clip": share * norm}})))
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(run).items())
    assert run.train_step(0.0).grad_norm == pytest.approx(norm, rel=1e-12)
    clipped = min(share, 1) or 1
    for (name, p), gradient in zip(run.model.named_parameters(), whole, strict=True):
        assert torch.allclose(p.grad, clipped * gradient, rtol=1e-5, atol=0), name
        state = next(of.state[p] for of in run.optimizers.optimizers if p in of.state)
        momentum, kept = ("exp_avg", 0.8) if "exp_avg" in state else ("momentum_buffer", run.config.train.momentum)
        assert torch.allclose(state[momentum], (1 - kept) * p.grad, rtol=1e-6, atol=1e-12), name
    found = math.sqrt(sum(float((p.grad**2).sum()) for p in run.model.parameters()))
    assert found == pytest.approx(clipped * norm, rel=1e-5)


RECOMPUTED = {
    "plain": {},
    "clamped": {"position": {"kind": "xl", "n_features": 8, "tied": True, "clamp_len": 9}},
    "input residual": {"stack": {"input_residual": True}, "embedding": {"per_layer": True}},
    "chunked": {"feedforward": {"chunk_len": 8}},
    "normalized": {"attention": {"n_heads": 2, "qk_norm": True}},
    "universal": {"stack": {"kind": "universal", "n_steps": 3}, "n_layers": 1},
} | {name: VARIANTS[name] for name in ("local", "lsh", "learned", "axial", "adaptive")}


RUNS = [*itertools.product(RECOMPUTED, ("hidden", "keyvalue"), (torch.float32, torch.bfloat16))]


@pytest.mark.parametrize("case", thinned(RUNS, RUNS[::3]), ids=str)
def test_recomputed_activations_change_no_bit(case):
    kind, memory, dtype = case
    steps, weights = [], []
    for recompute in (False, True):
        tree = small(model=RECOMPUTED[kind], train={"memory": memory, "recompute_activations": recompute})
        run = _run(tree, Runtime(torch.device("cpu"), dtype, 1))
        steps.append([_figures(run.train_step(0.0)) for _ in range(3)])
        weights.append(_weights(run))
    assert steps[0] == steps[1]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("kind", ["t5", "linear"])
def test_recomputed_activations_of_layers_with_shared_values_differ_in_rounding_only(kind):
    """Gradients of a bias that all layers share are summed in another order."""
    model = {"t5": {"position": {"kind": "t5"}}, "linear": VARIANTS["linear"]}[kind]
    still = {"dropout": {"attention": 0.0}}
    weights = []
    for recompute in (False, True):
        train = {"recompute_activations": recompute, "optimizer": "adamw"}
        run = _in_float64(_run(small(model=config.merge(model, still), train=train)))
        for _ in range(3):
            run.train_step(0.0)
        weights.append(_weights(run))
    assert all(torch.allclose(weight, weights[1][name], rtol=0, atol=1e-12) for name, weight in weights[0].items())


def test_a_step_waits_for_the_device_once(monkeypatch):
    """Every read of a number from a tensor is a wait on CUDA, also those inside of PyTorch."""
    run = _run(small(model={"dropout": {"attention": 0.0}}), Runtime(torch.device("cpu"), torch.float32, 1))
    run.train_step(0.0)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, _m=method, _n=name: reads.append(_n) or _m(self))
    run.train_step(0.0)
    assert reads == ["tolist"]


def test_memory_carries_over_from_step_to_step():
    run = _run(small())
    run.train_step(0.0)
    assert [(s.seen, *(layer.length for layer in s.layers)) for s in run.states] == [(16, 16, 16)]
    run.train_step(0.0)
    assert [(s.seen, *(layer.length for layer in s.layers)) for s in run.states] == [(32, 16, 16)]
    assert run.counters.n_read == 32
    assert (run.counters.step, run.counters.tokens) == (2, 128)


@pytest.mark.parametrize("kind", ["xl", "rope", "none"])
@pytest.mark.parametrize("line_share", [0.0, 1.0])
def test_a_piece_or_line_of_a_shuffled_text_is_read_from_empty_memory(kind, line_share):
    model = {"dropout": STILL, "position": {"kind": kind}}
    run = _in_float64(_run(small(model=model, train={"shuffle": True, "line_share": line_share})))
    begins = []
    while not begins or not 0 < begins[0] < 10:
        run.train_step(0.0)
        x, y, documents = run.next_batch()[0]
        begins = [i for i, position in enumerate(documents[0].tolist()) if position == 0]
    of_document = slice(begins[0], begins[1] if len(begins) > 1 else None)
    empty = run.model.init_state(1, **run.config.train.reading.init_arguments)
    alone = run.model.score(x[:1, of_document], y[:1, of_document], empty).nll
    found = run.model.score(x, y, run.states[0], documents).nll
    assert torch.allclose(found[:1, of_document], alone, rtol=1e-9)


@pytest.mark.parametrize(
    "position", [{"kind": "sinusoidal"}, {"kind": "learned"}, {"kind": "rope", "placement": "embedding"}]
)
def test_absolute_positions_of_a_shuffled_text_are_those_of_a_long_text(position):
    assert _run(small(model={"position": position}, train={"shuffle": True})).next_batch()[0][2] is None


@pytest.mark.parametrize(
    ("budget", "steps", "fractions"),
    [
        ({"max_steps": 4}, 4, [0.25, 0.5, 0.75, 1.0]),
        ({"max_steps": None, "max_tokens": 200}, 4, [0.32, 0.64, 0.96, 1.0]),
        ({"max_steps": 100, "max_tokens": 128}, 2, [0.5, 1.0]),
    ],
)
def test_the_schedule_lands_on_a_budget(budget, steps, fractions):
    run = _run(small(train={**budget, "warmup_steps": 0}))
    found, factors = [], []
    while (fraction := run.fraction(0.0)) < 1.0:
        factors.append(run.train_step(fraction).lr / run.config.train.lr)
        found.append(run.fraction(0.0))
    assert run.counters.step == steps
    assert found == pytest.approx(fractions)
    assert factors == pytest.approx([1 - fraction for fraction in [0.0, *fractions[:-1]]])


def test_the_schedule_lands_on_a_time():
    run = _run(small(train={"max_steps": None, "max_time": 8.0}))
    assert [run.fraction(seconds) for seconds in (0.0, 2.0, 8.0, 9.0)] == [0.0, 0.25, 1.0, 1.0]
    run.config = config.make(run.config.model_dump(mode="json"), {"train": {"warmup_steps": 0}})
    assert run.train_step(0.25).lr / run.config.train.lr == pytest.approx(0.75)


@pytest.mark.parametrize("rollbacks", [0, 1])
def test_a_roll_back_divides_the_rates_by_three(rollbacks):
    run = _run(small(train={"max_steps": 4, "warmup_steps": 0, "lr_schedule": "linear", "min_lr_ratio": 0.0}))
    run.count(rollbacks=rollbacks)
    assert run.train_step(0.25).lr / run.config.train.lr == pytest.approx(0.75 / 3**rollbacks)
    assert [
        group["lr"] / of.defaults["lr"] for of in run.optimizers.optimizers for group in of.param_groups
    ] == pytest.approx([0.75 / 3**rollbacks] * 3)


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({}, 40),
        ({"max_time": 5.0}, 40),
        ({"max_steps": 10_000}, 40),
        ({"max_steps": 100}, 10),
        ({"max_steps": 9}, 0),
        ({"max_tokens": 16 * 128 * 50}, 5),
        ({"max_steps": 100, "warmup_steps": 77}, 77),
    ],
)
def test_warm_up_is_forty_steps_or_a_tenth(train, steps):
    assert warmup_steps(config.make({"train": train}).train) == steps


def _poison(run, where):
    if where == "weights":
        next(iter(run.model.parameters())).data.view(-1)[0] = math.nan
    elif where == "optimizer":
        run.optimizers.optimizers[0].state[run.model.stack.blocks[0].attention.query.weight]["momentum_buffer"].view(
            -1
        )[0] = math.inf
    else:
        run.states[0].layers[0].h.view(-1)[0] = math.nan


@pytest.mark.parametrize("where", ["weights", "memory"])
def test_a_loss_that_is_no_number_changes_nothing(where):
    run = _run(small())
    run.train_step(0.0)
    _poison(run, where)
    weights, remembered = _weights(run), {k: v.clone() for k, v in run.optimizers.tensors().items()}
    with pytest.raises(DivergedError, match=r"\b2\b"):
        run.train_step(0.0)
    assert (run.counters.step, run.counters.tokens) == (1, 64)
    assert all(torch.equal(p, weights[name]) or where == "weights" for name, p in run.model.named_parameters())
    assert all(torch.equal(value, remembered[name]) for name, value in run.optimizers.tensors().items())


@pytest.mark.parametrize("where", ["weights", "optimizer", "memory"])
def test_what_is_poisoned_is_not_fit_to_be_saved(where):
    run = _run(small())
    run.train_step(0.0)
    check_finite(run)
    _poison(run, where)
    with pytest.raises(DivergedError, match=rf"{where}\b.*\b1\b"):
        check_finite(run)


def test_weights_beyond_all_bounds_are_not_fit_either():
    run = _run(small())
    run.train_step(0.0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1e9)
    with pytest.raises(DivergedError, match="risen"):
        check_finite(run)


def test_a_look_ahead_leaves_the_run_as_it_was():
    looked, other = _run(small()), _run(small())
    torch.manual_seed(5)
    expected = [_figures(other.train_step(0.0)) for _ in range(3)]
    torch.manual_seed(5)
    found = []
    for _ in range(3):
        found.append(_figures(looked.train_step(0.0)))
        check_finite(looked)
        validation_bits(looked, _text(PROSE[:300].encode()), lambda: False)
    assert found == expected


def test_held_out_text_without_a_finite_score_stops():
    run = _run(small())
    _poison(run, "weights")
    with pytest.raises(DivergedError, match="validation"):
        validation_bits(run, _text(), lambda: False)


def test_validation_gives_up_when_asked():
    run = _run(small())
    assert validation_bits(run, _text(), lambda: True) is None
    assert validation_bits(run, _text(), lambda: False) == pytest.approx(8.0, abs=0.2)


@pytest.mark.parametrize(("contexts", "sequences"), [(0.5, 1), (7, 1), (8, 2), (90, 8)])
def test_validation_of_a_short_text_has_few_sequences(contexts, sequences, monkeypatch):
    run = _run(small())
    train, rows = run.config.train, []
    init_state = run.model.init_state
    monkeypatch.setattr(run.model, "init_state", lambda n, **options: rows.append(n) or init_state(n, **options))
    text = (PROSE_BYTES * 10)[: int(contexts * (train.mem_len + train.segment_len))]
    found = validation_bits(run, _text(text), lambda: False)
    assert rows == [sequences]
    if sequences == 1:
        x, y = (torch.tensor(list(ids))[None] for ids in ([run.loader.start_id, *text[:-1]], text))
        state = init_state(1, mem_len=train.mem_len, segment_len=train.segment_len)
        nats = 0.0
        for i in range(0, len(text), train.segment_len):
            part = slice(i, i + train.segment_len)
            nll, state = run.model.score(x[:, part], y[:, part], state)[:2]
            nats += nll.double().sum().item()
        assert found == pytest.approx(nats / len(text) / math.log(2), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize(("attention", "position"), [("full", "xl"), ("lsh", "rope")])
def test_a_compiled_run_has_the_same_losses(attention, position):
    try:
        make_runtime(config.make({"runtime": {"compile": True, "device": "cpu"}}).runtime, training=True)
    except ConfigError as error:
        pytest.skip(error.message)
    still = {"dropout": STILL, "n_layers": 1, "attention": {"kind": attention}, "position": {"kind": position}}
    torch._dynamo.reset()
    plain, compiled = (_run(small(model=still, runtime={"compile": on})) for on in (False, True))
    counters = torch._dynamo.utils.counters
    counters.clear()
    for _ in range(4):
        one, other = plain.train_step(0.0), compiled.train_step(0.0)
        assert _figures(other) == pytest.approx(_figures(one), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for name, weight in _weights(plain).items():
        assert torch.allclose(weight, _weights(compiled)[name], atol=1e-4), name
    assert validation_bits(compiled, _text(), lambda: False) == pytest.approx(
        validation_bits(plain, _text(), lambda: False), rel=1e-4
    )
    assert counters["stats"]["unique_graphs"] == 1
