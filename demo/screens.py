"""Pictures of a terminal session at three widths, on dark and on light ground, for `docs/pictures.md`.

    python demo/screens.py docs/pictures        # needs tmux; takes about two minutes

Each session runs in a temporary folder with `shakespeare.txt` and ends while a model is trained.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI
from rich.text import Text

TEXT = Path(__file__).with_name("shakespeare.txt")
WIDTHS, HEIGHT = (60, 80, 160), 50
GROUNDS = {"dark": DIMMED_MONOKAI, "light": DEFAULT_TERMINAL_THEME}
COMMANDS = (
    "head -n 12 shakespeare.txt | xlcli stream -m books",
    "xlcli models",
    "xlcli train shakespeare.txt --preset tiny --max-time 1m",
)
FONTS = re.compile(r"@font-face {.*?}\s*", re.DOTALL)
"""Fonts in the pictures of rich, which are on a server."""


def screen(width: int, folder: Path) -> str:
    """The last screen of a session, with escape sequences."""
    shutil.copy(TEXT, folder)
    shell = "; ".join(f"printf '%s\\n' {shlex.quote('$ ' + command)}; {command}; echo" for command in COMMANDS)
    settings = {"TMUX_TMPDIR": str(folder), "XLCLI_CACHE": str(folder / "cache")}
    tmux = ["tmux", "-f", "/dev/null", "-L", "screens"]

    def run(*words: str) -> str:
        return subprocess.run(
            [*tmux, *words], cwd=folder, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    run("new-session", "-d", "-x", str(width), "-y", str(HEIGHT), shell)
    try:
        while not re.search(r"[4-9]\d % .* left", shown := run("capture-pane", "-p", "-e")):
            time.sleep(0.2)
    finally:
        run("kill-server")
    return shown.rstrip("\n")


def main() -> int:
    """Writes the pictures into the folder given."""
    for width in WIDTHS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # training may still write
            shown = screen(width, Path(folder))
        for ground, theme in GROUNDS.items():
            console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
            console.print(Text.from_ansi(shown), soft_wrap=True)
            picture = console.export_svg(title=f"{width} columns", theme=theme, unique_id="screen")
            (Path(sys.argv[1]) / f"terminal-{width}-{ground}.svg").write_text(FONTS.sub("", picture), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
