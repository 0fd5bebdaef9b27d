"""Input read as it arrives; a signal interrupts every wait."""

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
"""Maximum number of bytes per read."""


def open_source(name: str) -> int:
    """File descriptor of a file, or of standard input for `-`; `DataError` if the file cannot be read."""
    if name == "-":
        return 0
    if Path(name).is_dir():
        raise DataError(f"{name} is a folder.", "Give a file, or pipe text in.")
    try:
        return os.open(name, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}.", "Check the path.") from None


def portions(source: int, stop: Stop, flush_ms: int | None) -> Iterator[bytes | None]:
    """Bytes of `source` as they arrive; None after `flush_ms` ms without input. Ends with the input or at a signal."""
    timeout = None if flush_ms is None else flush_ms / 1000
    idle = True
    while not stop():
        ready, _, _ = select.select([source, stop.fd], [], [], None if idle else timeout)
        if not ready:
            idle = True
            yield None
        elif stop.fd in ready:
            return
        else:
            data = os.read(source, PORTION)
            if not data:
                return
            idle = False
            yield data


class _Input(io.RawIOBase):
    """Standard input as a file; a signal raises `Stopped` in a waiting read."""

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
    """Context in which a signal interrupts reads of `sys.stdin`."""
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Input(stop), PORTION))
    try:
        yield
    finally:
        sys.stdin = before
