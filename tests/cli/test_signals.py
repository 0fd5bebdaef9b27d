"""The first signal requests a stop, a second SIGINT exits; ignored signals stay ignored; a silent pipe is no delay."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from programs import TEXT, command, environment

from tests.variants import thinned
from xlcli.cli.pipe import OutputStream, portions
from xlcli.cli.signals import Stop
from xlcli.text.formats import text_of

WORK = """
import os, sys, time
from xlcli.cli.signals import Stop
from xlcli.text.formats import text_of
with Stop(lambda: os.write(1, stop.message.encode() + b"\\n")) as stop:
    print("ready", flush=True)
    end = time.monotonic() + 20
    while time.monotonic() < end and not (stop() and "{mode}" == "polite"):
        {busy}
    os.write(1, b"saved\\n")
    code = stop.exit_code
sys.exit(code)
"""
BUSY = "sum(range(10**6))"


@contextlib.contextmanager
def start(mode="polite", busy="time.sleep(0.01)", **options):
    child = subprocess.Popen(
        [sys.executable, "-c", WORK.format(mode=mode, busy=busy)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    with child:
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def test_a_signal_is_not_the_end_of_a_text():
    reader, writer = os.pipe()
    os.write(writer, b'{"text": "one"}\n{"te')
    with Stop(lambda: None) as stop:
        texts = text_of(portions(reader, stop, None), "text", None)
        assert next(texts) == b"one\n"
        os.kill(os.getpid(), signal.SIGTERM)
        assert next(texts) is None
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("busy", ["time.sleep(0.01)", BUSY])
def test_the_first_signal_asks_and_says_so_at_once(number, busy):
    with start(busy=busy) as child:
        sent = time.monotonic()
        child.send_signal(number)
        first = child.stdout.readline()
        assert time.monotonic() - sent < 1.0
        said, saved = sorted([first, child.stdout.readline()])  # printed by two threads
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        assert said.startswith(name.encode() + b": stopping")
        assert saved == b"saved\n"
        assert child.wait(10) == 128 + number
        assert child.stderr.read() == b""


def test_a_second_interrupt_leaves_at_once():
    with start(mode="stubborn", busy=BUSY) as child:
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline().startswith(b"SIGTERM")
        child.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert child.poll() is None
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
        assert time.monotonic() - sent < 1.0
        assert b"saved" not in child.stdout.read()


PAUSED = """
import sys
from xlcli.cli.signals import Stop
with Stop() as stop:
    for line in sys.stdin:
        print(stop.paused, flush=True)
"""


def test_a_pause_is_measured():
    # The system ignores SIGTSTP in a process group without a parent in another group, as that of nohup may be.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "process_group": 0}
    child = subprocess.Popen([sys.executable, "-c", PAUSED], env=environment(), **pipes)

    def paused():
        time.sleep(0.3)
        child.stdin.write("?\n")
        child.stdin.flush()
        return float(child.stdout.readline())

    with child:
        assert paused() == 0
        for number in (signal.SIGSTOP, signal.SIGTSTP):
            before, began = paused(), time.monotonic()
            child.send_signal(number)
            time.sleep(1.5)
            child.send_signal(signal.SIGCONT)
            took = time.monotonic() - began
            assert paused() - before == pytest.approx(took, abs=0.25)
        before = paused()
        child.send_signal(signal.SIGCONT)
        assert paused() - before < 0.25
        child.kill()


STARTS = {
    "python -m": ("-m", "xlcli", "--help"),
    "script": ("-c", "import sys; from xlcli.__main__ import main; sys.exit(main(['--help']))"),
}


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_at_the_start_prints_no_traceback(start):
    arguments = [sys.executable, "-X", "importtime", *STARTS[start]]
    for i in range(12):
        with subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            imported = []
            while imported[-1:] != [b"xlcli"]:
                imported.append(child.stderr.readline().split(b"|")[-1].strip())
            while b"signal" not in imported[-1]:
                imported.append(child.stderr.readline().split(b"|")[-1].strip())
            time.sleep(0.001 + 0.005 * i)  # Python itself prints a traceback before it has imported the program
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=30)
        assert not {b"typing", b"re", b"xlcli.cli", b"xlcli.errors"} & set(imported)
        assert b"Traceback" not in said
        assert child.returncode in (-signal.SIGINT, 130, 0)
        assert i > 2 or child.returncode != 0


STUBBORN = """
import sys, time
from importlib import import_module

def never_ends(*arguments, **options):
    print("at work", flush=True)
    while True:
        sum(range(10**6))

