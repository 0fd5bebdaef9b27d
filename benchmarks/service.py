"""A stream as a service: a log grows and is rotated, and the stream is killed and restarted every ten seconds.

    python benchmarks/service.py LOG [LOG ...] [--minutes 20] [--rate 8] [--out benchmarks/results/service.json]
    ... [-- --adapt --context-cache 5000]      # further options of xlcli stream

Lines are written `--rate` times a second to a file that is renamed every two minutes. Every process is killed with
SIGKILL. Lines that were printed again must have the same offset; the scores are compared with those of one stream over
the whole text. Reported are the differences in bits of a line and the peak of the RAM of each process.
"""

import argparse
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from runs import machine, save

SECONDS = 10
ROTATE = 120
XLCLI = [sys.executable, "-m", "xlcli", "stream"]


def write(lines: list[bytes], log: Path, whole: Path, rate: float, stop: threading.Event) -> None:
    """Writes lines until `stop`, and renames the log now and then."""
    file, rotated, began = log.open("ab", buffering=0), time.monotonic(), time.monotonic()
    with whole.open("ab", buffering=0) as text:
        for number, line in enumerate(itertools.cycle(lines)):
            if stop.is_set():
                break
            if time.monotonic() - rotated > ROTATE:
                rotated = time.monotonic()
                log.rename(log.with_name(f"app.log-{int(time.time())}"))
                file.close()
                file = log.open("ab", buffering=0)
            text.write(line)
            file.write(line)
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
    file.close()


def peak_ram(child: subprocess.Popen) -> int:
    """Peak of the RAM of a process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{child.pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def rows(path: Path) -> list[dict]:
    """Complete lines of JSON."""
    *texts, _ = path.read_text().split("\n")
    return [json.loads(text) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=8, help="lines per second")
    parser.add_argument("--model", default="books")
    parser.add_argument("--out", type=Path)
    given = sys.argv[1:]
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        log, whole = place / "app.log", place / "whole"
        log.touch()
        lines = [line for path in options.logs for line in path.read_bytes().splitlines(keepends=True)]
        stop = threading.Event()
        writer = threading.Thread(target=write, args=(lines, log, whole, options.rate, stop))
        writer.start()
        common = ["-m", options.model, "--json", "-q", "--threads", "1", *more]
        service = [*XLCLI, str(log), "--follow", "--state", str(place / "s"), "--save-every", "1s", *common]
        rams, outputs, end = [], [], time.monotonic() + 60 * options.minutes
        while time.monotonic() < end or not stop.is_set():
            is_last = time.monotonic() >= end
            if is_last:
                stop.set()
                writer.join()
            outputs.append(place / f"out.{len(outputs)}")
            with outputs[-1].open("wb") as out:
                child = subprocess.Popen(service, stdout=out)
                time.sleep(3 * SECONDS if is_last else SECONDS)
                rams.append(peak_ram(child))
                child.send_signal(signal.SIGKILL)
                child.wait()
        with (place / "out").open("wb") as out:
            subprocess.run([*XLCLI, str(whole), *common], stdout=out, check=True)
        expected = {row["byte"]: row for row in rows(place / "out")}
        printed = [row for path in outputs for row in rows(path)]
        differences = [abs(row["bits"] - expected[row["byte"]]["bits"]) for row in printed]
        assert all(row["line"] == expected[row["byte"]]["line"] for row in printed)
        found = {
            "options": " ".join(more), "lines": len(expected), "processes": len(outputs),
            "missing": len(expected.keys() - {row["byte"] for row in printed}),
            "printed_again": len(printed) - len({row["byte"] for row in printed}),
            "max_difference_bits": max(differences), "median_difference_bits": statistics.median(differences),
            "first_peak_ram": rams[1], "last_peak_ram": rams[-2], "largest_peak_ram": max(rams),
        }  # fmt: skip
        print(json.dumps(found, indent=1))
        if options.out:
            old = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
            save(options.out, {"machine": machine(), "rows": [*old, found]})


if __name__ == "__main__":
    main()
