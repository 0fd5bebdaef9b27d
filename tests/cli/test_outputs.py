"""Outputs are no inputs, nothing of another kind, and writable; this is found before the work."""

import os
import subprocess
from pathlib import Path

import pytest
from programs import TEXT, command, environment

STATE, TOKENS, PLOT = ("stream", "--state-out"), ("eval", "--per-token"), ("eval", "--plot")
CURVE, PAGE = ("train", "--plot"), ("stream", "--html")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my.png"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def refused(run, without_torch):
    """Asserts that a command is refused before torch is imported, with this in its message."""

    def refused(said, *arguments, code=2):
        done = run(*arguments)
        assert (done.code, said in done.err) == (code, True), done.err

    return refused


@pytest.mark.parametrize(("name", "option"), [STATE, TOKENS, PLOT, CURVE, PAGE])
@pytest.mark.parametrize("alias", ["itself", "link", "hard link"])
def test_an_output_that_is_an_input(name, option, alias, refused, model, text):
    other = text
    if alias != "itself":
        other = text.with_name("other.png")
        (os.symlink if alias == "link" else os.link)(text, other)
    refused("input", name, text, option, other)
    assert text.read_bytes() == TEXT


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "valid.txt"])
@pytest.mark.parametrize("name", ["stream", "generate"])
def test_a_state_over_the_model(name, file, refused, model):
    before = (model / file).read_bytes()
    refused("input", name, "--state-out", model / file)
    assert (model / file).read_bytes() == before


@pytest.mark.parametrize(("name", "option"), [STATE, TOKENS, PLOT, CURVE, PAGE])
def test_a_file_of_another_kind(name, option, refused, model, text):
    other = text.with_name("thesis.png")
    other.write_bytes(b"my thesis")
    refused(str(other), name, text, option, other)
    assert other.read_bytes() == b"my thesis"


@pytest.mark.parametrize(("name", "option"), [STATE, TOKENS, PLOT])
def test_outputs_that_cannot_be_written(name, option, refused, model, text):
    refused("folder", name, text, option, text.parent if option != "--plot" else _folder("a.png"))
    refused("absent/out.png", name, text, option, "absent/out.png")
    frozen = Path("frozen.png")
    frozen.touch(mode=0o444)
    refused("read-only", name, text, option, frozen)
    refused("device" if name == "stream" else "", "stream", text, "--state-out", "/dev/null")
    if os.access("/proc", os.W_OK):  # as root, for whom no folder is closed
        refused("/proc/out.png", name, text, option, "/proc/out.png")


def _folder(name):
    Path(name).mkdir()
    return name


def test_own_files_and_forced_ones_are_replaced(run, model, text):
    Path("state").write_bytes(b"")
    Path("tokens").write_bytes(b"my thesis")
    for _ in range(2):
        assert run("stream", text, "--state-out", "state").code == 0
        assert run("eval", text, "--per-token", "tokens", "--force").code == 0
    assert run("eval", text, "--per-token", "tokens").code == 0
    assert run("stream", text, "--state-in", "state", "--state-out", "state").code == 0
    assert Path("tokens").read_bytes().count(b"\n") == len(TEXT)


def test_two_outputs_in_one_file(refused, model, text):
    Path("both.png").touch()
    refused("also", "eval", text, "--per-token", "both.png", "--plot", "both.png")


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("alias", ["same.png", "./same.png", "link.png"])
def test_two_outputs_in_one_new_file(alias, force, refused, model, text):
    Path("link.png").symlink_to("same.png")
    refused("also", "eval", text, "--per-token", "same.png", "--html", alias, *force)
    assert not Path("same.png").exists()


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


def test_a_pipe_without_a_reader_is_not_waited_for(run, model, text):
    pipe = text.with_name("pipe")
    os.mkfifo(pipe)
    assert run("eval", text, "--per-token", pipe).code == 4


def test_a_stream_does_not_read_its_own_output(model, text):
    with text.open("rb") as source, text.open("ab") as target:
        done = subprocess.run(
            command("stream", "-m", model), env=environment(), stdin=source, stdout=target, stderr=-1, timeout=60
        )
    assert (done.returncode, text.read_bytes()) == (2, TEXT)
    assert b"output" in done.stderr
