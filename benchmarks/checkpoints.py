"""Models of one training after growing numbers of tokens, for `reading.py` and `pairs.py`.

    python benchmarks/checkpoints.py BOOKS/train --valid BOOKS/valid/kidnapped.txt --out models/growth

Trains preset `small` with a vocabulary of 2,048 (3.8 M parameters) from nothing, at constant rates after the same
warmup, in one run that stops at each number of tokens, and copies its weights there: models/growth-500k and so on.
Rates do not depend on the budget, so each copy equals, to the bit, a run of that budget. One thread. A restarted
script continues the run.
"""

import argparse
from pathlib import Path

from runs import xlcli

TOKENS = (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
SETTINGS = {"train.lr_schedule": "constant", "train.warmup_steps": 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--valid", required=True)
    parser.add_argument("--out", type=Path, default=Path("models/growth"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--vocab-size", type=int, default=2048)
    options = parser.parse_args()
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    shape = ["--preset", options.preset, "--vocab-size", str(options.vocab_size), "--init", "none", *sets]
    train = ["train", *options.text, "--valid", options.valid, *shape, "-o", str(options.out), "-q", "--threads", "1"]
    for tokens in sorted(options.tokens):
        copy = options.out.with_name(f"{options.out.name}-{tokens // 1000}k")
        if copy.exists():
            continue
        resume = ["--resume"] if options.out.exists() else []
        xlcli(*train, "--max-tokens", str(tokens), *resume, cwd=Path())
        xlcli("models", "copy", str(options.out), str(copy), cwd=Path())
        print(copy, flush=True)


if __name__ == "__main__":
    main()
