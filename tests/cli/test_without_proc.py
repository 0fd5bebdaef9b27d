"""Commands on a system without `/proc` and `/sys`, such as macOS."""

import json

import pytest

from xlcli import machine

SMALL = ("--preset", "tiny", "--tokenizer", "bytes", "--batch-size", "2", "--segment-len", "8", "--device", "cpu")


@pytest.fixture(autouse=True)
def _no_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path / "nothing")


def test_a_plan_compares_its_need_with_the_machine(prose, run):
    done = run("train", prose, *SMALL, "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert 0 < plan["needed_bytes"] < plan["available_bytes"]


def test_a_model_is_trained_scored_measured_and_continues_a_text(prose, run):
    assert run("train", prose, *SMALL, "--max-steps", "2", "-o", "m").code == 0
    score = run("eval", prose, "-m", "m", "--limit", "200", "--json")
    assert score.code == 0, score.err
    assert json.loads(score.out)["peak_rss_bytes"] > 0
    assert run("bench", "-m", "m", "--seconds", "0.01", "--mem-len", "8").code == 0
    assert run("generate", "The", "-m", "m", "-n", "3").code == 0
