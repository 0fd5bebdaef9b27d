"""`generate -i`: lines are continued with the memory of all before them, in a pipe and on a terminal."""

import json
import signal
import time

import pytest
from programs import Terminal, command, process

GREEDY = ("generate", "-m", "tiny", "-n", "6", "-t", "0")


def texts(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def test_turns_equal_one_text_and_the_state_is_saved(run, model):
    answers = texts(process(*GREEDY, "-i", "--json", "--state-out", "s", input=b"one\ntwo\n\n"))
    assert len(answers) == 3
    first, second, third = answers
    parts = ["one" + first, "" if first.endswith("\n") else "\n", "two" + second]
    for given, answer in (("one", first), ("".join(parts[:2]) + "two", second), ("".join(parts), third)):
        assert json.loads(run(*GREEDY, given, "--json").out)["text"] == answer
    after = json.loads(run(*GREEDY, "x", "--state-in", "s", "--json").out)["text"]
    assert after == json.loads(run(*GREEDY, "".join([*parts, third, "x"]), "--json").out)["text"]
    again = texts(process(*GREEDY, "-i", "--json", "--state-in", "s", input=b"\n"))
    assert again == [json.loads(run(*GREEDY, "", "--state-in", "s", "--json").out)["text"]]


def test_the_generator_goes_on_from_turn_to_turn(model):
    command_line = ("generate", "-m", "tiny", "-n", "20", "--seed", "3", "-i", "--json")
    first, second = texts(process(*command_line, input=b"a\n\n"))
    assert texts(process(*command_line, input=b"a\n\n")) == [first, second]
    assert first != second


def test_a_pipe_gets_one_answer_after_the_other(run, model):
    done = process(*GREEDY, "-i", "one", input=b"two")
    assert (done.returncode, done.stderr) == (0, b"")
    first = run(*GREEDY, "one", "--no-prompt").out
    assert done.stdout.startswith(first)
    assert done.stdout.endswith(b"\n")


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
    assert "Ctrl-D ends" in terminal.text
    terminal.send(b"onw\x7fe\n")  # edited
    interrupt_answer(terminal)
    terminal.send(b"typed in vain\x03")
    terminal.received = b""
    terminal.read_until(rb"> $", 60)
    terminal.send(b"two\n")
    interrupt_answer(terminal)
    terminal.send(b"\x1b[A")  # history
    terminal.read_until(rb"two$", 60)
    terminal.send(b"\x15\x04")
    assert terminal.finish() == 0
    assert run("generate", "-m", "tiny", "-n", "3", "--state-in", "s").code == 0


def test_a_signal_at_the_prompt_saves_the_state(run, terminal):
    terminal.send(b"one\n")
    interrupt_answer(terminal)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.finish() == 143
    assert run("generate", "-m", "tiny", "-n", "3", "--state-in", "s").code == 0


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("arguments", [["-"], ["--num-samples", "2"]])
def test_what_a_conversation_cannot_have(run, model, arguments):
    done = run("generate", "-i", *arguments)
    assert (done.code, "--interactive" in done.err) == (2, True)
