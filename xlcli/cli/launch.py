"""`--nproc`: starts the command again in several processes with the launcher of PyTorch, in this terminal.

The launcher passes SIGINT, SIGTERM and SIGHUP on to the processes, which save and end. If one of them fails, the
launcher ends the others, and starts all again as often as `--max-restarts` allows.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xlcli.errors import ConfigError, RankError

SECONDS_TO_SAVE = 600
"""Seconds after a signal until a process that still runs is killed."""
STARTED = "TORCHELASTIC_RUN_ID"
"""Environment variable that the launcher sets in the processes that it starts."""


def is_to_launch(nproc: int | None, max_restarts: int = 0) -> bool:
    """Whether this process is to start others: `--nproc` or `--max-restarts` is given, and it is none of theirs.

    Raises:
        ConfigError: Another launcher has started another number of processes.
    """
    from xlcli.ranks import environment

    size = environment().size
    if STARTED in os.environ or size > 1:
        if nproc not in (None, size):
            raise ConfigError(
                f"--nproc is {nproc}, but {size} process{'es have' if size > 1 else ' has'} been started already.",
                "Leave out --nproc, or start xlcli without torchrun, srun and WORLD_SIZE.",
            )
        return False
    return (nproc or 1) > 1 or max_restarts > 0


def launch(arguments: Sequence[str], nproc: int, max_restarts: int = 0, *, verbose: bool) -> int:
    """Runs the command with these arguments in `nproc` processes of this machine; returns its exit code.

    Args:
        arguments: Arguments of `xlcli`.
        nproc: Number of processes.
        max_restarts: Number of times that all are started again after one has failed.
        verbose: Whether the launcher reports its actions.

    Raises:
        RankError: A process was killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from xlcli.runtime import cpu_limit

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_limit() // nproc)))  # else the launcher sets it to 1
    options = ["--standalone", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
    torchrun = parse_args([*options, "--no-python", sys.executable])  # type: ignore[no-untyped-call]
    torchrun.training_script_args = ["-m", "xlcli", *arguments]  # not parsed: it takes --nproc for an abbreviation
    torchrun.shutdown_timeout = SECONDS_TO_SAVE
    sys.stdout.flush()
    before = logging.root.manager.disable
    if not verbose:
        logging.disable(logging.ERROR)
    try:
        with _second_interrupt_kills():
            run(torchrun)  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise RankError(
                f"rank {rank} of {nproc} was ended by {name}.", "--resume continues from the last checkpoint."
            ) from None
        return int(failure.exitcode)
    finally:
        logging.disable(before)
    return 0


@contextmanager
def _second_interrupt_kills() -> Iterator[None]:
    """Kills all processes at the second SIGINT, where the launcher would wait for them once more."""
    inbox, wakeup = socket.socketpair()
    wakeup.setblocking(False)

    def watch() -> None:
        n_interrupts = 0
        while 0 not in (numbers := inbox.recv(16)):
            n_interrupts += numbers.count(signal.SIGINT)
            if n_interrupts > 1:
                _kill_processes()

    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakeup.send(b"\0")
        watcher.join()
        inbox.close()
        wakeup.close()


def _kill_processes() -> None:
    """Kills the processes that the launcher has started and their children, each in a session of its own."""
    for children in Path("/proc/self/task").glob("*/children"):  # Linux only
        for pid in map(int, children.read_text().split()):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
