"""The beginning of a run on several ranks, which wait for the first one to prepare it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from xlcli import errors
from xlcli.errors import XLError
from xlcli.ranks import Ranks
from xlcli.store.commit import holds_run, place_of_run

_NAME = "run"


def continues(folder: Path, ranks: Ranks, *, overwrite: bool) -> bool:
    """Whether a new run in this folder is to be resumed: it had begun when the launcher started all ranks again."""
    is_own = holds_run(folder) and not overwrite
    return ranks.restarts > 0 and (is_own or place_of_run(folder) != folder)


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """Context of the first rank. The others end with it if it ends before `begin`, with the same error."""
    ranks.withdraw(_NAME)  # of an earlier run
    ranks.barrier()
    end: dict[str, str] = {}
    try:
        yield
    except XLError as error:
        end = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
        raise
    finally:
        ranks.publish(_NAME, end)


def begin(ranks: Ranks, point: Path) -> None:
    """Lets the other ranks begin with this checkpoint."""
    ranks.publish(_NAME, {"point": str(point.absolute())})


def beginning(ranks: Ranks, stop: Callable[[], bool]) -> Path | None:
    """Checkpoint with which to begin, on another rank than the first; waits for it. None: there is no run.

    Raises:
        StoppedEarlyError: `stop` became true.
        XLError: The error of the first rank.
    """
    ranks.barrier()
    begun = ranks.published(_NAME, stop)
    if "error" in begun:
        error: XLError = getattr(errors, begun["error"])(begun["message"], begun["remedy"])
        error.is_of_first_rank = True
        raise error
    return Path(begun["point"]) if "point" in begun else None
