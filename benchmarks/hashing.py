"""Full, local and LSH attention on books: training on the same tokens, then scores by memory length.

    python benchmarks/hashing.py BOOKS [--tokens 1000000] [--out benchmarks/results/hashing.json]
    python benchmarks/hashing.py --table benchmarks/results/hashing.json     # the tables of benchmarks/log

BOOKS holds folders train and test of text files. Every run is one `xlcli train` and one `xlcli eval` of the same model
with one memory length after the other, and its result is saved at once; a restarted benchmark continues with the
missing runs. Runs differ only in attention, its position encoding, and the memory length in training. Use one thread on
an otherwise idle core.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from recall import recall_of_text
from runs import beginning, processor_seconds_of_commands, save, saved, train, xlcli

from xlcli import load

MEMORIES = "512,2048,8192,65536"
SHAPE = {
    "model.dim": 192, "model.n_layers": 4, "model.attention.n_heads": 3, "train.segment_len": 512,
    "train.batch_size": 4, "train.memory": "hidden", "model.embedding.per_layer": "false",
}  # fmt: skip
XL = {"model.position.kind": "xl", "model.position.n_features": 32}
ROPE = {"model.position.kind": "rope"}
LOCAL = '{kind = "local", window = 128}'
LSH = '{kind = "lsh", n_buckets = 64, bucket_size = 32, n_hashes = 2}'
SIZED = LSH.replace("64", '"auto"')
SHARP = LSH.replace("}", ", query_scale = 4.0}")


def mixed(*layers: str, mem_len: int = 65536) -> dict[str, object]:
    """Settings of layers in turn."""
    return {
        "model.attention.kind": "mixed",
        "model.attention.layers": f"[{', '.join(layers)}]",
        "train.mem_len": mem_len,
    }


VARIANTS = {
    "full, 512": {"model.attention.kind": "full", "train.mem_len": 512} | XL,
    "full, 2048": {"model.attention.kind": "full", "train.mem_len": 2048} | XL,
    "full, 8192": {"model.attention.kind": "full", "train.mem_len": 8192} | XL,
    "local": {"model.attention.kind": "local", "model.attention.window": 128, "train.mem_len": 128} | XL,
    "hashed": mixed(LSH) | ROPE,
    "local and hashed": mixed(LOCAL, LSH) | XL,
    "local and hashed, rope": mixed(LOCAL, LSH) | ROPE,
    "hashed, buckets for the memory": mixed(SIZED) | ROPE,
    "local and hashed, buckets for the memory": mixed(LOCAL, SIZED) | XL,
    "local and hashed, query_scale 4": mixed(LOCAL, SHARP) | XL,
    "local and full, 2048": mixed(LOCAL, '"full"', mem_len=2048) | XL,
}
"""Name to settings; the number is the memory length in training."""
TRAIN_BOOKS, BYTES_A_BOOK, TEST_BYTES = 20, 300_000, 300_000


def one(home: Path, settings: dict[str, object], tokens: int, memories: str) -> dict[str, object]:
    """Trains one variant and scores it with each memory length."""
    text = ["train.txt", "--valid", "valid.txt", "--tokenizer", "sentencepiece", "--vocab-size", "2048"]
    run = train(home, *text, settings=SHAPE | settings, tokens=tokens)
    model = load(home / "model", threads=1, device="cpu").loaded
    scores = {}
    for m in memories.split(","):
        before = processor_seconds_of_commands()
        options = "-m", "model", "--mem-len", m, "--json", "--threads", "1"
        score = json.loads(xlcli("eval", "test.txt", *options, cwd=home))
        kept = ("tokens", "bits_per_byte", "tokens_per_second", "peak_rss_bytes")
        spent = {"processor_seconds": round(processor_seconds_of_commands() - before, 2)}
        recall = recall_of_text(model, (home / "test.txt").read_bytes(), int(m))
        scores[m] = {key: score[key] for key in kept} | {"recall": recall} | spent
    return run | {"by_memory": scores}


def table(runs: dict[str, dict]) -> str:
    """Markdown table: processor time of training; bits per byte and recall by memory length, where measured."""
    memories = MEMORIES.split(",")
    shown = [f"{int(m):,}" for m in memories]
    columns = ["processor seconds of training", *(f"memory {m}" for m in shown), *(f"recall at {m}" for m in shown)]
    lines = [f"| attention, memory in training | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, run in runs.items():
        by = [run["by_memory"].get(m, {}) for m in memories]
        cells = [f"{run['train_processor_seconds']:.0f}"]
        cells += [f"{score['bits_per_byte']:.3f}" if score else "" for score in by]
        cells += [f"{100 * score['recall']:.1f} %" if score.get("recall") is not None else "" for score in by]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--memories", default=MEMORIES, help="memory lengths of evaluation, shortest first")
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hashing.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["runs"]))
        return
    if options.books is None:
        parser.error("name the folder of books")
    result = saved(options.out, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["XLCLI_CACHE"] = str(home / "cache")
        os.environ["OMP_NUM_THREADS"] = "1"
        books = sorted((options.books / "train").glob("*.txt"))
        pieces = [beginning(path, BYTES_A_BOOK) for path in books]
        (home / "train.txt").write_bytes(b"".join(pieces[:TRAIN_BOOKS]))
        (home / "valid.txt").write_bytes(pieces[TRAIN_BOOKS][:20_000])
        (home / "test.txt").write_bytes(beginning(options.books / "test" / "middlemarch.txt", TEST_BYTES))
        for name in options.only.split(";") if options.only else VARIANTS:
            if name not in result["runs"]:
                result["runs"][name] = one(home, VARIANTS[name], options.tokens, options.memories)
                save(options.out, result)
                print(name, json.dumps(result["runs"][name]["by_memory"]), flush=True)


if __name__ == "__main__":
    main()
