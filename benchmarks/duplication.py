"""Quality of LSH attention on the duplication task (Kitaev et al. 2020, section 5 and table 2).

A sequence is 0w0w with random w: its second half is predictable from the matching place in the first half. A model of
one layer is trained with the number of hash rounds of its table row, or with full attention with shared queries and
keys; then the same weights are scored with every number of rounds. Accuracy is that on the second half of new
sequences.

    python benchmarks/duplication.py --length 1024 [--rows full,8,4,2,1] [--steps 1500] [--write]
    python benchmarks/duplication.py --table        # the tables of benchmarks/log

Each finished row is saved in benchmarks/results/duplication.json; the longest rows take minutes on one core.
"""

import argparse
import json
import time
from pathlib import Path

from runs import machine

RESULT = Path(__file__).parent / "results" / "duplication.json"
ROWS = ("full", "8", "4", "2", "1")
SYMBOLS = 128
"""Vocabulary size: 0 and 127 other symbols, as in the paper."""
SEQUENCES = 256
"""Number of new sequences to score."""


def shape(length, rounds, init_std):
    """Configuration of one layer with this number of hash rounds, or with full attention."""
    if rounds == "full":
        attention = {"n_buckets": 1, "bucket_size": length, "n_hashes": 1}
    else:
        buckets = {256: 16, 512: 16}.get(length, 32)
        attention = {"n_buckets": buckets, "bucket_size": length // buckets, "n_hashes": int(rounds)}
    return {
        "vocab_size": SYMBOLS,
        "dim": 128,
        "n_layers": 1,
        "attention": {"kind": "lsh", "n_heads": 4, **attention},
        "position": {"kind": "learned", "max_len": length},
        "feedforward": {"kind": "gelu", "ffn_dim": 256},
        "init_std": init_std,
    }


def build(tree, seed):
    import torch

    from xlcli import config
    from xlcli.model.build import build_model

    settings = config.make({"model": tree}).model
    return build_model(settings, torch.Generator().manual_seed(seed))


def sequences(n, length, generator):
    """Sequences (n, length) of the form 0w0w."""
    import torch

    word = torch.randint(1, SYMBOLS, (n, length // 2 - 1), generator=generator)
    half = torch.cat((torch.zeros(n, 1, dtype=torch.int64), word), 1)
    return torch.cat((half, half), 1)


def second_half(model, x):
    """Logits (n, half - 1, v) of the tokens of the second w, and these tokens."""
    state = model.init_state(len(x), mem_len=0, segment_len=x.shape[1])
    hidden, _ = model(x[:, :-1], state)
    half = x.shape[1] // 2
    return model.head.logits(hidden[:, half:]), x[:, half + 1 :]


def accuracy(model, length, seed=10**6):
    """Accuracy on the second half."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    right = total = 0
    model.eval()
    with torch.no_grad():
        for _ in range(SEQUENCES // 8):
            logits, targets = second_half(model, sequences(8, length, generator))
            right += int((logits.argmax(-1) == targets).sum())
            total += targets.numel()
    return right / total


def train(length, rounds, options):
    """Model trained with this number of rounds, and seconds of training."""
    import torch
    from torch.nn import functional as F

    from xlcli.config import TrainConfig
    from xlcli.optim import Optimizers, lr_factor

    torch.manual_seed(options.seed)
    model = build(shape(length, rounds, options.init_std), options.seed)
    optimizers = Optimizers(model, TrainConfig(), lr=options.lr, native_bfloat16=False)
    generator = torch.Generator().manual_seed(options.seed)
    started = time.monotonic()
    hashed = model.stack.blocks[0].attention
    for step in range(options.steps):
        model.train()
        if options.redraw_every and step % options.redraw_every == 0:
            hashed.redraw(generator)
        logits, targets = second_half(model, sequences(options.batch_size, length, generator))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fraction = step / options.steps
        optimizers.step(lr_factor(TrainConfig(warmup_steps=40), fraction, step), step)
        if step % 50 == 0:
            right = (logits.argmax(-1) == targets).double().mean()
            print(f"{rounds:>5} step {step:5} loss {loss.item():.4f} right {right.item():.4f}", flush=True)
    return model, time.monotonic() - started


def with_rounds(model, length, rounds, options):
    """Model with the same weights and another number of rounds."""
    other = build(shape(length, rounds, options.init_std), options.seed)
    own = {name: tensor for name, tensor in model.state_dict().items() if "rotations" not in name}
    other.load_state_dict(own, strict=False)
    hashed, before = other.stack.blocks[0].attention, model.stack.blocks[0].attention
    if hashed.rotations.shape == before.rotations.shape:
        hashed.rotations.copy_(before.rotations)
    return other


def row(length, rounds, options):
    """Trains one row and scores it in every column."""
    model, seconds = train(length, rounds, options)
    found = {column: round(accuracy(with_rounds(model, length, column, options), length), 4) for column in ROWS}
    keys = ("steps", "batch_size", "lr", "init_std", "redraw_every", "seed")
    print(rounds, found, flush=True)
    return {"accuracy": found, "seconds": round(seconds), **{key: getattr(options, key) for key in keys}}


def read():
    """Saved results: length to row."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def table():
    """Markdown with one table per length."""
    for length, rows in sorted((item for item in read().items() if item[0].isdigit()), key=lambda item: int(item[0])):
        print(f"\nlength {length}\n\n| trained with | " + " | ".join(f"scored {c}" for c in ROWS) + " | steps |")
        print("|---" * (len(ROWS) + 2) + "|")
        for name in ROWS:
            if name in rows:
                cells = [f"{100 * rows[name]['accuracy'][column]:.1f}" for column in ROWS]
                print(f"| {name} | " + " | ".join(cells) + f" | {rows[name]['steps']} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument(
        "--init-std", type=float, default=0.08, help="large: weights of attention should differ at first"
    )
    parser.add_argument("--redraw-every", type=int, default=1, help="steps between fresh directions; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table()
        return
    import torch

    torch.set_num_threads(options.threads)
    for rounds in options.rows.split(","):
        found = row(options.length, rounds, options)
        if options.write:
            results = read()
            results.setdefault(str(options.length), {})[rounds] = found
            results["machine"] = machine()
            RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
