"""Bits per byte of present-day English by register.

    python benchmarks/registers.py MODERN [-m books] [--split valid] [--limit 120000]

MODERN is a folder with manifest.jsonl, whose lines have the `file`, `split` and `register` of each text. The first
bytes of each file of the split are scored, each file alone, with the memory of training. The figure of a register is
the bits of all its files over their bytes.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import xlcli
from xlcli.events import Score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modern", type=Path)
    parser.add_argument("-m", "--model", default="books")
    parser.add_argument("--split", choices=["valid", "test"], default="valid")
    parser.add_argument("--limit", type=int, default=120_000, metavar="BYTES")
    options = parser.parse_args()
    model = xlcli.load(options.model)
    rows = map(json.loads, (options.modern / "manifest.jsonl").read_text().splitlines())
    bits, sizes = Counter(), Counter()
    for row in rows:
        if row["split"] == options.split:
            events = xlcli.evaluate(model, options.modern / row["file"], limit=options.limit, context_share=0)
            (score,) = [event for event in events if isinstance(event, Score)]
            for register in (row["register"], "all"):
                bits[register] += score.bits_per_byte * score.bytes
                sizes[register] += score.bytes
    for register, size in sizes.most_common():
        print(f"{register:34} {size:9,} bytes  {bits[register] / size:.3f}")


if __name__ == "__main__":
    main()
