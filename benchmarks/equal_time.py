"""Bits per byte of default models after ten minutes of training from scratch, on test text of five kinds.

    python benchmarks/equal_time.py DATA [--texts enwik8 books] [--seeds 0 1 2] [--before CHECKOUT] [--threads 1]
    python benchmarks/equal_time.py --table benchmarks/results/equal_time.json     # the table of docs/training.md

DATA holds `enwik8-prefix.txt.gz` (the first 4,150,000 bytes of enwik8), `tinyshakespeare.txt`, folders of `books`,
`code/python-stdlib-*` and `logs/HDFS_2k.log`; `texts` says how they are split. Only the validation file, the seed and
`--init none` are set, so the result is that of the defaults, which end after ten minutes or sooner. With --before, the
defaults of another checkout of this repository are trained in turn with those of this one, seed by seed, or with
--threads both at the same time with so many threads each. Results are written after each run, and runs that are in the
file are not repeated. Run it on an idle machine.
"""

import argparse
import gzip
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from runs import beginning, machine, xlcli

RECORDED = ("steps", "tokens", "seconds", "parameters", "preset", "tokenizer", "best_step", "bits_per_byte")
SCORED = ("mem_len", "segment_len", "bits_per_byte", "tokens_per_second")
MEMORIES = (["--mem-len", "0"], [], ["--mem-len", "512"])
TEXTS = ["enwik8", "shakespeare", "books", "code", "log"]
BYTES_A_BOOK = 40_000
"""Length of the beginnings of books that are validation and test text."""


def texts(data: Path, name: str) -> tuple[bytes, bytes, bytes]:
    """Training, validation and test text."""
    match name:
        case "enwik8":
            text = gzip.decompress((data / "enwik8-prefix.txt.gz").read_bytes())
            return text[:3_750_000], text[3_750_000:3_950_000], text[3_950_000:]
        case "shakespeare":
            text = (data / "tinyshakespeare.txt").read_bytes()
            half = text.rindex(b"\n", 0, 1_003_854 + 111_540 // 2) + 1  # of the published validation text
            return text[:1_003_854], text[1_003_854:half], text[half:]
        case "books":
            books, *held = (sorted((data / "books" / part).glob("*.txt")) for part in ("train", "valid", "test"))
            valid, test = (b"".join(beginning(path, BYTES_A_BOOK) for path in part) for part in held)
            return b"\n\n".join(path.read_bytes() for path in books), valid, test
        case "code":
            packed = (data / "code" / "python-stdlib-train.txt.gz").read_bytes()
            valid, test = ((data / "code" / f"python-stdlib-{part}.txt").read_bytes() for part in ("valid", "test"))
            return gzip.decompress(packed), valid, test
        case _:
            lines = (data / "logs/HDFS_2k.log").read_bytes().splitlines(keepends=True)
            return b"".join(lines[:1600]), b"".join(lines[1600:1800]), b"".join(lines[1800:])


def trial(parts: tuple[bytes, bytes, bytes], checkout: Path, options: list[str]) -> dict[str, object]:
    """Record of one run of `xlcli train` with a checkout, and the scores of its model by memory length."""
    scratch = ["--init", "none"] if (checkout / "models" / "short.toml").exists() else []  # else the default
    command = ["train", "train.txt", "--valid", "valid.txt", *scratch, *options]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name, part in zip(("train", "valid", "test"), parts, strict=True):
            (home / f"{name}.txt").write_bytes(part)
        environment = {"PYTHONPATH": str(checkout), "XLCLI_CACHE": str(home / "cache")}
        load, started = os.getloadavg()[0], time.monotonic()
        xlcli(*command, cwd=home, environment=environment)
        wall = time.monotonic() - started
        record = json.loads((home / "models" / "train" / "record.json").read_text())
        lines = [xlcli("eval", "test.txt", "--json", *memory, cwd=home, environment=environment) for memory in MEMORIES]
        scores = [json.loads(line) for line in lines]
    return {
        "command": " ".join(["xlcli", *command]),
        "load_before": load,
        "wall_seconds": round(wall, 1),
        "training": {name: record[name] for name in RECORDED},
        "test": [{name: score[name] for name in SCORED} for score in scores],
    }


def table(runs: dict[str, dict]) -> str:
    """Test and validation score of both checkouts by text, means over seeds, and the difference for each seed."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for name, run in runs.items():
        text, tree, *how = name.split(", ")
        if len(how) and "bits_per_byte" in run["training"]:
            scores = run["test"][1]["bits_per_byte"], run["training"]["bits_per_byte"]
            found.setdefault((text, ", ".join(how[1:]) or "all threads"), {}).setdefault(tree, []).append(scores)
    lines = ["| text | test, before | now | difference by seed | validation |", "|---|---|---|---|---|"]
    for (text, how), trees in found.items():
        if len(trees) < 2:  # without another checkout
            continue
        (old, old_valid), (new, new_valid) = (zip(*trees[tree], strict=True) for tree in ("before", "this"))
        differences = ", ".join(f"{b - a:+.3f}" for a, b in zip(old, new, strict=True))
        validation = f"{fmean(old_valid):.3f} → {fmean(new_valid):.3f}"
        lines.append(f"| {text}, {how} | {fmean(old):.3f} | {fmean(new):.3f} | {differences} | {validation} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--threads")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "equal_time.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["runs"]))
        return
    trees = {"this": Path(__file__).resolve().parents[1]}
    if options.before:
        trees = {"before": options.before.resolve()} | trees
    found = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine(), "runs": {}}
    threads = ["--threads", options.threads] if options.threads else []
    threaded = f", {options.threads} thread" if threads else ""
    for text in options.texts:
        parts = texts(options.data, text)
        for seed in options.seeds:
            names = {f"{text}, {tree}, seed {seed}{threaded}": folder for tree, folder in trees.items()}
            missing = {} if names.keys() <= found["runs"].keys() else names
            arguments = ["--seed", str(seed), *threads]
            with ThreadPoolExecutor(len(trees) if threads else 1) as pool:
                trials = [pool.submit(trial, parts, folder, arguments) for folder in missing.values()]
                for name, started in zip(missing, trials, strict=True):
                    found["runs"][name] = run = started.result()
                    print(f"{run['test'][1]['bits_per_byte']:.4f}  {name}", flush=True)
                    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
