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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from xlcli.errors import ConfigError, RankError

SECONDS_TO_SAVE = 600
"""Seconds after a signal until a process that still runs is killed."""
STARTED = "TORCHELASTIC_RUN_ID"
"""Environment variable that the launcher sets in the processes that it starts."""
LOST = 75
"""Exit code with which a process reports to this launcher that another one was lost; its launcher knows which."""
_RUN = "xlcli-"
"""Beginning of the identifiers of the runs of `launch`."""
PARENT_SECONDS = 1.0
"""Seconds between two looks whether the launcher still runs."""


def is_to_launch(nproc: int | None, max_restarts: int = 0) -> bool:
    """Whether this process is to start others, by `--nproc` and `--max-restarts`, and is none of theirs.

    Raises:
        ConfigError: Another launcher has started another number of processes, or `--max-restarts` is alone.
    """
    from xlcli.ranks import environment

    if max_restarts and nproc is None:
        raise ConfigError("--max-restarts needs --nproc.", "Add --nproc, or give --max-restarts to torchrun.")
    size = environment().size
    if STARTED in os.environ or size > 1:
        if nproc not in (None, size):
            raise ConfigError(
                f"--nproc is {nproc}, but {size} process{'es have' if size > 1 else ' has'} been started already.",
                "Leave out --nproc, or start xlcli without torchrun, srun and WORLD_SIZE.",
            )
        return False
    return (nproc or 1) > 1 or max_restarts > 0


def reports_loss() -> bool:
    """Whether the launcher of this process is `launch`, which reports the loss of a process."""
    return os.environ.get(STARTED) == _run_id(os.getppid())


def end_with_launcher() -> None:
    """Sends this process SIGTERM when its launcher, `torchrun` or `launch`, has ended: it saves if it can."""
    launcher = os.getppid()
    given = os.environ.get(STARTED, "")

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    if given.startswith(_RUN) and given != _run_id(launcher):  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)
    elif given:
        threading.Thread(target=watch, name="launcher", daemon=True).start()


def _run_id(pid: int) -> str:
    """Identifier of the run of the launcher with this process number."""
    return f"{_RUN}{pid}"


def launch(
    arguments: Sequence[str],
    nproc: int,
    max_restarts: int = 0,
    *,
    verbose: bool,
    remedy: str = "Run the command again.",
) -> int:
    """Runs the command with these arguments in `nproc` processes of this machine; returns its exit code.

    Args:
        arguments: Arguments of `xlcli`.
        nproc: Number of processes.
        max_restarts: Number of times that all are started again after one has failed.
        verbose: Whether the launcher reports its actions.
        remedy: Remedy if a process was killed.

    Raises:
        RankError: A process was killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from xlcli.runtime import cpu_limit

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_limit() // nproc)))  # else the launcher sets it to 1
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", _run_id(os.getpid())]
    options = [*meeting, "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
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
        rank, code = first_failure({rank: failure.exitcode for rank, failure in error.failures.items()})
        if code < 0:
            raise RankError(f"rank {rank} of {nproc} was ended by {signal.Signals(-code).name}.", remedy) from None
        if code == LOST:
            raise RankError(f"rank {rank} of {nproc} has lost the connection to another one.", remedy) from None
        return code
    finally:
        logging.disable(before)
    return 0


def first_failure(codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and exit code of the failure that led to the other ones: a signal, else an error, else a loss."""
    return min(codes.items(), key=lambda item: (item[1] == LOST, item[1] > 0, item[0]))


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
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for pid in map(int, children.read_text().split()):
                with suppress(ProcessLookupError):  # the process has ended
                    if os.getpgid(pid) == pid:
                        os.killpg(pid, signal.SIGKILL)
