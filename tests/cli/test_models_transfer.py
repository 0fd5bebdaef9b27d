import json
import sys
from pathlib import Path

import pytest


def test_a_model_goes_away_and_comes_back(run, model):
    done = run("models", "push", "tiny", "far/tiny")
    assert (done.code, "--with-text" in done.err) == (0, True), done.err
    assert not Path("far/tiny/valid.txt").exists()
    done = run("models", "pull", "far/tiny")
    assert (done.code, "models/tiny exists" in done.err) == (2, True)
    done = run("models", "pull", "far/tiny", "back", "--json")
    assert json.loads(done.out)["folder"] == "models/back"
    assert run("generate", "-m", "back", "a", "-n", "2").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["push", "tiny"], 2, "xlcli models push NAME URL"),
        (["push", "tny", "far"], 3, "Did you mean tiny?"),
        (["pull", "nowhere/at-all"], 3, "there is no model at nowhere/at-all"),
        (["pull", "memory://"], 2, "Type xlcli models pull URL NAME."),
        (["pull", "a", "b", "c"], 2, "xlcli models pull URL NAME"),
        (["show", "tiny", "--with-text"], 2, "push only"),
    ],
)
def test_mistakes(run, model, arguments, code, message):
    done = run("models", *arguments)
    assert (done.code, message in done.err) == (code, True), done.err


def test_without_the_extra(run, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    done = run("models", "push", "tiny", "far/tiny")
    assert (done.code, "pip install 'xlcli[remote]'" in done.err) == (2, True), done.err
