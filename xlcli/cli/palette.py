"""Colors of surprisal on dark and light terminals, with a contrast of at least 4.5 (WCAG 2.1, success criterion 1.4.3).

Contrast is that of letters on the usual grounds, black to Solarized dark and white to Solarized light; with colored
backgrounds, that of black or white letters on them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from dataclasses import dataclass
from typing import Literal

Theme = Literal["dark", "light"]
ANSWER_SECONDS = 0.2
"""Time that a terminal has to tell its background color."""
LETTERS = {"dark": (249, 152, 150, 186, 222, 215, 209, 210), "light": (240, 24, 23, 22, 58, 94, 88, 125)}
"""Colors of the 256-color palette by bits per byte, from 0 to 7 and more: letters on a ground of the theme."""
BACKGROUNDS = {"dark": (236, 17, 23, 22, 58, 94, 88, 125), "light": (255, 195, 158, 193, 229, 222, 216, 217)}
"""The same as backgrounds; letters are white in the dark theme and black in the light one."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Escape sequences that color text by its surprisal."""

    theme: Theme
    backgrounds: bool = False

    def paint(self, text: str, bits_per_byte: float) -> str:
        """The text in the color of this surprisal."""
        ramp = (BACKGROUNDS if self.backgrounds else LETTERS)[self.theme]
        color = ramp[min(len(ramp) - 1, max(0, int(bits_per_byte)))]
        if not self.backgrounds:
            return f"\x1b[38;5;{color}m{text}\x1b[39m"
        letters = 231 if self.theme == "dark" else 16
        return f"\x1b[38;5;{letters};48;5;{color}m{text}\x1b[39;49m"

    def legend(self) -> str:
        """One line that shows the colors."""
        last = len(LETTERS[self.theme]) - 1
        shown = (self.paint(f" {bits}{'+' if bits == last else ''} ", bits) for bits in range(last + 1))
        return "bits per byte" + "".join(shown)


def terminal_theme() -> Theme:
    """Theme of the terminal: from `COLORFGBG`, else from its answer to a query, else dark."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if ground.isdigit():
        return "light" if int(ground) in (7, *range(9, 16)) else "dark"
    answer = b""
    with contextlib.suppress(ImportError, OSError):
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            answer = _ask(descriptor, b"\x1b]11;?\x1b\\")
        finally:
            os.close(descriptor)
    found = re.search(rb"rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)", answer)
    if found is None:
        return "dark"
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"


def _ask(descriptor: int, query: bytes) -> bytes:
    """Answer of the terminal to a query; nothing if input is waiting already, which would be lost.

    Raises:
        ImportError, OSError: The system has no such terminals.
    """
    import termios
    import tty

    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if os.tcgetpgrp(descriptor) != os.getpgrp() or waiting.poll(0):
        return b""
    answer = b""
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        return b""
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        # Nearly every terminal answers the second query, so one that does not know the first costs no time.
        os.write(descriptor, query + b"\x1b[c")
        end = time.monotonic() + ANSWER_SECONDS
        while not re.search(rb"\x1b\[\?[\d;]*c", answer) and (left := end - time.monotonic()) > 0:
            if waiting.poll(1000 * left):
                answer += os.read(descriptor, 256)
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
    return answer
