"""`xlcli.train` and `xlcli.resume` on several processes: one run after the other, equal to those of one process."""

import json
from pathlib import Path

import pytest
import torch
from launching import outputs, start
from short_runs import corpus, small, train

import xlcli
from xlcli.events import Step, Trained
from xlcli.ranks import Ranks
from xlcli.training import validation

CALL = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_python_ranks as t; t.several()"


def several():
    """Three runs in one process: what each of them has yielded, as JSON."""
    torch.set_num_threads(1)
    validation.SAMPLE_TOKENS = 3
    settings = small(train={"max_steps": 2})
    for events in (
        xlcli.train_events("corpus.txt", "first", preset="tiny", settings=settings),
        xlcli.train_events("corpus.txt", "second", preset="tiny", settings=settings),
        xlcli.resume_events("corpus.txt", "second", settings={"train": {"max_steps": 4}}),
    ):
        found = list(events)
        steps = [(event.step, event.nats) for event in found if isinstance(event, Step)]
        print(json.dumps({"steps": steps, "ended": isinstance(found[-1], Trained)}), flush=True)


@pytest.mark.exhaustive
def test_runs_of_two_processes_follow_one_another():
    corpus()
    (code, first, error), (second, other, _) = outputs(start(2, CALL))
    assert (code, second) == (0, 0), error[-3000:]
    found, of_second = ([json.loads(line) for line in text.splitlines()] for text in (first, other))
    assert [line["ended"] for line in found] == [True] * 3
    assert [line["ended"] for line in of_second] == [False] * 3
    assert [line["steps"] for line in found] == [line["steps"] for line in of_second]
    alone = Path("alone")
    alone.mkdir()
    expected = [
        (event.step, event.nats)
        for settings in ({"train": {"max_steps": 2}}, {"train": {"max_steps": 4}})
        for event in (
            xlcli.resume_events("corpus.txt", "alone/m", settings=settings)
            if Path("alone/m/config.json").exists()
            else xlcli.train_events("corpus.txt", "alone/m", preset="tiny", settings=small(**settings))
        )
        if isinstance(event, Step)
    ]
    assert found[0]["steps"] == found[1]["steps"]
    for steps, own in ((found[1]["steps"], expected[:2]), (found[2]["steps"], expected[2:])):
        assert [step for step, _ in steps] == [step for step, _ in own]
        assert [nats for _, nats in steps] == pytest.approx([nats for _, nats in own], abs=1e-5)


def test_a_process_group_of_the_caller_is_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(xlcli.ConfigError, match=r"torch\.distributed"):
        list(xlcli.train_events(corpus(), "m", preset="tiny", settings=small()))


def test_after_a_restart_a_new_run_goes_on_unless_it_replaces_another_one():
    text, restarted = corpus(), Ranks(restarts=1)

    def steps(folder, **options):
        events = train(small(train={"max_steps": 1}), [text], Path(folder), **options)
        return [event.step for event in events if isinstance(event, Step)]

    assert steps("m") == [1]
    assert steps("m", ranks=restarted) == []  # resumed, and its budget is spent
    assert steps("m", ranks=restarted, overwrite=True) == [1]
    with pytest.raises(xlcli.ConfigError, match="holds a model"):
        steps("m")
    assert steps("other", ranks=restarted) == [1]
