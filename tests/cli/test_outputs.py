"""Outputs have a right suffix and are writable and nothing that is read; this is found before the work."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import TEXT, command, environment

STATE, TOKENS, PLOT = ("stream", "--state-out", ".png"), ("eval", "--per-token", ".jsonl"), ("eval", "--plot", ".png")
CURVE, PAGE, TABLE = ("train", "--plot", ".svg"), ("stream", "--html", ".html"), ("eval", "--csv", ".csv")
WORDS = ("eval", "--words", ".tsv")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.png"
    path.write_bytes(TEXT)
    return path


def renamed(text, suffix):
    """The text in a file with this suffix."""
    return text if suffix == text.suffix else text.rename(text.with_suffix(suffix))


@pytest.fixture
def refused(run, without_torch):
    """Asserts that a command is refused before torch is imported, with this in its message."""

    def refused(said, *arguments, code=2):
        done = run(*arguments)
        assert (done.code, said in done.err) == (code, True), done.err

    return refused


@pytest.mark.parametrize(("name", "option", "suffix"), [STATE, TOKENS, WORDS, TABLE, PLOT, CURVE, PAGE])
@pytest.mark.parametrize("alias", ["itself", "link", "hard link"])
def test_an_output_that_is_an_input(name, option, suffix, alias, refused, model, text):
    other = text = renamed(text, suffix)
    if alias != "itself":
        other = text.with_name(f"other{suffix}")
        (os.symlink if alias == "link" else os.link)(text, other)
    refused("input", name, text, option, other)
    assert text.read_bytes() == TEXT


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "valid.txt"])
@pytest.mark.parametrize("name", ["stream", "generate"])
def test_a_state_over_the_model(name, file, refused, model):
    before = (model / file).read_bytes()
    refused("input", name, "--state-out", model / file)
    assert (model / file).read_bytes() == before


@pytest.mark.parametrize(("name", "option", "suffix"), [TOKENS, WORDS, TABLE, PLOT, CURVE, PAGE])
@pytest.mark.parametrize("file", ["thesis", "thesis.txt", "thesis.json", "thesis.csv.gz", "csv", "thesis.feather"])
def test_another_suffix(name, option, suffix, file, refused, model, text):
    refused(suffix, name, text, option, file)
    assert not Path(file).exists()


def test_nothing_that_is_read_is_replaced(run, model, text):
    state, curve = Path("a.csv"), model / "metrics.jsonl"
    assert run("stream", text, "--state-out", state).code == 0
    curve.write_text("{}")
    before = {path: path.read_bytes() for path in (state, curve, text)}
    for arguments in (
        ("eval", text, "--csv", state),
        ("eval", text, "-m", "books", "--words", curve),
        ("stream", "--state-out", text),
    ):
        done = run(*arguments)
        assert (done.code, str(arguments[-1]) in done.err) == (2, True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("name", "option", "suffix"), [STATE, TOKENS, PLOT])
def test_outputs_that_cannot_be_written(name, option, suffix, refused, model, text):
    refused("folder", name, text, option, _folder(f"a{suffix}"))
    refused(f"absent/out{suffix}", name, text, option, f"absent/out{suffix}")
    frozen = Path(f"frozen{suffix}")
    frozen.touch(mode=0o444)
    refused("read-only", name, text, option, frozen)
    refused("device" if name == "stream" else "", "stream", text, "--state-out", "/dev/null")
    if os.access("/proc", os.W_OK):  # as root, for whom no folder is closed
        refused(f"/proc/out{suffix}", name, text, option, f"/proc/out{suffix}")


def _folder(name):
    Path(name).mkdir()
    return name


def test_files_with_a_right_suffix_are_replaced(run, model, text):
    Path("state").write_bytes(b"")
    for name in ("tokens.jsonl", "words.TSV", "scores.csv", "page.html", "loss.svg"):
        Path(name).write_bytes(b"anything")
    for _ in range(2):
        assert run("stream", text, "--state-out", "state", "--html", "page.html").code == 0
        assert run("eval", text, "--per-token", "tokens.jsonl", "--csv", "scores.csv").code == 0
        assert run("eval", text, "--words", "words.TSV", "--plot", "loss.svg").code == 0
    assert run("stream", text, "--state-in", "state", "--state-out", "state").code == 0
    assert Path("tokens.jsonl").read_bytes().count(b"\n") == len(TEXT)
    assert Path("words.TSV").read_bytes().startswith(b"document\t")
    assert Path("scores.csv").read_bytes().startswith(b"model,")
    assert Path("page.html").read_bytes().startswith(b"<!doctype html>")
    assert Path("loss.svg").read_bytes().startswith(b"<?xml")


def test_two_outputs_in_one_file(refused, model, text):
    Path("both.csv").touch()
    Path("hard.csv").hardlink_to("both.csv")
    for other in ("both.csv", "./both.csv", "hard.csv"):
        refused("also", "eval", text, "--per-token", "both.csv", "--csv", other)


@pytest.mark.parametrize("alias", ["same.csv", "./same.csv", "link.csv"])
def test_two_outputs_in_one_new_file(alias, refused, model, text):
    Path("link.csv").symlink_to("same.csv")
    refused("also", "eval", text, "--per-token", "same.csv", "--csv", alias)
    assert not Path("same.csv").exists()


def test_an_output_goes_where_its_link_leads(run, model, text):
    Path("real").mkdir()
    for name in ("state", "words.tsv", "loss.png", "page.html", "small.toml"):
        Path(name).symlink_to(f"real/{name}")
    for _ in range(2):
        assert run("stream", text, "--state", "state", "--html", "page.html").code == 0
        assert run("eval", text, "--words", "words.tsv", "--plot", "loss.png").code == 0
    assert run("stream", text, "--state-in", "state", "--state-out", "state").code == 0
    assert run("models", "copy", "small", "small.toml").code == 0
    assert len(list(Path("real").iterdir())) == 5
    assert all(Path(path.name).is_symlink() and path.stat().st_size for path in Path("real").iterdir())


def test_a_link_that_leads_nowhere_is_refused(refused, model, text):
    Path("loop.png").symlink_to("loop.png")
    Path("far.png").symlink_to("absent/far.png")
    for name in ("loop.png", "far.png"):
        refused(name, "eval", text, "--plot", name)


def test_a_device_takes_token_scores(run, model, text):
    assert run("eval", text, "--per-token", "/dev/null").code == 0
    assert not Path("/dev/null").is_file()


def test_a_pipe_waits_for_its_reader(model, text):
    pipe = text.with_name("pipe")
    os.mkfifo(pipe)
    with subprocess.Popen(command("eval", text, "-m", model, "--per-token", pipe), env=environment()) as writer:
        lines = pipe.read_bytes().splitlines()
    assert (writer.returncode, len(lines) > 1) == (0, True)


WAITING = """
import sys
from pathlib import Path
from xlcli.cli.outputs import output_file
from xlcli.cli.signals import Stop

with Stop():
    print("ready", flush=True)
    with output_file(Path(sys.argv[1])):
        pass
"""


def test_a_signal_ends_the_wait_for_the_reader_of_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", WAITING, pipe], env=environment(), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(100):  # the first ones may come before it waits
            writer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                writer.wait(0.1)
                break
        writer.kill()
    assert writer.returncode == -signal.SIGTERM


def test_a_stream_does_not_read_its_own_output(model, text):
    with text.open("rb") as source, text.open("ab") as target:
        done = subprocess.run(
            command("stream", "-m", model), env=environment(), stdin=source, stdout=target, stderr=-1, timeout=60
        )
    assert (done.returncode, text.read_bytes()) == (2, TEXT)
    assert b"output" in done.stderr
