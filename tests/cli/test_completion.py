"""Completion of commands, options and values, as shells ask for it."""

import os
import time

import pytest
from programs import COMMANDS, process

WORDS = [
    ("xlcli ", list(COMMANDS)),
    ("xlcli stream --emit ", ["lines", "words", "tokens", "stats", "none"]),
    ("xlcli train --max-", ["--max-steps", "--max-tokens", "--max-time"]),
    ("xlcli models ", ["list", "presets", "show", "copy"]),
    ("xlcli models show --pl", ["--plot"]),
    ("xlcli eval -m my", ["mynew", "myold"]),
    ("xlcli stream --model b", ["books"]),
    ("xlcli eval -m myold -m mynew -m bo", ["books"]),
    ("xlcli train --init my", ["mynew", "myold"]),
    ("xlcli train --preset me", ["medium"]),
    ("xlcli bench --preset me", ["medium"]),
    ("xlcli models show m", ["mynew", "myold", "medium"]),
    ("xlcli models copy boo", ["books"]),
    ("xlcli export my", ["mynew", "myold"]),
    ("xlcli eval -m nothing", []),
    ("xlcli --", ["--version", "--install-completion", "--show-completion", "--help"]),
]


def requested(run, monkeypatch, variables):
    """The result of the program with these variables, as a shell asks."""
    monkeypatch.setattr("sys.argv", ["xlcli"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return run()


@pytest.mark.parametrize(("words", "offered"), WORDS)
def test_words_are_completed(words, offered, run, untrained, monkeypatch):
    for name, age in (("myold", 100), ("mynew", 10)):
        os.utime(untrained(name) / "model.safetensors", (time.time() - age,) * 2)
    asked = {"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = requested(run, monkeypatch, asked)
    assert (done.code, done.err, done.out.decode().split()) == (0, "", offered)


def test_a_process_completes():
    asked = {"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": "xlcli stream --emit ", "COMP_CWORD": "3"}
    done = process(env=asked)
    assert (done.returncode, done.stderr, done.stdout.split()[:2]) == (0, b"", [b"lines", b"words"])


@pytest.mark.parametrize("request_", ["complete_bash", "complete_zsh", "complete_fish", "source_bash", "nonsense"])
@pytest.mark.parametrize("words", [{}, {"COMP_WORDS": "xlcli ", "COMP_CWORD": "x"}])
def test_a_request_without_the_words_of_a_shell_is_no_error(request_, words, run, monkeypatch):
    done = requested(run, monkeypatch, {"_XLCLI_COMPLETE": request_, **words})
    assert done.code == 0
    assert ("Traceback" in done.err, "bug" in done.err) == (False, False)


def test_a_shell_without_completion_is_a_usage_error(run, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "tcsh")
    assert run("--show-completion").code == 2
