import json
import sys
from pathlib import Path

import fsspec
import pytest

from xlcli.config import change
from xlcli.store.layout import read_config, write_config


def test_a_model_goes_away_and_comes_back(run, model):
    done = run("models", "push", "tiny", "far/tiny")
    assert (done.code, "--with-text" in done.err) == (0, True), done.err
    assert not Path("far/tiny/valid.txt").exists()
    done = run("models", "pull", "far/tiny")
    assert (done.code, "models/tiny exists" in done.err) == (2, True)
    done = run("models", "pull", "far/tiny", "back", "--json")
    assert json.loads(done.out)["folder"] == "models/back"
    assert run("generate", "-m", "back", "a", "-n", "2").code == 0


def test_a_pulled_model_of_separate_documents_is_used_like_others(run, model):
    path = model / "valid.documents"
    path.write_text("0\n9\n")
    write_config(model, change(read_config(model), {"train": {"reset_on_document": True}}))
    assert run("models", "push", "tiny", "far/tiny").code == 0
    assert run("models", "pull", "far/tiny", "./sub/tiny").code == 0
    assert run("models", "copy", "./sub/tiny", "models/copy").code == 0
    assert run("models", "push", "./sub/tiny", "far/again", "--with-text").code == 0
    done = run("eval", "-m", "./sub/tiny")
    assert (done.code, "keeps no valid text" in done.err) == (3, True), done.err
    assert run("eval", model / "valid.txt", "-m", "./sub/tiny", "--limit", "100").code == 0
    assert run("models", "push", "tiny", "far/text", "--with-text").code == 0
    assert run("models", "pull", "far/text").code == 0
    done = run("eval", "-m", "models/text", "--limit", "100")
    assert (done.code, "2 documents" in done.err) == (0, True), done.err


def test_a_model_is_pulled_to_a_path(run, model, tmp_path):
    assert run("models", "push", "tiny", "far/tiny").code == 0
    for path in ("./sub/x", str(tmp_path / "y"), "../" + tmp_path.name + "-z"):
        done = run("models", "pull", "far/tiny", path)
        assert (done.code, Path(path, "model.safetensors").is_file()) == (0, True), done.err


def test_an_unfinished_push_is_replaced_with_force(run, model):
    assert run("models", "push", "tiny", "far/tiny").code == 0
    Path("far/tiny/model.safetensors").unlink()
    done = run("models", "push", "tiny", "far/tiny")
    assert (done.code, "unfinished push" in done.err, "--force" in done.err) == (2, True, True), done.err
    assert run("models", "push", "tiny", "far/tiny", "--force").code == 0
    assert run("models", "pull", "far/tiny", "back").code == 0


def test_user_information_is_not_shown(run, model):
    url = "memory://me:secret@host/tiny"
    done = run("models", "push", "tiny", url, "--json")
    assert (done.code, json.loads(done.out)["url"]) == (0, "memory://host/tiny")
    done = run("models", "push", "tiny", url)
    assert (done.code, "memory://host/tiny" in done.err, "secret" in done.err) == (2, True, False)
    done = run("models", "pull", url + ".", ".")
    assert (done.code, "secret" in done.err) == (2, False)
    fsspec.filesystem("memory").store.clear()


def test_the_cause_of_a_failure_is_shown_with_debug(run, model, monkeypatch):
    def fail(self, path, **options):
        raise ConnectionError("no answer")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
    done = run("models", "pull", "memory://host/tiny", "back", "--debug")
    assert (done.code, "ConnectionError: no answer" in done.err) == (4, True), done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["push", "tiny"], 2, "xlcli models push NAME URL"),
        (["push", "tny", "far"], 3, "Did you mean tiny?"),
        (["pull", "nowhere/at-all"], 3, "there is no model at nowhere/at-all"),
        (["pull", "memory://"], 2, "Type xlcli models pull URL NAME."),
        (["pull", "far/.tiny"], 2, "Type xlcli models pull URL NAME."),
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