module, name = sys.argv[1].rsplit(":")
setattr(import_module(module), name, never_ends)
from xlcli.cli.entry import main
sys.exit(main(sys.argv[2:]))
"""


AT_WORK = [
    ("xlcli.training.checkpoint:save", "train models/tiny/valid.txt -o m --preset tiny"),
    ("xlcli.streaming:stream", "stream models/tiny/valid.txt"),
    ("xlcli.training.prepare:choose_tokenizer", "train models/tiny/valid.txt -o m"),
    ("xlcli.text.sources:_read_pipe", "train - -o m"),
    ("xlcli.evaluation:score_text", "eval"),
    ("xlcli.generation:generate", "generate a"),
]


@pytest.mark.parametrize("case", thinned(AT_WORK, AT_WORK[:2]), ids=" ".join)
def test_a_second_interrupt_ends_every_command_at_once(case, model):
    function, arguments = case
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, function, *arguments.split()], env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == b"at work\n"
        child.send_signal(signal.SIGINT)
        said = b""
        while b"Ctrl-C" not in said:
            said = child.stderr.readline()
            assert said
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert time.monotonic() - sent < 2


def test_an_ignored_signal_stays_ignored():
    with start(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as child:
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 143


def test_handlers_and_descriptors_are_given_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    descriptors = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        with Stop() as stop:
            assert not stop()
            assert stop.exit_code == 0
    assert {number: signal.getsignal(number) for number in before} == before
    assert len(list(Path("/dev/fd").iterdir())) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_portions_come_as_they_arrive_and_silence_is_reported_once():
    reader, writer = os.pipe()
    with Stop() as stop:
        pieces = portions(reader, stop, flush_ms=30)
        os.write(writer, b"one")
        assert next(pieces) == b"one"
        assert next(pieces) is None
        os.write(writer, b"two")
        assert next(pieces) == b"two"
        assert next(pieces) is None
        os.close(writer)
        assert next(pieces, "end") == "end"
    os.close(reader)


def test_a_signal_ends_a_silent_wait():
    reader, writer = os.pipe()
    with Stop() as stop:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        assert list(portions(reader, stop, flush_ms=None)) == [None]
        assert time.monotonic() - began < 2
        assert stop.exit_code == 143
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_stream_that_waits_saves_and_ends_on_a_signal(number, model, tmp_path):
    state = tmp_path / "memory.state"
    with subprocess.Popen(
        command("stream", "-m", model, "--state-out", state), env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        child.stdin.write(b"a line\nand half a")
        child.stdin.flush()
        assert child.stdout.readline().endswith(b"\ta line\n")
        child.send_signal(number)
        assert child.wait(20) == 128 + number
        assert number.name in child.stderr.read().decode()
    assert state.stat().st_size > 0


def test_a_stream_with_much_unscored_text_saves_and_ends_on_a_signal(model, tmp_path):
    state, text = tmp_path / "memory.state", "a line of one long document\n" * 150_000
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}))
    with subprocess.Popen(
        command("stream", tmp_path / "long.jsonl", "-m", model, "--emit", "stats", "--state-out", state),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as child:  # fmt: skip
        assert b"tokens" in child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 143
    assert state.stat().st_size > len(text) / 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "-"),
        ("generate", "-"),
        ("eval", "-"),
        ("train", "pipe"),
        ("train", "text", "--valid", "pipe"),
        ("eval", "pipe"),
        ("stream", "pipe"),
        ("generate", "--prompts", "pipe"),
    ],
    ids=" ".join,
)
def test_a_wait_for_standard_input_or_a_pipe_ends_on_a_signal(arguments, run, model):
    import torch  # noqa: F401  so that the signal meets the wait and not the import

    os.mkfifo("pipe")
    Path("text").write_bytes(TEXT * 40)
    reader, writer = os.pipe()
    saved = os.dup(0)
    os.dup2(reader, 0)
    try:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        done = run(*arguments)
        timer.join()
    finally:
        os.dup2(saved, 0)
        for descriptor in (reader, writer, saved):
            os.close(descriptor)
    assert done.code == 143
    assert "SIGTERM" in done.err
    assert ("pipe" in done.err) == ("pipe" in arguments)
    assert not Path("models/stdin/config.json").exists()


def full_pipe():
    """A pipe that takes no more bytes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


def test_a_stalled_reader_does_not_hold_up_a_stop():
    reader, writer = full_pipe()
    with os.fdopen(writer, "w") as stream, Stop() as stop:
        output = OutputStream(stream)
        output.stop = stop
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        output.write_bytes(b"a" * 10_000)
        output.write("more\n")
        assert time.monotonic() - began < 2
        assert output.discarded == 10_005
    os.close(reader)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_every_byte(blocking):
    reader, writer = full_pipe()
    os.set_blocking(writer, blocking)
    n_before, data, got = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ), os.urandom(200_000), bytearray()

    def read():
        time.sleep(0.2)
        while piece := os.read(reader, 5000):
            got.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        OutputStream(stream).write_bytes(data)
    thread.join()
    assert bytes(got[n_before:]) == data
    os.close(reader)


def test_a_stream_with_a_stalled_reader_saves_and_ends(model, tmp_path):
    text, state = tmp_path / "text", tmp_path / "state"
    text.write_bytes(b"a line\n" * 100)
    reader, writer = full_pipe()
    with subprocess.Popen(
        command("stream", "-v", "-m", model, text, "--state-out", state), env=environment(),
        stdout=writer, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        os.close(writer)
        assert child.stderr.readline().startswith(b"model tiny")
        time.sleep(2)  # by now it waits for its reader
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=30)[1].decode()
    assert child.returncode == 143
    assert "SIGTERM" in said
    assert state.stat().st_size > 0
    os.close(reader)


def test_descriptors_above_1024_are_read():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, limits[0]), max(2000, limits[1])))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1500)
    try:
        os.write(writer, b"text")
        os.close(writer)
        with Stop() as stop:
            assert list(portions(high, stop, flush_ms=None)) == [b"text"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(high)
        os.close(reader)
