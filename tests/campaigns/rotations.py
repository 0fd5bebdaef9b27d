"""Logs that are rotated, copied, packed, removed, hidden and restarted, and a reader of them (`text/rotated_logs.py`).

    python tests/campaigns/rotations.py [--cases N] [--seconds S] [--case N] [--write]

A case is one scenario of up to 60 events; every line of its log is unique. Each is read once, or a warning says that
text may be lost; no line of another file is read.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import campaign
from campaign import TESTS, Tally

sys.path.insert(0, str(TESTS / "text"))

from rotated_logs import scenario


def follow(tally: Tally, cases: Iterator[int], place: Path) -> None:
    for case in cases:
        folder = place / str(case)
        problem = scenario(case, folder).problem()
        if problem is None:
            tally.survived()
        else:
            tally.failed(case, problem, folder)
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, {"follow": follow}, 2000))
