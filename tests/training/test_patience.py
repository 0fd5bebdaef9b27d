"""Early stopping: a run whose validations no longer improve ends with its learning rate decayed, also if resumed."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from short_runs import After, corpus, go, of_kind, remains, small

from xlcli.config import TrainConfig
from xlcli.config.workflows import ScheduleName
from xlcli.errors import ConfigError, DivergedError
from xlcli.events import Notice, Step, Trained, Validation
from xlcli.optim import ends_with_budget, lr_factor
from xlcli.store.layout import read_record
from xlcli.training import loop
from xlcli.training.run import TrainingRun
from xlcli.training.schedule import Counters, Patience, overfits


@pytest.fixture(autouse=True)
def _overfits(monkeypatch):
    """Validations get worse after step 4, whatever the model."""
    monkeypatch.setattr(loop, "validation_bits", lambda run, valid, stop: abs(run.counters.step - 4) + 1.0)


def settings(schedule="wsd", **train):
    rest = {"max_steps": 40, "eval_every": 2, "patience": 2, "lr_schedule": schedule, "warmup_steps": 0}
    return small(train={**rest, "save_every": 3, **train})


def text_of(events):
    return " ".join(notice.text for notice in of_kind(events, Notice))


@pytest.mark.parametrize(
    ("schedule", "rates", "budget"),
    [
        ("wsd", [1, 1, 0.5], {"max_steps": None, "max_tokens": 40 * 64}),
        ("linear", [33 / 40, 0.2, 0.1], {}),
        ("cosine", [0.926, 0.0955, 0.0245], {}),
    ],
)
def test_the_decay_begins_when_patience_runs_out(schedule, rates, budget):
    events = go(settings(schedule, **budget), corpus(), "m")
    steps = of_kind(events, Step)
    assert [step.step for step in steps] == list(range(1, 11))  # 8 steps, and a quarter of them
    assert [step.lr / 6e-3 for step in steps[7:]] == pytest.approx(rates, abs=1e-3)
    assert [step.fraction for step in steps[7:]] == pytest.approx([0.2, 0.9, 1.0])
    assert steps[8].eta_seconds == pytest.approx(64 / steps[8].tokens_per_second)  # one more step
    assert [event.step for event in of_kind(events, Validation)] == [2, 4, 6, 8, 10]
    assert re.search(r"\b2\b.*\bdecays\b.*\b10\b", text_of(events))
    [trained] = of_kind(events, Trained)
    assert (trained.best_step, trained.stopped, read_record(Path("m"))["stopped_early"]) == (4, False, True)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_patience_leaves_time_for_the_decay_of_every_schedule_that_ends_with_the_budget(schedule):
    [*_, last] = of_kind(go(settings(schedule), corpus(), "m"), Step)
    decays = ends_with_budget(TrainConfig(lr_schedule=schedule, warmup_steps=0))
    assert last.step == (10 if decays else 8)


def test_a_schedule_without_decay_ends_at_once():
    events = go(settings("inverse_sqrt"), corpus(), "m")
    assert [step.step for step in of_kind(events, Step)][-1] == 8
    assert "improvement" in text_of(events)
    assert "decays" not in text_of(events)
    assert of_kind(events, Trained)[0].best_step == 4


def test_a_run_in_its_last_part_ends_with_its_budget():
    events = go(settings("linear", max_steps=9), corpus(), "m")
    assert [step.lr / 6e-3 for step in of_kind(events, Step)] == pytest.approx([1 - i / 9 for i in range(9)])
    assert "budget" in text_of(events)
    assert "stopped_early" not in read_record(Path("m"))


def test_patience_cannot_run_out_with_the_last_validation():
    events = go(settings("linear", max_steps=8), corpus(), "m")
    assert [event.step for event in of_kind(events, Validation)] == [2, 4, 6, 8]
    assert "improvement" not in text_of(events)
    assert "stopped_early" not in read_record(Path("m"))


def test_the_default_interval_validates_in_the_last_part_too():
    events = go(settings(max_steps=20, eval_every=None), corpus(), "m")
    assert [event.step for event in of_kind(events, Validation)] == [2, 4, 6, 8, 9, 10]


@pytest.mark.parametrize(("schedule", "stop"), [("linear", 5), ("linear", 9), ("constant", 7)])
def test_a_resumed_run_decides_as_the_uninterrupted_one(schedule, stop):
    tree = settings(schedule)
    go(tree, corpus(), "whole")
    After(stop).run(tree, corpus(), "m")
    go({}, corpus(), "m", resume=True)
    assert remains("m") == remains("whole")


def test_another_patience_or_budget_continues_a_run_that_ended_early():
    tree = settings("linear")
    assert of_kind(go(tree, corpus(), "m"), Trained)[0].step == 10
    same = go({}, corpus(), "m", resume=True)
    assert (of_kind(same, Trained)[0].step, of_kind(same, Step)) == (10, [])
    assert "--patience" in text_of(same)
    more = go({"train": {"patience": 4}}, corpus(), "m", resume=True)
    assert of_kind(more, Step)[0].lr == pytest.approx(6e-3 * 30 / 40)
    assert of_kind(more, Trained)[0].step == 23  # 4 validations after step 10, and a quarter
    facts = json.loads(next(Path("m").glob("checkpoints/step-00000023/state.json")).read_bytes())
    assert facts["plateau"] == pytest.approx(18 / 40)


def test_a_roll_back_to_a_checkpoint_of_another_patience_counts_anew(monkeypatch):
    go(settings("linear"), corpus(), "m")
    step, failures = TrainingRun.train_step, [20]

    def diverges_once(run, *args):
        if run.counters.step in failures:
            failures.clear()
            raise DivergedError("the loss is not finite.")
        return step(run, *args)

    monkeypatch.setattr(TrainingRun, "train_step", diverges_once)
    events = go({"train": {"patience": 4, "save_every": 100}}, corpus(), "m", resume=True)
    notices = [notice.text for notice in of_kind(events, Notice)]
    assert any(re.search(r"back\D+10\b", text) for text in notices)
    assert sum(bool(re.search(r"\b4\b.*improvement", text)) for text in notices) == 2  # once before the roll-back


def test_patience_needs_a_validation_text():
    with pytest.raises(ConfigError, match=r"train\.patience"):
        go(settings() | {"text": {"tokenizer": "bytes", "valid": 0.0}}, corpus(), "m")


@pytest.mark.parametrize("plateau", [0.01, 0.3, 0.77, 0.8, 0.95])
@pytest.mark.parametrize("decay", [0.0, 0.2, 0.5, 1.0])
def test_the_shortened_run_keeps_the_share_of_its_decay(plateau, decay):
    patience = Patience(1, decay, Counters())
    assert patience.fraction(plateau) == plateau
    assert patience.observe(plateau / 2, best=True) == {"stale": 0, "plateau": None}
    ended = patience.observe(plateau, best=False)
    assert ended == {"stale": 1, "plateau": plateau}
    patience = Patience(1, decay, Counters(**ended))
    assert patience.observe(1.0, best=False)["plateau"] == plateau
    end = patience.end
    assert patience.fraction(end) == 1.0
    if end == 1.0:
        assert patience.fraction(plateau) == plateau
    elif decay:
        assert patience.fraction(plateau) == pytest.approx(1 - decay)
        assert (end - plateau) / end == pytest.approx(decay)
        factors = [
            lr_factor(TrainConfig(warmup_steps=0, lr_schedule="wsd", decay_fraction=decay), fraction, 99)
            for fraction in (plateau, patience.fraction(plateau), patience.fraction((plateau + end) / 2))
        ]
        assert factors == pytest.approx([1.0, 1.0, 0.5])


def rows_of(scores, nats, best=0):
    """Rows of a run with two steps before each validation."""
    rows = []
    for i, (score, mean) in enumerate(zip(scores, nats, strict=True)):
        rows += [{"step": 2 * i + j, "nats": mean + 0.5 - j} for j in range(2)]
        rows.append({"step": 2 * i + 1, "validation_bits_per_byte": score, "best": i == best})
    return rows


@pytest.mark.parametrize(
    ("scores", "nats", "expected"),
    [
        ([2.0, 2.01, 2.02, 2.03], [4.0, 3.0, 2.5, 2.0], [3]),
        ([2.0, 2.01, 2.02, 2.03, 2.04, 2.05], [4.0, 3.0, 2.5, 2.0, 1.9, 1.8], [3]),  # said once
        ([2.0, 2.001, 2.002, 2.003, 2.03], [4.0, 3.0, 2.5, 2.0, 1.9], [4]),  # less than noise at first
        ([2.0, 2.03, 2.02, 2.04, 2.03, 2.05], [4.0, 3.0, 2.5, 2.0, 1.9, 1.8], []),
        ([2.0, 2.01, 2.02, 2.03], [2.0, 2.0, 2.5, 2.1], []),  # a rate that is too high
    ],
)
def test_overfitting_is_a_rise_of_validation_while_the_training_loss_falls(scores, nats, expected):
    before, rows = rows_of([3.0, 2.5], [5.0, 4.5], best=1), rows_of(scores, nats)
    found = [i for i in range(len(scores)) if overfits(before + rows[: 3 * i + 3])]
    assert found == expected
    assert not overfits(before[:2])
    assert not overfits([{"step": 1, "validation_bits_per_byte": 2.0}, *([{"step": 2, "nats": "?"}] * 5)])


def test_overfitting_is_said_once_also_if_the_run_is_resumed(monkeypatch):
    step = TrainingRun.train_step
    monkeypatch.setattr(
        TrainingRun, "train_step", lambda run, *args: step(run, *args)._replace(nats=9.0 - run.counters.step)
    )
    tree = settings(patience=None, max_steps=20)
    said = [[notice.text for notice in of_kind(go(tree, corpus(), "whole"), Notice) if "overfits" in notice.text]]
    for split in (9, 10):
        events = After(split).run(tree, corpus(), f"m{split}") + go({}, corpus(), f"m{split}", resume=True)
        said.append([notice.text for notice in of_kind(events, Notice) if "overfits" in notice.text])
    assert [len(texts) for texts in said] == [1, 1, 1]
    assert re.search(r"\bstep 4\b.*dropout.*--patience", said[0][0])
