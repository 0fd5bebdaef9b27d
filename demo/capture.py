"""Runs the commands of a page and replaces the outputs below them.

    make readme            # on an idle machine; takes about four minutes

In a fenced `console` block a line that begins with `$ ` is a command; the lines up to the next command are its output.
Only standard output is captured, not progress and notices on standard error. The commands of all pages run in order in
one temporary folder, which initially contains only `shakespeare.txt`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TEXT = Path(__file__).with_name("shakespeare.txt")


def blocks(page: str, language: str) -> list[str]:
    """Contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """All commands of the page, in order."""
    return [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]


def captured(page: str, run: Callable[[str], str]) -> str:
    """The page with every output replaced by `run(command)`."""

    def refill(match: re.Match[str]) -> str:
        parts = [f"$ {command}\n{run(command)}" for command in commands(match[0])]
        return "```console\n" + "\n\n".join(part.rstrip("\n") for part in parts) + "\n```"

    return re.sub(r"^```console\n.*?^```$", refill, page, flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    """Rewrites the pages given as arguments."""
    with tempfile.TemporaryDirectory() as home:
        run = _shell(Path(home))
        for path in map(Path, sys.argv[1:]):
            path.write_text(captured(path.read_text(encoding="utf-8"), run), encoding="utf-8")
    return 0 if sys.argv[1:] else 2


def _shell(home: Path) -> Callable[[str], str]:
    """A function that runs commands in a folder below `home` and returns their output without paths of this machine."""
    folder = home / "work"
    folder.mkdir()
    shutil.copy(TEXT, folder)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("XLCLI_")}
    settings["XLCLI_CACHE"] = str(home / "cache")

    def run(command: str) -> str:
        print(f"$ {command}", file=sys.stderr)
        done = subprocess.run(command, shell=True, cwd=folder, env=settings, stdout=subprocess.PIPE, check=True)
        text = done.stdout.decode("utf-8", "replace")
        for place in (folder.resolve(), TEXT.parents[1].resolve()):
            text = text.replace(f"{place}/", "")
        return "\n".join(line.rstrip() for line in text.split("\n"))

    return run


if __name__ == "__main__":
    sys.exit(main())
