"""`kill -9` of `xlcli train`: the run that is resumed again and again must equal the uninterrupted one to the bit.

    moments  at a random moment: start, text, step, validation, save, end. Half of the runs replace another model, and
             one signal in five is SIGTERM, at which a run saves and ends.
    calls    at every call that touches the disk, in turn

    python tests/campaigns/kills.py [moments|calls] [--cases N] [--seconds S] [--write]

A run is a child that is forked after torch was imported, so that a kill takes a fraction of a second. After each kill
the newest checkpoint must be undamaged and no older than the last step that was logged before it.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import campaign
from campaign import Tally, command, fork, wait
from faults import Faults
from short_runs import corpus, remains, small

from xlcli.cli.settings import to_toml
from xlcli.store.commit import latest, step_of
from xlcli.store.layout import read_metrics

KILLS_PER_RUN = 8
"""Expected number of kills until a run ends."""
STEPS = 6
ENDED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a run that was killed or terminated."""


class Runs:
    """Runs of one configuration in `place`; `old` is the model that some of them replace."""

    def __init__(self, place: Path) -> None:
        campaign.quick_runs()
        self.place, self.log = place, place / "log"
        self.text = corpus(place)
        self.settings = place / "settings.toml"
        self.settings.write_text(to_toml(small(train={"max_steps": STEPS, "eval_every": 2, "save_every": 1})))
        self.finish("old", "--seed", "9")
        started = time.monotonic()
        self.finish("whole")
        self.seconds = time.monotonic() - started
        self.expected = remains(place / "whole")

    def start(self, name: str, *more: str) -> int:
        """Process id of a run in this folder: a new one, or the one that is there resumed."""
        folder = self.place / name
        begun = (folder / "config.json").exists()
        replacing = (folder / ".replacement" / "config.json").exists()
        if replacing or (begun and not self.is_old(folder)):
            more = ("--resume",)
        elif begun:
            more = ("--overwrite",)
        train = command("train", self.text, "-o", str(folder), "--config", str(self.settings), "-q", *more)
        return fork(train, self.log)

    def finish(self, name: str, *more: str) -> None:
        if code := wait(self.start(name, *more)):
            raise AssertionError(f"exit code {code}: {self.log.read_text()[:500]}")

    def is_old(self, folder: Path) -> bool:
        """Whether the folder still holds the model to be replaced, complete."""
        ours, theirs = (path / "model.safetensors" for path in (folder, self.place / "old"))
        return folder.name != "old" and ours.exists() and ours.read_bytes() == theirs.read_bytes()

    def check(self, folder: Path) -> None:
        """Asserts that nothing was lost that had been saved. Two models that change places are compared at the end."""
        staged = folder / ".replacement"
        is_moved = (staged / "config.json").exists() and not (folder / "config.json").exists()
        if is_moved or (staged / "model.safetensors").exists():
            return
        for run in (folder, folder / ".replacement"):
            found = latest(run / "checkpoints")
            assert not found.rejected, found.rejected
            logged = max((row["step"] for row in read_metrics(run)), default=0)
            step = step_of(found.path) if found.path else 0
            assert step >= logged - 1, f"step {logged} was logged, and the newest checkpoint is of step {step}"

    def compare(self, folder: Path) -> None:
        """Asserts that a run that has ended equals the uninterrupted one and left nothing behind."""
        found = remains(folder)
        differing = [name for name in self.expected if found[name] != self.expected[name]]
        assert not differing, f"differs in {differing}"
        left = [path.name for path in folder.iterdir() if path.name.startswith((".tmp-", ".replacement"))]
        assert not left, f"left {left}"


def moments(tally: Tally, cases: Iterator[int], place: Path) -> None:
    runs, draw = Runs(place), random.Random(tally.first)
    folder = place / "killed"
    pending: list[int] = []  # kills of the present run
    while True:
        if not folder.exists() and draw.random() < 0.5:
            shutil.copytree(place / "old", folder)
        if draw.random() < 1 / KILLS_PER_RUN:
            shutil.rmtree(place / "cache", ignore_errors=True)
        case = next(cases, None)
        child = runs.start(folder.name)
        if case is not None:
            time.sleep(draw.random() * runs.seconds)
            os.kill(child, signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL)
        code = wait(child)
        try:
            assert code in (0, *ENDED), f"exit code {code}: {runs.log.read_text()[:500]}"
            if code:
                pending.append(case)
                runs.check(folder)
                continue
            runs.compare(folder)
            tally.survived(len(pending))
        except AssertionError as error:
            tally.survived(len(pending) - 1)
            tally.failed(pending[-1] if pending else tally.first, str(error), folder)
        pending.clear()
        shutil.rmtree(folder, ignore_errors=True)
        if case is None:
            return


def calls(tally: Tally, cases: Iterator[int], place: Path) -> None:
    runs = Runs(place)
    folder = place / "killed"

    def start(at: int) -> int:
        def die() -> None:
            os._exit(9)

        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / "old", folder)
        train = command("train", runs.text, "-o", str(folder), "--config", str(runs.settings), "-q", "--overwrite")

        def work() -> int:
            faults = Faults(at, die)
            faults.install(setattr)
            code = train()
            runs.place.joinpath("count").write_text(str(faults.count))
            return code

        return fork(work, runs.log)

    assert wait(start(0)) == 0
    n_calls = int((place / "count").read_text())
    tally.notes["calls_in_a_run"] = n_calls
    for case in cases:
        if case >= n_calls and tally.write:
            return  # every call has had its turn
        code = wait(start(1 + case * 7919 % n_calls))  # a prime number: all calls in a scattered order
        try:
            assert code == 9, f"exit code {code}: {runs.log.read_text()[:500]}"
            runs.check(folder)
            runs.finish(folder.name)
            runs.compare(folder)
            tally.survived()
        except AssertionError as error:
            tally.failed(case, str(error), folder)


PARTS = {"moments": moments, "calls": calls}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=100))
