"""Long runs on published data sets and shapes, for the figures of docs/results.md.

    python benchmarks/papers.py DATA RUN ... [--home .long/papers] [--threads 1]
    python benchmarks/papers.py --table benchmarks/results/papers.json     # prints the table

DATA has `ptb`, `wikitext-2`, `enwik8-prefix.txt.gz` and `books`; RUNS are the names below. Every run is one `xlcli
train`, whose command is in the result. A run that was stopped (Ctrl-C, or a lost machine) continues from its newest
checkpoint when it is started again with the same --home. After its end the test text is scored once as the model is,
with a cache of the text, adapting, and with both. The result has the validation scores during training, too.
"""

import argparse
import gzip
import json
from pathlib import Path

import equal_time
from runs import machine, save, xlcli

CACHE = "100000"
READINGS = {
    "fixed": (),
    "cache": ("--context-cache", CACHE),
    "adapted": ("--adapt",),
    "both": ("--adapt", "--context-cache", CACHE),
}
WORDS = ("--preset", "words", "--seed", "0")
TDLM = (
    "--preset", "tdlm-29m", "--batch-size", "64", "--set", "train.grad_accum=1", "--set", "train.warmup_steps=60",
    "--set", "train.lr=1e-3", "--max-tokens", "1.25M", "--seed", "0",
)  # fmt: skip
RUNS = {
    "ptb": ("ptb", *WORDS, "--max-tokens", "5M"),
    "wikitext-2": (
        "wikitext-2", *WORDS, "--vocab-size", "33278", "--set", "model.embedding.cutoffs=[4000,12000]",
        "--set", "model.embedding.div_val=2", "--max-tokens", "3.5M",
    ),
    "enwik8 by bytes": ("enwik8", "--init", "none", "--tokenizer", "bytes", "--max-time", "1h", "--seed", "0"),
    "tdlm rotary": ("books", *TDLM),
    "tdlm sinusoidal": ("books", *TDLM, "--set", "model.position.kind=sinusoidal"),
}  # fmt: skip
"""Name of a run to its data set and options."""


def texts(data: Path, name: str) -> tuple[bytes, bytes, bytes]:
    """Training, validation and test text of a data set."""
    if name in ("enwik8", "books"):
        return equal_time.texts(data, name)
    prefix = "ptb." if name == "ptb" else ""
    packed = gzip.decompress((data / name / f"{prefix}train.txt.gz").read_bytes())
    return packed, *((data / name / f"{prefix}{part}.txt").read_bytes() for part in ("valid", "test"))


def one(home: Path, parts: tuple[bytes, bytes, bytes], options: tuple[str, ...], threads: list[str]) -> dict:
    """Trains a model in `home`, or continues, and scores the test text."""
    home.mkdir(parents=True, exist_ok=True)
    for part, text in zip(("train", "valid", "test"), parts, strict=True):
        (home / f"{part}.txt").write_bytes(text)
    command = ["train", "train.txt", "--valid", "valid.txt", "-o", "model", *options]
    resume = ["--resume"] if (home / "model" / "record.json").exists() else []
    xlcli(*command, *resume, *threads, "-q", cwd=home)
    record = json.loads((home / "model" / "record.json").read_text())
    events = map(json.loads, (home / "model" / "metrics.jsonl").read_text().splitlines())
    curve = [(e["tokens"], round(e["validation_bits_per_byte"], 4)) for e in events if "validation_bits_per_byte" in e]
    scores = {}
    for name, reading in READINGS.items():
        score = json.loads(xlcli("eval", "test.txt", "-m", "model", "--json", *reading, *threads, cwd=home))
        scores[name] = {key: score[key] for key in ("bits_per_byte", "perplexity", "word_perplexity", "seconds")}
    return {
        "command": " ".join(["xlcli", *command, *threads]),
        "training": {key: record[key] for key in ("preset", "parameters", "steps", "tokens", "seconds", "train")},
        "vocab_size": record["tokenizer"]["vocab_size"],
        "validation": curve,
        "test": scores,
    }


def table(runs: dict[str, dict]) -> str:
    """One row for each run."""
    lines = [
        "| run | parameters | tokens, passes | hours | test, fixed | cache | adapted | both |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        key, n = ("word_perplexity", 2) if "--preset words" in run["command"] else ("bits_per_byte", 4)
        trained, test = run["training"], run["test"]
        cells = [f"{run['test'][reading][key]:.{n}f}" for reading in test]
        passes = trained["tokens"] / trained["train"]["tokens"]
        size = f"{trained['parameters'] / 1e6:.1f} M | {trained['tokens'] / 1e6:.1f} M, {passes:.1f}"
        lines.append(f"| {name} | {size} | {trained['seconds'] / 3600:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("runs", nargs="*", choices=[[], *RUNS])
    parser.add_argument("--home", type=Path, default=Path(".long/papers"))
    parser.add_argument("--threads")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "papers.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["runs"]))
        return
    threads = ["--threads", options.threads] if options.threads else []
    for name in options.runs:
        data, *rest = RUNS[name]
        run = one(options.home / name.replace(" ", "-"), texts(options.data, data), tuple(rest), threads) | machine()
        found = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
        found["runs"][name] = run  # read again, since runs may end side by side
        save(options.out, found)
        print(name, flush=True)


if __name__ == "__main__":
    main()
