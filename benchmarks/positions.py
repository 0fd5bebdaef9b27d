"""Position encodings, pre- and post-norm, with and without recurrence: equal budgets on books, three seeds.

    python benchmarks/positions.py BOOKS [--tokens 500000] [--seeds 3] [--only PART_OF_NAME]
    python benchmarks/positions.py --table benchmarks/results/positions.json     # the tables of docs/results.md

BOOKS has folders train, valid and test of text files; the beginning of each file is used. Every run is one
`xlcli train` and one `xlcli eval` on the test part, with distances extrapolated as in the sources, and its result is
saved at once; a restarted benchmark continues with the missing runs. Runs differ only in variant and seed; learning
rates are the defaults. Use one thread on an otherwise idle core.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from runs import beginning, save, saved, train, xlcli

MEM_LEN, SEGMENT_LEN = 128, 128
MEMORIES = (0, MEM_LEN, 4 * MEM_LEN)
SHAPE = {
    "model.dim": 128, "model.n_layers": 4, "model.attention.n_heads": 4, "train.segment_len": SEGMENT_LEN,
    "train.mem_len": MEM_LEN, "train.batch_size": 8, "train.memory": "hidden", "model.embedding.per_layer": "false",
    "train.shuffle": "false", "train.average_share": 0, "model.dropout": 0,
}  # fmt: skip
TEXT = "train.txt", "--valid", "valid.txt", "--tokenizer", "sentencepiece", "--vocab-size", "1024"
KINDS = (
    "none", "sinusoidal", "learned", "axial", "rope", "alibi", "t5", "shaw", "xl", "contextual-1", "contextual-2",
)  # fmt: skip
POST = {"model.norm.placement": "post", "model.norm.kind": "layer"}
PRE = {"model.norm.placement": "pre", "model.norm.kind": "layer"}
LONG = {"train.segment_len": 512, "train.batch_size": 2, "train.mem_len": 0}
LEARNED = {"model.position.kind": "learned", "model.position.max_len": 512}
TABLES = (("one table", "true"), ("own tables", "false"))
ABLATIONS = {
    "sinusoidal, in every layer": {"model.position.kind": "sinusoidal", "model.position.placement": "layers"},
    "learned, in every layer": {"model.position.kind": "learned", "model.position.placement": "layers"},
    "rope, at the embedding": {"model.position.kind": "rope", "model.position.placement": "embedding"},
}
WITHIN_SEGMENT = {
    **{kind: {"model.position.kind": kind} for kind in ("none", "sinusoidal", "rope", "xl")},
    "sinusoidal, in every layer": {"model.position.kind": "sinusoidal", "model.position.placement": "layers"},
    "sinusoidal, on queries and keys": {"model.position.kind": "sinusoidal", "model.position.placement": "qk"},
    "rope, at the embedding": {"model.position.kind": "rope", "model.position.placement": "embedding"},
    "learned": LEARNED,
    **{
        f"learned, {place}, {tables}": LEARNED | {"model.position.placement": key, "model.position.shared": shared}
        for place, key in (("in every layer", "layers"), ("on queries and keys", "qk"))
        for tables, shared in TABLES
    },
    **{
        f"{kind}, {tables}": {"model.position.kind": kind, "model.position.shared": shared}
        for kind in ("contextual-1", "contextual-2")
        for tables, shared in TABLES
    },
}
"""Compared without memory and with positions inside a segment, as in the sources of the absolute encodings."""
LENGTHS = {"memory": MEMORIES, "no memory": MEMORIES, "segments of 512": (0,)}
"""Kind of training to the memory lengths of evaluation."""
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
    for name, position in WITHIN_SEGMENT.items():
        found[f"{name} | pre | segments of 512"] = position | PRE | LONG
    return found


def part(books: Path, name: str, into: Path) -> None:
    """Writes the beginnings of all books of one part, each cut at a line end, into one file."""
    paths = sorted((books / name).glob("*.txt"))
    into.write_bytes(b"".join(beginning(path, BYTES_A_BOOK[name]) for path in paths))


def one(home: Path, settings: dict[str, object], lengths: tuple[int, ...], seed: int, tokens: int) -> dict[str, object]:
    """Trains one variant and scores it with these memory lengths, in segments of the length of training."""
    settings = SHAPE | settings
    run = train(home, *TEXT, settings=settings, tokens=tokens, seed=seed)
    sweep = ["--sweep-mem-len", ",".join(map(str, lengths)), "--segment-len", str(settings["train.segment_len"])]
    plain = ["--set=eval.clamp_len=none", "--json", "--threads", "1"]
    scores = json.loads(xlcli("eval", "test.txt", "-m", "model", *sweep, *plain, cwd=home))
    return run | {"bits_per_byte": {str(score["mem_len"]): score["bits_per_byte"] for score in scores["sweep"]}}


def table(results: dict[str, list[dict[str, object]]], norm: str, memory: str) -> str:
    """Rows of one norm and one kind of training, best first: mean over seeds, half the range in brackets."""
    rows = []
    lengths = LENGTHS[memory]
    own = lengths.index(MEM_LEN) if memory == "memory" else 0
    for name, runs in results.items():
        position, its_norm, its_memory = name.split(" | ")
        if (its_norm, its_memory) == (norm, memory):
            bits = [[run["bits_per_byte"][str(length)] for run in runs] for length in lengths]
            speed = statistics.median(run["train_tokens_per_second"] for run in runs)
            rows.append((position, runs[0]["parameters"], speed, bits, len(runs)))
    lines = [
        f"| position | parameters | tokens/s | {' | '.join(f'memory {length}' for length in lengths)} | seeds |",
        "|---" * (4 + len(lengths)) + "|",
    ]
    for position, parameters, speed, bits, n in sorted(rows, key=lambda row: statistics.mean(row[3][own])):
        cells = [f"{statistics.mean(b):.3f} ({(max(b) - min(b)) / 2:.3f})" for b in bits]
        lines.append(f"| {position} | {parameters:,} | {speed:,.0f} | {' | '.join(cells)} | {n} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names of the variants to train")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "positions.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        results = json.loads(options.table.read_text())["runs"]
        for norm, memory in (("pre", "memory"), ("post", "memory"), ("pre", "no memory"), ("pre", "segments of 512")):
            print(f"\n### {norm}-norm, trained with {memory}\n\n{table(results, norm, memory)}")
        return
    if options.books is None:
        parser.error("name the folder of books")
    result = saved(options.out, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["XLCLI_CACHE"] = str(home / "cache")
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in BYTES_A_BOOK:
            part(options.books, name, home / f"{name}.txt")
        for seed in range(options.seeds):
            for name, settings in variants().items():
                if options.only not in name:
                    continue
                runs = result["runs"].setdefault(name, [])
                if any(run["seed"] == seed for run in runs):
                    continue
                runs.append(one(home, settings, LENGTHS[name.split(" | ")[-1]], seed, options.tokens))
                save(options.out, result)
                print(f"{name}, seed {seed}: {runs[-1]['bits_per_byte']}", flush=True)


if __name__ == "__main__":
    main()
