"""Completion of commands, options and values, as shells ask for it."""

import pytest
from programs import COMMANDS, process

WORDS = [
    ("xlcli ", list(COMMANDS)),
    ("xlcli train --optimizer ", ["muon", "adamw"]),
    ("xlcli train --max-", ["--max-steps", "--max-tokens", "--max-time", "--max-restarts"]),
    ("xlcli models ", ["list", "presets", "show", "copy"]),
    ("xlcli models show --pl", ["--plot"]),
    ("xlcli --", ["--version", "--install-completion", "--show-completion", "--help"]),
]


@pytest.mark.parametrize(("words", "offered"), WORDS)
def test_words_are_completed(words, offered):
    asked = {"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = process(env=asked)
    assert (done.returncode, done.stderr, done.stdout.decode().split()) == (0, b"", offered)


def test_without_words_nothing_is_completed():
    done = process(env={"_XLCLI_COMPLETE": "complete_bash"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_shell_without_completion_is_a_usage_error(run, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "tcsh")
    assert run("--show-completion").code == 2
