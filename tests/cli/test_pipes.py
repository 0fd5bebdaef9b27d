"""Behavior of a Unix tool: closed readers, closed and full outputs, plain output without a terminal."""

import json
import subprocess
from pathlib import Path

import pytest
from programs import TEXT, command, environment, process


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
def test_a_pipe_that_is_not_read_is_noticed(arguments, is_told, model):
    done = process(*arguments, "-m", model, input=b"A line.\n")
    assert done.returncode == 0
    assert (b"standard input is not read" in done.stderr) == is_told


def test_a_pipe_named_as_a_file_is_read(model):
    Path("text").write_bytes(TEXT * 4)
    process("compress", "text", "-m", model, "-o", "text.xl")
    for script, arguments, of_file in (
        ("XLCLI <(cat text) -m tiny -q --json", ["eval"], ["eval", "text", "-m", model, "--json"]),
        ("XLCLI <(head -c 50 text) <(tail -c +51 text) -m tiny -q", ["eval"], None),
        ("XLCLI <(gzip -c text) -m tiny -q --json", ["stream"], ["stream", "text", "-m", model, "--json"]),
        ("XLCLI <(cat text) -m tiny -q", ["compress"], ["compress", "text", "-m", model, "-o", "-"]),
        ("XLCLI <(cat text.xl) -m tiny -q -o -", ["decompress"], ["decompress", "text.xl", "-m", model, "-o", "-"]),
        ('XLCLI -n 2 -m tiny --prompts <(echo \'{"prompt": "a"}\')', ["generate"], None),
        ("XLCLI <(cat text text) --valid <(cat text) --preset tiny --init none --dry-run", ["train"], None),
    ):
        done = through_shell(script, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        if of_file is not None and arguments != ["eval"]:
            assert done.stdout == process(*of_file).stdout
        elif of_file is not None:
            scores = [json.loads(out)["nats"] for out in (done.stdout, process(*of_file).stdout)]
            assert scores[0] == scores[1]


@pytest.mark.parametrize("arguments", [["eval", "-m", "tiny", "-m", "other"], ["train", "--nproc", "2"]], ids=" ".join)
def test_a_pipe_is_not_read_twice(arguments, model, untrained):
    untrained("other")
    done = through_shell("XLCLI <(echo text)", *arguments)
    assert done.returncode == 2
    assert done.stdout == b""


@pytest.mark.parametrize(
    "changes", [{"LC_ALL": "C", "TERM": "", "COLUMNS": "20"}, {"PYTHONIOENCODING": "ascii"}], ids=str
)
def test_poor_environments(changes, model):
    done = process("stream", "-m", model, input="Grüße\n".encode(), env=changes)
    assert done.returncode == 0
    assert done.stdout.endswith("\tGrüße\n".encode())
    assert b"\x1b" not in done.stdout + done.stderr
