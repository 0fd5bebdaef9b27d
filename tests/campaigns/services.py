"""`kill -9` of `xlcli stream FILE --follow --state` under a writer that rotates its log.

    renames   the writer renames its file to one with a date and begins another one
    learning  the stream also adapts its weights and has a context cache

    python tests/campaigns/services.py [renames|learning] [--cases N] [--seconds S] [--write]

A case is one kill at a random moment; one signal in five is SIGTERM. In the end the processes together must have
printed every line of the log, each with the offset and the bits that one uninterrupted stream prints.
"""

import json
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
from short_runs import corpus, small

from xlcli.cli.settings import to_toml

KILLS_PER_LOG = 50
TOLERANCE = {"renames": 1e-3, "learning": 0.02}
"""Largest difference in bits of a line: the text is divided into calls by the time at which it arrives."""
ENDED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)


class Service:
    """A model, a log with its writer, and the processes that have scored it."""

    def __init__(self, place: Path, part: str) -> None:
        self.place, self.part = place, part
        self.more = ("--adapt", "--context-cache", "500") if part == "learning" else ()
        settings = place / "settings.toml"
        settings.write_text(to_toml(small(train={"max_steps": 3})))
        model = ("train", corpus(place), "-o", str(place / "model"), "--config", str(settings), "-q")
        assert wait(fork(command(*model), place / "train.log")) == 0, (place / "train.log").read_text()

    def begin(self, seed: int) -> None:
        """Starts a writer in an empty folder, when there is a state of its first line."""
        self.folder = self.place / "service"
        self.folder.mkdir()
        self.log, self.truth, self.done = (self.folder / name for name in ("app.log", "truth", "done"))
        for path in (self.log, self.truth):
            path.write_text("The first line of the log.\n")
        self.n = 0
        child = self.start()
        while not (self.folder / "log.state").exists():
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        wait(child)
        self.writer = fork(lambda: self.write(random.Random(seed)), self.folder / "writer.txt")

    def write(self, draw: random.Random) -> int:
        """Writes lines, and half lines, until `done` exists; rotates now and then."""
        number, n_written, n_rotated, data = 0, 0, 0, b""
        with self.truth.open("ab", buffering=0) as truth:
            file = self.log.open("ab", buffering=0)
            while not self.done.exists() or not data.endswith(b"\n"):
                data = b"%d: the fox went home at %d, and slept until noon; then it rose.\n" % (
                    number,
                    draw.randrange(10**9),
                )
                if draw.random() < 0.1:
                    data = data[: draw.randrange(1, len(data))]
                number += 1
                truth.write(data)
                file.write(data)
                n_written += 1
                if n_written > 20 and draw.random() < 0.05 and data.endswith(b"\n"):  # a line ends with its file
                    n_written = 0
                    n_rotated += 1
                    file.close()
                    time.sleep(0.02)  # the clock of the file system is coarse
                    self.log.rename(self.folder / f"app.log-{20260000 + n_rotated}")
                    file = self.log.open("ab", buffering=0)
                time.sleep(draw.random() * (0.2 if self.more else 0.04))
        return 0

    def start(self) -> int:
        """Process id of a stream that continues the last one."""
        self.n += 1
        stream = (
            "stream",
            str(self.log),
            "--follow",
            "--state",
            str(self.folder / "log.state"),
            "--save-every",
            "0.05s",
        )
        model = ("-m", str(self.place / "model"), "--json", "-q", *self.more)
        return fork(command(*stream, *model), self.folder / f"out.{self.n}")

    def lines(self, name: str) -> list[dict]:
        """Lines that a process has printed; a kill may have cut the last one."""
        path = self.folder / name
        *texts, _ = (path.read_text() if path.exists() else "").split("\n")
        for text in texts:
            assert text.startswith("{"), text
        return [json.loads(text) for text in texts]

    def finish(self) -> None:
        """Asserts that all lines of the log were scored as by one process."""
        self.done.touch()
        assert wait(self.writer) == 0, (self.folder / "writer.txt").read_text()
        text = self.truth.read_bytes()
        last = len(text) - len(text.splitlines()[-1]) - 1
        child, end = self.start(), time.monotonic() + 60
        while not any(line["byte"] == last for n in range(self.n) for line in self.lines(f"out.{n + 1}")):
            assert time.monotonic() < end, "the last line was not scored"
            time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        assert wait(child) in ENDED
        stream = ("stream", str(self.truth), "-m", str(self.place / "model"), "--json", "-q", *self.more)
        assert wait(fork(command(*stream), self.folder / "whole")) == 0
        expected = {line["byte"]: line for line in self.lines("whole")}
        printed: set[int] = set()
        for n in range(1, self.n + 1):
            for line in self.lines(f"out.{n}"):
                known = expected[line["byte"]]
                printed.add(line["byte"])
                assert (line["line"], line["bytes"]) == (known["line"], known["bytes"]), f"{line}, not {known}"
                assert abs(line["bits"] - known["bits"]) <= TOLERANCE[self.part], f"{line}, not {known}"
        assert printed == expected.keys(), f"{len(expected) - len(printed)} lines are missing"
        shutil.rmtree(self.folder)


def kill(tally: Tally, cases: Iterator[int], place: Path) -> None:
    service, draw = Service(place, tally.part), random.Random(tally.first)
    pending: list[int] = []
    service.begin(tally.first)
    for case in cases:
        pending.append(case)
        child = service.start()
        time.sleep(draw.random() ** 2 * 2)
        os.kill(child, signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL)
        try:
            code = wait(child)
            assert code in ENDED, f"exit code {code}: {(service.folder / f'out.{service.n}').read_text()[-500:]}"
            if len(pending) == KILLS_PER_LOG:
                service.finish()
                tally.survived(len(pending))
                pending.clear()
                service.begin(case + 1)
        except AssertionError as error:
            tally.survived(len(pending) - 1)
            tally.failed(case, str(error), service.folder)
            return
    if pending:
        try:
            service.finish()
            tally.survived(len(pending))
        except AssertionError as error:
            tally.failed(pending[-1], str(error), service.folder)
    else:
        service.done.touch()
        wait(service.writer)


if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, dict.fromkeys(("renames", "learning"), kill), 200))
