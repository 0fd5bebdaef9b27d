"""Training on several processes: bytes that each sends in a step, beside the arithmetic, and tokens per second.

Bytes are those of the loopback device, so nothing else may use it. In a network of its own:

    unshare -rn bash -c "ip link set lo up; python benchmarks/ranks.py --processes 2 --mem-len 0 128 512"

`--processes 1 --threads 2` measures a single process for comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from xlcli import config, presets
from xlcli.ops.layers import has_bfloat16_units
from xlcli.ranks import Ranks, join
from xlcli.runtime import make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun

WARMUP = 3
"""Number of steps before the measurement."""


def sent_bytes() -> int:
    """Bytes sent so far over the loopback device."""
    [line] = [row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("lo:")]
    return int(line.partition(":")[2].split()[8])


def measure(ranks: Ranks, arguments: argparse.Namespace, mem_len: int) -> None:
    """Prints the figures of one memory length."""
    train = {"batch_size": arguments.batch_size, "mem_len": mem_len, "segment_len": 128, "lr": 1e-3}
    train |= {"optimizer": arguments.optimizer, "grad_accum": arguments.grad_accum}
    tree = {"train": train, "runtime": {"shard": arguments.shard, "dtype": "float32", "threads": arguments.threads}}
    settings = config.change(presets.configurations({}, arguments.preset)[arguments.preset], tree)
    settings = config.change(settings, {"model": {"vocab_size": 256}})
    text = np.random.default_rng(0).integers(32, 127, 2**18).astype(np.uint8)
    runtime = make_runtime(settings.runtime, training=True, ranks=ranks)
    run = TrainingRun(settings, runtime, TokenFile(text, len(text)), 10)
    for _ in range(WARMUP):
        run.train_step(0.0)
    ranks.barrier()
    before, started, tokens = sent_bytes(), time.monotonic(), run.counters.tokens
    for _ in range(arguments.steps):
        run.train_step(0.0)
    ranks.barrier()
    seconds, sent = time.monotonic() - started, sent_bytes() - before
    if not ranks.is_first:
        return
    n, size = ranks.size, run.model.n_parameters
    hidden = sum(p.numel() for p in run.optimizers.optimizers[0][0].param_groups[0]["params"])
    matrices = hidden if arguments.optimizer == "muon" else 0
    numbers = 2 * size  # an all-reduce in a ring, with which gloo also reduces gradients that are divided
    if arguments.shard:
        blocks = sum(p.numel() for block in run.model.stack.blocks for p in block.parameters())
        numbers += arguments.grad_accum * (size + blocks) + matrices
    expected = (n - 1) / n * (4 * numbers + (2 if has_bfloat16_units(runtime.device) else 4) * matrices)
    speed = (run.counters.tokens - tokens) / seconds
    print(
        f"processes {n}  mem_len {mem_len:4}  parameters {size:,}  {speed:,.0f} tokens/s  "
        f"sent per rank and step {sent / n / arguments.steps:,.0f} bytes, by arithmetic {expected:,.0f}",
        flush=True,
    )


def main() -> None:
    """Measures, after starting the other processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mem-len", type=int, nargs="+", default=[128])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shard", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.processes > 1 and "RANK" not in os.environ:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": str(arguments.processes)}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env=os.environ | address | {"RANK": str(rank)})
            for rank in range(arguments.processes)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
    with join() as ranks:
        for mem_len in arguments.mem_len:
            measure(ranks, arguments, mem_len)


if __name__ == "__main__":
    main()
