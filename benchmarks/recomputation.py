"""Memory against sliding windows that are read anew, at equal context: bits per byte and tokens per second.

    python benchmarks/recomputation.py BOOKS [--model books] [--bytes 20000] [--contexts 128,256,512]
    python benchmarks/recomputation.py BOOKS --speed     # tokens per second, on an idle machine; half a minute
    python benchmarks/recomputation.py --table benchmarks/results/recomputation.json     # the table of docs/results.md

BOOKS has a folder valid of text files; equal parts from the middle of each file are joined. With a context of C tokens,
memory is `eval --mem-len C` and a window is `eval --mem-len 0 --segment-len C+1` with `eval.stride` N, so with stride 1
every token attends to the C tokens before it in either. Every result is saved at once; a restarted benchmark continues
with the missing ones. One thread, float32.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from runs import machine

import xlcli
from xlcli.events import Score

STRIDES = (None, 0.5, 16, 1)
"""Strides in tokens or, if fractions, relative to the context, fastest first; None: independent segments."""
SPEED_WINDOWS = 32
"""Number of windows in a measurement of speed; several calls of the model."""


def settings(contexts: list[int]) -> dict[str, dict[str, int | None]]:
    """Name of a row, context and stride, to the options of `eval`, fastest first."""
    rows: dict[str, dict[str, int | None]] = {f"{length} memory": {"mem_len": length} for length in contexts}
    for stride, length in itertools.product(STRIDES, contexts):
        tokens = int(stride * length) if isinstance(stride, float) else stride
        rows[f"{length} {tokens or 'segments'}"] = {"mem_len": 0, "segment_len": length + 1, "stride": tokens}
    return rows


def middles(books: Path, n_bytes: int) -> bytes:
    """Parts from the middle of each book, whole lines, joined to at most `n_bytes`."""
    paths = sorted((books / "valid").glob("*.txt"))
    each, parts = n_bytes // len(paths), []
    for path in paths:
        data = path.read_bytes()
        part = data[len(data) // 2 :][:each]
        parts.append(part[part.find(b"\n") + 1 : part.rfind(b"\n") + 1])
    return b"".join(parts)


def score(model: xlcli.Model, path: Path, **options: int | None) -> Score:
    """Score of a text."""
    return next(event for event in xlcli.evaluate(model, path, **options) if isinstance(event, Score))


def speed(model: xlcli.Model, path: Path, bytes_per_token: float, options: dict[str, int | None]) -> float:
    """Tokens per second of the best of two passes over the beginning of the text.

    The tokens that only the first window scores are left out, as they hardly count in a long text.
    """
    window, stride = options.get("segment_len") or 0, options.get("stride")
    n = 2**14 if not window else window + SPEED_WINDOWS * (stride or window)
    found = []
    for _ in range(2):
        result = score(model, path, limit=int(n * bytes_per_token), **options)
        windows = 1 + -(-(result.tokens - window) // stride) if stride else 0
        found.append((windows * stride if stride else result.tokens) / result.seconds)
    return max(found)


def table(result: dict[str, dict]) -> str:
    """Markdown table: a row for each context and way of reading."""
    rows = result["rows"]
    lines = [
        "| context | reading | bits per byte | tokens/s | time per token, memory = 1 |",
        "|---|---|---|---|---|",
    ]
    names = sorted(
        rows, key=lambda name: (int(name.split()[0]), "memory" not in name, -rows[name]["tokens_per_second"])
    )
    for name in names:
        row = rows[name]
        context, kind = name.split()
        base = rows[f"{context} memory"]
        reading = {"memory": "memory", "segments": "independent segments"}.get(kind, f"windows, stride {kind}")
        bits = f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "not run"
        rate = row["tokens_per_second"]
        shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
        lines.append(f"| {context} | {reading} | {bits} | {shown} | {base['tokens_per_second'] / rate:,.3g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--model", default="books")
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--contexts", default="128,256,512")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recomputation.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.books is None:
        parser.error("name the folder of books")
    model = xlcli.load(options.model, threads=1, device="cpu")
    result = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine(), "rows": {}}
    result |= {"model": options.model, "bytes": options.bytes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(middles(options.books, 2**20 if options.speed else options.bytes))
        sample = score(model, path, mem_len=0, limit=options.bytes)
        for name, reading in settings([int(length) for length in options.contexts.split(",")]).items():
            row = result["rows"].setdefault(name, {})
            if options.speed and "tokens_per_second" not in row:
                row["tokens_per_second"] = round(speed(model, path, sample.bytes / sample.tokens, reading), 1)
            elif not options.speed and "bits_per_byte" not in row:
                found = score(model, path, **reading)
                row |= {"bits_per_byte": found.bits_per_byte, "bytes": found.bytes, "tokens": found.tokens}
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
