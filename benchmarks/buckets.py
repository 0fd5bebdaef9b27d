"""Recall of hashed attention by number of buckets and rounds, with and without a learned factor on the queries.

    python benchmarks/buckets.py BOOKS [--tokens 200000] [--out benchmarks/results/buckets.json]
    python benchmarks/buckets.py --table benchmarks/results/buckets.json     # prints the table

Two models of local and hashed layers in turn are trained as in `hashing.py`, with 64 buckets, one of them with
`query_scale`. Then only the hashing changes: with the same weights and new rotations, a validation book is read with
other numbers of buckets and rounds. Recall is the share of the weight of full attention over the memory that falls on
the keys found. One thread; times are those of the processor.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from hashing import BYTES_A_BOOK, LOCAL, LSH, SHAPE, SHARP, TRAIN_BOOKS, XL, mixed
from recall import lsh_recall
from runs import beginning, save, saved, train

import xlcli
from xlcli.config.attention import MAX_HASHES, LSHAttentionConfig
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel

MEM_LEN, CALL, N_TOKENS = 16_384, 2048, 24_576
VARIANTS = {"local and hashed": LSH, "local and hashed, query_scale 4": SHARP}
HASHING = ((64, 2), (256, 2), ((16, 32), 2), (64, 8), ((16, 32), 8))
"""Numbers of buckets and of rounds."""


def rehash(network: LanguageModel, n_buckets: int | tuple[int, ...], n_hashes: int) -> int:
    """Gives all hashed layers these numbers of buckets and rounds, and new rotations; the number of buckets."""
    generator = torch.Generator().manual_seed(1)
    sized = LSHAttentionConfig(n_buckets=n_buckets)
    for layer in network.modules():
        if isinstance(layer, LSHAttention):
            layer.factors, layer.n_hashes = sized.factors, n_hashes
            layer.rotations = torch.empty(MAX_HASHES, sum(sized.factors) // 2, layer.rotations.shape[-1])
            layer.redraw(generator)
    return torch.tensor(sized.factors).prod().item()


@torch.inference_mode()
def measure(network: LanguageModel, tokens: torch.Tensor, n_bytes: int) -> dict[str, float]:
    """Recall, bits per byte and processor milliseconds per token of one text (1 t), read in calls."""
    state = network.init_state(1, mem_len=MEM_LEN, segment_len=CALL)
    nats, before = 0.0, time.process_time()
    for at in range(0, tokens.shape[1] - 1, CALL):
        part = tokens[:, at : at + CALL + 1]
        nll, state = network.score(part[:, :-1], part[:, 1:], state)[:2]
        nats += nll.double().sum().item()
    seconds = time.process_time() - before
    recalls = lsh_recall(network, tokens, network.init_state(1, mem_len=MEM_LEN, segment_len=CALL), CALL)
    return {
        "recall": sum(recalls) / len(recalls),
        "bits_per_byte": nats / torch.tensor(2.0).log().item() / n_bytes,
        "ms_per_token": 1000 * seconds / tokens.shape[1],
    }


def one(home: Path, layer: str, tokens: int) -> dict[str, object]:
    """Trains one model and measures it with every hashing."""
    text = ["train.txt", "--valid", "valid.txt", "--tokenizer", "sentencepiece", "--vocab-size", "2048"]
    run = train(home, *text, settings=SHAPE | mixed(LOCAL, layer) | XL, tokens=tokens)
    model = xlcli.load(home / "model", threads=1, device="cpu").loaded
    ids = model.tokenizer.encode((home / "held.txt").read_bytes())[:N_TOKENS]
    n_bytes = len(model.tokenizer.decode(ids))
    scales = [layer.log_scale for layer in model.network.modules() if isinstance(layer, LSHAttention)]
    found = []
    for n_buckets, n_hashes in HASHING:
        made = rehash(model.network, n_buckets, n_hashes)
        result = measure(model.network, torch.tensor(ids.tolist())[None], n_bytes)
        found.append({"n_buckets": made, "n_hashes": n_hashes} | result)
    return run | {"factors": [s.exp().tolist() for s in scales if s is not None], "hashing": found}


def table(runs: dict[str, dict]) -> str:
    """One row for each hashing and, for each model, recall, bits per byte and time."""
    lines = [
        f"| buckets | rounds | {' | '.join(f'{name}: recall | bits per byte | ms per token' for name in runs)} |",
        "|---" * (2 + 3 * len(runs)) + "|",
    ]
    for rows in zip(*(run["hashing"] for run in runs.values()), strict=True):
        cells = [f"{100 * r['recall']:.1f} % | {r['bits_per_byte']:.3f} | {r['ms_per_token']:.2f}" for r in rows]
        lines.append(f"| {rows[0]['n_buckets']} | {rows[0]['n_hashes']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "buckets.json")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["runs"]))
        return
    if options.books is None:
        parser.error("name the folder of books")
    torch.set_num_threads(1)
    result = saved(options.out, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["XLCLI_CACHE"] = str(home / "cache")
        pieces = [beginning(path, BYTES_A_BOOK) for path in sorted((options.books / "train").glob("*.txt"))]
        (home / "train.txt").write_bytes(b"".join(pieces[:TRAIN_BOOKS]))
        (home / "valid.txt").write_bytes(pieces[TRAIN_BOOKS][:20_000])
        (home / "held.txt").write_bytes(sorted((options.books / "valid").glob("*.txt"))[0].read_bytes())
        for name, layer in VARIANTS.items():
            if name not in result["runs"]:
                result["runs"][name] = one(home, layer, options.tokens)
                save(options.out, result)
    print(table(result["runs"]))


if __name__ == "__main__":
    main()
