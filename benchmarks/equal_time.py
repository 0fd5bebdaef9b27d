"""Bits per byte of a default model after ten minutes of training, on the test part of a prefix of enwik8.

    python benchmarks/equal_time.py enwik8-prefix.txt.gz [--minutes 10] [--out benchmarks/results/equal_time.json]

The text is the first 4,150,000 bytes of enwik8: 3,750,000 training, 200,000 validation, 200,000 test. Only the
validation file and the time are set, so the result is that of the defaults. Run it on an idle machine.
"""

import argparse
import gzip
import json
import os
import tempfile
import time
from pathlib import Path

from runs import machine, xlcli

SPLITS = {"train": (0, 3_750_000), "valid": (3_750_000, 3_950_000), "test": (3_950_000, 4_150_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "equal_time.json")
    options = parser.parse_args()
    data = (gzip.open if options.text.suffix == ".gz" else open)(options.text, "rb").read()
    result: dict[str, object] = {"machine": machine(), "minutes": options.minutes}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, (start, stop) in SPLITS.items():
            (home / f"{name}.txt").write_bytes(data[start:stop])
        seconds = f"{options.minutes * 60:.0f}s"
        command = ["train", "train.txt", "--valid", "valid.txt", "--max-time", seconds]
        os.environ["XLCLI_CACHE"] = str(home / "cache")
        started = time.monotonic()
        xlcli(*command, cwd=home)
        result["command"] = "xlcli " + " ".join(command)
        result["wall_seconds"] = round(time.monotonic() - started, 1)
        record = json.loads((home / "models" / "train" / "record.json").read_text())
        kept = ("steps", "tokens", "seconds", "parameters", "preset", "tokenizer")
        result["training"] = {name: record[name] for name in kept}
        result["test"] = [
            {name: score[name] for name in ("mem_len", "segment_len", "bits_per_byte", "tokens_per_second")}
            for mem_len in ("0", "", "512")
            for score in [
                json.loads(xlcli("eval", "test.txt", "--json", *(["--mem-len", mem_len] if mem_len else []), cwd=home))
            ]
        ]
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
