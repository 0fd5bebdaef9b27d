"""Bits per byte of texts, cold and with learning while reading, beside general compressors on the same bytes.

    python benchmarks/adapting.py FILE ... [--model books] [--limit 200000] [--out benchmarks/results/adapting.json]
    python benchmarks/adapting.py --table benchmarks/results/adapting.json     # the tables of docs/results.md

Every file is read with the model as it is, with `--adapt`, with `--context-cache`, and with both, by one thread. The
compressors are gzip -9, xz -9e, zstd --ultra -22 --long=27, and PPMd at its best order (pip install pyppmd); zpaq -m5
and paq8px -8, relatives of the context cache, where they are installed. The second table has bits per byte by place in
the text, the third kB/s. A restarted benchmark continues with the missing results.
"""

import argparse
import gzip
import json
import lzma
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zstandard
from equal_time import machine, xlcli

from xlcli.text.formats import Utf8

CACHE = "100000"
READINGS = {
    "cold": (),
    "adapting": ("--adapt",),
    "cache": ("--context-cache", CACHE),
    "both": ("--adapt", "--context-cache", CACHE),
}
PPMD_ORDERS = (3, 4, 5, 6, 8, 10, 12, 16)
PLACES = (0, 4_000, 16_000, 64_000, 256_000, 1_000_000)
"""First bytes of the parts whose bits are counted apart."""


def ppmd(data: bytes) -> int:
    """Size in bytes by PPMd, variant H, at the best order."""
    import pyppmd

    sizes = []
    for order in PPMD_ORDERS:
        encoder = pyppmd.Ppmd7Encoder(order, 1 << 27)
        sizes.append(len(encoder.encode(data)) + len(encoder.flush()))
    return min(sizes)


def zstd(data: bytes) -> int:
    """Size in bytes by Zstandard with a window of 128 MiB."""
    parameters = zstandard.ZstdCompressionParameters.from_level(22, window_log=27, enable_ldm=True)
    return len(zstandard.ZstdCompressor(compression_params=parameters).compress(data))


def program(*command: str) -> Callable[[bytes], int]:
    """Size in bytes of the archive that a program makes; TEXT and ARCHIVE in the command stand for names of files."""

    def size(data: bytes) -> int:
        with tempfile.TemporaryDirectory() as folder:
            names = {"TEXT": Path(folder) / "text", "ARCHIVE": Path(folder) / f"text.{command[0]}"}
            names["TEXT"].write_bytes(data)
            subprocess.run([str(names.get(part, part)) for part in command], check=True, capture_output=True)
            return names["ARCHIVE"].stat().st_size

    return size


COMPRESSORS: dict[str, Callable[[bytes], int]] = {
    "gzip -9": lambda data: len(gzip.compress(data, 9, mtime=0)),
    "xz -9e": lambda data: len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    "zstd -22": zstd,
    "PPMd": ppmd,
    "zpaq -m5": program("zpaq", "a", "ARCHIVE", "TEXT", "-m5", "-t1"),
    "paq8px -8": program("paq8px", "-8", "TEXT", "ARCHIVE"),
}
COLUMNS = (*READINGS, *COMPRESSORS)


def compressed(data: bytes, name: str) -> dict[str, float]:
    """Bits per byte, and the time that it took; of PPMd that of one order."""
    start = time.perf_counter()
    bits = 8 * COMPRESSORS[name](data) / len(data)
    seconds = (time.perf_counter() - start) / (len(PPMD_ORDERS) if name == "PPMd" else 1)
    return {"bits_per_byte": bits, "seconds": seconds}


def read(path: Path, model: str, options: tuple[str, ...]) -> dict[str, object]:
    """Score of a file, whole and by place, and the time that it took, in seconds of wall clock."""
    data = path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.jsonl"
        command = ["eval", str(path), "-m", model, "--json", "--threads", "1", "-q", "--per-token", str(tokens)]
        text = Utf8()
        text.feed(data, final=True)
        if text.bad is not None or text.has_nul:
            command.append("--binary")
        score = json.loads(xlcli(*command, *options, cwd=Path.cwd()))
        starts = [start for start in PLACES if start < len(data)]
        bits = [0.0] * len(starts)
        for line in tokens.read_text().splitlines():
            token = json.loads(line)
            bits[sum(start <= token["byte"] for start in starts) - 1] += token["bits"]
    ends = [*starts[1:], len(data)]
    places = [total / (end - start) for total, start, end in zip(bits, starts, ends, strict=True)]
    return {"bits_per_byte": score["bits_per_byte"], "seconds": score["seconds"], "places": places}


def table(result: dict[str, dict]) -> str:
    """Markdown tables with a row for each file, or for each file and reading."""
    columns = [name for name in COLUMNS if any(name in row for row in result["texts"].values())]
    bits = [f"| text | bytes | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    speed = list(bits)
    places = [f"| text | | {' | '.join(f'{start:,}' for start in PLACES)} |", "|---" * (len(PLACES) + 2) + "|"]
    for name, row in result["texts"].items():
        for lines, kind in ((bits, ".3f"), (speed, ",.1f")):
            figures = []
            for found in (row.get(column) for column in columns):
                value = found and (found["bits_per_byte"] if lines is bits else row["bytes"] / found["seconds"] / 1000)
                figures.append(f"{value:{kind}}" if value else "–")
            lines.append(f"| {name} | {row['bytes']:,} | {' | '.join(figures)} |")
        for reading in READINGS:
            if reading in row:
                found = " | ".join(f"{value:.3f}" for value in row[reading]["places"])
                places.append(f"| {name} | {reading} | {found} |")
    return "\n\n".join("\n".join(lines) for lines in (bits, places, speed))


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
            row = result["texts"].setdefault(file.name, {"bytes": len(data)})
            path = Path(folder) / file.name
            path.write_bytes(data)
            for reading in filter(None, options.readings.split(",")):
                if reading not in row:
                    row[reading] = read(path, options.model, READINGS[reading])
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
            for name in COMPRESSORS:
                is_there = name.split()[0] not in ("zpaq", "paq8px") or shutil.which(name.split()[0])
                if name not in row and is_there:
                    row[name] = compressed(data, name)
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(file.name, row, flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
