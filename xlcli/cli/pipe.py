"""Input read as it arrives and output written to its end; a signal interrupts every wait."""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from xlcli.cli.signals import Stop
from xlcli.errors import DataError

PORTION = 2**16  # maximum number of bytes per read
LONGEST_WAIT_MS = 2**31 - 1  # the most that `poll` takes
GRACE_SECONDS = 0.5  # time after a signal in which a reader that has stalled may go on; then output is discarded


def label(name: str) -> str:
    return "standard input" if name == "-" else name


def open_source(name: str) -> int:
    """File descriptor of a file, or of standard input for `-`; `DataError` if the file cannot be read."""
    if name == "-":
        return 0
    if Path(name).is_dir():
        raise DataError(f"{name} is a folder.", "Give a file, or pipe text in.")
    try:
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is waited for by `portions`
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}.", "Check the path.") from None


def portions(source: int, stop: Stop, flush_ms: int | None, save_every: float | None = None) -> Iterator[bytes | None]:
    """Bytes of `source` as they arrive. Ends with the input, or at a signal after a last None.

    None after `flush_ms` ms without input, and then every `save_every` seconds without it.
    """
    waiting = poll({source: select.POLLIN, stop.fd: select.POLLIN})
    save_ms = math.inf if save_every is None else 1000 * save_every
    has_unflushed = False
    while not stop():
        wait_ms = save_ms
        if has_unflushed and flush_ms is not None:
            wait_ms = min(flush_ms, save_ms)
        ready = dict(waiting.poll(None if wait_ms == math.inf else min(wait_ms, LONGEST_WAIT_MS)))
        if not ready:
            has_unflushed = False
            yield None
        elif stop.fd not in ready:
            try:
                data = os.read(source, PORTION)
            except BlockingIOError:  # another process has read what arrived
                continue
            except OSError as error:
                raise DataError(f"cannot read the text: {error.strerror}.", "Check where it comes from.") from None
            if not data:
                return
            has_unflushed = True
            yield data
    yield None  # the reader stops here, and does not take the text for complete


def followed(portions: Iterator[bytes | None], stop: Stop) -> Iterator[bytes | None]:
    """Portions of a file that is followed, until a signal and a last None; None while it does not grow."""
    waiting = poll({stop.fd: select.POLLIN})
    while not stop():  # what is taken is passed on, since the place in the file is behind it
        portion = next(portions)
        yield portion
        if portion is None:
            waiting.poll(100)
    yield None


class OutputStream:
    """Standard output or standard error. All bytes are written, also to a descriptor that does not block.

    A write waits for a slow reader; after a signal only for `GRACE_SECONDS`, and then discards what is left.
    """

    def __init__(self, stream: TextIO) -> None:
        self.at_line_start = True  # true if the last byte ended a line
        self.discarded = 0  # number of bytes discarded
        self.stop: Stop | None = None  # stop request that ends a wait, or None; set by the owner
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # an object of Python that stands for the stream, as in tests
            self._descriptor = None

    def shares_file(self, other: OutputStream) -> bool:
        """True if both are the same terminal, pipe or file."""
        a, b = self._descriptor, other._descriptor
        return a is not None and b is not None and os.path.sameopenfile(a, b)

    def write(self, text: str) -> None:
        self.write_bytes(text.encode(self._stream.encoding or "utf-8", self._stream.errors or "strict"))

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes. `BrokenPipeError` if the reader has closed the output."""
        if data:
            self.at_line_start = data.endswith(b"\n")
        self._stream.flush()
        if self._descriptor is None:
            self._stream.buffer.write(data)
            self._stream.flush()
            return
        rest = memoryview(data)
        while rest and self._is_writable(self._descriptor):
            # A pipe that poll reports as writable takes at least PIPE_BUF bytes without blocking.
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
        self.discarded += len(rest)

    def _is_writable(self, descriptor: int) -> bool:
        """Waits until the descriptor accepts bytes; False if its reader has stalled after a signal."""
        stop = self.stop
        if stop is None:
            return bool(poll({descriptor: select.POLLOUT}).poll())
        if not stop():
            ready = poll({descriptor: select.POLLOUT, stop.fd: select.POLLIN}).poll()
            if descriptor in dict(ready):
                return True
        # A signal has come. The reader has a time of grace once, not for each write.
        grace_ms = 0 if self.discarded else 1000 * GRACE_SECONDS
        return bool(poll({descriptor: select.POLLOUT}).poll(grace_ms))


def poll(events: Mapping[int, int]) -> select.poll:
    """Waits for events of descriptors; `select.select` is limited to descriptors below 1,024."""
    waiting = select.poll()
    for descriptor, event in events.items():
        waiting.register(descriptor, event)
    return waiting
