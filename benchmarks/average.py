"""Averages the weights of models of one shape, such as those of successive runs.

    python benchmarks/average.py FOLDER MODEL=SHARE MODEL=SHARE ...

FOLDER becomes a copy of the last model whose weights are the sum of all, each times its share, in float32. All have the
same settings and vocabulary, and the shares sum to 1. The record names the models and has no score.
"""

import argparse
import math
from pathlib import Path

import torch

from xlcli.store.discover import find
from xlcli.store.folder import copy_model, load, save_model
from xlcli.store.layout import write_record
from xlcli.store.weights import weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shares", metavar="MODEL=SHARE", nargs="+")
    options = parser.parse_args()
    parts = [(load(find(name)), float(share)) for name, _, share in (part.rpartition("=") for part in options.shares)]
    last = parts[-1][0]
    if not math.isclose(sum(share for _, share in parts), 1):
        parser.error("the shares do not sum to 1")
    mean = {name: torch.zeros_like(tensor) for name, tensor in weights(last.network).items()}
    for model, share in parts:
        if (model.config.model, model.tokenizer.fingerprint) != (last.config.model, last.tokenizer.fingerprint):
            parser.error(f"settings or vocabulary of {model.folder} are others than those of {last.folder}")
        for name, tensor in weights(model.network).items():
            mean[name] += share * tensor
    origins = [{"model": model.name, "tokens": model.record.get("tokens"), "share": share} for model, share in parts]
    copy_model(last.folder, options.folder, "float32")
    save_model(options.folder, last.config, mean, last.tokenizer, {})
    unscored = {key: value for key, value in last.record.items() if key not in ("bits_per_byte", "scored")}
    write_record(options.folder, unscored | {"mean": origins})


if __name__ == "__main__":
    main()
