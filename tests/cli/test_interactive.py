"""`generate -i`: lines are continued with the memory of all before them, in a pipe and on a terminal."""

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from programs import Terminal, command, environment

GREEDY = ("generate", "-m", "tiny", "-n", "6", "-t", "0")


@pytest.fixture
def typed(run, model, monkeypatch):
    """Runs a command in this process with this standard input, which is no terminal."""

    def typed(data, *arguments, stdin=io.BytesIO):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stdin(data)))
        return run(*arguments)

    return typed


def texts(done):
    assert done.code == 0, done.err
    return [json.loads(line)["text"] for line in done.out.splitlines()]


def test_turns_equal_one_text_and_the_state_is_saved(run, typed):
    answers = texts(typed(b"one\ntwo\n\n", *GREEDY, "-i", "--json", "--state-out", "s"))
    assert len(answers) == 3
    first, second, third = answers
    parts = ["one" + first, "" if first.endswith("\n") else "\n", "two" + second]
    for given, answer in (("one", first), ("".join(parts[:2]) + "two", second), ("".join(parts), third)):
        assert json.loads(run(*GREEDY, given, "--json").out)["text"] == answer
    after = json.loads(run(*GREEDY, "x", "--state-in", "s", "--json").out)["text"]
    assert after == json.loads(run(*GREEDY, "".join([*parts, third, "x"]), "--json").out)["text"]
    again = texts(typed(b"\n", *GREEDY, "-i", "--json", "--state-in", "s"))
    assert again == [json.loads(run(*GREEDY, "", "--state-in", "s", "--json").out)["text"]]


def test_the_generator_goes_on_from_turn_to_turn(typed):
    arguments = ("generate", "-m", "tiny", "-n", "20", "--seed", "3", "-i", "--json")
    first, second = texts(typed(b"a\n\n", *arguments))
    assert texts(typed(b"a\n\n", *arguments)) == [first, second]
    assert first != second


def test_a_pipe_gets_one_answer_after_the_other(run, typed):
    done = typed(b"two", *GREEDY, "-i", "one")
    assert (done.code, done.err) == (0, "")
    first = run(*GREEDY, "one", "--no-prompt").out
    assert done.out.startswith(first)
    assert done.out.endswith(b"\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_lines_of_a_pipe_ends_the_command_and_saves_the_state(run, typed, number):
    class Interrupted(io.BytesIO):
        def readline(self, *size):
            return super().readline(*size) or os.kill(os.getpid(), number)

    done = typed(b"one\n", *GREEDY, "-i", "--json", "--state-out", "s", stdin=Interrupted)
    assert (done.code, len(done.out.splitlines())) == (128 + number, 1)
    assert run("generate", "-m", "tiny", "-n", "3", "--state-in", "s").code == 0


@pytest.mark.exhaustive
def test_an_interrupt_ends_a_process_that_reads_a_pipe(model):
    with subprocess.Popen(
        command(*GREEDY, "-i", "--json", "--state-out", "s"), env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        child.stdin.write(b"one\nhalf a li")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["tokens"] == 6
        time.sleep(0.2)  # until it waits for the end of the line
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.communicate() == (b"", b"")
    assert Path("s").exists()


def test_prompts_are_not_among_the_answers_in_a_file(run, model, monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower) as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        os.write(leader, b"one\ntwo\n\x04")
        done = run(*GREEDY, "-i", "--json")
    os.close(leader)
    assert len(texts(done)) == 2
    assert done.err.endswith("\n> > > \n")


def test_a_line_without_end_is_refused_and_the_state_is_saved(typed):
    done = typed(b"one\n" + b"a" * (2**20 + 1), *GREEDY, "-i", "--state-out", "s")
    assert (done.code, "1 MiB" in done.err) == (3, True)
    assert Path("s").stat().st_size > 0


def test_closed_input_is_refused(run, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    done = run(*GREEDY, "-i")
    assert (done.code, "closed" in done.err) == (3, True)


@pytest.fixture
def terminal(model):
    """A conversation on a terminal, waiting for the first line; its answers end by Ctrl-C only."""
    shown = Terminal(
        command("generate", "-i", "-m", "tiny", "-n", "1M", "--seed", "1", "--state-out", "s"), controlling=True
    )
    shown.read_until(rb"> $", 60)
    yield shown
    shown.process.kill()
    shown.process.wait()


def interrupt_answer(terminal):
    before = len(terminal.received)
    end = time.monotonic() + 60
    while len(terminal.received) < before + 200 and time.monotonic() < end:
        assert terminal.read(0.1)
    terminal.send(b"\x03")
    time.sleep(0.1)
    terminal.received = b""
    terminal.read_until(rb"> $", 60)


def test_interrupts_stop_answers_and_the_conversation_goes_on(run, terminal):
    assert "Ctrl-D" in terminal.text
    terminal.send(b"onw\x7fe\n")  # edited
    interrupt_answer(terminal)
    terminal.send(b"typed in vain")
    terminal.read_until(b"in vain$", 60)
    time.sleep(0.2)  # readline misses a signal that arrives before it waits for a key
    terminal.received = b""
    terminal.send(b"\x03")
    terminal.read_until(rb"> $", 60)
    terminal.send(b"two\n")
    interrupt_answer(terminal)
    terminal.send(b"\x1b[A")  # history
    terminal.read_until(rb"two$", 60)
    terminal.send(b"\x15\x04")
    assert terminal.finish() == 0
    assert run("generate", "-m", "tiny", "-n", "3", "--state-in", "s").code == 0


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("arguments", [["-"], ["--num-samples", "2"]])
def test_what_a_conversation_cannot_have(run, model, arguments):
    done = run("generate", "-i", *arguments)
    assert (done.code, "--interactive" in done.err) == (2, True)
