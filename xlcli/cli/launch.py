"""`--nproc`: runs the command in several processes of this machine; `torchrun` does that on several machines.

The processes find each other through a file in a private folder, and their sockets are on the loopback interface.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xlcli.cli.signals import LAUNCHER, handling
from xlcli.errors import ConfigError, RankError
from xlcli.machine import cpu_limit
from xlcli.ranks import STORE, environment

LOST = 75  # exit code of a process that has lost another one; its launcher knows which
SECONDS_TO_SAVE = 600  # seconds after a signal or a failure until processes that still run are killed
POLL_SECONDS = 0.02  # seconds between two looks at other processes


def is_to_launch(nproc: int) -> bool:
    """True if this process is to start `nproc` others. `ConfigError` if it cannot, or others were started already."""
    size = environment().size
    if size > 1 and nproc not in (1, size):
        remedy = "Leave out --nproc, or start xlcli without torchrun and WORLD_SIZE."
        raise ConfigError(f"--nproc is {nproc}, but {size} processes have been started already.", remedy)
    most = max(cpu_limit(), len(list(Path("/dev").glob("nvidia[0-9]*"))))
    if size == 1 and nproc > most:
        raise ConfigError(f"--nproc is {nproc}, but this machine has {most} CPUs.", f"Use --nproc {most} or less.")
    return size == 1 < nproc


def launch(arguments: Sequence[str], nproc: int, remedy: str = "Run the command again.") -> int:
    """Runs `xlcli` in `nproc` processes and passes signals on; a second SIGINT kills. If one fails, it ends the others.

    Ctrl-Z suspends them too. Returns the exit code of the process that failed first, also that of SIGPIPE, else 0;
    `RankError` if it was killed, or has lost another one.
    """
    path = os.pathsep.join(filter(None, sys.path))  # with -P below, the working folder is not searched for modules
    shared = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(nproc), LAUNCHER: str(os.getpid())}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cpu_limit() // nproc)))
    command = [sys.executable, "-P", "-m", "xlcli", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            number = signal.SIGKILL
        send(number)

    def suspend(number: int, _: object) -> None:
        send(signal.SIGSTOP)
        with handling(signal.SIG_DFL, [number]):  # which does nothing if nobody could continue the process
            os.kill(os.getpid(), number)
        send(signal.SIGCONT)

    def send(number: int) -> None:
        for process in processes:
            process.send_signal(number)

    with handling(receive), handling(suspend, [signal.SIGTSTP]), tempfile.TemporaryDirectory(prefix="xlcli-") as folder:
        shared[STORE] = str(Path(folder, "store"))
        for rank in range(nproc):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A text may be a pipe of the shell, such as /dev/fd/63.
            process = subprocess.Popen(command, env=variables, start_new_session=True, close_fds=False)  # noqa: S603
            processes.append(process)
        if received:
            send(signal.SIGTERM)  # also those that were not there yet
        codes = _wait_for(processes, received, send)

    failures = [(rank, code) for rank, code in codes.items() if code]
    causes = [(rank, code) for rank, code in failures if code not in (LOST, -signal.SIGTERM)]  # others follow
    rank, code = next(iter(causes or failures), (0, 0))
    if code >= 0 and code != LOST:
        return code
    if code == -signal.SIGPIPE:
        return 128 + signal.SIGPIPE
    if received:
        return 128 + received[0]
    end = "has lost the connection to another one"
    if code < 0:
        end = f"was ended by {signal.Signals(-code).name}"
    raise RankError(f"rank {rank} of {nproc} {end}.", remedy)


def _wait_for(
    processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int], send: Callable[[int], None]
) -> dict[int, int]:
    """Exit codes by rank, in the order of the ends; a failure ends the others. `received` signals were passed on."""
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(processes):
        time.sleep(POLL_SECONDS)
        ended: list[tuple[int, int]] = []
        for rank, process in enumerate(processes):
            code = process.poll()
            if code is not None and rank not in codes:
                ended.append((code, rank))
        # The code of a signal, which may have caused the other ends, is negative and comes first.
        for code, rank in sorted(ended):
            codes[rank] = code
        is_failing = bool(received) or any(codes.values())
        if is_failing and deadline is None:
            deadline = time.monotonic() + SECONDS_TO_SAVE
            if not received:
                send(signal.SIGTERM)
        elif deadline is not None and time.monotonic() > deadline:
            send(signal.SIGKILL)
    return codes
