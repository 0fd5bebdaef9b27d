"""Surprisal of log lines as a detector of alerts: area under the ROC curve on a log with labels.

    python benchmarks/anomalies.py BGL_2k.log [--model books] [--out benchmarks/results/anomalies.json]
    python benchmarks/anomalies.py --table benchmarks/results/anomalies.json     # the table of docs/results.md

The first column of each line is its label, `-` for no alert; it is cut off before anything reads the line. A line is
scored by what came before it. The area is the probability that a random alert has a higher score than another random
line, ties counting half (Mann-Whitney). Scores are those of the model as it is, adapting, with a cache, and with both;
beside them stand the length of the line, the rarity of its words among the lines before, and its size by PPMd
(pip install pyppmd), in which lines are only distinguished by whole bytes. Each score is taken per line, and per byte
of the line where that has a meaning. One thread.
"""

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from adapting import CACHE
from runs import machine, save

import xlcli
from xlcli.events import LineScore

READINGS: dict[str, dict[str, bool | int]] = {
    "model": {},
    "adapting": {"adapt": True},
    "cache": {"context_cache": int(CACHE)},
    "adapting and cache": {"adapt": True, "context_cache": int(CACHE)},
}
PPMD_ORDER = 6


def split(data: bytes) -> tuple[list[bytes], list[bool]]:
    """Lines without their labels, and whether each is an alert."""
    parts = [line.split(b" ", 1) for line in data.splitlines(keepends=True)]
    return [rest for _, rest in parts], [label != b"-" for label, _ in parts]


def area(scores: list[float], alerts: list[bool]) -> float:
    """Area under the ROC curve from the ranks of the scores; equal scores share the mean of their ranks."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    ranks = [0.0] * len(scores)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        for i in order[start:end]:
            ranks[i] = (start + end + 1) / 2
        start = end
    n = sum(alerts)
    return (sum(rank for rank, alert in zip(ranks, alerts, strict=True) if alert) - n * (n + 1) / 2) / (
        n * (len(alerts) - n)
    )


def rarities(lines: list[bytes]) -> Iterator[float]:
    """Bits of the words of each line by their share of the words of earlier lines, with one added to each count."""
    seen: Counter[bytes] = Counter()
    for line in lines:
        words = line.split()
        total = seen.total() + len(seen) + 1
        yield sum(math.log2(total / (seen[word] + 1)) for word in words)
        seen.update(words)


def sizes(lines: list[bytes]) -> Iterator[float]:
    """Bits that PPMd, variant H, writes for each line after those before."""
    import pyppmd

    encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, 1 << 27)
    for line in lines:
        yield 8.0 * len(encoder.encode(line))


def surprisals(model: xlcli.Model, lines: list[bytes], options: dict[str, bool | int]) -> list[float]:
    """Bits of each line by the model."""
    events = xlcli.stream(model, lines, **options)
    found = [event.bits for event in events if isinstance(event, LineScore)]
    if len(found) != len(lines):
        raise SystemExit(f"{len(lines)} lines were read, {len(found)} were scored")
    return found


def table(result: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown table: a row for each score."""
    lines = ["| score | area, per line | area, per byte |", "|---|---|---|"]
    for name, row in result["areas"].items():
        per_byte = f"{row['per byte']:.3f}" if "per byte" in row else "–"
        lines.append(f"| {name} | {row['per line']:.3f} | {per_byte} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("--model", default="books")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "anomalies.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.log is None:
        parser.error("name the log")
    os.environ["OMP_NUM_THREADS"] = "1"
    lines, alerts = split(options.log.read_bytes())
    model = xlcli.load(options.model, threads=1, device="cpu")
    scores = {
        "length of the line": [float(len(line)) for line in lines],
        "rarity of the words": list(rarities(lines)),
        f"PPMd, order {PPMD_ORDER}": list(sizes(lines)),
    }
    result: dict = {
        "machine": machine(),
        "model": options.model,
        "lines": len(lines),
        "alerts": sum(alerts),
        "areas": {},
    }
    for name, reading in READINGS.items():
        scores[name] = surprisals(model, lines, reading)
        print(f"{name}: {sum(scores[name]) / sum(map(len, lines)):.3f} bits per byte", flush=True)
    for name, found in scores.items():
        row = {"per line": area(found, alerts)}
        if name != "length of the line":
            row["per byte"] = area([bits / len(line) for bits, line in zip(found, lines, strict=True)], alerts)
        result["areas"][name] = row
    save(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
