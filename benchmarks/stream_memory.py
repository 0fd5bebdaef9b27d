"""Resident memory of `yes | xlcli stream --emit none`, recorded every second.

    python benchmarks/stream_memory.py [--model NAME] [--minutes 10] [--out benchmarks/results/stream_memory.json]

Exit code 0 if the largest and smallest resident memory after the first minute differ by at most 1 %.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from runs import machine


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stream_memory.json")
    options = parser.parse_args()
    command = ["stream", "--emit", "none", "--json", *(["-m", options.model] if options.model else [])]
    with (
        subprocess.Popen(["yes"], stdout=subprocess.PIPE) as source,
        subprocess.Popen(
            [sys.executable, "-m", "xlcli", *command], stdin=source.stdout, stdout=subprocess.PIPE, text=True
        ) as reader,
    ):
        samples = []
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < options.minutes * 60:
            samples.append((round(seconds, 1), resident_bytes(reader.pid)))
            time.sleep(1)
        source.terminate()
        reader.communicate()
    settled = [size for seconds, size in samples if seconds >= 60]
    spread = max(settled) / min(settled) - 1
    result = {
        "command": "yes | xlcli " + " ".join(Path(word).name for word in command),
        "minutes": options.minutes,
        "after_first_minute": {"min_bytes": min(settled), "max_bytes": max(settled), "spread": round(spread, 5)},
        "every_30_seconds": samples[::30],
        "machine": machine(),
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if spread <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
