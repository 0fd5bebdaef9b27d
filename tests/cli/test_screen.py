"""The terminal during a run: interrupts, resizing, the keyboard."""

import os
import re
import select
import signal
import sys
import time

import pyte
import pytest
from programs import Terminal, command

from xlcli.cli import render
from xlcli.cli.entry import main
from xlcli.cli.render import Screen
from xlcli.events import Progress

PLAIN = {"NO_COLOR": ""}
WORK = """
import sys, time
from xlcli.cli.render import Screen
from xlcli.events import Progress
screen = Screen()
with screen.stop() as stop:
    {first}
    while not (stop() and {polite}):
        {work}
        time.sleep(0.02)
    screen.model_text(b"", final=True)
print("end", flush=True)
sys.exit(stop.exit_code)
"""
LIVE = 'screen.progress(Progress("work", 5, 10, "B", 2.0))'
COLORED = 'screen.scored_line("1.0\\t", [(b"abc", 9.0), (b"\\n", 0.0)])'
MESSAGE = "Ctrl-C: stopping; press it again to exit at once"


def run(first="pass", work="pass", polite=True, **options):
    return Terminal(
        [sys.executable, "-c", WORK.format(first=first, work=work, polite=polite)], controlling=True, **PLAIN, **options
    )


def lines(terminal):
    return [line for line in terminal.text.split("\n") if line]


@pytest.mark.parametrize(
    ("first", "work", "before", "shown"),
    [
        ('screen.model_text(b"Once upon")', "pass", b"upon", ["Once upon^C", MESSAGE, "end"]),
        ('screen.say("reading")', "pass", b"reading", ["reading", "^C", MESSAGE, "end"]),
        ("pass", LIVE, b"work", [MESSAGE, "end"]),
        (COLORED, "pass", b"abc", ["bits of a word 0 4 8 12 16 20+", "1.0     abc", "^C", MESSAGE, "end"]),
    ],
)
def test_an_interrupt_starts_a_line(first, work, before, shown):
    terminal = run(first, work)
    terminal.read_until(before, 20)
    terminal.send(b"\x03")
    assert terminal.finish() == 130
    assert lines(terminal) == shown
    assert terminal.screen.cursor.x == 0


@pytest.mark.parametrize("dumb", [False, True])
@pytest.mark.parametrize("work", ["pass", LIVE, COLORED, 'screen.model_text(b"more ")'])
def test_a_second_interrupt_leaves_a_terminal_in_order(work, dumb):
    terminal = run('screen.say("begun")', work, polite=False, **({"TERM": "dumb"} if dumb else {}))
    terminal.read_until(b"begun", 20)
    terminal.send(b"\x03")
    terminal.read_until(b"Ctrl-C", 20)
    sent = time.monotonic()
    terminal.send(b"\x03")
    assert terminal.finish() == 130
    assert time.monotonic() - sent < 2
    assert terminal.screen.cursor.x == 0
    assert terminal.screen.cursor.attrs.fg == "default"
    assert not dumb or b"\x1b" not in terminal.received


def test_the_live_line_is_one_row_at_every_width():
    terminal = run('screen.say("begun")', LIVE)
    for columns in (80, 20, 50, 30, 80):
        terminal.resize(columns)
        terminal.received = b""
        terminal.read_until(b"work", 20)
        terminal.read(0.3)
        drawn = re.findall(r"work[^\x1b\r]*", terminal.received.decode())
        assert drawn
        assert all(len(line) < columns for line in drawn[1:])
        assert terminal.screen.cursor.x == 0
    terminal.send(b"\x03")
    assert terminal.finish() == 130
    assert lines(terminal) == ["begun", MESSAGE, "end"]


def test_a_line_that_a_narrower_terminal_has_broken_is_erased_whole(capfd, monkeypatch):
    monkeypatch.setattr(render, "REFRESH_SECONDS", 0.0)
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        screen = Screen()
        screen.progress(Progress("work", 5, 10, "B", 2.0))
        first = os.read(leader, 4096)
        screen.progress(Progress("work", 6, 10, "B", 2.0))
        second = os.read(leader, 4096)
    os.close(leader)
    assert first.endswith(b"\r")  # terminals keep the cursor at its character when they break lines
    assert second.startswith(b"\r\x1b[J")  # to the end of the screen


def test_nothing_is_drawn_where_the_user_types(model):
    terminal = Terminal(command("stream", "-m", model), controlling=True, **PLAIN)
    terminal.read_until(b"keyboard", 20)
    terminal.send(b"one line\n")
    terminal.read_until(rb"\d\.\d+\t", 60)
    terminal.send(b"half")
    terminal.read_until(b"half", 20)
    terminal.send(b"\x03")  # empties the buffers of the terminal
    assert terminal.finish() == 130
    shown = lines(terminal)
    assert shown[:2] == ["reading from the keyboard; end with Ctrl-D", "one line"]
    assert "half^C" in shown
    assert shown[shown.index("half^C") + 1] == MESSAGE
    assert "loading" not in terminal.received.decode()


def test_the_loading_line_goes_before_the_first_score(model, tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"a line\n")
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        assert main(["stream", str(tmp_path / "text"), "-m", str(model), "--color", "never"]) == 0
        terminal.write("END")
        terminal.flush()
        received = b""
        while not received.endswith(b"END"):
            received += os.read(leader, 65536)
    os.close(leader)
    screen = pyte.Screen(80, 24)
    pyte.ByteStream(screen).feed(received)
    assert b"loading the model" in received
    assert "loading" not in "".join(screen.display)
    assert re.match(r"\d\.\d+ +a line", screen.display[0])


def test_a_message_of_a_signal_comes_before_all_others(capsys):
    screen = Screen()
    with screen.stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        select.select([stop.fd], [], [])
        screen.say("totals")
        screen.interrupted()
    assert capsys.readouterr().err == "SIGTERM: stopping; Ctrl-C exits at once\ntotals\n"
