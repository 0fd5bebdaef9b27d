"""The meeting of the ranks of a run at one address: who waits says so, and gives up with one sentence."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

from xlcli.errors import RankError

JOIN_SECONDS = 180.0
"""Maximum number of seconds until all ranks have come."""
NOTICE_SECONDS = 5.0
"""Seconds until a message says which rank has not come."""
CONNECT_SECONDS = 5.0
"""Maximum number of seconds of an attempt to connect."""
POLL_SECONDS = 0.1
"""Seconds between two looks for another rank."""


class Wait:
    """A wait for other ranks with a limit.

    Args:
        limit: Seconds from now until it is given up.
        notify: Called with a message after some seconds.
    """

    def __init__(self, limit: float, notify: Callable[[str], None]) -> None:
        self.limit = limit
        self._notify = notify
        self._started = time.monotonic()
        self._notified = False

    def goes_on(self, absent: str) -> bool:
        """Sleeps, and returns whether to look again for what is absent."""
        time.sleep(POLL_SECONDS)
        passed = time.monotonic() - self._started
        if passed > min(NOTICE_SECONDS, self.limit / 2) and not self._notified:
            self._notified = True
            self._notify(f"waiting for {absent}, at most {self.limit:g} seconds")
        return passed < self.limit


def meet(rank: int, size: int, restarts: int, wait: Wait) -> Any:
    """The key-value store at `MASTER_ADDR` and `MASTER_PORT`, once all ranks have come; held by rank 0 or its launcher.

    Its keys are those of this meeting alone: ranks may meet several times, each time all of them.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        restarts: Number of times that all ranks have been started again.
        wait: The wait for them.

    Raises:
        RankError: Rank 0 cannot be reached, or another rank does not come.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = f"{host}:{port}"
    is_held_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = rank == 0 and not is_held_by_launcher
    unreachable = RankError(f"cannot reach rank 0 at {place}.", "Start rank 0, or check MASTER_ADDR and MASTER_PORT.")
    while not (holds or can_connect(host, port)):
        if not wait.goes_on(f"rank 0 at {place}"):
            raise unreachable
    limit = timedelta(seconds=wait.limit)
    try:
        store = held(host, port) if holds else TCPStore(host, port, None, False, limit, wait_for_workers=False)
        store.set_timeout(limit)
    except DistError:
        if holds:
            raise RankError(f"rank 0 cannot listen at {place}.", "Set MASTER_PORT to a free port.") from None
        raise unreachable from None
    try:
        number = store.add(f"meetings of rank {rank} after {restarts} restarts", 1)
        own = PrefixStore(f"meeting {restarts}.{number}", store)
        present = PrefixStore("present", own)
        present.set(str(rank), "")
        for other in range(size):
            while not present.check([str(other)]):
                if not wait.goes_on(f"rank {other}" + (f" at {place}" if not other else "")):
                    message = f"rank {other} of {size} has not come to {place} in {wait.limit:g} seconds."
                    raise RankError(message, "Start all ranks with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE.")
    except DistError:
        raise unreachable from None
    return own


@cache
def held(host: str, port: int) -> Any:
    """The store that this process holds until it ends: other ranks may already come to the next meeting."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, None, True, wait_for_workers=False)


def can_connect(host: str, port: int) -> bool:
    """Whether a process listens there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_SECONDS):
        return True
    return False
