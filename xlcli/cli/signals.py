"""Signal handling: the first signal requests a stop, so that work can be saved; a second SIGINT exits at once.

Python runs signal handlers between two bytecodes of the main thread, which may spend seconds inside a kernel. The C
handler of the interpreter writes the signal number to a socket immediately, so a thread that reads this socket reacts
within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that request a stop
BEAT_SECONDS = 0.1  # interval at which a process notes that it runs: the error of `Stop.paused` for each pause
SHORTEST_PAUSE = 1.0  # seconds up to which a pause counts as running, as of a program that limits the use of a CPU
LAUNCHER = "XLCLI_LAUNCHER"  # environment variable with the process number of the launcher of `--nproc`


class Stopped(Exception):  # noqa: N818
    """Raised by a signal during a wait for input; carries the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


@contextlib.contextmanager
def handling(
    handler: Callable[[int, object], None] | signal.Handlers, numbers: Iterable[int] = SIGNALS
) -> Iterator[None]:
    """Context in which `handler` gets these signals; one that was ignored (nohup, background jobs) stays ignored."""
    previous = {number: signal.getsignal(number) for number in numbers}
    for number, before in previous.items():
        if before is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class Stop:
    """Stop request by signal: a context manager, and the `stop` callback of every workflow.

    `notice` prints `message` at the first signal. `farewell` makes the text for stderr when a second SIGINT ends the
    process; it must not wait long for other threads. `fd` is a file descriptor for `select`, which becomes and stays
    readable at the first signal.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None, farewell: Callable[[], str] = lambda: "") -> None:
        self.signal: int | None = None  # number of the first signal, or None
        # Seconds for which the process was suspended (Ctrl-Z, SIGSTOP) until it was continued.
        self.paused = 0.0
        self._notice, self._farewell = notice, farewell
        self._handling = handling(lambda *_: None, (*SIGNALS, signal.SIGCONT))  # `_watch` reads signals from a socket
        self.fd, self._fd_writer = os.pipe()

    def __call__(self) -> bool:
        """True once a signal has arrived."""
        return self.signal is not None

    def take(self, number: int) -> None:
        """Requests a stop by a signal that another process of the run has received; 0 is none."""
        self.signal = number or self.signal

    @property
    def exit_code(self) -> int:
        """128 + signal number, as in shells; 0 without a signal."""
        return 128 + self.signal if self.signal else 0

    @property
    def message(self) -> str:
        """Message about the first signal, which has arrived."""
        assert self.signal is not None
        if self.signal == signal.SIGINT:
            return "Ctrl-C: stopping; press it again to exit at once"
        return f"{signal.Signals(self.signal).name}: stopping; Ctrl-C exits at once"

    def __enter__(self) -> Stop:
        self._inbox, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._inbox.settimeout(BEAT_SECONDS)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._handling.__enter__()
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._handling.__exit__(None, None, None)
        signal.set_wakeup_fd(self._old_wakeup)
        self._wakeup.send(b"\0")
        self._watcher.join()
        self._wakeup.close()
        self._inbox.close()
        os.close(self.fd)
        os.close(self._fd_writer)

    def _watch(self) -> None:
        """Runs in a thread: handles signals and measures pauses until a byte of 0 comes."""
        last_beat, longest_gap = time.monotonic(), 0.0
        while True:
            numbers = b""
            with contextlib.suppress(TimeoutError):
                numbers = self._inbox.recv(16)
            now = time.monotonic()
            longest_gap = max(longest_gap, now - last_beat)
            last_beat = now
            if signal.SIGCONT in numbers:  # the end of a pause, which may have been noticed some beats ago
                if longest_gap > SHORTEST_PAUSE:
                    self.paused += longest_gap
                longest_gap = 0.0
            for number in numbers:
                if number == 0:
                    return
                if number in SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        """Notes the first signal; ends the process at a SIGINT after it."""
        is_first = self.signal is None
        if is_first:
            self.signal = number
            os.write(self._fd_writer, b"!")
            with contextlib.suppress(Exception):
                self._notice()
        elif number == signal.SIGINT:
            with contextlib.suppress(Exception):
                waiting = select.poll()
                waiting.register(2, select.POLLOUT)
                if waiting.poll(0):  # else its reader has stalled
                    os.write(2, self._farewell().encode())
            os._exit(130)


def end_with_launcher() -> None:
    """Sends this process SIGTERM when its launcher has ended: it saves if it can."""

    def watch() -> None:
        while str(os.getppid()) == os.environ[LAUNCHER]:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
