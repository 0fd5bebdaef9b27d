"""Models of `train.keep_at`: those of the run stopped at that step, whatever happens to the run in between."""

from pathlib import Path

import pytest
from short_runs import After, corpus, go, of_kind, small, train

from xlcli.config import EvalConfig, RuntimeConfig
from xlcli.errors import ConfigError, DivergedError
from xlcli.evaluation import evaluate
from xlcli.events import Saved, Score, Step
from xlcli.runtime import make_runtime
from xlcli.store.discover import find, local_models
from xlcli.store.folder import load
from xlcli.store.layout import read_record
from xlcli.training.run import TrainingRun

OF_STEP = 4 * 16
POINTS = (1, 128, 129, 320)
"""Reached after steps 1, 2, 3 and 5."""


def settings(**train):
    return small(train={"keep_at": [*POINTS], "average_share": 0.3, "weights": "bfloat16", **train})


def kept(folder="m"):
    """Bytes of the weights of each kept model."""
    paths = Path(folder, "kept").glob("*/model.safetensors")
    return {path.parent.name: path.read_bytes() for path in paths}


@pytest.fixture
def expected():
    """Weights of runs without validation that were stopped after the steps of `POINTS`."""
    found = {}
    for name, step in zip(("1", "128", "129", "320"), (1, 2, 3, 5), strict=True):
        After(step).run(settings(keep_at=[], eval_every=100), corpus(), name)
        found[name] = Path(name, "model.safetensors").read_bytes()
    return found


def test_a_kept_model_is_the_run_stopped_there(expected):
    events = go(settings(), corpus(), "models/m")
    assert kept("models/m") == expected
    paths = [(event.step, event.folder.name) for event in of_kind(events, Saved) if "kept" in event.folder.parts]
    assert paths == [(1, "1"), (2, "128"), (3, "129"), (5, "320")]
    assert find("models/m/kept/129") == Path.cwd() / "models/m/kept/129"
    assert [model.name for model in local_models()] == ["m"]
    model = load(Path("models/m/kept/129"))
    assert (model.record["tokens"], Path(model.record["corpus"]).name) == (3 * OF_STEP, "corpus.txt")
    runtime = make_runtime(RuntimeConfig(threads=1))
    scores = [evaluate(load(Path(folder)), None, EvalConfig(), runtime) for folder in ("models/m", model.folder)]
    of_run, of_point = (of_kind(events, Score)[0] for events in scores)
    assert of_run.bytes == of_point.bytes > 0
    assert of_run.bits_per_byte < of_point.bits_per_byte


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_resumed_run_writes_each_point_once(stop, expected):
    After(stop).run(settings(), corpus(), "m")
    before = {path: path.stat().st_mtime_ns for path in Path("m/kept").glob("*/*")}
    go({}, corpus(), "m", resume=True)
    assert kept() == expected
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_killed_run_loses_no_point(expected):
    events = go(settings(), corpus(), "whole")
    for end in range(1, len(events)):
        folder = Path(f"killed{end}")
        run = train(settings(), [corpus()], folder)
        for _ in range(end):
            next(run)
        run.close()
        go(settings(), corpus(), folder, resume=(folder / "config.json").exists())
        assert kept(folder) == expected, end


def test_points_that_the_run_does_not_reach_are_not_kept():
    go(settings(keep_at=[384, 385, 5000]), corpus(), "m")
    assert kept("m").keys() == {"384"}
    go({"train": {"max_steps": 7, "keep_at": [10, 384, 400]}}, corpus(), "m", resume=True)
    assert kept("m").keys() == {"384", "400"}


def test_a_new_run_removes_the_points_of_the_old_one():
    go(settings(), corpus(), "m")
    events = go(settings(keep_at=[100]), corpus(), "m", overwrite=True)
    assert kept().keys() == {"100"}
    assert read_record(Path("m/kept/100"))["steps"] == 2  # kept before the old model was replaced
    assert of_kind(events, Step)
    assert not [path for path in Path("m").iterdir() if path.name.startswith(".tmp")]
    with pytest.raises(ConfigError, match="kept"):
        go(small(), "m/kept/100/valid.txt", "m", overwrite=True)


def test_a_point_that_was_undone_is_that_of_the_new_way(monkeypatch):
    step, failures = TrainingRun.train_step, [5]

    def diverges_once(run, *args):
        if run.counters.step in failures:
            failures.clear()
            raise DivergedError("the loss is not finite.")
        return step(run, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "train_step", diverges_once)
        go(settings(save_every=2), corpus(), "m")
    rolled = kept()
    go(settings(), corpus(), "whole")
    assert {name for name, weights in kept("whole").items() if weights != rolled[name]} == {"320"}
