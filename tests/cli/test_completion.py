"""Completion of commands, options, values, models and presets: as shells ask for it, and in the shells themselves."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from programs import COMMANDS, SOURCE, Terminal, process

from xlcli.cli import complete
from xlcli.presets import list_presets, models_folder

PRESETS = [preset.name for preset in list_presets()]
WORDS = [
    ("xlcli ", list(COMMANDS)),
    ("xlcli train --optimizer ", ["muon", "adamw"]),
    ("xlcli train --max-", ["--max-steps", "--max-tokens", "--max-time", "--max-restarts"]),
    ("xlcli train --preset ", PRESETS),
    ("xlcli train --init b", ["books"]),
    ("xlcli eval -m ", ["tiny", "books"]),
    ("xlcli stream --model t", ["tiny"]),
    ("xlcli eval --model ./mo", []),
    ("xlcli eval --device c", ["cpu", "cuda"]),
    ("xlcli models ", ["list", "presets", "show", "copy", "rm", "mv", "push", "pull"]),
    ("xlcli models show t", ["tiny", *(name for name in PRESETS if name.startswith("t") and name != "tiny")]),
    ("xlcli models show --pl", ["--plot"]),
    ("xlcli models --json rm ", ["tiny"]),
    ("xlcli models rm --pl", []),
    ("xlcli models rm ", ["tiny"]),
    ("xlcli cache ", ["prune"]),
    ("xlcli models rm tiny ", ["tiny"]),
    ("xlcli models mv ", ["tiny"]),
    ("xlcli models mv tiny ", []),
    ("xlcli completion ", ["bash", "zsh", "fish"]),
    ("xlcli --", ["--version", "--help"]),
]


def ask(words):
    return process(env={"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))})


@pytest.mark.parametrize(("words", "offered"), WORDS)
def test_words_are_completed(words, offered, model):
    done = ask(words)
    assert (done.returncode, done.stderr, done.stdout.decode().split()) == (0, b"", offered)


def test_a_name_in_two_places_is_offered_once():
    shutil.copytree(models_folder() / "books", "models/books", ignore=shutil.ignore_patterns("*.safetensors"))
    assert complete.models("bo") == [("books", "in ./models")]


def test_names_that_a_shell_would_interpret_are_not_offered(model):
    for name in (r"\$(touch PWN)", "$(touch PWN)", "`touch PWN`", "a b", "a\nb", "-rf", "a;b", "~", "a'b", "\x1b[2J"):
        folder = Path("models", name)
        folder.mkdir()
        (folder / "config.json").touch()
    assert ask("xlcli models rm ").stdout == b"tiny\n"
    assert ask("xlcli eval -m ").stdout == b"tiny\nbooks\n"


@pytest.mark.parametrize("words", ["xlcli eval -m ", "xlcli train --preset s", "xlcli models rm "])
def test_completion_answers_without_torch(words, model):
    refuse = Path("refuse")
    refuse.mkdir()
    for name in ("torch", "numpy", "sentencepiece", "safetensors"):
        (refuse / f"{name}.py").write_text("raise SystemExit('imported')")
    path = os.pathsep.join((str(refuse.absolute()), str(SOURCE)))
    done = process(env={"_XLCLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "9", "PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(run, shell, monkeypatch):
    done = run("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert b"_XLCLI_COMPLETE=complete_" + shell.encode() in done.out
    monkeypatch.setenv("SHELL", f"/usr/local/bin/{shell}")
    assert run("completion").out == done.out


def test_an_unknown_shell(run, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    done = run("completion")
    assert (done.code, done.out, "'tcsh'" in done.err) == (2, b"", True)


@pytest.fixture
def path(model):
    """Search path with the program, for a shell beside ./models."""
    program = Path("bin/xlcli")
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xlcli "$@"\n')
    program.chmod(0o755)
    return f"{program.parent.absolute()}{os.pathsep}{os.environ['PATH']}"


SHELLS = {
    "bash": (["bash", "--noprofile", "--norc", "-i"], b'eval "$(xlcli completion bash)"; echo ready$((1+1))\n'),
    "zsh": (
        ["zsh", "-f", "-i"],
        b'autoload -U compinit; compinit -D -u; eval "$(xlcli completion zsh)"; echo ready$((1+1))\n',
    ),
    "fish": (["fish", "--no-config", "-i"], b"xlcli completion fish | source; echo ready(math 1 + 1)\n"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_models_and_presets(shell, path):
    arguments, setup = SHELLS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal(arguments, controlling=True, PATH=path, PS1="> ")
    terminal.send(setup)
    terminal.read_until(rb"ready2", 60)
    for typed, completed in ((b"eval -m ti", "eval -m tiny"), (b"train --preset small-al", "--preset small-alibi")):
        terminal.send(b"xlcli " + typed + b"\t")
        terminal.wait_for(completed, 60)
        terminal.send(b"\x15")
    terminal.send(b"exit\n")
    terminal.finish()


@pytest.mark.parametrize("shell", SHELLS)
def test_no_shell_runs_code_from_the_name_of_a_folder(shell, path):
    arguments, setup = SHELLS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("\\$(touch PWN)", "$(touch PWN)", "\\`touch PWN`", "tiny2"):
        Path("models", name).mkdir()
        (Path("models", name) / "config.json").touch()
    terminal = Terminal(arguments, controlling=True, PATH=path, PS1="> ")
    terminal.send(setup)
    terminal.read_until(rb"ready2", 60)
    terminal.send(b"xlcli models rm \t")
    terminal.wait_for("models rm tiny", 60)  # the common beginning of all names offered
    terminal.send(b"\x15exit\n")
    terminal.finish()
    assert not Path("PWN").exists()
