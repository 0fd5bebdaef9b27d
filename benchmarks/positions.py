"""Position encodings, pre- and post-norm, with and without recurrence: equal budgets on books, three seeds.

    python benchmarks/positions.py BOOKS [--tokens 500000] [--seeds 3] [--out benchmarks/results/positions.json]
    python benchmarks/positions.py --table benchmarks/results/positions.json     # the tables of docs/variants.md

BOOKS has folders train, valid and test of text files; the beginning of each file is used. Every run is one
`xlcli train` and one `xlcli eval` on the test part, and its result is saved at once; a restarted benchmark continues
with the missing runs. Runs differ only in variant and seed; learning rates are the defaults. Use one thread on an
otherwise idle core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from equal_time import machine

MEM_LEN, SEGMENT_LEN = 128, 128
MEMORIES = (0, MEM_LEN, 4 * MEM_LEN)
SHAPE = {
    "model.dim": 128, "model.n_layers": 4, "model.attention.n_heads": 4, "train.segment_len": SEGMENT_LEN,
    "train.mem_len": MEM_LEN, "train.batch_size": 8,
}  # fmt: skip
KINDS = (
    "none", "sinusoidal", "learned", "axial", "rope", "alibi", "t5", "shaw", "xl", "contextual-1", "contextual-2",
)  # fmt: skip
POST = {"model.norm.placement": "post", "model.norm.kind": "layer"}
PRE = {"model.norm.placement": "pre", "model.norm.kind": "layer"}
ABLATIONS = {
    "sinusoidal, in every layer": {"model.position.kind": "sinusoidal", "model.position.placement": "layers"},
    "learned, in every layer": {"model.position.kind": "learned", "model.position.placement": "layers"},
    "rope, at the embedding": {"model.position.kind": "rope", "model.position.placement": "embedding"},
}
BYTES_A_BOOK = {"train": 100_000, "valid": 10_000, "test": 20_000}


def variants() -> dict[str, dict[str, object]]:
    """Name (position, norm, recurrence) to settings."""
    found: dict[str, dict[str, object]] = {}
    for kind in KINDS:
        position = {"model.position.kind": kind}
        found[f"{kind} | pre | memory"] = position | PRE
        found[f"{kind} | pre | no memory"] = position | PRE | {"train.mem_len": 0}
        found[f"{kind} | post | memory"] = position | POST
    for name, position in ABLATIONS.items():
        found[f"{name} | pre | memory"] = position | PRE
    return found


def beginning(path: Path, n: int) -> bytes:
    """The first lines of a file, at most n bytes."""
    data = path.read_bytes()[:n]
    return data[: data.rfind(b"\n") + 1]


def results_so_far(out: Path, tokens: int) -> dict[str, object]:
    """Saved results of earlier starts, or an empty table; creates the folder."""
    out.parent.mkdir(exist_ok=True)
    result = json.loads(out.read_text()) if out.exists() else {"machine": machine(), "runs": {}}
    return result | {"tokens": tokens}


def part(books: Path, name: str, into: Path) -> None:
    """Writes the beginnings of all books of one part, each cut at a line end, into one file."""
    paths = sorted((books / name).glob("*.txt"))
    into.write_bytes(b"".join(beginning(path, BYTES_A_BOOK[name]) for path in paths))


def xlcli(*arguments: str, cwd: Path) -> str:
    """Standard output of one command."""
    command = [sys.executable, "-m", "xlcli", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def one(home: Path, settings: dict[str, object], seed: int, tokens: int) -> dict[str, object]:
    """Trains and scores one variant."""
    sets = [word for key, value in (SHAPE | settings).items() for word in ("--set", f"{key}={value}")]
    out = ["-o", "model", "--overwrite", "-q", "--threads", "1"]
    text = ["train.txt", "--valid", "valid.txt", "--tokenizer", "sentencepiece", "--vocab-size", "1024"]
    command = ["train", *text, *sets, "--max-tokens", str(tokens), "--seed", str(seed), *out]
    started = time.monotonic()
    xlcli(*command, cwd=home)
    record = json.loads((home / "model" / "record.json").read_text())
    lengths = ",".join(map(str, MEMORIES))
    segments = ["--segment-len", str(SEGMENT_LEN), "--threads", "1"]
    scores = json.loads(
        xlcli("eval", "test.txt", "-m", "model", "--sweep-mem-len", lengths, "--json", *segments, cwd=home)
    )
    return {
        "seed": seed,
        "parameters": record["parameters"],
        "train_tokens_per_second": record["tokens"] / record["seconds"],
        "bits_per_byte": {str(score["mem_len"]): score["bits_per_byte"] for score in scores["sweep"]},
        "seconds": round(time.monotonic() - started, 1),
        "command": "xlcli " + " ".join(command),
    }


def table(results: dict[str, list[dict[str, object]]], norm: str, memory: str) -> str:
    """Rows of one norm and one kind of training, best first: mean over seeds, half the range in brackets."""
    rows = []
    for name, runs in results.items():
        position, its_norm, its_memory = name.split(" | ")
        if (its_norm, its_memory) == (norm, memory):
            bits = {length: [run["bits_per_byte"][str(length)] for run in runs] for length in MEMORIES}
            speed = statistics.median(run["train_tokens_per_second"] for run in runs)
            rows.append((position, runs[0]["parameters"], speed, bits, len(runs)))
    own = 0 if memory == "no memory" else MEM_LEN
    lines = [
        f"| position | parameters | tokens/s | {' | '.join(f'memory {length}' for length in MEMORIES)} | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for position, parameters, speed, bits, n in sorted(rows, key=lambda row: statistics.mean(row[3][own])):
        cells = [f"{statistics.mean(b):.3f} ({(max(b) - min(b)) / 2:.3f})" for b in bits.values()]
        lines.append(f"| {position} | {parameters:,} | {speed:,.0f} | {' | '.join(cells)} | {n} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "positions.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        results = json.loads(options.table.read_text())["runs"]
        for norm, memory in (("pre", "memory"), ("post", "memory"), ("pre", "no memory")):
            print(f"\n### {norm}-norm, trained with {memory}\n\n{table(results, norm, memory)}")
        return
    if options.books is None:
        parser.error("name the folder of books")
    result = results_so_far(options.out, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["XLCLI_CACHE"] = str(home / "cache")
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in BYTES_A_BOOK:
            part(options.books, name, home / f"{name}.txt")
        for seed in range(options.seeds):
            for name, settings in variants().items():
                runs = result["runs"].setdefault(name, [])
                if any(run["seed"] == seed for run in runs):
                    continue
                runs.append(one(home, settings, seed, options.tokens))
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{name}, seed {seed}: {runs[-1]['bits_per_byte']}, {runs[-1]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
