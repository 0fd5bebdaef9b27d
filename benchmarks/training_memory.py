"""Peak memory of training against the estimate of `xlcli train --dry-run`.

Each shape trains in a process of its own, which first trains a very small model so that libraries are loaded. The
increase of peak resident memory is compared with `memory.needed_bytes`. Linux only.

    python benchmarks/training_memory.py [--write]
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "training_memory.json"
SMALL = {
    "dim": 256,
    "n_layers": 6,
    "attention": {"n_heads": 4},
    "position": {"kind": "xl", "n_features": 32},
    "vocab_size": 1024,
}
TRAIN = {"segment_len": 128, "mem_len": 128, "batch_size": 16, "lr": 1e-3, "max_steps": 9}
BFLOAT16 = {"dtype": "bfloat16"}
DROPOUT = dict.fromkeys(("embedding", "attention", "residual", "feedforward"), 0.1)
PUBLISHED = {
    "dim": 256,
    "n_layers": 4,
    "attention": {"n_heads": 8, "head_dim": 32},
    "position": {"kind": "xl", "tied": True},
    "feedforward": {"kind": "relu", "ffn_dim": 1024},
    "norm": {"kind": "layer", "placement": "post"},
    "bias": True,
    "dropout": {"embedding": 0.1, "residual": 0.1, "feedforward": 0.1},
}
WIDE = SMALL | {"dim": 768, "n_layers": 3, "attention": {"n_heads": 12}, "position": {"kind": "xl", "n_features": 64}}
TINY = SMALL | {"dim": 64, "n_layers": 2, "attention": {"n_heads": 2}, "vocab_size": 256}


def with_position(kind, **settings):
    """`SMALL` with this position encoding."""
    return SMALL | {"position": {"kind": kind, **settings}}


def with_attention(kind, position="rope", **settings):
    """`SMALL` with this attention."""
    return with_position(position) | {"attention": {"kind": kind, "n_heads": 4, **settings}}


LONG_MEMORY = TRAIN | {"mem_len": 512, "batch_size": 8}
LONG_SEGMENT = TRAIN | {"segment_len": 256, "batch_size": 8}
ACT = {"kind": "universal", "n_steps": 3, "act": True}
SHAPES = {
    "small": {"model": SMALL, "train": TRAIN},
    "vocab 256": {"model": SMALL | {"vocab_size": 256}, "train": TRAIN},
    "vocab 4096": {"model": SMALL | {"vocab_size": 4096}, "train": TRAIN},
    "bfloat16": {"model": SMALL, "train": TRAIN, "runtime": BFLOAT16},
    "memory 512": {"model": SMALL, "train": TRAIN | {"mem_len": 512, "batch_size": 8}},
    "memory 512, bfloat16": {"model": SMALL, "train": TRAIN | {"mem_len": 512, "batch_size": 8}, "runtime": BFLOAT16},
    "no memory": {"model": SMALL, "train": TRAIN | {"segment_len": 256, "mem_len": 0, "batch_size": 8}},
    "four parts": {"model": SMALL, "train": TRAIN | {"grad_accum": 4}},
    "recomputed": {"model": SMALL, "train": TRAIN | {"recompute_activations": True}},
    "12 layers": {"model": SMALL | {"n_layers": 12}, "train": TRAIN},
    "12 layers, recomputed": {
        "model": SMALL | {"n_layers": 12},
        "train": TRAIN | {"recompute_activations": True},
    },
    "adamw": {"model": SMALL, "train": TRAIN | {"optimizer": "adamw"}},
    "dropout": {"model": SMALL | {"dropout": DROPOUT}, "train": TRAIN},
    "published": {"model": PUBLISHED, "train": TRAIN | {"batch_size": 8, "optimizer": "adamw"}},
    "wide": {"model": WIDE, "train": TRAIN | {"segment_len": 64, "mem_len": 64, "batch_size": 4}},
    "t5": {"model": with_position("t5"), "train": LONG_MEMORY},
    "shaw": {"model": with_position("shaw"), "train": TRAIN},
    "contextual-2": {"model": with_position("contextual-2"), "train": TRAIN},
    "contextual-2, bfloat16": {"model": with_position("contextual-2"), "train": LONG_MEMORY, "runtime": BFLOAT16},
    "clamped": {"model": with_position("xl", clamp_len=64), "train": LONG_MEMORY},
    "local": {"model": with_attention("local", window=32), "train": LONG_SEGMENT},
    "linear": {"model": with_attention("linear"), "train": TRAIN},
    "hashed": {"model": with_attention("lsh", "none", n_buckets=8, bucket_size=16, n_hashes=2), "train": TRAIN},
    "universal, act": {"model": SMALL | {"n_layers": 2, "stack": ACT}, "train": TRAIN},
    "reversible": {"model": SMALL | {"stack": {"kind": "reversible"}}, "train": TRAIN},
    "vocab 16384": {"model": SMALL | {"vocab_size": 16384}, "train": TRAIN},
    "adaptive": {
        "model": SMALL | {"vocab_size": 32768, "embedding": {"cutoffs": [4096, 16384], "div_val": 4}},
        "train": TRAIN,
    },
    "chunked": {"model": SMALL | {"feedforward": {"chunk_len": 16}, "loss_chunk": 16}, "train": TRAIN},
    "tiny": {"model": TINY, "train": TRAIN | {"segment_len": 64, "mem_len": 64, "batch_size": 8}},
}


def train(tree):
    """Trains until memory is full and a step more; the run."""
    import numpy as np

    from xlcli import config
    from xlcli.runtime import make_runtime
    from xlcli.text.tokens import TokenFile
    from xlcli.training.run import TrainingRun

    settings = config.make({"runtime": {"dtype": "float32", "device": "cpu", "threads": 1}}, tree)
    ids = np.random.default_rng(0).integers(0, settings.model.vocab_size, 100_000).astype(np.uint16)
    run = TrainingRun(settings, make_runtime(settings.runtime, training=True), TokenFile(ids, len(ids)), 0)
    for _ in range(2 + -(-settings.train.mem_len // settings.train.segment_len)):
        run.train_step(0.5)
    return run


def measure(tree):
    """Peak of training and what was predicted, in bytes; alters this process."""
    from xlcli import config
    from xlcli.training.memory import needed_bytes

    smallest = {"dim": 32, "n_layers": 1, "vocab_size": 64, "attention": {"n_heads": 2, "head_dim": 16}}
    train(config.merge(tree, {"model": smallest, "train": {"batch_size": 4}}))
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")
    run = train(tree)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return {"peak": peak - resident, "predicted": needed_bytes(run.config, run.runtime, run.model.n_parameters)}


def measure_apart(name):
    """`measure` of a shape in a process of its own, with the ratio of predicted to measured."""
    done = subprocess.run([sys.executable, __file__, "--shape", name], check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    return found | {"ratio": round(found["predicted"] / found["peak"], 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name}")
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(measure(SHAPES[options.shape])))
        return
    results = {}
    for name in SHAPES:
        results[name] = measure_apart(name)
        print(f"{name:22} {results[name]}", flush=True)
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
