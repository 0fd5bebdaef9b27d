"""Compressive memory (Rae et al. 2020) and plain memory of the same number of keys, on three texts.

    python benchmarks/compression.py BOOKS [--seeds 0,1] [--texts topics,copy,books] [--write]
    python benchmarks/compression.py --table        # the table of docs/variants.md

topics  64 symbols whose probabilities change every 200 to 600 symbols: only the number of each symbol counts
copy    words of 48 random symbols, each written twice: only the symbol 48 places back counts
books   bytes of BOOKS/train, scored on BOOKS/test

A token attends to 32 remembered tokens, or to 16 (up to 19) and 16 pooled blocks of 4; as an upper bound to 80, the
reach of both tiers together. Models have two layers of width 64 and are trained on segments of 32 tokens. The result
is the mean number of bits per symbol of new text with full memory. Every run is saved at once in
benchmarks/results/compression.json, and a restarted benchmark continues with the missing runs.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from runs import machine

RESULT = Path(__file__).parent / "results" / "compression.json"
TIERS = {"kind": "compressive", "rate": 4, "n_compressed": 16}
VARIANTS = {
    "plain, 32": ({"kind": "full"}, 32),
    "mean, 16 + 16 x 4": (TIERS | {"pooling": "mean"}, 16),
    "max, 16 + 16 x 4": (TIERS | {"pooling": "max"}, 16),
    "convolution, 16 + 16 x 4": (TIERS | {"pooling": "convolution"}, 16),
    "plain, 80": ({"kind": "full"}, 80),
}
"""Name to attention and memory length."""
STEPS = {"topics": 600, "copy": 1800, "books": 600}
"""Training steps of 512 symbols on each text."""
SYMBOLS, WORD = 64, 48
FACTORS, LOGIT_STD = 16, 1.5
"""Number of normally distributed factors of the probabilities of topics, and standard deviation of logits."""
BATCH, SEGMENT = 16, 32
SCORED, SKIPPED = 1536, 96
"""Symbols of each of the `BATCH` texts to score, and symbols read before them."""


def topics(n, generator):
    """Symbols with changing probabilities."""
    import torch

    weights = torch.randn(SYMBOLS, FACTORS, generator=torch.Generator().manual_seed(0))
    parts = []
    while sum(map(len, parts)) < n:
        length = int(torch.randint(200, 600, (1,), generator=generator))
        logits = weights @ (torch.randn(FACTORS, generator=generator) * LOGIT_STD / FACTORS**0.5)
        parts.append(torch.multinomial(logits.softmax(0), length, replacement=True, generator=generator))
    return torch.cat(parts)[:n]


def copies(n, generator):
    """Random words, each written twice."""
    import torch

    words = torch.randint(0, SYMBOLS, (-(-n // (2 * WORD)), 1, WORD), generator=generator)
    return words.expand(-1, 2, -1).flatten()[:n]


def texts(name, books, part, n, seed):
    """`BATCH` texts (b n) of symbols; those of books start at random places."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    if name != "books":
        make = topics if name == "topics" else copies
        return torch.stack([make(n, generator) for _ in range(BATCH)])
    data = b"".join(path.read_bytes() for path in sorted((books / part).iterdir()))
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    starts = torch.randint(0, len(whole) - n, (BATCH,), generator=generator)
    return torch.stack([whole[start : start + n].long() for start in starts.tolist()])


def build(name, text, seed):
    import torch

    from xlcli import config
    from xlcli.model.build import build_model

    attention, _ = VARIANTS[name]
    tree = {
        "vocab_size": 256 if text == "books" else SYMBOLS,
        "dim": 64,
        "n_layers": 2,
        "attention": {"n_heads": 4, **attention},
        "init_std": 0.1,
    }
    return build_model(config.make({"model": tree}).model, torch.Generator().manual_seed(seed))


def run(name, text, options, seed):
    """Bits per symbol after training, and processor seconds."""
    import torch

    from xlcli.config import TrainConfig
    from xlcli.optim import Optimizers, lr_factor

    torch.manual_seed(seed)
    model, (_, mem_len) = build(name, text, seed), VARIANTS[name]
    optimizers = Optimizers(model, TrainConfig(), lr=options.lr, native_bfloat16=False)
    read = texts(text, options.books, "train", STEPS[text] * SEGMENT + 1, seed)
    state = model.init_state(BATCH, mem_len=mem_len, segment_len=SEGMENT, span="growing", memory="hidden")
    started = time.process_time()
    for step in range(STEPS[text]):
        piece = read[:, step * SEGMENT : (step + 1) * SEGMENT + 1]
        nll, state, _, auxiliary, _ = model.score(piece[:, :-1], piece[:, 1:], state)
        loss = nll.mean() + (0.0 if auxiliary is None else auxiliary)
        optimizers.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(lr_factor(TrainConfig(warmup_steps=50), step / STEPS[text], step), step)
        if step % 500 == 0:
            print(f"{text} {name} {step} {nll.mean().item() / math.log(2):.3f}", flush=True)
    seconds = time.process_time() - started
    new = texts(text, options.books, "test", SKIPPED + SCORED + 1, 10**6)
    with torch.inference_mode():
        state = model.eval().init_state(BATCH, mem_len=mem_len, segment_len=SEGMENT)
        nll, _ = model.score(new[:, :-1], new[:, 1:], state)[:2]
    return {"bits": nll[:, SKIPPED:].mean().item() / math.log(2), "seconds": round(seconds, 1)}


def read():
    """Saved results."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}}


def table(results):
    """Markdown table of the saved results."""
    names = [text for text in STEPS if any(key.startswith(f"{text} |") for key in results["runs"])]
    print(f"| memory | {' | '.join(names)} |\n" + "|---" * (len(names) + 1) + "|")
    for name in VARIANTS:
        cells = []
        for text in names:
            bits = [found["bits"] for key, found in results["runs"].items() if key.startswith(f"{text} | {name} |")]
            spread = (max(bits) - min(bits)) / 2 if bits else 0.0
            cells.append(f"{statistics.mean(bits):.3f} ({spread:.3f})" if bits else "")
        print(f"| {name} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?", help="folder with the folders train and test of text files")
    parser.add_argument("--texts", default=",".join(STEPS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULT.name}")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(read())
        return
    import torch

    torch.set_num_threads(1)
    for seed in map(int, options.seeds.split(",")):
        for text in options.texts.split(","):
            for name in VARIANTS:
                key = f"{text} | {name} | {seed}"
                if key in read()["runs"]:
                    continue
                found = run(name, text, options, seed) | {"steps": STEPS[text], "lr": options.lr}
                print(key, found, flush=True)
                results = read()
                results["runs"][key] = found
                results["machine"] = machine()
                if options.write:
                    RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
