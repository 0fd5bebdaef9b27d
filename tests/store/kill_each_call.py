"""Dies inside a save at every call that touches the disk, in turn: `python kill_each_call.py FOLDER KEEP [again]`.

Prints how many calls a save makes. Any checkpoint lost is an assertion, and so a failing exit status. Without torch.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from committing import is_whole, write
from faults import Faults

from xlcli.store.commit import commit, latest, step_of
from xlcli.store.lock import clean


def survives(folder: Path, keep: int, steps: tuple[int, int, int], at: int) -> bool:
    """Whether a save killed at call `at` had not ended before; the folder is checked either way."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for step in steps[:2]:
        commit(folder, step, write(step), keep)
    child = os.fork()
    if not child:
        Faults(at, lambda: os._exit(9)).install(setattr)
        commit(folder, steps[2], write(steps[2]), keep)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = latest(folder)
    assert found.path is not None, f"call {at}: nothing left of {sorted(folder.iterdir())}"
    assert not found.rejected, f"call {at}: {found.rejected}"
    assert step_of(found.path) in steps[1:], f"call {at}: lost {found.path}"
    assert is_whole(found.path), f"call {at}: {found.path} is not what was written"
    clean(folder)
    following = steps[2] + 1
    commit(folder, following, write(following), keep)
    after = latest(folder)
    assert step_of(after.path) == following
    assert is_whole(after.path)
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) <= keep + 1, f"call {at}: {left}"
    assert not any(name.startswith(".tmp-") for name in left), f"call {at}: {left}"
    return status == 9


if __name__ == "__main__":
    place, kept = Path(sys.argv[1]), int(sys.argv[2])
    numbers = (1, 2, 2) if "again" in sys.argv else (1, 2, 3)
    k = 1
    while survives(place, kept, numbers, k):
        k += 1
    print(k - 1)
