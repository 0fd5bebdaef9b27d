"""Output of a command: results to stdout, progress and messages to stderr. The only file that imports rich.

Progress is one live line on a terminal and a plain line every few seconds elsewhere. Model text is never interpreted as
markup: a pipe receives its exact bytes, a terminal receives it through `xlcli.cli.terminal`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from xlcli.cli import report
from xlcli.cli.palette import Palette, terminal_theme
from xlcli.cli.pipe import Output
from xlcli.cli.terminal import Visible, visible, visible_json
from xlcli.events import Notice, Progress, Step

if TYPE_CHECKING:
    from xlcli.cli.signals import Stop

REFRESH_SECONDS = 0.1
"""Minimum time between two updates of the live line."""
PLAIN_SECONDS = 10.0
"""Time between two plain lines; the first line comes after a tenth of it."""


class Screen:
    """stdout and stderr of a command; a context manager that restores the terminal.

    Args:
        json: Whether results are JSON.
        quiet: Hide progress and all messages but warnings.
        verbose: Show details.
        no_progress: Hide progress.
        color: `auto`, `always` or `never`; None is `auto`.
        theme: `dark`, `light` or `auto`, which asks the terminal; None is `auto`.
        backgrounds: Show surprisal as background, not as color of the letters.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        no_progress: bool = False,
        color: str | None = None,
        theme: Literal["auto", "dark", "light"] | None = None,
        backgrounds: bool = False,
    ) -> None:
        without = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        plain = color == "never" or (color != "always" and without)
        self.json = json
        self.verbose = verbose
        self.quiet = quiet
        self.on_terminal = sys.stdout.isatty() or color == "always"
        self.colored = self.on_terminal and not plain
        self._shows_progress = not (no_progress or quiet)
        self._out, self._err = Output(sys.stdout), Output(sys.stderr)
        self._console = Console(
            file=cast(TextIO, self._err), markup=False, highlight=False, emoji=False, no_color=plain
        )
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._drawn = 0.0
        self._next_plain = time.monotonic() + PLAIN_SECONDS / 10
        self._history: deque[float] = deque(maxlen=4096)
        self._visible = Visible()
        self._theme: Literal["auto", "dark", "light"] = theme or "auto"
        self._backgrounds = backgrounds
        self._at_line_start = True

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        if self._out.discarded:
            self.say(f"standard output was not read; its last {self._out.discarded:,} bytes are lost", "warning")

    def until(self, stop: Stop) -> Screen:
        """This screen; after a signal it does not wait for a reader that has stalled."""
        self._out.stop = self._err.stop = stop
        return self

    def clear(self) -> None:
        """Removes the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str, level: str = "info") -> None:
        """Prints a message to stderr: `warning` always, `info` unless quiet, `detail` only if verbose."""
        if level == "warning" or (self.verbose if level == "detail" else not self.quiet):
            style = "yellow" if level == "warning" else "dim" if level == "detail" else ""
            shown = Text(visible(f"warning: {text}" if level == "warning" else text), style=style)
            self._console.print(shown, soft_wrap=True)

    def notice(self, event: Notice) -> None:
        """Prints the notice of a workflow; a hint only beside text."""
        if event.level != "hint" or not self.json:
            self.say(event.text, event.level)

    def wait(self, text: str) -> None:
        """Shows the current activity while there is no progress to count; on a terminal only."""
        if self._is_live:
            self._show(f"{text} ...")

    def progress(self, event: Progress) -> None:
        """Shows the progress of a stage."""
        self._show(report.progress_line(event))
        if event.total is not None and event.done >= event.total:
            self.clear()

    def step(self, event: Step) -> None:
        """Shows the progress of training."""
        self._history.append(event.bits_per_byte)
        if self._is_live:
            self._show(report.step_line(event, tuple(self._history), self._console.width))
        else:
            self._show(report.step_line(event))

    def _show(self, line: str) -> None:
        now = time.monotonic()
        if not self._shows_progress:
            return
        if not self._is_live:
            if now >= self._next_plain:
                self._next_plain = now + PLAIN_SECONDS
                self.say(line)
        elif now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            text = Text(visible(line), no_wrap=True, overflow="ellipsis")
            if self._live is None:
                self._live = Live(text, console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(text, refresh=True)

    @property
    def columns(self) -> int | None:
        """Width of the terminal in cells; None if stdout is not a terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def confirm(self, question: str) -> bool:
        """Asks on stderr and reads a line of standard input; only `y` and `yes` confirm."""
        self.clear()
        self._err.write(visible(f"{question} [y/N] "))
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):
            self._err.write("\n")
        return answer.strip().lower() in ("y", "yes")

    def write(self, data: bytes) -> None:
        """Writes exact bytes to stdout."""
        self.clear()
        self._out.write_bytes(data)

    def print(self, text: str) -> None:
        """Prints text to stdout, with control characters escaped on a terminal."""
        self.write((visible(text) if self.on_terminal else text).encode("utf-8", "surrogateescape"))

    def object(self, value: Any) -> None:
        """Prints one line of JSON to stdout, with control characters escaped on a terminal."""
        text = report.to_json(value)
        # Bytes of file names that are not UTF-8 are lone surrogates, which `backslashreplace` turns into JSON escapes.
        self.write((visible_json(text) if self.on_terminal else text).encode("utf-8", "backslashreplace") + b"\n")

    def model_text(self, data: bytes, *, final: bool = False) -> None:
        """Writes model text: exact bytes to a pipe, escaped to a terminal, where `final` ends the last line."""
        if not self.on_terminal:
            self.write(data)
            return
        text = self._visible.feed(data, final=final)
        if text:
            self._at_line_start = text.endswith("\n")
        if final and not self._at_line_start:
            text += "\n"
            self._at_line_start = True
        self.write(text.encode())

    def scored_line(self, label: str, spans: Sequence[tuple[bytes, float]]) -> None:
        """Writes a label and tokens, given as (text, bits), colored by their bits per byte if colors are on."""
        if not self.colored:
            self.write(label.encode())
            self.model_text(b"".join(text for text, _ in spans))
            return
        palette = self._palette
        out = [label]
        for text, bits in spans:
            shown = self._visible.feed(text)
            out.append(palette.paint(shown, bits / max(1, len(text))) if shown.strip() else shown)
        self.write("".join(out).encode())

    @cached_property
    def _palette(self) -> Palette:
        """Colors of surprisal. The first use prints their legend."""
        theme = terminal_theme() if self._theme == "auto" else self._theme
        palette = Palette(theme, self._backgrounds)
        if self._console.is_terminal and not self.quiet:
            self.clear()
            self._err.write(palette.legend() + "\n")
        return palette
