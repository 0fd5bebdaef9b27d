"""Input as it arrives, from which a signal can always tear the reader away."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.cli.signals import Stop, Stopped
from xlcli.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PORTION = 2**16
"""Most bytes taken at once."""


def open_source(name: str) -> int:
    """A descriptor to read: standard input for `-`; `DataError` when the file cannot be read."""
    if name == "-":
        return 0
    if Path(name).is_dir():
        raise DataError(f"{name} is a folder.", "Give a file, or pipe text in.")
    try:
        return os.open(name, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}.", "Check the path.") from None


def portions(source: int, stop: Stop, flush_ms: int | None) -> Iterator[bytes | None]:
    """What arrives at `source`, as it arrives; None after `flush_ms` of silence. Ends with the input or on a signal."""
    silence = None if flush_ms is None else flush_ms / 1000
    told = True
    while not stop():
        ready, _, _ = select.select([source, stop.fd], [], [], None if told else silence)
        if not ready:
            told = True
            yield None
        elif stop.fd in ready:
            return
        else:
            data = os.read(source, PORTION)
            if not data:
                return
            told = False
            yield data


class _Input(io.RawIOBase):
    """Standard input as a file; a read that waits raises `Stopped` on a signal."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if self._stop() or self._stop.fd in select.select([0, self._stop.fd], [], [])[0]:
            raise Stopped(self._stop.exit_code)
        data = os.read(0, len(view))
        view[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def standard_input(stop: Stop) -> Iterator[None]:
    """Lets whoever reads `sys.stdin` meanwhile be stopped by a signal."""
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Input(stop), PORTION))
    try:
        yield
    finally:
        sys.stdin = before
