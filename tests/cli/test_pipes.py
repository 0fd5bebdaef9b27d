"""Behavior of a Unix tool: closed readers, closed and full outputs, plain output without a terminal."""

import contextlib
import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
from programs import TEXT, command, environment, process, standard_input

from tests.interfaces import needs


def through_shell(script, *arguments):
    line = script.replace("XLCLI", " ".join(f"'{part}'" for part in command(*arguments)))
    return subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, timeout=120)


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train", "--print-config"], ["models"]], ids=" ".join)
@pytest.mark.parametrize("script", ["XLCLI | true; exit ${PIPESTATUS[0]}", "XLCLI >&-"], ids=["pipe", "closed"])
def test_a_reader_that_leaves_is_no_error(arguments, script):
    done = through_shell(script, *arguments)
    assert done.stderr == b""
    # A short text may fit in the pipe before the reader is gone.
    assert done.returncode == 141 or (done.returncode == 0 and "true" in script)


def test_a_stream_dies_of_sigpipe_quietly(model):
    done = through_shell("yes line | XLCLI | head -1; exit ${PIPESTATUS[1]}", "stream", "-m", model)
    assert done.returncode == 141
    assert done.stdout.endswith(b"\tline\n")
    assert done.stderr == b""


@needs("/dev/full")
def test_a_full_disk_is_reported(model):
    done = through_shell("XLCLI >/dev/full", "models")
    assert done.returncode == 4
    assert b"space" in done.stderr


def test_a_closed_error_output_does_no_harm(model):
    done = through_shell("XLCLI 2>&-", "eval", "-m", model, "--json")
    assert done.returncode == 0
    assert done.stdout.startswith(b"{")


def test_closed_input_is_an_empty_one(model):
    done = through_shell("XLCLI <&-", "stream", "-m", model)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "is_told"), [(["eval"], True), (["generate", "-n", "2"], True), (["eval", "-"], False)]
)
def test_a_pipe_that_is_not_read_is_noticed(arguments, is_told, model, run):
    with standard_input(b"A line.\n"):
        done = run(*arguments, "-m", model)
    assert done.code == 0
    assert ("standard input is not read" in done.err) == is_told


def test_a_pipe_of_the_shell_is_read(model):
    Path("text").write_bytes(TEXT * 4)
    done = through_shell("XLCLI <(head -c 50 text) <(tail -c +51 text) -q", "eval", "-m", model)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@contextlib.contextmanager
def pipes(*texts):
    """Names of pipes that hold these bytes and that their writers have closed, as a shell gives them for `<(...)`."""
    readers = []
    for text in texts:
        reader, writer = os.pipe()
        os.write(writer, text)
        os.close(writer)
        readers.append(reader)
    try:
        yield [f"/dev/fd/{reader}" for reader in readers]
    finally:
        for reader in readers:
            os.close(reader)


def test_a_pipe_named_as_a_file_is_read(model, run):
    text = TEXT * 4
    Path("text").write_bytes(text)
    of_model = ("-m", model, "-q")
    for data, arguments in (
        (text, ["eval", "text", "--json", *of_model]),
        (gzip.compress(text), ["stream", "text", "--json", *of_model]),
    ):
        command_, of_file, *more = arguments
        with pipes(data) as [name]:
            piped, filed = run(command_, name, *more), run(command_, of_file, *more)
        assert (piped.code, filed.code) == (0, 0), piped.err
        assert piped.out
        if command_ == "eval":
            assert json.loads(piped.out)["nats"] == json.loads(filed.out)["nats"]
        else:
            assert piped.out == filed.out


def test_pipes_are_prompts_and_texts_of_training(model, run):
    with pipes(b'{"prompt": "a"}\n') as [prompts]:
        done = run("generate", "-n", "2", "-m", model, "--prompts", prompts)
    assert done.code == 0, done.err
    assert done.out
    with pipes(TEXT * 8, TEXT * 4) as [text, valid]:
        done = run("train", text, "--valid", valid, "--preset", "tiny", "--init", "none", "--dry-run")
    assert done.code == 0, done.err
    assert done.out


@pytest.mark.parametrize("arguments", [["eval", "-m", "tiny", "-m", "other"], ["train", "--nproc", "2"]], ids=" ".join)
def test_a_pipe_is_not_read_twice(arguments, model, untrained, run):
    untrained("other")
    with pipes(b"text\n") as [name]:
        done = run(*arguments, name)
    assert (done.code, done.out) == (2, b"")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"LC_ALL": "C", "TERM": "", "COLUMNS": "20"}, marks=pytest.mark.exhaustive),
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_poor_environments(changes, model):
    done = process("stream", "-m", model, input="Grüße\n".encode(), env=changes)
    assert done.returncode == 0
    assert done.stdout.endswith("\tGrüße\n".encode())
    assert b"\x1b" not in done.stdout + done.stderr
