"""Training in float16: loss scaling, skipped steps, and checkpoints that hold the scale."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import PROSE, After, corpus, curve, go, of_kind, remains, small
from toys import VARIANTS

from xlcli import config
from xlcli.errors import DivergedError
from xlcli.events import Notice, Step
from xlcli.runtime import Runtime
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun
from xlcli.training.validation import check_finite

HALF = Runtime(torch.device("cpu"), torch.float16, 1)
FULL = Runtime(torch.device("cpu"), torch.float32, 1)
STILL = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), 0.0)


def _run(tree, runtime=HALF):
    text = PROSE.encode()
    settings = config.make({"train": {"lr": 6e-3}}, tree)
    return TrainingRun(settings, runtime, TokenFile(np.frombuffer(text, np.uint8), len(text)), 10)


def _set_scale(run, scale):
    run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": scale})


def _weights(run):
    return [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize("kind", [None, *VARIANTS])
def test_training_in_float16_is_close_to_float32(kind):
    model = VARIANTS[kind] if kind else {}
    half, full = (_run(small(model={**model, "dropout": STILL}), runtime) for runtime in (HALF, FULL))
    for _ in range(3):
        ours, exact = half.train_step(0.0), full.train_step(0.0)
        assert ours.nats == pytest.approx(exact.nats, rel=0.02)
        assert ours.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
    assert (half.counters.skipped, ours.loss_scale, exact.loss_scale) == (0, 2.0**16, None)
    check_finite(half)


def test_the_scale_keeps_small_gradients():
    """Gradients below 6e-8 are zero in float16."""
    norms = []
    for scale in (2.0**-20, 1.0, 2.0**16):
        run = _run(small(model={"dropout": STILL}))
        _set_scale(run, scale)
        norms.append(run.train_step(0.0).grad_norm)
    assert norms[0] < 0.9 * norms[2]


def test_a_step_whose_gradient_overflows_is_skipped():
    run = _run(small())
    run.train_step(0.0)
    before = _weights(run)
    _set_scale(run, 2.0**40)
    result = run.train_step(0.0)
    assert (result.grad_norm, result.loss_scale, run.counters.skipped, run.counters.step) == (None, 2.0**39, 1, 2)
    assert all(torch.equal(old, new) for old, new in zip(before, _weights(run), strict=True))
    assert run.loader.n_read == 32
    _set_scale(run, 2.0**10)
    assert run.train_step(0.0).grad_norm is not None
    assert not all(torch.equal(old, new) for old, new in zip(before, _weights(run), strict=True))


def test_a_gradient_that_no_scale_makes_finite_diverges():
    run = _run(small())
    next(iter(run.model.parameters())).register_hook(lambda grad: grad * float("nan"))
    _set_scale(run, 2.0)
    assert run.train_step(0.0).loss_scale == 1.0
    with pytest.raises(DivergedError, match=r"\b2\b"):
        run.train_step(0.0)


def test_a_resumed_run_equals_the_uninterrupted_one(monkeypatch):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**22, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    tree = small(runtime={"dtype": "float16"})
    events = go(tree, corpus(), "whole")
    assert "float16" in " ".join(notice.text for notice in of_kind(events, Notice))
    scales = [step.loss_scale for step in of_kind(events, Step)]
    assert len(set(scales)) > 1
    assert of_kind(events, Step)[-1].skipped > 0
    rows = [row for row in curve("whole") if "nats" in row]
    assert [row["loss_scale"] for row in rows] == scales
    assert [row["skipped"] for row in rows] == [step.skipped for step in of_kind(events, Step)]
    assert None in [row["grad_norm"] for row in rows]
    After(3).run(tree, corpus(), "m")
    go({}, corpus(), "m", resume=True)
    assert remains("m") == remains("whole")
    facts = json.loads(Path("m/checkpoints/step-00000006/state.json").read_bytes())
    assert (facts["loss_scale"]["scale"], facts["skipped"]) == (scales[-1], rows[-1]["skipped"])
    assert go({"runtime": {"dtype": "float32"}, "train": {"max_steps": 8}}, corpus(), "m", resume=True)
