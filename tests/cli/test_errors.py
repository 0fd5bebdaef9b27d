"""Every kind of failure becomes one sentence and its exit code."""

import errno
import os
from pathlib import Path

import pytest

from xlcli import errors
from xlcli.cli import app

RAISED = [
    (errors.ConfigError("a.", "b."), 2, "xlcli: a.\n       b.\n"),
    (errors.DataError("a."), 3, "xlcli: a.\n"),
    (errors.StateError("a."), 3, "xlcli: a.\n"),
    (errors.CheckpointError("a."), 3, "xlcli: a.\n"),
    (errors.ResourceError("a."), 4, "xlcli: a.\n"),
    (errors.BusyError("a."), 5, "xlcli: a.\n"),
    (errors.DivergedError("a."), 6, "xlcli: a.\n"),
    (MemoryError(), 4, "RAM"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 4, "DefaultCPUAllocator"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), 4, "space"),
    (OSError(errno.EMFILE, "Too many open files", "x"), 4, "ulimit -n"),
    (OSError(errno.EFBIG, "File too large", "x"), 4, "ulimit -f"),
    (RuntimeError("can't start new thread"), 4, "ulimit -u"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), 3, "Permission"),
    (KeyError("x"), 1, "KeyError"),
    (KeyboardInterrupt(), 130, ""),
]


@pytest.mark.parametrize(("error", "code", "said"), RAISED, ids=lambda value: type(value).__name__)
def test_exit_code_and_sentence(error, code, said, run, monkeypatch):
    def fail(arguments):
        raise error

    monkeypatch.setattr(app, "run", fail)
    done = run()
    assert (done.code, done.out) == (code, b"")
    assert done.err.startswith("xlcli: ") == (code != 130)
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_traceback_is_shown_on_request(how, run, monkeypatch):
    def fail(arguments):
        raise KeyError("x")

    monkeypatch.setattr(app, "run", fail)
    if how == "variable":
        monkeypatch.setenv("XLCLI_DEBUG", "1")
    done = run("eval", *(["--debug"] if how == "flag" else []))
    assert done.code == 1
    assert "Traceback" in done.err
    assert "KeyError" in done.err


COMMANDS = ["train /dev/null", "eval", "generate a", "stream", "models", "models show x"]


@pytest.mark.parametrize("line", [*COMMANDS, "bench", "eval --help", "--version", "--help"])
def test_a_removed_working_folder(line, run, monkeypatch):
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    Path("../gone").rmdir()
    done = run(*line.split())
    needs_none = line.startswith("-") or line.endswith("--help")
    assert (done.code, "folder" in done.err) == ((0, False) if needs_none else (3, True))


def test_hostile_names_in_messages_are_shown(run, monkeypatch):
    def fail(arguments):
        raise errors.DataError("no \x1b]0;title\x07 file")

    monkeypatch.setattr(app, "run", fail)
    assert "\x1b" not in run().err


def test_a_line_break_in_a_name_begins_no_line_of_a_message(run):
    done = run("eval", "none\nxlcli: all is well")
    assert done.code == 3
    assert [line[:7] for line in done.err.splitlines()] == ["xlcli: ", "       "]


def test_a_width_of_thousands_of_digits_is_none(run, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1" * 5000)
    assert run("eval", "-m", model, "none").code == 3
    assert run("models").code == 0


@pytest.mark.parametrize(
    ("given", "contended", "spins"),
    [
        ({}, [False, False], "10000"),
        ({}, [True, False], "10000"),
        ({}, [True, True], "1000"),
        ({"GOMP_SPINCOUNT": "5"}, [True, True], "5"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, [True, True], None),
    ],
)
def test_waiting_threads_give_up_their_cpu_unless_the_user_says_how_they_wait(
    given, contended, spins, run, monkeypatch
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    now = iter(contended)
    monkeypatch.setattr("xlcli.machine.is_contended", lambda: next(now))
    assert run("--version").code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins
