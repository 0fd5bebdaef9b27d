"""Runs that diverge continue from their last checkpoint at lower learning rates."""

import math
import re
from pathlib import Path

import pytest
import torch
from short_runs import After, corpus, curve, go, of_kind, remains, small, train

from tests.variants import thinned
from xlcli.errors import DivergedError
from xlcli.events import Notice, Step
from xlcli.files.tensors import read_tensors
from xlcli.store.layout import read_record
from xlcli.text.loaders import TrainLoader
from xlcli.training.run import TrainingRun


@pytest.fixture
def poison(monkeypatch):
    """Makes the gradient of these batches of the text not finite, in every process that reads them."""
    position, following, clip = [0], TrainLoader.batch, torch.nn.utils.get_total_norm

    def poison(*batches):
        def following_batch(loader, n_read, segment_len):
            position[0] = n_read // segment_len
            return following(loader, n_read, segment_len)

        monkeypatch.setattr(TrainLoader, "batch", following_batch)
        monkeypatch.setattr(
            torch.nn.utils,
            "get_total_norm",
            lambda *args: clip(*args) * (math.nan if position[0] in batches else 1.0),
        )

    return poison


def rollbacks(events):
    return [notice.text for notice in of_kind(events, Notice) if "; back to" in notice.text]


@pytest.mark.parametrize("schedule", ["linear", "wsd", "constant"])
def test_a_run_continues_from_its_checkpoint_at_a_third_of_the_rate(poison, schedule):
    tree = small(train={"lr_schedule": schedule})
    usual = {step.step: step.lr for step in of_kind(go(tree, corpus(), "usual"), Step)}
    poison(4)
    events = go(tree, corpus(), "m")
    [told] = rollbacks(events)
    assert re.findall(r"\d+", told) == ["5", "4", "3"]
    steps = of_kind(events, Step)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.lr for step in steps[4:]] == pytest.approx([usual[5] / 3, usual[6] / 3])
    assert [row.get("rollbacks") for row in curve("m") if "nats" in row] == [None] * 4 + [1, 1]
    assert (read_record(Path("m"))["rollbacks"], read_record(Path("m"))["finished"]) == (1, True)


@pytest.mark.parametrize("batches", [(4,), (0,), (5,)])
@pytest.mark.parametrize("stop", thinned([0, 1, 2, 3, 4, 5], [0, 3, 4]))
def test_a_run_that_was_stopped_equals_one_that_was_not(poison, batches, stop):
    poison(*batches)
    go(small(), corpus(), "whole")
    After(stop).run(small(), corpus(), "m")
    go({}, corpus(), "m", resume=True)
    assert remains("m") == remains("whole")


@pytest.mark.parametrize("n_events", range(4, 14, 3))
def test_a_run_that_was_killed_equals_one_that_was_not(poison, n_events):
    poison(4)
    go(small(), corpus(), "whole")
    events = train(small(), [corpus()], Path("m"))
    for _ in range(n_events):
        next(events)
    events.close()
    go({}, corpus(), "m", resume=True)
    assert remains("m") == remains("whole")


def test_a_run_is_rolled_back_once(poison):
    poison(*range(4, 50))
    events = train(small(train={"lr": 0.09}), [corpus()], Path("m"))
    seen = []
    with pytest.raises(DivergedError, match=r"\b5\b") as caught:
        seen.extend(events)
    assert "--lr 0.006 " in caught.value.remedy
    with pytest.raises(DivergedError):
        go({}, corpus(), "m", resume=True)
    assert len(rollbacks(seen)) == 1


def test_a_run_can_be_stopped_instead(poison):
    poison(4)
    with pytest.raises(DivergedError, match=r"\b5\b"):
        go(small(train={"on_divergence": "stop"}), corpus(), "m")
    assert go({"train": {"on_divergence": "rollback"}}, corpus(), "m", resume=True)[-1].step == 6


def test_a_new_rate_is_not_divided(poison):
    usual = of_kind(go(small(train={"lr": 0.001}), corpus(), "usual"), Step)
    poison(4)
    After(5).run(small(), corpus(), "m")
    steps = of_kind(go({"train": {"lr": 0.001}}, corpus(), "m", resume=True), Step)
    assert [step.lr for step in steps] == [usual[-1].lr]


def test_weights_that_are_not_finite_are_undone(monkeypatch):
    step, calls = TrainingRun.train_step, []

    def poisoned(self, *args):
        calls.append(None)
        result = step(self, *args)
        if len(calls) == 6:
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(math.nan)
        return result

    monkeypatch.setattr(TrainingRun, "train_step", poisoned)
    events = go(small(), corpus(), "m")
    assert len(rollbacks(events)) == 1
    assert events[-1].step == 6
    for path in Path("m").rglob("*.safetensors"):
        tensors = read_tensors(path, expected=None)[0].values()
        assert all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


def test_a_time_budget_goes_on(poison):
    poison(1)
    # Without saves near the end: one that lasts until the budget is spent is the end of the run, at its beginning.
    train = {"max_steps": None, "max_time": 1.0, "save_every": 1000}
    events = go(small(train=train), corpus(), "m")
    assert len(rollbacks(events)) == 1
    assert events[-1].seconds >= 0.5  # what is left after the time that the last validation may take
    assert not events[-1].stopped
