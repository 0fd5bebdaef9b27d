"""Commands beside programs that keep all CPUs busy: wall time with the default number of threads and with one.

    python benchmarks/busy.py TEXT [--loops 4] [--runs 5] [--xlcli PATH] [--old PATH]

TEXT is a text of at least 100 kB. `--loops 0` measures an idle machine. With `--old`, the command of another checkout
takes the place of `--threads 1`. The two are run in turn, after one run of each; the output is their medians in seconds
and the ratio, as a row of JSON for each command.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH = 60_000
"""Number of bytes of the text that is scored."""


def seconds(command: list[str], folder: Path) -> float:
    begun = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--xlcli", default=str(Path(sys.executable).with_name("xlcli")))
    parser.add_argument("--old")
    parser.add_argument("--only", choices=["train", "eval", "generate"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.text.read_bytes()
        (folder / "train.txt").write_bytes(data)
        (folder / "eval.txt").write_bytes(data[:LENGTH].rpartition(b"\n")[0])
        train = "train train.txt --init none --preset tiny --max-steps 60 --overwrite -q -o model"
        commands = {
            "train": train.split(),
            "eval": ["eval", "eval.txt", "-m", "books", "-q"],
            "generate": ["generate", "The old man", *["-n", "400", "-m", "books", "--seed", "1", "-q"]],
        }
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.loops)]
        try:
            for command, words in commands.items():
                if options.only not in (None, command):
                    continue
                new = [options.xlcli, *words]
                other = [options.old, *words] if options.old else [*new, "--threads", "1"]
                times: dict[str, list[float]] = {"default": [], "other": []}
                for run in range(options.runs + 1):
                    for key, each in (("default", new), ("other", other)):
                        spent = seconds(each, folder)
                        if run:
                            times[key].append(spent)
                a, b = statistics.median(times["default"]), statistics.median(times["other"])
                row = {"command": command, "loops": options.loops, "default_s": a, "other_s": b, "ratio": a / b}
                print(
                    json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}), flush=True
                )
        finally:
            for loop in loops:
                loop.kill()


if __name__ == "__main__":
    main()
