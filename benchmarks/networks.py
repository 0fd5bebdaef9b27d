"""Time of a training step on processes that a slow network joins, beside the plan of `scaling.py`.

Each process has a network namespace of its own. Virtual Ethernet joins them by a bridge, and a token bucket (`tc tbf`)
limits what each sends; rates are those of frames, of which TCP takes 4 %. All of it is made in namespaces that end with
the command (Linux, iproute2):

    unshare -rnm python benchmarks/networks.py --processes 2 4 --preset small --mbit 100 300 1000 3000

Steps with exchange alternate with steps of as many processes that exchange nothing, each with its part of the batch.
Their median is the rate of computation of the plan; its latency is that of a sum of 8 bytes, its bandwidth the limit.
Every bandwidth is a line of JSON, also in the file `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scaling import Network, plan, row_operations, sizes

from xlcli import config, presets
from xlcli.config import Config
from xlcli.ranks import SINGLE, Ranks, join
from xlcli.runtime import make_runtime
from xlcli.text.tokens import TokenFile
from xlcli.training.run import TrainingRun

LATENCY_SUMS = 100
"""Number of sums whose mean duration gives the latency."""
BURST_SECONDS, LEAST_BURST = 0.002, 32 * 1024
"""Bytes that a link sends at once at full speed: those of this time, or this number."""


def settings(arguments: argparse.Namespace, **train: object) -> Config:
    """Configuration of the measured runs."""
    shared = {"segment_len": 128, "mem_len": 128, "lr": 1e-3, "optimizer": arguments.optimizer}
    shared |= {"batch_size": arguments.batch_size, "grad_accum": arguments.grad_accum}
    runtime = {"shard": arguments.shard, "dtype": "float32", "threads": 1, "device": "cpu"}
    preset = presets.configurations({}, arguments.preset)[arguments.preset]
    return config.change(preset, {"train": shared | train, "runtime": runtime, "model": {"vocab_size": 256}})


def begin(made: Config, ranks: Ranks) -> TrainingRun:
    """A run whose memory is full."""
    text = np.random.default_rng(0).integers(32, 127, 2**18).astype(np.uint8)
    run = TrainingRun(made, make_runtime(made.runtime, training=True, ranks=ranks), TokenFile(text, len(text)), 10)
    for _ in range(2):
        run.train_step(0.0)
    return run


def step_seconds(run: TrainingRun, ranks: Ranks) -> float:
    """Duration of a step that all ranks begin together, until the last one has taken it."""
    ranks.barrier()
    started = time.monotonic()
    run.train_step(0.0)
    return max(ranks.gather(time.monotonic() - started))


def latency(ranks: Ranks) -> float:
    """Seconds for each of the successive messages of a small sum."""
    one = torch.ones(1, dtype=torch.float64)
    ranks.barrier()
    started = time.monotonic()
    for _ in range(LATENCY_SUMS):
        ranks.sum(one)
    return (time.monotonic() - started) / LATENCY_SUMS / (2 * (ranks.size - 1))


def measure(ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Prints planned and measured steps at every bandwidth."""
    n = ranks.size
    made = settings(arguments)
    own = settings(arguments, batch_size=arguments.batch_size // n)
    alone, together = begin(own, SINGLE), begin(made, ranks)
    per_row = row_operations(own, alone.runtime)
    operations = per_row * own.train.batch_size + sizes(alone.model, own).operations
    waited = latency(ranks)
    for mbit in arguments.mbit:
        limit(mbit)
        step_seconds(together, ranks)
        pairs = [(step_seconds(alone, ranks), step_seconds(together, ranks)) for _ in range(arguments.steps)]
        computed, measured = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        network = Network(flops=operations / computed, bandwidth=mbit * 1e6 / 8, latency=waited)
        planned = plan(made, together.runtime, n, per_row, network)
        row = {"preset": arguments.preset, "optimizer": arguments.optimizer, "shard": arguments.shard, "processes": n}
        row |= {"batch_size": arguments.batch_size, "grad_accum": arguments.grad_accum, "mbit": mbit}
        row |= planned | {"latency": waited, "alone": computed, "measured": measured}
        if ranks.is_first:
            show(row, arguments.out)


def show(row: dict[str, object], out: Path | None) -> None:
    """Prints a row as JSON, and appends it to a file."""
    line = json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()})
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def limit(mbit: float) -> None:
    """Limits what this process sends."""
    burst = max(LEAST_BURST, round(mbit * 1e6 / 8 * BURST_SECONDS))
    shape(f"tc qdisc replace dev eth0 root tbf rate {mbit}mbit burst {burst} latency 200ms")


def shape(*commands: str) -> None:
    """Runs commands of iproute2."""
    for command in commands:
        subprocess.run(command.split(), check=True)


def make_network(n: int) -> None:
    """Namespaces of `n` processes, joined by a bridge."""
    shape("mount -t tmpfs tmpfs /run", "ip link add switch type bridge", "ip link set switch up")
    for i in range(n):
        name, inside = f"rank{i}", f"ip -n rank{i}"
        shape(f"ip netns add {name}", f"ip link add {name} type veth peer name eth0 netns {name}")
        shape(f"ip link set {name} master switch up", f"{inside} addr add 10.0.0.{i + 1}/24 dev eth0")
        shape(f"{inside} link set eth0 up", f"{inside} link set lo up")


def main() -> None:
    """Makes the network and starts the processes in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if "RANK" in os.environ:
        with join() as ranks:
            measure(ranks, arguments)
        return
    make_network(max(arguments.processes))
    common = os.environ | {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    common |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    for n in arguments.processes:
        common |= {"WORLD_SIZE": str(n), "MASTER_PORT": str(29500 + n)}
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"rank{i}", sys.executable, *sys.argv], env=common | {"RANK": str(i)}
            )
            for i in range(n)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main()
