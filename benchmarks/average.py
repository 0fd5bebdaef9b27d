"""Averages the weights of models of one shape, such as those of successive runs.

    python benchmarks/average.py FOLDER MODEL=SHARE MODEL=SHARE ...

FOLDER becomes a copy of the last model whose weights are the sum of all, each times its share, in float32. Its record
has no score.
"""

import argparse
from pathlib import Path

from xlcli.store.discover import find
from xlcli.store.folder import copy_model, load, save_model
from xlcli.store.layout import write_record
from xlcli.store.weights import weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shares", metavar="MODEL=SHARE", nargs="+")
    options = parser.parse_args()
    parts = [(find(name), float(share)) for name, _, share in (part.rpartition("=") for part in options.shares)]
    copy_model(parts[-1][0], options.folder, "float32")
    copied = load(options.folder)
    mean = {name: 0 * tensor for name, tensor in weights(copied.network).items()}
    for folder, share in parts:
        for name, tensor in weights(load(folder).network).items():
            mean[name] += share * tensor
    save_model(options.folder, copied.config, mean, copied.tokenizer, {})
    unscored = {key: value for key, value in copied.record.items() if key not in ("bits_per_byte", "scored")}
    write_record(options.folder, unscored)


if __name__ == "__main__":
    main()
