"""Bits per byte of texts, cold and with learning while reading, beside general compressors on the same bytes.

    python benchmarks/adapting.py FILE ... [--model books] [--limit 200000] [--out benchmarks/results/adapting.json]
    python benchmarks/adapting.py --table benchmarks/results/adapting.json     # the table of docs/adapting.md

Every file is read with the model as it is, with `--adapt`, with `--context-cache`, and with both, by one thread. The
compressors are gzip -9, xz -9, zstd --ultra -22, and PPMd at its best order (pip install pyppmd). A restarted benchmark
continues with the missing results.
"""

import argparse
import gzip
import json
import lzma
import os
import tempfile
from pathlib import Path

import zstandard
from equal_time import machine, xlcli

CACHE = "100000"
READINGS = {
    "cold": (),
    "adapting": ("--adapt",),
    "cache": ("--context-cache", CACHE),
    "both": ("--adapt", "--context-cache", CACHE),
}
PPMD_ORDERS = (3, 4, 5, 6, 8, 10, 12, 16)
COLUMNS = (*READINGS, "gzip -9", "xz -9", "zstd -22", "PPMd")


def ppmd(data: bytes) -> int:
    """Size in bytes by PPMd, variant H, at the best order."""
    import pyppmd

    sizes = []
    for order in PPMD_ORDERS:
        encoder = pyppmd.Ppmd7Encoder(order, 1 << 27)
        sizes.append(len(encoder.encode(data)) + len(encoder.flush()))
    return min(sizes)


def compressed(data: bytes) -> dict[str, float]:
    """Bits per byte by compressor."""
    sizes = {
        "gzip -9": len(gzip.compress(data, 9, mtime=0)),
        "xz -9": len(lzma.compress(data, preset=9)),
        "zstd -22": len(zstandard.ZstdCompressor(level=22).compress(data)),
        "PPMd": ppmd(data),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def read(path: Path, model: str, options: tuple[str, ...]) -> dict[str, float]:
    """Score of a file, and the time that it took, in seconds of wall clock."""
    command = ("eval", str(path), "-m", model, "--json", "--threads", "1", "-q", *options)
    score = json.loads(xlcli(*command, cwd=Path.cwd()))
    return {"bits_per_byte": score["bits_per_byte"], "seconds": score["seconds"]}


def table(result: dict[str, dict]) -> str:
    """Markdown table: a row for each file."""
    lines = [f"| text | bytes | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in result["texts"].items():
        bits = {
            **row["compressors"],
            **{reading: row[reading]["bits_per_byte"] for reading in READINGS if reading in row},
        }
        shown = " | ".join(f"{bits[column]:.3f}" if column in bits else "–" for column in COLUMNS)
        lines.append(f"| {name} | {row['bytes']:,} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--model", default="books")
    parser.add_argument("--limit", type=int, default=200_000)
    parser.add_argument("--readings", default=",".join(READINGS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adapting.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    result = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine(), "texts": {}}
    result |= {"model": options.model, "limit": options.limit}
    with tempfile.TemporaryDirectory() as folder:
        for file in options.files:
            data = file.read_bytes()[: options.limit]
            row = result["texts"].setdefault(file.name, {"bytes": len(data), "compressors": compressed(data)})
            path = Path(folder) / file.name
            path.write_bytes(data)
            for reading in options.readings.split(","):
                if reading not in row:
                    row[reading] = read(path, options.model, READINGS[reading])
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(file.name, row, flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
