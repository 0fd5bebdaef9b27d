"""Runs the commands of a page and puts what they print under them, so that the page shows what happens.

    python demo/capture.py README.md            # with `xlcli` on the PATH, on a quiet machine; takes minutes

In a fenced `console` block a line that begins with `$ ` is a command; what follows, up to the next one, is its output.
Only standard output is captured; progress and talk, on standard error, are left out. The commands of a page run in
order, in one temporary folder, which at first holds nothing but `shakespeare.txt`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TEXT = Path(__file__).with_name("shakespeare.txt")


def blocks(page: str, language: str) -> list[str]:
    """The insides of the page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Every command of the page, in order."""
    return [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]


def captured(page: str, run: Callable[[str], str]) -> str:
    """The page with every output replaced by what `run` says of its command."""

    def refill(match: re.Match[str]) -> str:
        parts = [f"$ {command}\n{run(command)}" for command in commands(match[0])]
        return "```console\n" + "\n\n".join(part.rstrip("\n") for part in parts) + "\n```"

    return re.sub(r"^```console\n.*?^```$", refill, page, flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    """Rewrites the pages named."""
    for name in sys.argv[1:]:
        path = Path(name)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(TEXT, folder)

            def run(command: str, folder: str = folder) -> str:
                print(f"$ {command}", file=sys.stderr)
                done = subprocess.run(command, shell=True, cwd=folder, stdout=subprocess.PIPE, check=True)
                lines = done.stdout.decode("utf-8", "replace").replace(folder, "").split("\n")
                return "\n".join(line.rstrip() for line in lines)

            path.write_text(captured(path.read_text(encoding="utf-8"), run), encoding="utf-8")
    return 0 if sys.argv[1:] else 2


if __name__ == "__main__":
    sys.exit(main())
