"""Output of a command: results to stdout, progress and messages to stderr.

Progress is one live line on a terminal and a plain line every few seconds elsewhere. Model text is never interpreted as
markup: a pipe receives its exact bytes, a terminal receives it through `xlcli.cli.terminal`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from xlcli.cli.objects import to_json
from xlcli.cli.outputs import Sink
from xlcli.cli.pipe import OutputStream
from xlcli.cli.run_report import progress_line, step_line
from xlcli.cli.signals import Stop
from xlcli.cli.terminal import Visible, clipped, columns, visible_json, wrapped
from xlcli.events import Notice, Progress, Step
from xlcli.files import STANDARD_INPUT, is_pipe
from xlcli.markup import color_step, legend, visible

REFRESH_SECONDS = 0.1  # minimum time between two updates of the live line
PLAIN_SECONDS = 10.0  # time between two plain lines; the first line comes after a tenth of it
FAREWELL_SECONDS = 0.2  # maximum wait of a process that ends at once for the output of another thread
COLORS = ("39", "32", "36", "35", "31", "1;31")
"""Colors of words by the steps of `markup.color_step`: of letters, green, cyan, magenta, red, bold red.

They follow the theme of the terminal and can be read on light and dark ground; blue and yellow often cannot."""
STYLES = {"warning": "33", "detail": "2"}  # style of messages by level: yellow and dim
_UNWRAPPED = "\x1b[?7l{}\x1b[?7h\r"  # live line: cut off at the width of the terminal, with the cursor at its beginning
_ERASE = "\r\x1b[J"  # erases the live line, all rows of it if the terminal has become narrower and has broken it


class _Pace:
    """Decides when a line of progress is due: on a live line often, else a plain line now and then."""

    def __init__(self, *, live: bool) -> None:
        self.live = live
        self._stage = ""
        self._next = time.monotonic() + PLAIN_SECONDS / 10

    def claim(self, stage: str) -> bool:
        """Returns whether a line of this stage may be shown now; then no other one may until some time has passed."""
        now = time.monotonic()
        is_new_stage = self.live and stage != self._stage
        if now < self._next and not is_new_stage:
            return False
        self._stage = stage
        self._next = now + (REFRESH_SECONDS if self.live else PLAIN_SECONDS)
        return True


class Screen:
    """stdout and stderr of a command. `hidden` hides progress and messages, as of all processes but the first."""

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        color: str | None = None,
        hidden: bool = False,
    ) -> None:
        self.json = json
        self.verbose = verbose

        # What is printed, and in which form.
        self._levels = set() if hidden else {"warning"}
        if not (hidden or quiet):
            self._levels.add("info")
        if verbose and not hidden:
            self._levels.add("detail")
        wants_no_color = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        is_plain = color == "never" or (color != "always" and wants_no_color)
        has_terminal = sys.stderr.isatty()
        self.on_terminal = sys.stdout.isatty() or color == "always"
        self.colored = self.on_terminal and not is_plain
        self._styles = STYLES if has_terminal and not is_plain else {}
        self._pace = _Pace(live=has_terminal and os.environ.get("TERM") not in ("dumb", "unknown"))

        # What has been printed so far.
        self._out = OutputStream(sys.stdout)
        self._err = OutputStream(sys.stderr)
        self._lock = threading.RLock()  # the thread that watches for signals prints, too
        self._line = ""  # the live line
        self._visible = Visible()
        self._announced = False  # the message of a signal
        self._types = False  # the user, whose typing progress would disturb
        self._legend_due = has_terminal and not quiet

    @contextmanager
    def stop(self, *, announced: bool = False) -> Iterator[Stop]:
        """Stop request by signal, after which output does not wait for a reader that has stalled.

        At its end the live line is removed. `announced`: the signal needs no message.
        """
        self._announced = announced
        with Stop(self.interrupted, self.farewell) as stop:
            self._out.stop = self._err.stop = stop
            try:
                yield stop
            finally:
                self.clear()
                if self._out.discarded:
                    lost = f"its last {self._out.discarded:,} bytes are lost"
                    self.say(f"standard output was not read; {lost}", "warning")
        self._out.stop = self._err.stop = None

    def expect_pipes(self, names: Sequence[str]) -> None:
        """Names pipes that are waited for. Shows no progress while one is a keyboard."""
        self._types = "-" in names and os.isatty(0)
        if self._types:
            self.say("reading from the keyboard; end with Ctrl-D")
        for name in names:
            if name != "-" and is_pipe(name):
                self.say(f"reading the pipe {name} to its end")

    def drive(self, events: Iterable[Any], *sinks: Sink) -> None:
        """Shows notices and progress, adds other events to each sink, and ends all sinks, even if one fails."""
        with ExitStack() as ending:
            try:
                for event in events:
                    if not self.shows(event):
                        for sink in sinks:
                            sink.add(event)
            except BaseException:
                for sink in reversed(sinks):
                    ending.callback(sink.discard)
                raise
            for sink in reversed(sinks):
                ending.callback(sink.close)

    def interrupted(self) -> None:
        """Prints the message of a signal, once and before all other output, in a line after the ^C of a terminal."""
        stop = self._out.stop
        with self._lock:
            if stop is not None and stop() and not self._announced:
                self._announced = True
                if sys.stderr.isatty() and not self._line:
                    self._end_line()
                self.clear()
                self.say(stop.message)

    def _end_line(self) -> None:
        """Puts the cursor of the terminal, or the end of a shared file, at the start of a line."""
        stream = self._out if self._out.shares_file(self._err) else self._err
        stream.write("\n")

    def farewell(self) -> str:
        """Text that leaves the terminal in order when the process ends at once; nothing is printed after it."""
        if not sys.stderr.isatty():
            return ""
        self._lock.acquire(timeout=FAREWELL_SECONDS)  # and kept; fails if its holder waits for a stalled reader
        if self._line:
            return _ERASE
        return "\x1b[0m\n" if self.colored else "\n"

    def clear(self) -> None:
        """Removes the live line."""
        with self._lock:
            if self._line:
                self._line = ""
                self._err.write(_ERASE)

    def say(self, text: str, level: str = "info") -> None:
        """Prints a message to stderr: `warning` always, `info` unless quiet, `detail` only if verbose."""
        if level not in self._levels:
            return
        if level == "warning":
            text = f"warning: {text}"
        text = wrapped(visible(text), columns(sys.stderr))
        if level in self._styles:
            text = f"\x1b[{STYLES[level]}m{text}\x1b[m"
        with self._lock:
            self.interrupted()
            line = self._line
            self.clear()
            if not self._is_free():
                self._end_line()
            self._err.write(text + "\n")
            self._draw(line)

    def not_written(self, path: str) -> None:
        """Warns that a stop has prevented an output; a device or pipe has got what there was."""
        if Path(path).is_file() or not Path(path).exists():
            self.say(f"{path} was not written: the evaluation was stopped", "warning")

    def shows(self, event: object) -> bool:
        """Shows an event of a workflow if it is a notice or progress; True if it is."""
        if isinstance(event, Notice):
            self.say(event.text, event.level)
        elif isinstance(event, Progress):
            self.progress(event)
        else:
            return False
        return True

    def wait(self, text: str) -> None:
        """Shows the current activity while there is no progress to count; on a terminal only."""
        if self._pace.live:
            self._show(f"{text} ...", text)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        self.wait(text)
        try:
            yield
        finally:
            self.clear()

    def progress(self, event: Progress) -> None:
        self._types = self._types and event.stage == f"reading {STANDARD_INPUT}"
        self._show(progress_line(event), event.stage)
        if event.total is not None and event.done >= event.total:
            self.clear()

    def step(self, event: Step) -> None:
        self._show(step_line(event), "training")

    def _show(self, line: str, stage: str) -> None:
        """Shows a line of progress at its time."""
        is_wanted = "info" in self._levels and not self._types
        if not is_wanted or not self._pace.claim(stage):
            return
        if self._pace.live:
            self._draw(line)
        else:
            self.say(line)

    def _is_free(self) -> bool:
        """True unless text on stdout stops within the line to which stderr would write."""
        return self._out.at_line_start or not self._out.shares_file(self._err)

    def _draw(self, line: str) -> None:
        """Replaces the live line; not beside text that stops within a line."""
        with self._lock:
            self.clear()
            if line and self._is_free():
                self._line = line
                self._err.write(_UNWRAPPED.format(clipped(visible(line), (columns(sys.stderr) or 80) - 1)))

    @property
    def columns(self) -> int | None:
        """Width of the terminal in cells; None if stdout is not a terminal."""
        return columns(sys.stdout)

    def write(self, data: bytes) -> None:
        """Writes exact bytes to stdout."""
        with self._lock:
            self.interrupted()
            self.clear()
            self._out.write_bytes(data)

    def print(self, text: str, *, json: bool = False) -> None:
        """Prints text or lines of JSON to stdout, with control characters escaped on a terminal."""
        if self.on_terminal:
            escape = visible_json if json else visible
            text = escape(text)
        self.write(text.encode("utf-8", "surrogateescape"))

    def report(self, text: str) -> None:
        """Prints text to stdout as `print`, with lines that fit a terminal."""
        self.print(wrapped(text, self.columns))

    def object(self, value: Any) -> None:
        """Prints one line of JSON to stdout, with control characters escaped on a terminal."""
        self.print(to_json(value) + "\n", json=True)

    def model_text(self, data: bytes, *, final: bool = False) -> None:
        """Writes model text: exact bytes to a pipe, escaped to a terminal, where `final` ends the last line."""
        if not self.on_terminal:
            self.write(data)
            return
        text = self._visible.feed(data, final=final)
        with self._lock:
            ends_line = text.endswith("\n") or (not text and self._out.at_line_start)
            if final and not ends_line:
                text += "\n"
            self.write(text.encode())

    def scored_line(self, label: str, spans: Sequence[tuple[bytes, float]]) -> None:
        """Writes a label and the tokens (text, bits) of a line. If colored, a legend precedes the first line."""
        if not self.colored:
            self.write(label.encode())
            self.model_text(b"".join(text for text, _ in spans))
            return
        if self._legend_due:
            self._legend_due = False
            self.clear()
            self._err.write(f"bits of a word {legend(_paint)}\n")
        line = label
        for word, bits in _words([(self._visible.feed(token), bits) for token, bits in spans]):
            line += _paint(word, bits)
        self.write(line.encode())


def _words(tokens: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Words of a line, each with the sum of the bits of its tokens.

    A word begins with a token that begins with a blank, or ends the line: (" th", 1.0), ("e", 2.0), (" end", 4.0) are
    (" the", 3.0), (" end", 4.0).
    """
    word, word_bits = "", 0.0
    for text, bits in tokens:
        is_boundary = text[:1] in (" ", "\t", "\n")
        if is_boundary and word.strip():
            yield word, word_bits
            word, word_bits = "", 0.0
        word += text
        word_bits += bits
    yield word, word_bits


def _paint(text: str, bits: float) -> str:
    """A word in the color of its bits; blanks have none."""
    if not text.strip():
        return text
    return f"\x1b[{COLORS[color_step(bits)]}m{text}\x1b[m"
