"""The program as a process and on an emulated terminal; its commands and their options."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import piped
import pyte

import xlcli
from xlcli.cli import options as settings
from xlcli.cli.app import load

SOURCE = Path(xlcli.__file__).parents[1]
TEXT = b"The quick brown fox jumps over the lazy dog.\n"
COMMANDS = {name: load(name) for name in settings.COMMANDS}
"""Name to command of Typer."""
EVERY = COMMANDS | {
    f"{name} {action}": command
    for name, group in COMMANDS.items()
    for action, command in getattr(group, "commands", {}).items()
}
"""`COMMANDS` and their actions, such as `models show`."""


def options(command):
    """The options of a command."""
    return [param for param in command.params if param.param_type_name == "option"]


def long(option):
    """The name of an option with two dashes."""
    return max(option.opts, key=len)


def variable(option):
    """The environment variable of an option."""
    return option.envvar or f"XLCLI_{option.name.upper()}"


def environment(**changes: str) -> dict[str, str]:
    """Environment of a process that imports the package of this checkout."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **changes}


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    """Command line that runs the program as a process."""
    return [sys.executable, "-m", "xlcli", *map(os.fspath, arguments)]


def process(*arguments: str | os.PathLike[str], **options) -> subprocess.CompletedProcess[bytes]:
    """Runs the program as a process to its end."""
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    if options["stdin"] is None:
        del options["stdin"]
    return subprocess.run(
        command(*arguments), env=environment(**options.pop("env", {})), capture_output=True, timeout=120, **options
    )


class Terminal:
    """An emulated terminal (pyte) on which a process runs; `controlling`: Ctrl-C typed there interrupts it."""

    def __init__(
        self,
        arguments: list[str],
        *,
        stdin: bytes | None = None,
        columns: int = 80,
        controlling: bool = False,
        **env: str,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, 40, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.received = b""
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            arguments,
            env=environment(**env),
            stdin=subprocess.PIPE if stdin is not None else follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if controlling else None,
        )
        os.close(follower)
        self._leader = leader
        if stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.close()

    def send(self, keys: bytes) -> None:
        """Types."""
        os.write(self._leader, keys)

    def resize(self, columns: int) -> None:
        """Changes the width."""
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.screen.resize(columns=columns)

    def read(self, seconds: float) -> bool:
        """Reads what comes within `seconds`; False once the process has closed the terminal."""
        if select.select([self._leader], [], [], seconds)[0]:
            try:
                data = os.read(self._leader, 65536)
            except OSError:
                return False
            self.received += data
            self._stream.feed(data)
            return bool(data)
        return True

    def read_until(self, pattern: bytes, timeout: float) -> None:
        """Reads until the pattern has come."""
        end = time.monotonic() + timeout
        while not re.search(pattern, self.received):
            if not self.read(0.1) or time.monotonic() > end:
                self.process.kill()
                self.finish()
                raise AssertionError(f"{pattern!r} did not come: {self.received!r}")

    def wait_for(self, text: str, timeout: float) -> None:
        """Reads until the screen shows the text."""
        end = time.monotonic() + timeout
        while text not in self.text:
            if not self.read(0.1) or time.monotonic() > end:
                self.process.kill()
                self.finish()
                raise AssertionError(f"{text!r} did not appear: {self.text!r}")

    def finish(self, timeout: float = 60) -> int:
        """Reads until the process ends; its exit code."""
        end = time.monotonic() + timeout
        while self.read(0.1) and time.monotonic() < end:
            pass
        os.close(self._leader)
        return self.process.wait(10)

    @property
    def text(self) -> str:
        """Text on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()


@contextlib.contextmanager
def standard_input(data: bytes) -> Iterator[None]:
    """Makes a pipe with these bytes, which has been closed by its writer, the standard input of this process."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with os.fdopen(reader, "rb"), piped.standard_input(reader):
        yield
