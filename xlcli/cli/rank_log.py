"""Output of the processes of a run that are not the first one: a file instead of the terminal."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from xlcli.errors import XLError
from xlcli.ranks import environment
from xlcli.store.layout import LOG, LOGS

if TYPE_CHECKING:
    from xlcli.cli.render import Screen


class RankLog:
    """Log of a process. It is a temporary file until `move` is called, and receives what the process prints.

    Args:
        rank: Number of the process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._terminal = os.dup(2)
        self._path: Path | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._redirect(self._file.fileno())

    def move(self, folder: Path) -> None:
        """Continues the log in `logs/rank-N.log` of this folder."""
        path = folder / LOGS / f"{LOG}{self.rank}.log"
        if path == self._path:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        if self._path is None:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
            file.flush()
        self._redirect(file.fileno())
        self._file.close()
        self._file, self._path = file, path

    def report(self, text: str) -> None:
        """Prints a line on the terminal."""
        os.write(self._terminal, f"rank {self.rank}: {text}\n".encode())

    def _redirect(self, descriptor: int) -> None:
        for stream in (1, 2):
            os.dup2(descriptor, stream)


def waiting(screen: Screen, log: RankLog | None) -> Callable[[str], None]:
    """Function that prints on the terminal for which process this one waits."""
    return screen.say if log is None else log.report


def open_rank_log() -> RankLog | None:
    """The log of this process; None for the first one, and for a single one."""
    try:
        ranks = environment()
    except XLError:  # reported by the command
        return None
    return None if ranks.is_first else RankLog(ranks.rank)
