import os
import pty
import threading

import pytest
from programs import TEXT, Terminal, command

from xlcli.cli import palette
from xlcli.cli.palette import BACKGROUNDS, LETTERS, Palette, terminal_theme

GROUNDS = {
    "dark": ["000000", "1e1e1e", "282a36", "002b36"],
    "light": ["ffffff", "fdf6e3"],
}
"""Black, VS Code, Dracula, Solarized; white, Solarized."""


def rgb(color):
    """Color of xterm's palette of 256 colors."""
    if color >= 232:
        return (8 + 10 * (color - 232),) * 3
    levels = (0, 95, 135, 175, 215, 255)
    return tuple(levels[(color - 16) // step % 6] for step in (36, 6, 1))


def luminance(color):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Formula of WCAG 2.1."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_contrast_is_at_least_four_and_a_half(theme):
    grounds = [tuple(bytes.fromhex(ground)) for ground in GROUNDS[theme]]
    assert min(contrast(rgb(color), ground) for color in LETTERS[theme] for ground in grounds) >= 4.5
    letters = (255,) * 3 if theme == "dark" else (0,) * 3
    assert min(contrast(rgb(color), letters) for color in BACKGROUNDS[theme]) >= 4.5
    for ramp in (LETTERS[theme], BACKGROUNDS[theme]):
        assert len(set(ramp)) == len(ramp) == 8


def test_color_follows_bits():
    colors = [Palette("dark").paint("x", bits) for bits in (-1.0, 0.0, 0.99, 1.0, 6.99, 7.0, 99.0)]
    assert colors == [f"\x1b[38;5;{LETTERS['dark'][i]}mx\x1b[39m" for i in (0, 0, 0, 1, 6, 7, 7)]
    assert Palette("light", backgrounds=True).paint("x", 0.0) == "\x1b[38;5;16;48;5;255mx\x1b[39;49m"


@pytest.mark.parametrize(
    ("ground", "theme"), [("15;0", "dark"), ("0;15", "light"), ("12;8", "dark"), ("0;default;7", "light")]
)
def test_the_variable_of_the_terminal_decides(ground, theme, monkeypatch):
    monkeypatch.setenv("COLORFGBG", ground)
    monkeypatch.setattr(palette.os, "open", None)
    assert terminal_theme() == theme


@pytest.mark.parametrize(
    ("answer", "theme"),
    [
        (b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62;4c", "light"), (b"\x1b]11;rgb:2828/2a2a/3636\x07\x1b[?6c", "dark"),
        (b"\x1b]11;rgba:fd/f6/e3/ff\x1b\\\x1b[?1;2c", "light"), (b"\x1b[?6c", "dark"), (b"", "dark"),
    ],
)  # fmt: skip
def test_the_terminal_is_asked(answer, theme, monkeypatch):
    monkeypatch.delenv("COLORFGBG", raising=False)
    ours, its = pty.openpty()
    seen = []

    def respond():
        seen.append(os.read(ours, 99))
        os.write(ours, answer)

    thread = threading.Thread(target=respond)
    thread.start()
    real = os.open
    monkeypatch.setattr(
        palette.os, "open", lambda path, flags: os.dup(its) if path == "/dev/tty" else real(path, flags)
    )
    monkeypatch.setattr(palette.os, "tcgetpgrp", lambda descriptor: os.getpgrp())
    assert terminal_theme() == theme
    thread.join()
    assert seen == [b"\x1b]11;?\x1b\\\x1b[c"]
    os.close(ours)
    os.close(its)


def test_without_a_terminal_it_is_dark(monkeypatch):
    monkeypatch.delenv("COLORFGBG", raising=False)

    def missing(path, flags):
        raise OSError(6, "No such device or address")

    monkeypatch.setattr(palette.os, "open", missing)
    assert terminal_theme() == "dark"


@pytest.mark.slow
def test_a_terminal_shows_legend_and_theme_and_a_dumb_one_nothing(model):
    light = Terminal(command("stream", "-m", model, "--theme", "light"), stdin=TEXT, NO_COLOR="")
    assert light.finish() == 0
    assert "bits per byte 0  1  2  3  4  5  6  7+" in light.text
    assert light.text.index("bits per byte") < light.text.index("The quick")
    assert f"\x1b[38;5;{LETTERS['light'][-1]}m".encode() in light.received
    dumb = Terminal(command("stream", "-m", model), stdin=TEXT, NO_COLOR="", TERM="dumb")
    assert dumb.finish() == 0
    assert b"\x1b" not in dumb.received
    assert TEXT.decode().strip() in dumb.text
