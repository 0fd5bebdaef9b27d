"""Large texts in bounded memory: the peak is that of a small text plus 64 MiB at most.

train   preparation of a text of as many MB as cases, and two steps
eval    the first 100,000 bytes of such a text
stream  as many portions of 100,000 bytes through standard input; a byte is a token

python tests/campaigns/big_inputs.py train eval --cases 500 --write
python tests/campaigns/big_inputs.py stream --cases 200 --write
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import campaign
from campaign import Tally, command, fork
from short_runs import corpus, small

from xlcli.cli.settings import to_toml

MARGIN = 64 * 2**20
PORTION = 100_000


def lines(first: int, size: int) -> bytes:
    """About `size` bytes of text with numbers from `first` on."""
    count = size // 50 + 1
    return b"".join(
        b"Item %d has %x parts and a weight of %d grams.\n" % (n, n * n, n % 977) for n in range(first, first + count)
    )


class Inputs:
    """A trained model of bytes, and peak memory of commands."""

    def __init__(self, place: Path) -> None:
        campaign.quick_runs()
        self.place, self.log = place, place / "log"
        settings = small(train={"max_steps": 2, "segment_len": 256, "mem_len": 256})
        (place / "settings.toml").write_text(to_toml(settings))
        os.chdir(place)
        self.peak("train", corpus(place), "-o", "model", "--config", "settings.toml", "-q")

    def peak(self, *arguments: str, source: Iterator[bytes] | None = None) -> int:
        """Peak resident memory of a command in bytes; `source` is its standard input."""
        reader, writer = os.pipe()

        def work() -> int:
            os.dup2(reader, 0)
            os.close(writer)
            return command(*arguments)()

        child = fork(work, self.log)
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            for portion in source or ():
                pipe.write(portion)
        _, status, usage = os.wait4(child, 0)
        assert status == 0, self.log.read_text()[-500:]
        return usage.ru_maxrss * 1024


def text_of(path: Path, megabytes: int) -> str:
    with path.open("wb") as file:
        for i in range(megabytes):
            file.write(lines(i * 20_000, 2**20))
    return str(path)


def compare(tally: Tally, cases: int, low: int, high: int) -> None:
    tally.notes |= {"peak_bytes_of_small": low, "peak_bytes": high}
    if high > low + MARGIN:
        tally.survived(cases - 1)
        tally.failed(tally.first, f"peak memory of {high:,} bytes, and {low:,} with a small text")
    else:
        tally.survived(cases)


def train(tally: Tally, cases: Iterator[int], place: Path) -> None:
    inputs, n = Inputs(place), len(list(cases))
    peaks = [
        inputs.peak("train", text_of(place / "text.txt", size), "-o", f"of-{size}", "--config", "settings.toml", "-q")
        for size in (1, n)
    ]
    compare(tally, n, *peaks)


def evaluate(tally: Tally, cases: Iterator[int], place: Path) -> None:
    inputs, n = Inputs(place), len(list(cases))
    peaks = [
        inputs.peak("eval", text_of(place / "text.txt", size), "-m", "model", "--limit", "100000", "-q")
        for size in (1, n)
    ]
    compare(tally, n, *peaks)


def stream(tally: Tally, cases: Iterator[int], place: Path) -> None:
    inputs, n = Inputs(place), len(list(cases))
    arguments = ("stream", "-m", "model", "--emit", "none", "-q")
    peaks = [
        inputs.peak(*arguments, source=(lines(i * 2000, PORTION)[:PORTION] for i in range(size))) for size in (3, n)
    ]
    compare(tally, n, *peaks)


PARTS = {"train": train, "eval": evaluate, "stream": stream}

if __name__ == "__main__":
    sys.exit(campaign.run(__doc__, PARTS, cases=20))
